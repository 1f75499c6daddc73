"""Executions and their jobs as AWS tells them: which one is meant, what is new in a history, whose a job is, where its log is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console

from pipeline.contract import EXECUTION_TAG, StageFailure
from pipeline.errors import BadConfig, Transient
from pipeline.operate import run_jobs, stop
from pipeline.operate.executions import Event, Execution, describe, find, read_history
from pipeline.operate.run_files import LocalFiles

Make = Callable[..., dict[str, Any]]


def known(answers: Any, answer: dict[str, Any]) -> Execution:
    answers.add("stepfunctions", "describe_execution", answer, {"executionArn": answer["executionArn"]})
    return describe(answers.site, answer["executionArn"])


@pytest.mark.parametrize(
    ("given", "run"), [("{}", "a"), ('{"run": "old"}', "old"), ('{"run": "../x"}', "a"), ("[1]", "a"), ("{", "a")]
)
def test_a_run_is_named_by_the_input_or_by_the_execution(make_execution: Make, given: str, run: str) -> None:
    assert Execution.parse(make_execution(input=given)).run == run


@pytest.fixture
def input_of(answers: Any, tmp_path: Any) -> Callable[[str], None]:
    """Let a run's folder say which execution carries it out."""
    answers.site.files = lambda run: LocalFiles(tmp_path / run)

    def write(run: str, **record: Any) -> None:
        (tmp_path / run).mkdir()
        (tmp_path / run / "input.json").write_text(json.dumps(record))

    return write


@pytest.mark.parametrize(
    ("by_name", "by_run", "meant"),
    [("FAILED", "RUNNING", "later"), ("RUNNING", "FAILED", "old"), ("FAILED", "FAILED", "later"), (None, "FAILED", "later")],
)
def test_a_run_s_id_means_the_execution_that_carries_it_out(
    answers: Any, make_execution: Make, input_of: Any, by_name: str | None, by_run: str, meant: str
) -> None:
    later = make_execution("later", by_run)
    later["startDate"] += timedelta(days=1)
    input_of("old", execution_arn=later["executionArn"])
    old = make_execution("old", by_name or "")
    if by_name is None:
        answers.refuse("stepfunctions", "describe_execution", "ExecutionDoesNotExist")
    else:
        answers.add("stepfunctions", "describe_execution", old, {"executionArn": old["executionArn"]})
    answers.add("stepfunctions", "describe_execution", later, {"executionArn": later["executionArn"]})
    assert find(answers.site, "old").name == meant
    answers.done()


def test_two_executions_of_one_run_that_both_go_on_are_told_apart_by_their_arns(
    answers: Any, make_execution: Make, input_of: Any
) -> None:
    old, later = make_execution("old"), make_execution("later")
    input_of("old", execution_arn=later["executionArn"])
    for one in (old, later, later):
        answers.add("stepfunctions", "describe_execution", one, {"executionArn": one["executionArn"]})
    with pytest.raises(BadConfig, match="give the full ARN"):
        find(answers.site, "old")
    assert find(answers.site, later["executionArn"]).name == "later"


def test_a_long_history_is_read_once_and_then_from_its_end(answers: Any, make_execution: Make) -> None:
    moment = make_execution()["startDate"]
    events = [{"timestamp": moment, "type": "PassStateEntered", "id": number} for number in range(1, 250)]
    arn = make_execution()["executionArn"]
    read: list[Event] = []
    first = {"executionArn": arn, "reverseOrder": False, "maxResults": 1000}
    answers.add("stepfunctions", "get_execution_history", {"events": events[:100], "nextToken": "t"}, first)
    answers.add("stepfunctions", "get_execution_history", {"events": events[100:110]}, {**first, "nextToken": "t"})
    read_history(answers.site, arn, read)
    newest = {"executionArn": arn, "reverseOrder": True, "maxResults": 100}
    answers.add("stepfunctions", "get_execution_history", {"events": events[:148:-1], "nextToken": "u"}, newest)
    answers.add(
        "stepfunctions", "get_execution_history", {"events": events[148:48:-1], "nextToken": "v"}, {**newest, "nextToken": "u"}
    )
    read_history(answers.site, arn, read)
    answers.done()
    assert [event["id"] for event in read] == list(range(1, 250))


def summary(job_id: str, status: str) -> dict[str, Any]:
    return {"jobId": job_id, "jobName": f"train-{job_id}", "status": status}


def detail(job_id: str, status: str = "RUNNING", **more: Any) -> dict[str, Any]:
    return {
        "jobId": job_id,
        "jobName": f"train-{job_id}",
        "jobQueue": "q",
        "jobDefinition": "d",
        "startedAt": 0,
        "status": status,
        **more,
    }


