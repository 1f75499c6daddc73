"""The state machine walked on every path: each Task state fails in each way that its Retry and Catch or its service know, every
Choice takes each of its ways. A state, a way on or a kind of failure that is added to the machine is missed here by name.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from infra.settings import Settings
from infra.workflow.machine import LAP_MINUTES, LONG_LAP_MINUTES, LONG_WAIT_MINUTES, LONGEST_WAIT_MINUTES, definition
from infra.workflow.states import (
    LAP_EVENTS,
    LONG_LAP_SECONDS,
    MOST_EVENTS,
    MOST_MISSES,
    OTHER_EVENTS,
    SHORT_LAP_SECONDS,
    SHORT_LAPS,
)
from pipeline.contract import RESULT_LIMIT_BYTES, STAGES, Stage, StageFailure
from tests.infra.machines import GANGS, RESULTS, called, successors, targets, tasks, with_refresh
from tests.infra.walks import LAPS, MISSES, OWNER, SAID, Fault, JobEnd, Walk, Walked, Walker, open_walker

RETRIED = 7
"""Requests of a state whose calls fail for good: the first, and six that its Retry adds."""

FAILED_JOB = JobEnd(reason="Host EC2 (instance i-1) terminated.", exit_code=None)
LISTED_LATE = JobEnd(status="SUCCEEDED", reason="", exit_code=0, unlisted=1)
SINGLE = {**RESULTS["plan"], "embed_children": 1}
WORDS = StageFailure(
    stage="prepare", run="r", exit_code=64, what="an unknown key", value=["trian"], rule="schema", remedy="fix it"
)

HARMLESS = ("report", "ReleaseLock", "Notify", "ReadFailure", *(f"{stage} (stop)" for stage in GANGS))
"""States whose failure changes nothing of how an execution ends."""

BEFORE_THE_LOCK = ("AcquireLock", "ReadLock", "ReadOwner", "TakeOverLock")
REPORTED = ("ReadInputs", "ReadPlan", "ReadScorecard", "ReadPublication")
"""States besides those of a stage after whose failure the report stage runs."""

ROUTES: dict[str, dict[str, Any]] = {
    "ReadLock": {"owners": ("SUCCEEDED",)},
    "ReadOwner": {"owners": ("SUCCEEDED",)},
    "TakeOverLock": {"owners": ("SUCCEEDED",)},
    "ingest (single)": {"results": {"prepare": {**RESULTS["prepare"], "ingest_children": 1}}},
    "mine (single)": {"results": {"prepare": {**RESULTS["prepare"], "mine_children": 1}}},
    "embed (single)": {"results": {"plan": SINGLE}},
    **{state: {"jobs": {"prepare": FAILED_JOB}} for state in ("report", "ReleaseLock", "Notify", "ReadFailure")},
    **{f"{stage} (stop)": {"jobs": {stage.value: JobEnd(status="RUNNING")}} for stage in GANGS},
}
"""Inputs and answers that lead to states that a smooth run does not enter, or enters late."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way for one state to fail, and what must come of it.

    Attributes:
        error: under which the state fails.
        requests: how often the state asks the service; None: the failure is not about requests.
        cause: words that the execution's cause must hold.
        ends: stages whose jobs must have been terminated.
    """

    walk: Walk
    state: str
    kind: str
    error: str
    requests: int | None = None
    cause: str = SAID
    ends: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    for name, state in tasks(Walker().machine).items():
        yield from failures(name, state)


def failures(name: str, state: Mapping[str, Any]) -> Iterator[Case]:
    """Each way of failing of what the state calls."""

    def refused(kind: str, error: str, requests: int, status: int, code: str, **more: Any) -> Case:
        walk = Walk(name="", faults={name: Fault(status=status, code=code, **more)}, **ROUTES.get(name, {}))
        return Case(walk=walk, state=name, kind=kind, error=error, requests=requests)

    def unanswered(requests: int) -> Case:
        walk = Walk(name="", faults={name: Fault()}, times_out=frozenset({name}), **ROUTES.get(name, {}))
        return Case(walk=walk, state=name, kind="unanswered", error="States.Timeout", requests=requests, cause="")

    def ended(kind: str, error: str, end: JobEnd, **more: Any) -> Case:
        route = ROUTES.get(name, {})
        walk = Walk(name="", **{**route, "jobs": {**route.get("jobs", {}), stage: end}})
        return Case(walk=replace(walk, times_out=more.pop("times_out", frozenset())), state=name, kind=kind, error=error, **more)

    stage = name.split(" ")[0]
    service, operation = called(state)
    if operation == "SubmitJob":
        yield refused("refused", "Batch.ClientException", 1, 400, "ClientException", operation="submitjob")
        yield refused("sick", "Batch.ServerException", RETRIED, 500, "ServerException", operation="submitjob")
        throttled = "Batch.TooManyRequestsException" if state["Resource"].endswith(".sync") else "Batch.BatchException"
        yield refused("throttled", throttled, RETRIED, 429, "TooManyRequestsException", operation="submitjob")
        if state["Resource"].endswith(".sync"):
            yield ended("job failed", "States.TaskFailed", FAILED_JOB, cause=FAILED_JOB.reason)
            overdue = {"times_out": frozenset({name}), "cause": "", "ends": (stage,)}
            yield ended("job overdue", "States.Timeout", JobEnd(status="RUNNING"), **overdue)
        else:
            yield unanswered(1)
    elif operation == "DescribeJobs":
        lost: dict[str, Any] = {"ends": (stage,), "cause": f"at most {MOST_MISSES} looks in a row may fail"}
        looks = MISSES + 1
        yield replace(refused("refused", "GangLost", looks, 400, "ClientException"), **lost)
        yield replace(refused("sick", "GangLost", looks * RETRIED, 500, "ServerException"), **lost)
        yield replace(unanswered(looks), error="GangLost", **lost)
    elif operation == "TerminateJob":
        yield refused("refused", "", 1, 400, "ClientException")
        yield unanswered(1)
    elif service == "dynamodb":
        yield refused("throttled", "DynamoDB.ThrottlingException", RETRIED, 400, "ThrottlingException")
        yield refused("table gone", "DynamoDB.ResourceNotFoundException", RETRIED, 400, "ResourceNotFoundException")
        yield unanswered(RETRIED)
    elif service == "s3":
        yield refused("slow down", "S3.S3Exception", RETRIED, 503, "SlowDown")
        yield refused("denied", "S3.AccessDeniedException", RETRIED, 403, "AccessDenied")
        if operation == "GetObject":
            yield refused("absent", "S3.NoSuchKeyException", 1, 404, "NoSuchKey")
        yield unanswered(RETRIED)
    elif service == "stepfunctions":
        yield refused("throttled", "Sfn.SfnException", RETRIED, 400, "ThrottlingException")
        yield unanswered(RETRIED)
    elif service == "sns":
        yield refused("throttled", "", RETRIED, 429, "Throttled")
        yield refused("refused", "", RETRIED, 400, "InvalidParameter")
        yield unanswered(RETRIED)
    else:
        raise AssertionError(f"{name} calls {service}, of whose failures nothing is known here")


CASES = [replace(case, walk=replace(case.walk, name=f"fail-{number}")) for number, case in enumerate(cases())]

BRIEFLY = {"*": Fault(status=500, code="ServerException", times=2)}
LONG_WAIT = {"lock": {"wait_minutes": LONG_WAIT_MINUTES + LONG_LAP_MINUTES}}
UNUSABLE: tuple[Any, ...] = (
    [1],
    "{text",
    3,
    None,
    {"share": 3},
    {"registry": 3},
    {"run": ["x"]},
    {"run": "../other"},
    {"run": "a.b"},
    {"lock": {"wait_minutes": "long"}},
    {"lock": {"wait_minutes": LONGEST_WAIT_MINUTES + 1}},
)
OTHERS = {
    walk.name: walk
    for walk in (
        Walk(name="good"),
        Walk(name="briefly", faults=BRIEFLY),
        Walk(
            name="quietly",
            faults={state: Fault(status=400, code="ClientException") for state in ("report", "ReleaseLock", "Notify")},
        ),
        *(Walk(name=f"unusable-{number}", given=given) for number, given in enumerate(UNUSABLE)),
        Walk(name="nowhere", given={"registry": None, "run": None}),
        Walk(
            name="one-node",
            results={
                "prepare": {"ingest_children": 1, "mine_children": 1},
                "plan": {"nodes": 1, "embed_children": 1, "compile": False},
            },
        ),
        Walk(name="no-gang", results={"plan": {"nodes": 16, "embed_children": 1}}),
        Walk(name="no-number", results={"plan": {"nodes": {"of": "them"}, "embed_children": 1}}),
        Walk(name="no-inputs", results={"prepare": {"nodes": 2}}),
        Walk(name="nothing-new", results={"prepare": {"ingest_children": 0, "mine_children": 0}}),
        Walk(name="no-plan", results={"plan": None}),
        Walk(name="plan-of-text", results={"plan": b"not json"}),
        Walk(name="plan-of-nothing", results={"plan": b"[]"}),
        Walk(name="half-a-plan", results={"plan": {"nodes": 2}}),
        Walk(name="refused", results={"evaluate": {"gate": {"verdict": "refused", "reason": "worse"}, "refresh": False}}),
        Walk(
            name="refused-and-refreshed",
            results={
                "evaluate": {"gate": {"verdict": "refused", "reason": "worse"}, "refresh": True},
                "publish": {**RESULTS["publish"], "refused": "worse"},
            },
        ),
        Walk(name="refresh", given={"mode": "refresh"}, results={"plan": {**RESULTS["plan"], "next": "embed"}}),
        Walk(
            name="changed-meanwhile",
            results={"publish": ({**RESULTS["publish"], "again": True}, RESULTS["publish"])},
        ),
        Walk(name="publication-of-nothing", results={"publish": {"again": False}}),
        Walk(name="no-reason", results={"evaluate": {"gate": {"verdict": "accepted"}}}),
        Walk(name="no-verdict", results={"evaluate": {"gate": {"verdict": "perhaps", "reason": "?"}, "refresh": True}}),
        Walk(name="verdict-of-another-type", results={"evaluate": {"gate": {"verdict": True, "reason": "?"}, "refresh": True}}),
        Walk(name="with-words", jobs={"prepare": JobEnd(failure=WORDS)}),
        Walk(name="half-the-words", jobs={"prepare": JobEnd(failure=b'{"what": "?"}')}),
        Walk(name="no-words", jobs={"prepare": JobEnd(failure=b"not json")}),
        Walk(name="held", owners=("RUNNING",)),
        Walk(name="held-for-redrive", owners=("PENDING_REDRIVE",)),
        Walk(name="waits", owners=("RUNNING", "RUNNING", "SUCCEEDED"), given={"lock": {"wait_minutes": 2}}),
        Walk(name="waits-long", owners=("RUNNING", "RUNNING", "ABORTED"), given=LONG_WAIT),
        Walk(name="forgotten", owners=("FORGOTTEN",), jobs={"prepare": FAILED_JOB}),
        Walk(
            name="free-again",
            faults={"AcquireLock": Fault(status=400, code="ConditionalCheckFailedException", times=1)},
            jobs={"prepare": FAILED_JOB},
        ),
        Walk(
            name="taken-by-another",
            owners=("ABORTED",),
            faults={"TakeOverLock": Fault(status=400, code="ConditionalCheckFailedException", times=1)},
            jobs={"prepare": FAILED_JOB},
        ),
        *(Walk(name=f"failed-{stage}", jobs={stage.value: FAILED_JOB}) for stage in GANGS),
        *(Walk(name=f"overdue-{stage}", jobs={stage.value: JobEnd(status="RUNNING")}) for stage in GANGS),
        *(Walk(name=f"unlisted-{stage}", jobs={stage.value: JobEnd(status="GONE")}) for stage in GANGS),
        *(Walk(name=f"listed-late-{stage}", jobs={stage.value: LISTED_LATE}) for stage in GANGS),
        Walk(
            name="large",
            given={"model": {"parent": "x" * (48 << 10)}},
            results={stage: {**metrics, "more": "x" * (RESULT_LIMIT_BYTES - 1024)} for stage, metrics in RESULTS.items()},
        ),
    )
}


@dataclass(frozen=True)
class Walks:
    walker: Walker
    found: Mapping[str, Walked] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Walked:
        return self.found[name]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    with open_walker(tmp_path_factory.mktemp("walks") / "state") as walker:
        found = walker.walk([*(case.walk for case in CASES), *OTHERS.values()])
        yield Walks(walker, {one.walk.name: one for one in found})


def stages_until(state: str) -> list[str]:
    """Stages whose jobs Batch has taken when a state fails: those before it in the machine's order."""
    order = with_refresh(stage.value for stage in STAGES)
    after = {"ReadInputs": "prepare", "ReadPlan": "plan", "ReadScorecard": "evaluate", "ReadPublication": "publish"}
    if state in (*BEFORE_THE_LOCK, "WriteInput"):
        return []
    return order[: order.index(after[state]) + 1 if state in after else order.index(state.split(" ")[0])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.state}-{case.kind}".replace(" ", "_"))
