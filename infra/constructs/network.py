"""The network of the hosts: private subnets without a route to the internet, endpoints of AWS services, groups for EFA traffic.

Services a run needs (an existing VPC must reach them too): S3, DynamoDB, ECR (api and dkr), CloudWatch Logs, ECS (with
agent and telemetry), Batch.
"""

from __future__ import annotations

import ipaddress

from aws_cdk import Acknowledgment, RemovalPolicy, Tags, Validations
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.constructs.storage import RETENTION, customer_key
from infra.setting_sections import ExistingVpc
from infra.settings import ZONE_LETTERS, Settings

HTTPS = ec2.Port.tcp(443)
DNS = 53
ADDRESSES = ipaddress.ip_network("10.0.0.0/16")
SUBNET_PREFIX = 20
"""A trn1.32xlarge takes eight addresses and its container one more: a /20 holds some 450 nodes."""

INTERFACE_ENDPOINTS = ("ECR", "ECR_DOCKER", "CLOUDWATCH_LOGS", "ECS", "ECS_AGENT", "ECS_TELEMETRY", "BATCH")


class Network(Construct):
    """A private subnet per zone. A gang's nodes share one, because they share a placement group.

    Attributes:
        vpc: where every host and task runs.
        subnets: zone -> its private subnet.
        efa_group: on the launch template's EFA interfaces; allows itself in and out, as EFA demands. None without EFA.
        gang_group: of gangs on processors; allows itself in and out. None where the gangs' hosts have NeuronCores.
        host_group: hosts and Fargate tasks that work alone.
        task_group: the VPC's default group; Batch puts it on the interface of a gang's containers.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        if existing := settings.vpc:
            vpc_id, group_id = existing.vpc_id, existing.default_security_group_id
        else:
            # L1, because `ec2.Vpc` asks the account for its zones at synth, and gives subnets their addresses by position.
            new = ec2.CfnVPC(self, "NewVpc", cidr_block=str(ADDRESSES), enable_dns_hostnames=True, enable_dns_support=True)
            Tags.of(new).add("Name", settings.name)
            # A gang's containers talk to each other through the default group; emptying it would cut them off.
            vpc_id, group_id = new.ref, new.attr_default_security_group
        self.vpc = ec2.Vpc.from_vpc_attributes(self, "Vpc", vpc_id=vpc_id, availability_zones=list(settings.zones))
        self.subnets = {zone: self._subnet(zone, existing) for zone in settings.zones}
        self.task_group = ec2.SecurityGroup.from_security_group_id(self, "Task", group_id, mutable=False)
        self.efa_group = self._closed_group("Efa", "EFA") if settings.train_hardware.efa_interfaces else None
        # On processors the nodes' collectives go over the addresses of their containers.
        self.gang_group = self._closed_group("Gang", "TCP") if settings.train_hardware.kind == "cpu" else None
        self.host_group = ec2.SecurityGroup(
            self, "Host", vpc=self.vpc, description="Hosts and tasks that work alone", allow_all_outbound=False
        )
        for group in filter(None, (self.host_group, self.efa_group, self.gang_group)):
            _allow_egress(group, settings.vpc)
        if existing is None:
            self.vpc.add_flow_log(
                "FlowLog",
                traffic_type=ec2.FlowLogTrafficType.REJECT,
                destination=ec2.FlowLogDestination.to_cloud_watch_logs(
                    logs.LogGroup(
                        self,
                        "Rejected",
                        retention=RETENTION[settings.retention.log_days],
                        # Deleted with the VPC whose traffic it records.
                        removal_policy=RemovalPolicy.DESTROY,
                        encryption_key=customer_key(self, settings),
                    )
                ),
            )
            self._add_endpoints(settings)

    def _closed_group(self, construct_id: str, what: str) -> ec2.SecurityGroup:
        """A group whose members reach each other, as EFA demands; `_allow_egress` adds the way to AWS's services."""
        group = ec2.SecurityGroup(
            self, construct_id, vpc=self.vpc, description=f"{what} between the nodes of a gang", allow_all_outbound=False
        )
        group.add_ingress_rule(group, ec2.Port.all_traffic(), f"all {what} traffic from the gang's nodes")
        group.add_egress_rule(group, ec2.Port.all_traffic(), f"all {what} traffic to the gang's nodes")
        return group

    def _subnet(self, zone: str, existing: ExistingVpc | None) -> ec2.ISubnet:
        """A zone's subnet. One of our own has its id and addresses from the zone's letter, so that zones come and go singly:
        CloudFormation makes the new subnet before it removes the old one, and EC2 refuses equal addresses in between.
        """
        letter = zone[-1]
        if existing:
            subnet = existing.subnets[zone]
            return ec2.Subnet.from_subnet_attributes(
                self,
                f"Private{letter.upper()}",
                subnet_id=subnet.subnet_id,
                availability_zone=zone,
                route_table_id=subnet.route_table_id,
            )
        own = ec2.PrivateSubnet(
            self,
            f"Private{letter.upper()}",
            vpc_id=self.vpc.vpc_id,
            availability_zone=zone,
            cidr_block=str(list(ADDRESSES.subnets(new_prefix=SUBNET_PREFIX))[ZONE_LETTERS.index(letter)]),
            map_public_ip_on_launch=False,
        )
        # "Avoid hardcoding availability zones": few have trn1, and looking them up would need the account at synth.
        Validations.of(own).acknowledge(
            Acknowledgment(id="CloudFormation-Validate::W3010", reason="The settings name the zones that have trn1.")
        )
        return own

    def _add_endpoints(self, settings: Settings) -> None:
        for name in ("S3", "DYNAMODB"):
            self.vpc.add_gateway_endpoint(
                name,
                service=getattr(ec2.GatewayVpcEndpointAwsService, name),
                subnets=[ec2.SubnetSelection(subnets=list(self.subnets.values()))],
            )
        group = ec2.SecurityGroup(
            self, "Endpoints", vpc=self.vpc, description="Endpoints of AWS services", allow_all_outbound=False
        )
        for name, peer in (
            ("gang hosts", self.efa_group or self.gang_group),
            ("gang containers", self.task_group),
            ("hosts and tasks", self.host_group),
        ):
            if peer is not None:
                group.add_ingress_rule(peer, HTTPS, f"HTTPS from {name}")
        for name in INTERFACE_ENDPOINTS:
            self.vpc.add_interface_endpoint(
                name,
                service=getattr(ec2.InterfaceVpcEndpointAwsService, name),
                subnets=ec2.SubnetSelection(subnets=[self.subnets[zone] for zone in settings.zones_of_services]),
                security_groups=[group],
                open=False,
            )


def _allow_egress(group: ec2.SecurityGroup, existing: ExistingVpc | None) -> None:
    group.add_egress_rule(ec2.Peer.any_ipv4(), HTTPS, "AWS services")
    if existing is None:
        return
    for address in existing.resolvers:
        for port in (ec2.Port.udp(DNS), ec2.Port.tcp(DNS)):
            group.add_egress_rule(ec2.Peer.ipv4(f"{address}/32"), port, "DNS")
    for allowed in existing.egress:
        group.add_egress_rule(ec2.Peer.ipv4(str(allowed.cidr)), ec2.Port.tcp(allowed.port), "trnpipe.vpc.egress")
