"""The Step Functions engine of the local endpoint as tests use it: seconds pass faster, and every request names its state.

What is changed takes time and nothing else, but for one thing: `States.ALL` no longer catches `States.Runtime`, as in Step
Functions, where a path that leads nowhere ends an execution on the spot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from moto import backends
from moto.stepfunctions.parser.api import HistoryEventType, TaskFailedEventDetails
from moto.stepfunctions.parser.asl.component.common.error_name.error_equals_decl import ErrorEqualsDecl
from moto.stepfunctions.parser.asl.component.common.error_name.failure_event import FailureEvent, FailureEventException
from moto.stepfunctions.parser.asl.component.common.error_name.states_error_name import StatesErrorName
from moto.stepfunctions.parser.asl.component.common.error_name.states_error_name_type import StatesErrorNameType
from moto.stepfunctions.parser.asl.component.common.retry import retrier_decl
from moto.stepfunctions.parser.asl.component.common.timeouts.timeout import TimeoutSeconds
from moto.stepfunctions.parser.asl.component.state.exec.execute_state import ExecutionState
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import state_task_service_callback as callback_module
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service import StateTaskService
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_dynamodb import (
    StateTaskServiceDynamoDB,
)
from moto.stepfunctions.parser.asl.component.state.wait.wait_function.wait_function import WaitFunction
from moto.stepfunctions.parser.asl.eval.event.event_detail import EventDetails
from moto.stepfunctions.parser.asl.utils import boto_client as client_module
from moto.stepfunctions.parser.asl.utils import json_path
from moto.stepfunctions.parser.asl.utils.json_path import NoSuchJsonPathError

CALLER = "X-Trnpipe-Caller"
"""Header of the engine's requests: `EXECUTION/STATE`."""

POLL_SECONDS = 0.02
MINUTE_SECONDS = 0.01
"""What a minute of Wait and Retry takes."""

Timeouts = Callable[[str, str, int], float]
"""Execution, state, its TimeoutSeconds -> seconds after which it times out."""


@contextmanager
def quick_engine(timeout: Timeouts = lambda _execution, _state, seconds: seconds) -> Iterator[None]:
    """Within it, and inside an endpoint that is up: waits hardly wait, and what is always the same is made once."""
    modules = [*backends.list_of_moto_modules()]
    with ExitStack() as undo:

        def replace(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        replace(callback_module, "_DELAY_SECONDS_SYNC_CONDITION_CHECK", POLL_SECONDS)
        replace(client_module, "boto3", SimpleNamespace(client=_clients(client_module.boto3.client)))
        replace(json_path, "parse", cache(json_path.parse))
        replace(backends, "list_of_moto_modules", lambda: modules)
        replace(retrier_decl, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 60 * MINUTE_SECONDS)))
        replace(WaitFunction, "_wait_interval", _wait)
        replace(StateTaskService, "_eval_execution", _named(StateTaskService._eval_execution))
        replace(ErrorEqualsDecl, "_eval_body", _all_but_runtime(ErrorEqualsDecl._eval_body))
        replace(ExecutionState, "_evaluate_with_timeout", _named_failures(ExecutionState._evaluate_with_timeout))
        replace(StateTaskServiceDynamoDB, "_from_error", _failures_as_they_are(StateTaskServiceDynamoDB._from_error))
        replace(TimeoutSeconds, "_eval_body", _timeouts(timeout))
        yield


def place(env: Any) -> tuple[str, str]:
    """Name of the execution, and of the state that it is in."""
    context = env.states.context_object.context_object_data
    return context["Execution"]["Name"], context["State"]["Name"]


_here = threading.local()


def _clients(make: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[str, Any] = {}
    lock = threading.Lock()

    def name_caller(request: Any, **_: Any) -> None:
        # Parts of a signed header may not begin or end with spaces, which names of states do not.
        request.headers[CALLER] = getattr(_here, "caller", "")

    def client(*, service_name: str, **settings: Any) -> Any:
        with lock:
            if service_name not in made:
                made[service_name] = make(service_name=service_name, **settings)
                made[service_name].meta.events.register("before-sign", name_caller)
            return made[service_name]

    return client


def _named(evaluate: Callable[..., None]) -> Callable[..., None]:
    def named(task: Any, env: Any) -> None:
        # In the thread that makes the state's requests, until the state is left.
        _here.caller = "/".join(place(env))
        evaluate(task, env)

    return named


def _wait(_function: Any, env: Any, wait_seconds: int) -> None:
    env.program_state_event.wait(wait_seconds / 60 * MINUTE_SECONDS)


def _timeouts(timeout: Timeouts) -> Callable[..., None]:
    def evaluate(declared: Any, env: Any) -> None:
        seconds = declared.timeout_seconds
        env.stack.append(seconds if declared.is_default_value() else timeout(*place(env), seconds))

    return evaluate


def _named_failures(evaluate: Callable[..., None]) -> Callable[..., None]:
    """What the engine raises where a path or a function of the language fails gets Step Functions' name for it."""

    def named(state: Any, env: Any) -> None:
        try:
            evaluate(state, env)
        except NoSuchJsonPathError as error:
            raise _failure(env, StatesErrorNameType.StatesRuntime, error) from error
        except (ValueError, TypeError, IndexError) as error:
            raise _failure(env, StatesErrorNameType.StatesIntrinsicFailure, error) from error

    return named


def _failure(env: Any, kind: StatesErrorNameType, error: Exception) -> FailureEventException:
    details = TaskFailedEventDetails(error=kind.to_name(), cause=str(error))
    return FailureEventException(
        FailureEvent(
            env=env,
            error_name=StatesErrorName(typ=kind),
            event_type=HistoryEventType.TaskFailed,
            event_details=EventDetails(taskFailedEventDetails=details),
        )
    )


def _failures_as_they_are(from_error: Callable[..., Any]) -> Callable[..., Any]:
    """DynamoDB's states take a timeout, and what has a name, for an error of DynamoDB's."""

    def unchanged(task: Any, env: Any, ex: Exception) -> Any:
        if isinstance(ex, FailureEventException):
            return ex.failure_event
        return task._get_timed_out_failure_event(env) if isinstance(ex, TimeoutError) else from_error(task, env, ex)

    return unchanged


def _all_but_runtime(evaluate: Callable[..., None]) -> Callable[..., None]:
    runtime = StatesErrorName(typ=StatesErrorNameType.StatesRuntime)

    def match(declared: Any, env: Any) -> None:
        if env.stack[-1] == runtime:
            env.stack[-1] = False
        else:
            evaluate(declared, env)

    return match
