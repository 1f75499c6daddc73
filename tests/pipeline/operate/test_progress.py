"""Stages as the execution's history tells them, and how they are shown."""

from __future__ import annotations

import io
import json
import os
import re
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pipeline.commands.terminal import clock
from pipeline.contract import UNUSUAL, Stage, StageResult
from pipeline.model.inference import plan_batches
from pipeline.operate import progress
from pipeline.operate.progress import LiveDisplay, PlainDisplay, Tracker
from pipeline.operate.run_files import LocalFiles

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


def millis(seconds: float) -> int:
    """A moment relative to START as Batch tells it."""
    return round((START.timestamp() + seconds) * 1000)


def job(status: str, *, created: float = -100, started: float | None = None, **more: Any) -> dict[str, Any]:
    """A job as DescribeJobs tells it; moments in seconds from START."""
    described = {"jobId": "j", "status": status, "createdAt": millis(created), "attempts": [], **more}
    return {**described, **({} if started is None else {"startedAt": millis(started)})}


def write_progress(folder: Path, stage: Stage, node: int, moment: datetime = START, **record: Any) -> None:
    path = folder / stage.value / f"progress-{node:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"done": 0, "total": 0, "unit": "", "rate": 0.0, "note": "", **record}))
    os.utime(path, (moment.timestamp(), moment.timestamp()))


