"""Permissions of the roles against recorded calls: each role allows the calls of its own stage, and no others."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from infra.local.definitions import ACCOUNT, REGION
from infra.stacks import COMPILING
from pipeline.contract import STAGES, Queue, Stage
from tests.chain.faults import SickHost
from tests.chain.site import ORCHESTRATION, marked, open_site
from tests.engine import quick_engine
from tests.infra.calls import MACHINE, Call, Recorder, Roles, allows

FARGATE = [stage.value for stage, spec in STAGES.items() if spec.queue is Queue.CPU]


@dataclass(frozen=True)
class Recorded:
    """The calls of whole executions, and the roles under which they were made.

    Attributes:
        bucket: ARN of the bucket.
    """

    roles: Roles
    calls: frozenset[Call]
    bucket: str


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, templates: Path) -> Iterator[Recorded]:
    """A good run, one whose host is sick, and one that fails and is resumed: light stages, everything else is real."""
    folder = tmp_path_factory.mktemp("iam")
    with open_site(ORCHESTRATION, folder / "site", templates) as site, quick_engine():
        roles = Roles(templates)
        environment = roles.stacks.of_type("AWS::Batch::ComputeEnvironment")[0].name
        recorder = Recorder(cluster=f"AWSBatch-{environment}-0a1b2c")
        start = site.runner.settings.start

        def start_named(command: Any, *, env: dict[str, str], **others: Any) -> Any:
            name = f"{env['AWS_SDK_UA_APP_ID']}-{env['TRNPIPE_STAGE']}"
            return start(command, env={**env, "AWS_SDK_UA_APP_ID": name}, **others)

        site.runner.settings = dataclasses.replace(site.runner.settings, start=start_named)
        site.front.disturb(recorder)

        def run(name: str, **more: Any) -> dict[str, Any]:
            with marked(site, name):
                execution = site.start(name, name, **more)
                assert site.finish(execution, ORCHESTRATION.limit_seconds)
            assert execution.ended is not None
            return execution.ended

        sick = SickHost(random.Random("iam"))
        with sick.around(site, folder):
            ended = run("good")
            assert ended["status"] == "SUCCEEDED", ended.get("cause")
        late = site.shard.replace("shard", "late")
        ended = run("late", shard=late)
        assert ended["status"] == "FAILED"
        site.put(late, site.data.text.encode())
        lock = {"name": "again/train", "owner": ended["executionArn"], "run": "late", "since": "2026-01-04"}
        item = {key: {"S": value} for key, value in lock.items()}
        site.table.put_item(TableName=site.stack.table["TableName"], Item=item)
        ended = run("again", run="late", shard=late)
        assert ended["status"] == "SUCCEEDED", ended.get("cause")
        yield Recorded(roles, frozenset(recorder.calls), f"arn:aws:s3:::{site.stack.bucket}")


WRITTEN = {
    "prepare": ["prepare/*"],
    "ingest": ["ingest/*"],
    "plan": ["plan.json", "plan/*", "embed/plan.json"],
    "health_check": ["health_check/*"],
    "train": ["train/*", "model/*"],
    "evaluate": ["evaluate/*"],
    "embed": ["embed/part-*", "embed/*.json"],
    "publish": ["publish/*", "embed/manifest.json"],
    "report": ["report/*"],
}
"""Stage -> what its processes write in a run's folder; others are in `SHARED_FOLDERS`."""

UNHEARD = {*map(str, COMPILING), str(Stage.MINE)}
"""Stages that these executions do not have."""

SHARED_FOLDERS = {
    "registry/*/runs/*": "report",
    "registry/*/index.html": "report",
    "registry/*": "publish",
    "ingested/*": "ingest",
    "mined/*": "mine",
    "seen/*": "train",
}
"""Objects outside the run's folder, which all runs share -> their one writer. The first pattern that fits counts."""

SHARED = {
    ("publish", "embed/*"): "publish joins the parts in embed/manifest.json",
    ("embed", "embed/manifest.json"): "a folder of embed's own, in which publish writes one file",
    ("embed", "embed/plan.json"): "the same, and plan another one",
    ("publish", "registry/*/runs/*.json"): "publications are next to it, and IAM's * goes past a slash",
}
"""Role and object that another stage writes, which the role may write all the same, with the reason."""

UNRECORDED = {
    "s3:ListBucket": "without it S3 says of an absent object that access is denied",
    "s3:AbortMultipartUpload": "an upload that breaks off",
    "s3:DeleteObject": "failure.json of an attempt before; train's older checkpoints; a lock of the compiler's cache; rows",
    "batch:DescribeJobs": "for a gang's parameters, where Batch leaves `Ref::run` as it stands",
    "ecs:UpdateContainerInstancesState": "a sick host, whichever stage finds it",
    "ecs:DescribeContainerInstances": "the instance's id",
    "ecs:DescribeTasks": "the container instance of the task",
}
"""Permissions of a stage's role that these executions did not need under every role, with the reason."""

