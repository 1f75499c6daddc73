"""Fixtures of the local endpoint's tests: the synthesized stack, an endpoint on it, and executions driven to their end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import state_task_service_callback as callback_module

from infra.local.batch_nodes import BatchSettings
from infra.local.server import LocalEndpoint, local_endpoint
from infra.local.template import LocalStack, read_stack
from tests.infra.faulty_batch import FaultyBatchRunner

LOOK_SECONDS = 0.1
"""Between two looks of the engine at a job."""

STAGE_PROGRAM = (sys.executable, str(Path(__file__).with_name("stage_program.py")))


@pytest.fixture(scope="session")
def stack(templates: Path) -> LocalStack:
    return read_stack(templates)


class Machine:
    """A running endpoint with the real state machine whose jobs run the test's stage program."""

    def __init__(self, endpoint: LocalEndpoint, stack: LocalStack, state: Path, close: Callable[[], None] = lambda: None) -> None:
        self.endpoint, self.stack, self.state, self.close = endpoint, stack, state, close
        self.client = endpoint.client("stepfunctions")

    def start(self, name: str, execution_input: Any = None) -> str:
        answer = self.client.start_execution(
            stateMachineArn=self.stack.state_machine_arn,
            name=name,
            input=json.dumps({} if execution_input is None else execution_input),
        )
        return str(answer["executionArn"])

    def finish(self, arn: str, seconds: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (execution := self.client.describe_execution(executionArn=arn))["status"] == "RUNNING":
            assert time.monotonic() < deadline, self.entered(arn)
            time.sleep(0.1)
        return dict(execution)

    def run(self, name: str, execution_input: Any = None) -> dict[str, Any]:
        return self.finish(self.start(name, execution_input))

    def entered(self, arn: str) -> list[str]:
        events = self.client.get_execution_history(executionArn=arn)["events"]
        return [event["stateEnteredEventDetails"]["name"] for event in events if event["type"].endswith("StateEntered")]

    def lock_items(self) -> list[dict[str, Any]]:
        return list(self.endpoint.client("dynamodb").scan(TableName=self.stack.table["TableName"])["Items"])


@pytest.fixture
def machine(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    """Start an endpoint on a state folder; `script` is what the stage program does."""
    with ExitStack() as endpoints:

        def start(script: dict[str, Any] | None = None, state: Path = tmp_path / "state", stack: LocalStack = stack) -> Machine:
            endpoints.close()
            monkeypatch.setenv("TRNPIPE_TEST_SCRIPT", json.dumps(script or {}))
            monkeypatch.setattr(callback_module, "_DELAY_SECONDS_SYNC_CONDITION_CHECK", LOOK_SECONDS)
            endpoint = local_endpoint(stack, state, runner_of(stack, state))
            return Machine(endpoints.enter_context(endpoint), stack, state, endpoints.close)

        yield start


def runner_of(stack: LocalStack, state: Path) -> Callable[[dict[str, str]], FaultyBatchRunner]:
    def make(environment: dict[str, str]) -> FaultyBatchRunner:
        settings = BatchSettings(
            logs=state / "logs", environment=environment, program=STAGE_PROGRAM, grace=timedelta(seconds=2), side_by_side=2
        )
        return FaultyBatchRunner(stack.job_definitions, stack.queues, settings)

    return make
