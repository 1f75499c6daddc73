"""What a local execution is doing, from its history and its progress files, as a live table or as plain lines.

`Tracker` turns the history of the state machine into one line per stage; `LiveDisplay` draws them on a terminal,
`PlainDisplay` prints what changes, and every now and then how far the running stage is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pipeline.contract import STAGES, Shape, Stage
from pipeline.errors import plain

PLAIN_PROGRESS_SECONDS = 15.0
LIVE_REFRESH_PER_SECOND = 4
FAILED_SUFFIX = " failed"
WAITING_STATES = ("Wait", "WaitLong")
NOTHING_TO_COMPILE = "nothing to compile"


@dataclass(slots=True, kw_only=True)
class StageLine:
    """One stage of the execution.

    Attributes:
        state: pending, running, done, failed or skipped.
        doing: what it does now, a few words and numbers; why it was skipped.
    """

    stage: Stage
    state: str = "pending"
    started: datetime | None = None
    ended: datetime | None = None
    doing: str = ""

    @property
    def elapsed(self) -> timedelta:
        if self.started is None:
            return timedelta(0)
        return (self.ended or datetime.now(timezone.utc)) - self.started


@dataclass(slots=True)
class _Pace:
    """Progress of one stage as first seen, to tell the remaining time from: rates count something else than `done` does."""

    moment: float
    done: float
    total: float


@dataclass(slots=True)
class Tracker:
    """The state of every stage.

    Args:
        run_folder: the run folder as local files.
    """

    run_folder: Path
    lines: dict[Stage, StageLine] = field(default_factory=lambda: {stage: StageLine(stage=stage) for stage in Stage})
    waiting: str = ""
    _seen: int = 0
    _task_failed: bool = False
    _paces: dict[Stage, _Pace] = field(default_factory=dict)

    @property
    def running(self) -> StageLine | None:
        return next((line for line in self.lines.values() if line.state == "running"), None)

    @property
    def failed(self) -> StageLine | None:
        """The stage that ended the run; report, which never does, not counted."""
        return next((line for line in self.lines.values() if line.state == "failed" and line.stage is not Stage.REPORT), None)

    def update(self, history: Sequence[Mapping[str, Any]], attempt: int = 1) -> None:
        """Take in what is new in the execution's history.

        Args:
            history: all events so far.
            attempt: of the running stage's job.
        """
        for event in history[self._seen :]:
            self._take(event)
        self._seen = len(history)
        if line := self.running:
            again = f"attempt {attempt}: " if attempt > 1 else ""
            line.doing = again + self._doing(line)

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

    def _enter(self, state: str, moment: datetime) -> None:
        self.waiting = "waiting for the lock" if state in WAITING_STATES else ""
        stage = _stage_of(state)
        line = self.running
        if line is not None and line.stage is not stage:
            self._end(line, moment, failed=self._task_failed)
        if stage is None:
            return
        compiling = self.lines[Stage.COMPILE]
        if stage is Stage.TRAIN and compiling.state == "pending":
            compiling.state, compiling.doing = "skipped", NOTHING_TO_COMPILE
        entered = self.lines[stage]
        if state.endswith(FAILED_SUFFIX):
            self._end(entered, moment, failed=True)
        elif entered.state != "running":
            entered.state, entered.started, entered.ended = "running", moment, None
        self._task_failed = False

    def _end(self, line: StageLine, moment: datetime, *, failed: bool) -> None:
        line.state, line.ended = ("failed" if failed else "done"), moment

    def _doing(self, line: StageLine) -> str:
        """The running stage's progress: the main node's, or the sum of an array's children."""
        assert line.started is not None
        records = []
        for path in sorted((self.run_folder / line.stage.value).glob("progress-*.json")):
            # Files of an earlier execution of this run say nothing about this one.
            if path.stat().st_mtime >= line.started.timestamp():
                records.append(json.loads(path.read_text()))
        if not records:
            return "starting"
        if STAGES[line.stage].shape is not Shape.ARRAY:
            records = records[:1]
        done, total, rate = (sum(record.get(key) or 0 for record in records) for key in ("done", "total", "rate"))
        words = [f"{done:,.0f}/{total:,.0f}" if total else ""]
        words.append(f"{rate:,.1f} {records[0].get('unit', '')}/s" if rate else "")
        words.append(self._remaining(line.stage, done, total))
        words.append(str(records[0].get("note", "")))
        return plain(", ".join(word for word in words if word))

    def _remaining(self, stage: Stage, done: float, total: float) -> str:
        first = self._paces.get(stage)
        moment = time.monotonic()
        if first is None or done < first.done or total != first.total:
            self._paces[stage] = _Pace(moment, done, total)
            return ""
        if not total or done <= first.done or done >= total:
            return ""
        return f"{clock(timedelta(seconds=(total - done) * (moment - first.moment) / (done - first.done)))} left"


class Display(Protocol):
    """Shows a tracker's lines; a context manager."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, tracker: Tracker) -> None: ...


class PlainDisplay:
    """Lines for logs and pipes: when a stage starts or ends, and now and then how far it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._states: dict[Stage, str] = {}
        self._progress_at = time.monotonic()
        self._waiting = ""

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Nothing to take down."""

    def show(self, tracker: Tracker) -> None:
        if tracker.waiting and tracker.waiting != self._waiting:
            self._line(tracker.waiting)
        self._waiting = tracker.waiting
        for line in tracker.lines.values():
            before = self._states.get(line.stage, "pending")
            if line.state == before:
                continue
            if line.state == "skipped":
                self._line(f"{line.stage:<13} skipped: {line.doing}")
            elif before == "pending":
                self._line(f"{line.stage:<13} started")
            if line.state in ("done", "failed"):
                self._line(f"{line.stage:<13} {line.state} after {clock(line.elapsed)}")
            self._states[line.stage] = line.state
            self._progress_at = time.monotonic()
        running = tracker.running
        if running is not None and time.monotonic() - self._progress_at >= PLAIN_PROGRESS_SECONDS:
            self._line(f"{running.stage:<13} {running.doing}")
            self._progress_at = time.monotonic()

    def _line(self, text: str) -> None:
        elapsed = clock(timedelta(seconds=time.monotonic() - self._began))
        self._console.print(f"{elapsed:>8}  {text}", markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A table on the terminal, one line per stage, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._tracker: Tracker | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(console=console, refresh_per_second=LIVE_REFRESH_PER_SECOND, get_renderable=self._render)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._live.__exit__(kind, error, traceback)

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
            elapsed = clock(line.elapsed) if line.started else ""
            doing = {"running": line.doing, "skipped": f"skipped: {line.doing}"}.get(line.state, "")
            table.add_row(marks[line.state], Text(line.stage.value, style=style), Text(elapsed, style="dim"), Text(doing))
        if self._tracker.waiting:
            table.add_row("", Text(self._tracker.waiting, style="yellow"), "", "")
        return table


def clock(span: timedelta) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    seconds = max(0, round(span.total_seconds()))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _stage_of(state: str) -> Stage | None:
    """The stage that a state belongs to: `train`, `train (wait)`, `embed (single)`, `train failed`."""
    name = state.partition(" ")[0]
    return Stage(name) if name in {stage.value for stage in Stage} else None
