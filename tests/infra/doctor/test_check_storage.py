"""Buckets that the settings name: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from infra.doctor import check_storage
from infra.doctor.asking import Denied, Refused
from infra.doctor.blueprint import Blueprint


def test_every_bucket_that_runs_read_is_looked_at(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    findings = look(check_storage.buckets, other_blueprint, {"s3:HeadBucket": {"BucketRegion": "us-east-2"}})
    assert bad(findings) == []
    assert [finding.value.split(" ")[0] for finding in findings] == [
        "shared",
        "their-caches",
        "their-catalog",
        "their-data",
        "their-models",
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Refused("404", "Not Found"), ("problem", "the bucket shared does not exist")),
        (Denied("s3:ListBucket"), ("warning", "the bucket shared denies access to these credentials")),
        ({"BucketRegion": "eu-west-1"}, ("warning", "the bucket shared is in another region")),
    ],
    ids=["absent", "denied", "elsewhere"],
)
def test_a_bucket_that_is_not_as_it_should_be(
    other_blueprint: Blueprint, look: Any, bad: Any, answer: Any, expected: Any
) -> None:
    assert bad(look(check_storage.buckets, other_blueprint, {"s3:HeadBucket": answer}))[0] == expected


def test_another_region_cannot_be_reached_from_a_vpc_of_our_own(blueprint: Blueprint, look: Any, bad: Any) -> None:
    answers = {"s3:HeadBucket": {"BucketRegion": "eu-west-1"}}
    findings = look(check_storage.buckets, blueprint, answers, read=("s3://shared/more",))
    assert bad(findings) == [("problem", "the bucket shared is in another region")]
    assert look(check_storage.buckets, blueprint, answers) == []


def test_the_first_run_needs_an_initial_model(blueprint: Blueprint, look: Any, bad: Any) -> None:
    config = {"model": {"initial": "s3://their-models/first"}}
    assert bad(look(check_storage.initial_model, blueprint, {})) == [("warning", "model.initial is not set")]
    assert bad(look(check_storage.initial_model, blueprint, {}, config=config)) == []


def test_the_key_of_the_deployment_is_one_that_jobs_may_use(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    key = "arn:aws:kms:us-east-2:123456789012:key/ours"
    answers = {"s3:GetBucketEncryption": encrypted(key)}
    assert bad(look(check_storage.encryption, other_blueprint, answers, kms_keys=())) != []
    assert bad(look(check_storage.encryption, other_blueprint, answers, kms_keys=(), customer_key=key)) == []


def encrypted(key: str | None) -> dict[str, Any]:
    by_default = {"SSEAlgorithm": "aws:kms", **({"KMSMasterKeyID": key} if key else {})}
    return {"ServerSideEncryptionConfiguration": {"Rules": [{"ApplyServerSideEncryptionByDefault": by_default}]}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (encrypted(None), []),
        (encrypted("arn:aws:kms:us-east-2:123456789012:alias/aws/s3"), []),
        (encrypted("arn:aws:kms:us-east-2:210987654321:key/0a1b2c3d"), []),
        (encrypted("0a1b2c3d"), []),
        (Refused("ServerSideEncryptionConfigurationNotFoundError", ""), []),
        (encrypted("arn:aws:kms:us-east-2:210987654321:key/other"), [("problem", "jobs may not decrypt the bucket shared")]),
        (encrypted("alias/theirs"), [("warning", "the bucket shared names its key by an alias")]),
        (Denied("s3:GetEncryptionConfiguration"), [("warning", "the encryption of the bucket shared cannot be read")]),
    ],
)
def test_the_key_of_an_input_is_one_that_jobs_may_use(
    other_blueprint: Blueprint, look: Any, bad: Any, answer: Any, expected: Any
) -> None:
    findings = look(check_storage.encryption, other_blueprint, {"s3:GetBucketEncryption": answer})
    assert bad(findings)[:1] == expected
