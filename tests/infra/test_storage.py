"""Resources that outlive the pipeline."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.contract import retention_tags


def test_buckets_are_private_versioned_encrypted_and_take_tls_only(deployment: Any) -> None:
    buckets = deployment.resources("AWS::S3::Bucket")
    assert len(buckets) == 2
    for bucket in buckets:
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
        assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
        assert "BucketEncryption" in bucket
        assert bucket["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    policies = deployment.resources("AWS::S3::BucketPolicy")
    assert len(policies) == 2
    for policy in policies:
        denied = [statement for statement in policy["PolicyDocument"]["Statement"] if statement["Effect"] == "Deny"]
        assert any(statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}} for statement in denied)


def test_a_key_of_one_s_own_encrypts_everything_that_is_stored(small_deployment: Any) -> None:
    key = "arn:aws:kms:us-west-2:123456789012:key/0a1b2c3d"
    by_default = [
        rule["ServerSideEncryptionByDefault"]
        for bucket in small_deployment.resources("AWS::S3::Bucket")
        for rule in bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    ]
    # Access logs are delivered to no bucket with such a key.
    assert {one["SSEAlgorithm"]: one.get("KMSMasterKeyID") for one in by_default} == {"AES256": None, "aws:kms": key}
    assert small_deployment.only("AWS::DynamoDB::Table")["SSESpecification"]["KMSMasterKeyId"] == key
    for repository in small_deployment.resources("AWS::ECR::Repository"):
        assert repository["EncryptionConfiguration"] == {"EncryptionType": "KMS", "KmsKey": key}
    assert {group["KmsKeyId"] for group in small_deployment.resources("AWS::Logs::LogGroup")} == {key}
    for template in small_deployment.resources("AWS::EC2::LaunchTemplate"):
        assert [disk["Ebs"]["KmsKeyId"] for disk in template["LaunchTemplateData"]["BlockDeviceMappings"]] == [key]


def test_the_data_is_kept_when_stacks_go(deployment: Any) -> None:
    kept = {"AWS::S3::Bucket", "AWS::DynamoDB::Table", "AWS::ECR::Repository", "AWS::Logs::LogGroup"}
    found = [resource for resource in deployment.data["Resources"].values() if resource["Type"] in kept]
    assert {resource["Type"] for resource in found} == kept
    assert {resource["DeletionPolicy"] for resource in found} == {"RetainExceptOnCreate"}


def test_nothing_of_the_pipeline_is_kept(deployment: Any) -> None:
    """Its stack is deleted and deployed again around the same data: what it left each time would cost and pile up."""
    kept = [name for name, one in deployment.pipeline["Resources"].items() if one.get("DeletionPolicy", "Delete") != "Delete"]
    assert kept == []


def test_access_logs_are_gone_after_their_time(deployment: Any) -> None:
    rules = [rule for bucket in deployment.resources("AWS::S3::Bucket") for rule in bucket["LifecycleConfiguration"]["Rules"]]
    [rule] = [rule for rule in rules if rule["Id"] == "expire"]
    assert rule["ExpirationInDays"] == 180
    assert rule["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}


def rules(deployment: Any) -> dict[str, dict[str, Any]]:
    found = [rule for bucket in deployment.resources("AWS::S3::Bucket") for rule in bucket["LifecycleConfiguration"]["Rules"]]
    return {rule["Id"]: rule for rule in found}


@pytest.mark.parametrize(("fixture", "days"), [("deployment", (60, 30, 3, 180)), ("small_deployment", (7, 8, 1, 30))])
def test_what_is_kept_is_kept_as_long_as_set(
    request: pytest.FixtureRequest, fixture: str, days: tuple[int, int, int, int]
) -> None:
    resume, noncurrent, upload, log = days
    deployment = request.getfixturevalue(fixture)
    found = rules(deployment)
    assert found["resume"]["ExpirationInDays"] == resume
    assert found["old-versions"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": noncurrent}
    assert found["old-versions"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": upload}
    assert found["expire"]["ExpirationInDays"] == log
    assert {group["RetentionInDays"] for group in deployment.resources("AWS::Logs::LogGroup")} == {log}


def test_only_what_is_tagged_expires(deployment: Any) -> None:
    """S3 takes no tags together with the end of uploads, and no days together with the end of delete markers."""
    found = rules(deployment)
    expiring = {name for name, rule in found.items() if "ExpirationInDays" in rule}
    assert expiring == {"resume", "expire"}
    checkpoint = retention_tags("runs/week-1/train/checkpoints/step-00000100/model.safetensors")
    assert {tag["Key"]: tag["Value"] for tag in found["resume"]["TagFilters"]} == checkpoint
    # What later runs need of earlier ones, and share.
    assert not any(map(retention_tags, ("seen/week-1/versions.bin", "ingested/rows/shard/facts-00000.arrow")))
    assert "AbortIncompleteMultipartUpload" not in found["resume"]
    assert found["old-versions"]["ExpiredObjectDeleteMarker"] is True
    assert "TagFilters" not in found["old-versions"]


def test_what_is_not_read_moves_to_cheaper_storage(deployment: Any, small_deployment: Any) -> None:
    """One that answers as fast; and nothing but checkpoints, logs and old versions ever expires."""
    rule = rules(deployment)["cold"]
    assert rule["Transitions"] == [{"StorageClass": "INTELLIGENT_TIERING", "TransitionInDays": 30}]
    assert not any(key.startswith(("Expiration", "NoncurrentVersionExpiration")) for key in rule)
    assert "cold" not in rules(small_deployment)


def test_images_with_a_tag_never_expire(deployment: Any) -> None:
    """Registered job definitions name them, and ECR does not know those. Bases are named by digest and never expire."""
    repositories = {each["RepositoryName"]: each for each in deployment.resources("AWS::ECR::Repository")}
    assert "LifecyclePolicy" not in repositories.pop("trnpipe/neuron-base")
    assert len(repositories) == 3
    for repository in repositories.values():
        found = json.loads(repository["LifecyclePolicy"]["LifecyclePolicyText"])["rules"]
        assert [one["selection"]["tagStatus"] for one in found] == ["untagged"]
        assert {one["selection"]["countNumber"] for one in found} == {30}


def test_the_lock_table_is_keyed_by_registry_name(deployment: Any) -> None:
    table = deployment.only("AWS::DynamoDB::Table")
    assert table["KeySchema"] == [{"AttributeName": "name", "KeyType": "HASH"}]
    assert table["BillingMode"] == "PAY_PER_REQUEST"


def test_image_tags_never_move(deployment: Any) -> None:
    repositories = {each["RepositoryName"]: each for each in deployment.resources("AWS::ECR::Repository")}
    assert set(repositories) == {"trnpipe/neuron", "trnpipe/cuda", "trnpipe/cpu", "trnpipe/neuron-base"}
    assert {each["ImageTagMutability"] for each in repositories.values()} == {"IMMUTABLE"}
