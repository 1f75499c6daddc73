"""Compute environments, launch templates and queues, as Batch would take them."""

from __future__ import annotations

import base64
import email
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract import STAGES, Queue
from tests.infra.batch_rules import ACTED_ON, Batch, problems
from tests.infra.conftest import deploy

ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
QUEUE = "AWS::Batch::JobQueue"


def environment(deployment: Any, instance_type: str | None) -> dict[str, Any]:
    """Resources of the compute environment with an instance type (None: Fargate); of two alike, that of the gangs."""
    found = [each["ComputeResources"] for each in deployment.resources(ENVIRONMENT)]
    matching = [each for each in found if each.get("InstanceTypes") == (None if instance_type is None else [instance_type])]
    resources: dict[str, Any] = max(matching, key=lambda each: "PlacementGroup" in each)
    return resources


def templates(deployment: Any) -> list[dict[str, Any]]:
    return [each["LaunchTemplateData"] for each in deployment.resources("AWS::EC2::LaunchTemplate")]


def test_gangs_get_on_demand_hosts_in_one_placement_group_and_pay_for_none_when_idle(deployment: Any) -> None:
    resources = environment(deployment, "trn1.32xlarge")
    assert (resources["Type"], resources["AllocationStrategy"]) == ("EC2", "BEST_FIT_PROGRESSIVE")
    assert resources["MinvCpus"] == 0
    # Four nodes of 128, and one host more.
    assert resources["MaxvCpus"] == 640
    assert "PlacementGroup" in resources
    assert deployment.only("AWS::EC2::PlacementGroup")["Strategy"] == "cluster"
    assert len(resources["Subnets"]) == 1


def test_gangs_security_groups_stand_on_the_interfaces_only(deployment: Any) -> None:
    """Batch refuses an environment that names groups in addition to a launch template with interfaces."""
    assert "SecurityGroupIds" not in environment(deployment, "trn1.32xlarge")
    [with_interfaces] = [template for template in templates(deployment) if "NetworkInterfaces" in template]
    assert "SecurityGroupIds" not in with_interfaces
    assert all(len(interface["Groups"]) == 1 for interface in with_interfaces["NetworkInterfaces"])


@pytest.mark.parametrize(("fixture", "cards"), [("deployment", 8), ("other_deployment", 16)])
def test_every_network_card_has_one_efa_interface(request: pytest.FixtureRequest, fixture: str, cards: int) -> None:
    [template] = [each for each in templates(request.getfixturevalue(fixture)) if "NetworkInterfaces" in each]
    interfaces = template["NetworkInterfaces"]
    assert [interface["NetworkCardIndex"] for interface in interfaces] == list(range(cards))
    assert [interface["DeviceIndex"] for interface in interfaces] == [0] + [1] * (cards - 1)
    assert {interface["InterfaceType"] for interface in interfaces} == {"efa"}
    assert not any(interface.get("AssociatePublicIpAddress") for interface in interfaces)


def test_hosts_have_encrypted_disks_and_the_second_metadata_version(deployment: Any) -> None:
    for template in templates(deployment):
        [disk] = template["BlockDeviceMappings"]
        assert disk["Ebs"]["Encrypted"] is True
        assert disk["Ebs"]["VolumeType"] == "gp3"
        assert template["MetadataOptions"]["HttpTokens"] == "required"


@pytest.mark.parametrize(
    ("fixture", "image"),
    [("deployment", "{{resolve:ssm:/trnpipe/ami/neuron-driver-2.27:1}}"), ("other_deployment", "ami-0123456789abcdef0")],
)
def test_the_image_is_the_pinned_one_and_the_template_the_latest(
    request: pytest.FixtureRequest, fixture: str, image: str
) -> None:
    found = [each["ComputeResources"] for each in request.getfixturevalue(fixture).resources(ENVIRONMENT)]
    with_hosts = [resources for resources in found if resources["Type"] == "EC2"]
    assert len(with_hosts) == 2
    for resources in with_hosts:
        assert resources["Ec2Configuration"] == [{"ImageType": "ECS_AL2023", "ImageIdOverride": image}]
        # A literal version, or `$Default`, would go stale.
        assert resources["LaunchTemplate"]["Version"]["Fn::GetAtt"][1] == "LatestVersionNumber"


