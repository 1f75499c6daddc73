"""The two stacks and every grant: DataStack is kept, PipelineStack can be deleted and deployed again around the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aws_cdk import App, CfnOutput, Environment, Stack, Tags
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.cdk_context import read_settings
from infra.console import Console
from infra.constructs.compute import Compute
from infra.constructs.image_builder import ImageBuilder
from infra.constructs.jobs import Jobs
from infra.constructs.monitoring import Monitoring, Topic
from infra.constructs.network import Network
from infra.constructs.schedule import Starts
from infra.constructs.storage import Storage, job_log_group
from infra.constructs.workflow import Workflow
from infra.run_cost import MonthlyBudget
from infra.settings import COST_TAG, Settings
from infra.workflow.watches import Watches
from pipeline.contract import STAGES, Queue, Shape, Stage

SHARD_READERS = (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.PUBLISH)
"""Stages that see the input shards: prepare and publish list them, ingest reads them, and plan golden sets."""

COMPILING = (Stage.COLLECT, Stage.PRECOMPILE, Stage.COMPILE)

PARENT_READERS = (Stage.PREPARE, Stage.INGEST, Stage.PLAN, *COMPILING, Stage.TRAIN, Stage.EVALUATE)
"""Stages that load the parent or its tokenizer, which may be outside the run folders, as the initial model is."""

INGESTED = "ingested/*"
"""Rows and tokens of input shards, shared by all runs: written by ingest alone."""

MINED = "mined/*"
"""Mined negatives of these rows: written by mine alone, and removed with rows by ingest."""

SEEN = "seen/*"
"""The rows that each run was the first of its lineage to train on: written by train alone."""

GRAPHS = "graphs/*"
"""Compiled sets, shared by all runs of one configuration: written by compile alone."""

COMPILER_CACHE = "graphs/neuron-cache/*"
"""The compiler's persistent cache among them, in which a graph that training meets unannounced is compiled, too."""

HEALTH_GRAPHS = "graphs/health/*"
"""health_check's own small graphs."""

READERS: dict[str, tuple[Stage, ...]] = {
    HEALTH_GRAPHS: (Stage.HEALTH_CHECK,),
    # Stages that look for compiled sets or load them.
    GRAPHS: (Stage.PREPARE, Stage.MINE, Stage.PLAN, *COMPILING, Stage.TRAIN, Stage.EVALUATE, Stage.EMBED),
    # prepare asks whether a shard is ingested; publish names the documents without an embedding.
    INGESTED: (Stage.PREPARE, Stage.INGEST, Stage.MINE, Stage.PLAN, Stage.EVALUATE, Stage.EMBED, Stage.PUBLISH),
    MINED: (Stage.PREPARE, Stage.MINE, Stage.PLAN),
    SEEN: (Stage.PREPARE, Stage.PLAN, Stage.TRAIN),
    "data/*": (*SHARD_READERS, *PARENT_READERS),
}
"""Objects besides the run folders and the registry -> the stages that read them."""

CACHE_WRITERS = (*COMPILING, Stage.TRAIN)

IMAGE_SOURCE = "images/source.zip"
"""What images are built from: written by `trnpipe images`."""

