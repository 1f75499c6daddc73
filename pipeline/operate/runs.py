"""`trnpipe runs`: the newest executions and what came of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from pipeline.commands.terminal import clock, left, right
from pipeline.contract import GATE_REFUSED, RUN_ID_PATTERN, Stage
from pipeline.errors import plain
from pipeline.operate import executions
from pipeline.operate.deployment import EndpointGone, Site, open_site
from pipeline.operate.endpoint import read_endpoint
from pipeline.operate.executions import Event, Execution, read_history
from pipeline.operate.outcome import RunEnding, judge
from pipeline.operate.progress import SHOWN_METRICS, Tracker
from pipeline.operate.run_files import IN_FOLDER, LocalFiles, RunFiles, json_object, number, read_failure, read_result

LONGEST_REASON = 60
STYLES = {"succeeded": "green", "refused": "yellow", "failed": "red", "running": "cyan", "aborted": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One execution.

    Attributes:
        run: id of the run.
        execution: the execution's name; differs from the run's if it resumed the run.
        started: ISO 8601 in UTC.
        seconds: duration, up to now while it runs; None: unknown.
        result: succeeded, refused, failed, running or aborted.
        stage: the running or failed stage; empty otherwise.
        reason: why it did not succeed.
        metric: name of the metric that `baseline` and `new` give.
        published: whether the run published its model; None: the gate has not decided.
        replaced: the run whose model was published until then; None: none was, or the new model was not published.
        usd: cost of its hosts, as the report counted it; None: not counted, or not paid by the hour.
        at_most: `usd` is an upper bound, because an attempt was killed at an unknown moment.
    """

    run: str
    execution: str
    share: str
    started: str
    seconds: float | None
    result: str
    stage: str = ""
    reason: str = ""
    metric: str = SHOWN_METRICS[0]
    baseline: float | None = None
    new: float | None = None
    published: bool | None = None
    replaced: str | None = None
    usd: float | None = None
    at_most: bool = False


def runs(stack: str, state: Path | None, limit: int) -> list[RunRow]:
    """Return the newest executions, newest first; of a state folder, those of earlier local runs too.

    Raises:
        MissingInput: no such stack; see also `open_site`.
    """
    if state is None:
        with open_site(stack, None) as site:
            return _executions(site, limit)
    live: list[RunRow] = []
    if read_endpoint(state) is not None:
        # A local run that was killed leaves its file behind.
        with suppress(EndpointGone), open_site(stack, state) as site:
            live = _executions(site, limit)
    found = {row.execution: row for row in (*_stored(state), *live)}
    return sorted(found.values(), key=lambda row: row.started, reverse=True)[:limit]


def table(rows: list[RunRow]) -> Table:
    """The rows for people."""
    costs = any(row.usd is not None for row in rows)
    columns = [
        Column("run", no_wrap=True, overflow="fold"),
        left("share"),
        left("started"),
        right("took"),
        Column("result", overflow="fold", min_width=16),
        left(", ".join(sorted({row.metric for row in rows}))),
        *([right("USD")] if costs else []),
    ]
    made = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        words = [
            Text(plain(row.run if row.run == row.execution else f"{row.run} ({row.execution})"), style="bold"),
            Text(plain(row.share)),
            Text(datetime.fromisoformat(row.started).strftime("%m-%d %H:%M")),
            Text(clock(timedelta(seconds=row.seconds)) if row.seconds is not None else ""),
            Text(_result(row), style=STYLES.get(row.result, "")),
            Text(f"{row.baseline:.4f} → {row.new:.4f}" if row.baseline is not None and row.new is not None else ""),
        ]
        usd = "" if row.usd is None else f"{'≤ ' if row.at_most else ''}{row.usd:,.2f}"
        made.add_row(*words, *([Text(usd)] if costs else []))
    return made


def as_json(rows: list[RunRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)


def _result(row: RunRow) -> str:
    at = f" at {row.stage}" if row.result == "running" and row.stage else f" in {row.stage}" if row.stage else ""
    words = {True: ", published" + (f", replacing {row.replaced}" if row.replaced else ""), False: ", not published", None: ""}
    served = words[row.published if row.result == "succeeded" else None]
    reason = row.reason if len(row.reason) <= LONGEST_REASON else f"{row.reason[: LONGEST_REASON - 1]}…"
    return plain(f"{row.result}{at}{served}" + (f": {' '.join(reason.split())}" if reason else ""))


def _executions(site: Site, limit: int) -> list[RunRow]:
    found = executions.newest(site, limit)
    _ = site.machine  # read once, before several threads need it
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda execution: _row(site, execution), found))


