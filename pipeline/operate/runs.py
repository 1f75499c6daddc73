"""`trnpipe runs`: the newest executions and what came of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.commands.terminal import clock
from pipeline.contract import RUN_ID_PATTERN, Stage
from pipeline.errors import plain
from pipeline.operate import executions
from pipeline.operate.deployment import EndpointGone, Site, open_site
from pipeline.operate.endpoint import read_endpoint
from pipeline.operate.executions import Execution, History
from pipeline.operate.outcome import GATE_REFUSED, judge
from pipeline.operate.progress import SHOWN_METRIC, Tracker
from pipeline.operate.run_files import IN_FOLDER, LocalFiles, RunFiles, json_object, read_failure, read_result

ASKED_AT_ONCE = 8
LONGEST_REASON = 60
PIPED_WIDTH = 300
"""Columns of a table that goes into a file or a pipe: whole lines for whatever reads them."""
STYLES = {"succeeded": "green", "refused": "yellow", "failed": "red", "running": "cyan", "aborted": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One execution.

    Attributes:
        run: id of the run.
        execution: the execution's name; another than the run's where it took that up again.
        started: ISO 8601 in UTC.
        seconds: it took, or has taken so far; None: not known.
        result: succeeded, refused, failed, running or aborted.
        stage: where it is or failed; empty where that says nothing.
        reason: why it did not succeed.
        metric: of baseline and new.
        published: whether the new model is what is served since; None: it came to no verdict.
        replaced: the run whose model was published until then; None: none was, or the new model was not published.
        usd: what its hosts have cost, as the report counted it; None: not counted, or not paid by the hour.
        at_most: so much at most: an attempt was killed, and when is not known to the second.
    """

    run: str
    execution: str
    share: str
    started: str
    seconds: float | None
    result: str
    stage: str = ""
    reason: str = ""
    metric: str = SHOWN_METRIC
    baseline: float | None = None
    new: float | None = None
    published: bool | None = None
    replaced: str | None = None
    usd: float | None = None
    at_most: bool = False


def runs(stack: str, state: Path | None, limit: int) -> list[RunRow]:
    """The newest executions, newest first. Of a state folder also those before the local run that goes on, if one does.

    Raises:
        MissingInput: no such stack; see also `open_site`.
    """
    if state is None:
        with open_site(stack, None) as site:
            return _executions(site, limit)
    live: list[RunRow] = []
    if read_endpoint(state) is not None:
        try:
            with open_site(stack, state) as site:
                live = _executions(site, limit)
        except EndpointGone:
            # Killed: its file is all that is left of it.
            live = []
    seen = {row.execution for row in live}
    stored = [row for row in _stored(state) if row.execution not in seen]
    return sorted([*live, *stored], key=lambda row: row.started, reverse=True)[:limit]


