"""`trnpipe parity`: compare the evaluations of two runs step by step, query by query: are they the same training?

The runs may differ in device type, precision and ranks, e.g. a run on Trainium and the GPU run of the same week. Everything that
decides what is learned must be equal: parent, rows, hold-out, global batch, settings. Reads run folders only: `plan.json`,
`train/validation/`, `train/metrics.jsonl`, and `evaluate/queries.parquet` where both have it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline import store
from pipeline.commands.terminal import left, right, say, simple_table
from pipeline.config import KeyRole, RunConfig, flattened, is_below, keys_of
from pipeline.contract import Queue, RunPaths, Stage
from pipeline.errors import BadConfig, BadData, ExitCode, MissingInput
from pipeline.evaluation.gate import ROUNDING
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.statistics import bootstrap
from pipeline.plan import RunPlan
from pipeline.run.find_run import find_run, read_plan
from pipeline.run.request import read_request

MIN_QUERIES = 2000
"""Fewer cannot show a difference of 0.1 % even between models whose queries hardly differ."""
HOLDOUT = "whole hold-out"
"""Name of the evaluate stage's evaluation, which has no step."""

FREE_SETTINGS = keys_of(KeyRole.BOOKKEEPING, RunConfig)
"""Settings, or sections of them, in which runs may differ. All others must be equal."""


class ParityVerdict(str, Enum):
    """`within`: no difference above the tolerance. `within noise`: some differences, but none is more than chance (95 %)."""

    WITHIN = "within"
    NOISE = "within noise"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A metric's means over the same queries in both runs, their difference b - a, and its paired bootstrap interval (95 %)."""

    a: float
    b: float
    difference: float
    low: float
    high: float

    def exceeds(self, tolerance: float) -> bool:
        return abs(self.difference) > tolerance + ROUNDING

    @property
    def is_chance(self) -> bool:
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of both runs.

    Attributes:
        step: optimizer steps done; None: the evaluate stage, with the finished models on the whole hold-out.
    """

    step: int | None
    queries: int
    metrics: dict[str, Comparison]

    @property
    def name(self) -> str:
        return HOLDOUT if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The result of a comparison.

    Attributes:
        runs: A and B, each `{run, uri, device, precision, ranks}`, with what `price_performance` returns.
        metric, tolerance: the verdict's; the tolerance is absolute, 0.001 = 0.1 %.
        reason: the verdict in one line.
        notes: limits of the comparison.
    """

    runs: list[dict[str, Any]]
    metric: str
    tolerance: float
    verdict: ParityVerdict
    reason: str
    notes: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.GATE_REFUSED if self.verdict is ParityVerdict.DIFFERS else ExitCode.DONE

    def largest(self) -> dict[str, tuple[str, float]]:
        """Return metric -> where its largest absolute difference is, and how large."""
        return {
            metric: max(
                ((evaluation.name, abs(evaluation.metrics[metric].difference)) for evaluation in self.evaluations),
                key=lambda found: found[1],
            )
            for metric in self.evaluations[0].metrics
        }

    def to_json(self) -> str:
        largest = {metric: {"at": at, "difference": value} for metric, (at, value) in self.largest().items()}
        return json.dumps({**asdict(self), "largest": largest}, indent=1)

    def print(self, console: Console) -> None:
        for name, run in zip("AB", self.runs, strict=True):
            say(console, f"{name}  {run['run']}: {run['device']}, {run['precision']}, {run['ranks']} ranks")
        table = simple_table(left("evaluation"), left("metric"), *map(right, ("A", "B", "B - A", "95 % interval")))
        for evaluation in self.evaluations:
            name = evaluation.name
            for metric, found in evaluation.metrics.items():
                values = [f"{found.a:.5f}", f"{found.b:.5f}", f"{found.difference:+.5f}", f"{found.low:+.5f} {found.high:+.5f}"]
                style = ("yellow" if found.is_chance else "red") if found.exceeds(self.tolerance) else ""
                table.add_row(name, metric, *values, style=f"{style} bold".strip() if metric == self.metric else style)
                name = ""
            table.add_section()
        console.print(table)
        prices = simple_table(left(""), left("hosts"), *map(right, ("price/h", "steps/s", "node-hours", "USD", self.metric)))
        for name, run in zip("AB", self.runs, strict=True):
            figures = [run["usd_per_hour"], run["steps_per_second"], run["node_hours"], run["usd"], run[self.metric]]
            prices.add_row(name, run["hosts"] or "", *("" if value is None else f"{value:,.4g}" for value in figures))
        console.print(prices)
        for metric, (at, value) in self.largest().items():
            say(console, f"largest difference of {metric}: {value:.5f} at {at}")
        for note in self.notes:
            say(console, f"note: {note}")
        say(console, f"{self.verdict.value}: {self.reason}", style="bold")


