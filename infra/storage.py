"""What outlives a deployment of the pipeline: the bucket with runs and registry, the lock table, image repositories, logs."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.settings import Settings
from pipeline.contract import RESUME, RETENTION_TAG

KEEP = RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE
"""Kept for good, except when the very first deployment is rolled back: what has a name would be in the next one's way."""

RETENTION = {
    30: logs.RetentionDays.ONE_MONTH,
    90: logs.RetentionDays.THREE_MONTHS,
    180: logs.RetentionDays.SIX_MONTHS,
    365: logs.RetentionDays.ONE_YEAR,
    731: logs.RetentionDays.TWO_YEARS,
}

LOCK_KEY = "name"
"""Partition key of the lock table: the registry name that the lock guards."""


def job_log_group(name: str) -> str:
    """Name of the log group of all jobs of a deployment."""
    return f"/{name}/jobs"


class Storage(Construct):
    """Everything here is kept when its stack is deleted.

    Attributes:
        bucket: `runs/`, `registry/`, `data/` and `graphs/`.
        lock_table: one item per registry name: {name, owner, run, since}.
        neuron_repository, cpu_repository: container images, immutable tags.
        job_logs, machine_logs, watch_logs: of all jobs, of the state machine, of its watches. They have names
            and are kept, so in the pipeline's own stack they would stop it from being deployed a second time.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        keep = settings.retention
        expire = s3.LifecycleRule(
            id="expire",
            expiration=Duration.days(keep.log_days),
            # In a versioned bucket the expiration alone only hides an object.
            noncurrent_version_expiration=Duration.days(1),
        )
        log_bucket = self._bucket("AccessLogs", lifecycle_rules=[expire])
        self.bucket = self._bucket(
            "Bucket",
            server_access_logs_bucket=log_bucket,
            server_access_logs_prefix="bucket/",
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="old-versions",
                    noncurrent_version_expiration=Duration.days(keep.noncurrent_days),
                    abort_incomplete_multipart_upload_after=Duration.days(keep.upload_days),
                    # What stays of a deleted object when its last version is gone.
                    expired_object_delete_marker=True,
                ),
                # By tag: a rule's prefix has no place for the run's id, which stands before the folder.
                s3.LifecycleRule(
                    id="resume",
                    tag_filters={RETENTION_TAG: RESUME},
                    expiration=Duration.days(keep.resume_days),
                    # Training removes its older checkpoints itself, and they are the largest of all objects.
                    noncurrent_version_expiration=Duration.days(1),
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
            removal_policy=KEEP,
        )
        self.neuron_repository = self._repository("NeuronImage", f"{settings.name}/neuron")
        self.cpu_repository = self._repository("CpuImage", f"{settings.name}/cpu")
        retention = RETENTION[keep.log_days]
        self.job_logs = self._log_group("JobLogs", job_log_group(settings.name), retention)
        # Step Functions writes only to groups under this prefix without a policy of its own for each.
        self.machine_logs = self._log_group("MachineLogs", f"/aws/vendedlogs/states/{settings.name}", retention)
        self.watch_logs = self._log_group("WatchLogs", f"/aws/vendedlogs/states/{settings.name}-watch", retention)

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
            removal_policy=KEEP,
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
            removal_policy=KEEP,
        )

    def _log_group(self, construct_id: str, name: str, retention: logs.RetentionDays) -> logs.LogGroup:
        return logs.LogGroup(self, construct_id, log_group_name=name, retention=retention, removal_policy=KEEP)
