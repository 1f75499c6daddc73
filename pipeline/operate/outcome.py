"""Print the outcome of an execution, and find its exit code: the new model against the baseline, speeds, locations, or why it
failed. For `trnpipe local` and `trnpipe watch` alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from pipeline.commands.terminal import clock, right, say
from pipeline.contract import GATE_REFUSED, RunPaths, Stage, StageFailure, history_uri
from pipeline.errors import ExitCode, TrnpipeError, plain, shown
from pipeline.operate.progress import StageLine, Tracker
from pipeline.operate.run_files import IN_FOLDER, RunFiles, number, read_failure, read_metrics

ERROR_CODES = {
    GATE_REFUSED: ExitCode.GATE_REFUSED,
    "InputRefused": ExitCode.BAD_CONFIG,
    "NoSuchGang": ExitCode.BAD_CONFIG,
    "LockHeld": ExitCode.TRANSIENT,
}
"""The state machine's own errors -> exit codes."""

OUT_OF_TIME = ("States.Timeout", "GangOverdue", "GangLost")
"""Suffixes of the errors with which the state machine gives up a job."""

ABORTED_EXIT = 130
"""As after Ctrl-C."""


Logs = Callable[[StageLine, StageFailure | None], Iterable[str]]
"""Yields where the output of a failed stage's job is, given the stage and its own record of the failure."""


def conclude(
    console: Console, execution: Mapping[str, Any], tracker: Tracker, started: datetime, logs: Logs = lambda *_: ()
) -> int:
    """Print the outcome of an execution; return the exit code.

    Args:
        execution: DescribeExecution's answer.
        tracker: its stages.
        started: when it started; older failure files belong to earlier executions.
    """
    code = exit_code(execution, tracker, started)
    if code == 0 or (tracker.failed is None and tracker.lines[Stage.EVALUATE].state == "done"):
        print_outcome(console, execution, tracker)
    if code and execution.get("error") != GATE_REFUSED:
        print_failure(console, execution, tracker, started, logs)
    return code


def exit_code(execution: Mapping[str, Any], tracker: Tracker, started: datetime) -> int:
    """Return the exit code of `trnpipe local`, `trnpipe watch` and `trnpipe start --watch`; arguments as in `conclude`."""
    if execution["status"] == "SUCCEEDED":
        return int(ExitCode.DONE)
    if execution["status"] == "ABORTED":
        return ABORTED_EXIT
    error = execution.get("error", "")
    if error in ERROR_CODES:
        return int(ERROR_CODES[error])
    if tracker.failed is None:
        return int(ExitCode.DEFECT)
    failure = read_failure(tracker.files, tracker.failed.stage, started)
    return failure.exit_code if failure is not None else int(_unexplained(execution))