def test_a_failing_state(walks: Walks, case: Case) -> None:
    found, stage = walks[case.walk.name], case.state.split(" ")[0]
    assert case.state in found.failed_tasks
    if case.requests is not None:
        assert found.requests[case.state] == case.requests
    assert set(found.terminated) >= {*case.ends}
    assert found.status == "FAILED"
    if case.state in HARMLESS:
        word = "GangOverdue" if case.state.endswith(" (stop)") else "States.TaskFailed"
        at = "prepare" if word == "States.TaskFailed" else stage
        assert found.error == f"{at}: {word}"
    else:
        named = stage if stage in {gang.value for gang in GANGS} else case.state
        assert found.error == f"{named}: {case.error}"
        assert case.cause in found.cause
        assert "report" in found.submitted if stage in STAGES or case.state in REPORTED else "report" not in found.submitted
        taken = [submitted for submitted in found.submitted if submitted != "report"]
        started = (taken[-1:] == [stage] and case.kind not in ("refused", "sick")) or case.state.endswith("(look)")
        assert taken == stages_until(case.state) + [stage] * started
    held_by_another = found.arn + OWNER if case.walk.owners else None
    expected = dict.fromkeys(BEFORE_THE_LOCK, held_by_another) | {"ReleaseLock": found.arn}
    assert found.lock == expected.get(case.state)
    published = [subject for subject, _ in found.notices]
    assert published == ([] if case.state == "Notify" else [f"trnpipe: {case.walk.name} failed"])


