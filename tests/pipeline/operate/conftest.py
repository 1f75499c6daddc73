"""What the tests of the operator commands share: a site whose AWS clients answer what a test says, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from pipeline.operate.deployment import CONFIG, Site

MACHINE = "arn:aws:states:us-west-2:123456789012:stateMachine:trnpipe"
EXECUTION = "arn:aws:states:us-west-2:123456789012:execution:trnpipe:"
QUEUES = tuple(f"arn:aws:batch:us-west-2:123456789012:job-queue/trnpipe-{name}" for name in ("cpu", "train"))
START = datetime(2026, 1, 4, 3, 0, tzinfo=timezone.utc)

DEFINITION = {
    "States": {
        "WriteInput": {
            "Resource": "arn:aws:states:::aws-sdk:s3:putObject",
            "Parameters": {
                "Bucket": "weekly",
                "Body": {
                    "deployment": {"config": {"nodes": 2}, "allowed_nodes": [2], "read": ["s3://lake/rows"], "local_paths": False}
                },
            },
        },
        "prepare": {"Resource": "arn:aws:states:::batch:submitJob.sync", "Parameters": {"JobQueue": QUEUES[0]}},
        "train": {"Resource": "arn:aws:states:::aws-sdk:batch:submitJob", "Parameters": {"JobQueue": QUEUES[1]}},
        "publish": {"Resource": "arn:aws:states:::batch:submitJob.sync", "Parameters": {"JobQueue": QUEUES[0]}},
    }
}


def execution(name: str = "a", status: str = "RUNNING", **more: Any) -> dict[str, Any]:
    """DescribeExecution's answer."""
    return {
        "executionArn": EXECUTION + name,
        "stateMachineArn": MACHINE,
        "name": name,
        "status": status,
        "startDate": START,
        "input": "{}",
        **more,
    }


class Answers:
    """A site and what its services answer, in the order in which they are asked; anything else fails the test."""

    def __init__(self, exit_stack: ExitStack) -> None:
        self.site = Site(MACHINE, stack="trnpipe", log_group="/trnpipe/jobs")
        self._stubs: dict[str, Stubber] = {}
        self._exit_stack = exit_stack

    def add(self, service: str, operation: str, answer: dict[str, Any], asked: dict[str, Any]) -> None:
        self._stub(service).add_response(operation, answer, asked)

    def refuse(self, service: str, operation: str, code: str, status: int = 400, message: str = "no") -> None:
        self._stub(service).add_client_error(operation, code, message, status)

    def add_machine(self) -> None:
        described = {
            "stateMachineArn": MACHINE,
            "name": "trnpipe",
            "definition": json.dumps(DEFINITION),
            "roleArn": "arn:aws:iam::123456789012:role/machine",
            "type": "STANDARD",
            "creationDate": START,
        }
        self.add("stepfunctions", "describe_state_machine", described, {"stateMachineArn": MACHINE})

    def done(self) -> None:
        """All that was to be asked has been."""
        for stub in self._stubs.values():
            stub.assert_no_pending_responses()

    def _stub(self, service: str) -> Stubber:
        if service not in self._stubs:
            session = boto3.session.Session(aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-west-2")
            client = session.client(service, config=CONFIG)
            self.site._clients[service] = client
            self._stubs[service] = self._exit_stack.enter_context(Stubber(client))
        return self._stubs[service]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with ExitStack() as exit_stack:
        yield Answers(exit_stack)


@pytest.fixture
def make_execution() -> Callable[..., dict[str, Any]]:
    return execution
