"""`trnpipe watch`: show an execution until it ends, then its outcome; end with its exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from rich.console import Console

from pipeline.commands.terminal import note, say
from pipeline.contract import StageFailure
from pipeline.errors import Transient, plain
from pipeline.operate import executions, run_jobs
from pipeline.operate.deployment import EndpointGone, Site
from pipeline.operate.executions import Event, Execution, read_history
from pipeline.operate.outcome import ABORTED_EXIT, conclude, judge
from pipeline.operate.progress import Display, LiveDisplay, PlainDisplay, StageLine, Tracker

POLL_SECONDS = 5.0
LOCAL_POLL_SECONDS = 1.0
"""Seconds between two looks, each of which is four calls that cost nothing, a listing and a few small objects of S3."""

PLAIN_PROGRESS = timedelta(minutes=1)
LAST_EVENT_LOOKS = 5
"""The history lags behind DescribeExecution: how often to ask it for the final event."""


def watch(site: Site, execution: Execution, console: Console, *, lines: bool = False) -> int:
    """Show an execution until it has ended.

    Args:
        lines: plain lines even on a terminal.

    Returns:
        0; 67 if the gate refused; the failed stage's exit code; 130 if the execution was stopped, or after Ctrl-C, which
        ends only the watching.
    """
    note(console, f"run {execution.run}" + (f", execution {execution.name}" if execution.name != execution.run else ""))
    if link := site.console_link(execution.arn):
        say(console, link, style="dim")  # not `note`, which hides what follows the ? of a URI
    tracker = Tracker(site.files(execution.run))
    display: Display = (
        LiveDisplay(console)
        if console.is_terminal and not lines
        else PlainDisplay(console, **({} if site.state else {"every": PLAIN_PROGRESS}))
    )
    try:
        with display:
            ended = _follow(site, execution, tracker, display)
    except KeyboardInterrupt:
        note(console, f"stopped watching; run {execution.run} continues")
        note(console, f"watch it again: trnpipe watch {execution.name} {site.option}")
        note(console, f"stop it:        trnpipe stop {execution.name} {site.option}")
        return ABORTED_EXIT
    return conclude(console, ended, tracker, execution.started, partial(_logs, site))


def _follow(site: Site, execution: Execution, tracker: Tracker, display: Display) -> dict[str, Any]:
    """Show the execution until it ends; return its status, error and cause."""
    events: list[Event] = []
    while True:
        try:
            execution = executions.describe(site, execution.arn)
            read_history(site, execution.arn, events)
            if not execution.running:
                _read_to_the_end(site, execution, events)
            tracker.update(events)
            if (line := tracker.running) and line.jobs:
                for job in run_jobs.describe(site, line.jobs[-1:]):
                    tracker.take_job(job, datetime.now(timezone.utc))
            tracker.trouble = ""
        except EndpointGone:
            # A local run that ended between two looks took its endpoint with it; its files say how it ended.
            ended = judge(tracker.files, execution.started)
            tracker.conclude(ended.stage, datetime.now(timezone.utc))
            tracker.trouble = ""
            display.show(tracker)
            return {"status": ended.status, "error": ended.error, "cause": ended.cause}
        except Transient as error:
            # The operator's network may be away, even for a night: the execution does not depend on it.
            tracker.trouble = plain(f"{error.what}: trying again")
        display.show(tracker)
        if not execution.running and not tracker.trouble:
            return {"status": execution.status, "error": execution.error, "cause": execution.cause}
        time.sleep(LOCAL_POLL_SECONDS if site.state else POLL_SECONDS)


def _read_to_the_end(site: Site, execution: Execution, events: list[Event]) -> None:
    for _ in range(LAST_EVENT_LOOKS):
        if events and events[-1]["type"].startswith("Execution"):
            break
        time.sleep(LOCAL_POLL_SECONDS)
        read_history(site, execution.arn, events)


def _logs(site: Site, line: StageLine, failure: StageFailure | None) -> Iterator[str]:
    try:
        for job in line.jobs[-1:]:
            yield from run_jobs.failed_logs(site, job, failure)
    except EndpointGone:
        yield f"{site.log_of('')}"
