"""The synthesized templates against what AWS says it takes: cfn-lint, the services' own models, and the rules that Batch states
in words only (batch_rules.py). Every variant of a deployment that conftest.py has goes through all three.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cfnlint
import pytest
from cfnlint.config import ManualArgs

from infra.cdk_context import CDK_JSON
from infra.local.template import synth_sources
from infra.templates import Stacks
from tests.infra import batch_rules
from tests.infra.batch_rules import Batch

VARIANTS = ("deployment", "other_deployment", "small_deployment", "smoke_deployment", "gpu_deployment")


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# ---- cfn-lint ------------------------------------------------------------------------------------------------------------------

EXPLAINED = {
    ("W3005", r"Resources/(Workflow|Watches)\w+/DependsOn/\d+"): "CDK lets a state machine wait for its role's policy by "
    "naming both; the role is implied",
    (
        "W6001",
        r"Outputs/JobLogGroup/Value/Fn::ImportValue",
    ): "people look for it at the stack that runs, not at the one that keeps",
}
"""(rule, pattern of the path) -> why the finding stays."""


def lint(template: dict[str, Any], region: str) -> list[tuple[str, str]]:
    """Rule and path of everything that cfn-lint has to say."""
    matches = cfnlint.lint(json.dumps(template), config=ManualArgs(regions=[region]))
    return [(match.rule.id, "/".join(map(str, getattr(match, "path", None) or ()))) for match in matches]


def test_cfn_lint_finds_nothing_that_is_not_explained(variant: Any) -> None:
    found = [*lint(variant.pipeline, variant.region), *lint(variant.data, variant.region)]
    unexplained = [
        (rule, path) for rule, path in found if not any(rule == known and re.fullmatch(text, path) for known, text in EXPLAINED)
    ]
    assert unexplained == []
    assert [
        (known, text) for known, text in EXPLAINED if not any(rule == known and re.fullmatch(text, path) for rule, path in found)
    ] == []


def test_cfn_lint_sees_a_wrong_template() -> None:
    queue = {"Type": "AWS::Batch::JobQueue", "Properties": {"Priority": "high", "Kind": 1}}
    assert {rule[0] for rule, _ in lint({"Resources": {"Queue": queue}}, "us-west-2")} == {"E"}


# ---- the services' models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The API request that CloudFormation makes of a resource.

    Attributes:
        dropped: properties that are CloudFormation's own business, or another request's.
        given: members that CloudFormation adds, a generated name above all.
        renamed: property -> member where they differ in more than case.
    """

    service: str
    operation: str
    dropped: tuple[str, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


NAME = "made-by-cloudformation"
CALLS: dict[str, tuple[Call, ...]] = {
    "AWS::Batch::JobDefinition": (Call("batch", "RegisterJobDefinition", dropped=("ResourceRetentionPolicy",)),),
    "AWS::Batch::ComputeEnvironment": (
        Call(
            "batch",
            "CreateComputeEnvironment",
            dropped=("ReplaceComputeEnvironment", "UpdatePolicy"),
            given={"computeEnvironmentName": NAME},
        ),
        Call(
            "batch",
            "UpdateComputeEnvironment",
            # Another tag replaces the environment.
            dropped=("ReplaceComputeEnvironment", "Type", "ComputeResources", "Tags"),
            given={"computeEnvironment": NAME},
        ),
    ),
    "AWS::Batch::JobQueue": (Call("batch", "CreateJobQueue"),),
    "AWS::Batch::SchedulingPolicy": (Call("batch", "CreateSchedulingPolicy", given={"name": NAME}),),
    "AWS::EC2::LaunchTemplate": (Call("ec2", "CreateLaunchTemplate", given={"LaunchTemplateName": NAME}),),
    "AWS::EC2::PlacementGroup": (
        # Tags are spelled otherwise there.
        Call("ec2", "CreatePlacementGroup", dropped=("Tags",), given={"GroupName": NAME}),
    ),
    "AWS::Scheduler::Schedule": (Call("scheduler", "CreateSchedule", given={"Name": NAME}),),
    "AWS::DynamoDB::Table": (
        # Recovery is another request; encryption is spelled otherwise there.
        Call(
            "dynamodb", "CreateTable", dropped=("PointInTimeRecoverySpecification", "SSESpecification"), given={"TableName": NAME}
        ),
    ),
    "AWS::StepFunctions::StateMachine": (
        Call(
            "stepfunctions",
            "CreateStateMachine",
            given={"name": NAME},
            renamed={"StateMachineName": "name", "DefinitionString": "definition"},
        ),
    ),
}
EXPECTED = {
    "deployment": CALLS.keys(),
    "other_deployment": CALLS.keys() - {"AWS::EC2::PlacementGroup"},
    "small_deployment": CALLS.keys() - {"AWS::EC2::PlacementGroup"},
    "smoke_deployment": CALLS.keys() - {"AWS::EC2::PlacementGroup"},
    "gpu_deployment": CALLS.keys() - {"AWS::EC2::PlacementGroup"},
}


@pytest.mark.parametrize("fixture", VARIANTS)
def test_the_services_take_every_resource(request: pytest.FixtureRequest, service_model: Any, fixture: str) -> None:
    stacks = request.getfixturevalue(fixture).stacks
    seen = set()
    for kind, calls in CALLS.items():
        for resource in stacks.of_type(kind):
            seen.add(kind)
            for call in calls:
                properties = {key: value for key, value in resource.properties.items() if key not in call.dropped}
                renamed = {call.renamed.get(key, key): value for key, value in properties.items()}
                sent = {**call.given, **service_model.from_template(call.service, call.operation, renamed)}
                assert service_model.problems(call.service, call.operation, sent) == "", (resource.name, call.operation)
    assert seen == EXPECTED[fixture]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MadeUp": 1}, 'Unknown parameter in input: "MadeUp"'),
        ({"Type": None}, "Invalid type for parameter type"),
        ({"Type": "gang"}, "'gang' is none of"),
        ({"JobDefinitionName": 7}, "Invalid type for parameter jobDefinitionName"),
        ({"Tags": {"": "x"}}, "valid min length: 1"),
    ],
)
def test_a_model_refuses_what_is_not_in_it(service_model: Any, change: dict[str, Any], words: str) -> None:
    properties = {"JobDefinitionName": "x", "Type": "container", **change}
    sent = service_model.from_template("batch", "RegisterJobDefinition", properties)
    assert words in service_model.problems("batch", "RegisterJobDefinition", sent)