def test_a_capacity_reservation_serves_the_gangs_only(other_deployment: Any, small_deployment: Any) -> None:
    assert ["CapacityReservationSpecification" in each for each in templates(small_deployment)] == [True, False]
    reserved = [each for each in templates(other_deployment) if "CapacityReservationSpecification" in each]
    [template] = reserved
    assert "NetworkInterfaces" in template
    target = template["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationResourceGroupArn": "arn:aws:resource-groups:us-east-2:123456789012:group/gangs"}
    # Hosts use what is reserved in their own placement group.
    assert environment(other_deployment, "trn1n.32xlarge")["PlacementGroup"] == "gangs"
    assert other_deployment.resources("AWS::EC2::PlacementGroup") == []


def test_hosts_of_a_capacity_block_are_placed_by_ec2(tmp_path: Path) -> None:
    """Launch template: "Launch instances using Capacity Blocks", EC2 User Guide."""
    found = deploy(tmp_path, capacity_reservation={"id": "cr-0a1b2c3d", "block": True})
    assert all("PlacementGroup" not in each["ComputeResources"] for each in found.resources(ENVIRONMENT))
    assert found.resources("AWS::EC2::PlacementGroup") == []
    reserved = [each for each in templates(found) if "InstanceMarketOptions" in each]
    assert len(reserved) == 1
    assert reserved[0]["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = reserved[0]["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-0a1b2c3d"}
    assert len(reserved[0]["NetworkInterfaces"]) == 8
    assert problems(Batch.of(found.stacks)) == []


def test_an_update_leaves_running_jobs_all_the_time_that_they_may_take(deployment: Any, small_deployment: Any) -> None:
    longest = max(spec.timeout_minutes for spec in STAGES.values())
    updates = [each["UpdatePolicy"] for each in small_deployment.resources(ENVIRONMENT) if "UpdatePolicy" in each]
    assert [update["JobExecutionTimeoutMinutes"] for update in updates] == [7200, 7200]
    for properties in deployment.resources(ENVIRONMENT):
        if properties["ComputeResources"]["Type"] == "EC2":
            assert properties["UpdatePolicy"] == {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": longest}
            assert properties["ReplaceComputeEnvironment"] is False


def test_agents_wait_for_large_images_and_keep_containers_from_the_host_s_role(deployment: Any, small_deployment: Any) -> None:
    for template in (*templates(deployment), *templates(small_deployment)):
        message = email.message_from_bytes(base64.b64decode(template["UserData"]))
        [script] = [part.get_payload() for part in message.walk() if part.get_content_type() == "text/x-shellscript"]
        assert isinstance(script, str)
        agent = dict(line.split("=") for line in script.splitlines() if line.startswith("ECS_"))
        assert agent == {
            "ECS_CONTAINER_CREATE_TIMEOUT": "15m",
            "ECS_CONTAINER_START_TIMEOUT": "15m",
            "ECS_IMAGE_PULL_BEHAVIOR": "prefer-cached",
            "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
            "ECS_AWSVPC_BLOCK_IMDS": "true",
        }
        # awsvpc is the gangs' network mode; other jobs share the host's network.
        [rule] = [line for line in script.splitlines() if line.startswith("iptables")]
        assert {"OUTPUT", "169.254.169.254/32", "ecstasks.slice", "REJECT"} <= set(rule.split())
        # The kernel takes no rule for a control group that does not exist, and before the first task nothing else starts it.
        assert "systemctl start ecstasks.slice" in script.partition(rule)[0].splitlines()


def test_every_queue_shares_fairly(deployment: Any) -> None:
    queues = {each["JobQueueName"]: each for each in deployment.resources(QUEUE)}
    assert set(queues) == {f"trnpipe-{queue.value}" for queue in Queue}
    assert all("SchedulingPolicyArn" in properties for properties in queues.values())
    policy = deployment.only("AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    weights = {share["ShareIdentifier"]: share["WeightFactor"] for share in policy["ShareDistribution"]}
    assert weights == {"weekly": 0.5, "manual": 1, "experiments": 4}
    # Anything held back could keep a gang of full width from ever starting.
    assert policy["ComputeReservation"] == 0


def test_a_part_can_be_held_back_and_shares_can_be_prefixes(small_deployment: Any) -> None:
    policy = small_deployment.only("AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    assert policy["ComputeReservation"] == 50
    assert {share["ShareIdentifier"] for share in policy["ShareDistribution"]} == {"weekly", "manual", "team*"}


def test_hosts_wait_for_their_next_job_as_long_as_set(deployment: Any, small_deployment: Any) -> None:
    for found, minutes in ((deployment, 20), (small_deployment, 45)):
        for each in found.resources(ENVIRONMENT):
            if each["ComputeResources"]["Type"] != "FARGATE":
                assert each["ComputeResources"]["ScalingPolicy"] == {"MinScaleDownDelayMinutes": minutes}


def test_hosts_without_efa_have_a_group_of_their_own_and_nothing_to_be_placed_with(small_deployment: Any) -> None:
    resources = environment(small_deployment, "trn1.2xlarge")
    assert len(resources["SecurityGroupIds"]) == 1
    assert "PlacementGroup" not in resources
    assert small_deployment.resources("AWS::EC2::PlacementGroup") == []
    assert not any("NetworkInterfaces" in template for template in templates(small_deployment))


def test_hosts_that_embed_may_be_spot_in_several_zones_and_gangs_never_are(small_deployment: Any) -> None:
    embed, train = (environment(small_deployment, kind) for kind in ("inf2.24xlarge", "trn1.2xlarge"))
    assert (embed["Type"], embed["AllocationStrategy"]) == ("SPOT", "SPOT_PRICE_CAPACITY_OPTIMIZED")
    assert (train["Type"], train["AllocationStrategy"]) == ("EC2", "BEST_FIT_PROGRESSIVE")
    assert (len(embed["Subnets"]), len(train["Subnets"])) == (2, 1)
    # The gangs' zone is none of the two, and jobs on Fargate may run in all.
    assert train["Subnets"][0] not in embed["Subnets"]
    fargate = environment(small_deployment, None)["Subnets"]
    assert len(fargate) == 3
    assert all(subnet in fargate for subnet in (*embed["Subnets"], *train["Subnets"]))


def test_a_job_that_cannot_start_is_cancelled_for_every_reason_that_batch_acts_on(deployment: Any) -> None:
    for properties in deployment.resources(QUEUE):
        limits = {action["Reason"]: action for action in properties["JobStateTimeLimitActions"]}
        assert limits.keys() == ACTED_ON
        assert limits["CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"]["MaxTimeSeconds"] == 6 * 3600
        assert all(600 <= action["MaxTimeSeconds"] <= 86_400 for action in limits.values())
        assert {(action["State"], action["Action"]) for action in limits.values()} == {("RUNNABLE", "CANCEL")}


def test_hosts_with_gpus_boot_the_image_that_has_their_driver(gpu_deployment: Any) -> None:
    train, embed = (each["ComputeResources"] for each in gpu_deployment.resources(ENVIRONMENT) if "InstanceTypes" in str(each))
    assert (train["InstanceTypes"], embed["InstanceTypes"]) == (["g6e.48xlarge"], ["g6e.12xlarge"])
    for each in (train, embed):
        # Of Batch's choice, although cdk.json names an AMI for Trainium.
        assert each["Ec2Configuration"] == [{"ImageType": "ECS_AL2023_NVIDIA"}]
        assert "PlacementGroup" not in each
    templates = [each["LaunchTemplateData"] for each in gpu_deployment.resources("AWS::EC2::LaunchTemplate")]
    assert not any("NetworkInterfaces" in each for each in templates)


def test_nodes_on_processors_reach_each_other_and_boot_the_image_of_batch(smoke_deployment: Any) -> None:
    train, embed = (each for each in smoke_deployment.resources(ENVIRONMENT) if each["ComputeResources"]["Type"] == "EC2")
    [group] = train["ComputeResources"]["SecurityGroupIds"]
    own = smoke_deployment.pipeline["Resources"]
    name = group["Fn::GetAtt"][0]
    for kind, peer in (
        ("AWS::EC2::SecurityGroupIngress", "SourceSecurityGroupId"),
        ("AWS::EC2::SecurityGroupEgress", "DestinationSecurityGroupId"),
    ):
        rules = [rule for rule in smoke_deployment.resources(kind) if rule["GroupId"] == group]
        assert [(rule["IpProtocol"], rule[peer]) for rule in rules] == [("-1", group)]
    https = {"CidrIp": "0.0.0.0/0", "IpProtocol": "tcp", "FromPort": 443, "ToPort": 443}
    assert any(https.items() <= rule.items() for rule in own[name]["Properties"]["SecurityGroupEgress"])
    assert embed["ComputeResources"]["SecurityGroupIds"] != [group]
    for each in (train, embed):
        assert each["ComputeResources"]["Ec2Configuration"] == [{"ImageType": "ECS_AL2023"}]
    assert smoke_deployment.resources("AWS::EC2::PlacementGroup") == []
