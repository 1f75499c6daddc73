"""What an execution's end means: its exit code, also where no stage left a word, and how a folder alone tells it."""

from __future__ import annotations

import io
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.contract import Stage, StageFailure, StageResult
from pipeline.operate.outcome import conclude, exit_code, judge
from pipeline.operate.progress import Tracker
from pipeline.operate.run_files import LocalFiles

START = datetime(2026, 1, 4, 3, 0, tzinfo=timezone.utc)


def write_failure(folder: Path, stage: Stage, code: int, moment: datetime = START + timedelta(hours=1)) -> None:
    failure = StageFailure(stage=stage.value, run="r", exit_code=code, what="it broke", time=moment.isoformat())
    (folder / stage.value).mkdir(exist_ok=True)
    (folder / stage.value / "failure.json").write_bytes(failure.to_json())


def write_result(folder: Path, stage: Stage, **metrics: Any) -> None:
    result = StageResult(
        stage=stage.value, run="r", status="done", started="", finished=START.isoformat(), fingerprint="f", metrics=metrics
    )
    (folder / stage.value).mkdir(exist_ok=True)
    (folder / stage.value / "result.json").write_bytes(result.to_json())


def failed_in(stage: Stage, folder: Path) -> Tracker:
    tracker = Tracker(LocalFiles(folder))
    tracker.lines[stage].state = "failed"
    return tracker


def job_detail(*codes: int | None) -> str:
    containers = [{} if code is None else {"ExitCode": code} for code in codes]
    return json.dumps({"JobId": "j", "Attempts": [{"Container": container} for container in containers]})


@pytest.mark.parametrize(
    ("execution", "code"),
    [
        ({"status": "SUCCEEDED"}, 0),
        ({"status": "ABORTED"}, 130),
        ({"status": "FAILED", "error": "GateRefused"}, 67),
        ({"status": "FAILED", "error": "InputRefused"}, 64),
        ({"status": "FAILED", "error": "LockHeld"}, 75),
        ({"status": "FAILED", "error": "train: States.Timeout", "cause": ""}, 75),
        ({"status": "FAILED", "error": "train: GangOverdue", "cause": "job a is RUNNING and has not ended"}, 75),
        ({"status": "FAILED", "error": "train: GangLost", "cause": "Batch does not describe job a"}, 75),
        # Cancelled while it waited for hosts, or its host was lost: nothing of it ever ended by itself.
        ({"status": "FAILED", "error": "train: States.TaskFailed", "cause": job_detail()}, 75),
        ({"status": "FAILED", "error": "train: States.TaskFailed", "cause": job_detail(75, None)}, 75),
        ({"status": "FAILED", "error": "train: States.TaskFailed", "cause": job_detail(75, 76)}, 76),
        ({"status": "FAILED", "error": "train: States.TaskFailed", "cause": job_detail(1)}, 69),
        ({"status": "FAILED", "error": "train: Batch.ClientException", "cause": "no such queue"}, 69),
        ({"status": "TIMED_OUT"}, 69),
    ],
    ids=lambda value: str(value)[:60],
)
def test_exit_codes_where_no_stage_left_a_word(tmp_path: Path, execution: dict[str, Any], code: int) -> None:
    assert exit_code(execution, failed_in(Stage.TRAIN, tmp_path), START) == code


def test_the_failed_stage_s_own_code_counts_unless_it_is_an_earlier_execution_s(tmp_path: Path) -> None:
    execution = {"status": "FAILED", "error": "train: States.TaskFailed", "cause": job_detail(65)}
    write_failure(tmp_path, Stage.TRAIN, 76)
    assert exit_code(execution, failed_in(Stage.TRAIN, tmp_path), START) == 76
    write_failure(tmp_path, Stage.TRAIN, 76, START - timedelta(hours=1))
    assert exit_code(execution, failed_in(Stage.TRAIN, tmp_path), START) == 65


def test_a_failure_without_a_file_shows_error_and_cause_and_the_log(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=60)
    execution = {"status": "FAILED", "error": "train: States.Timeout", "cause": "\x1b[2Jlong"}
    code = conclude(
        console, execution, failed_in(Stage.TRAIN, tmp_path / "r"), START, lambda _line, _failure: ["group, stream x"]
    )
    assert code == 75
    text = console.file.getvalue()  # type: ignore[attr-defined]
    words = ["error:  train: States.Timeout", "cause:  \\x1b[2Jlong", "log:    group, stream x"]
    assert text.splitlines() == ["train failed (run r)", *words]


def test_a_folder_alone_tells_how_its_execution_ended(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert judge(files, START).status == "ABORTED"
    write_failure(tmp_path, Stage.PREPARE, 75, START - timedelta(hours=1))
    assert judge(files, START).status == "ABORTED"
    write_result(tmp_path, Stage.EVALUATE, gate={"verdict": "refused", "reason": "it fell"})
    assert (judge(files, START).error, judge(files, START).cause) == ("GateRefused", "it fell")
    write_failure(tmp_path, Stage.EMBED, 66)
    assert (judge(files, START).status, judge(files, START).stage) == ("FAILED", Stage.EMBED)
    write_result(tmp_path, Stage.PUBLISH, published=True)
    assert judge(files, START).status == "SUCCEEDED"


def test_where_a_published_run_s_results_are_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "runs/r"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    write_result(folder, Stage.PUBLISH, published=True)
    console = Console(file=io.StringIO(), width=20)
    assert conclude(console, {"status": "SUCCEEDED"}, Tracker(LocalFiles(folder)), START) == 0
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [["model", str(folder / "model")], ["run", str(folder)], ["registry", str(tmp_path / "registry")]]
    write_result(folder, Stage.REPORT, registry="weekly")
    assert conclude(console, {"status": "SUCCEEDED"}, Tracker(LocalFiles(folder)), START) == 0
    line = ["history", str(tmp_path / "registry/weekly/index.html")]
    assert line in [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