ECR_BUILD_ACTIONS = [
    *("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
    *("ecr:InitiateLayerUpload", "ecr:UploadLayerPart", "ecr:CompleteLayerUpload", "ecr:PutImage"),
]
"""What a push takes, and a pull (https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-push-iam.html)."""

ECR_PASSWORDS = ["ecr:GetAuthorizationToken", "ecr-public:GetAuthorizationToken", "sts:GetServiceBearerToken"]
"""Passwords of the account's registry and of ECR Public
(https://docs.aws.amazon.com/AmazonECR/latest/public/public-registry-auth.html)."""

BOOTSTRAP_QUALIFIER = "@aws-cdk/core:bootstrapQualifier"
"""CDK's context key for it (docs.aws.amazon.com/cdk/v2/guide/bootstrapping-customizing.html)."""

UNCHANGEABLE_TAGS = ("AWS::Batch::ComputeEnvironment", "AWS::EC2::PlacementGroup")
"""Types whose tags can only be set at creation: another tag would replace them, and all hosts with them."""


class DataStack(Stack):
    """Resources that outlive the pipeline: bucket, lock table, image repositories and what builds images, logs."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings, env: Environment) -> None:
        super().__init__(
            scope,
            construct_id,
            env=env,
            description="trnpipe: runs, registry, locks, images and logs",
            termination_protection=True,
        )
        self.storage = Storage(self, "Storage", settings=settings)
        source = f"{self.storage.bucket.bucket_name}/{IMAGE_SOURCE}"
        builder = ImageBuilder(
            self,
            "ImageBuilder",
            settings=settings,
            source=source,
            repositories=f"{self.storage.base_repository.registry_uri}/{settings.name}",
            log_group=self.storage.build_logs.log_group_name,
        )
        self._grant_builds(settings, builder.role)
        # The other stack imports these only where no image URI is set. CloudFormation refuses to remove an export that is
        # imported, and this stack is deployed first: so they are always there.
        for repository in self.storage.repositories.values():
            self.export_value(repository.repository_arn)
            self.export_value(repository.repository_name)
        for name, value in (
            ("BucketName", self.storage.bucket.bucket_name),
            *((f"{kind.capitalize()}RepositoryUri", one.repository_uri) for kind, one in self.storage.repositories.items()),
            ("ImageProject", builder.project_name),
            ("ImageSource", source),
        ):
            CfnOutput(self, name, value=value)

    def _grant_builds(self, settings: Settings, role: iam.IRole) -> None:
        """Read the source, pull the bases, push to the deployment's repositories and write the log: nothing else."""
        _allow(role, ["s3:GetObject", "s3:GetObjectVersion"], [self.storage.bucket.arn_for_objects(IMAGE_SOURCE)])
        _allow_keys(role, ["kms:Decrypt"], [settings.customer_key] if settings.customer_key else [])
        _allow(
            role,
            ECR_BUILD_ACTIONS,
            [one.repository_arn for one in (*self.storage.repositories.values(), self.storage.base_repository)],
        )
        _allow(role, ECR_PASSWORDS, ["*"])
        _allow(role, ["logs:CreateLogStream", "logs:PutLogEvents"], [self.storage.build_logs.log_group_arn])


class PipelineStack(Stack):
    """Hosts, jobs, the state machine, its schedules and what watches it."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings, storage: Storage, env: Environment) -> None:
        super().__init__(scope, construct_id, env=env, description="trnpipe: hosts, jobs, state machine, schedules, monitoring")
        network = Network(self, "Network", settings=settings)
        compute = Compute(
            self,
            "Compute",
            settings=settings,
            subnets={zone: subnet.subnet_id for zone, subnet in network.subnets.items()},
            efa_group=network.efa_group,
            gang_group=network.gang_group,
            host_group=network.host_group,
        )
        jobs = Jobs(
            self,
            "Jobs",
            settings=settings,
            repositories=storage.repositories,
            log_group=storage.job_logs,
        )
        topic = Topic(self, "Notifications", settings=settings)
        console = Console(
            region=settings.region,
            bucket=storage.bucket.bucket_name,
            job_logs=job_log_group(settings.name),
            dashboard=settings.name,
        )
        workflow = Workflow(
            self,
            "Workflow",
            settings=settings,
            bucket=storage.bucket,
            lock_table=storage.lock_table,
            topic=topic.topic,
            topic_key=topic.key,
            queue_arns=compute.queue_arns,
            job_arns=jobs.arns,
            gang_arns=jobs.gang_arns,
            job_names=jobs.names,
            console=console,
            log_group=storage.machine_logs,
        )
        schedule = Starts(self, "Schedule", settings=settings, state_machine=workflow.state_machine)
        watches = Watches(
            self,
            "Watches",
            settings=settings,
            state_machine=workflow.state_machine,
            topic=topic.topic,
            topic_key=topic.key,
            queue_arns=compute.queue_arns,
            console=console,
            log_group=storage.watch_logs,
        )
        Monitoring(
            self,
            "Monitoring",
            settings=settings,
            state_machine=workflow.state_machine,
            watches=watches.machines,
            machine_logs=storage.machine_logs,
            queue_arns=compute.queue_arns,
            topic=topic.topic,
            dead_letters=schedule.dead_letters,
            default_group_id=network.task_group.security_group_id if network.efa_group is not None else None,
            console=console,
        )
        if settings.budget is not None:
            MonthlyBudget(self, "Budget", name=settings.name, usd=settings.budget, topic=topic.topic, topic_key=topic.key)
        self._grant(settings, workflow.state_machine.role, jobs.roles, storage, compute.accelerator_environment_names)
        for name, value in (
            ("StateMachineArn", workflow.state_machine.state_machine_arn),
            ("TopicArn", topic.topic.topic_arn),
            ("JobLogGroup", storage.job_logs.log_group_name),
        ):
            CfnOutput(self, name, value=value)

    def _grant(
        self,
        settings: Settings,
        machine_role: iam.IRole,
        stage_roles: Mapping[Stage, iam.Role],
        storage: Storage,
        environments: list[str],
    ) -> None:
        own_key = [settings.customer_key] if settings.customer_key else []
        for role in (machine_role, *stage_roles.values()):
            _allow_keys(role, ["kms:Decrypt", "kms:GenerateDataKey"], own_key)
        # https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/encryption.usagenotes.html
        _allow_keys(
            machine_role,
            ["kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey", "kms:ReEncryptFrom", "kms:ReEncryptTo"],
            own_key,
            service="dynamodb",
        )
        for stage, role in stage_roles.items():
            self._grant_storage(stage, role, storage)
            if STAGES[stage].queue is not Queue.CPU:
                self._grant_accelerator_stage(stage, role, environments)
            self._grant_inputs(stage, role, settings)

    def _grant_storage(self, stage: Stage, role: iam.IRole, storage: Storage) -> None:
        """Read every run (a parent is an earlier run's model); write the stage's own part of a run."""
        bucket = storage.bucket
        written: dict[Stage, list[str]] = {
            Stage.INGEST: [INGESTED],
            Stage.MINE: [MINED],
            Stage.PLAN: ["runs/*/plan.json", "runs/*/embed/plan.json"],
            Stage.COLLECT: [COMPILER_CACHE],
            Stage.PRECOMPILE: [COMPILER_CACHE],
            Stage.HEALTH_CHECK: [HEALTH_GRAPHS],
            Stage.COMPILE: [GRAPHS],
            Stage.TRAIN: ["runs/*/model/*", SEEN, COMPILER_CACHE],
            Stage.PUBLISH: ["runs/*/embed/manifest.json", "registry/*.json"],
            Stage.REPORT: ["registry/*/index.html", "registry/*/runs/*.json"],
        }
        read = ["runs/*", "registry/*", *(pattern for pattern, readers in READERS.items() if stage in readers)]
        own = [f"runs/*/{stage}/*", *written.get(stage, [])]
        _allow(role, ["s3:ListBucket"], [bucket.bucket_arn])
        _allow(role, ["s3:GetObject"], [bucket.arn_for_objects(pattern) for pattern in read])
        _allow(role, ["s3:PutObject", "s3:AbortMultipartUpload"], [bucket.arn_for_objects(pattern) for pattern in own])
        if stage is Stage.TRAIN:
            # Checkpoints are written with the tag that lets them expire.
            _allow(role, ["s3:PutObjectTagging"], [bucket.arn_for_objects("runs/*/train/checkpoints/*")])
        # A new attempt removes the failure.json of the last one; train removes its older checkpoints; a compiling stage removes
        # its lock from the cache; ingest removes rows that must not be used any more. The bucket keeps versions.
        removed = [COMPILER_CACHE] if stage in CACHE_WRITERS else [INGESTED, MINED] if stage is Stage.INGEST else []
        _allow(role, ["s3:DeleteObject"], [bucket.arn_for_objects(pattern) for pattern in (f"runs/*/{stage}/*", *removed)])

    def _grant_accelerator_stage(self, stage: Stage, role: iam.IRole, environments: list[str]) -> None:
        """A sick host takes itself out of its cluster, or the retry would land on it again."""
        # Batch names a compute environment's cluster after it; which of the two forms depends on the environment's age.
        clusters = [form.format(name) for name in environments for form in ("AWSBatch-{}-*", "{}_Batch_*")]
        for kind, actions in (
            ("container-instance", ["ecs:UpdateContainerInstancesState", "ecs:DescribeContainerInstances"]),
            ("task", ["ecs:DescribeTasks"]),
        ):
            _allow(role, actions, [self.format_arn(service="ecs", resource=kind, resource_name=f"{name}/*") for name in clusters])
        if STAGES[stage].shape is Shape.GANG:
            # Where Batch leaves `Ref::run` in a node's command, the stage asks for its own job's parameters.
            _allow(role, ["batch:DescribeJobs"], ["*"])

    def _grant_inputs(self, stage: Stage, role: iam.IRole, settings: Settings) -> None:
        """Allow the stages that read inputs the folders and files outside our bucket that the settings name."""
        caches = dict.fromkeys(config.compile.cache for config in settings.run_configs().values() if config.compile.cache)
        for cache in caches if stage in CACHE_WRITERS else ():
            bucket, _, prefix = cache.removeprefix("s3://").rstrip("/").partition("/")
            # Records of the users of a cache are next to it, still below the configured URI.
            arn = f"arn:{self.partition}:s3:::{bucket}/{f'{prefix}/' * bool(prefix)}*"
            _allow(role, ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject"], [arn])
            _allow(role, ["s3:ListBucket"], [arn.partition("/")[0]])
            _allow_keys(role, ["kms:Decrypt", "kms:GenerateDataKey"], settings.kms_keys)
        if stage not in (*SHARD_READERS, *PARENT_READERS):
            return
        _allow_keys(role, ["kms:Decrypt"], settings.kms_keys)
        for pattern in settings.readable_objects(shards=stage in SHARD_READERS, model=stage in PARENT_READERS):
            arn = f"arn:{self.partition}:s3:::{pattern}"
            _allow(role, ["s3:GetObject"], [arn])
            _allow(role, ["s3:ListBucket"], [arn.partition("/")[0]])


def build(context: Mapping[str, Any], outdir: str | None = None) -> App:
    """The app with both stacks, from CDK context; `app.synth()` writes the cloud assembly.

    Args:
        outdir: where the assembly goes; None: CDK_OUTDIR, which the CDK CLI sets, else a temporary folder.

    Raises:
        BadConfig: wrong settings.
    """
    app = App(context=dict(context), outdir=outdir, analytics_reporting=False)
    settings = read_settings(app.node.get_all_context())
    if settings.bootstrap_qualifier is not None:
        app.node.set_context(BOOTSTRAP_QUALIFIER, settings.bootstrap_qualifier)
    env = Environment(account=settings.account, region=settings.region)
    data = DataStack(app, f"{settings.name}-data", settings=settings, env=env)
    pipeline = PipelineStack(app, settings.name, settings=settings, storage=data.storage, env=env)
    Tags.of(app).add(COST_TAG, settings.name)
    for key, value in settings.tags.items():
        Tags.of(app).add(key, value, exclude_resource_types=list(UNCHANGEABLE_TAGS))
    if settings.permissions_boundary is not None:
        for stack in (data, pipeline):
            iam.PermissionsBoundary.of(stack).apply(
                iam.ManagedPolicy.from_managed_policy_name(stack, "Boundary", settings.permissions_boundary)
            )
    return app


def _allow_keys(role: iam.IRole, actions: list[str], keys: Sequence[str], *, service: str = "s3") -> None:
    """The use of keys through a service that decrypts on behalf of its caller, and for nothing else
    (https://docs.aws.amazon.com/kms/latest/developerguide/conditions-kms.html#conditions-kms-via-service)."""
    for key in keys:
        role.add_to_principal_policy(
            iam.PolicyStatement(
                actions=actions,
                resources=[key],
                conditions={"StringEquals": {"kms:ViaService": f"{service}.{key.split(':')[3]}.amazonaws.com"}},
            )
        )


def _allow(role: iam.IRole, actions: list[str], resources: list[str]) -> None:
    role.add_to_principal_policy(iam.PolicyStatement(actions=actions, resources=resources))