def add_listing(answers: Any, execution: Execution, *listed: list[dict[str, Any]]) -> None:
    since = str(round((execution.started - timedelta(minutes=1)).timestamp() * 1000))
    for queue, found in zip(answers.site.machine.queues, listed, strict=True):
        asked = {"jobQueue": queue, "filters": [{"name": "AFTER_CREATED_AT", "values": [since]}]}
        answers.add("batch", "list_jobs", {"jobSummaryList": found}, asked)


def test_only_what_is_tagged_as_the_execution_s_is_stopped_until_nothing_is_left(
    answers: Any, make_execution: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "LOOK_SECONDS", 0.0)
    execution = known(answers, make_execution())
    answers.add_machine()
    asked = {"executionArn": execution.arn, "error": "Stopped", "cause": "why"}
    answers.add("stepfunctions", "stop_execution", {"stopDate": execution.started}, asked)
    mine, theirs = {EXECUTION_TAG: execution.arn}, {EXECUTION_TAG: f"{execution.arn}b"}
    add_listing(answers, execution, [summary("over", "SUCCEEDED"), summary("mine", "RUNNABLE")], [summary("theirs", "RUNNING")])
    both = [detail("mine", "RUNNABLE", tags=mine), detail("theirs", tags=theirs)]
    answers.add("batch", "describe_jobs", {"jobs": both}, {"jobs": ["mine", "theirs"]})
    answers.add("batch", "terminate_job", {}, {"jobId": "mine", "reason": "why"})
    # One that was submitted in the very moment of the stop.
    add_listing(answers, execution, [summary("mine", "FAILED")], [summary("late", "STARTING")])
    answers.add("batch", "describe_jobs", {"jobs": [detail("late", "STARTING", tags=mine)]}, {"jobs": ["late"]})
    answers.add("batch", "terminate_job", {}, {"jobId": "late", "reason": "why"})
    for _ in range(stop.QUIET_LOOKS):
        add_listing(answers, execution, [], [summary("late", "FAILED")])
    console = Console(file=io.StringIO(), width=200)
    stop.stop(answers.site, execution, "why", console)
    answers.done()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "job train-mine (mine) terminated, was RUNNABLE" in text
    assert "job train-late (late) terminated, was STARTING" in text
    assert "trnpipe start --run a --stack trnpipe" in text


def test_jobs_that_do_not_end_are_named(answers: Any, make_execution: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "PATIENCE", timedelta(seconds=-1))
    execution = known(answers, make_execution(status="ABORTED"))
    answers.add_machine()
    add_listing(answers, execution, [summary("mine", "RUNNING")], [])
    answers.add("batch", "describe_jobs", {"jobs": [detail("mine", tags={EXECUTION_TAG: execution.arn})]}, {"jobs": ["mine"]})
    answers.add("batch", "terminate_job", {}, {"jobId": "mine", "reason": "why"})
    with pytest.raises(Transient, match=r"train-mine \(mine\) is RUNNING"):
        stop.stop(answers.site, execution, "why", Console(file=io.StringIO()))


def failure(node: int) -> StageFailure:
    return StageFailure(stage="train", run="a", exit_code=76, what="sick", node=node)


def test_the_log_is_that_of_the_node_or_child_that_failed_first(answers: Any) -> None:
    def ask(job_id: str, **more: Any) -> None:
        answers.add("batch", "describe_jobs", {"jobs": [detail(job_id, "FAILED", **more)]}, {"jobs": [job_id]})

    def logs(job_id: str, failed: StageFailure | None) -> list[str]:
        found = list(run_jobs.failed_logs(answers.site, job_id, failed))
        answers.done()
        return found

    attempts = [{"container": {"logStreamName": name}} for name in ("first", "last")]
    gang = {"attempts": attempts, "nodeProperties": {"numNodes": 4, "mainNode": 0, "nodeRangeProperties": []}}
    ask("g", **gang)
    assert logs("g", failure(0)) == ["/trnpipe/jobs, stream last"]
    ask("g", **gang)
    ask("g#3", container={"logStreamName": "third"})
    assert logs("g", failure(3)) == ["/trnpipe/jobs, stream third"]
    ask("e", arrayProperties={"size": 8})
    ask("e:5", container={"logStreamName": "fifth"})
    assert logs("e", failure(5)) == ["/trnpipe/jobs, stream fifth"]
    ask("e", arrayProperties={"size": 8})
    answers.add("batch", "list_jobs", {"jobSummaryList": [summary("e:2", "FAILED")]}, {"arrayJobId": "e", "jobStatus": "FAILED"})
    ask("e:2", container={"logStreamName": "second"})
    assert logs("e", None) == ["/trnpipe/jobs, stream second"]
    # Cancelled before it ever started.
    ask("n")
    assert logs("n", None) == []
