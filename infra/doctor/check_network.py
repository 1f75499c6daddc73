"""The VPC: subnets with room, a way to every service, and the default security group that a gang's containers get."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from infra.doctor.asking import Findings, Subject, check, ok, problem
from infra.doctor.blueprint import GATEWAY_SERVICES

HTTPS = 443
DNS = 53
AMAZON_DNS = ("AmazonProvidedDNS", "169.254.169.253")
ANYWHERE = "0.0.0.0/0"
GANG_TASK_INTERFACES = 1
"""The network interface of a gang's container on every node, in addition to the host's."""


@check("Network", "ec2:DescribeVpcs", "ec2:DescribeVpcAttribute", "ec2:DescribeDhcpOptions")
def vpc(subject: Subject) -> Findings:
    if subject.settings.vpc is None:
        return
    vpc_id, region = subject.settings.vpc.vpc_id, subject.settings.region
    absent = problem(
        "the VPC does not exist", rule=f"trnpipe.vpc.vpc_id in {region}", remedy=f"aws ec2 describe-vpcs --region {region}"
    )
    [found] = subject.require(absent, "ec2", "DescribeVpcs", VpcIds=[vpc_id])["Vpcs"]
    off = [
        f"{shown}={on}"
        for attribute, shown in (("enableDnsSupport", "EnableDnsSupport"), ("enableDnsHostnames", "EnableDnsHostnames"))
        if not (on := subject.ask("ec2", "DescribeVpcAttribute", VpcId=vpc_id, Attribute=attribute)[shown]["Value"])
    ]
    if off:
        yield problem(
            "DNS is off in the VPC",
            value=f"{vpc_id}: {', '.join(off)}",
            rule="endpoints answer under the services' own names only with both attributes on",
            remedy=f"aws ec2 modify-vpc-attribute --vpc-id {vpc_id} --enable-dns-support; the same with --enable-dns-hostnames",
        )
    # Security groups filter all DNS servers but Amazon's own
    # (https://docs.aws.amazon.com/vpc/latest/userguide/vpc-security-groups.html).
    options = subject.ask("ec2", "DescribeDhcpOptions", DhcpOptionsIds=[found["DhcpOptionsId"]])["DhcpOptions"]
    configured = [item for one in options for item in one["DhcpConfigurations"] if item["Key"] == "domain-name-servers"]
    servers = [value["Value"] for item in configured for value in item["Values"]]
    amazon = {*AMAZON_DNS, str(ipaddress.ip_network(found["CidrBlock"])[2])}
    own = [server for server in servers if server not in amazon]
    if missing := sorted(set(own) - {str(address) for address in subject.settings.vpc.resolvers}):
        yield problem(
            "hosts cannot reach the VPC's DNS servers",
            value=f"{found['DhcpOptionsId']}: {', '.join(missing)}",
            rule="security groups filter every DNS server but Amazon's, and without DNS no host joins its cluster",
            remedy=f"add them to trnpipe.vpc.resolvers: [{', '.join(own)}]",
        )
    if not off and not missing:
        yield ok("VPC", f"{vpc_id}, DNS on: {', '.join(servers) or AMAZON_DNS[0]}")


@check("Network", "ec2:DescribeSubnets", "ec2:DescribeRouteTables")
def subnets(subject: Subject) -> Findings:
    if subject.settings.vpc is None:
        return
    wanted = subject.blueprint.subnet_ids()
    absent = problem(
        "a subnet does not exist",
        rule=f"{', '.join(wanted)} in {subject.settings.region}",
        remedy=f"aws ec2 describe-subnets --filters Name=vpc-id,Values={subject.settings.vpc.vpc_id}",
    )
    found = subject.require(absent, "ec2", "DescribeSubnets", SubnetIds=wanted)["Subnets"]
    nodes = max(subject.settings.allowed_nodes)
    for subnet in found:
        named = f"{subnet['SubnetId']} ({subnet['CidrBlock']}, {subnet['AvailabilityZone']})"
        if subnet["VpcId"] != subject.settings.vpc.vpc_id:
            yield problem(
                "a subnet is in another VPC",
                value=f"{named}: {subnet['VpcId']}",
                rule=f"trnpipe.vpc.vpc_id is {subject.settings.vpc.vpc_id}",
                remedy="correct one of them",
            )
        # The widest gang, and one host or task of each other fleet.
        needed = sum(
            nodes * (fleet.interfaces + GANG_TASK_INTERFACES) if fleet.forms_gangs else fleet.interfaces
            for fleet in subject.blueprint.fleets()
            if subnet["SubnetId"] in fleet.subnet_ids
        )
        free = subnet["AvailableIpAddressCount"]
        yield (
            ok("subnet", f"{named}: {free} addresses free, {needed} needed")
            if free >= needed
            else problem(
                "a subnet has too few free addresses",
                value=f"{named}: {free} free",
                rule=f"the widest gang takes {needed}: every EFA interface of every node has one, and every container one more",
                remedy="name a larger subnet, or lower allowed_nodes",
            )
        )
        table = route_table(subject, subnet["SubnetId"], subnet["VpcId"])
        if gateways := [route["GatewayId"] for route in table.get("Routes", ()) if route.get("GatewayId", "").startswith("igw-")]:
            yield problem(
                "a subnet is public",
                value=f"{subnet['SubnetId']} routes to {', '.join(gateways)}",
                rule="containers of gangs and hosts with several interfaces get no public address, and would have no way out",
                remedy="name a private subnet: its way out is a NAT gateway or endpoints",
            )
    if all(subnet["AvailabilityZone"] != subject.settings.zone for subnet in found):
        yield problem(
            "no subnet is in the zone of the gangs",
            value=", ".join(f"{subnet['SubnetId']} in {subnet['AvailabilityZone']}" for subnet in found),
            rule=f"trnpipe.zone is {subject.settings.zone}: a gang's hosts share one placement group",
            remedy="name a subnet of that zone, or set trnpipe.zone to the subnet's",
        )


@check("Network", "ec2:DescribeVpcEndpoints", "ec2:DescribeRouteTables", "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets")
def endpoints(subject: Subject) -> Findings:
    if subject.settings.vpc is None:
        return
    vpc_id, region = subject.settings.vpc.vpc_id, subject.settings.region
    found = subject.ask("ec2", "DescribeVpcEndpoints", Filters=[{"Name": "vpc-id", "Values": [vpc_id]}])["VpcEndpoints"]
    by_service = {endpoint["ServiceName"].partition(f"{region}.")[2]: endpoint for endpoint in found}
    tables = {subnet: route_table(subject, subnet, vpc_id) for subnet in subject.blueprint.subnet_ids()}
    if not (without_way_out := {subnet: table for subnet, table in tables.items() if not way_out(table)}):
        yield ok("services are reached through", ", ".join(sorted({way_out(table) for table in tables.values()})))
    missing = []
    for service in GATEWAY_SERVICES:
        routed = by_service.get(service, {}).get("RouteTableIds", [])
        cut_off = [subnet for subnet, table in without_way_out.items() if table.get("RouteTableId") not in routed]
        if cut_off and by_service.get(service, {}).get("VpcEndpointType") != "Interface":
            missing.append(f"{service} (gateway, in the route tables of {', '.join(cut_off)})")
    for service in subject.blueprint.endpoint_services:
        if (endpoint := by_service.get(service)) is None:
            missing += [service] if without_way_out else []
        else:
            yield from _judge_endpoint(subject, service, endpoint, subject.settings.vpc.default_security_group_id)
    if missing:
        yield problem(
            "hosts cannot reach services that they need",
            value=", ".join(missing),
            rule="a private subnet needs an endpoint for each of them, or a route to a NAT or transit gateway",
            remedy=f"aws ec2 create-vpc-endpoint --vpc-id {vpc_id} --vpc-endpoint-type Interface --private-dns-enabled "
            f"--subnet-ids {' '.join(tables)} --service-name com.amazonaws.{region}.SERVICE (Gateway for s3, dynamodb)",
        )
    elif without_way_out:
        yield ok("endpoints", ", ".join((*GATEWAY_SERVICES, *subject.blueprint.endpoint_services)))


@check("Network", "ec2:DescribeVpcEndpointServices")
def service_zones(subject: Subject) -> Findings:
    """Every endpoint service exists in the zones of our own VPC's endpoints: not every zone that has trn1 has every service."""
    if subject.settings.vpc is not None:
        return
    zones = subject.settings.zones_of_services
    endpoints = subject.blueprint.resources("AWS::EC2::VPCEndpoint").values()
    names = sorted(one["ServiceName"] for one in endpoints if one["VpcEndpointType"] == "Interface")
    found = subject.ask("ec2", "DescribeVpcEndpointServices", ServiceNames=names)["ServiceDetails"]
    offered = {one["ServiceName"]: set(one["AvailabilityZones"]) for one in found}
    missing = {name: absent for name in names if (absent := sorted(set(zones) - offered.get(name, set())))}
    everywhere = sorted(set.intersection(*(offered.get(name, set()) for name in names)))
    yield (
        problem(
            "endpoints cannot be in the zones of the settings",
            value=", ".join(f"{name} not in {' and '.join(absent)}" for name, absent in missing.items()),
            rule=f"they are to be in {', '.join(zones)}; all zones of the VPC reach them wherever they are",
            remedy=f"set trnpipe.service_zones to some of: {', '.join(everywhere) or 'no zone has all of them'}",
        )
        if missing
        else ok("endpoints can be in", ", ".join(zones))
    )


