"""Where the hosts live: private subnets without a way to the internet, endpoints to the AWS services, groups for EFA traffic.

Services a run needs (an existing VPC must reach them too): S3, DynamoDB, ECR (api and dkr), CloudWatch Logs, ECS (with
agent and telemetry), Batch.
"""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.settings import ExistingVpc, Settings
from infra.storage import RETENTION

HTTPS = ec2.Port.tcp(443)
INTERFACE_ENDPOINTS = ("ECR", "ECR_DOCKER", "CLOUDWATCH_LOGS", "ECS", "ECS_AGENT", "ECS_TELEMETRY", "BATCH")


class Network(Construct):
    """A private subnet per zone. A gang's nodes share one, because they share a placement group.

    Attributes:
        vpc: where every host and task runs.
        subnets: zone -> its private subnet.
        efa_group: on the launch template's EFA interfaces; allows itself in and out, as EFA demands. None without EFA.
        host_group: hosts and Fargate tasks that work alone.
        task_group: the VPC's default group; Batch puts it on the interface of a gang's containers.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        self.vpc, self.task_group = self._existing(settings, settings.vpc) if settings.vpc else self._new(settings)
        # In the order of the zones that the VPC was given.
        self.subnets: dict[str, ec2.ISubnet] = dict(zip(settings.zones, self.vpc.isolated_subnets, strict=True))
        self.efa_group = self._efa_group() if settings.train_hardware.efa_interfaces else None
        self.host_group = ec2.SecurityGroup(
            self, "Host", vpc=self.vpc, description="Hosts and tasks that work alone", allow_all_outbound=False
        )
        self.host_group.add_egress_rule(ec2.Peer.any_ipv4(), HTTPS, "AWS services")
        if settings.vpc is None:
            self._add_endpoints()

    def _efa_group(self) -> ec2.SecurityGroup:
        group = ec2.SecurityGroup(
            self, "Efa", vpc=self.vpc, description="EFA between the nodes of a gang", allow_all_outbound=False
        )
        group.add_ingress_rule(group, ec2.Port.all_traffic(), "all EFA traffic from the gang's nodes")
        group.add_egress_rule(group, ec2.Port.all_traffic(), "all EFA traffic to the gang's nodes")
        group.add_egress_rule(ec2.Peer.any_ipv4(), HTTPS, "AWS services")
        return group

    def _new(self, settings: Settings) -> tuple[ec2.IVpc, ec2.ISecurityGroup]:
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr("10.0.0.0/16"),
            availability_zones=list(settings.zones),
            nat_gateways=0,
            # A trn1.32xlarge takes eight addresses and its container one more: a /20 holds some 450 nodes.
            subnet_configuration=[
                ec2.SubnetConfiguration(name="Private", subnet_type=ec2.SubnetType.PRIVATE_ISOLATED, cidr_mask=20)
            ],
            # A gang's containers talk to each other through the default group; emptying it would cut them off.
            restrict_default_security_group=False,
        )
        rejected = logs.LogGroup(self, "Rejected", retention=RETENTION[settings.retention.log_days])
        vpc.add_flow_log(
            "FlowLog",
            traffic_type=ec2.FlowLogTrafficType.REJECT,
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(rejected),
        )
        group = ec2.SecurityGroup.from_security_group_id(self, "Task", vpc.vpc_default_security_group, mutable=False)
        return vpc, group

    def _existing(self, settings: Settings, existing: ExistingVpc) -> tuple[ec2.IVpc, ec2.ISecurityGroup]:
        subnets = [existing.subnets[zone] for zone in settings.zones]
        vpc = ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=existing.vpc_id,
            availability_zones=list(settings.zones),
            isolated_subnet_ids=[subnet.subnet_id for subnet in subnets],
            isolated_subnet_route_table_ids=[subnet.route_table_id for subnet in subnets],
        )
        group = ec2.SecurityGroup.from_security_group_id(self, "Task", existing.default_security_group_id, mutable=False)
        return vpc, group

    def _add_endpoints(self) -> None:
        for name in ("S3", "DYNAMODB"):
            self.vpc.add_gateway_endpoint(name, service=getattr(ec2.GatewayVpcEndpointAwsService, name))
        group = ec2.SecurityGroup(
            self, "Endpoints", vpc=self.vpc, description="Endpoints of AWS services", allow_all_outbound=False
        )
        for name, peer in (
            ("gang hosts", self.efa_group),
            ("gang containers", self.task_group),
            ("hosts and tasks", self.host_group),
        ):
            if peer is not None:
                group.add_ingress_rule(peer, HTTPS, f"HTTPS from {name}")
        for name in INTERFACE_ENDPOINTS:
            self.vpc.add_interface_endpoint(
                name,
                service=getattr(ec2.InterfaceVpcEndpointAwsService, name),
                subnets=ec2.SubnetSelection(subnets=list(self.subnets.values())),
                security_groups=[group],
                open=False,
            )
