"""Subnets of the hosts, and which traffic their security groups allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.infra.conftest import deploy

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
    assert [subnet["CidrBlock"] for subnet in subnets] == ["10.0.48.0/20", "10.0.0.0/20", "10.0.16.0/20"]
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets)
    tables = small_deployment.resources("AWS::EC2::RouteTable")
    for endpoint in small_deployment.resources("AWS::EC2::VPCEndpoint"):
        if endpoint["VpcEndpointType"] == "Gateway":
            assert len(endpoint["RouteTableIds"]) == len(tables) == 3
        else:
            assert len(endpoint["SubnetIds"]) == 3


def test_endpoints_and_fargate_may_be_where_no_host_is(tmp_path: Path) -> None:
    found = deploy(tmp_path, service_zones=["us-west-2c"])
    zones = {
        key: resource["Properties"]["AvailabilityZone"]
        for key, resource in found.pipeline["Resources"].items()
        if resource["Type"] == "AWS::EC2::Subnet"
    }
    assert sorted(zones.values()) == ["us-west-2c", "us-west-2d"]
    interfaces = [one for one in found.resources("AWS::EC2::VPCEndpoint") if one["VpcEndpointType"] == "Interface"]
    [fargate] = [
        one["ComputeResources"]
        for one in found.resources("AWS::Batch::ComputeEnvironment")
        if one["ComputeResources"]["Type"] == "FARGATE"
    ]
    for subnets in (fargate["Subnets"], *(one["SubnetIds"] for one in interfaces)):
        assert [zones[subnet["Ref"]] for subnet in subnets] == ["us-west-2c"]


def test_without_efa_there_is_no_group_for_it(small_deployment: Any) -> None:
    described = [group["GroupDescription"] for group in small_deployment.resources(GROUP)]
    assert sorted(described) == ["Endpoints of AWS services", "Hosts and tasks that work alone"]


def test_the_services_that_jobs_call_have_endpoints(deployment: Any) -> None:
    endpoints = deployment.resources("AWS::EC2::VPCEndpoint")
    names = " ".join(str(endpoint["ServiceName"]) for endpoint in endpoints)
    for service in ("s3", "dynamodb", "ecr.api", "ecr.dkr", "logs", "ecs", "ecs-agent", "ecs-telemetry", "batch"):
        assert f".{service}" in names
    assert [endpoint["VpcEndpointType"] for endpoint in endpoints].count("Gateway") == 2


def test_hosts_of_a_given_vpc_reach_its_dns_servers_and_what_the_settings_add(other_deployment: Any) -> None:
    groups = other_deployment.resources(GROUP)
    assert len(groups) == 2
    for group in groups:
        outward = {
            (rule["IpProtocol"], rule["FromPort"], rule["CidrIp"]) for rule in group["SecurityGroupEgress"] if "CidrIp" in rule
        }
        assert outward == {
            ("tcp", 443, "0.0.0.0/0"),
            ("udp", 53, "10.9.0.2/32"),
            ("tcp", 53, "10.9.0.2/32"),
            ("tcp", 3128, "10.9.1.0/24"),
        }


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


@pytest.mark.parametrize("fixture", ["deployment", "smoke_deployment"])
def test_hosts_of_every_group_reach_the_endpoints(request: pytest.FixtureRequest, fixture: str) -> None:
    resources = request.getfixturevalue(fixture).pipeline["Resources"]
    groups = {name: each["Properties"]["GroupDescription"] for name, each in resources.items() if each["Type"] == GROUP}
    [endpoints] = [name for name, description in groups.items() if description.startswith("Endpoints")]
    rules = [each["Properties"] for each in resources.values() if each["Type"] == INGRESS]
    inward = [rule for rule in rules if rule["GroupId"]["Fn::GetAtt"][0] == endpoints and rule["FromPort"] == 443]
    assert groups.keys() - {endpoints} <= {rule["SourceSecurityGroupId"]["Fn::GetAtt"][0] for rule in inward}


def test_an_existing_vpc_is_used_and_not_changed(other_deployment: Any) -> None:
    for kind in ("VPC", "Subnet", "VPCEndpoint", "RouteTable"):
        assert other_deployment.resources(f"AWS::EC2::{kind}") == []
    for properties in other_deployment.resources("AWS::Batch::ComputeEnvironment"):
        assert properties["ComputeResources"]["Subnets"] == ["subnet-0a1b2c3d"]
    assert {group["VpcId"] for group in other_deployment.resources(GROUP)} == {"vpc-0a1b2c3d"}