def _judge_endpoint(subject: Subject, service: str, endpoint: Mapping[str, Any], default: str) -> Findings:
    """
    Args:
        default: the default security group, which a gang's containers have.
    """
    named = f"{service} ({endpoint['VpcEndpointId']})"
    if endpoint["State"].lower() != "available":
        yield problem(
            "an endpoint is not available", value=f"{named}: {endpoint['State']}", remedy="wait for it, or create it again"
        )
    if not endpoint.get("PrivateDnsEnabled"):
        yield problem(
            "an endpoint does not answer under its service's name",
            value=named,
            rule="agents and SDKs call the service's own name, which private DNS leads to the endpoint",
            remedy=f"aws ec2 modify-vpc-endpoint --vpc-endpoint-id {endpoint['VpcEndpointId']} --private-dns-enabled",
        )
    if not (group_ids := sorted(group["GroupId"] for group in endpoint.get("Groups", ()))):
        return
    groups = subject.ask("ec2", "DescribeSecurityGroups", GroupIds=group_ids)["SecurityGroups"]
    subnets = subject.ask("ec2", "DescribeSubnets", SubnetIds=subject.blueprint.subnet_ids())["Subnets"]
    blocks = [subnet["CidrBlock"] for subnet in subnets]
    rules = [rule for group in groups for rule in group.get("IpPermissions", ()) if _covers(rule, HTTPS)]
    from_groups = {group for rule in rules for group in _groups(rule)}
    allowed = [ipaddress.IPv4Network(one["CidrIp"]) for rule in rules for one in rule.get("IpRanges", ())]
    uncovered = [block for block in blocks if not any(ipaddress.IPv4Network(block).subnet_of(one) for one in allowed)]
    if default not in from_groups and uncovered:
        yield problem(
            "an endpoint does not let our containers' calls in",
            value=f"{named}: {', '.join(group_ids)}",
            rule=f"one of its security groups takes {HTTPS} from the subnets or from the default group {default}",
            remedy=f"aws ec2 authorize-security-group-ingress --group-id {group_ids[0]} --protocol tcp --port {HTTPS} "
            f"--cidr {blocks[0]}",
        )


