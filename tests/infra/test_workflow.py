"""The state machine: its shape, what it sends to each service, and whole executions in a Step Functions engine.

In the executions the services are those of the local endpoint, except Batch: jobs end at once, as the test says.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sns.models import sns_backends

from infra.local.definitions import ACCOUNT, REGION
from infra.local.server import LocalEndpoint, local_endpoint
from infra.settings import DEFAULT_MINUTES
from infra.workflow.machine import LONG_WAIT_MINUTES, definition
from infra.workflow.states import SHARE_TAG
from infra.workflow.watches import cleanup
from pipeline.contract import EXECUTION_TAG, RUN_TAG, STAGES, Queue, Stage, StageFailure, now, stage_command
from tests.engine import quick_engine
from tests.infra.machines import (
    BUCKET,
    CONSOLE,
    GANGS,
    RESULTS,
    TABLE,
    TOPIC,
    called,
    next_stage,
    stack_around,
    successors,
    targets,
    tasks,
    with_refresh,
)

SINGLE = ("ingest (single)", "mine (single)", "embed (single)")
"""States of the array stages for an array of one."""


@pytest.fixture
def machine() -> dict[str, Any]:
    return definition(targets())


def reachable(states: Mapping[str, Any], start: str, *, without: frozenset[str] = frozenset()) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in seen and name not in without:
            seen.add(name)
            todo += successors(states[name])
    return seen


# ---------------------------------------------------------------------------------------------------------------- shape


def test_every_state_is_reached_and_leads_on(machine: dict[str, Any]) -> None:
    states = machine["States"]
    assert reachable(states, machine["StartAt"]) == set(states)
    ends = {name for name, state in states.items() if not successors(state)}
    assert {states[name]["Type"] for name in ends} == {"Succeed", "Fail"}
    assert all(len(name) <= 80 for name in states)


def test_every_task_has_a_timeout_retries_and_a_way_out(machine: dict[str, Any]) -> None:
    for name, state in tasks(machine).items():
        assert state["TimeoutSeconds"] > 0, name
        assert state["Catch"][-1]["ErrorEquals"] == ["States.ALL"], name
        backoff = state["Retry"][-1]
        assert backoff["MaxAttempts"] >= 3, name
        assert backoff["BackoffRate"] > 1, name
        assert backoff["JitterStrategy"] == "FULL", name


def test_no_way_to_the_end_leaves_out_unlocking_or_the_notification(machine: dict[str, Any]) -> None:
    states = machine["States"]
    ends = {name for name, state in states.items() if not successors(state)}
    assert not ends & reachable(states, machine["StartAt"], without=frozenset({"Notify"}))
    assert not ends & reachable(states, "WriteInput", without=frozenset({"OwnsLock"}))
    # From prepare on there is something to report.
    assert not ends & reachable(states, "prepare", without=frozenset({"report", "StartedYet"}))
    assert successors(states["OwnsLock"]) == {"ReleaseLock", "Notify"}


def test_stages_run_in_their_order_under_their_own_names(machine: dict[str, Any]) -> None:
    submits = [name for name, state in tasks(machine).items() if "submitJob" in state["Resource"]]
    assert [name for name in submits if name not in SINGLE] == [stage.value for stage in STAGES]
    states = machine["States"]
    for earlier, later in itertools.pairwise(STAGES):
        assert later.value in reachable(states, earlier.value)
        # Only the way back to list the corpus leads to earlier stages.
        back = frozenset({"prepare"})
        assert earlier.value not in reachable(states, later.value, without=back)


def test_ingest_mine_and_those_that_compile_are_the_stages_that_may_be_left_out(machine: dict[str, Any]) -> None:
    states = machine["States"]
    assert successors(states["ChooseIngest"]) == {"ingest", "ingest (single)", "ChooseMine"}
    assert successors(states["ChooseMine"]) == {"mine", "mine (single)", "plan"}
    assert successors(states["ChooseEmbed"]) == {"embed", "embed (single)"}
    assert successors(states["ChooseCompile"]) == {"compile", "train"}
    assert states["ChooseCompile"]["Default"] == "compile"
    # A path that leads nowhere would end the execution on the spot: results of earlier versions do not say.
    [rule] = states["ChooseCompile"]["Choices"]
    assert rule["And"][0] == {"Variable": "$.plan.metrics.compile", "IsPresent": True}
    assert successors(states["ChoosePrecompile"]) == {"collect", "health_check"}
    assert states["ChoosePrecompile"]["Default"] == "health_check"
    assert states["ChoosePrecompile"]["Choices"][0]["And"][0] == {"Variable": "$.plan.metrics.precompile", "IsPresent": True}
    spared = frozenset({"collect", "precompile", "compile", "ingest", "ingest (single)", "mine", "mine (single)"})
    assert "publish" in reachable(states, machine["StartAt"], without=spared)
    for stage in set(STAGES) - {Stage.INGEST, Stage.MINE, Stage.COLLECT, Stage.PRECOMPILE, Stage.COMPILE, Stage.REPORT}:
        without = frozenset({stage.value, f"{stage} (single)"})
        order = list(STAGES)
        # A refresh trains nothing; but no model comes to the gate without these.
        end = "Gate" if order.index(stage) <= order.index(Stage.EVALUATE) else "Succeeded"
        assert end not in reachable(states, machine["StartAt"], without=without), stage


def test_waiting_covers_the_attempts_timeout_and_the_wait_for_hosts() -> None:
    states = definition(targets())["States"]
    for stage, spec in STAGES.items():
        if stage not in GANGS:
            assert states[stage.value]["TimeoutSeconds"] >= 60 * (spec.timeout_minutes + 360)
    longer = definition(targets(minutes={**DEFAULT_MINUTES, Stage.EMBED: 7200}))["States"]
    assert longer["embed"]["TimeoutSeconds"] >= 60 * (7200 + 360)


def test_gangs_are_polled_and_all_other_jobs_are_waited_for(machine: dict[str, Any]) -> None:
    submits = {name: state for name, state in tasks(machine).items() if "submitJob" in state["Resource"]}
    assert set(submits) == {*(stage.value for stage in STAGES), *SINGLE}
    for name, state in submits.items():
        gang = name in {stage.value for stage in GANGS}
        assert state["Resource"].endswith(":aws-sdk:batch:submitJob" if gang else ":batch:submitJob.sync"), name
        if gang:
            assert state["Parameters"]["JobDefinition.$"] == f"$.gang.{name}"
            # A request whose answer was lost may have submitted the gang already.
            assert not any("SdkClientException" in error for retry in state["Retry"] for error in retry["ErrorEquals"])


def test_failed_looks_at_a_gang_count_in_a_row(machine: dict[str, Any]) -> None:
    for stage in GANGS:
        states = machine["States"]
        lost, missed, *_, on = states[f"{stage} (status)"]["Choices"]
        assert (lost["Next"], "misses.$" in missed["Assign"]) == (f"{stage} (lost)", True)
        # Both ways on from a look that found the gang running begin to count anew.
        assert on["Assign"]["misses"] == states[f"{stage} (wait long)"]["Assign"]["misses"] == 0
        assert states[f"{stage} (status)"]["Default"] == f"{stage} (wait long)"


def test_jobs_carry_share_priority_and_the_run_and_no_overrides(machine: dict[str, Any]) -> None:
    priorities = []
    for name, state in tasks(machine).items():
        if "submitJob" not in state["Resource"]:
            continue
        request = state["Parameters"]
        assert request["ShareIdentifier.$"] == "$.share", name
        assert request["Parameters"] == {"run.$": "$.run.uri"}, name
        assert request["PropagateTags"] is True, name
        assert not any("Override" in key and key != "SchedulingPriorityOverride" for key in request), name
        priorities.append(request["SchedulingPriorityOverride"])
    assert priorities == sorted(priorities)
    assert all(0 <= priority <= 9999 for priority in priorities)
    assert all(f"Ref::{key}" in stage_command(Stage.TRAIN) for key in ("run",))


def test_only_errors_of_the_service_itself_submit_a_job_again(machine: dict[str, Any]) -> None:
    for name, state in tasks(machine).items():
        if state["Resource"].endswith("submitJob.sync"):
            [rule] = state["Retry"]
            assert all(error.startswith("Batch.") and error != "Batch.ClientException" for error in rule["ErrorEquals"]), name


def test_what_the_states_send_is_what_the_services_take(machine: dict[str, Any], service_model: Any) -> None:
    for name, state in tasks(machine).items():
        service, operation = called(state)
        request = example(state["Parameters"])
        if operation == "PutObject":
            request["Body"] = json.dumps(request["Body"])
        lowered = service_model.from_template(service, operation, request)
        assert service_model.problems(service, operation, lowered) == "", name


def example(value: Any, key: str = "") -> Any:
    """Parameters as they are sent, a likely value in the place of each path."""
    if isinstance(value, dict):
        return {name.removesuffix(".$"): example(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [example(inner) for inner in value]
    if key.endswith(".$"):
        return {"Size.$": 2, "Jobs.$": ["id"]}.get(key, "value")
    return value


# ----------------------------------------------------------------------------------------------------------- executions


@dataclass
class ScriptedBatch:
    """Batch whose jobs end at once: with success and a result file, or as `script` says for the stage.

    Attributes:
        script: stage -> what its job does; returning words makes the job fail with them.
        submitted: every SubmitJob request.
    """

    put: Callable[[str, bytes], None]
    script: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=lambda: json.loads(json.dumps(RESULTS)))
    submitted: list[dict[str, Any]] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    reasons: dict[str, str | None] = field(default_factory=dict)
    pause = staticmethod(time.sleep)

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        operations = {
            "submitjob": self._submit,
            "describejobs": self._describe,
            "terminatejob": self._terminate,
            "listjobs": self._list,
        }
        return operations[operation](request)

    def stages(self) -> list[str]:
        return [request["jobName"].split("-")[0] for request in self.submitted]

    def close(self) -> None:
        pass

    def _submit(self, request: dict[str, Any]) -> dict[str, Any]:
        self.submitted.append(request)
        stage = request["jobName"].split("-")[0]
        job_id = f"job-{len(self.submitted)}"
        reason = self.script.get(stage, lambda: None)()
        self.reasons[job_id] = reason
        if reason is None:
            key = request["parameters"]["run"].removeprefix(f"s3://{BUCKET}/")
            found = self.results.get(stage, {})
            if stage == "plan":
                run = request["jobName"].removeprefix("plan-")
                others = (one["jobName"] for one in self.submitted)
                found = {"next": next_stage(name.split("-")[0] for name in others if name.endswith(run)), **found}
            self.put(f"{key}/{stage}/result.json", json.dumps({"metrics": found}).encode())
        return {"jobArn": f"arn:{job_id}", "jobName": request["jobName"], "jobId": job_id}

    def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        """By name, a job per page."""
        [wanted] = request["filters"]
        assert wanted["name"] == "JOB_NAME"
        found = [
            (f"job-{number}", submitted["jobName"])
            for number, submitted in enumerate(self.submitted, start=1)
            if submitted["jobQueue"] == request["jobQueue"] and submitted["jobName"].lower() == wanted["values"][0].lower()
        ]
        first = int(request.get("nextToken", 0))
        page = {"jobSummaryList": [{"jobId": job_id, "jobName": name} for job_id, name in found[first : first + 1]]}
        return page | ({"nextToken": str(first + 1)} if found[first + 1 :] else {})

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"jobs": [self._detail(job_id) for job_id in request["jobs"]]}

    def _detail(self, job_id: str) -> dict[str, Any]:
        reason = self.reasons[job_id]
        status = {"status": "SUCCEEDED"} if reason is None else {"status": reason if reason == "RUNNING" else "FAILED"}
        return {
            "jobId": job_id,
            "jobName": self.submitted[int(job_id.removeprefix("job-")) - 1]["jobName"],
            "jobQueue": "q",
            "jobDefinition": "d",
            "startedAt": 0,
            "statusReason": reason or "",
            "tags": self.submitted[int(job_id.removeprefix("job-")) - 1].get("tags", {}),
            **status,
        }

    def _terminate(self, request: dict[str, Any]) -> dict[str, Any]:
        self.terminated.append(request["jobId"])
        self.reasons[request["jobId"]] = "terminated"
        return {}


@dataclass
class Account:
    """The local endpoint with the state machine in it."""

    endpoint: LocalEndpoint
    batch: ScriptedBatch
    machine_arn: str
    notices: list[dict[str, Any]]

    def __post_init__(self) -> None:
        # Making a client takes longer than most executions here.
        self.client = functools.cache(self.endpoint.client)

    def start(self, run: str, given: Any = None) -> str:
        text = json.dumps({} if given is None else given)
        arn: str = self.client("stepfunctions").start_execution(stateMachineArn=self.machine_arn, name=run, input=text)[
            "executionArn"
        ]
        return arn

    def end(self, arn: str) -> dict[str, Any]:
        client = self.client("stepfunctions")
        deadline = time.monotonic() + 60
        while (found := client.describe_execution(executionArn=arn))["status"] == "RUNNING":
            assert time.monotonic() < deadline, client.get_execution_history(executionArn=arn)["events"][-5:]
            time.sleep(0.05)
        return dict(found)

    def run(self, run: str, given: Any = None) -> dict[str, Any]:
        return self.end(self.start(run, given))

    def entered(self, arn: str) -> list[str]:
        events = self.client("stepfunctions").get_execution_history(executionArn=arn)["events"]
        return [event["stateEnteredEventDetails"]["name"] for event in events if event["type"].endswith("StateEntered")]

    def read(self, key: str) -> Any:
        return json.loads(self.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def lock(self, owner: str | None = None, name: str = "current/train") -> dict[str, str]:
        """The lock's item; with an owner, put one there first."""
        client = self.client("dynamodb")
        if owner is not None:
            item = {"name": name, "owner": owner, "run": "other-run", "since": "2026-01-04"}
            client.put_item(TableName=TABLE, Item={key: {"S": value} for key, value in item.items()})
        found = client.get_item(TableName=TABLE, Key={"name": {"S": name}}).get("Item", {})
        return {key: value["S"] for key, value in found.items()}