@pytest.mark.parametrize(
    ("operation", "request_", "words"),
    [
        ("CreateScheduleGroup", {"Name": "not allowed"}, "does not match"),
        ("CreateScheduleGroup", {"Name": "x" * 65}, "65 is more than 64"),
    ],
)
def test_a_model_s_patterns_and_lengths_count(service_model: Any, operation: str, request_: dict[str, Any], words: str) -> None:
    assert words in service_model.problems("scheduler", operation, request_)


# ---- what Batch states in words ------------------------------------------------------------------------------------------------


def test_batch_has_nothing_to_refuse(variant: Any) -> None:
    batch = Batch.of(variant.stacks)
    assert len(batch.environments) == len(batch.queues) == 3
    assert {name for name, _, _ in batch.runs()} == batch.definitions.keys()
    assert len(batch.submissions) >= 8
    assert batch_rules.problems(batch) == []


Break = Callable[[Batch], Any]


def container(batch: Batch, name: str) -> dict[str, Any]:
    properties = batch.definitions[name]
    nodes = properties.get("NodeProperties")
    found: dict[str, Any] = nodes["NodeRangeProperties"][0]["Container"] if nodes else properties["ContainerProperties"]
    return found


def environment(batch: Batch, word: str) -> dict[str, Any]:
    [name] = [name for name in batch.environments if word in name]
    return batch.environments[name]


def hosts(batch: Batch, word: str = "Train") -> dict[str, Any]:
    found: dict[str, Any] = environment(batch, word)["ComputeResources"]
    return found


