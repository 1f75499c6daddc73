"""Hosts of the jobs: launch templates, compute environments and the three fair-share queues.

L1 throughout: the L2 constructs cannot leave out security groups or name the launch template's version. Traps that shape this
file: a compute environment whose launch template has network interfaces may name no security groups itself; a launch template's
`$Default` version is not re-read; an image without `imageIdOverride` has no Neuron driver.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Literal

from aws_cdk import CfnDynamicReference, CfnDynamicReferenceService, CfnTag, Fn
from aws_cdk import aws_batch as batch
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.setting_sections import CapacityReservation
from infra.settings import AMI_PARAMETER, COST_TAG, Settings
from pipeline.contract import ROOT_DEVICE, ROOT_VOLUME_GIB, Queue
from pipeline.cost import HARDWARE

STUCK_REASONS = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
"""Reasons for which Batch cancels the job at the head of a queue. It reports others, too, but accepts no action on them
(https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable_time_limit_actions.html)."""

USER_DATA = """\
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="==TRNPIPE=="

--==TRNPIPE==
Content-Type: text/x-shellscript; charset="us-ascii"

#!/bin/bash
cat >> /etc/ecs/ecs.config <<'AGENT'
ECS_CONTAINER_CREATE_TIMEOUT=15m
ECS_CONTAINER_START_TIMEOUT=15m
ECS_IMAGE_PULL_BEHAVIOR=prefer-cached
ECS_ENABLE_SPOT_INSTANCE_DRAINING=true
ECS_AWSVPC_BLOCK_IMDS=true
AGENT
systemctl start ecstasks.slice
iptables --insert OUTPUT --destination 169.254.169.254/32 --match cgroup --path ecstasks.slice --jump REJECT \
  || logger --priority user.err "containers in the host's network can reach the instance's role"

--==TRNPIPE==--
"""
"""First boot of every accelerator host, merged by Batch with its own part, which needs the MIME format.

The agent's settings (https://github.com/aws/amazon-ecs-agent#environment-variables): its own 4 and 3 minutes are short for an
image of 10 GB; the stages of a run share a host and pull once; jobs on a Spot host learn that it goes away. Containers must not
reach the instance's role: a gang's containers, which have an interface of their own, are blocked by the agent's setting; others,
which share the host's network, by a rule on the control group in which the agent runs all tasks under cgroup v2."""

FORMS = {"neuron": "", "cuda": "Gpu", "cpu": "Cpu"}
"""Kind of a host's devices -> part of the ids of its environment."""

MISCONFIGURED_SECONDS = 600
"""A job that can never start is cancelled as soon as Batch allows; one that waits for capacity may wait as long as set."""


