"""Stages as the execution's history tells them, and how they are shown."""

from __future__ import annotations

import io
import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from infra.local.progress import LiveDisplay, PlainDisplay, Tracker, clock
from rich.console import Console

from infra.local import progress
from pipeline.contract import Stage

START = datetime(2026, 1, 4, 3, 0, tzinfo=timezone.utc)


def history(*steps: str) -> list[dict[str, Any]]:
    """Events one second apart: `train` enters that state, `!TaskFailed` is an event of that type."""
    events = []
    for second, step in enumerate(steps):
        moment = START + timedelta(seconds=second)
        if step.startswith("!"):
            events.append({"type": step[1:], "timestamp": moment})
        else:
            events.append({"type": "TaskStateEntered", "timestamp": moment, "stateEnteredEventDetails": {"name": step}})
    return events


def states(tracker: Tracker) -> dict[str, str]:
    return {line.stage.value: line.state for line in tracker.lines.values() if line.state != "pending"}


def write_progress(folder: Path, stage: Stage, node: int, moment: datetime = START, **record: Any) -> None:
    path = folder / stage.value / f"progress-{node:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"done": 0, "total": 0, "unit": "", "rate": 0.0, "note": "", **record}))
    os.utime(path, (moment.timestamp(), moment.timestamp()))


def test_stages_follow_the_states(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    events = history("ReadInput", "prepare", "!TaskSucceeded", "ReadPlan", "health_check")
    tracker.update(events)
    assert states(tracker) == {"prepare": "done", "health_check": "running"}
    assert tracker.lines[Stage.PREPARE].elapsed == timedelta(seconds=2)
    events += history("health_check", "!TaskFailed", "health_check failed", "KeepFailure", "report", "!TaskSucceeded", "OwnsLock")
    tracker.update(events)
    assert states(tracker) == {"prepare": "done", "health_check": "failed", "report": "done"}
    assert tracker.failed is tracker.lines[Stage.HEALTH_CHECK]


def test_a_stage_that_is_left_out_is_skipped_and_one_that_was_not_reached_is_not(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    events = history("prepare", "ReadPlan", "health_check", "ChooseCompile")
    tracker.update(events)
    assert tracker.lines[Stage.COMPILE].state == "pending"
    tracker.update([*events, *history("train")])
    assert states(tracker) == {"prepare": "done", "health_check": "done", "compile": "skipped", "train": "running"}
    assert tracker.lines[Stage.COMPILE].doing == "nothing to compile"
    assert tracker.lines[Stage.COMPILE].elapsed == timedelta(0)
    failed = Tracker(tmp_path)
    failed.update(history("prepare", "health_check", "health_check failed", "report", "OwnsLock"))
    assert failed.lines[Stage.COMPILE].state == "pending"


def test_a_failed_report_is_no_failure_of_the_run(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.update(history("publish", "!TaskSucceeded", "Succeeded", "report", "!TaskFailed", "OwnsLock", "!ExecutionSucceeded"))
    assert states(tracker) == {"publish": "done", "report": "failed"}
    assert tracker.failed is None


def test_a_polled_gang_and_a_single_embed_are_their_stages(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    events = history("compile", "train", "train (wait)", "train (look)", "train (lap)", "train (wait)")
    tracker.update(events)
    assert states(tracker) == {"compile": "done", "train": "running"}
    tracker.update([*events, *history("evaluate", "embed (single)")])
    assert states(tracker) == {"compile": "done", "train": "done", "evaluate": "done", "embed": "running"}


def test_the_end_of_the_execution_ends_what_runs(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.update(history("compile", "train", "!ExecutionAborted"))
    assert states(tracker) == {"compile": "done", "train": "failed"}


def test_a_running_stage_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: moment)
    tracker = Tracker(tmp_path)
    events = history("train")
    tracker.update(events)
    assert tracker.lines[Stage.TRAIN].doing == "starting"
    write_progress(tmp_path, Stage.TRAIN, 0, done=100, total=400, unit="pairs", rate=93.25, note="training")
    write_progress(tmp_path, Stage.TRAIN, 1, done=99, total=400, unit="pairs", rate=93.25, note="training")
    tracker.update(events)
    assert tracker.lines[Stage.TRAIN].doing == "100/400, 93.2 pairs/s, training"
    moment += 20
    write_progress(tmp_path, Stage.TRAIN, 0, done=200, total=400, unit="pairs", rate=90, note="training")
    tracker.update(events, attempt=2)
    assert tracker.lines[Stage.TRAIN].doing == "attempt 2: 200/400, 90.0 pairs/s, 0:40 left, training"


def test_array_children_are_summed_and_old_files_are_not_counted(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    for child in (0, 1):
        write_progress(tmp_path, Stage.EMBED, child, done=10, total=50, unit="documents", rate=5, note="embedding")
    write_progress(tmp_path, Stage.EMBED, 2, START - timedelta(minutes=1), done=50, total=50, unit="documents", rate=5)
    tracker.update(history("embed"))
    assert tracker.lines[Stage.EMBED].doing == "20/100, 10.0 documents/s, embedding"


def test_plain_lines_say_each_change_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=40)
    tracker = Tracker(tmp_path)
    events = history("WaitLong", "prepare", "ReadPlan", "health_check", "train")
    with PlainDisplay(console) as display:
        for count in range(len(events) + 1):
            tracker.update(events[:count])
            display.show(tracker)
            display.show(tracker)
        monkeypatch.setattr(progress, "PLAIN_PROGRESS_SECONDS", 0.0)
        display.show(tracker)
    lines = [" ".join(line.split()[1:]) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [
        "waiting for the lock",
        "prepare started",
        "prepare done after 0:01",
        "health_check started",
        "health_check done after 0:01",
        "compile skipped: nothing to compile",
        "train started",
        "train starting",
    ]


def test_the_live_table_shows_every_stage(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    tracker = Tracker(tmp_path)
    tracker.update(history("prepare", "health_check", "health_check failed", "report"))
    with LiveDisplay(console) as display:
        display.show(tracker)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(stage.value in text for stage in Stage)
    assert "skipped" not in text
    tracker.update(history("prepare", "health_check", "health_check failed", "report", "train"))
    with LiveDisplay(console) as display:
        display.show(tracker)
    assert "– compile" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "skipped: nothing to compile" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "✓" in text
    assert "✗" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.6, "0:08"), (750, "12:30"), (3723, "1:02:03"), (-1, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(timedelta(seconds=seconds)) == text
