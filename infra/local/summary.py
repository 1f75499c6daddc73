"""What a person reads when a local execution has ended: the new model against its parent, speeds, places, or why it failed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.local.batch import BatchRunner, failed_attempts
from infra.local.progress import Tracker, clock
from pipeline.contract import RunPaths, Stage, StageFailure
from pipeline.errors import ExitCode, TrnpipeError, plain, shown

GATE_REFUSED = "GateRefused"
ERROR_CODES = {
    GATE_REFUSED: ExitCode.GATE_REFUSED,
    "InputRefused": ExitCode.BAD_CONFIG,
    "NoSuchGang": ExitCode.BAD_CONFIG,
    "LockHeld": ExitCode.TRANSIENT,
}
"""Errors of the state machine's own and the exit codes they stand for."""

ABORTED_EXIT = 130


def exit_code(execution: Mapping[str, Any], tracker: Tracker, started: datetime) -> int:
    """The code that `trnpipe local` ends with.

    Args:
        execution: DescribeExecution's answer.
        tracker: what was seen of it.
        started: when it started; an older failure file is about something else.
    """
    if execution["status"] == "SUCCEEDED":
        return int(ExitCode.DONE)
    if execution["status"] == "ABORTED":
        return ABORTED_EXIT
    error = execution.get("error", "")
    if error in ERROR_CODES:
        return int(ERROR_CODES[error])
    if tracker.failed is None:
        return int(ExitCode.DEFECT)
    failure = read_failure(tracker.run_folder, tracker.failed.stage, started)
    return failure.exit_code if failure is not None else int(ExitCode.DEFECT)


def read_failure(run_folder: Path, stage: Stage, started: datetime) -> StageFailure | None:
    """The stage's failure file, if this execution wrote it."""
    path = _local(run_folder, RunPaths(run_folder.name).failure(stage))
    if not path.is_file():
        return None
    failure = StageFailure.from_json(path.read_bytes())
    return failure if not failure.time or datetime.fromisoformat(failure.time) >= started else None


def print_outcome(console: Console, execution: Mapping[str, Any], tracker: Tracker) -> None:
    """Tables of a run that came to a verdict: quality, speeds, and where everything is."""
    folder = tracker.run_folder
    metrics = {stage: _metrics(folder, stage) for stage in Stage}
    if scores := metrics[Stage.EVALUATE]:
        console.print(_quality(scores))
    refused = execution.get("error") == GATE_REFUSED
    gate = scores.get("gate", {}) if scores else {}
    if gate:
        console.print(plain(f"gate: {gate.get('verdict')}: {gate.get('reason')}"), markup=False, highlight=False, soft_wrap=True)
    places = [(name, str(path)) for name, path in _places(folder, published=execution["status"] == "SUCCEEDED")]
    # Lines, not a table: a table cuts paths to the width of the terminal, and they are for copying.
    for name, value in [*_numbers(metrics, tracker), *places]:
        console.print(f"{name:<10}  {value}", markup=False, highlight=False, soft_wrap=True)
    if refused:
        console.print("refused: nothing was published, the parent stays what is served", style="bold yellow")


def print_failure(
    console: Console, execution: Mapping[str, Any], tracker: Tracker, runner: BatchRunner, started: datetime
) -> None:
    """The failure's own words, and the log file to look at."""
    line = tracker.failed
    failure = read_failure(tracker.run_folder, line.stage, started) if line else None
    where = f"{line.stage} failed" if line else f"the execution ended as {execution['status']}"
    console.print(f"{where} (run {tracker.run_folder.name})", style="bold red")
    if failure is not None:
        words = TrnpipeError(failure.what, value=failure.value, rule=failure.rule, remedy=failure.remedy).lines()
    else:
        words = [f"error:  {shown(execution.get('error', ''))}", f"cause:  {shown(execution.get('cause', ''))}"]
    for path in _logs(runner, tracker, failure) if line else ():
        words.append(f"log:    {path}")
    console.print("\n".join(words), markup=False, highlight=False, soft_wrap=True)


def _quality(scores: Mapping[str, Any]) -> Table:
    table = Table(title="hold-out", title_justify="left", box=None, pad_edge=False)
    table.add_column("metric")
    for name in ("parent", "new", "difference"):
        table.add_column(name, justify="right")
    for metric, parent in scores.get("parent", {}).items():
        new = scores.get("new", {}).get(metric)
        if isinstance(parent, (int, float)) and isinstance(new, (int, float)):
            table.add_row(metric, f"{parent:.4f}", f"{new:.4f}", f"{new - parent:+.4f}")
    return table


def _numbers(metrics: Mapping[Stage, Mapping[str, Any]], tracker: Tracker) -> Iterator[tuple[str, str]]:
    train, embed = metrics[Stage.TRAIN], metrics[Stage.EMBED]
    if train:
        yield "train", f"{train.get('steps', 0):,} steps, {train.get('pairs_per_second', 0):,.1f} pairs/s"
    if embed:
        yield "embed", f"{embed.get('documents', 0):,} documents, {embed.get('documents_per_second', 0):,.1f} documents/s"
    ended = [line for line in tracker.lines.values() if line.started and line.ended]
    if ended:
        first = min(line.started for line in ended if line.started)
        last = max(line.ended for line in ended if line.ended)
        yield "time", clock(last - first)


def _places(folder: Path, *, published: bool) -> Iterator[tuple[str, Path]]:
    places = {
        "model": folder / "model",
        "embeddings": folder / "embed",
        "report": folder / "report" / "index.html",
        "run": folder,
        "registry": folder.parent.parent / "registry",
    }
    for name, path in places.items():
        if path.exists() and (published or name != "registry"):
            yield name, path


def _logs(runner: BatchRunner, tracker: Tracker, failure: StageFailure | None) -> Iterator[Path]:
    """Log files of the failed stage's last attempts: the node that failed first, the main node's where nobody knows."""
    assert tracker.failed is not None
    name = f"{tracker.failed.stage}-{tracker.run_folder.name}"
    jobs = [job for job in runner.jobs() if job.name == name]
    for job, _ in failed_attempts(jobs[-1]) if jobs else ():
        node = failure.node if failure is not None and failure.node < len(job.definition.containers) else job.definition.main_node
        attempt = failure.attempt if failure is not None and 0 < failure.attempt <= len(job.attempts) else len(job.attempts)
        yield runner.log_file(job, attempt, node)


def _metrics(folder: Path, stage: Stage) -> Mapping[str, Any]:
    path = _local(folder, RunPaths(folder.name).result(stage))
    if not path.is_file():
        return {}
    metrics = json.loads(path.read_bytes()).get("metrics", {})
    assert isinstance(metrics, dict)
    return metrics


def _local(run_folder: Path, uri: str) -> Path:
    return run_folder / uri.partition("/")[2]