OF_THE_SERVICE = {
    # Step Functions Developer Guide, "Run AWS Batch workloads": what `.sync` takes.
    *("events:PutTargets", "events:PutRule", "events:DescribeRule", "batch:TerminateJob"),
    # The same, "Using CloudWatch Logs to log execution history" and "AWS X-Ray and Step Functions".
    *(f"logs:{verb}LogDelivery" for verb in ("Create", "Get", "Update", "Delete")),
    *("logs:ListLogDeliveries", "logs:PutResourcePolicy", "logs:DescribeResourcePolicies", "logs:DescribeLogGroups"),
    *("xray:PutTraceSegments", "xray:PutTelemetryRecords", "xray:GetSamplingRules", "xray:GetSamplingTargets"),
    # SNS Developer Guide, "Key management": for publishing to an encrypted topic.
    *("kms:GenerateDataKey", "kms:Decrypt"),
}
"""Calls of Step Functions itself under the machine's role, by its documentation."""


def test_every_call_is_allowed(recorded: Recorded) -> None:
    refused = recorded.roles.refused(recorded.calls)
    # The site's parent stands where no setting names it; a deployment names it in `read`.
    assert [call for call in refused if not call.resource.startswith(f"{recorded.bucket}/models/")] == []


def test_all_stages_and_the_machine_have_been_heard(recorded: Recorded) -> None:
    """Those that compile are no stages of a processor's: tests/chain/test_xla_run.py looks at the calls of one."""
    assert {call.caller for call in recorded.calls} == {*map(str, STAGES), MACHINE} - UNHEARD
    for stage, patterns in WRITTEN.items():
        keys = {in_run(recorded, call) for call in written(recorded) if call.caller == stage}
        for pattern in patterns:
            assert any(fnmatch(key, pattern) for key in keys), (stage, pattern)
        others = {key for key in keys if key and not any(fnmatch(key, pattern) for pattern in patterns)}
        assert others == set(), stage
    writers: dict[str, set[str]] = {pattern: set() for pattern in SHARED_FOLDERS}
    for call in written(recorded):
        key = call.resource.removeprefix(f"{recorded.bucket}/")
        if pattern := next((pattern for pattern in SHARED_FOLDERS if fnmatch(key, pattern)), None):
            writers[pattern].add(call.caller)
    assert writers == {pattern: {writer} - UNHEARD for pattern, writer in SHARED_FOLDERS.items()}
    actions = {call.action for call in recorded.calls}
    assert {"s3:GetObject", "s3:ListBucket", "s3:PutObject", "s3:DeleteObject", "ecs:UpdateContainerInstancesState"} <= actions


def in_run(recorded: Recorded, call: Call) -> str:
    """The name of an object in its run's folder; empty: it is in none."""
    key = call.resource.removeprefix(f"{recorded.bucket}/")
    return key.split("/", 2)[2] if key.startswith("runs/") else ""


def written(recorded: Recorded) -> list[Call]:
    return sorted(call for call in recorded.calls if call.action in ("s3:PutObject", "s3:DeleteObject"))


@pytest.mark.parametrize("role", [*map(str, STAGES), MACHINE])
def test_no_role_may_write_what_another_one_writes(recorded: Recorded, role: str) -> None:
    own = {(call.action, call.resource) for call in recorded.calls if call.caller == role}
    may = recorded.roles.of(role).may
    for call in recorded.calls:
        if not call.writes or call.caller == role or (call.action, call.resource) in own or not may(call.action, call.resource):
            continue
        if call.action.startswith("ecs:"):
            assert role not in {*FARGATE, MACHINE}
            continue
        key = in_run(recorded, call) or call.resource.removeprefix(f"{recorded.bucket}/")
        assert any(role == allowed and fnmatch(key, pattern) for allowed, pattern in SHARED), (role, call)


