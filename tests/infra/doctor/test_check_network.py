"""The existing VPC, and the default group of our own: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Any

import pytest

from infra.doctor import check_network
from infra.doctor.asking import Refused
from infra.doctor.blueprint import Blueprint

VPC, SUBNET, TABLE, GROUP = "vpc-0a1b2c3d", "subnet-0a1b2c3d", "rtb-0a1b2c3d", "sg-0a1b2c3d"
SELF = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": GROUP}]}
ANYWHERE = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
HTTPS = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
NAT = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-0a", "State": "active"}
INTERNET = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-0a", "State": "active"}
LOCAL = {"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local", "State": "active"}
SUBNET_ANSWER = {
    "SubnetId": SUBNET,
    "VpcId": VPC,
    "AvailabilityZone": "us-east-2a",
    "CidrBlock": "10.0.0.0/20",
    "AvailableIpAddressCount": 4000,
}


def dns(support: bool, hostnames: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["Attribute"] == "enableDnsSupport":
            return {"VpcId": VPC, "EnableDnsSupport": {"Value": support}}
        return {"VpcId": VPC, "EnableDnsHostnames": {"Value": hostnames}}

    return answer


def vpc_answers(servers: list[str], support: bool = True, hostnames: bool = True) -> dict[str, Any]:
    configured = [{"Key": "domain-name-servers", "Values": [{"Value": server} for server in servers]}] if servers else []
    return {
        "ec2:DescribeVpcs": {"Vpcs": [{"VpcId": VPC, "CidrBlock": "10.0.0.0/16", "DhcpOptionsId": "dopt-1"}]},
        "ec2:DescribeVpcAttribute": dns(support, hostnames),
        "ec2:DescribeDhcpOptions": {"DhcpOptions": [{"DhcpOptionsId": "dopt-1", "DhcpConfigurations": configured}]},
    }


ENDPOINTS = ("batch", "ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs")


@pytest.mark.parametrize(
    ("zones", "expected"),
    [
        (["us-west-2a", "us-west-2d"], []),
        (["us-west-2a"], [("problem", "endpoints cannot be in the zones of the settings")]),
    ],
)
def test_zones_of_endpoints(
    blueprint: Blueprint, other_blueprint: Blueprint, look: Any, bad: Any, zones: list[str], expected: Any
) -> None:
    details = [
        {
            "ServiceName": f"com.amazonaws.us-west-2.{name}",
            "AvailabilityZones": zones if name == "batch" else ["us-west-2a", "us-west-2d"],
        }
        for name in ENDPOINTS
    ]
    answers = {"ec2:DescribeVpcEndpointServices": {"ServiceDetails": details}}
    findings = look(check_network.service_zones, blueprint, answers)
    assert bad(findings) == expected
    if expected:
        assert findings[0].value == "com.amazonaws.us-west-2.batch not in us-west-2d"
        assert findings[0].remedy.endswith("some of: us-west-2a")
    assert look(check_network.service_zones, other_blueprint, {}) == []


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ((True, True), []),
        ((False, True), [("problem", "DNS is off in the VPC")]),
        ((True, False), [("problem", "DNS is off in the VPC")]),
    ],
)
def test_vpc(other_blueprint: Blueprint, look: Any, bad: Any, attributes: tuple[bool, bool], expected: Any) -> None:
    assert bad(look(check_network.vpc, other_blueprint, vpc_answers([], *attributes))) == expected


def test_a_vpc_that_is_not_there(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    gone = {"ec2:DescribeVpcs": Refused("InvalidVpcID.NotFound", "")}
    assert bad(look(check_network.vpc, other_blueprint, gone)) == [("problem", "the VPC does not exist")]


def tables(*routes: dict[str, Any], main_only: bool = False) -> dict[str, Any]:
    """The subnet's route table has these routes: its own, next to a main one that leads nowhere, or the main one."""
    own = {"RouteTableId": TABLE, "Routes": [LOCAL, *routes], "Associations": [{"Main": False, "SubnetId": SUBNET}]}
    main = {"RouteTableId": "rtb-0f", "Routes": [LOCAL], "Associations": [{"Main": True}]}
    return {"RouteTables": [{**own, "Associations": main["Associations"]}] if main_only else [main, own]}