def _row(site: Site, execution: Execution) -> RunRow:
    files = site.files(execution.run)
    if execution.running:
        events: list[Event] = []
        read_history(site, execution.arn, events)
        tracker = Tracker(files)
        tracker.update(events)
        result, reason = "running", ""
        stage = tracker.running.stage.value if tracker.running else tracker.waiting and "lock"
    else:
        result, stage, reason = _ended(execution)
    if result == "failed" and stage in set(Stage):
        failure = read_failure(files, Stage(stage))
        if failure is not None and _within(failure.time, execution.started, execution.stopped):
            reason = failure.what
    return RunRow(
        run=execution.run,
        execution=execution.name,
        share=str(execution.given.get("share") or site.machine.deployment.config.get("share", "manual")),
        started=execution.started.astimezone(timezone.utc).isoformat(),
        seconds=((execution.stopped or datetime.now(timezone.utc)) - execution.started).total_seconds(),
        result=result,
        stage=stage,
        reason=reason,
        **_numbers(files, execution.stopped, over=not execution.running),
    )


def _ended(execution: Execution | RunEnding) -> tuple[str, str, str]:
    """Return result, stage and reason, from the execution alone."""
    if execution.status == "SUCCEEDED":
        return "succeeded", "", ""
    if execution.status == "ABORTED":
        return "aborted", "", execution.cause
    if execution.error == GATE_REFUSED:
        return "refused", "", execution.cause
    # `train: States.TaskFailed`, `train (wait): ...`, or an error of the machine's own.
    stage = re.split("[ :]", execution.error)[0]
    if stage in set(Stage):
        return "failed", stage, execution.cause
    return "failed", "", f"{execution.error}: {execution.cause}" if execution.error else execution.status


def _numbers(files: RunFiles, until: datetime | None, *, over: bool) -> dict[str, Any]:
    """Return what evaluate, publish and report found by the end of an execution, later ones of the same run left out.

    Args:
        until: the execution's end; None: there is no later one.
        over: the execution has ended, so it publishes nothing more.
    """
    results = {stage: read_result(files, stage) for stage in (Stage.EVALUATE, Stage.PUBLISH, Stage.REPORT)}
    metrics = {
        stage: result.metrics
        for stage, result in results.items()
        if result and (until is None or _within(result.finished, None, until))
    }
    scores, publication, report = (metrics.get(stage, {}) for stage in results)
    published = bool(publication.get("published")) if Stage.PUBLISH in metrics else False if scores and over else None
    replaced, usd = publication.get("replaced"), number(report, "cost", "usd")
    metric = next((name for name in SHOWN_METRICS if name in scores.get("new", {})), SHOWN_METRICS[0])
    return {
        "metric": metric,
        "baseline": number(scores, "baseline", metric),
        "new": number(scores, "new", metric),
        "published": published,
        "replaced": replaced if published and isinstance(replaced, str) else None,
        "usd": usd,
        "at_most": usd is not None and bool(number(report, "cost", "at_most")),
    }


def _within(moment: str, first: datetime | None, last: datetime | None) -> bool:
    try:
        when = datetime.fromisoformat(moment)
        return (first is None or when >= first) and (last is None or when <= last)
    except (ValueError, TypeError):
        return False


def _stored(state: Path) -> Iterator[RunRow]:
    """Yield each run's newest execution from the files of a state folder."""
    for path in (path for path in (state / "bucket/runs").glob("*/input.json") if RUN_ID_PATTERN.fullmatch(path.parent.name)):
        files = LocalFiles(path.parent)
        given = json_object(files.read(IN_FOLDER.input))
        execution = str(given.get("execution_arn", "")).rpartition(":")[2] or path.parent.name
        started = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        result, stage, reason = _ended(judge(files, started))
        written = [
            found.modified - started.timestamp()
            for stage in Stage
            for name in (IN_FOLDER.result(stage), IN_FOLDER.failure(stage))
            for found in files.listed(name)
        ]
        yield RunRow(
            run=path.parent.name,
            execution=execution,
            share=str((given.get("execution") or {}).get("share") or "manual"),
            started=started.isoformat(),
            seconds=max((after for after in written if after >= 0), default=None),
            result=result,
            stage=stage,
            reason=reason,
            **_numbers(files, None, over=True),
        )
