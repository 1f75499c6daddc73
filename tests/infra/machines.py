"""Helpers of the state machine's tests: its targets, the successors of its states, and results of stages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from infra.console import Console
from infra.local.definitions import ACCOUNT, REGION
from infra.local.template import LocalStack
from infra.settings import DEFAULT_MINUTES
from infra.workflow.states import Targets
from pipeline.contract import STAGES, Queue, Shape, Stage

GANGS = [stage for stage, spec in STAGES.items() if spec.shape is Shape.GANG]
BUCKET, TABLE = "runs-bucket", "locks"
CONSOLE = Console(region=REGION, bucket=BUCKET, job_logs="/trnpipe/jobs", dashboard="trnpipe")
TOPIC = f"arn:aws:sns:{REGION}:{ACCOUNT}:notifications"


def targets(**changes: Any) -> Targets:
    arn = f"arn:aws:batch:{REGION}:{ACCOUNT}"
    values: dict[str, Any] = {
        "partition": "aws",
        "console": CONSOLE,
        "bucket": BUCKET,
        "lock_table": TABLE,
        "topic": TOPIC,
        "queues": {queue: f"{arn}:job-queue/{queue.value}" for queue in Queue},
        "jobs": {stage: f"{arn}:job-definition/{stage}:3" for stage in STAGES if stage not in GANGS},
        "gangs": {nodes: {stage: f"{arn}:job-definition/{stage}-{nodes}:3" for stage in GANGS} for nodes in (1, 2)},
        "minutes": DEFAULT_MINUTES,
        "capacity_wait_minutes": 360,
        "deployment": {
            "config": {"device": {"kind": "cpu"}},
            "allowed_nodes": [1, 2],
            "read": ["s3://lake/clicks"],
            "local_paths": False,
            "prices": {"train": 21.5, "cpu": 0.3, "currency": "USD"},
            "hosts": {"train": "trn1.32xlarge"},
            "embed_hosts": 4,
            "timeouts": {stage.value: minutes for stage, minutes in DEFAULT_MINUTES.items()},
        },
        "tags": {"trnpipe": "ranker"},
        "defaults": {"share": "manual", "registry": "current", "wait_minutes": 0},
    }
    return Targets(**{**values, **changes})


def stack_around(
    machine: Mapping[str, Any], *, name: str = "trnpipe", watches: Mapping[str, Mapping[str, Any]] | None = None
) -> LocalStack:
    """The stack of a local endpoint around a state machine, without jobs.

    Args:
        watches: name -> definition of the machines that an abort starts.
    """
    return LocalStack(
        state_machine=name,
        definition=json.dumps(machine),
        role_arn=f"arn:aws:iam::{ACCOUNT}:role/machine",
        bucket=BUCKET,
        table={
            "TableName": TABLE,
            "KeySchema": [{"AttributeName": "name", "KeyType": "HASH"}],
            "AttributeDefinitions": [{"AttributeName": "name", "AttributeType": "S"}],
            "BillingMode": "PAY_PER_REQUEST",
        },
        topics=("notifications",),
        job_definitions=(),
        queues=(),
        watches={watch: json.dumps(definition) for watch, definition in (watches or {}).items()},
    )


def successors(state: Mapping[str, Any]) -> set[str]:
    choices = [choice["Next"] for choice in state.get("Choices", ())]
    catches = [catch["Next"] for catch in state.get("Catch", ())]
    return {*choices, *catches, *(state[key] for key in ("Next", "Default") if key in state)}


def tasks(machine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: state for name, state in machine["States"].items() if state["Type"] == "Task"}


RESULTS: dict[str, dict[str, Any]] = {
    "prepare": {"ingest_children": 2, "mine_children": 2},
    "plan": {"nodes": 2, "embed_children": 3, "compile": True, "precompile": True},
    "evaluate": {"gate": {"verdict": "accepted", "reason": "+0.002"}, "refresh": True},
    "publish": {"again": False, "refused": None, "model": "week-1", "documents": 1000},
}
"""plan's lacks `next`, which depends on the stages before it: `next_stage`."""


def next_stage(run: Iterable[str]) -> str:
    """What plan says of a run that did these stages."""
    return Stage.EMBED.value if Stage.EVALUATE.value in run else Stage.HEALTH_CHECK.value


def with_refresh(stages: Iterable[str]) -> list[str]:
    """Return the stages of a run in their order, with those that list the corpus anew before it is embedded."""
    found = list(stages)
    place = found.index(Stage.EMBED.value)
    again = [stage.value for stage in (Stage.PREPARE, Stage.INGEST, Stage.MINE, Stage.PLAN) if stage.value in found]
    return [*found[:place], *again, *found[place:]]


def called(state: Mapping[str, Any]) -> tuple[str, str]:
    """Service and operation that a Task state calls, as botocore names them."""
    found = re.fullmatch(r"arn:aws:states:::(?:aws-sdk:)?(\w+):(\w+)(?:\.sync)?", state["Resource"])
    assert found is not None, state["Resource"]
    service, action = found.groups()
    return {"sfn": "stepfunctions"}.get(service, service), action[0].upper() + action[1:]