def compare_runs(
    a: str,
    b: str,
    *,
    metric: str | None = None,
    tolerance: float = 0.001,
    bucket: str | None = None,
    state: Path = Path(".trnpipe"),
) -> Parity:
    """Compare two runs.

    Args:
        a, b: run ids, or URIs of run folders (with a slash).
        metric: the one that decides; None: the first, nDCG@10, or the accuracy of classified texts.
        tolerance: largest absolute difference to tolerate.
        bucket: `s3://BUCKET` where run ids are looked up; None: the local run's bucket, as files in `state`.
        state: folder of the local run.

    Raises:
        MissingInput: a run, its evaluations or its metrics are not there.
        BadConfig: the runs are not the same training, or there is no such metric.
        BadData: a file of a run cannot be read.
    """
    paths = [find_run(name, bucket, state)[0] for name in (a, b)]
    plans = [read_plan(found) for found in paths]
    _require_same_training(*plans)
    data, data_note = _compare_data(*paths)
    evaluations = tuple(_evaluations(*paths))
    known = evaluations[0].metrics
    metric = metric or next(iter(known))
    if metric not in known:
        raise BadConfig("there is no such metric", value=metric, rule=f"one of {', '.join(known)}")
    verdict, reason = (ParityVerdict.DIFFERS, data) if data else judge(evaluations, metric, tolerance)
    last = max(evaluation.step or 0 for evaluation in evaluations)
    steps = plans[0].train.steps
    notes = (
        (data_note, data_note),
        (last < steps, f"neither run has an evaluation after step {last} of {steps}: they have not ended"),
        (
            plans[0].config.train.dropout != 0.0,
            "dropout is on (train.dropout is not 0): every device type and every rank draws its own",
        ),
    )
    return Parity(
        runs=[
            {
                "run": plan.run,
                "uri": found.root,
                "device": plan.world.kind,
                "precision": plan.world.precision,
                "ranks": plan.world.ranks,
                **price_performance(found),
                **{name: getattr(compared, side) for name, compared in evaluations[-1].metrics.items()},
            }
            for side, found, plan in zip("ab", paths, plans, strict=True)
        ],
        metric=metric,
        tolerance=tolerance,
        verdict=verdict,
        reason=reason,
        notes=tuple(note for applies, note in notes if applies),
        evaluations=evaluations,
    )


def price_performance(run: RunPaths) -> dict[str, Any]:
    """Return what a run's training cost, as far as the run's files have it: `hosts` (instance type), `usd_per_hour` of a host,
    `steps_per_second`, `node_hours` and `usd` of training with all its attempts; else None."""
    results = (run.result(stage) for stage in (Stage.TRAIN, Stage.REPORT))
    train, report = (store.read_json(uri)["metrics"] if store.exists(uri) else {} for uri in results)
    deployment, own = read_request(run).deployment, report.get("cost", {}).get("stages", {}).get(Stage.TRAIN, {})
    return {
        "hosts": deployment.hosts.get(Queue.TRAIN),
        "usd_per_hour": deployment.prices.by_queue().get(Queue.TRAIN),
        "steps_per_second": train["steps"] / train["seconds"] if train.get("seconds") else None,
        "node_hours": own.get("node_hours"),
        "usd": own.get("usd"),
    }


