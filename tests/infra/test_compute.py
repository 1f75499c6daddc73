"""Compute environments, launch templates and queues, as Batch would take them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.contract import Queue

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


def test_batch_takes_every_compute_environment_and_queue(deployment: Any, other_deployment: Any, service_model: Any) -> None:
    kinds = {
        ENVIRONMENT: "CreateComputeEnvironment",
        QUEUE: "CreateJobQueue",
        "AWS::Batch::SchedulingPolicy": "CreateSchedulingPolicy",
    }
    for found in (deployment, other_deployment):
        for kind, operation in kinds.items():
            for properties in found.resources(kind):
                names = {"computeEnvironmentName": "made by CloudFormation", "name": "made by CloudFormation"}
                request = service_model.from_template("batch", operation, properties)
                # How CloudFormation updates it is not part of the API.
                for key in ("ReplaceComputeEnvironment", "UpdatePolicy"):
                    request.pop(key, None)
                required = {key: value for key, value in names.items() if key.lower() in ("name", "computeenvironmentname")}
                wanted = {"CreateComputeEnvironment": "computeEnvironmentName", "CreateSchedulingPolicy": "name"}.get(operation)
                if wanted is not None:
                    request.setdefault(wanted, required[wanted])
                if operation == "CreateJobQueue":
                    request.setdefault("priority", 1)
                assert service_model.problems("batch", operation, request) == "", properties


def test_gangs_get_on_demand_hosts_in_one_placement_group_and_pay_for_none_when_idle(deployment: Any) -> None:
    resources = environment(deployment, "trn1.32xlarge")
    assert (resources["Type"], resources["AllocationStrategy"]) == ("EC2", "BEST_FIT_PROGRESSIVE")
    assert resources["MinvCpus"] == 0
    assert resources["MaxvCpus"] == 512
    assert "PlacementGroup" in resources
    assert deployment.only("AWS::EC2::PlacementGroup")["Strategy"] == "cluster"
    assert len(resources["Subnets"]) == 1


def test_gangs_security_groups_stand_on_the_interfaces_only(deployment: Any) -> None:
    """Batch refuses an environment that names groups beside a launch template with interfaces."""
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


def test_a_capacity_reservation_serves_the_gangs_only(other_deployment: Any) -> None:
    reserved = [each for each in templates(other_deployment) if "CapacityReservationSpecification" in each]
    [template] = reserved
    assert "NetworkInterfaces" in template
    target = template["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-0a1b2c"}


def test_an_update_leaves_running_jobs_all_the_time_that_batch_allows(deployment: Any) -> None:
    for properties in deployment.resources(ENVIRONMENT):
        if properties["ComputeResources"]["Type"] == "EC2":
            assert properties["UpdatePolicy"] == {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 360}
            assert properties["ReplaceComputeEnvironment"] is False


def test_every_queue_shares_fairly(deployment: Any) -> None:
    queues = {each["JobQueueName"]: each for each in deployment.resources(QUEUE)}
    assert set(queues) == {f"trnpipe-{queue.value}" for queue in Queue}
    assert all("SchedulingPolicyArn" in properties for properties in queues.values())
    policy = deployment.only("AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    weights = {share["ShareIdentifier"]: share["WeightFactor"] for share in policy["ShareDistribution"]}
    assert weights == {"weekly": 0.5, "manual": 1, "experiments": 4}
    # Anything held back could keep a gang of full width from ever starting.
    assert policy["ComputeReservation"] == 0


def test_a_job_that_cannot_start_is_cancelled_for_every_reason_batch_names(deployment: Any) -> None:
    for properties in deployment.resources(QUEUE):
        limits = {action["Reason"]: action for action in properties["JobStateTimeLimitActions"]}
        assert len(limits) == 4
        assert limits["CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"]["MaxTimeSeconds"] == 6 * 3600
        assert all(600 <= action["MaxTimeSeconds"] <= 86_400 for action in limits.values())
        assert {(action["State"], action["Action"]) for action in limits.values()} == {("RUNNABLE", "CANCEL")}
