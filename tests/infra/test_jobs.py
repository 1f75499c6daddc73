"""Job definitions, as Batch would take them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.local.definitions import RetryStrategy
from pipeline.contract import STAGES, Queue, Shape, Stage, stage_command
from pipeline.errors import ExitCode

JOB_DEFINITION = "AWS::Batch::JobDefinition"
GANGS = [stage for stage, spec in STAGES.items() if spec.shape is Shape.GANG]


def definition(deployment: Any, stage: Stage, nodes: int | None = None, prefix: str = "trnpipe") -> dict[str, Any]:
    name = f"{prefix}-{stage}" + (f"-{nodes}" if nodes else "")
    found: dict[str, Any] = deployment.named(JOB_DEFINITION, "JobDefinitionName", name)
    return found


def container(properties: dict[str, Any]) -> dict[str, Any]:
    if "NodeProperties" in properties:
        [group] = properties["NodeProperties"]["NodeRangeProperties"]
        found: dict[str, Any] = group["Container"]
        return found
    return dict(properties["ContainerProperties"])


def variables(properties: dict[str, Any]) -> dict[str, str]:
    return {item["Name"]: item["Value"] for item in container(properties)["Environment"]}


def needs(properties: dict[str, Any]) -> dict[str, int]:
    return {item["Type"]: int(item["Value"]) for item in container(properties)["ResourceRequirements"]}


def test_there_is_one_per_stage_and_for_gangs_per_node_count(deployment: Any) -> None:
    expected = {f"trnpipe-{stage}" for stage in STAGES if stage not in GANGS}
    expected |= {f"trnpipe-{stage}-{nodes}" for stage in GANGS for nodes in (1, 2, 4)}
    assert {properties["JobDefinitionName"] for properties in deployment.resources(JOB_DEFINITION)} == expected


@pytest.mark.parametrize("stage", list(STAGES))
def test_attempts_timeout_and_command_are_the_contracts(deployment: Any, stage: Stage) -> None:
    spec = STAGES[stage]
    properties = definition(deployment, stage, 2 if stage in GANGS else None)
    assert properties["RetryStrategy"]["Attempts"] == spec.attempts
    assert properties["Timeout"]["AttemptDurationSeconds"] == 60 * spec.timeout_minutes
    assert variables(properties)["TRNPIPE_ATTEMPT_SECONDS"] == str(60 * spec.timeout_minutes)
    assert container(properties)["Command"] == stage_command(stage)
    assert properties["PropagateTags"] is True


def test_the_deployment_sets_limits_and_variables_of_its_own(other_deployment: Any) -> None:
    train = definition(other_deployment, Stage.TRAIN, 2, "ranker")
    report = definition(other_deployment, Stage.REPORT, prefix="ranker")
    assert train["Timeout"]["AttemptDurationSeconds"] == 60 * 2000
    assert report["Timeout"]["AttemptDurationSeconds"] == 60 * STAGES[Stage.REPORT].timeout_minutes
    # Over the stack's own, which is `1`.
    found = {"FI_EFA_USE_DEVICE_RDMA": "0", "TRNPIPE_PEER_START_SECONDS": "1200", "TRNPIPE_ATTEMPT_SECONDS": "120000"}
    assert found.items() <= variables(train).items()
    assert variables(report)["TRNPIPE_PEER_START_SECONDS"] == "1200"


FINAL = ["DONE", "BAD_CONFIG", "BAD_DATA", "MISSING_INPUT", "GATE_REFUSED", "SUPERSEDED", "DEFECT"]
ESSENTIAL = "Essential container in task exited"
NOT_STARTED = "Task failed to start"


@pytest.mark.parametrize(
    ("exit_code", "reason", "status_reason", "again"),
    [
        *((int(code), "", ESSENTIAL, code.name not in FINAL) for code in ExitCode if code),
        # Python's own code for an exception, and the shell's for a program that is no program or not there.
        (1, "", ESSENTIAL, False),
        (126, "", ESSENTIAL, False),
        (127, "", ESSENTIAL, False),
        (137, "OutOfMemoryError: Container killed due to memory usage", ESSENTIAL, False),
        (137, "", ESSENTIAL, True),
        (139, "", ESSENTIAL, True),
        (143, "", ESSENTIAL, True),
        (None, "", "Host EC2 (instance i-0123456789abcdef0) terminated.", True),
        # Amazon ECS Developer Guide, "Stopped tasks error messages".
        (None, "CannotPullContainerError: pull image manifest has been retried 5 time(s)", NOT_STARTED, True),
        (None, "DockerTimeoutError: Could not transition to created; timed out after waiting 4m0s", NOT_STARTED, True),
        (None, "ResourceInitializationError: failed to configure ENI", NOT_STARTED, True),
        (None, "Timeout waiting for network interface provisioning to complete.", "Task stopped", True),
        (None, "AGENT", "AGENT", True),
    ],
)
def test_only_what_another_attempt_cannot_change_ends_a_job(
    deployment: Any, exit_code: int | None, reason: str, status_reason: str, again: bool
) -> None:
    for properties in deployment.resources(JOB_DEFINITION):
        strategy = RetryStrategy.parse(properties["RetryStrategy"])
        assert strategy.again(exit_code, reason, status_reason) is again


@pytest.mark.parametrize("stage", GANGS)
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_gang_has_one_open_range_on_one_instance_type(deployment: Any, stage: Stage, nodes: int) -> None:
    properties = definition(deployment, stage, nodes)["NodeProperties"]
    assert (properties["NumNodes"], properties["MainNode"]) == (nodes, 0)
    [group] = properties["NodeRangeProperties"]
    assert group["TargetNodes"] == "0:"
    assert group["InstanceTypes"] == ["trn1.32xlarge"]


@pytest.mark.parametrize(("fixture", "prefix", "interfaces"), [("deployment", "trnpipe", 8), ("other_deployment", "ranker", 16)])
def test_a_gangs_container_has_every_chip_and_network_device(
    request: pytest.FixtureRequest, fixture: str, prefix: str, interfaces: int
) -> None:
    properties = container(definition(request.getfixturevalue(fixture), Stage.TRAIN, 2, prefix))
    linux = properties["LinuxParameters"]
    paths = [f"/dev/neuron{chip}" for chip in range(16)] + [f"/dev/infiniband/uverbs{card}" for card in range(interfaces)]
    assert [device["HostPath"] for device in linux["Devices"]] == paths
    assert all(device["ContainerPath"] == device["HostPath"] for device in linux["Devices"])
    assert all(device["Permissions"] == ["READ", "WRITE", "MKNOD"] for device in linux["Devices"])
    assert linux["SharedMemorySize"] >= 8192
    limits = {limit["Name"]: (limit["SoftLimit"], limit["HardLimit"]) for limit in properties["Ulimits"]}
    assert limits == {"memlock": (-1, -1), "nofile": (65535, 65535)}
    environment = {item["Name"]: item["Value"] for item in properties["Environment"]}
    assert environment["FI_PROVIDER"] == "efa"
    assert environment["CCOM_SOCKET_IFNAME"] == "eth0"


def test_a_gang_of_one_small_host_has_its_chip_and_asks_for_no_efa(small_deployment: Any) -> None:
    assert [each["JobDefinitionName"] for each in small_deployment.resources(JOB_DEFINITION) if "NodeProperties" in each] == [
        f"dev-{stage}-1" for stage in GANGS
    ]
    properties = container(definition(small_deployment, Stage.TRAIN, 1, "dev"))
    assert [device["HostPath"] for device in properties["LinuxParameters"]["Devices"]] == ["/dev/neuron0"]
    assert not [item["Name"] for item in properties["Environment"] if item["Name"].startswith("FI_")]


def test_jobs_on_gpus_ask_for_all_of_a_host_and_run_their_own_image(gpu_deployment: Any) -> None:
    for stage, nodes, gpus in (
        (Stage.TRAIN, 1, 8),
        (Stage.HEALTH_CHECK, 1, 8),
        (Stage.EVALUATE, None, 4),
        (Stage.EMBED, None, 4),
    ):
        properties = definition(gpu_deployment, stage, nodes, "trnpipe-gpu")
        assert needs(properties)["GPU"] == gpus
        assert "/cuda:" in json.dumps(container(properties)["Image"]) or "CudaImage" in json.dumps(container(properties)["Image"])
        assert container(properties)["LinuxParameters"]["Devices"] == []
        assert not [name for name in variables(properties) if name.startswith(("FI_", "CCOM_", "NEURON_", "GLOO_"))]
    report = definition(gpu_deployment, Stage.REPORT, prefix="trnpipe-gpu")
    assert "GPU" not in needs(report)
    assert "CpuImage" in json.dumps(container(report)["Image"])


def test_jobs_on_processors_run_the_image_of_fargate_and_ask_for_no_devices(smoke_deployment: Any) -> None:
    image = container(definition(smoke_deployment, Stage.PREPARE, prefix="trnpipe-smoke"))["Image"]
    for stage, nodes in ((Stage.TRAIN, 2), (Stage.EMBED, None)):
        properties = container(definition(smoke_deployment, stage, nodes, "trnpipe-smoke"))
        assert properties["Image"] == image
        assert properties["LinuxParameters"]["Devices"] == []
        variables = {item["Name"]: item["Value"] for item in properties["Environment"]}
        assert variables.get("GLOO_SOCKET_IFNAME") == ("eth0" if stage is Stage.TRAIN else None)
        assert not {name for name in variables if name.startswith(("FI_", "CCOM_", "NEURON_"))}


def test_the_state_machine_hands_every_run_what_its_hosts_are(small_deployment: Any) -> None:
    machine = small_deployment.named("AWS::StepFunctions::StateMachine", "StateMachineName", "dev")
    text = json.dumps(machine["DefinitionString"]).replace("\\", "")
    assert '"ranks_per_node": 2' in text
    assert '"ranks_per_child": 12' in text


def test_two_jobs_never_share_a_host_with_chips(deployment: Any, other_deployment: Any) -> None:
    for found, prefix, vcpus in ((deployment, "trnpipe", 128), (other_deployment, "ranker", 32)):
        for stage in (Stage.EVALUATE, Stage.EMBED):
            assert needs(definition(found, stage, prefix=prefix))["VCPU"] > vcpus / 2
    assert needs(definition(deployment, Stage.TRAIN, 2))["VCPU"] > 64


def test_a_host_of_its_own_has_its_own_devices(other_deployment: Any) -> None:
    devices = container(definition(other_deployment, Stage.EMBED, prefix="ranker"))["LinuxParameters"]["Devices"]
    assert [device["HostPath"] for device in devices] == ["/dev/neuron0"]


@pytest.mark.parametrize("stage", [stage for stage, spec in STAGES.items() if spec.queue is Queue.CPU])
def test_fargate_stages_have_no_public_address_and_a_size_that_exists(deployment: Any, stage: Stage) -> None:
    properties = definition(deployment, stage)
    assert properties["PlatformCapabilities"] == ["FARGATE"]
    assert container(properties)["NetworkConfiguration"] == {"AssignPublicIp": "DISABLED"}
    # Fargate with 4 vCPU: 8 to 30 GiB in steps of 1 GiB; with 16, 32 to 120 GiB in steps of 8; 21 to 200 GiB of disk.
    if stage is Stage.PRECOMPILE:
        assert needs(properties) == {"VCPU": 16, "MEMORY": 120 * 1024}
    else:
        assert needs(properties)["VCPU"] == 4
        assert needs(properties)["MEMORY"] in range(8 * 1024, 31 * 1024, 1024)
    assert 21 <= container(properties)["EphemeralStorage"]["SizeInGiB"] <= 200


def test_every_stage_has_a_role_of_its_own_and_none_is_privileged(deployment: Any) -> None:
    roles: dict[str, set[str]] = {}
    for properties in deployment.resources(JOB_DEFINITION):
        stage = properties["JobDefinitionName"].split("-")[1]
        roles.setdefault(stage, set()).add(str(container(properties)["JobRoleArn"]))
        assert "Privileged" not in container(properties)
    assert all(len(found) == 1 for found in roles.values())
    assert len(set.union(*roles.values())) == len(STAGES)


def test_images_are_the_repositorys_or_the_given_ones(deployment: Any, other_deployment: Any) -> None:
    assert "0.1.0" in str(container(definition(deployment, Stage.PREPARE))["Image"])
    assert container(definition(other_deployment, Stage.PREPARE, prefix="ranker"))["Image"].endswith("/team/neuron:7-cpu")
    given = container(definition(other_deployment, Stage.TRAIN, 2, "ranker"))["Image"]
    assert given == "123456789012.dkr.ecr.us-east-2.amazonaws.com/team/neuron:7"
    assert container(definition(other_deployment, Stage.PRECOMPILE, prefix="ranker"))["Image"] == given
    pulls = [policy for policy in other_deployment.resources("AWS::IAM::Policy") if "ecr:BatchGetImage" in str(policy)]
    assert any("123456789012:repository/team/neuron" in str(policy) for policy in pulls)


def test_logs_are_kept_for_the_set_time(deployment: Any) -> None:
    group = deployment.named("AWS::Logs::LogGroup", "LogGroupName", "/trnpipe/jobs")
    assert group["RetentionInDays"] == 180
    assert container(definition(deployment, Stage.TRAIN, 1))["LogConfiguration"]["LogDriver"] == "awslogs"


def test_no_container_is_privileged_and_only_devices_need_root(deployment: Any) -> None:
    for properties in deployment.resources(JOB_DEFINITION):
        assert not container(properties).get("Privileged")
        assert "User" not in container(properties)  # the image's own
    containers = Path(__file__).resolve().parents[2] / "containers"
    users = {
        path.parent.name: re.findall(r"^USER (\S+)$", path.read_text(), re.M)[-1] for path in containers.glob("*/Dockerfile")
    }
    assert users == {"cpu": "10001:10001", "neuron": "0:0"}