def test_every_task_has_been_made_to_fail_and_every_way_has_been_taken(walks: Walks) -> None:
    states, found = walks.walker.machine["States"], walks.found.values()
    assert set(states) - {name for one in found for name in one.path} == set()
    assert set(tasks(walks.walker.machine)) - set().union(*(one.failed_tasks for one in found)) == set()
    ways = {(name, after) for name, state in states.items() for after in successors(state)}
    assert ways - {way for one in found for way in itertools.pairwise(one.path)} == set()


def test_a_service_that_is_sick_for_a_while_is_asked_again(walks: Walks) -> None:
    found = walks["briefly"]
    assert found.status == "SUCCEEDED"
    assert list(found.submitted) == with_refresh(stage.value for stage in STAGES)
    assert len(found.notices) == 1
    assert found.lock is None
    entered = Counter(found.path)
    for state, requests in found.requests.items():
        # What is asked after the job is submitted counts here, too.
        assert requests >= 2 + entered[state], state


def test_without_a_new_shard_no_job_ingests(walks: Walks) -> None:
    found = walks["nothing-new"]
    assert found.status == "SUCCEEDED"
    assert list(found.submitted) == with_refresh(stage.value for stage in STAGES if stage not in (Stage.INGEST, Stage.MINE))


def test_a_refresh_trains_nothing_and_has_a_lock_of_its_own(walks: Walks) -> None:
    found = walks["refresh"]
    assert found.status == "SUCCEEDED"
    assert found.submitted == ("prepare", "ingest", "mine", "plan", "embed", "publish", "report")
    names = [call["Item"]["name"] for state, call in found.calls() if state == "AcquireLock"]
    assert names == [{"S": "refresh/refresh"}]
    assert {"S": "good/train"} in [call["Item"]["name"] for state, call in walks["good"].calls() if state == "AcquireLock"]