@check("Network", "ec2:DescribeSecurityGroups", "cloudformation:ListStackResources")
def default_group(subject: Subject) -> Findings:
    """The group that containers of gangs get: an existing VPC's before, and our own VPC's after it was deployed."""
    existing = subject.settings.vpc
    if existing is not None:
        vpc_id = existing.vpc_id
        selected: dict[str, Any] = {"GroupIds": [existing.default_security_group_id]}
    elif subject.after and (vpcs := subject.physical(subject.blueprint.pipeline_stack, "AWS::EC2::VPC")):
        [vpc_id] = vpcs
        selected = {"Filters": [{"Name": "vpc-id", "Values": [vpc_id]}, {"Name": "group-name", "Values": ["default"]}]}
    else:
        return
    absent = problem(
        "the default security group does not exist",
        rule="trnpipe.vpc.default_security_group_id",
        remedy=f"aws ec2 describe-security-groups --filters Name=vpc-id,Values={vpc_id} Name=group-name,Values=default",
    )
    [group] = subject.require(absent, "ec2", "DescribeSecurityGroups", **selected)["SecurityGroups"]
    group_id = group["GroupId"]
    inwards, outwards = group.get("IpPermissions", ()), group.get("IpPermissionsEgress", ())
    shut = [
        (server, protocol)
        for server in (existing.resolvers if existing else ())
        for protocol in ("udp", "tcp")
        if not any(
            server in ipaddress.IPv4Network(one["CidrIp"])
            for rule in outwards
            if _covers(rule, DNS, protocol)
            for one in rule.get("IpRanges", ())
        )
    ]
    meet = "the nodes of a gang meet over the interfaces that have this group"
    authorize = "aws ec2 authorize-security-group-{} --group-id " + f"{group_id} --ip-permissions "
    itself = f"'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group_id}}}]'"
    expected = (
        (
            group["GroupName"] == "default" and group["VpcId"] == vpc_id,
            f"the group is not the default security group of {vpc_id}",
            "Batch gives a gang's containers the VPC's default group, whatever the settings say",
            f"aws ec2 describe-security-groups --filters Name=vpc-id,Values={vpc_id} Name=group-name,Values=default",
        ),
        (
            any(_all(rule) and group_id in _groups(rule) for rule in inwards),
            "the default security group does not let its own members in",
            meet,
            authorize.format("ingress") + itself,
        ),
        (
            any(
                _all(rule) and (group_id in _groups(rule) or any(one["CidrIp"] == ANYWHERE for one in rule.get("IpRanges", ())))
                for rule in outwards
            ),
            "the default security group does not let its members out to each other",
            meet,
            authorize.format("egress") + itself,
        ),
        (
            # To anything but the group itself.
            any(
                _covers(rule, HTTPS) and (_groups(rule) - {group_id} or rule.get("IpRanges") or rule.get("PrefixListIds"))
                for rule in outwards
            ),
            f"the default security group lets nothing out to {HTTPS}",
            "a gang's containers read and write S3 over the interfaces that have this group",
            authorize.format("egress") + f"'IpProtocol=tcp,FromPort={HTTPS},ToPort={HTTPS},IpRanges=[{{CidrIp={ANYWHERE}}}]'",
        ),
        (
            not shut,
            "the default security group does not let a gang's containers ask the VPC's DNS servers",
            f"port {DNS} outwards to trnpipe.vpc.resolvers, UDP and TCP",
            authorize.format("egress")
            + " ".join(
                f"'IpProtocol={protocol},FromPort={DNS},ToPort={DNS},IpRanges=[{{CidrIp={server}/32}}]'"
                for server, protocol in shut
            ),
        ),
    )
    value = f"{group_id} ({group['GroupName']!r} of {group['VpcId']})"
    wrong = [problem(what, value=value, rule=rule, remedy=remedy) for fine, what, rule, remedy in expected if not fine]
    yield from wrong
    if not wrong:
        yield ok("default security group", f"{group_id} allows itself, and {HTTPS} outwards")


