"""The history of a registry name: one record per run that ended, and the page that shows all of them.

Reads and writes `registry/NAME/runs/RUN.json`, a record that a resumed run replaces; writes `registry/NAME/index.html`. Refused
and failed runs leave their records, too: the registry's pointer and publications know only what was published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from pipeline import store
from pipeline.contract import Record, RunPaths, history_uri, now
from pipeline.errors import TrnpipeError
from pipeline.log import log
from pipeline.stages.charts import Chart, line_chart
from pipeline.stages.pages import READS_AT_ONCE, is_number, render_page

MOST_RUNS = 500
"""Runs on the page, the newest: more than a year of weekly runs and daily refreshes."""
MOST_REFERENCES = 3
"""Lines of one chart: as many as have a colour of their own."""
Series = tuple[str, Mapping[str, Sequence[str]]]
"""A line of a chart: a figure, and the values of attributes that its runs have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun(Record):
    """One run of the history.

    Attributes:
        time: when it was planned, ISO 8601 in UTC.
        mode: `train`, `refresh` or `rollback`.
        outcome: `accepted`, `refused`, `refresh`, `rollback`; `failed` is every end without a publication that no gate caused.
        headline, reason: of its report.
        metric: the gate's; empty if the model was not evaluated.
        reference: the run that is the reference; empty without one.
        at_most: `usd` and `node_hours` are upper bounds.
        report: of the run, as the page links to it; empty if it is gone.
        figures: as far as the run got: `baseline` and `new` (means of the metric), `difference` and `reference` (changes against
            the baseline and the reference, each also with `_low` and `_high`), `documents` (published), `usd`, `node_hours`,
            `seconds` (from the first stage's start to the last one's end), and evaluate's `drift`.
    """

    run: str
    time: str
    mode: str
    outcome: str
    headline: str
    reason: str
    metric: str = ""
    reference: str = ""
    at_most: bool = False
    report: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def keep_history(bucket_root: str, name: str, run: EndedRun) -> None:
    """Keep a run's record, and build the page of its registry name again.

    Raises:
        StorageRefused, Transient: of the storage.
    """
    page = history_uri(bucket_root, name)
    folder = f"{page.rpartition('/')[0]}/runs"
    store.write_bytes(f"{folder}/{run.run}.json", run.to_json())
    listed, shown = store.list_objects(folder), None
    # Runs may end at the same time. Each writes its record before it lists them all, and the one that writes the page last sees
    # every record now or when it looks again.
    while (versions := [(info.uri, info.version) for info in listed]) != shown:
        store.write_bytes(page, render_history(name, read_runs(bucket_root, listed), len(listed)))
        listed, shown = store.list_objects(folder), versions


def read_runs(bucket_root: str, listed: Sequence[store.ObjectInfo]) -> list[EndedRun]:
    """Return the newest runs, the oldest of them first; records that cannot be read are left out."""
    newest = sorted(listed, key=lambda info: info.modified)[-MOST_RUNS:]
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        return sorted(filter(None, pool.map(partial(_read_run, bucket_root), newest)), key=lambda run: run.time)


def _read_run(bucket_root: str, info: store.ObjectInfo) -> EndedRun | None:
    try:
        run = EndedRun.from_json(store.read_bytes(info.uri))
        report = RunPaths(store.join(bucket_root, "runs", run.run)).report
        return replace(run, report=f"../../{report[len(bucket_root) + 1 :]}" if store.exists(report) else "")
    except TrnpipeError as error:
        log.warning("history: %s is left out: %s", info.uri, error.what)
        return None


def render_history(name: str, runs: Sequence[EndedRun], kept: int) -> bytes:
    """Return the page.

    Args:
        runs: the oldest first.
        kept: number of records that there are.
    """
    return render_page(
        "history.html.j2",
        name=name,
        runs=runs,
        kept=kept,
        latest=next((run for run in reversed(runs) if run.outcome in ("accepted", "rollback")), None),
        counts=Counter(run.outcome for run in runs),
        charts=history_charts(runs) if runs else [],
        written=now(),
    )


def history_charts(runs: Sequence[EndedRun]) -> list[Chart]:
    """Return the charts over the runs, as far as any of them has figures."""
    metric = next((run.metric for run in reversed(runs) if run.metric), "metric")
    references = list(dict.fromkeys(run.reference for run in runs if "reference" in run.figures))[-MOST_REFERENCES:]
    cost = "usd" if any("usd" in run.figures for run in runs) else "node_hours"
    charts: dict[str, Mapping[str, Series]] = {
        "Change against the reference, 95 % interval": {
            f"run {name}": ("reference", {"reference": (name,)}) for name in references
        },
        f"{metric} on the week's hold-out": {"new": ("new", {}), "baseline": ("baseline", {})},
        "Published documents": {"documents": ("documents", {})},
        f"Cost of a run, {'USD' if cost == 'usd' else 'node-hours'}": {
            "weekly run": (cost, {"mode": ("train",)}),
            "refresh": (cost, {"mode": ("refresh", "rollback")}),
        },
        "Drift: documents before and after": {
            "mean cosine": ("cosine", {}),
            "1st percentile": ("cosine_p1", {}),
            "overlap@10": ("overlap@10", {}),
        },
    }
    return [chart for y_label, series in charts.items() if (chart := _chart(runs, y_label, series))]


def _chart(runs: Sequence[EndedRun], y_label: str, series: Mapping[str, Series]) -> Chart | None:
    """Return a chart with a dot per run that links to its report, and with the figure's interval where it has one."""
    clock = slice(11, 16) if runs[0].time[:10] == runs[-1].time[:10] else slice(10)
    dots = {
        name: [
            (x, run, [run.figures[key + end] for end in ("", "_low", "_high") if is_number(run.figures.get(key + end))])
            for x, run in enumerate(runs)
            if is_number(run.figures.get(key)) and all(getattr(run, attribute) in values for attribute, values in only.items())
        ]
        for name, (key, only) in series.items()
    }
    chart = line_chart(
        {name: [(x, figures[0]) for x, _, figures in each] for name, each in dots.items()},
        y_label=y_label,
        names=[run.time[clock] for run in runs],
        within=[figure for each in dots.values() for *_, figures in each for figure in figures],
    )
    return chart and {
        **chart,
        "dots": [
            {"line": number, "run": run, "figure": figures[0], "at": [chart["place"](x, figure) for figure in figures]}
            for number, each in enumerate(filter(None, dots.values()), 1)
            for x, run, figures in each
        ],
    }