def test_documents_that_changed_meanwhile_are_embedded_before_the_run_publishes(walks: Walks) -> None:
    found = walks["changed-meanwhile"]
    assert found.status == "SUCCEEDED"
    embedded = ["prepare", "ingest", "mine", "plan", "embed", "publish"]
    assert list(found.submitted[-13:]) == [*embedded, *embedded, "report"]


def test_what_comes_after_the_outcome_does_not_change_it(walks: Walks) -> None:
    found = walks["quietly"]
    assert found.failed_tasks == {"report", "ReleaseLock", "Notify"}
    assert found.status == "SUCCEEDED"


@pytest.mark.parametrize(
    ("name", "error", "stages", "words"),
    [
        ("no-gang", "NoSuchGang", ["plan", "report"], "16 nodes"),
        ("no-number", "NoSuchGang", ["plan", "report"], "one of 1, 2"),
        ("no-inputs", "IncompleteResult", ["prepare", "report"], "ingest_children"),
        ("no-plan", "ReadPlan: S3.NoSuchKeyException", ["plan", "report"], ""),
        ("plan-of-text", "ReadPlan: States.IntrinsicFailure", ["plan", "report"], ""),
        ("plan-of-nothing", "IncompleteResult", ["plan", "report"], "plan/result.json"),
        ("half-a-plan", "IncompleteResult", ["plan", "report"], "embed_children"),
        ("refused", "GateRefused", ["evaluate", "report"], "worse"),
        (
            "refused-and-refreshed",
            "GateRefused",
            ["publish", "report"],
            "worse; the documents are embedded with the model of run",
        ),
        ("publication-of-nothing", "IncompleteResult", ["publish", "report"], "publish/result.json"),
        ("no-reason", "IncompleteResult", ["evaluate", "report"], "gate.reason"),
        ("no-verdict", "IncompleteResult", ["evaluate", "report"], "evaluate/result.json"),
        ("verdict-of-another-type", "IncompleteResult", ["evaluate", "report"], "evaluate/result.json"),
        ("with-words", "prepare: States.TaskFailed", ["prepare", "report"], "exit code 64: an unknown key"),
        ("half-the-words", "prepare: States.TaskFailed", ["prepare", "report"], "Essential container in task exited"),
        ("no-words", "prepare: States.TaskFailed", ["prepare", "report"], "Essential container in task exited"),
    ],
)
def test_what_stages_leave_behind_decides(walks: Walks, name: str, error: str, stages: list[str], words: str) -> None:
    found = walks[name]
    assert (found.status, found.error) == ("FAILED", error)
    assert words in found.cause
    assert list(found.submitted[-2:]) == stages
    assert found.lock is None
    assert [subject for subject, _ in found.notices] == [f"trnpipe: {name} {'refused' if error == 'GateRefused' else 'failed'}"]


