"""What outlives the pipeline."""

from __future__ import annotations

from typing import Any


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
    kept = {"AWS::S3::Bucket", "AWS::DynamoDB::Table", "AWS::ECR::Repository"}
    found = [resource for resource in deployment.data["Resources"].values() if resource["Type"] in kept]
    assert {resource["Type"] for resource in found} == kept
    assert {resource["DeletionPolicy"] for resource in found} == {"Retain"}


def test_the_lock_table_is_keyed_by_registry_name(deployment: Any) -> None:
    table = deployment.only("AWS::DynamoDB::Table")
    assert table["KeySchema"] == [{"AttributeName": "name", "KeyType": "HASH"}]
    assert table["BillingMode"] == "PAY_PER_REQUEST"


def test_image_tags_never_move(deployment: Any) -> None:
    repositories = {each["RepositoryName"]: each for each in deployment.resources("AWS::ECR::Repository")}
    assert set(repositories) == {"trnpipe/neuron", "trnpipe/cpu"}
    assert {each["ImageTagMutability"] for each in repositories.values()} == {"IMMUTABLE"}