@pytest.mark.parametrize("role", [*map(str, STAGES), MACHINE])
def test_no_role_may_make_a_call_that_no_stage_makes(recorded: Recorded, role: str) -> None:
    bucket, may = recorded.bucket, recorded.roles.of(role).may
    for key in (
        "runs/r/plan.json",
        "runs/r/input.json",
        "runs/r/model/model.safetensors",
        "registry/current.json",
        "registry/current/index.html",
        "data/shard.jsonl",
        "seen/r/record.json",
    ):
        assert not may("s3:DeleteObject", f"{bucket}/{key}"), key
    # Rows that must not be used any more.
    for key in ("ingested/rows/shard/facts-00000.arrow", "mined/rows/name/mined-00000.arrow"):
        assert may("s3:DeleteObject", f"{bucket}/{key}") == (role == Stage.INGEST.value)
    assert not may("s3:PutObject", f"{bucket}/data/shard.jsonl")
    for key, writer in (
        ("registry/current.json", Stage.PUBLISH),
        ("registry/current/20260104T030000Z-r.json", Stage.PUBLISH),
        ("registry/current/index.html", Stage.REPORT),
    ):
        assert may("s3:PutObject", f"{bucket}/{key}") == (role == writer.value), key
    for action in ("s3:DeleteObjectVersion", "s3:PutObjectAcl", "s3:PutObjectTagging"):
        assert not may(action, f"{bucket}/runs/r/{role}/result.json"), action
    for action in ("s3:DeleteBucket", "s3:PutBucketPolicy", "s3:PutLifecycleConfiguration", "s3:PutBucketVersioning"):
        assert not may(action, bucket), action
    for action in ("iam:PassRole", "sts:AssumeRole", "states:StartExecution", "states:StopExecution", "batch:CancelJob"):
        assert not may(action, "*"), action
        assert not may(action, recorded.roles.machine_arn), action
    assert not may("s3:GetObject", "arn:aws:s3:::another-bucket/file")
    assert not may("ecs:UpdateContainerInstancesState", f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/web/0a1b")
    if role != MACHINE:
        lock = next(call.resource for call in recorded.calls if call.action == "dynamodb:PutItem")
        assert not may("dynamodb:DeleteItem", lock)
        assert not may("batch:SubmitJob", "*")


@pytest.mark.parametrize("role", [*map(str, STAGES), MACHINE])
def test_no_role_has_an_action_that_nothing_needs(recorded: Recorded, role: str) -> None:
    made = {call.action for call in recorded.calls if call.caller == role}
    if role in UNHEARD:
        made = {"s3:GetObject", "s3:PutObject", "s3:ListBucket"}
    known = OF_THE_SERVICE | {"s3:ListBucket"} if role == MACHINE else set(UNRECORDED)
    assert recorded.roles.of(role).actions() - made - known == set()


def test_what_the_documents_ask_for_the_other_roles(recorded: Recorded) -> None:
    """AWS Batch User Guide, "IAM execution role"."""
    roles = recorded.roles
    assert roles.execution.service == "ecs-tasks.amazonaws.com"
    images = ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage")
    for repository in ("Cpu", "Neuron"):
        arn = next(one for statement in roles.execution.statements for one in statement["Resource"] if repository in one)
        assert all(roles.execution.may(action, arn) for action in images)
    assert roles.execution.may("ecr:GetAuthorizationToken", "*")
    logs = next(one["Resource"] for one in roles.execution.statements if "logs:PutLogEvents" in one["Action"])
    assert all(roles.execution.may(action, logs) for action in ("logs:CreateLogStream", "logs:PutLogEvents"))
    assert not any(action.startswith(("s3:", "ecs:", "batch:")) for action in roles.execution.actions())

    assert roles.machine.service == "states.amazonaws.com"
    assert roles.machine.actions() >= OF_THE_SERVICE
    assert {role.service for role in roles.of_stage.values()} == {"ecs-tasks.amazonaws.com"}


# --------------------------------------------------------------------------------------------------------- the evaluator

ARN = "arn:aws:s3:::bucket/runs/{}/train/model.safetensors".format


def statement(effect: str, action: Any, resource: Any, **more: Any) -> dict[str, Any]:
    return {"Effect": effect, "Action": action, "Resource": resource, **more}


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ([], False),
        ([statement("Allow", "s3:PutObject", ARN("r"))], True),
        ([statement("Allow", ["s3:GetObject", "s3:PutObject"], [ARN("q"), ARN("r")])], True),
        ([statement("Allow", "s3:GetObject", ARN("r"))], False),
        ([statement("Allow", "s3:PutObject", ARN("q"))], False),
        ([statement("Allow", "s3:PutObject", ARN("*"))], True),
        ([statement("Allow", "s3:PutObject", "arn:aws:s3:::bucket/*")], True),
        ([statement("Allow", "s3:Put*", "*")], True),
        # A pattern is no regular expression, and covers the whole name.
        ([statement("Allow", "s3:PutObject", "arn:aws:s3:::bucket/runs/./train/model.safetensors")], False),
        ([statement("Allow", "s3:PutObject", "arn:aws:s3:::bucket/runs/r/train/model")], False),
        ([statement("Allow", "s3:PutObject", "bucket/runs/r/train/model.safetensors")], False),
        ([statement("Allow", "s3:Put", ARN("r"))], False),
        ([statement("Allow", "s3:PutObject", ARN("r")), statement("Deny", "s3:*", ARN("r"))], False),
        ([statement("Deny", "s3:PutObject", ARN("q")), statement("Allow", "s3:PutObject", ARN("r"))], True),
    ],
)
def test_the_evaluator(statements: list[dict[str, Any]], expected: bool) -> None:
    assert allows(statements, "s3:PutObject", ARN("r")) is expected


def test_no_role_is_given_what_the_evaluator_does_not_know(recorded: Recorded) -> None:
    for role in recorded.roles.by_name.values():
        for each in role.statements:
            assert set(each) <= {"Sid", "Effect", "Action", "Resource"}, role.name
            assert "?" not in f"{each['Action']} {each['Resource']}", role.name
