"""What outlives a deployment of the pipeline: the bucket with runs and registry, the lock table, the image repositories."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.settings import Settings

LOCK_KEY = "name"
"""Partition key of the lock table: the registry name that the lock guards."""


class Storage(Construct):
    """Everything here is kept when its stack is deleted.

    Attributes:
        bucket: `runs/`, `registry/`, `data/` and `graphs/`.
        lock_table: one item per registry name: {name, owner, run, since}.
        neuron_repository, cpu_repository: container images, immutable tags.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        log_bucket = self._bucket(
            "AccessLogs", lifecycle_rules=[s3.LifecycleRule(id="expire", expiration=Duration.days(settings.log_retention_days))]
        )
        self.bucket = self._bucket(
            "Bucket",
            server_access_logs_bucket=log_bucket,
            server_access_logs_prefix="bucket/",
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="old-versions",
                    noncurrent_version_expiration=Duration.days(30),
                    abort_incomplete_multipart_upload_after=Duration.days(3),
                ),
            ],
        )
        self.lock_table = dynamodb.Table(
            self,
            "Lock",
            partition_key=dynamodb.Attribute(name=LOCK_KEY, type=dynamodb.AttributeType.STRING),
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            encryption=dynamodb.TableEncryption.AWS_MANAGED,
            point_in_time_recovery_specification=dynamodb.PointInTimeRecoverySpecification(point_in_time_recovery_enabled=True),
            deletion_protection=True,
            removal_policy=RemovalPolicy.RETAIN,
        )
        self.neuron_repository = self._repository("NeuronImage", f"{settings.name}/neuron")
        self.cpu_repository = self._repository("CpuImage", f"{settings.name}/cpu")

    def _bucket(
        self,
        construct_id: str,
        *,
        lifecycle_rules: list[s3.LifecycleRule],
        server_access_logs_bucket: s3.IBucket | None = None,
        server_access_logs_prefix: str | None = None,
    ) -> s3.Bucket:
        return s3.Bucket(
            self,
            construct_id,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            encryption=s3.BucketEncryption.S3_MANAGED,
            enforce_ssl=True,
            versioned=True,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=RemovalPolicy.RETAIN,
            lifecycle_rules=lifecycle_rules,
            server_access_logs_bucket=server_access_logs_bucket,
            server_access_logs_prefix=server_access_logs_prefix,
        )

    def _repository(self, construct_id: str, name: str) -> ecr.Repository:
        return ecr.Repository(
            self,
            construct_id,
            repository_name=name,
            image_scan_on_push=True,
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            removal_policy=RemovalPolicy.RETAIN,
        )