@pytest.mark.parametrize("number", range(len(UNUSABLE)))
def test_an_input_that_cannot_be_used_calls_nothing_but_the_notification(walks: Walks, number: int) -> None:
    found = walks[f"unusable-{number}"]
    assert (found.status, found.error) == ("FAILED", "InputRefused")
    assert [state for state, _ in found.calls()] == ["Notify"]
    assert len(found.notices) == 1


@pytest.mark.parametrize(
    ("name", "error", "waits"),
    [
        ("held", "LockHeld", []),
        ("held-for-redrive", "LockHeld", []),
        ("waits", "", ["Wait", "Wait"]),
        ("waits-long", "", ["WaitLong", "WaitLong"]),
    ],
)
def test_a_lock_that_is_held(walks: Walks, name: str, error: str, waits: list[str]) -> None:
    found = walks[name]
    assert found.error == error
    assert [state for state in found.path if state.startswith("Wait")] == waits
    assert found.lock == (found.arn + OWNER if error else None)
    assert ("prepare" in found.submitted) == (not error)
    assert len(found.notices) == 1


@pytest.mark.parametrize("name", ["free-again", "forgotten", "taken-by-another"])
def test_a_lock_that_is_lost_by_its_owner_is_taken(walks: Walks, name: str) -> None:
    found = walks[name]
    assert found.error == "prepare: States.TaskFailed"
    assert found.lock is None


@pytest.mark.parametrize("stage", [stage.value for stage in GANGS])
def test_a_gang_that_fails_or_does_not_end(walks: Walks, stage: str) -> None:
    failed, overdue = walks[f"failed-{stage}"], walks[f"overdue-{stage}"]
    assert failed.error == f"{stage}: States.TaskFailed"
    # As `.sync` gives it: the job's description, exit codes of its attempts included.
    assert json.loads(failed.cause)["Attempts"][0]["StatusReason"] == FAILED_JOB.reason
    assert failed.terminated == ()
    assert overdue.error == f"{stage}: GangOverdue"
    assert "is RUNNING and has not ended. rule:" in overdue.cause
    assert overdue.terminated == (stage,)
    assert overdue.path.count(f"{stage} (look)") == LAPS


@pytest.mark.parametrize("stage", [stage.value for stage in GANGS])
def test_a_gang_that_batch_does_not_list(walks: Walks, stage: str) -> None:
    """A job may be listed a moment after it was submitted."""
    unlisted, late = walks[f"unlisted-{stage}"], walks[f"listed-late-{stage}"]
    assert unlisted.error == f"{stage}: GangLost"
    assert unlisted.path.count(f"{stage} (look)") == MISSES + 1
    assert unlisted.terminated == (stage,)
    assert late.status == "SUCCEEDED"
    assert late.path.count(f"{stage} (look)") == 2


