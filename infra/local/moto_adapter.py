"""Changes to moto's Step Functions engine (moto 5.2.5) that our state machine needs, made while the local endpoint runs.

1. Parameters and results pass through without the change of spelling between Step Functions (PascalCase) and the service
   (`jobName`), and a streamed body stays a stream. The engine has the code for both and does not call it.
2. `batch:submitJob` drops ShareIdentifier, SchedulingPriorityOverride and PropagateTags.
3. An `aws-sdk` integration names the errors of S3 and Batch in lower case (`s3.NoSuchKeyException`), AWS as `S3.`, `Batch.`.
4. When DescribeJobs of a `.sync` Batch job fails with a server error, the state ends, and its retry submits the job a second
   time. Step Functions learns of a job's end from EventBridge; a failed call ends no state there.
5. A `.sync` Batch job keeps running when its state times out or the execution is stopped; Step Functions terminates it.
6. The engine signs its calls under a fixed key of its own; the endpoint answers those under this process's key only.
7. It makes a client for every request and parses the definition for every execution: most of what an execution costs.
8. It describes a `.sync` job every half second; it should do so as soon as a job ends.
9. A reference to a variable (`$laps`) is given to a JSONata interpreter that moto does not have.
10. A Wait between two calls of DescribeJobs for a gang lasts a minute, even when the job ends earlier.

Each of them has a test that fails when moto no longer needs it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from botocore.exceptions import ClientError
from moto.stepfunctions.parser.asl.component.common.string.string_expression import StringVariableSample
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import state_task_service_aws_sdk as aws_sdk_module
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import state_task_service_batch as batch_module
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import state_task_service_callback as callback_module
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service import StateTaskService
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_batch import StateTaskServiceBatch
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_callback import (
    StateTaskServiceCallback,
)
from moto.stepfunctions.parser.asl.component.state.wait.wait_function.wait_function import WaitFunction
from moto.stepfunctions.parser.asl.eval.variable_store import NoSuchVariable
from moto.stepfunctions.parser.asl.parse.asl_parser import AmazonStateLanguageParser
from moto.stepfunctions.parser.asl.utils import boto_client
from moto.stepfunctions.parser.asl.utils.boto_client import boto_client_for

from infra.local.definitions import REGION
from infra.workflow.states import JOB_VARIABLE

Change = Callable[[ExitStack], None]
Pause = Callable[..., Any]
"""Waits that many seconds, or until a Batch job ends: any job, or the one of the id in its second argument. Returns whether a job
ended."""

STOP_SECONDS = 0.1
"""After which a Wait notices that its execution was stopped."""

PARSE = lru_cache(maxsize=16)(AmazonStateLanguageParser.parse)
"""Of a whole process: parsing the definition takes about a second."""


@contextmanager
def adapted(pause: Pause) -> Iterator[None]:
    """Change moto's engine as described above, and undo the changes on exit.

    Args:
        pause: waits between two descriptions of a job, the engine's own and a state's.
    """
    with ExitStack() as undo:
        # The one thing that module takes from `time`.
        undo.enter_context(mock.patch.object(callback_module, "time", SimpleNamespace(sleep=pause)))
        undo.enter_context(mock.patch.object(WaitFunction, "_wait_interval", _waiting(pause)))
        for change in CHANGES:
            change(undo)
        yield


def _waiting(pause: Pause) -> Callable[..., None]:
    def wait_interval(_function: Any, env: Any, wait_seconds: int) -> None:
        deadline = time.monotonic() + wait_seconds
        try:
            job = env.variable_store.get(JOB_VARIABLE)
        except NoSuchVariable:
            job = None
        while env.is_running() and (left := deadline - time.monotonic()) > 0:
            if job is None:
                env.program_state_event.wait(left)
            elif pause(min(left, STOP_SECONDS), job):
                return

    return wait_interval


def change_spelling(undo: ExitStack) -> None:
    """Bind the engine's own conversions to the operation's shapes as botocore describes them."""

    def normalise_parameters(
        self: Any, parameters: Any, boto_service_name: str | None = None, service_action_name: str | None = None
    ) -> None:
        if (shape := _operation(self, boto_service_name, service_action_name).input_shape) is not None:
            self._to_boto_request(parameters, shape)

    def normalise_response(
        self: Any, response: Any, boto_service_name: str | None = None, service_action_name: str | None = None
    ) -> None:
        if (shape := _operation(self, boto_service_name, service_action_name).output_shape) is not None:
            self._from_boto_response(response, shape)

    undo.enter_context(mock.patch.object(StateTaskService, "_normalise_parameters", normalise_parameters))
    undo.enter_context(mock.patch.object(StateTaskService, "_normalise_response", normalise_response))


def pass_on_fair_share(undo: ExitStack) -> None:
    supported = batch_module._SUPPORTED_API_PARAM_BINDINGS
    wider = supported["submitjob"] | {"ShareIdentifier", "SchedulingPriorityOverride", "PropagateTags"}
    undo.enter_context(mock.patch.dict(supported, submitjob=wider))


def name_errors(undo: ExitStack) -> None:
    undo.enter_context(mock.patch.dict(aws_sdk_module._SERVICE_ERROR_NAMES, s3="S3", batch="Batch"))


def follow_jobs(undo: ExitStack) -> None:
    build_resolver = StateTaskServiceBatch._build_sync_resolver
    wait_for_outcome = StateTaskServiceCallback._eval_sync

    def build_sync_resolver(self: Any, env: Any, **others: Any) -> Any:
        job_id = env.stack[-1]["JobId"]
        resolver = build_resolver(self, env=env, **others)

        def resolve() -> Any:
            try:
                return resolver()
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                    raise
                return None

        resolve.job_id = job_id  # type: ignore[attr-defined]
        return resolve

    def eval_sync(self: Any, env: Any, sync_resolver: Any, **others: Any) -> Any:
        outcome = wait_for_outcome(self, env=env, sync_resolver=sync_resolver, **others)
        # The job's description when it is over; None or a timeout's outcome when the engine has given up waiting.
        if not isinstance(outcome, dict):
            boto_client_for(service="batch", region=REGION).terminate_job(
                jobId=sync_resolver.job_id, reason="The state that submitted this job ended before it"
            )
        return outcome

    undo.enter_context(mock.patch.object(StateTaskServiceBatch, "_build_sync_resolver", build_sync_resolver))
    undo.enter_context(mock.patch.object(StateTaskServiceBatch, "_eval_sync", eval_sync))


def share_clients(undo: ExitStack) -> None:
    # The key that the environment has now: what the engine leaves behind must not sign with its user's own key.
    key = {
        name: os.environ[name.upper()] for name in ("aws_access_key_id", "aws_secret_access_key") if name.upper() in os.environ
    }
    make, made, lock = boto_client.boto3.client, {}, threading.Lock()

    def client(*, service_name: str, region_name: str, **others: Any) -> Any:
        # Others are the same for all: the endpoint, no retries. Clients may be shared by threads, their making not.
        with lock:
            if (service_name, region_name) not in made:
                arguments = {"service_name": service_name, "region_name": region_name, **others, **key}
                made[service_name, region_name] = make(**arguments)
            return made[service_name, region_name]

    # Replaces boto3, of which the engine's maker of clients uses nothing else.
    undo.enter_context(mock.patch.object(boto_client, "boto3", SimpleNamespace(client=client)))


def parse_once(undo: ExitStack) -> None:
    undo.enter_context(mock.patch.object(AmazonStateLanguageParser, "parse", staticmethod(PARSE)))


def read_variables(undo: ExitStack) -> None:
    def look_up(self: Any, env: Any) -> None:
        env.stack.append(env.variable_store.get(self.expression.removeprefix("$")))

    undo.enter_context(mock.patch.object(StringVariableSample, "_eval_body", look_up))


CHANGES: tuple[Change, ...] = (
    change_spelling,
    pass_on_fair_share,
    name_errors,
    follow_jobs,
    share_clients,
    parse_once,
    read_variables,
)


def _operation(task: Any, service: str | None, action: str | None) -> Any:
    client = boto_client_for(service=task._get_boto_service_name(service), region=REGION)
    return client.meta.service_model.operation_model(client.meta.method_to_api_mapping[task._get_boto_service_action(action)])