def fair(batch: Batch) -> dict[str, Any]:
    [policy] = batch.policies.values()
    found: dict[str, Any] = policy["FairsharePolicy"]
    return found


def interfaces(batch: Batch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = batch.templates[hosts(batch)["LaunchTemplate"]["LaunchTemplateId"]]["LaunchTemplateData"][
        "NetworkInterfaces"
    ]
    return found


def user_data(batch: Batch, text: bytes) -> None:
    template = batch.templates[hosts(batch)["LaunchTemplate"]["LaunchTemplateId"]]
    template["LaunchTemplateData"]["UserData"] = base64.b64encode(text).decode()


def strategy(batch: Batch, name: str = "trnpipe-train-2") -> dict[str, Any]:
    found: dict[str, Any] = batch.definitions[name]["RetryStrategy"]
    return found


def ask(batch: Batch, name: str, kind: str, value: str) -> None:
    [need] = [need for need in container(batch, name)["ResourceRequirements"] if need["Type"] == kind]
    need["Value"] = value


def want(batch: Batch, name: str, kind: str, value: str) -> None:
    container(batch, name)["ResourceRequirements"].append({"Type": kind, "Value": value})


def nodes(batch: Batch, name: str = "trnpipe-train-2") -> dict[str, Any]:
    found: dict[str, Any] = batch.definitions[name]["NodeProperties"]
    return found


def group(batch: Batch) -> dict[str, Any]:
    found: dict[str, Any] = nodes(batch)["NodeRangeProperties"][0]
    return found


def submission(batch: Batch, state: str = "train") -> dict[str, Any]:
    return batch.submissions[state]


def without_policy(batch: Batch) -> None:
    for queue in batch.queues.values():
        del queue["SchedulingPolicyArn"]


BREAKS: dict[str, list[tuple[Break, str]]] = {
    "groups_stand_in_one_place": [
        (lambda b: hosts(b).update(SecurityGroupIds=["sg-1"]), "in addition to the launch template's network interfaces"),
        (lambda b: hosts(b, "Embed").pop("SecurityGroupIds"), "no security group"),
        (lambda b: hosts(b, "Cpu").update(SecurityGroupIds=[f"sg-{n}" for n in range(6)]), "more than five"),
    ],
    "fargate_environments_name_no_hosts": [
        (lambda b: hosts(b, "Cpu").update(MinvCpus=0), "MinvCpus does not go with FARGATE"),
        (lambda b: hosts(b, "Cpu").update(ScalingPolicy={"MinScaleDownDelayMinutes": 20}), "ScalingPolicy does not go"),
        (lambda b: hosts(b, "Cpu").update(Subnets=[f"subnet-{n}" for n in range(17)]), "16 subnets"),
    ],
    "allocation_goes_with_the_market": [
        (lambda b: hosts(b, "Embed").update(Type="SPOT"), "BEST_FIT_PROGRESSIVE on SPOT"),
        (lambda b: hosts(b, "Embed").update(AllocationStrategy="SPOT_CAPACITY_OPTIMIZED"), "SPOT_CAPACITY_OPTIMIZED on EC2"),
        (lambda b: hosts(b).pop("AllocationStrategy"), "BEST_FIT cannot be updated"),
        (lambda b: hosts(b).update(MinvCpus=1024), "MinvCpus above"),
    ],
    "hosts_are_kept_for_twenty_minutes_or_a_week_at_most": [
        (lambda b: hosts(b)["ScalingPolicy"].update(MinScaleDownDelayMinutes=19), "19 minutes"),
        (lambda b: hosts(b)["ScalingPolicy"].update(MinScaleDownDelayMinutes=10_081), "10081 minutes"),
    ],
    "chips_have_an_image_with_their_driver": [
        (lambda b: hosts(b)["Ec2Configuration"][0].pop("ImageIdOverride"), "trn1.32xlarge with an image of Batch's own"),
        (lambda b: hosts(b).update(Ec2Configuration=[{"ImageType": "ECS_AL2"}]), "Amazon Linux 2"),
    ],
    "gpus_have_the_image_with_their_driver": [
        (lambda b: hosts(b).update(InstanceTypes=["p5.48xlarge"]), "p5.48xlarge with the image types"),
        (lambda b: hosts(b)["Ec2Configuration"][0].update(ImageType="ECS_AL2023_NVIDIA"), "trn1.32xlarge with the image types"),
        (lambda b: want(b, "trnpipe-report", "GPU", "1"), "GPUs on Fargate"),
    ],
    "interfaces_fit_their_cards": [
        (lambda b: interfaces(b)[0].update(DeviceIndex=1), "no primary interface"),
        (lambda b: interfaces(b)[1].update(NetworkCardIndex=2), "two interfaces in one place"),
        (lambda b: interfaces(b)[1].update(DeviceIndex=0), "on another card than the first"),
        (lambda b: interfaces(b)[0].update(AssociatePublicIpAddress=True), "public address"),
        (lambda b: interfaces(b)[0].update(SubnetId="subnet-1"), "a subnet, which Batch ignores"),
    ],
    "efa_stays_in_one_zone": [
        (lambda b: hosts(b)["Subnets"].append("subnet-2"), "EFA over 2 subnets"),
        (lambda b: hosts(b).pop("PlacementGroup"), "without a placement group"),
    ],
    "queues_act_on_known_reasons": [
        (lambda b: b.queues["trnpipe-train"]["JobStateTimeLimitActions"][0].update(Reason="CAPACITY"), "the reason CAPACITY"),
        (
            lambda b: b.queues["trnpipe-train"]["JobStateTimeLimitActions"][0].update(
                Reason="MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS"
            ),
            "the reason MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS",
        ),
        (lambda b: b.queues["trnpipe-train"]["JobStateTimeLimitActions"][0].update(Action="TERMINATE"), "TERMINATE in the state"),
        (lambda b: b.queues["trnpipe-train"]["JobStateTimeLimitActions"][0].update(MaxTimeSeconds=599), "599 seconds"),
        (
            lambda b: b.queues["trnpipe-train"]["ComputeEnvironmentOrder"].extend(
                b.queues["trnpipe-cpu"]["ComputeEnvironmentOrder"]
            ),
            "Fargate mixed with EC2",
        ),
    ],
    "shares_are_told_apart": [
        (lambda b: fair(b)["ShareDistribution"][0].update(ShareIdentifier="week-ly"), "week-ly is not alphanumeric"),
        (lambda b: fair(b)["ShareDistribution"][0].update(ShareIdentifier="man*"), "man* overlaps"),
        (lambda b: fair(b).update(ShareDistribution=[{"ShareIdentifier": f"s{n}"} for n in range(501)]), "more than 500"),
        (lambda b: fair(b)["ShareDistribution"][0].update(WeightFactor=0), "a weight outside"),
        (lambda b: fair(b).update(ComputeReservation=100), "0 to 99"),
        (lambda b: fair(b).update(ShareDecaySeconds=604_801), "a decay outside"),
    ],
    "retries_end": [
        (lambda b: strategy(b).update(Attempts=11), "11 attempts"),
        (lambda b: strategy(b).pop("Attempts"), "without attempts"),
        (lambda b: strategy(b)["EvaluateOnExit"].insert(0, {"OnExitCode": "8*", "Action": "EXIT"}), "6 exit rules"),
        (lambda b: strategy(b)["EvaluateOnExit"][0].update(OnReason="*Memory*"), "OnReason cannot be *Memory*"),
        (lambda b: strategy(b)["EvaluateOnExit"][0].update(OnReason="Out-of-memory*"), "OnReason cannot be Out-of-memory*"),
        (lambda b: strategy(b)["EvaluateOnExit"][1].update(OnExitCode="6?"), "OnExitCode cannot be 6?"),
        (lambda b: strategy(b)["EvaluateOnExit"][1].pop("OnExitCode"), "without a pattern"),
        (lambda b: strategy(b)["EvaluateOnExit"][1].update(Action="STOP"), "the action STOP"),
        (lambda b: strategy(b)["EvaluateOnExit"][1].update(OnExitCode="*"), "behind one that matches everything"),
    ],
    "names_are_in_form": [
        (lambda b: b.queues.update({"a queue": b.queues.pop("trnpipe-cpu")}), "the name a queue"),
        (lambda b: b.definitions["trnpipe-embed"].update(Tags={"aws:mine": "x"}), "the tags ['aws:mine']"),
        (lambda b: b.definitions["trnpipe-embed"].update(SchedulingPriority=10_000), "0 to 9999"),
        (lambda b: container(b, "trnpipe-embed").update(Image="an image"), "the image an image"),
    ],
    "user_data_can_be_merged": [
        (lambda b: user_data(b, b"#!/bin/bash\n"), "user data of the type text/plain"),
        (lambda b: user_data(b, b'Content-Type: multipart/mixed; boundary="b"\n\n--c\n'), "StartBoundaryNotFoundDefect"),
    ],
    "jobs_have_a_minute_at_least": [
        (lambda b: b.definitions["trnpipe-report"]["Timeout"].update(AttemptDurationSeconds=59), "below 60 seconds"),
    ],
    "resources_are_asked_for_once": [
        (lambda b: container(b, "trnpipe-embed").update(Vcpus=96), "vcpus or memory together with"),
        (lambda b: container(b, "trnpipe-embed")["ResourceRequirements"].pop(), "no memory asked for"),
    ],
    "fargate_jobs_have_a_size_that_exists": [
        (lambda b: ask(b, "trnpipe-prepare", "MEMORY", "31744"), "4.0 vCPUs with 31744.0 MiB"),
        (lambda b: ask(b, "trnpipe-prepare", "VCPU", "3"), "3.0 vCPUs"),
        (lambda b: container(b, "trnpipe-prepare")["EphemeralStorage"].update(SizeInGiB=201), "21 to 200 GiB"),
        (
            lambda b: container(b, "trnpipe-prepare").update(LinuxParameters={"Devices": [{"HostPath": "/dev/neuron0"}]}),
            "devices, shared memory or privileges on Fargate",
        ),
        (lambda b: container(b, "trnpipe-prepare").update(Ulimits=[{"Name": "nofile"}]), "ulimits on Fargate"),
        (lambda b: container(b, "trnpipe-prepare").pop("ExecutionRoleArn"), "no execution role"),
    ],
    "hosts_take_no_fargate_parameters": [
        (lambda b: container(b, "trnpipe-embed").update(EphemeralStorage={"SizeInGiB": 30}), "EphemeralStorage on EC2"),
        (lambda b: container(b, "trnpipe-train-1").update(NetworkConfiguration={}), "NetworkConfiguration on EC2"),
    ],
    "devices_keep_their_names": [
        (
            lambda b: container(b, "trnpipe-train-2")["LinuxParameters"]["Devices"][-1].update(ContainerPath="/dev/uverbs"),
            "under another name",
        ),
        (
            lambda b: container(b, "trnpipe-train-2")["LinuxParameters"]["Devices"][0].update(Permissions=["read"]),
            "the permissions ['read']",
        ),
        (
            lambda b: container(b, "trnpipe-train-2")["LinuxParameters"]["Devices"][1].update(HostPath="/dev/neuron0"),
            "a device twice",
        ),
    ],
    "reserved_names_stay_unset": [
        (
            lambda b: container(b, "trnpipe-embed")["Environment"].append({"Name": "AWS_BATCH_JOB_ID", "Value": "1"}),
            "the reserved variables ['AWS_BATCH_JOB_ID']",
        ),
    ],
    "node_ranges_cover_the_gang": [
        (lambda b: group(b).update(TargetNodes="0:0"), "node ranges ['0:0'] of 2 nodes"),
        (lambda b: group(b).update(TargetNodes="1:"), "node ranges ['1:'] of 2 nodes"),
        (lambda b: nodes(b).update(NumNodes=1001), "of 1001 nodes"),
        (lambda b: nodes(b).update(MainNode=2), "the main node 2 of 2"),
        (lambda b: group(b).update(InstanceTypes=["trn1.32xlarge", "trn1n.32xlarge"]), "several instance types"),
        (lambda b: b.definitions["trnpipe-train-2"].update(Type="container"), "the type container"),
        (lambda b: b.definitions["trnpipe-train-2"].update(PlatformCapabilities=["FARGATE"]), "a gang on Fargate"),
    ],
    "gangs_find_hosts": [
        (lambda b: hosts(b).update(Type="SPOT"), "a gang on SPOT"),
        (lambda b: group(b).update(InstanceTypes=["trn1n.32xlarge"]), "trn1n.32xlarge, which"),
        (lambda b: hosts(b).update(MaxvCpus=511), "trnpipe-train-4: 4 hosts are more than"),
        (lambda b: fair(b).update(ComputeReservation=21), "trnpipe-train-4: 4 hosts are more than"),
        (
            lambda b: (hosts(b).update(InstanceTypes=["trn1.2xlarge"]), group(b).update(InstanceTypes=["trn1.2xlarge"])),
            "several nodes on trn1.2xlarge",
        ),
    ],
    "jobs_fit_their_hosts": [
        (lambda b: ask(b, "trnpipe-train-2", "VCPU", "129"), "asks for more than a trn1.32xlarge has"),
        (lambda b: ask(b, "trnpipe-embed", "MEMORY", str(512 * 1024)), "asks for more than a trn1.32xlarge has"),
        (lambda b: b.definitions["trnpipe-embed"].update(PlatformCapabilities=["FARGATE"]), "platform ['FARGATE'] on EC2"),
        (lambda b: want(b, "trnpipe-embed", "GPU", "8"), "8 GPUs of the 0 of a trn1.32xlarge"),
    ],
    "shares_go_with_a_policy": [
        (lambda b: submission(b).pop("ShareIdentifier.$"), "train: ShareIdentifier missing"),
        (lambda b: submission(b).pop("SchedulingPriorityOverride"), "train: SchedulingPriorityOverride missing"),
        (without_policy, "ShareIdentifier given where the queue has no policy"),
        (lambda b: submission(b).update(SchedulingPriorityOverride=10_000), "0 to 9999"),
    ],
    "arrays_have_two_children": [
        (lambda b: submission(b, "evaluate").update(ArrayProperties={"Size": 1}), "evaluate: an array of 1"),
        (lambda b: submission(b).update(ArrayProperties={"Size": 2}), "train: a gang as an array"),
    ],
    "parameters_have_values": [
        (lambda b: submission(b).pop("Parameters"), "train-2 needs the parameters ['run']"),
        (lambda b: container(b, "trnpipe-embed")["Command"].append("Ref::part"), "needs the parameters ['part']"),
    ],
    "gangs_take_no_container_overrides": [
        (lambda b: submission(b).update(ContainerOverrides={}), "train: container overrides of a gang"),
    ],
}


@pytest.fixture(scope="session")
def batch(deployment: Any) -> Batch:
    return Batch.of(deployment.stacks)


@pytest.mark.parametrize(
    ("rule", "change", "words"), [(rule, change, words) for rule, cases in BREAKS.items() for change, words in cases]
)
def test_a_broken_template_is_caught(batch: Batch, rule: str, change: Break, words: str) -> None:
    broken = copy.deepcopy(batch)
    change(broken)
    [check] = [check for check in batch_rules.RULES if check.__name__ == rule]
    found = list(check(broken))
    assert any(words in each for each in found), found


def test_every_rule_has_been_broken() -> None:
    assert {check.__name__ for check in batch_rules.RULES} == BREAKS.keys()


# ---- the synth itself ----------------------------------------------------------------------------------------------------------


def test_synth_is_the_same_every_time_and_needs_nothing_around_it(deployment: Any, alone: Any) -> None:
    for name, template in (("trnpipe-data", deployment.data), ("trnpipe", deployment.pipeline)):
        assert json.loads((alone.folder / f"{name}.template.json").read_text()) == template


def test_a_change_of_any_file_that_synth_reads_is_noticed(alone: Any) -> None:
    """The local run keeps its templates as long as none of these has changed."""
    loaded = {path for name, path in alone.modules.items() if name.split(".")[0] in ("infra", "pipeline")}
    assert len(loaded) > 15
    empty = {path for path in loaded if path.name == "__init__.py" and not path.read_bytes()}
    assert loaded - empty <= set(synth_sources())
    assert CDK_JSON.parent / "infra/environments/example.yaml" in synth_sources()


# ---- what a reader wants to see at a glance ------------------------------------------------------------------------------------


def glance(stacks: Stacks) -> list[str]:
    """Hosts, queues and jobs of a deployment in a line each."""
    batch = Batch.of(stacks)
    lines = []
    for name in batch.queues:
        [found] = batch.environments_of(name)
        resources = batch.resources(found)
        hosts = "/".join(resources.get("InstanceTypes", ["-"]))
        placed = "one group" if "PlacementGroup" in resources else "apart"
        lines.append(
            f"{name}: {resources['Type']} {hosts} <= {resources['MaxvCpus']} vCPUs, {len(resources['Subnets'])} zone(s), "
            f"{len(batch.interfaces(found))} EFA, {placed}"
        )
    for name, properties in batch.definitions.items():
        inside = container(batch, name)
        needs = {need["Type"]: need["Value"] for need in inside["ResourceRequirements"]}
        devices = len(inside.get("LinuxParameters", {}).get("Devices", ()))
        width = properties.get("NodeProperties", {}).get("NumNodes", 1)
        lines.append(
            f"{name}: {width} x {needs['VCPU']} vCPUs, {needs['MEMORY']} MiB, {devices} devices, "
            f"{properties['RetryStrategy']['Attempts']} attempts of {properties['Timeout']['AttemptDurationSeconds'] // 60} min"
        )
    return sorted(lines)


def test_a_deployment_at_a_glance(small_deployment: Any) -> None:
    assert glance(small_deployment.stacks) == [
        "dev-collect-1: 1 x 6 vCPUs, 29696 MiB, 1 devices, 4 attempts of 60 min",
        "dev-compile-1: 1 x 6 vCPUs, 29696 MiB, 1 devices, 4 attempts of 240 min",
        "dev-cpu: FARGATE - <= 64 vCPUs, 3 zone(s), 0 EFA, apart",
        "dev-embed: 1 x 72 vCPUs, 367616 MiB, 6 devices, 6 attempts of 720 min",
        "dev-embed: SPOT inf2.24xlarge <= 512 vCPUs, 2 zone(s), 0 EFA, apart",
        "dev-evaluate: 1 x 72 vCPUs, 367616 MiB, 6 devices, 4 attempts of 120 min",
        "dev-health_check-1: 1 x 6 vCPUs, 29696 MiB, 1 devices, 4 attempts of 30 min",
        "dev-ingest: 1 x 4 vCPUs, 30720 MiB, 0 devices, 6 attempts of 360 min",
        "dev-mine: 1 x 72 vCPUs, 367616 MiB, 6 devices, 4 attempts of 720 min",
        "dev-plan: 1 x 4 vCPUs, 30720 MiB, 0 devices, 4 attempts of 120 min",
        "dev-precompile: 1 x 16 vCPUs, 122880 MiB, 0 devices, 4 attempts of 240 min",
        "dev-prepare: 1 x 4 vCPUs, 30720 MiB, 0 devices, 4 attempts of 120 min",
        "dev-publish: 1 x 4 vCPUs, 30720 MiB, 0 devices, 4 attempts of 120 min",
        "dev-report: 1 x 4 vCPUs, 30720 MiB, 0 devices, 2 attempts of 30 min",
        "dev-train-1: 1 x 6 vCPUs, 29696 MiB, 1 devices, 8 attempts of 1440 min",
        "dev-train: EC2 trn1.2xlarge <= 32 vCPUs, 1 zone(s), 0 EFA, apart",
    ]
