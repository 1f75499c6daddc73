"""Executions of the state machine by the hundred, each with one thing that goes wrong: a `Walk` says what, `Walker` runs it.

All walks share one endpoint. A walk's name is its execution's, its run's and its registry's; jobs end as the walk says, and a
request of the state that it is about is answered as the walk says.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.sns.models import sns_backends
from moto.stepfunctions.parser.models import stepfunctions_parser_backends

from infra.local.definitions import REGION
from infra.local.server import LocalEndpoint, WsgiApplication, local_endpoint
from infra.workflow.machine import definition
from pipeline.contract import StageFailure, now
from tests.chain.front import Request
from tests.engine import CALLER, quick_engine
from tests.infra.machines import BUCKET, GANGS, RESULTS, TABLE, TOPIC, next_stage, stack_around, targets

SHORT_LAPS, LAPS, MISSES = 2, 4, 2
"""So many looks at a gang are short, make it overdue, and may fail here: the machine's own numbers are in the hundreds."""

TIMEOUT_SECONDS = 1.0
SIDE_BY_SIDE = 6
SAID = "chaos"
"""The services' words in every error."""

REQUEST_ID = (("x-amz-request-id", "walk"), ("x-amzn-RequestId", "walk"))
OWNER = "-owner"
"""Suffix of the name of the execution that holds a walk's lock before it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The answers to requests of one state.

    Attributes:
        status, code: the service's error; status None: the request is not answered in time.
        times: how many requests, from the first on.
        operation: as in a Batch path; None: any of the state.
    """

    status: int | None = None
    code: str = ""
    times: int = 1000
    operation: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """The end of every job of one stage.

    Attributes:
        status: of the job; RUNNING: it never ends. GONE: Batch knows no such job.
        exit_code: of its main container; None: it never had one.
        unlisted: how many looks at each job do not find it.
        failure: what its stage leaves behind in failure.json, as bytes or as the record with the time of writing put in.
    """

    status: str = "FAILED"
    reason: str = "Essential container in task exited"
    exit_code: int | None = 69
    unlisted: int = 0
    failure: StageFailure | bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One execution.

    Attributes:
        faults: state -> what its requests meet; `*` stands for every state that is not named.
        jobs: stage -> how its jobs end; those not named succeed.
        results: stage -> metrics of its result file, or the file's bytes; None: none is written; several: one for each job.
        given: the execution's input; an object also gets the walk's registry.
        owners: status of the execution that holds the lock at first, one per look at it; the last one stays. FORGOTTEN: Step
            Functions knows it no longer.
        times_out: states that time out quickly.
    """

    name: str
    faults: Mapping[str, Fault] = field(default_factory=dict)
    jobs: Mapping[str, JobEnd] = field(default_factory=dict)
    results: Mapping[str, dict[str, Any] | bytes | tuple[dict[str, Any], ...] | None] = field(default_factory=dict)
    given: Any = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    times_out: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Event:
    """One entry of an execution's history, with the state that it belongs to."""

    kind: str
    state: str
    details: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Walked:
    """The outcome of a walk.

    Attributes:
        submitted: stage of every SubmitJob that Batch took; terminated: of every job that was terminated.
        requests: state -> how many of its requests a fault of the walk is about.
        lock: owner of the registry's lock afterwards, None: it is free.
        notices: subjects and messages that were published.
    """

    walk: Walk
    arn: str
    status: str
    error: str
    cause: str
    events: tuple[Event, ...]
    submitted: tuple[str, ...]
    terminated: tuple[str, ...]
    requests: Mapping[str, int]
    lock: str | None
    notices: tuple[tuple[str, str], ...]

    @property
    def path(self) -> list[str]:
        """States in the order in which they were entered."""
        return [event.state for event in self.events if event.kind.endswith("StateEntered")]

    @property
    def failed_tasks(self) -> set[str]:
        return {event.state for event in self.events if event.kind in ("TaskFailed", "TaskTimedOut")}

    def calls(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """State and parameters of every call, spelled as Step Functions spells them."""
        for event in self.events:
            if event.kind == "TaskScheduled":
                yield event.state, json.loads(event.details["parameters"])


class WalkedBatch:
    """Batch whose jobs end at once, as the walk says that their name carries."""

    pause = staticmethod(time.sleep)

    def __init__(self, walks: Mapping[str, Walk], put: Callable[[str, bytes], None]) -> None:
        self._walks = walks
        self._put = put
        self._number = itertools.count()
        self._jobs: dict[str, tuple[str, str]] = {}
        self._stopped: set[str] = set()
        self._looks: Counter[str] = Counter()
        self.submitted: list[tuple[str, str]] = []
        self.terminated: list[tuple[str, str]] = []

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"submitjob": self._submit, "describejobs": self._describe, "terminatejob": self._terminate}[operation](request)

    def close(self) -> None:
        """Nothing runs."""

    def _submit(self, request: dict[str, Any]) -> dict[str, Any]:
        stage, _, run = request["jobName"].partition("-")
        job_id = f"job-{next(self._number)}"
        self._jobs[job_id] = (run, stage)
        self.submitted.append((run, stage))
        walk = self._walks[run]
        end = walk.jobs.get(stage)
        folder = request["parameters"]["run"].removeprefix(f"s3://{BUCKET}/")
        if end is None:
            result = walk.results.get(stage, RESULTS.get(stage, {}))
            if isinstance(result, tuple):
                times = self.submitted.count((run, stage))
                result = result[min(times, len(result)) - 1]
            if stage == "plan" and isinstance(result, dict):
                result = {"next": next_stage(other for owner, other in self.submitted if owner == run), **result}
            if result is not None:
                data = result if isinstance(result, bytes) else json.dumps({"metrics": result}).encode()
                self._put(f"{folder}/{stage}/result.json", data)
        elif end.failure is not None:
            failure = end.failure
            data = (
                failure if isinstance(failure, bytes) else json.dumps({**json.loads(failure.to_json()), "time": now()}).encode()
            )
            self._put(f"{folder}/{stage}/failure.json", data)
        return {"jobArn": f"arn:{job_id}", "jobName": request["jobName"], "jobId": job_id}

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"jobs": [detail for job_id in request["jobs"] if (detail := self._detail(job_id))]}

    def _detail(self, job_id: str) -> dict[str, Any] | None:
        run, stage = self._jobs[job_id]
        end = self._walks[run].jobs.get(stage, JobEnd(status="SUCCEEDED", reason="", exit_code=0))
        self._looks[job_id] += 1
        if end.status == "GONE" or self._looks[job_id] <= end.unlisted:
            return None
        status, reason = ("FAILED", "terminated") if job_id in self._stopped else (end.status, end.reason)
        container = {} if end.exit_code is None else {"exitCode": end.exit_code}
        return {
            "jobId": job_id,
            "jobName": f"{stage}-{run}",
            "jobQueue": "q",
            "jobDefinition": "d",
            "startedAt": 0,
            "status": status,
            "statusReason": reason,
            "attempts": [{"container": container, "statusReason": reason}],
        }

    def _terminate(self, request: dict[str, Any]) -> dict[str, Any]:
        self._stopped.add(request["jobId"])
        self.terminated.append(self._jobs[request["jobId"]])
        return {}