class Compute(Construct):
    """Compute environments and queues.

    Args:
        subnets: zone -> id of its private subnet.
        efa_group: on the gangs' EFA interfaces; None where their hosts have none.
        gang_group: of gangs on processors; None where their hosts have accelerators.
        host_group: of all other hosts and of Fargate tasks.

    Attributes:
        queue_arns: queue -> ARN.
        accelerator_environment_names: names of the compute environments whose hosts may drain themselves.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        subnets: Mapping[str, str],
        efa_group: ec2.ISecurityGroup | None,
        gang_group: ec2.ISecurityGroup | None,
        host_group: ec2.ISecurityGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        self._settings = settings
        self._subnets = subnets
        instance_role = iam.Role(
            self,
            "InstanceRole",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role")],
        )
        self._instance_profile = iam.CfnInstanceProfile(self, "InstanceProfile", roles=[instance_role.role_name])
        train = self._train(efa_group, gang_group or host_group)
        embed = self._embed(host_group)
        cpu = batch.CfnComputeEnvironment(
            self,
            "Cpu",
            type="MANAGED",
            # Replaced as a whole where it changes: Batch refuses what CloudFormation sends to update Fargate in place
            # (github.com/aws/aws-cdk/issues/27054).
            compute_resources=batch.CfnComputeEnvironment.ComputeResourcesProperty(
                type="FARGATE",
                maxv_cpus=settings.cpu_max_vcpus,
                subnets=[subnets[zone] for zone in settings.zones_of_services],
                security_group_ids=[host_group.security_group_id],
            ),
        )
        self.accelerator_environment_names = [Fn.select(1, Fn.split("/", each.ref)) for each in (train, embed)]
        policy = batch.CfnSchedulingPolicy(
            self,
            "FairShare",
            fairshare_policy=batch.CfnSchedulingPolicy.FairsharePolicyProperty(
                # What it takes from a single share is refused by the settings where a gang of full width could then never start.
                compute_reservation=settings.compute_reservation,
                share_decay_seconds=settings.share_decay_seconds,
                share_distribution=[
                    batch.CfnSchedulingPolicy.ShareAttributesProperty(share_identifier=share, weight_factor=weight)
                    for share, weight in sorted(settings.shares.items())
                ],
            ),
        )
        self.queue_arns = {
            queue: self._queue(queue, environment, policy)
            for queue, environment in ((Queue.TRAIN, train), (Queue.EMBED, embed), (Queue.CPU, cpu))
        }

    def _train(self, efa_group: ec2.ISecurityGroup | None, group: ec2.ISecurityGroup) -> batch.CfnComputeEnvironment:
        """Each form of the gangs' hosts has ids of its own, because what one form has and the other has not (groups, placement
        group) cannot be taken from an environment in place: UpdateComputeEnvironment keeps what is left out.
        """
        settings = self._settings
        reservation = settings.capacity_reservation
        block = reservation is not None and reservation.block
        construct_id = f"Train{'Block' if block else 'Efa' if efa_group is not None else FORMS[settings.train_hardware.kind]}"
        return self._accelerator_environment(
            construct_id,
            queue=Queue.TRAIN,
            instance_type=settings.instance_type,
            market=settings.train_market,
            max_vcpus=settings.train_max_vcpus,
            zones=(settings.zone,),
            template=self._launch_template(f"{construct_id}Template", efa_group, reservation),
            # A host without EFA is a gang of its own, and EC2 places the hosts of a Capacity Block itself.
            placement_group=None if efa_group is None or block else self._placement_group(reservation),
            # On the interface of a gang's containers, too, where the environment names it.
            security_groups=[group.security_group_id] if efa_group is None else None,
        )

    def _placement_group(self, reservation: CapacityReservation | None) -> str:
        if reservation is not None and reservation.placement_group is not None:
            return reservation.placement_group
        return ec2.PlacementGroup(self, "Placement", strategy=ec2.PlacementGroupStrategy.CLUSTER).placement_group_name

    def _embed(self, host_group: ec2.ISecurityGroup) -> batch.CfnComputeEnvironment:
        settings = self._settings
        construct_id = f"Embed{FORMS[settings.embed_hardware.kind]}"
        return self._accelerator_environment(
            construct_id,
            queue=Queue.EMBED,
            instance_type=settings.embed_instance_type,
            market=settings.embed_market,
            max_vcpus=settings.embed_max_vcpus,
            zones=settings.embed_zones or (settings.zone,),
            template=self._launch_template(f"{construct_id}Template", None, None),
            placement_group=None,
            security_groups=[host_group.security_group_id],
        )

    def _accelerator_environment(
        self,
        construct_id: str,
        *,
        queue: Queue,
        instance_type: str,
        market: Literal["on-demand", "spot"],
        max_vcpus: int,
        zones: tuple[str, ...],
        template: ec2.CfnLaunchTemplate,
        placement_group: str | None,
        security_groups: list[str] | None,
    ) -> batch.CfnComputeEnvironment:
        environment = batch.CfnComputeEnvironment
        return batch.CfnComputeEnvironment(
            self,
            construct_id,
            type="MANAGED",
            replace_compute_environment=False,
            # During an update of image or template jobs run on for as long as Batch allows; jobs that it ends after that are
            # retried and resume from their last checkpoint. Deploy such changes before a longer run, while none is in progress.
            update_policy=environment.UpdatePolicyProperty(
                terminate_jobs_on_update=False, job_execution_timeout_minutes=self._settings.update_minutes
            ),
            compute_resources=environment.ComputeResourcesProperty(
                type="EC2" if market == "on-demand" else "SPOT",
                allocation_strategy="BEST_FIT_PROGRESSIVE" if market == "on-demand" else "SPOT_PRICE_CAPACITY_OPTIMIZED",
                minv_cpus=0,
                maxv_cpus=max_vcpus,
                instance_types=[instance_type],
                instance_role=self._instance_profile.attr_arn,
                subnets=[self._subnets[zone] for zone in zones],
                security_group_ids=security_groups,
                placement_group=placement_group,
                ec2_configuration=[
                    environment.Ec2ConfigurationObjectProperty(
                        image_type="ECS_AL2023_NVIDIA" if HARDWARE[instance_type].gpus else "ECS_AL2023",
                        image_id_override=self._image_id() if HARDWARE[instance_type].neuron_devices else None,
                    )
                ],
                launch_template=environment.LaunchTemplateSpecificationProperty(
                    launch_template_id=template.ref, version=template.attr_latest_version_number
                ),
                # health_check, compile and train follow each other within minutes: keep the hosts that passed the check.
                scaling_policy=environment.ComputeScalingPolicyProperty(
                    min_scale_down_delay_minutes=self._settings.keep_hosts_minutes
                ),
                # Batch's own tags, unlike the stack's, reach the instances.
                tags={**self._tags, "Name": f"{self._settings.name}-{queue.value}"},
            ),
        )

    def _launch_template(
        self, construct_id: str, efa_group: ec2.ISecurityGroup | None, reservation: CapacityReservation | None
    ) -> ec2.CfnLaunchTemplate:
        """
        Args:
            efa_group: on the EFA interfaces of a host of the gangs; None: no interfaces of its own.
            reservation: what its hosts start in; None: nothing is held for them.
        """
        template = ec2.CfnLaunchTemplate
        return template(
            self,
            construct_id,
            launch_template_data=template.LaunchTemplateDataProperty(
                user_data=base64.b64encode(USER_DATA.encode()).decode(),
                network_interfaces=[
                    template.NetworkInterfaceProperty(
                        network_card_index=card,
                        # Only the primary interface has device index 0; every other card's first interface has 1.
                        device_index=0 if card == 0 else 1,
                        interface_type="efa",
                        groups=[efa_group.security_group_id],
                        delete_on_termination=True,
                        description=f"EFA {card}",
                    )
                    for card in range(self._settings.train_hardware.efa_interfaces)
                ]
                if efa_group is not None
                else None,
                block_device_mappings=[
                    template.BlockDeviceMappingProperty(
                        device_name=ROOT_DEVICE,
                        ebs=template.EbsProperty(
                            volume_size=ROOT_VOLUME_GIB,
                            volume_type="gp3",
                            throughput=500,
                            encrypted=True,
                            kms_key_id=self._settings.customer_key,
                            delete_on_termination=True,
                        ),
                    )
                ],
                metadata_options=template.MetadataOptionsProperty(
                    http_tokens="required", http_endpoint="enabled", http_put_response_hop_limit=1
                ),
                capacity_reservation_specification=template.CapacityReservationSpecificationProperty(
                    capacity_reservation_target=template.CapacityReservationTargetProperty(
                        capacity_reservation_id=reservation.id, capacity_reservation_resource_group_arn=reservation.group
                    )
                )
                if reservation
                else None,
                instance_market_options=template.InstanceMarketOptionsProperty(market_type="capacity-block")
                if reservation and reservation.block
                else None,
                tag_specifications=[
                    template.TagSpecificationProperty(
                        resource_type="volume",
                        tags=[CfnTag(key=key, value=value) for key, value in {**self._tags, "Name": self._settings.name}.items()],
                    )
                ],
            ),
        )

    @property
    def _tags(self) -> dict[str, str]:
        """Tags of hosts and volumes."""
        return {**self._settings.tags, COST_TAG: self._settings.name}

    def _image_id(self) -> str | None:
        if (parameter := AMI_PARAMETER.fullmatch(self._settings.ami or "")) is None:
            return self._settings.ami
        return CfnDynamicReference(CfnDynamicReferenceService.SSM, f"{parameter['name']}:{parameter['version']}").to_string()

    def _queue(self, queue: Queue, environment: batch.CfnComputeEnvironment, policy: batch.CfnSchedulingPolicy) -> str:
        return batch.CfnJobQueue(
            self,
            f"{queue.value.capitalize()}Queue",
            job_queue_name=f"{self._settings.name}-{queue.value}",
            priority=1,
            scheduling_policy_arn=policy.attr_arn,
            compute_environment_order=[
                batch.CfnJobQueue.ComputeEnvironmentOrderProperty(
                    order=1, compute_environment=environment.attr_compute_environment_arn
                )
            ],
            job_state_time_limit_actions=[
                batch.CfnJobQueue.JobStateTimeLimitActionProperty(
                    reason=reason,
                    state="RUNNABLE",
                    action="CANCEL",
                    max_time_seconds=self._settings.capacity_wait_hours * 3600
                    if reason.startswith("CAPACITY")
                    else MISCONFIGURED_SECONDS,
                )
                for reason in STUCK_REASONS
            ],
        ).attr_job_queue_arn