def judge(evaluations: Sequence[Evaluation], metric: str, tolerance: float) -> tuple[ParityVerdict, str]:
    """Return the verdict on one metric over all evaluations, and the reason."""
    found = [(evaluation.name, evaluation.metrics[metric]) for evaluation in evaluations]
    beyond = [(name, item) for name, item in found if item.exceeds(tolerance)]
    proven = [(name, item) for name, item in beyond if not item.is_chance]
    name, largest = max(proven or beyond or found, key=lambda item: abs(item[1].difference))
    at = f"{metric} differs by {abs(largest.difference):.5f} at {name}"
    if proven:
        verdict = ParityVerdict.DIFFERS
        reason = (
            f"{at}, 95 % interval {largest.low:+.5f} to {largest.high:+.5f}, tolerance {tolerance:g}; "
            f"{len(beyond)} of {len(found)} evaluations exceed it, {len(proven)} by more than chance"
        )
    elif beyond:
        verdict = ParityVerdict.NOISE
        reason = f"{at}, tolerance {tolerance:g}; {len(beyond)} of {len(found)} evaluations exceed it, none by more than chance"
    else:
        verdict = ParityVerdict.WITHIN
        reason = (
            f"{metric} differs by at most {abs(largest.difference):.5f} ({name}), tolerance {tolerance:g}, "
            f"{len(found)} evaluations"
        )
    queries = min(evaluation.queries for evaluation in evaluations)
    if queries < MIN_QUERIES:
        reason += f"; {queries} queries cannot show 0.1 %, {MIN_QUERIES} can"
    return verdict, reason


def compare_values(a: QueryValues, b: QueryValues, step: int | None) -> Evaluation:
    """Compare the metrics of the same queries in both runs.

    Raises:
        BadConfig: other queries, or other metrics.
    """
    where = HOLDOUT if step is None else f"step {step}"
    if a.queries != b.queries:
        only_a, only_b = set(a.queries) - set(b.queries), set(b.queries) - set(a.queries)
        raise BadConfig(
            "the runs were evaluated on different queries",
            value=f"{where}: {len(only_a)} only in A, {len(only_b)} only in B, {len(set(a.queries) & set(b.queries))} in both",
            rule="the same hold-out queries in the same order (hashes of their texts, locales)",
        )
    if list(a.values) != list(b.values):
        raise BadConfig(
            "the runs were evaluated with different metrics",
            value=f"{where}: {', '.join(a.values)} | {', '.join(b.values)}",
            rule="the same metrics, that is, the same version of the evaluation",
        )
    differences = np.stack([b.values[metric] - a.values[metric] for metric in a.values], axis=1)
    low, high = bootstrap(differences, samples=1000, seed=0)
    return Evaluation(
        step=step,
        queries=len(a.queries),
        metrics={
            metric: Comparison(
                a=float(a.values[metric].mean()),
                b=float(b.values[metric].mean()),
                difference=float(differences[:, column].mean()),
                low=float(low[column]),
                high=float(high[column]),
            )
            for column, metric in enumerate(a.values)
        },
    )


def _require_same_training(a: RunPlan, b: RunPlan) -> None:
    first, second = (_training_facts(plan) for plan in (a, b))
    absent = object()
    if names := [name for name in {**first, **second} if first.get(name, absent) != second.get(name, absent)]:
        raise BadConfig(
            "the runs are not the same training",
            value=[f"{name}: {first.get(name)} | {second.get(name)}" for name in names],
            rule="one parent, the same rows, global batch and settings; device type, precision and ranks may differ",
            remedy="repeat one of the runs with the other's settings",
        )