class Walker:
    """Walks walks; use `open_walker`."""

    def __init__(self) -> None:
        self.machine = _walked_definition()
        self._walks: dict[str, Walk] = {}
        self._requests: dict[tuple[str, str], int] = {}
        self._looks: dict[str, int] = {}
        self._lock = threading.Lock()
        self.endpoint: LocalEndpoint
        self.batch = WalkedBatch(self._walks, self._put)
        self._clients: dict[str, Any] = {}

    @contextmanager
    def open(self, folder: Path) -> Iterator[Walker]:
        stack = stack_around(self.machine)
        batch: Any = self.batch
        with local_endpoint(stack, folder, lambda _: batch, self._front) as endpoint, quick_engine(self._timeout):
            self.endpoint = endpoint
            self._clients = {name: endpoint.client(name) for name in ("s3", "dynamodb", "stepfunctions")}
            self._arn = stack.state_machine_arn
            yield self

    def walk(self, walks: Iterable[Walk]) -> list[Walked]:
        walks = list(walks)
        names = [walk.name for walk in walks]
        assert len({*names}) == len(names)
        assert not {*names} & self._walks.keys()
        self._walks.update({walk.name: walk for walk in walks})
        # Walks mostly wait: for a timeout, for a job that is looked at.
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            return list(pool.map(self._walk, walks))

    def _walk(self, walk: Walk) -> Walked:
        client = self._clients["stepfunctions"]
        owner = f"{self._arn.replace(':stateMachine:', ':execution:')}:{walk.name}{OWNER}"
        if walk.owners:
            item = {"name": f"{walk.name}/train", "owner": owner, "run": "other-run", "since": "2026-01-04"}
            self._clients["dynamodb"].put_item(TableName=TABLE, Item={key: {"S": value} for key, value in item.items()})
        given = {"registry": walk.name, **walk.given} if isinstance(walk.given, dict) else walk.given
        arn = client.start_execution(stateMachineArn=self._arn, name=walk.name, input=json.dumps(given))["executionArn"]
        deadline = time.monotonic() + 60
        # Not by requests: six walks that ask all the time would keep the endpoint busy.
        execution = stepfunctions_parser_backends[DEFAULT_ACCOUNT_ID][REGION].describe_execution(arn)
        while execution.status == "RUNNING":
            assert time.monotonic() < deadline, (walk, self._events(arn)[-5:])
            time.sleep(0.05)
        found = client.describe_execution(executionArn=arn)
        held = self._clients["dynamodb"].get_item(TableName=TABLE, Key={"name": {"S": f"{walk.name}/train"}}).get("Item")
        sent = sns_backends[DEFAULT_ACCOUNT_ID][REGION].topics[TOPIC].sent_notifications
        return Walked(
            walk=walk,
            arn=arn,
            status=found["status"],
            error=found.get("error", ""),
            cause=found.get("cause", ""),
            events=self._events(arn),
            submitted=tuple(stage for run, stage in self.batch.submitted if run == walk.name),
            terminated=tuple(stage for run, stage in self.batch.terminated if run == walk.name),
            requests={state: number for (run, state), number in [*self._requests.items()] if run == walk.name},
            lock=None if held is None else held["owner"]["S"],
            notices=tuple((subject, message) for _, message, subject, *_ in sent if subject.split()[1] == walk.name),
        )

    def _events(self, arn: str) -> tuple[Event, ...]:
        found, state = [], ""
        for page in self._clients["stepfunctions"].get_paginator("get_execution_history").paginate(executionArn=arn):
            for event in page["events"]:
                details = next((value for key, value in event.items() if key.endswith("EventDetails")), {})
                if event["type"].endswith("StateEntered"):
                    state = details["name"]
                found.append(Event(kind=event["type"], state=state, details=details))
        return tuple(found)

    def _put(self, key: str, body: bytes) -> None:
        self._clients["s3"].put_object(Bucket=BUCKET, Key=key, Body=body)

    def _timeout(self, execution: str, state: str, seconds: int) -> float:
        return TIMEOUT_SECONDS if state in self._walks[execution].times_out else seconds

    def _front(self, application: WsgiApplication) -> WsgiApplication:
        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            request = Request(environ, start_response, application)
            execution, _, state = environ.get(f"HTTP_{CALLER.upper().replace('-', '_')}", "").partition("/")
            walk = self._walks.get(execution)
            if walk is None:
                return request.forward()
            fault = walk.faults.get(state, walk.faults.get("*"))
            if fault is not None and (found := self._answer(walk, state, fault, request)) is not None:
                return found
            if request.target.endswith(".DescribeExecution") and walk.owners:
                return self._describe_owner(walk, request)
            return request.forward()

        return answer

    def _answer(self, walk: Walk, state: str, fault: Fault, request: Request) -> Iterable[bytes] | None:
        if fault.operation is not None and not request.path.endswith(fault.operation):
            return None
        with self._lock:
            self._requests[walk.name, state] = number = self._requests.get((walk.name, state), 0) + 1
        if number > fault.times:
            return None
        if fault.status is None:
            time.sleep(5 * TIMEOUT_SECONDS)
            # Nobody waits for it any more; a 5xx would be asked again by the client that was left behind.
            return request.fail("400 Bad Request", "TooLate")
        line = f"{fault.status} Error"
        error = f"<Error><Code>{fault.code}</Code><Message>{SAID}</Message></Error>"
        if request.service == "s3":
            return request.answer(line, error, ("Content-Type", "application/xml"), *REQUEST_ID)
        if request.service == "sns":
            body = f"<ErrorResponse>{error}<RequestId>walk</RequestId></ErrorResponse>"
            return request.answer(line, body, ("Content-Type", "text/xml"), *REQUEST_ID)
        return request.fail(line, fault.code)

    def _describe_owner(self, walk: Walk, request: Request) -> Iterable[bytes]:
        with self._lock:
            self._looks[walk.name] = look = self._looks.get(walk.name, -1) + 1
        status = walk.owners[min(look, len(walk.owners) - 1)]
        if status == "FORGOTTEN":
            return request.fail("400 Bad Request", "ExecutionDoesNotExist")
        body = {"executionArn": "arn", "stateMachineArn": "arn", "startDate": 0, "status": status}
        return request.answer("200 OK", json.dumps(body), ("Content-Type", "application/x-amz-json-1.0"))


def _walked_definition() -> dict[str, Any]:
    """The machine as it is deployed, but for the numbers of looks at a gang."""
    machine = definition(targets())
    for gang in GANGS:
        lost, *_, overdue, short = machine["States"][f"{gang} (status)"]["Choices"]
        lost["And"][1]["NumericGreaterThanEquals"] = MISSES
        overdue["NumericGreaterThanEquals"], short["NumericLessThan"] = LAPS, SHORT_LAPS
    return machine


@contextmanager
def open_walker(folder: Path) -> Iterator[Walker]:
    with Walker().open(folder) as walker:
        yield walker