@pytest.fixture
def account(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Account]:
    machine = definition(targets(**getattr(request, "param", {})))
    queues = {queue: f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/{queue.value}" for queue in Queue}
    watch = cleanup("aws", TOPIC, queues, CONSOLE)
    stack = stack_around(machine, watches={"trnpipe-cleanup": watch})
    batch = ScriptedBatch(put=lambda key, body: account.client("s3").put_object(Bucket=BUCKET, Key=key, Body=body))
    opened = local_endpoint(stack, tmp_path / "state", lambda environment: batch)  # type: ignore[arg-type,return-value]
    with opened as endpoint, quick_engine():
        sent = sns_backends[DEFAULT_ACCOUNT_ID][REGION].topics[TOPIC].sent_notifications
        account = Account(endpoint=endpoint, batch=batch, machine_arn=stack.state_machine_arn, notices=_Notices(sent))
        yield account


class _Notices(list):  # type: ignore[type-arg]
    """moto's record of what a topic sent, (id, message, subject, ...), as it grows."""

    def __init__(self, sent: list[Any]) -> None:
        super().__init__()
        self._sent = sent

    def __getitem__(self, index: Any) -> Any:
        _, message, subject, *_ = self._sent[index]
        return {"subject": subject, "message": message}

    def __len__(self) -> int:
        return len(self._sent)


def test_a_run_from_end_to_end(account: Account) -> None:
    found = account.run("week-1", {"train": {"steps": 5}, "share": "weekly"})
    assert found["status"] == "SUCCEEDED"
    assert account.batch.stages() == with_refresh(stage.value for stage in STAGES)
    assert account.lock() == {}
    assert account.read("runs/week-1/input.json") == {
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
        "execution": {"train": {"steps": 5}, "share": "weekly"},
        "execution_arn": found["executionArn"],
    }
    by_stage = dict(zip(account.batch.stages(), account.batch.submitted, strict=True))
    assert by_stage["train"]["jobDefinition"].endswith("job-definition/train-2:3")
    assert by_stage["embed"]["arrayProperties"] == {"size": 3}
    assert by_stage["prepare"]["jobName"] == "prepare-week-1"
    assert {request["shareIdentifier"] for request in account.batch.submitted} == {"weekly"}
    tags = {"trnpipe": "ranker", SHARE_TAG: "weekly", RUN_TAG: "week-1", EXECUTION_TAG: found["executionArn"]}
    assert [request["tags"] for request in account.batch.submitted] == [tags] * (len(STAGES) + 4)
    assert {request["parameters"]["run"] for request in account.batch.submitted} == {f"s3://{BUCKET}/runs/week-1"}
    assert account.notices[0]["subject"] == "trnpipe: week-1 succeeded"
    message = account.notices[0]["message"]
    assert message.splitlines() == [
        "Run week-1 succeeded in publish. ",
        "embedded with the model of run week-1: 1000 documents",
        "+0.002",
        f"Report: s3://{BUCKET}/runs/week-1/report/index.html {CONSOLE.report.format('week-1')}",
        f"Execution: {CONSOLE.execution.format(found['executionArn'])}",
        f"Log of its jobs: {CONSOLE.log.format('week-1')}",
        f"Dashboard: {CONSOLE.overview}",
    ]
    assert {request["tags"][EXECUTION_TAG] for request in account.batch.submitted} == {found["executionArn"]}


@pytest.mark.parametrize("run", ["x" * 200, "two\nlines"])
def test_people_are_told_whatever_the_input_calls_the_run(account: Account, run: str) -> None:
    account.batch.script["prepare"] = lambda: "Essential container in task exited"
    assert account.run("by-hand", {"run": run})["status"] == "FAILED"
    assert account.notices[0]["subject"] == "trnpipe: by-hand failed"
    assert f"Run {run} failed in " in account.notices[0]["message"]


def test_a_gang_that_fails(account: Account) -> None:
    account.batch.script["compile"] = lambda: "Host EC2 (instance i-1) terminated."
    found = account.run("week-1")
    assert found["status"] == "FAILED"
    assert "Host EC2 (instance i-1) terminated." in found["cause"]
    apart = ["collect", "precompile"]
    assert account.batch.stages() == ["prepare", "ingest", "mine", "plan", *apart, "health_check", "compile", "report"]


@pytest.mark.parametrize(("name", "given"), [("week-1", {}), ("again", {"run": "week-1"})])
def test_stopping_an_execution_ends_its_own_gang_only(account: Account, name: str, given: dict[str, Any]) -> None:
    """Jobs of the same name may be another execution's, which takes the run up, or have no tags; names match in either case."""
    account.batch.script["health_check"] = lambda: "RUNNING"
    account.batch.results["plan"]["precompile"] = False
    queue = f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/train"
    others: list[dict[str, Any]] = [{}, {"tags": {EXECUTION_TAG: "arn:another"}}]
    for more, other in zip(others, ("health_check-week-1", "health_check-Week-1"), strict=True):
        account.batch.call(
            "submitjob", {"jobName": other, "jobQueue": queue, "parameters": {"run": f"s3://{BUCKET}/runs/x"}, **more}
        )
    arn = account.start(name, given)
    wait_until(lambda: len(account.batch.submitted) == 7)
    account.endpoint.client("stepfunctions").stop_execution(executionArn=arn)
    client = account.endpoint.client("stepfunctions")
    watch = account.machine_arn + "-cleanup"
    wait_until(lambda: [one["status"] for one in client.list_executions(stateMachineArn=watch)["executions"]] == ["SUCCEEDED"])
    assert account.batch.stages() == ["health_check", "health_check", "prepare", "ingest", "mine", "plan", "health_check"]
    assert account.batch.terminated == ["job-7"]
    [notice] = [account.notices[number] for number in range(len(account.notices))]
    assert notice["subject"] == "trnpipe: a job of an ended run was terminated"
    assert notice["message"].startswith("Job health_check-week-1 (job-7) was RUNNING when its execution had ended")
    assert CONSOLE.execution.format(arn) in notice["message"]


def test_no_gang_is_started_where_nothing_is_to_be_compiled(account: Account) -> None:
    account.batch.results["plan"] |= {"compile": False, "precompile": False}
    found = account.run("week-2")
    assert found["status"] == "SUCCEEDED"
    left_out = (Stage.COLLECT, Stage.PRECOMPILE, Stage.COMPILE)
    assert account.batch.stages() == with_refresh(stage.value for stage in STAGES if stage not in left_out)
    assert "compile" not in account.entered(found["executionArn"])


def test_graphs_are_compiled_on_fargate_between_two_gangs_where_the_plan_says_so(account: Account) -> None:
    account.run("week-1")
    jobs = {request["jobName"].partition("-")[0]: request for request in account.batch.submitted}
    assert list(jobs)[4:8] == ["collect", "precompile", "health_check", "compile"]
    assert [jobs[stage]["jobQueue"].rpartition("/")[2] for stage in ("collect", "precompile")] == ["train", "cpu"]


@pytest.mark.parametrize("said", [{}, {"precompile": "true"}, {"precompile": None}, {"precompile": False}])
def test_nothing_is_precompiled_unless_the_plan_clearly_says_so(account: Account, said: dict[str, Any]) -> None:
    account.batch.results["plan"] = {"nodes": 2, "embed_children": 3, **said}
    assert account.run("week-1")["status"] == "SUCCEEDED"
    assert account.batch.stages()[:5] == ["prepare", "ingest", "mine", "plan", "health_check"]


@pytest.mark.parametrize("said", [{}, {"compile": "false"}, {"compile": None}])
def test_compile_runs_unless_the_plan_clearly_said_no(account: Account, said: dict[str, Any]) -> None:
    account.batch.results["plan"] = {"nodes": 2, "embed_children": 3, **said}
    assert account.run("week-1")["status"] == "SUCCEEDED"
    assert "compile" in account.batch.stages()


@pytest.mark.parametrize(
    ("stage", "said_by", "children"), [("ingest", "prepare", 2), ("mine", "prepare", 2), ("embed", "plan", 3)]
)
def test_one_child_is_a_plain_job(account: Account, stage: str, said_by: str, children: int) -> None:
    account.run("week-1")
    account.batch.results[said_by][f"{stage}_children"] = 1
    assert account.run("week-2")["status"] == "SUCCEEDED"
    jobs = [request for request in account.batch.submitted if request["jobName"].startswith(f"{stage}-")]
    sizes = {request["jobName"].partition("-")[2]: request.get("arrayProperties") for request in jobs}
    assert sizes == {"week-1": {"size": children}, "week-2": None}


@pytest.mark.parametrize("stage", [Stage.INGEST, Stage.MINE])
def test_nothing_is_done_where_no_shard_is_new(account: Account, stage: Stage) -> None:
    account.batch.results["prepare"][f"{stage}_children"] = 0
    assert account.run("week-2")["status"] == "SUCCEEDED"
    assert account.batch.stages() == with_refresh(other.value for other in STAGES if other is not stage)


def test_the_gate_refuses(account: Account) -> None:
    refused = {"verdict": "refused", "reason": "ndcg@10 fell from 0.51 to 0.48"}
    account.batch.results["evaluate"] = {"gate": refused, "refresh": False}
    found = account.run("week-1")
    assert (found["status"], found["error"], found["cause"]) == ("FAILED", "GateRefused", "ndcg@10 fell from 0.51 to 0.48")
    assert account.batch.stages()[-2:] == ["evaluate", "report"]
    assert account.lock() == {}
    assert account.notices[0]["subject"] == "trnpipe: week-1 refused"
    message = account.notices[0]["message"].splitlines()
    assert message[:2] == ["Run week-1 refused in evaluate. GateRefused", "ndcg@10 fell from 0.51 to 0.48"]
    assert CONSOLE.report.format("week-1") in message[3]


@pytest.mark.parametrize("stage", ["prepare", "ingest", "plan", "train", "embed"])
def test_a_failing_stage_is_reported_unlocked_and_named(account: Account, stage: str) -> None:
    account.batch.script[stage] = lambda: "Essential container in task exited"
    found = account.run("week-1")
    assert (found["status"], found["error"]) == ("FAILED", f"{stage}: States.TaskFailed")
    assert "Essential container in task exited" in found["cause"]
    assert account.batch.stages()[-2:] == [stage, "report"]
    assert account.lock() == {}
    assert account.notices[0]["subject"] == "trnpipe: week-1 failed"
    message = account.notices[0]["message"].splitlines()
    assert message[0] == f"Run week-1 failed in {stage}. {stage}: States.TaskFailed"
    assert "Essential container in task exited" in message[1]
    # What the gate said is still of use when something after it fails.
    assert message[2] == ("+0.002" if stage == "embed" else "")


def test_a_stages_own_words_become_the_cause(account: Account) -> None:
    failure = StageFailure(
        stage="prepare",
        run="week-1",
        exit_code=64,
        what="unknown configuration key",
        value=["trian"],
        rule="the schema",
        remedy="fix it",
    )

    def fail() -> str:
        account.batch.put("runs/week-1/prepare/failure.json", replace(failure, time=now()).to_json())
        return "exited"

    account.batch.script["prepare"] = fail
    assert account.run("week-1")["cause"] == (
        'prepare ended with exit code 64: unknown configuration key. value: ["trian"]. rule: the schema. remedy: fix it'
    )


def test_an_earlier_executions_words_are_not_the_cause(account: Account) -> None:
    words = StageFailure(stage="prepare", run="week-1", exit_code=75, what="storage could not be reached", time=now())
    account.batch.put("runs/week-1/prepare/failure.json", words.to_json())
    account.batch.script["prepare"] = lambda: "Task failed to start"
    cause = account.run("again", {"run": "week-1"})["cause"]
    assert "Task failed to start" in cause
    assert "storage could not be reached" not in cause


def test_words_that_cannot_be_read_hide_nothing(account: Account) -> None:
    words = b""

    def fail() -> str:
        account.batch.put("runs/again/prepare/failure.json", words)
        return "Task failed to start"

    account.batch.script["prepare"] = fail
    for number, words in enumerate((b"not json", b"{}", b"[1]")):
        found = account.run(f"attempt-{number}", {"run": "again"})
        assert "Task failed to start" in found["cause"], words
        assert account.lock() == {}


def test_a_report_that_fails_changes_nothing(account: Account) -> None:
    account.batch.script["report"] = lambda: "exited"
    assert account.run("week-1")["status"] == "SUCCEEDED"
    account.batch.script["train"] = lambda: "the host was lost"
    assert "the host was lost" in account.run("week-2")["cause"]


def test_a_plan_without_a_matching_gang(account: Account) -> None:
    account.batch.results["plan"]["nodes"] = 16
    found = account.run("week-1")
    assert found["error"] == "NoSuchGang"
    assert "16 nodes" in found["cause"]
    assert "one of 1, 2" in found["cause"]
    assert account.batch.stages() == ["prepare", "ingest", "mine", "plan", "report"]


@pytest.mark.parametrize(
    ("stage", "metrics"),
    [
        ("prepare", {"nodes": 2}),
        ("plan", {"nodes": 2}),
        ("evaluate", {"gate": {"verdict": "accepted"}}),
        ("evaluate", {"gate": {"verdict": "perhaps", "reason": "?"}}),
    ],
)
def test_a_result_that_lacks_what_choices_need_publishes_nothing(account: Account, stage: str, metrics: dict[str, Any]) -> None:
    account.batch.results[stage] = metrics
    found = account.run("week-1")
    assert found["error"] == "IncompleteResult"
    assert f"{stage}/result.json" in found["cause"]
    assert account.batch.stages()[-2:] == [stage, "report"]
    assert account.lock() == {}


def test_an_input_that_cannot_be_used_starts_no_job(account: Account) -> None:
    unusable: list[Any] = [
        [1],
        "text",
        3,
        {"share": 3},
        {"registry": 3},
        {"run": ["x"]},
        {"run": "../other"},
        {"lock": {"wait_minutes": "long"}},
    ]
    for number, given in enumerate(unusable):
        found = account.run(f"run-{number}", given)
        assert (found["status"], found["error"]) == ("FAILED", "InputRefused"), given
        assert "rule:" in found["cause"]
        assert account.notices[number]["subject"] == f"trnpipe: run-{number} failed"
        assert "rule:" in account.notices[number]["message"]
    assert account.batch.submitted == []


def test_what_the_machine_does_not_need_is_left_to_prepare(account: Account) -> None:
    account.batch.script["prepare"] = lambda: "exited"
    for number, given in enumerate(({"lock": {}}, {"lock": "yes"}, {"run": None}, {"trian": {}})):
        account.run(f"run-{number}", given)
        assert account.read(f"runs/run-{number}/input.json")["execution"] == given
    assert account.batch.stages() == ["prepare", "report"] * 4


def test_an_earlier_run_resumes(account: Account) -> None:
    account.batch.script["prepare"] = lambda: "exited"
    account.run("again", {"run": "week-1"})
    assert {request["parameters"]["run"] for request in account.batch.submitted} == {f"s3://{BUCKET}/runs/week-1"}


def test_a_run_that_ended_after_compile_resumes(account: Account) -> None:
    """plan's result is the first execution's and still asks for compile, which finds its own result."""
    account.batch.script["train"] = lambda: "the host was lost"
    assert account.run("week-1")["status"] == "FAILED"
    account.batch.script = {}
    assert account.run("again", {"run": "week-1"})["status"] == "SUCCEEDED"
    stages = [stage.value for stage in STAGES]
    assert account.batch.stages() == [*stages[: stages.index("train") + 1], "report", *with_refresh(stages)]


def test_a_run_that_publishes_nowhere_takes_no_lock(account: Account) -> None:
    seen: list[dict[str, str]] = []
    account.batch.script["prepare"] = lambda: seen.append(account.lock()) or "exited"  # type: ignore[func-returns-value]
    account.run("trial", {"registry": None})
    account.run("week-1", {"registry": "current"})
    assert [item.get("run") for item in seen] == [None, "week-1"]


@dataclass
class Holder:
    """A run that holds the lock in prepare until the test releases it; every run ends after prepare."""

    account: Account
    arn: str = ""
    release: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.account.batch.script["prepare"] = self._prepare
        self.arn = self.account.start("holder")
        wait_until(lambda: self.account.batch.stages() == ["prepare"])

    def end(self) -> None:
        self.release.set()
        self.account.end(self.arn)

    def _prepare(self) -> str:
        first = len(self.account.batch.submitted) == 1
        assert not first or self.release.wait(60)
        return "exited"


def test_the_lock_names_its_owner_and_keeps_a_second_run_out(account: Account) -> None:
    holder = Holder(account)
    assert account.lock()["owner"] == holder.arn
    assert account.lock()["run"] == "holder"
    refused = account.run("week-2")
    assert refused["error"] == "LockHeld"
    assert "run holder" in refused["cause"]
    assert holder.arn in refused["cause"]
    assert account.batch.stages() == ["prepare"]
    assert account.lock()["owner"] == holder.arn
    # Another registry name is another lock.
    account.run("elsewhere", {"registry": "german"})
    assert account.batch.stages() == ["prepare", "prepare", "report"]
    holder.end()
    assert account.lock() == {}


def test_a_run_that_may_wait_gets_the_lock_when_it_is_free(account: Account) -> None:
    holder = Holder(account)
    waiting = account.start("week-2", {"lock": {"wait_minutes": LONG_WAIT_MINUTES}})
    wait_until(lambda: account.entered(waiting).count("Wait") > 1)
    assert account.batch.stages() == ["prepare"]
    holder.end()
    assert account.end(waiting)["error"] == "prepare: States.TaskFailed"


def test_waiting_ends(account: Account) -> None:
    holder = Holder(account)
    assert account.run("week-2", {"lock": {"wait_minutes": 2}})["error"] == "LockHeld"
    holder.end()


def test_the_lock_of_an_execution_that_ended_or_is_forgotten_is_taken_over(account: Account) -> None:
    account.batch.script["prepare"] = lambda: "exited"
    ended = account.run("week-1")["executionArn"]
    for run, owner in (("week-2", ended), ("week-3", ended.replace("week-1", "never-was"))):
        account.lock(owner)
        assert account.run(run)["error"] == "prepare: States.TaskFailed"
        assert account.lock() == {}


def test_a_lock_that_was_taken_over_is_not_released_by_its_former_owner(account: Account) -> None:
    account.batch.script["prepare"] = lambda: "exited" if account.lock("another") else None
    account.run("week-1")
    assert account.lock()["owner"] == "another"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
