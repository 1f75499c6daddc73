"""Where hosts live and who may talk to whom."""

from __future__ import annotations

from typing import Any

GROUP, INGRESS, EGRESS = (f"AWS::EC2::SecurityGroup{suffix}" for suffix in ("", "Ingress", "Egress"))


def test_nothing_reaches_the_internet_and_nothing_is_reached_from_it(deployment: Any) -> None:
    for kind in ("InternetGateway", "NatGateway", "EIP"):
        assert deployment.resources(f"AWS::EC2::{kind}") == []
    [subnet] = deployment.resources("AWS::EC2::Subnet")
    assert subnet["MapPublicIpOnLaunch"] is False
    assert subnet["AvailabilityZone"] == "us-west-2d"
    for group in (*deployment.resources(GROUP), *deployment.resources(INGRESS)):
        for rule in (group, *group.get("SecurityGroupIngress", ())):
            assert rule.get("CidrIp") is None


def test_every_zone_has_a_private_subnet_and_ways_to_the_services(small_deployment: Any) -> None:
    subnets = small_deployment.resources("AWS::EC2::Subnet")
    assert [subnet["AvailabilityZone"] for subnet in subnets] == ["us-west-2d", "us-west-2a", "us-west-2b"]
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets)
    tables = small_deployment.resources("AWS::EC2::RouteTable")
    for endpoint in small_deployment.resources("AWS::EC2::VPCEndpoint"):
        if endpoint["VpcEndpointType"] == "Gateway":
            assert len(endpoint["RouteTableIds"]) == len(tables) == 3
        else:
            assert len(endpoint["SubnetIds"]) == 3


def test_without_efa_there_is_no_group_for_it(small_deployment: Any) -> None:
    described = [group["GroupDescription"] for group in small_deployment.resources(GROUP)]
    assert sorted(described) == ["Endpoints of AWS services", "Hosts and tasks that work alone"]


def test_the_services_that_jobs_call_have_endpoints(deployment: Any) -> None:
    endpoints = deployment.resources("AWS::EC2::VPCEndpoint")
    names = " ".join(str(endpoint["ServiceName"]) for endpoint in endpoints)
    for service in ("s3", "dynamodb", "ecr.api", "ecr.dkr", "logs", "ecs", "ecs-agent", "ecs-telemetry", "batch"):
        assert f".{service}" in names
    assert [endpoint["VpcEndpointType"] for endpoint in endpoints].count("Gateway") == 2


def test_efa_traffic_is_allowed_between_the_gangs_nodes_in_both_directions(deployment: Any) -> None:
    [name] = [
        name
        for name, resource in deployment.pipeline["Resources"].items()
        if resource["Type"] == GROUP and resource["Properties"]["GroupDescription"].startswith("EFA")
    ]
    itself = {"Fn::GetAtt": [name, "GroupId"]}
    inward = [rule for rule in deployment.resources(INGRESS) if rule["GroupId"] == itself]
    outward = [rule for rule in deployment.resources(EGRESS) if rule["GroupId"] == itself]
    assert any(rule["SourceSecurityGroupId"] == itself and rule["IpProtocol"] == "-1" for rule in inward)
    assert any(rule["DestinationSecurityGroupId"] == itself and rule["IpProtocol"] == "-1" for rule in outward)


def test_the_default_group_keeps_its_rules_and_reaches_the_endpoints(deployment: Any) -> None:
    """A gang's containers have it on their interface; CDK can empty it with a custom resource, which must not be here."""
    assert deployment.resources("Custom::VpcRestrictDefaultSG") == []
    [vpc] = [name for name, resource in deployment.pipeline["Resources"].items() if resource["Type"] == "AWS::EC2::VPC"]
    default = {"Fn::GetAtt": [vpc, "DefaultSecurityGroup"]}
    assert [rule for rule in deployment.resources(INGRESS) if rule.get("SourceSecurityGroupId") == default]


def test_an_existing_vpc_is_used_and_not_changed(other_deployment: Any) -> None:
    for kind in ("VPC", "Subnet", "VPCEndpoint", "RouteTable"):
        assert other_deployment.resources(f"AWS::EC2::{kind}") == []
    for properties in other_deployment.resources("AWS::Batch::ComputeEnvironment"):
        assert properties["ComputeResources"]["Subnets"] == ["subnet-0a1b2c3d"]
    assert {group["VpcId"] for group in other_deployment.resources(GROUP)} == {"vpc-0a1b2c3d"}
