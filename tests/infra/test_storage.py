"""What outlives the pipeline."""

from __future__ import annotations

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


def test_the_data_is_kept_when_stacks_go(deployment: Any) -> None:
    kept = {"AWS::S3::Bucket", "AWS::DynamoDB::Table", "AWS::ECR::Repository", "AWS::Logs::LogGroup"}
    found = [resource for resource in deployment.data["Resources"].values() if resource["Type"] in kept]
    assert {resource["Type"] for resource in found} == kept
    assert {resource["DeletionPolicy"] for resource in found} == {"RetainExceptOnCreate"}


def test_nothing_that_is_kept_stands_in_the_way_of_the_next_deployment(deployment: Any) -> None:
    """A kept resource with a name of ours would make the next deployment of the pipeline's stack fail: it exists already."""
    for resource in deployment.pipeline["Resources"].values():
        if resource.get("DeletionPolicy", "Delete") != "Delete":
            assert not [key for key in resource["Properties"] if key in ("LogGroupName", "BucketName", "TableName", "KeyName")]


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
    """S3 takes no tags beside the end of uploads, and no days beside the end of delete markers."""
    found = rules(deployment)
    expiring = {name for name, rule in found.items() if "ExpirationInDays" in rule}
    assert expiring == {"resume", "expire"}
    checkpoint = retention_tags("runs/week-1/train/checkpoints/step-00000100/model.safetensors")
    assert {tag["Key"]: tag["Value"] for tag in found["resume"]["TagFilters"]} == checkpoint
    assert "AbortIncompleteMultipartUpload" not in found["resume"]
    assert found["old-versions"]["ExpiredObjectDeleteMarker"] is True
    assert "TagFilters" not in found["old-versions"]


def test_the_lock_table_is_keyed_by_registry_name(deployment: Any) -> None:
    table = deployment.only("AWS::DynamoDB::Table")
    assert table["KeySchema"] == [{"AttributeName": "name", "KeyType": "HASH"}]
    assert table["BillingMode"] == "PAY_PER_REQUEST"


def test_image_tags_never_move(deployment: Any) -> None:
    repositories = {each["RepositoryName"]: each for each in deployment.resources("AWS::ECR::Repository")}
    assert set(repositories) == {"trnpipe/neuron", "trnpipe/cpu"}
    assert {each["ImageTagMutability"] for each in repositories.values()} == {"IMMUTABLE"}