def test_stages_follow_the_states(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    events = history("ReadInput", "prepare", "!TaskSucceeded", "ReadPlan", "health_check")
    tracker.update(events)
    assert states(tracker) == {"prepare": "done", "health_check": "running"}
    assert tracker.lines[Stage.PREPARE].elapsed == timedelta(seconds=2)
    events += history("health_check", "!TaskFailed", "health_check failed", "KeepFailure", "report", "!TaskSucceeded", "OwnsLock")
    tracker.update(events)
    assert states(tracker) == {"prepare": "done", "health_check": "failed", "report": "done"}
    assert tracker.failed is tracker.lines[Stage.HEALTH_CHECK]


def test_a_stage_that_is_left_out_is_skipped_and_one_that_was_not_reached_is_not(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    events = history("prepare", "ReadInputs", "ChooseIngest")
    tracker.update(events)
    assert tracker.lines[Stage.INGEST].state == "pending"
    events += history("plan", "ReadPlan", "ChoosePrecompile")
    tracker.update(events)
    events += history("health_check", "ChooseCompile")
    tracker.update(events)
    assert states(tracker) == {"prepare": "done", "ingest": "skipped", "plan": "done", "health_check": "done"}
    assert tracker.lines[Stage.COMPILE].state == "pending"
    tracker.update([*events, *history("train")])
    assert [tracker.lines[stage].state for stage in (Stage.COMPILE, Stage.TRAIN)] == ["skipped", "running"]
    reasons = {Stage.INGEST: "no new shard", Stage.COMPILE: "nothing to compile"}
    for stage, reason in reasons.items():
        assert (tracker.lines[stage].doing, tracker.lines[stage].elapsed) == (reason, timedelta(0))
    failed = Tracker(LocalFiles(tmp_path))
    failed.update(history("prepare", "prepare failed", "report", "OwnsLock"))
    assert {failed.lines[stage].state for stage in reasons} == {"pending"}


def test_a_single_ingest_is_its_stage(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("prepare", "ingest (single)", "!TaskSucceeded", "plan"))
    assert states(tracker) == {"prepare": "done", "ingest": "done", "plan": "running"}


def test_a_failed_report_is_no_failure_of_the_run(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("publish", "!TaskSucceeded", "Succeeded", "report", "!TaskFailed", "OwnsLock", "!ExecutionSucceeded"))
    assert states(tracker) == {"publish": "done", "report": "failed"}
    assert tracker.failed is None


def test_a_polled_gang_and_a_single_embed_are_their_stages(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    events = history("compile", "train", "train (wait)", "train (look)", "train (lap)", "train (wait)")
    tracker.update(events)
    assert states(tracker) == {"compile": "done", "train": "running"}
    tracker.update([*events, *history("evaluate", "embed (single)")])
    assert states(tracker) == {"compile": "done", "train": "done", "evaluate": "done", "embed": "running"}


def test_the_end_of_the_execution_ends_what_runs(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("compile", "train", "!ExecutionAborted"))
    assert states(tracker) == {"compile": "done", "train": "failed"}


def test_a_running_stage_says_how_far_it_is(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    events = history("train")
    tracker.update(events)
    assert tracker.lines[Stage.TRAIN].doing == "starting"
    write_progress(tmp_path, Stage.TRAIN, 0, done=100, total=400, unit="pairs", rate=93.25, note="training", time=100.0)
    write_progress(tmp_path, Stage.TRAIN, 1, done=99, total=400, unit="pairs", rate=93.25, note="training")
    tracker.update(events)
    assert tracker.lines[Stage.TRAIN].doing == "100/400, 93.2 pairs/s, training"
    later = START + timedelta(seconds=20)
    write_progress(tmp_path, Stage.TRAIN, 0, later, done=200, total=400, unit="pairs", rate=90, note="training", time=120.0)
    tracker.update(events)
    ended = {"startedAt": millis(-60), "stoppedAt": millis(-30)}
    tracker.take_job(job("RUNNING", started=-20, attempts=[ended]), START)
    assert tracker.lines[Stage.TRAIN].doing == "attempt 2: 200/400, 90.0 pairs/s, 0:40 left, training"
    assert tracker.lines[Stage.TRAIN].share == 0.5


def test_array_children_are_summed_and_old_files_are_not_counted(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    for child in (0, 1):
        write_progress(tmp_path, Stage.EMBED, child, done=10, total=50, unit="documents", rate=5, note="embedding")
    write_progress(tmp_path, Stage.EMBED, 2, START - timedelta(minutes=1), done=50, total=50, unit="documents", rate=5)
    tracker.update(history("embed"))
    assert tracker.lines[Stage.EMBED].doing == "20/100, 10.0 documents/s, embedding"


def test_children_of_different_work_add_up_and_the_slowest_one_gives_the_remaining_time(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))

    def report(second: int, *works: tuple[int, int], attempt: int = 1) -> str:
        for child, (work, total_work) in enumerate(works):
            record = {"done": work // 10, "total": 50, "work": work, "total_work": total_work, "attempt": attempt}
            write_progress(tmp_path, Stage.EMBED, child, START + timedelta(seconds=second), time=float(second), **record)
        tracker.update(history("embed"))
        return tracker.lines[Stage.EMBED].doing

    assert report(0, (0, 400), (0, 1600)) == "0/100"
    assert report(10, (100, 400), (200, 1600)) == "30/100, 1:10 left"
    assert tracker.lines[Stage.EMBED].share == 300 / 2000
    assert report(40, (400, 400), (800, 1600)) == "120/100, 0:40 left"
    # A child that starts over has no pace yet.
    assert report(50, (400, 400), (0, 1600), attempt=2) == "40/100"
    assert report(60, (400, 400), (400, 1600), attempt=2) == "80/100, 0:30 left"
    assert report(90, (400, 400), (1600, 1600)) == "200/100"
    assert tracker.lines[Stage.EMBED].share == 1


def remaining_times(folder: Path, *, by_work: bool) -> list[tuple[float, float]]:
    """The shown and the true remaining seconds of an embed stage whose longest texts go first, from its record of every second.

    A batch takes 0.1 ms per padded token, more for long texts, whose attention grows with the square of the length, and 2 ms.
    """
    lengths = np.random.default_rng(0).lognormal(3.5, 0.8, 12_000).clip(3, 256).astype(np.int64)
    plan = plan_batches(lengths, 256, 4096, static=False)
    padded = np.array([batch.slots * batch.length for batch in plan])
    ends = np.cumsum(padded * 1e-4 * (1 + np.array([batch.length for batch in plan]) / 2048) + 2e-3)
    rows, work = np.cumsum([batch.slots for batch in plan]), np.cumsum(padded)
    tracker, found = Tracker(LocalFiles(folder)), []
    for second in range(1, int(ends[-1])):
        batch = int(np.searchsorted(ends, second))
        counted = {"work": int(work[batch]), "total_work": int(work[-1])} if by_work else {}
        moment = START + timedelta(seconds=second)
        record = {"done": int(rows[batch]), "total": len(lengths), "time": float(ends[batch]), **counted}
        write_progress(folder, Stage.EMBED, 0, moment, **record)
        tracker.update(history("embed"))
        if shown := re.search(r"(\d+):(\d\d) left", tracker.lines[Stage.EMBED].doing):
            minutes, seconds = map(int, shown.groups())
            found.append((60.0 * minutes + seconds, float(ends[-1] - ends[batch])))
    return found


def test_the_remaining_time_is_right_although_the_longest_texts_go_first(tmp_path: Path) -> None:
    times = remaining_times(tmp_path / "work", by_work=True)
    assert len(times) > 40
    # Within a tenth from the third second on, and never more than a second up.
    assert [(shown, true) for shown, true in times[1:] if abs(shown - true) > 0.1 * true + 1] == []
    assert all(after <= before + 1 for (before, _), (after, _) in pairwise(times[1:]))
    by_rows = remaining_times(tmp_path / "rows", by_work=False)
    assert max(shown / true for shown, true in by_rows[1:]) > 2


def test_stages_that_few_runs_have_appear_when_they_are_reached(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    assert not {*UNUSUAL} & {*tracker.lines}
    tracker.update(history("prepare", "ingest", "mine", "plan", "collect", "precompile"))
    assert list(tracker.lines) == list(Stage)
    assert [tracker.lines[stage].state for stage in UNUSUAL] == ["done", "done", "running"]


def test_plain_lines_say_each_change_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=40)
    tracker = Tracker(LocalFiles(tmp_path))
    events = history("WaitLong", "prepare", "ReadPlan", "health_check", "train")
    moment = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: moment)
    with PlainDisplay(console) as display:
        for count in range(len(events) + 1):
            tracker.update(events[:count])
            display.show(tracker)
            display.show(tracker)
        moment += 16
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
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("prepare", "health_check", "health_check failed", "report"))
    with LiveDisplay(console) as display:
        display.show(tracker)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert {stage for stage in Stage if stage.value in text} == {*Stage} - {*UNUSUAL}
    assert "skipped" not in text
    tracker.update(history("prepare", "health_check", "health_check failed", "report", "train"))
    with LiveDisplay(console) as display:
        display.show(tracker)
    assert "– compile" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "skipped: nothing to compile" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "✓" in text
    assert "✗" in text


def test_the_live_table_stays_in_place_with_a_bar_for_the_running_stage(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    events = history("prepare", "embed")
    heights = set()
    for done in (0, 25, 75, 100):
        write_progress(tmp_path, Stage.EMBED, 0, START + timedelta(seconds=done + 2), done=done, total=100, unit="documents")
        tracker.update(events)
        console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
        display = LiveDisplay(console)
        display.show(tracker)
        lines = console.render_lines(display.get_renderable())
        heights.add(len(lines))
        [embed] = [text for line in lines if "embed" in (text := "".join(segment.text for segment in line))]
        assert embed.count("━") == done // 5
        assert f"{done}/100" in embed
    assert heights == {len(Stage) - len(UNUSUAL)}


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.6, "0:08"), (750, "12:30"), (3723, "1:02:03"), (-1, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(timedelta(seconds=seconds)) == text


def test_the_wait_for_hosts_is_shown_while_it_lasts_and_kept(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("train"))
    line = tracker.lines[Stage.TRAIN]
    reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - the job asks for too much"
    tracker.take_job(job("RUNNABLE", statusReason=reason), START)
    assert line.doing == f"waiting for hosts, RUNNABLE for 1:40: {reason}"
    assert line.queued == timedelta(seconds=100)
    tracker.update(history("train"))
    first = {"startedAt": millis(-70), "stoppedAt": millis(-60)}
    tracker.take_job(job("RUNNABLE", attempts=[first], statusReason=""), START)
    assert line.doing == "attempt 2: waiting for hosts, RUNNABLE for 1:00"
    assert line.queued == timedelta(seconds=30 + 60)
    tracker.update(history("train"))
    tracker.take_job(job("RUNNING", started=-5, attempts=[first]), START + timedelta(hours=1))
    assert line.doing == "attempt 2: starting"
    assert line.queued == timedelta(seconds=30 + 55)


def test_an_array_says_how_many_of_its_children_wait_until_one_works(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("embed"))
    children = {"RUNNABLE": 3, "STARTING": 1, "RUNNING": 0}
    tracker.take_job(job("PENDING", arrayProperties={"size": 4, "statusSummary": children}), START)
    assert tracker.lines[Stage.EMBED].doing == "waiting for hosts, 3 RUNNABLE, 1 STARTING for 1:40"
    tracker.update(history("embed"))
    tracker.take_job(job("PENDING", arrayProperties={"size": 4, "statusSummary": {**children, "RUNNING": 1}}), START)
    assert tracker.lines[Stage.EMBED].doing == "starting"


@pytest.mark.parametrize(
    ("kind", "details", "found"),
    [
        ("TaskSubmitted", {"resourceType": "batch", "resource": "submitJob.sync", "output": '{"JobId": "a"}'}, ["a"]),
        ("TaskSucceeded", {"resourceType": "aws-sdk:batch", "resource": "submitJob", "output": '{"JobId": "a"}'}, ["a"]),
        ("TaskSucceeded", {"resourceType": "batch", "resource": "submitJob.sync", "output": '{"JobId": "a"}'}, []),
        ("TaskSucceeded", {"resourceType": "aws-sdk:batch", "resource": "describeJobs", "output": '{"JobId": "a"}'}, []),
        ("TaskSubmitted", {"resourceType": "batch", "resource": "submitJob.sync", "output": "not JSON"}, []),
        ("TaskSubmitted", {"resourceType": "batch", "resource": "submitJob.sync"}, []),
    ],
)
def test_jobs_are_known_from_the_history_in_both_forms_of_the_submit(
    tmp_path: Path, kind: str, details: dict[str, str], found: list[str]
) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    name = "taskSubmittedEventDetails" if kind == "TaskSubmitted" else "taskSucceededEventDetails"
    tracker.update([*history("train"), {"type": kind, "timestamp": START, name: details}])
    assert tracker.lines[Stage.TRAIN].jobs == found


@pytest.mark.parametrize("metric", ["ndcg@10", "accuracy"])
def test_loss_and_quality_come_with_the_files(tmp_path: Path, metric: str) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    metrics = tmp_path / "train/metrics.jsonl"
    metrics.parent.mkdir()
    lines = [{"step": 1, "loss": 2.0}, {"step": 1, "validation": {metric: 0.5}}, {"step": 2, "loss": 1.25}]
    metrics.write_text('oken line"}\n' + "".join(json.dumps(line) + "\n" for line in lines))
    events = history("train")
    tracker.update(events)
    assert tracker.lines[Stage.TRAIN].numbers == f"loss 1.2500, {metric} 0.5000"
    scores = {"baseline": {metric: 0.5}, "new": {metric: 0.625}}
    result = StageResult(stage="evaluate", run="r", status="done", started="", finished="", fingerprint="f", metrics=scores)
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate/result.json").write_bytes(result.to_json())
    events += history("evaluate", "!TaskSucceeded", "ReadScorecard")
    tracker.update(events)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with LiveDisplay(console) as display:
        display.show(tracker)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert f"loss 1.2500, {metric} 0.5000" in text
    assert f"{metric} 0.5000 → 0.6250" in text


def test_a_planned_run_says_what_it_computes_on(tmp_path: Path) -> None:
    tracker = Tracker(LocalFiles(tmp_path))
    metrics = {"computes": "cpu in fp32: bf16 is no faster here"}
    result = StageResult(stage="prepare", run="r", status="done", started="", finished="", fingerprint="f", metrics=metrics)
    (tmp_path / "prepare").mkdir()
    (tmp_path / "prepare/result.json").write_bytes(result.to_json())
    tracker.update(history("prepare", "!TaskSucceeded", "ReadInputs", "plan"))
    console = Console(file=io.StringIO(), width=100)
    PlainDisplay(console).show(tracker)
    assert "prepare       done after 0:02; cpu in fp32: bf16 is no faster here\n" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["[1]", "nothing", '{"done": "many", "total": null}', "\ud83d" * 3])
def test_unreadable_progress_does_not_end_the_watch(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train/progress-00000.json"
    path.parent.mkdir()
    path.write_bytes(content.encode(errors="surrogatepass"))
    tracker = Tracker(LocalFiles(tmp_path))
    tracker.update(history("train"))
    assert tracker.lines[Stage.TRAIN].doing in ("starting", "")
