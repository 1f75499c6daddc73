"""Resources that outlive a deployment of the pipeline: the bucket, the lock table, image repositories, logs."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.setting_sections import Marker
from infra.settings import Settings, base_repository
from pipeline.contract import RESUME, RETENTION_TAG
from pipeline.cost import IMAGE_KINDS

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


def customer_key(scope: Construct, settings: Settings) -> kms.IKey | None:
    """The key that encrypts everything stored, None for keys of AWS."""
    return kms.Key.from_key_arn(scope, "CustomerKey", settings.customer_key) if settings.customer_key else None


class Storage(Construct):
    """Everything here is kept when its stack is deleted.

    Attributes:
        bucket: `runs/`, `registry/`, `data/`, `ingested/`, `seen/`, `graphs/` and `images/`.
        lock_table: one item per registry name: {name, owner, run, since}.
        repositories: kind of image -> its repository; tags never move.
        base_repository: copies of the images that the Neuron image was built on.
        job_logs, machine_logs, watch_logs: of all jobs, of the state machine, of its watches. They have names
            and are kept, so in the pipeline's own stack they would stop it from being deployed a second time.
        build_logs: of the builds of images.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        keep = settings.retention
        self._key = customer_key(self, settings)
        expire = s3.LifecycleRule(
            id="expire",
            expiration=Duration.days(keep.log_days),
            # In a versioned bucket the expiration alone only hides an object.
            noncurrent_version_expiration=Duration.days(1),
        )
        cold = s3.LifecycleRule(
            id="cold",
            transitions=[
                # Cheaper storage for objects that nothing reads; reading one later costs nothing and takes no longer.
                s3.Transition(storage_class=s3.StorageClass.INTELLIGENT_TIERING, transition_after=Duration.days(keep.cold_days))
            ],
        )
        self.bucket = self._bucket(
            "Bucket",
            key=self._key,
            # S3 delivers access logs to no bucket with a key of KMS
            # (https://docs.aws.amazon.com/AmazonS3/latest/userguide/enable-server-access-logging.html).
            server_access_logs_bucket=self._bucket("AccessLogs", key=None, lifecycle_rules=[expire]),
            server_access_logs_prefix="bucket/",
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="old-versions",
                    noncurrent_version_expiration=Duration.days(keep.noncurrent_days),
                    abort_incomplete_multipart_upload_after=Duration.days(keep.upload_days),
                    # What stays of a deleted object when its last version is gone.
                    expired_object_delete_marker=True,
                ),
                # By tag: the run's id precedes the folder in a key, and a rule's prefix has no wildcard.
                s3.LifecycleRule(
                    id="resume",
                    tag_filters={RETENTION_TAG: RESUME},
                    expiration=Duration.days(keep.resume_days),
                    # Training removes its older checkpoints itself, and they are the largest of all objects.
                    noncurrent_version_expiration=Duration.days(1),
                ),
                *([cold] if keep.cold_days else []),
            ],
        )
        content = self.bucket.node.default_child
        if isinstance(content, s3.CfnBucket) and any(isinstance(one.when, Marker) for one in settings.schedules.values()):
            # The setting of the L2 bucket would deploy a function that makes it.
            content.notification_configuration = s3.CfnBucket.NotificationConfigurationProperty(
                event_bridge_configuration=s3.CfnBucket.EventBridgeConfigurationProperty(event_bridge_enabled=True)
            )
        self.lock_table = dynamodb.Table(
            self,
            "Lock",
            partition_key=dynamodb.Attribute(name=LOCK_KEY, type=dynamodb.AttributeType.STRING),
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            encryption=dynamodb.TableEncryption.CUSTOMER_MANAGED if self._key else dynamodb.TableEncryption.AWS_MANAGED,
            encryption_key=self._key,
            point_in_time_recovery_specification=dynamodb.PointInTimeRecoverySpecification(point_in_time_recovery_enabled=True),
            deletion_protection=True,
            removal_policy=KEEP,
        )
        self.repositories = {
            kind: self._repository(
                f"{kind.capitalize()}Image", f"{settings.name}/{kind}", Duration.days(keep.untagged_image_days)
            )
            for kind in IMAGE_KINDS
        }
        self.base_repository = self._repository("NeuronBaseImage", base_repository(settings.name), None)
        retention = RETENTION[keep.log_days]
        self.job_logs = self._log_group("JobLogs", job_log_group(settings.name), retention)
        # Step Functions writes only to groups under this prefix without a policy of its own for each.
        self.machine_logs = self._log_group("MachineLogs", f"/aws/vendedlogs/states/{settings.name}", retention)
        self.watch_logs = self._log_group("WatchLogs", f"/aws/vendedlogs/states/{settings.name}-watch", retention)
        self.build_logs = self._log_group("BuildLogs", f"/{settings.name}/images", retention)

    def _bucket(
        self,
        construct_id: str,
        *,
        key: kms.IKey | None,
        lifecycle_rules: list[s3.LifecycleRule],
        server_access_logs_bucket: s3.IBucket | None = None,
        server_access_logs_prefix: str | None = None,
    ) -> s3.Bucket:
        return s3.Bucket(
            self,
            construct_id,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            encryption=s3.BucketEncryption.KMS if key else s3.BucketEncryption.S3_MANAGED,
            encryption_key=key,
            # One call to KMS for many objects.
            bucket_key_enabled=True if key else None,
            enforce_ssl=True,
            versioned=True,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=KEEP,
            lifecycle_rules=lifecycle_rules,
            server_access_logs_bucket=server_access_logs_bucket,
            server_access_logs_prefix=server_access_logs_prefix,
        )

    def _repository(self, construct_id: str, name: str, untagged: Duration | None) -> ecr.Repository:
        """
        Args:
            untagged: how long manifests without a tag are kept. ECR cannot know which tags registered job definitions name, so
                nothing with a tag expires, and no manifest that an image index names (ECR User Guide, "Lifecycle policies").
                None: for good, as for bases, which builds name by digest.
        """
        return ecr.Repository(
            self,
            construct_id,
            repository_name=name,
            image_scan_on_push=True,
            encryption=ecr.RepositoryEncryption.KMS if self._key else None,
            encryption_key=self._key,
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            lifecycle_rules=[
                ecr.LifecycleRule(
                    description="Manifests without a tag", tag_status=ecr.TagStatus.UNTAGGED, max_image_age=untagged
                )
            ]
            if untagged
            else None,
            removal_policy=KEEP,
        )

    def _log_group(self, construct_id: str, name: str, retention: logs.RetentionDays) -> logs.LogGroup:
        return logs.LogGroup(
            self, construct_id, log_group_name=name, retention=retention, removal_policy=KEEP, encryption_key=self._key
        )
