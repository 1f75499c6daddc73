"""The progress of an execution, from its history, its Batch jobs and its progress files, as a live table or as plain lines.

`Tracker` turns the history of the state machine into one line per stage; `LiveDisplay` draws them on a terminal, `PlainDisplay`
prints what changes and, from time to time, the running stage's progress. For `trnpipe local` and `trnpipe watch` alike, so it
loads no AWS library: its callers pass the services' answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pipeline.commands.terminal import clock, say
from pipeline.contract import JOB_ENDED, STAGES, UNUSUAL, Shape, Stage
from pipeline.errors import plain
from pipeline.operate.run_files import IN_FOLDER, Listed, RunFiles, json_object, number, read_metrics

PLAIN_PROGRESS = timedelta(seconds=15)
SKIPPED = {Stage.PLAN: (Stage.INGEST, "no new shard"), Stage.TRAIN: (Stage.COMPILE, "nothing to compile")}
"""Stage -> the stage that the state machine may go past just before it, and why."""

USUAL = tuple(stage for stage in Stage if stage not in UNUSUAL)

BATCH_SUBMITS = ("submitJob", "submitJob.sync")
SHOWN_METRICS = ("ndcg@10", "accuracy")
"""What an evaluation shows in one line; a run has one of them."""
TAIL_BYTES = 64 << 10
"""More than a progress file has, and enough of `metrics.jsonl` for its last lines of either kind."""
SHORTEST_QUEUED = timedelta(seconds=1)


@dataclass(slots=True, kw_only=True)
class StageLine:
    """One stage of the execution.

    Attributes:
        state: pending, running, done, failed or skipped.
        doing: current activity, a few words and numbers; why it was skipped.
        share: of its work that is done, None while unknown.
        numbers: results so far: the loss, the metric of the hold-out.
        queued: how long its job waited for hosts, all attempts together.
        jobs: ids of the Batch jobs that this execution submitted for it, oldest first.
    """

    stage: Stage
    state: str = "pending"
    started: datetime | None = None
    ended: datetime | None = None
    doing: str = ""
    share: float | None = None
    numbers: str = ""
    queued: timedelta = timedelta(0)
    jobs: list[str] = field(default_factory=list)

    @property
    def elapsed(self) -> timedelta:
        return (self.ended or datetime.now(timezone.utc)) - self.started if self.started else timedelta(0)


@dataclass(slots=True)
class Tracker:
    """The state of every stage.

    Args:
        files: the run folder.

    Attributes:
        waiting: what the execution waits for outside any stage.
        trouble: why the state may be out of date, empty otherwise.
    """

    files: RunFiles
    lines: dict[Stage, StageLine] = field(default_factory=lambda: {one: StageLine(stage=one) for one in USUAL})
    waiting: str = ""
    trouble: str = ""
    _seen: int = 0
    _task_failed: bool = False
    _paces: dict[str, tuple[float, float, float | None]] = field(default_factory=dict)
    """Progress file and attempt -> time, work and `total` as first seen, which give the pace: `rate` counts unequal rows."""
    _contents: dict[str, tuple[Listed, bytes]] = field(default_factory=dict)
    """Name of a file -> the version that was read, and its content."""

    @property
    def running(self) -> StageLine | None:
        return next((line for line in self.lines.values() if line.state == "running"), None)

    @property
    def failed(self) -> StageLine | None:
        """The failed stage, report aside, whose failure does not end the run."""
        return next((line for line in self.lines.values() if line.state == "failed" and line.stage is not Stage.REPORT), None)

    def update(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Take in what is new in the execution's history.

        Args:
            history: all events so far.
        """
        for event in history[self._seen :]:
            self._take(event)
        self._seen = len(history)
        if line := self.running:
            line.doing = self._doing(line)
            self._take_metrics(line)

    def take_job(self, job: Mapping[str, Any], moment: datetime) -> None:
        """Take in the state of the running stage's Batch job, after `update`.

        Args:
            job: from DescribeJobs.
            moment: now.
        """
        if (line := self.running) is None:
            return
        line.queued = queued(job, moment)
        ended = _ended_attempts(job)
        if held := _held_back(job):
            since = max([job["createdAt"], *(attempt["stoppedAt"] for attempt in ended)])
            waiting = timedelta(milliseconds=max(0, round(moment.timestamp() * 1000) - since))
            how_long = f" for {clock(waiting)}" if job["status"] in WAITING_FOR_HOSTS else ""
            line.doing = plain(f"{held}{how_long}" + (f": {job['statusReason']}" if job.get("statusReason") else ""))
        attempt = len(ended) + (job["status"] not in JOB_ENDED)
        if attempt > 1:
            line.doing = f"attempt {attempt}: {line.doing}"

    def conclude(self, failed: Stage | None, moment: datetime) -> None:
        """Take in the end of an execution whose history cannot be read to its end.

        Args:
            failed: the stage that ended it, None if none did.
        """
        if line := self.running:
            self._end(line, moment, failed=line.stage is failed)
        if failed is not None:
            self._line_of(failed).state = "failed"

    def _line_of(self, stage: Stage) -> StageLine:
        """Return a stage's line, which those that few runs have get only now."""
        self.lines = {one: self.lines.get(one) or StageLine(stage=one) for one in Stage if one in self.lines or one is stage}
        return self.lines[stage]

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, moment = event["type"], event["timestamp"]
        if kind.endswith("StateEntered"):
            self._enter(event["stateEnteredEventDetails"]["name"], moment)
        elif kind in ("TaskFailed", "TaskTimedOut", "TaskSubmitFailed"):
            self._task_failed = True
        elif kind in ("TaskScheduled", "TaskSucceeded"):
            self._task_failed = False
        elif kind.startswith("Execution") and kind != "ExecutionStarted" and (line := self.running):
            self._end(line, moment, failed=kind != "ExecutionSucceeded")
        if (line := self.running) and (job := submitted_job(event)) and job not in line.jobs:
            line.jobs.append(job)

    def _enter(self, state: str, moment: datetime) -> None:
        self.waiting = "waiting for the lock" if state in ("Wait", "WaitLong") else ""
        # States of a stage are called `train`, `train (wait)`, `embed (single)`, `train failed`.
        name = state.partition(" ")[0]
        stage = Stage(name) if name in set(Stage) else None
        if (line := self.running) and line.stage is not stage:
            self._end(line, moment, failed=self._task_failed)
        if stage is None:
            return
        if stage in SKIPPED:
            skipped, reason = SKIPPED[stage]
            if self.lines[skipped].state == "pending":
                self.lines[skipped].state, self.lines[skipped].doing = "skipped", reason
        entered = self._line_of(stage)
        if state.endswith(" failed"):
            self._end(entered, moment, failed=True)
        elif entered.state != "running":
            entered.state, entered.started, entered.ended, entered.share = "running", moment, None, None
        self._task_failed = False

    def _end(self, line: StageLine, moment: datetime, *, failed: bool) -> None:
        line.state, line.ended = ("failed" if failed else "done"), moment
        self._take_metrics(line)

    def _doing(self, line: StageLine) -> str:
        """Return the running stage's progress: the main node's, or the sum of an array's children."""
        since = line.started.timestamp() if line.started else 0.0
        # Files of an earlier execution of this run say nothing about this one.
        prefix = IN_FOLDER.progress(line.stage, 0).removesuffix("00000.json")
        fresh = [file for file in self.files.listed(prefix) if file.modified >= since]
        if STAGES[line.stage].shape is not Shape.ARRAY:
            fresh = fresh[:1]
        found = {file.name: record for file in fresh if (record := json_object(self._read(file)))}
        if not (records := list(found.values())):
            return "starting"
        done, total, rate = (sum(number(record, key) or 0 for record in records) for key in ("done", "total", "rate"))
        finished, whole = (sum(numbers) for numbers in zip(*map(_work, records), strict=True))
        line.share = finished / whole if whole else line.share
        # Array children work side by side, so the slowest one's time remains; one that just began or had nothing to do says none.
        longest = max(self._remaining(*item) for item in found.items())
        words = [
            f"{done:,.0f}/{total:,.0f}" if total else "",
            f"{rate:,.1f} {records[0].get('unit', '')}/s" if rate else "",
            f"{clock(timedelta(seconds=longest))} left" if longest else "",
            str(records[0].get("note", "")),
        ]
        return plain(", ".join(word for word in words if word))

    def _read(self, file: Listed) -> bytes:
        """Return a file's last bytes, read again only after a change: finished children of an array write no more."""
        before = self._contents.get(file.name)
        if before is None or before[0] != file:
            self._contents[file.name] = before = file, self.files.read(file.name, last=TAIL_BYTES) or b""
        return before[1]

    def _take_metrics(self, line: StageLine) -> None:
        """Read what prepare chose to compute on; loss and hold-out metric of training's last checkpoint; evaluate's result."""
        if line.stage is Stage.PREPARE and line.state == "done":
            line.numbers = plain(str(read_metrics(self.files, Stage.PREPARE).get("computes", "")))
        if line.stage is Stage.EVALUATE and line.state == "done":
            line.numbers = quality(read_metrics(self.files, Stage.EVALUATE))
        if line.stage is Stage.TRAIN and (written := self.files.listed(IN_FOLDER.metrics)):
            found: dict[str, float] = {}
            for text in self._read(written[0]).splitlines():
                record = json_object(text)  # the first line may be cut
                values = {name: number(record, "validation", name) for name in SHOWN_METRICS} | {"loss": number(record, "loss")}
                found |= {name: value for name, value in values.items() if value is not None}
            line.numbers = ", ".join(f"{name} {value:.4f}" for name, value in found.items())

    def _remaining(self, name: str, record: Mapping[str, Any]) -> float:
        """Return the seconds that a progress file's process still needs, by the times in the file; 0 while unknown."""
        moment, rows, (done, total) = number(record, "time") or 0.0, number(record, "total"), _work(record)
        attempt = f"{name}, attempt {record.get('attempt')}"
        began, before, expected = self._paces.get(attempt, (moment, done, -1.0))
        if total and (done < before or rows != expected):
            self._paces[attempt] = (moment, done, rows)
        elif before < done < total:
            return (total - done) * (moment - began) / (done - before)
        return 0.0