def _training_facts(plan: RunPlan) -> dict[str, Any]:
    """Return name -> value of everything that decides what is learned and how it is measured."""
    files = {"training rows": "train.arrow", "held-out rows": "holdout.arrow", "classified texts": "classes.arrow"}
    digests = {name: plan.row_files[file].sha256[:16] for name, file in files.items() if file in plan.row_files}
    return {
        "parent": plan.parent.sha256,
        # Documents compete within one batch of all ranks, so accumulation makes no larger batch of this kind.
        "train.batch_size x ranks": plan.config.train.batch_size * plan.world.ranks,
        **digests,
        **{f"plan.train.{name}": value for name, value in plan.train.model_dump(exclude={"new", "replay"}).items()},
        **{f"plan.holdout.{name}": value for name, value in plan.holdout.model_dump(exclude={"decides"}).items()},
        **{
            key: value
            for key, value in flattened(plan.config.model_dump(mode="json")).items()
            if not is_below(key, FREE_SETTINGS)
        },
    }


def _evaluations(a: RunPaths, b: RunPaths) -> Iterator[Evaluation]:
    """Yield all evaluations in their order, the evaluate stage's last."""
    steps_a, steps_b = (_validation_steps(run) for run in (a, b))
    if steps_a != steps_b:
        raise MissingInput(
            "the runs were not evaluated at the same steps",
            value=[f"only in A: {sorted(steps_a - steps_b)}", f"only in B: {sorted(steps_b - steps_a)}"],
            rule="train/validation has a file for every evaluation of a finished training",
            remedy="wait until both have ended, or resume the interrupted one",
        )
    if not steps_a:
        raise MissingInput(
            "the runs have no evaluations to compare",
            value=[a.validations, b.validations],
            rule="training leaves a file per evaluation in train/validation",
            remedy="repeat the runs with this version",
        )
    files: list[tuple[str, str, int | None]] = [(a.validation(step), b.validation(step), step) for step in sorted(steps_a)]
    if all(store.exists(run.query_values) for run in (a, b)):
        files.append((a.query_values, b.query_values, None))
    with tempfile.TemporaryDirectory(prefix="trnpipe-parity-") as scratch:
        for uri_a, uri_b, step in files:
            first, second = (
                QueryValues.read(store.local_file(uri, Path(scratch) / name)) for name, uri in (("a", uri_a), ("b", uri_b))
            )
            yield compare_values(first, second, step)


def _validation_steps(run: RunPaths) -> set[int]:
    names = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(run.validations)}
    try:
        return {int(name.removeprefix("step-").removesuffix(".parquet")) for name in names}
    except ValueError as error:
        raise BadData("an unknown file among the evaluations", value=f"{run.validations}: {error}") from error


def _compare_data(a: RunPaths, b: RunPaths) -> tuple[str, str]:
    """Return how the batches differ, empty where they do not, and a note on how far they are equal."""
    first, second = (_data_digests(run) for run in (a, b))
    if not (common := sorted(first.keys() & second.keys())):
        return "", "batches were not compared: the runs have no digests of their data at a common step"
    # Digests are chained: equal ones say that all batches so far were equal.
    if other := next((step for step in common if first[step] != second[step]), None):
        equal = max((step for step in common if step < other), default=0)
        return f"other data between step {equal + 1} and step {other}", ""
    return "", f"batches are equal bit for bit up to step {common[-1]}"


def _data_digests(run: RunPaths) -> dict[int, str]:
    """Return step -> digest of all batches so far, from the lines of metrics."""
    try:
        lines = map(json.loads, store.read_bytes(run.metrics).splitlines())
        return {int(line["step"]): str(line["data_digest"]) for line in lines if "data_digest" in line}
    except (ValueError, TypeError, KeyError) as error:
        raise BadData("the run's metrics cannot be read", value=f"{run.metrics}: {error!r}") from error