@pytest.mark.parametrize(
    ("subnet", "routes", "main_only", "expected"),
    [
        ({}, [], False, []),
        ({}, [NAT], True, []),
        # Two nodes of 16 interfaces and one task each, a host of embed, a Fargate task.
        ({"AvailableIpAddressCount": 36}, [], False, []),
        ({"AvailableIpAddressCount": 35}, [], False, [("problem", "a subnet has too few free addresses")]),
        ({"VpcId": "vpc-0f"}, [], False, [("problem", "a subnet is in another VPC")]),
        ({}, [INTERNET], False, [("problem", "a subnet is public")]),
        ({}, [INTERNET], True, [("problem", "a subnet is public")]),
        ({"AvailabilityZone": "us-east-2b"}, [], False, [("problem", "no subnet is in the zone of the gangs")]),
    ],
)
def test_subnets(
    other_blueprint: Blueprint, look: Any, bad: Any, subnet: Any, routes: Any, main_only: bool, expected: Any
) -> None:
    answers = {
        "ec2:DescribeSubnets": {"Subnets": [{**SUBNET_ANSWER, **subnet}]},
        "ec2:DescribeRouteTables": tables(*routes, main_only=main_only),
    }
    assert bad(look(check_network.subnets, other_blueprint, answers)) == expected


def test_a_subnet_that_is_not_there(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    gone = {"ec2:DescribeSubnets": Refused("InvalidSubnetID.NotFound", "")}
    assert bad(look(check_network.subnets, other_blueprint, gone)) == [("problem", "a subnet does not exist")]


def endpoint(service: str, **change: Any) -> dict[str, Any]:
    gateway = service in ("s3", "dynamodb")
    kind: dict[str, Any] = (
        {"VpcEndpointType": "Gateway", "RouteTableIds": [TABLE]}
        if gateway
        else {"VpcEndpointType": "Interface", "PrivateDnsEnabled": True, "Groups": [{"GroupId": "sg-0e"}]}
    )
    named = {"VpcEndpointId": f"vpce-{service}", "ServiceName": f"com.amazonaws.us-east-2.{service}", "State": "Available"}
    return {**named, **kind, **change}


SERVICES = ("s3", "dynamodb", "ecr.api", "ecr.dkr", "logs", "ecs", "ecs-agent", "ecs-telemetry", "batch")
FROM_SUBNET = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": [{"CidrIp": "10.0.0.0/16"}]}
FROM_ELSEWHERE = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": [{"CidrIp": "10.1.0.0/16"}]}
FROM_GROUP = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "UserIdGroupPairs": [{"GroupId": GROUP}]}
OTHER_PORT = {"IpProtocol": "tcp", "FromPort": 80, "ToPort": 80, "IpRanges": [{"CidrIp": "10.0.0.0/16"}]}


def way_answers(endpoints: list[dict[str, Any]], *routes: dict[str, Any], rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ec2:DescribeVpcEndpoints": {"VpcEndpoints": endpoints},
        "ec2:DescribeRouteTables": tables(*routes),
        "ec2:DescribeSecurityGroups": {"SecurityGroups": [{"GroupId": "sg-0e", "IpPermissions": rules}]},
        "ec2:DescribeSubnets": {"Subnets": [SUBNET_ANSWER]},
    }


def test_all_services_are_asked_for(other_blueprint: Blueprint) -> None:
    assert {*other_blueprint.endpoint_services, "s3", "dynamodb"} == set(SERVICES)