def route_table(subject: Subject, subnet_id: str, vpc_id: str) -> Mapping[str, Any]:
    """The route table that holds for a subnet: its own, else the VPC's main one; {} without any."""
    tables = subject.ask("ec2", "DescribeRouteTables", Filters=[{"Name": "vpc-id", "Values": [vpc_id]}])["RouteTables"]
    held = {"main" if one["Main"] else one.get("SubnetId"): table for table in tables for one in table["Associations"]}
    return held.get(subnet_id) or held.get("main") or {}


def way_out(table: Mapping[str, Any]) -> str:
    """The gateway or interface through which a private subnet reaches everything, "" without one."""
    active = [route for route in table.get("Routes", ()) if route.get("State") == "active"]
    outwards = [route for route in active if route.get("DestinationCidrBlock") == ANYWHERE]
    keys = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "VpcPeeringConnectionId")
    return next((str(route[key]) for route in outwards for key in keys if key in route), "")


def _covers(rule: Mapping[str, Any], port: int, protocol: str = "tcp") -> bool:
    """Whether a rule is about a port, for one protocol or all."""
    return _all(rule) or (rule["IpProtocol"] == protocol and rule["FromPort"] <= port <= rule["ToPort"])


def _groups(rule: Mapping[str, Any]) -> set[str]:
    """Ids of the security groups that a rule names."""
    return {pair["GroupId"] for pair in rule.get("UserIdGroupPairs", ())}


def _all(rule: Mapping[str, Any]) -> bool:
    return str(rule["IpProtocol"]) == "-1"