def _unexplained(execution: Mapping[str, Any]) -> ExitCode:
    """Return the exit code of a job without a failure file: its container's; 75 if none ran, for lack of hosts or time."""
    if str(execution.get("error", "")).endswith(OUT_OF_TIME):
        return ExitCode.TRANSIENT
    try:
        ended = [attempt["Container"].get("ExitCode") for attempt in json.loads(execution.get("cause") or "")["Attempts"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ExitCode.DEFECT
    return ExitCode.TRANSIENT if not ended or ended[-1] is None else ExitCode.of(ended[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnding:
    """The end of an execution, according to its run folder.

    Attributes:
        status, error, cause: as in DescribeExecution.
        stage: the stage that failed.
    """

    status: str
    error: str = ""
    cause: str = ""
    stage: Stage | None = None


def judge(files: RunFiles, started: datetime) -> RunEnding:
    """Return how an execution ended that no service knows any more: a local run that is over."""
    if (publish := read_metrics(files, Stage.PUBLISH)) and not publish.get("again"):
        refused = publish.get("refused")
        return RunEnding(status="FAILED", error=GATE_REFUSED, cause=str(refused)) if refused else RunEnding(status="SUCCEEDED")
    for stage in reversed([stage for stage in Stage if stage is not Stage.REPORT]):
        if failure := read_failure(files, stage, started):
            return RunEnding(status="FAILED", error=stage.value, cause=failure.what, stage=stage)
    gate = read_metrics(files, Stage.EVALUATE).get("gate")
    if isinstance(gate, dict) and gate.get("verdict") == "refused":
        return RunEnding(status="FAILED", error=GATE_REFUSED, cause=str(gate.get("reason", "")))
    return RunEnding(status="ABORTED", cause="it ended before its time")


def print_outcome(console: Console, execution: Mapping[str, Any], tracker: Tracker) -> None:
    """Print the quality, the speeds and the locations of a run that the gate has judged."""
    metrics = {stage: read_metrics(tracker.files, stage) for stage in Stage}
    if scores := metrics[Stage.EVALUATE]:
        console.print(_quality(scores))
    if gate := scores.get("gate"):
        say(console, plain(f"gate: {gate.get('verdict')}: {gate.get('reason')}"))
    published = execution["status"] == "SUCCEEDED" and bool(metrics[Stage.PUBLISH].get("published"))
    # Lines, not a table: a table cuts paths to the width of the terminal, and they are for copying.
    for name, value in [*_numbers(metrics, tracker), *_locations(tracker.files, metrics[Stage.REPORT], published)]:
        say(console, f"{name:<10}  {value}")
    if execution.get("error") == GATE_REFUSED:
        console.print("refused: the published model stays", style="bold yellow")


def print_failure(console: Console, execution: Mapping[str, Any], tracker: Tracker, started: datetime, logs: Logs) -> None:
    """Print the failure, and which logs to read."""
    line = tracker.failed
    failure = read_failure(tracker.files, line.stage, started) if line else None
    aborted = execution["status"] == "ABORTED"
    where = f"{line.stage} {'was stopped' if aborted else 'failed'}" if line else f"the execution ended as {execution['status']}"
    console.print(f"{where} (run {RunPaths(tracker.files.root).run_id})", style="bold red")
    words = (
        TrnpipeError(failure.what, value=failure.value, rule=failure.rule, remedy=failure.remedy).lines()
        if failure is not None and not aborted
        else [f"{name + ':':<8}{shown(execution[name])}" for name in ("error", "cause") if execution.get(name)]
    )
    words += [f"log:    {log}" for log in (logs(line, failure) if line else ())]
    say(console, "\n".join(map(tracker.files.as_typed, words)))


def _quality(scores: Mapping[str, Any]) -> Table:
    table = Table(
        Column("metric"),
        *map(right, ("baseline", "new", "difference")),
        title="hold-out",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for metric in scores.get("baseline", {}):
        baseline, new = (number(scores, model, metric) for model in ("baseline", "new"))
        if baseline is not None and new is not None:
            table.add_row(metric, f"{baseline:.4f}", f"{new:.4f}", f"{new - baseline:+.4f}")
    return table


def _numbers(metrics: Mapping[Stage, Mapping[str, Any]], tracker: Tracker) -> Iterator[tuple[str, str]]:
    train, embed = metrics[Stage.TRAIN], metrics[Stage.EMBED]
    if train:
        yield "train", f"{train.get('steps', 0):,} steps, {train.get('pairs_per_second', 0):,.1f} pairs/s"
    if embed:
        copied = f"{embed['copied']:,} of them copied, " if embed.get("copied") else ""
        yield "embed", f"{embed.get('documents', 0):,} documents, {copied}{embed.get('documents_per_second', 0):,.1f} documents/s"
    if spans := [(line.started, line.ended) for line in tracker.lines.values() if line.started and line.ended]:
        yield "time", clock(max(end for _, end in spans) - min(start for start, _ in spans))


def _locations(files: RunFiles, report: Mapping[str, Any], published: bool) -> Iterator[tuple[str, str]]:
    root = RunPaths(files.root)
    paths = {"model": IN_FOLDER.model, "embeddings": IN_FOLDER.stage(Stage.EMBED), "report": IN_FOLDER.report}
    yield from ((name, root.root + path) for name, path in paths.items() if files.listed(path))
    if report.get("registry"):
        yield "history", history_uri(root.bucket_root, report["registry"])
    yield "run", root.root
    if published:
        yield "registry", f"{root.bucket_root}/registry"