def test_endpoints_for_everything_are_enough(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    for rule in (FROM_SUBNET, FROM_GROUP):
        answers = way_answers([endpoint(one) for one in SERVICES], rules=[rule])
        assert bad(look(check_network.endpoints, other_blueprint, answers)) == []


def test_a_nat_gateway_is_enough(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    assert bad(look(check_network.endpoints, other_blueprint, way_answers([], NAT, rules=[]))) == []
    dead = {**NAT, "State": "blackhole"}
    assert len(bad(look(check_network.endpoints, other_blueprint, way_answers([], dead, rules=[])))) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_each_missing_endpoint_is_named(other_blueprint: Blueprint, look: Any, service: str) -> None:
    there = [endpoint(one) for one in SERVICES if one != service]
    [finding] = [
        one for one in look(check_network.endpoints, other_blueprint, way_answers(there, rules=[FROM_SUBNET])) if one.remedy
    ]
    assert finding.what == "hosts cannot reach services that they need"
    assert finding.value.split(" ")[0] == service


def test_a_gateway_in_other_route_tables_does_not_help(other_blueprint: Blueprint, look: Any) -> None:
    there = [endpoint(one, **({"RouteTableIds": ["rtb-0f"]} if one == "s3" else {})) for one in SERVICES]
    [finding] = [
        one for one in look(check_network.endpoints, other_blueprint, way_answers(there, rules=[FROM_SUBNET])) if one.remedy
    ]
    assert finding.value == f"s3 (gateway, in the route tables of {SUBNET})"


@pytest.mark.parametrize(
    ("change", "rules", "expected"),
    [
        ({"State": "PendingAcceptance"}, [FROM_SUBNET], "an endpoint is not available"),
        ({"PrivateDnsEnabled": False}, [FROM_SUBNET], "an endpoint does not answer under its service's name"),
        ({}, [FROM_ELSEWHERE], "an endpoint does not let our containers' calls in"),
        ({}, [OTHER_PORT], "an endpoint does not let our containers' calls in"),
        ({}, [], "an endpoint does not let our containers' calls in"),
    ],
)
def test_an_endpoint_that_does_not_serve(
    other_blueprint: Blueprint, look: Any, bad: Any, change: Any, rules: Any, expected: str
) -> None:
    others = [endpoint(one, **({} if one in ("s3", "dynamodb") else {"Groups": []})) for one in SERVICES if one != "ecr.api"]
    there = [*others, endpoint("ecr.api", **change)]
    assert bad(look(check_network.endpoints, other_blueprint, way_answers(there, rules=rules))) == [("problem", expected)]


def group(**change: Any) -> dict[str, Any]:
    good = {
        "GroupId": GROUP,
        "GroupName": "default",
        "VpcId": VPC,
        "IpPermissions": [SELF],
        "IpPermissionsEgress": [ANYWHERE],
    }
    return {**good, **change}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"IpPermissionsEgress": [SELF, HTTPS]}, []),
        ({"GroupName": "mine"}, [f"the group is not the default security group of {VPC}"]),
        ({"VpcId": "vpc-0f"}, [f"the group is not the default security group of {VPC}"]),
        ({"IpPermissions": []}, ["the default security group does not let its own members in"]),
        ({"IpPermissions": [HTTPS]}, ["the default security group does not let its own members in"]),
        ({"IpPermissionsEgress": [HTTPS]}, ["the default security group does not let its members out to each other"]),
        ({"IpPermissionsEgress": [SELF]}, ["the default security group lets nothing out to 443"]),
        (
            {"IpPermissions": [], "IpPermissionsEgress": []},
            [
                "the default security group does not let its own members in",
                "the default security group does not let its members out to each other",
                "the default security group lets nothing out to 443",
            ],
        ),
    ],
)
def test_default_group(other_blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: list[str]) -> None:
    answers = {"ec2:DescribeSecurityGroups": {"SecurityGroups": [group(**change)]}}
    findings = look(check_network.default_group, other_blueprint, answers, vpc=named_resolvers(other_blueprint))
    assert [what for _, what in bad(findings)] == expected