def table(rows: list[RunRow]) -> Table:
    """The rows for people."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    made.add_column("run", no_wrap=True, overflow="fold")
    made.add_column("share", no_wrap=True)
    made.add_column("started", no_wrap=True)
    made.add_column("took", justify="right", no_wrap=True)
    made.add_column("result", overflow="fold", min_width=16)
    made.add_column(SHOWN_METRIC, no_wrap=True)
    costs = any(row.usd is not None for row in rows)
    if costs:
        made.add_column("USD", justify="right", no_wrap=True)
    for row in rows:
        words = [
            Text(plain(row.run if row.run == row.execution else f"{row.run} ({row.execution})"), style="bold"),
            Text(plain(row.share)),
            Text(datetime.fromisoformat(row.started).strftime("%m-%d %H:%M")),
            Text(clock(timedelta(seconds=row.seconds)) if row.seconds is not None else ""),
            Text(_result(row), style=STYLES.get(row.result, "")),
            Text(f"{row.baseline:.4f} → {row.new:.4f}" if row.baseline is not None and row.new is not None else ""),
        ]
        made.add_row(*words, *([Text(_cost(row))] if costs else []))
    return made


def as_json(rows: list[RunRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)


def _result(row: RunRow) -> str:
    at = f" at {row.stage}" if row.result == "running" and row.stage else f" in {row.stage}" if row.stage else ""
    replacing = f", replacing {row.replaced}" if row.replaced else ""
    words = {True: f", published{replacing}", False: ", not published", None: ""}
    served = words[row.published if row.result == "succeeded" else None]
    reason = row.reason if len(row.reason) <= LONGEST_REASON else f"{row.reason[: LONGEST_REASON - 1]}…"
    return plain(f"{row.result}{at}{served}" + (f": {' '.join(reason.split())}" if reason else ""))


def _cost(row: RunRow) -> str:
    return "" if row.usd is None else f"{'≤ ' if row.at_most else ''}{row.usd:,.2f}"


def _executions(site: Site, limit: int) -> list[RunRow]:
    found = executions.newest(site, limit)
    _ = site.machine  # read once, before several threads want it
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        return list(pool.map(lambda execution: _row(site, execution), found))


def _row(site: Site, execution: Execution) -> RunRow:
    files = site.files(execution.run)
    result, stage, reason = _ended(execution) if not execution.running else ("running", _stage_now(site, execution), "")
    if result == "failed" and stage in set(Stage):
        failure = read_failure(files, Stage(stage))
        if failure is not None and _within(failure.time, execution.started, execution.stopped):
            reason = failure.what
    share = execution.given.get("share")
    stopped = execution.stopped or datetime.now(timezone.utc)
    return RunRow(
        run=execution.run,
        execution=execution.name,
        share=str(share if share is not None else _default_share(site)),
        started=execution.started.astimezone(timezone.utc).isoformat(),
        seconds=(stopped - execution.started).total_seconds(),
        result=result,
        stage=stage,
        reason=reason,
        **_numbers(files, execution.stopped, over=not execution.running),
    )


def _default_share(site: Site) -> Any:
    return site.machine.deployment.config.get("share", "manual")


def _ended(execution: Execution) -> tuple[str, str, str]:
    """Result, stage and reason, as far as the execution itself tells them."""
    if execution.status == "SUCCEEDED":
        return "succeeded", "", ""
    if execution.status == "ABORTED":
        return "aborted", "", execution.cause
    if execution.error == GATE_REFUSED:
        return "refused", "", execution.cause
    # `train: States.TaskFailed`, or an error of the machine's own.
    state, separator, _ = execution.error.partition(":")
    stage = state.partition(" ")[0]
    if separator and stage in set(Stage):
        return "failed", stage, execution.cause
    return "failed", "", f"{execution.error}: {execution.cause}" if execution.error else execution.status


def _stage_now(site: Site, execution: Execution) -> str:
    history = History(site, execution.arn)
    history.update()
    tracker = Tracker(site.files(execution.run))
    tracker.update(history.events)
    return tracker.running.stage.value if tracker.running else tracker.waiting and "lock"


def _numbers(files: RunFiles, until: datetime | None, *, over: bool) -> dict[str, Any]:
    """What evaluate, publish and report found by the end of an execution; a later one that took the run up may have found more.

    Args:
        until: the execution's end; None: no later one has to be told from it.
        over: whether what is not published will not be by this execution.
    """
    metrics: dict[Stage, dict[str, Any]] = {}
    for stage in (Stage.EVALUATE, Stage.PUBLISH, Stage.REPORT):
        result = read_result(files, stage)
        if result is not None and (until is None or _within(result.finished, None, until)):
            metrics[stage] = result.metrics
    scores = metrics.get(Stage.EVALUATE, {})
    found: dict[str, Any] = {}
    for name in ("baseline", "new"):
        value = scores.get(name)
        value = value.get(SHOWN_METRIC) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            found[name] = float(value)
    if Stage.PUBLISH in metrics:
        found["published"] = bool(metrics[Stage.PUBLISH].get("published"))
        replaced = metrics[Stage.PUBLISH].get("replaced")
        found["replaced"] = replaced if found["published"] and isinstance(replaced, str) else None
    elif scores and over:
        found["published"] = False
    cost = metrics.get(Stage.REPORT, {}).get("cost")
    if isinstance(cost, Mapping) and isinstance(cost.get("usd"), (int, float)):
        found |= {"usd": float(cost["usd"]), "at_most": bool(cost.get("at_most"))}
    return found


def _within(moment: str, first: datetime | None, last: datetime | None) -> bool:
    try:
        when = datetime.fromisoformat(moment)
        return (first is None or when >= first) and (last is None or when <= last)
    except (ValueError, TypeError):
        return False


def _stored(state: Path) -> Iterator[RunRow]:
    """Runs of a state folder as their files tell them: each run's newest execution."""
    for path in (state / "bucket/runs").glob("*/input.json"):
        if not RUN_ID_PATTERN.fullmatch(path.parent.name):
            continue
        files = LocalFiles(path.parent)
        given = json_object(files.read(IN_FOLDER.input))
        execution = str(given.get("execution_arn", "")).rpartition(":")[2] or path.parent.name
        started = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        ended = judge(files, started)
        words = {"SUCCEEDED": "succeeded", "ABORTED": "aborted"}
        result = words.get(ended.status) or ("refused" if ended.error == GATE_REFUSED else "failed")
        yield RunRow(
            run=path.parent.name,
            execution=execution,
            share=str((given.get("execution") or {}).get("share") or "manual"),
            started=started.isoformat(),
            seconds=_last_written(files, started),
            result=result,
            stage=ended.stage.value if ended.stage else "",
            reason=ended.cause,
            **_numbers(files, None, over=True),
        )


def _last_written(files: RunFiles, started: datetime) -> float | None:
    """Seconds until a stage left its last word; None where none did."""
    words = [name for stage in Stage for name in (IN_FOLDER.result(stage), IN_FOLDER.failure(stage))]
    moments = [found.modified for name in words for found in files.listed(name)]
    return max((moment - started.timestamp() for moment in moments if moment >= started.timestamp()), default=None)
