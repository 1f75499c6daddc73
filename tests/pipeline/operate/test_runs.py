"""`trnpipe runs`: rows from what AWS says of executions and from their folders, as a table and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.contract import Queue, Stage, StageFailure, StageResult
from pipeline.cost import Bill, StageUse
from pipeline.operate import runs
from pipeline.operate.executions import Execution
from pipeline.operate.run_files import LocalFiles
from pipeline.operate.runs import RunRow, as_json, table

Make = Callable[..., dict[str, Any]]
START = datetime(2026, 1, 4, 3, 0, tzinfo=timezone.utc)
END = START + timedelta(hours=2)


@pytest.fixture
def row_of(answers: Any, make_execution: Make, tmp_path: Path) -> Callable[..., RunRow]:
    """The row of an execution of run `a`, whose folder is `tmp_path/a`."""
    answers.site.files = lambda run: LocalFiles(tmp_path / run)
    answers.add_machine()
    _ = answers.site.machine

    def make(status: str, **more: Any) -> RunRow:
        stopped = {} if status == "RUNNING" else {"stopDate": END}
        return runs._row(answers.site, Execution.parse(make_execution("a", status, **stopped, **more)))

    return make


def write(folder: Path, stage: Stage, finished: datetime = END - timedelta(minutes=5), **metrics: Any) -> None:
    result = StageResult(
        stage=stage.value, run="a", status="done", started="", finished=finished.isoformat(), fingerprint="f", metrics=metrics
    )
    (folder / stage.value).mkdir(parents=True, exist_ok=True)
    (folder / stage.value / "result.json").write_bytes(result.to_json())


@pytest.mark.parametrize("metric", ["ndcg@10", "accuracy"])
def test_a_published_run_has_quality_and_cost(row_of: Callable[..., RunRow], tmp_path: Path, metric: str) -> None:
    write(tmp_path / "a", Stage.EVALUATE, baseline={metric: 0.5}, new={metric: 0.55})
    write(tmp_path / "a", Stage.PUBLISH, published=True, replaced="week-01")
    killed = StageUse(stage=Stage.TRAIN, nodes=2, attempts=2, node_hours=62.5, at_most=True)
    write(tmp_path / "a", Stage.REPORT, cost=Bill(uses=(killed,), prices={Queue.TRAIN: 20.0}).metrics())
    row = row_of("SUCCEEDED", input='{"share": "weekly"}')
    assert (row.result, row.share, row.seconds, row.baseline, row.new, row.published) == (
        "succeeded",
        "weekly",
        7200,
        0.5,
        0.55,
        True,
    )
    text = rendered([row])
    assert row.replaced == "week-01"
    assert "succeeded, published, replacing" in text
    assert metric in text
    assert "0.5000 → 0.5500" in text
    assert "≤ 1,250.00" in text


@pytest.mark.parametrize(
    ("ended", "result", "stage", "reason"),
    [
        ({"status": "FAILED", "error": "GateRefused", "cause": "it fell"}, "refused", "", "it fell"),
        ({"status": "FAILED", "error": "LockHeld", "cause": "held by b"}, "failed", "", "LockHeld: held by b"),
        ({"status": "FAILED", "error": "embed (single): States.TaskFailed", "cause": "{}"}, "failed", "embed", "{}"),
        ({"status": "FAILED", "error": "train: States.TaskFailed", "cause": "{}"}, "failed", "train", "no shard"),
        ({"status": "ABORTED", "error": "Stopped", "cause": "wrong data"}, "aborted", "", "wrong data"),
        ({"status": "TIMED_OUT"}, "failed", "", "TIMED_OUT"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_did_not_succeed_says_why(
    row_of: Callable[..., RunRow], tmp_path: Path, ended: dict[str, str], result: str, stage: str, reason: str
) -> None:
    failure = StageFailure(stage="train", run="a", exit_code=66, what="no shard", time=(END - timedelta(hours=1)).isoformat())
    (tmp_path / "a/train").mkdir(parents=True)
    (tmp_path / "a/train/failure.json").write_bytes(failure.to_json())
    # A later execution has taken the run up since: what it found is not this one's.
    write(tmp_path / "a", Stage.EVALUATE, END + timedelta(hours=1), new={"ndcg@10": 0.6}, baseline={"ndcg@10": 0.5})
    row = row_of(**ended)
    assert (row.result, row.stage, row.reason) == (result, stage, reason)
    assert (row.new, row.published) == (None, None)


def test_a_running_one_says_where_it_is(
    answers: Any, row_of: Callable[..., RunRow], tmp_path: Path, make_execution: Make
) -> None:
    (tmp_path / "a").mkdir()
    entered = {"timestamp": START, "type": "TaskStateEntered", "id": 1, "stateEnteredEventDetails": {"name": "train (wait)"}}
    asked = {"executionArn": make_execution()["executionArn"], "reverseOrder": False, "maxResults": 1000}
    answers.add("stepfunctions", "get_execution_history", {"events": [entered]}, asked)
    row = row_of("RUNNING")
    assert (row.result, row.stage, row.published) == ("running", "train", None)
    assert "running at train" in rendered([row])


def rendered(rows: list[RunRow], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(rows))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_keeps_ids_whole_and_shows_nothing_raw() -> None:
    name = "weekly-20260104-030000-abcd"
    row = RunRow(
        run=name,
        execution="again",
        share="weekly",
        started=START.isoformat(),
        seconds=3723,
        result="failed",
        stage="train",
        reason="\x1b[2J" + "many words " * 20,
    )
    text = rendered([row])
    assert f"{name} (again)" in text
    assert "1:02:03" in text
    assert "\x1b" not in text
    assert "many words " * 6 not in " ".join(text.split())
    assert "USD" not in text
    assert json.loads(as_json([row]))[0]["reason"] == row.reason