# ------------------------------------------------------------------------------------------- what is sent, and the limits


def test_every_call_is_one_that_the_service_takes(walks: Walks, service_model: Any) -> None:
    """With the values of real inputs; unknown members are refused as missing ones are."""
    seen: set[tuple[str, str]] = set()
    for one in walks.found.values():
        states = walks.walker.machine["States"]
        for name, parameters in one.calls():
            service, operation = called(states[name])
            request = service_model.from_template(service, operation, parameters)
            if operation == "PutObject":
                request["Body"] = json.dumps(request["Body"])
            assert service_model.problems(service, operation, request) == "", (one.walk.name, name)
            seen.add((service, operation))
    assert seen == {called(state) for state in tasks(walks.walker.machine).values()}


def test_a_call_that_the_service_does_not_take_is_seen(service_model: Any) -> None:
    good = {"Bucket": "b", "Key": "k"}
    assert service_model.problems("s3", "GetObject", good) == ""
    assert "Key" in service_model.problems("s3", "GetObject", {"Bucket": "b"})
    assert "Bukkit" in service_model.problems("s3", "GetObject", {**good, "Bukkit": "b"})


def lap(one: Walked, state: str) -> int:
    """Events from one visit of a state to the next."""
    visits = [index for index, event in enumerate(one.events) if event.kind.endswith("StateEntered") and event.state == state]
    [length] = {later - earlier for earlier, later in itertools.pairwise(visits)}
    return length


def test_the_numbers_of_events_that_laps_are_reckoned_with(walks: Walks) -> None:
    for stage in GANGS:
        assert lap(walks[f"overdue-{stage}"], f"{stage} (wait)") == LAP_EVENTS
        assert lap(walks[f"overdue-{stage}"], f"{stage} (wait long)") == LAP_EVENTS
    waits = max(
        LONG_WAIT_MINUTES // LAP_MINUTES * lap(walks["waits"], "Wait"),
        LONGEST_WAIT_MINUTES // LONG_LAP_MINUTES * lap(walks["waits-long"], "WaitLong"),
    )
    # Everything once, and every task tried again until the last time: three events each.
    once = max(len(one.events) for one in walks.found.values() if not one.walk.owners)
    assert waits + once + 3 * (RETRIED - 1) * len(tasks(walks.walker.machine)) <= OTHER_EVENTS


HOUR = 60
LONGEST_CAPACITY_WAIT = next(limit.le for limit in Settings.model_fields["capacity_wait_hours"].metadata if hasattr(limit, "le"))


@pytest.mark.parametrize("hours", [Settings.model_fields["capacity_wait_hours"].default, LONGEST_CAPACITY_WAIT])
def test_an_execution_whose_gangs_all_take_their_limits_has_17_000_events_at_most(hours: int) -> None:
    states = definition(targets(capacity_wait_minutes=hours * HOUR))["States"]
    events = OTHER_EVENTS
    for stage in GANGS:
        *_, overdue, short = states[f"{stage} (status)"]["Choices"]
        laps, short_laps = overdue["NumericGreaterThanEquals"], short["NumericLessThan"]
        waits = states[f"{stage} (wait)"]["Seconds"], states[f"{stage} (wait long)"]["Seconds"]
        assert (waits[0], short_laps * waits[0]) == (SHORT_LAP_SECONDS, 2 * 3600) == (60, SHORT_LAPS * 60)
        # Every minute for two hours, every five minutes after them; less often only where a deployment lets jobs wait longer.
        assert waits[1] == LONG_LAP_SECONDS == 300 or hours > Settings.model_fields["capacity_wait_hours"].default
        limit = 60 * (2 * STAGES[stage].timeout_minutes + hours * HOUR)
        assert 0 <= short_laps * waits[0] + (laps - short_laps) * waits[1] - limit < waits[1]
        events += laps * LAP_EVENTS
    assert events <= 17_000 == MOST_EVENTS


def test_no_state_holds_more_than_it_may_with_the_largest_results(walks: Walks) -> None:
    found = walks["large"]
    assert found.status == "SUCCEEDED"
    sizes = [len(value) for event in found.events for value in event.details.values() if isinstance(value, str)]
    assert 3 * RESULT_LIMIT_BYTES < max(sizes) < 256 << 10
