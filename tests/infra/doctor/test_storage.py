"""Buckets that the settings name: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from infra.doctor import storage
from infra.doctor.asking import Denied, Refused
from infra.doctor.blueprint import Blueprint


def test_every_bucket_that_runs_read_is_looked_at(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    findings = look(storage.buckets, other_blueprint, {"s3:HeadBucket": {"BucketRegion": "us-east-2"}})
    assert bad(findings) == []
    assert [finding.value.split(" ")[0] for finding in findings] == ["shared", "their-caches", "their-data", "their-models"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Refused("404", "Not Found"), ("problem", "the bucket shared is not there")),
        (Denied("s3:ListBucket"), ("warning", "the bucket shared does not let you look")),
        ({"BucketRegion": "eu-west-1"}, ("warning", "the bucket shared is in another region")),
    ],
    ids=["absent", "denied", "elsewhere"],
)
def test_a_bucket_that_is_not_as_it_should_be(
    other_blueprint: Blueprint, look: Any, bad: Any, answer: Any, expected: Any
) -> None:
    assert bad(look(storage.buckets, other_blueprint, {"s3:HeadBucket": answer}))[0] == expected


def test_another_region_cannot_be_reached_from_a_vpc_of_our_own(blueprint: Blueprint, look: Any, bad: Any) -> None:
    answers = {"s3:HeadBucket": {"BucketRegion": "eu-west-1"}}
    findings = look(storage.buckets, blueprint, answers, read=("s3://shared/more",))
    assert bad(findings) == [("problem", "the bucket shared is in another region")]
    assert look(storage.buckets, blueprint, answers) == []