def test_a_default_group_that_is_not_there(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    gone = {"ec2:DescribeSecurityGroups": Refused("InvalidGroup.NotFound", "")}
    assert bad(look(check_network.default_group, other_blueprint, gone)) == [
        ("problem", "the default security group does not exist")
    ]


def test_the_default_group_of_our_own_vpc_is_looked_at_afterwards(blueprint: Blueprint, look: Any, bad: Any) -> None:
    resource = {
        "LogicalResourceId": "Vpc",
        "ResourceType": "AWS::EC2::VPC",
        "PhysicalResourceId": VPC,
        "ResourceStatus": "CREATE_COMPLETE",
        "LastUpdatedTimestamp": "2026-01-01T00:00:00Z",
    }
    answers = {
        "cloudformation:ListStackResources": {"StackResourceSummaries": [resource]},
        "ec2:DescribeSecurityGroups": {"SecurityGroups": [group(IpPermissions=[])]},
    }
    assert look(check_network.default_group, blueprint, answers) == []
    assert bad(look(check_network.default_group, blueprint, answers, after=True)) == [
        ("problem", "the default security group does not let its own members in")
    ]


def test_a_vpc_of_our_own_needs_no_look_before(blueprint: Blueprint, look: Any) -> None:
    assert [look(one, blueprint, {}) for one in (check_network.vpc, check_network.subnets, check_network.endpoints)] == [
        [],
        [],
        [],
    ]


OUT = [
    {"IpProtocol": protocol, "FromPort": 53, "ToPort": 53, "IpRanges": [{"CidrIp": "10.9.0.0/24"}]} for protocol in ("udp", "tcp")
]
UNREACHABLE = ("problem", "hosts cannot reach the VPC's DNS servers")
SHUT = ("problem", "the default security group does not let a gang's containers ask the VPC's DNS servers")


def named_resolvers(blueprint: Blueprint, *addresses: str) -> Any:
    """The settings' existing VPC with these DNS servers."""
    assert blueprint.settings.vpc is not None
    return blueprint.settings.vpc.model_copy(update={"resolvers": tuple(map(IPv4Address, addresses))})


@pytest.mark.parametrize(
    ("servers", "named", "expected"),
    [
        (["AmazonProvidedDNS"], [], []),
        (["169.254.169.253", "10.0.0.2"], [], []),
        ([], [], []),
        (["10.9.0.2"], ["10.9.0.2"], []),
        (["10.9.0.2", "10.9.0.3"], ["10.9.0.2"], [UNREACHABLE]),
    ],
)
def test_hosts_reach_the_dns_servers_that_the_settings_name(
    other_blueprint: Blueprint, look: Any, bad: Any, servers: list[str], named: list[str], expected: Any
) -> None:
    vpc = named_resolvers(other_blueprint, *named)
    assert bad(look(check_network.vpc, other_blueprint, vpc_answers(servers), vpc=vpc)) == expected


@pytest.mark.parametrize(
    ("named", "rules", "expected"),
    [
        ([], [], []),
        (["10.9.0.2"], OUT, []),
        (["10.9.0.2"], [ANYWHERE], []),
        (["10.9.0.2"], [], [SHUT]),
        (["10.9.1.2"], OUT, [SHUT]),
        # UDP alone: long answers come over TCP.
        (["10.9.0.2"], OUT[:1], [SHUT]),
    ],
)
def test_containers_of_gangs_reach_the_dns_servers(
    other_blueprint: Blueprint, look: Any, bad: Any, named: list[str], rules: Any, expected: Any
) -> None:
    answers = {"ec2:DescribeSecurityGroups": {"SecurityGroups": [group(IpPermissionsEgress=[SELF, HTTPS, *rules])]}}
    vpc = named_resolvers(other_blueprint, *named)
    assert bad(look(check_network.default_group, other_blueprint, answers, vpc=vpc)) == expected
