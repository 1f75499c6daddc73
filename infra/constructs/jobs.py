"""One Batch job definition per stage, and for gangs per allowed node count; everything follows from pipeline.contract.STAGES.

Each stage has a role of its own. Job definitions are L1: the L2 gang has closed node ranges, and its device permissions are
lower case where Batch takes upper case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aws_cdk import Stack
from aws_cdk import aws_batch as batch
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.settings import Settings
from pipeline.contract import (
    ATTEMPT_VARIABLE,
    DEPLOYMENT_VARIABLE,
    FARGATE_DISK_GIB,
    FARGATE_MEMORY_MIB,
    FARGATE_VCPUS,
    STAGES,
    Queue,
    Shape,
    Stage,
    StageSpec,
    stage_command,
)
from pipeline.cost import Hardware

EVALUATE_ON_EXIT: tuple[tuple[str, str, str], ...] = (
    ("on_reason", "OutOfMemory*", "EXIT"),
    ("on_exit_code", "6*", "EXIT"),
    ("on_exit_code", "1", "EXIT"),
    ("on_exit_code", "126", "EXIT"),
    ("on_exit_code", "127", "EXIT"),
)
"""Failures that another attempt would repeat: out of memory, our own final codes (pipeline/errors.py), an uncaught exception, an
image without a program that runs. Batch takes five rules, and the first match decides. It retries failures that match none: our
other codes, signals, lost hosts, and containers that never started (image pull, network interface, agent, timeout).
https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html"""

PRIVATE_IMAGE = re.compile(r"(?P<account>[0-9]{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com[.a-z]*/(?P<name>[^:@]+)")


class Jobs(Construct):
    """Job definitions and their roles.

    Attributes:
        arns: stage -> ARN with revision of its job definition (single and array stages).
        gang_arns: node count -> gang stage -> ARN with revision.
        names: every job definition's name.
        roles: stage -> the role its containers act under; grants are issued in stacks.py.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        repositories: Mapping[str, ecr.IRepository],
        log_group: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        self._settings = settings
        self._log_group = log_group
        self._execution_role = self._container_role("ExecutionRole", "Pulls images and writes logs for every job")
        log_group.grant_write(self._execution_role)
        images = {kind: self._image(kind, repositories[kind]) for kind in settings.image_kinds}
        self._images = {
            Queue.CPU: images["cpu"],
            Queue.TRAIN: images[settings.train_hardware.kind],
            Queue.EMBED: images[settings.embed_hardware.kind],
        }
        self.roles = {stage: self._container_role(f"{_camel(stage)}Role", f"Stage {stage}") for stage in STAGES}
        self.names: list[str] = []
        self.arns: dict[Stage, str] = {}
        self.gang_arns: dict[int, dict[Stage, str]] = {nodes: {} for nodes in settings.allowed_nodes}
        for stage, spec in STAGES.items():
            container = self._container(stage, spec)
            if spec.shape is not Shape.GANG:
                self.arns[stage] = self._definition(
                    stage,
                    spec,
                    name=f"{settings.name}-{stage}",
                    construct_id=_camel(stage),
                    kind="container",
                    container_properties=container,
                )
                continue
            for nodes in settings.allowed_nodes:
                self.gang_arns[nodes][stage] = self._definition(
                    stage,
                    spec,
                    name=f"{settings.name}-{stage}-{nodes}",
                    construct_id=f"{_camel(stage)}On{nodes}",
                    kind="multinode",
                    node_properties=batch.CfnJobDefinition.NodePropertiesProperty(
                        main_node=0,
                        num_nodes=nodes,
                        node_range_properties=[
                            batch.CfnJobDefinition.NodeRangePropertyProperty(
                                # An open range, so that an operator may still override the number of nodes.
                                target_nodes="0:",
                                container=container,
                                instance_types=[settings.instance_type],
                            )
                        ],
                    ),
                )

    def _definition(
        self,
        stage: Stage,
        spec: StageSpec,
        *,
        name: str,
        construct_id: str,
        kind: str,
        node_properties: batch.CfnJobDefinition.NodePropertiesProperty | None = None,
        container_properties: batch.CfnJobDefinition.ContainerPropertiesProperty | None = None,
    ) -> str:
        definition = batch.CfnJobDefinition
        self.names.append(name)
        return definition(
            self,
            construct_id,
            job_definition_name=name,
            type=kind,
            platform_capabilities=None if node_properties else ["FARGATE" if spec.queue is Queue.CPU else "EC2"],
            node_properties=node_properties,
            container_properties=container_properties,
            propagate_tags=True,
            retry_strategy=definition.RetryStrategyProperty(
                attempts=spec.attempts,
                evaluate_on_exit=[
                    definition.EvaluateOnExitProperty(action=action, **{field: pattern})
                    for field, pattern, action in EVALUATE_ON_EXIT
                ],
            ),
            timeout=definition.TimeoutProperty(attempt_duration_seconds=60 * self._settings.minutes(stage)),
            # Executions name a revision; one that is running or redriven later still finds the revision it began with.
            resource_retention_policy=definition.ResourceRetentionPolicyProperty(skip_deregister_on_update=True),
            tags={"trnpipe:stage": stage.value},
        ).ref

    def _container(self, stage: Stage, spec: StageSpec) -> batch.CfnJobDefinition.ContainerPropertiesProperty:
        definition = batch.CfnJobDefinition
        fargate = spec.queue is Queue.CPU
        hardware = {Queue.TRAIN: self._settings.train_hardware, Queue.EMBED: self._settings.embed_hardware}.get(spec.queue)
        task = FARGATE_VCPUS * spec.size, FARGATE_MEMORY_MIB * spec.size
        vcpus, memory = (hardware.job_vcpus, hardware.job_memory_mib) if hardware else task
        needs = {"VCPU": vcpus, "MEMORY": memory} | ({"GPU": hardware.gpus} if hardware and hardware.gpus else {})
        return definition.ContainerPropertiesProperty(
            # precompile runs the compiler of the hosts that train.
            image=self._images[Queue.TRAIN if stage is Stage.PRECOMPILE else spec.queue],
            command=stage_command(stage),
            environment=[
                definition.EnvironmentProperty(name=name, value=value)
                for name, value in self._environment(stage, hardware if spec.shape is Shape.GANG else None).items()
            ],
            resource_requirements=[
                definition.ResourceRequirementProperty(type=resource, value=str(value)) for resource, value in needs.items()
            ],
            job_role_arn=self.roles[stage].role_arn,
            execution_role_arn=self._execution_role.role_arn,
            log_configuration=definition.LogConfigurationProperty(
                log_driver="awslogs",
                options={
                    "awslogs-group": self._log_group.log_group_name,
                    "awslogs-region": Stack.of(self).region,
                    "awslogs-stream-prefix": stage.value,
                },
            ),
            network_configuration=definition.NetworkConfigurationProperty(assign_public_ip="DISABLED") if fargate else None,
            fargate_platform_configuration=definition.FargatePlatformConfigurationProperty(platform_version="LATEST")
            if fargate
            else None,
            ephemeral_storage=definition.EphemeralStorageProperty(size_in_gib=FARGATE_DISK_GIB) if fargate else None,
            linux_parameters=_linux_parameters(hardware, gang=spec.shape is Shape.GANG) if hardware else None,
            ulimits=[
                # Neuron and EFA pin memory; every rank opens a socket to every other.
                definition.UlimitProperty(name="memlock", soft_limit=-1, hard_limit=-1),
                definition.UlimitProperty(name="nofile", soft_limit=65535, hard_limit=65535),
            ]
            if hardware
            else None,
        )

    def _environment(self, stage: Stage, gang: Hardware | None) -> Mapping[str, str]:
        environment = {
            "AWS_DEFAULT_REGION": Stack.of(self).region,
            "TRNPIPE_STAGE": stage.value,
            DEPLOYMENT_VARIABLE: self._settings.name,
            ATTEMPT_VARIABLE: str(60 * self._settings.minutes(stage)),
        }
        if gang is not None and gang.efa_interfaces:
            # EFA carries the collectives; the rendezvous goes over the task's own interface.
            environment |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "CCOM_SOCKET_IFNAME": "eth0"}
        if gang is not None and gang.kind == "cpu":
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
        return environment | self._settings.environment

    def _image(self, kind: str, repository: ecr.IRepository) -> str:
        if (uri := getattr(self._settings.images, kind)) is None:
            repository.grant_pull(self._execution_role)
            return repository.repository_uri_for_tag(self._settings.images.tag)
        if elsewhere := PRIVATE_IMAGE.match(uri):
            name = elsewhere["name"]
            arn = f"arn:{Stack.of(self).partition}:ecr:{elsewhere['region']}:{elsewhere['account']}:repository/{name}"
            ecr.Repository.from_repository_attributes(
                self, f"{kind.capitalize()}Image", repository_arn=arn, repository_name=name
            ).grant_pull(self._execution_role)
        return str(uri)

    def _container_role(self, construct_id: str, description: str) -> iam.Role:
        return iam.Role(self, construct_id, assumed_by=iam.ServicePrincipal("ecs-tasks.amazonaws.com"), description=description)


def _linux_parameters(hardware: Hardware, *, gang: bool) -> batch.CfnJobDefinition.LinuxParametersProperty:
    paths = [
        *(f"/dev/neuron{index}" for index in range(hardware.neuron_devices)),
        *(f"/dev/infiniband/uverbs{index}" for index in range(hardware.efa_interfaces if gang else 0)),
    ]
    return batch.CfnJobDefinition.LinuxParametersProperty(
        init_process_enabled=True,
        # Ranks of one node exchange gradients and batches through it; the default is 64 MiB.
        shared_memory_size=hardware.job_memory_mib // 8,
        devices=[
            batch.CfnJobDefinition.DeviceProperty(host_path=path, container_path=path, permissions=["READ", "WRITE", "MKNOD"])
            for path in paths
        ],
    )


def _camel(stage: Stage) -> str:
    return "".join(word.capitalize() for word in stage.value.split("_"))