@dataclass(eq=False)
class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """Lines for logs and pipes: when a stage starts or ends, and its progress from time to time.

    Attributes:
        every: time between two lines of progress.
    """

    console: Console
    every: timedelta = PLAIN_PROGRESS
    _began: float = field(init=False, default_factory=time.monotonic)
    _progress_at: float = field(init=False, default_factory=time.monotonic)
    _states: dict[Stage, str] = field(init=False, default_factory=dict)
    _notes: tuple[str, str] = field(init=False, default=("", ""))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Do nothing."""

    def show(self, tracker: Tracker) -> None:
        for before, now in zip(self._notes, notes := (tracker.waiting, tracker.trouble), strict=True):
            if now and now != before:
                self._line(now)
        self._notes = notes
        for line in tracker.lines.values():
            before = self._states.get(line.stage, "pending")
            if line.state == before:
                continue
            if line.state == "skipped":
                self._line(f"{line.stage:<13} skipped: {line.doing}")
            elif before == "pending":
                self._line(f"{line.stage:<13} started")
            if line.state in ("done", "failed"):
                self._line(f"{line.stage:<13} " + "; ".join([f"{line.state} after {clock(line.elapsed)}", *_found(line)]))
            self._states[line.stage] = line.state
            self._progress_at = time.monotonic()
        if (running := tracker.running) and time.monotonic() - self._progress_at >= self.every.total_seconds():
            self._line(f"{running.stage:<13} " + "; ".join([running.doing, *_found(running)]))
            self._progress_at = time.monotonic()

    def _line(self, text: str) -> None:
        say(self.console, f"{clock(timedelta(seconds=time.monotonic() - self._began)):>8}  {text}")


class LiveDisplay(Live):
    """A table on the terminal, one line per stage, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._tracker: Tracker | None = None
        self._spinner = Spinner("dots", style="cyan")
        super().__init__(console=console, refresh_per_second=4, get_renderable=self._render)

    def show(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def _render(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        if self._tracker is None:
            return table
        for line in self._tracker.lines.values():
            marks: dict[str, Any] = {
                "pending": Text("·", style="dim"),
                "running": self._spinner,
                "done": Text("✓", style="green"),
                "failed": Text("✗", style="bold red"),
                "skipped": Text("–", style="dim"),
            }
            style = {"pending": "dim", "running": "bold", "failed": "red", "skipped": "dim"}.get(line.state, "")
            doing = {"running": line.doing, "skipped": f"skipped: {line.doing}"}.get(line.state, "")
            words: RenderableType = Text("; ".join(([doing] if doing else []) + _found(line)), no_wrap=True, overflow="ellipsis")
            if line.state == "running" and line.share is not None:
                bar = Table.grid(padding=(0, 1))
                bar.add_row(ProgressBar(total=1.0, completed=line.share, width=20), words)
                words = bar
            table.add_row(
                marks[line.state],
                Text(line.stage.value, style=style),
                Text(clock(line.elapsed) if line.started else "", style="dim"),
                words,
            )
        for note in filter(None, (self._tracker.waiting, self._tracker.trouble)):
            table.add_row("", Text(note, style="yellow"), "", "")
        return table


Display = LiveDisplay | PlainDisplay

WAITING_FOR_HOSTS = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")


def queued(job: Mapping[str, Any], moment: datetime) -> timedelta:
    """Return how long a job has waited for its hosts, in all attempts; 0 for an array, whose children wait one by one.

    Args:
        job: from DescribeJobs; its times are milliseconds since 1970.
        moment: now.
    """
    if job.get("arrayProperties", {}).get("statusSummary"):
        return timedelta(0)
    # The wait for the next attempt begins at an attempt's end.
    waits, since = 0, job["createdAt"]
    for attempt in _ended_attempts(job):
        waits += max(0, (attempt.get("startedAt") or attempt["stoppedAt"]) - since)
        since = attempt["stoppedAt"]
    if job["status"] in WAITING_FOR_HOSTS:
        waits += max(0, round(moment.timestamp() * 1000) - since)
    elif job["status"] not in JOB_ENDED and job.get("startedAt"):
        waits += max(0, job["startedAt"] - since)
    return timedelta(milliseconds=waits)


def _ended_attempts(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [attempt for attempt in job.get("attempts", ()) if attempt.get("stoppedAt")]


def _held_back(job: Mapping[str, Any]) -> str:
    """Return why no part of a job runs yet; empty once one does."""
    children: Mapping[str, int] = job.get("arrayProperties", {}).get("statusSummary") or {}
    if any(children.get(state) for state in ("RUNNING", "SUCCEEDED", "FAILED")):
        return ""
    if children:
        return "waiting for hosts, " + ", ".join(f"{count} {state}" for state, count in sorted(children.items()) if count)
    return f"waiting for hosts, {job['status']}" if job["status"] in WAITING_FOR_HOSTS else ""


def submitted_job(event: Mapping[str, Any]) -> str | None:
    """Return the id of the Batch job that an event of the history reports as submitted, in either form of the submit."""
    details = event.get("taskSubmittedEventDetails") or event.get("taskSucceededEventDetails") or {}
    wanted = event["type"] == "TaskSubmitted" or details.get("resource") == BATCH_SUBMITS[0]
    if not wanted or details.get("resource") not in BATCH_SUBMITS:
        return None
    record = json_object(str(details.get("output", "")))
    return str(record["JobId"]) if "JobId" in record else None


def quality(metrics: Mapping[str, Any]) -> str:
    """Return `ndcg@10 0.6673 → 0.7468`, the baseline's and the new model's, from evaluate's metrics; empty without them."""
    found = ((name, *(number(metrics, model, name) for model in ("baseline", "new"))) for name in SHOWN_METRICS)
    return "".join(f"{name} {old:.4f} → {new:.4f}" for name, old, new in found if old is not None and new is not None)


def _found(line: StageLine) -> list[str]:
    waited = [f"queued {clock(line.queued)}"] if line.queued >= SHORTEST_QUEUED and line.state != "pending" else []
    return [*([line.numbers] if line.numbers else []), *waited]


def _work(record: Mapping[str, Any]) -> tuple[float, float]:
    """Return the work done and in all: in tokens where the stage counts them, else in what it counts."""
    done, total = ("work", "total_work") if number(record, "total_work") else ("done", "total")
    return number(record, done) or 0, number(record, total) or 0
