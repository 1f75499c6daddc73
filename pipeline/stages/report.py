"""report: one self-contained HTML page per run, after success, refusal and failure alike, and the history of the registry name.

Reads whatever the run folder holds, and last week's plan; a piece that is missing or unreadable is shown as such and never fails
the run. Writes `report/index.html`, and what pipeline/stages/history keeps. Everything shown passes through the template's
escaping.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from pipeline import store
from pipeline.config import Deployment, RunConfig, RunInput, flattened, merge
from pipeline.contract import (
    COMPILED_APART,
    REGISTRY_NAME_PATTERN,
    STAGES,
    UNUSUAL,
    Artifact,
    RunPaths,
    Stage,
    StageFailure,
    StageResult,
    now,
)
from pipeline.cost import Bill, NodeAttempt, StageUse, stage_use
from pipeline.errors import ExitCode, TrnpipeError
from pipeline.evaluation.classification import ACCURACY, MACRO_F1
from pipeline.evaluation.retrieval_metrics import METRICS
from pipeline.log import log
from pipeline.plan import DataProfile, EmbedPlan, RunPlan
from pipeline.run.context import StageContext, StageOutput
from pipeline.stages.charts import Chart, bar, line_chart
from pipeline.stages.history import EndedRun, keep_history
from pipeline.stages.pages import READS_AT_ONCE, figures_of, inside, is_number, render_page, time_of

MOST_LINES = 3
"""Lines of a chart that have a colour of their own."""
INTERVAL = ("low", "value", "high")
PROFILED = (
    ("rows of new shards", "rows", 0),
    ("median tokens of queries", "median_query", 0),
    ("median tokens of documents", "median_document", 0),
    ("mean label", "mean_label", 3),
    ("share of repeated rows", "duplicates", 3),
    ("documents to embed", "documents", 0),
    ("documents gone", "documents_gone", 0),
)
"""Figures of the data's profile: words, attribute, digits."""
MOST_SHARES = 20
"""Locales, and tasks, of the table; a change of the others is smaller."""
Read = TypeVar("Read")


def run(context: StageContext) -> StageOutput | None:
    """Write the page, whatever is missing or unreadable."""
    context.heartbeat.beat(note="reading the run folder")
    record = read_run(context.paths)
    page = render(record)
    store.write_bytes(context.paths.report, page)
    if record.registry:
        try:
            keep_history(context.paths.bucket_root, record.registry, ended_run(record))
        except TrnpipeError as error:
            record.problems.append(f"history: {error.what}")
    log.info("report: %s: %s", record.verdict.headline, context.paths.report)
    if record.plan is None and store.exists(context.paths.plan):
        return None  # a result names its plan, and this one cannot be read
    return StageOutput(
        outputs={"report": Artifact(context.paths.report, store.sha256(context.paths.report), len(page))},
        metrics={
            "verdict": record.verdict.kind,
            "headline": record.verdict.headline,
            "missing": record.problems[:20],
            "cost": record.bill.metrics(),
            "registry": record.registry,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """How the run ended.

    Attributes:
        kind: `published`, `finished` (publishes nowhere), `refused`, `failed` or `unfinished`.
        headline: a few words.
        reason: one sentence.
        stage: the stage where it ended, unless it went through.
    """

    kind: str
    headline: str
    reason: str
    stage: Stage | None = None


@dataclass(kw_only=True)
class RunRecord:
    """The content of the run folder, as far as it could be read.

    Attributes:
        files: URIs of everything in the run folder.
        problems: pieces that are there but could not be read, with the reason.
        asked: the run's configuration, or the part of it that was asked for where there is no plan.
        last: the plan of last week's run.
        changes: see pipeline/evaluation/changes.
    """

    paths: RunPaths
    plan: RunPlan | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    last: RunPlan | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    results: dict[Stage, StageResult] = field(default_factory=dict)
    failures: dict[Stage, StageFailure] = field(default_factory=dict)
    scorecard: dict[str, Any] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    deployment: Deployment = field(default_factory=Deployment)
    uses: list[StageUse] = field(default_factory=list)

    @property
    def registry(self) -> str | None:
        """The registry name whose history has the run; None: it publishes nowhere, or left nothing that says where."""
        name = self.asked.get("registry", RunConfig.model_fields["registry"].default) if self.asked else None
        return name if REGISTRY_NAME_PATTERN.fullmatch(str(name)) and name else None

    @property
    def bill(self) -> Bill:
        return Bill(uses=tuple(self.uses), prices=self.deployment.prices.by_queue())

    @property
    def verdict(self) -> RunVerdict:
        """How the run ended, by the records of its stages. A published model counts, whatever failed on the way."""
        gate, publish = _gate(self), self.metrics(Stage.PUBLISH)
        if publish and not publish.get("again"):
            if publish.get("refused"):
                return RunVerdict(kind="refused", headline="Refused", reason=str(publish["refused"]), stage=Stage.EVALUATE)
            if publish.get("published"):
                return RunVerdict(kind="published", headline="Published", reason=str(gate.get("reason", "")).strip())
            return RunVerdict(kind="finished", headline="Finished", reason="The run publishes nowhere (registry: null).")
        if self.failures:
            stage, failure = list(self.failures.items())[-1]
            headline = "Superseded" if failure.exit_code == ExitCode.SUPERSEDED else f"Failed in {stage}"
            return RunVerdict(kind="failed", headline=headline, reason=failure.what, stage=stage)
        if gate.get("verdict") == "refused":
            return RunVerdict(kind="refused", headline="Refused", reason=str(gate.get("reason", "")), stage=Stage.EVALUATE)
        missing = [stage for stage in Stage if stage not in {*self.results, *self.skipped, Stage.REPORT}]
        return RunVerdict(
            kind="unfinished",
            headline="Not finished",
            reason=f"{missing[0]} left neither a result nor a failure.",
            stage=missing[0],
        )

    @property
    def skipped(self) -> set[Stage]:
        """Stages that the state machine goes past: no shard is to be ingested, or mined for; no set to be compiled; a refresh."""
        if self.plan and self.plan.config.mode == "refresh":
            training = {Stage.HEALTH_CHECK, Stage.COMPILE, Stage.TRAIN, Stage.EVALUATE}
            return {Stage.INGEST, *UNUSUAL, *training} - {*self.results}
        nothing: dict[Stage, tuple[Stage, str, Any]] = {
            Stage.INGEST: (Stage.PREPARE, "ingest_children", 0),
            **dict.fromkeys(COMPILED_APART, (Stage.PLAN, "precompile", False)),
            Stage.COMPILE: (Stage.PLAN, "compile", False),
        }
        found = {stage for stage, (said_by, key, value) in nothing.items() if self.metrics(said_by).get(key) == value}
        return found if self.metrics(Stage.PREPARE).get("mine_children") else {*found, Stage.MINE}

    def metrics(self, stage: Stage) -> dict[str, Any]:
        """A stage's metrics, empty if it has no result."""
        return self.results[stage].metrics if stage in self.results else {}


def read_run(paths: RunPaths) -> RunRecord:
    """Collect the pieces. Absent ones stay empty; unreadable ones are listed in `problems`."""
    record = RunRecord(paths=paths, files=[info.uri for info in store.list_objects(paths.root)])
    present = set(record.files)

    def read(uri: str, parse: Callable[[bytes], Read]) -> Read | None:
        try:
            return parse(store.read_bytes(uri)) if uri in present else None
        except (TrnpipeError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            reason = error.what if isinstance(error, TrnpipeError) else f"{type(error).__name__}: {error}".splitlines()[0]
            record.problems.append(f"{uri.removeprefix(paths.root + '/')}: {reason}")
            return None

    record.plan = read(paths.plan, RunPlan.from_json)
    if record.plan and (embed := read(paths.embed_plan, EmbedPlan.from_json)):
        record.plan = record.plan.model_copy(update={"embed": embed})
    for stage in Stage:
        result = read(paths.result(stage), StageResult.from_json)
        # A result of another plan does not count, for this page as for every stage; one from before the plan names none.
        if result and stage is not Stage.REPORT and result.fingerprint in ("", record.plan and record.plan.fingerprint_of(stage)):
            record.results[stage] = result
        failure = read(paths.failure(stage), StageFailure.from_json)
        if failure and stage is not Stage.REPORT:
            record.failures[stage] = failure
    if record.plan and record.plan.lineage:
        last = RunPaths(f"{paths.bucket_root}/runs/{record.plan.lineage[-1]}").plan
        present |= {last} if store.exists(last) else set()
        record.last = read(last, RunPlan.from_json)
    record.scorecard = read(paths.scorecard, _object) or {}
    record.changes = read(paths.query_changes, _object) or {}
    record.training = read(paths.metrics, _json_lines) or []
    nodes = record.plan.world.nodes if record.plan else 1
    health = (read(paths.node_health(node), _node_health) for node in range(nodes))
    record.nodes = [{"node": node, **found} for node, found in enumerate(health) if found]
    monitors = (read(paths.host_monitor(node), partial(host_use, node)) for node in range(nodes))
    record.hosts = [found for found in monitors if found and found["hosts"]]
    started_with = read(paths.input, RunInput.model_validate_json) or RunInput()
    record.deployment, asked = started_with.deployment, merge(started_with.deployment.config, started_with.execution)
    record.asked = record.plan.config.model_dump(mode="json") if record.plan else asked
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for stage in Stage:
            uris = [uri for uri in record.files if uri.startswith(f"{paths.attempts(stage)}/")]
            attempts = [found for found in pool.map(partial(read, parse=NodeAttempt.from_json), uris) if found]
            if use := stage_use(stage, attempts, datetime.now(timezone.utc)):
                record.uses.append(use)
    return record


def host_use(node: int, data: bytes) -> dict[str, Any]:
    """Return the use of one node's host while training, from its lines (pipeline/sdk/monitor.py).

    Returns:
        hosts: names, in the order in which attempts used them; utilization: (time, percent) of its cores, a point per line, and
        their mean; low, high: the least and most used core's percent, over all lines; device_memory, host_memory: most bytes in
        use, None: not known; corrected, uncorrected: memory errors that the devices counted; errors: kind of failed execution ->
        count, without the zeros.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ArithmeticError: not the lines of a monitor.
    """
    lines = _json_lines(data)
    used = [(float(line["time"]), line["utilization"]) for line in lines if "utilization" in line]
    utilization = [(moment, float(shares["mean"])) for moment, shares in used]
    errors: Counter[str] = Counter()
    worst: dict[tuple[str, str], int] = {}
    for line in lines:
        errors.update({kind: int(count) for kind, count in line["errors"].items()})
        for counter, count in line["ecc"].items():
            # Counters only rise on one host, and start anew on the next.
            worst[line["host"], counter] = max(int(count), worst.get((line["host"], counter), 0))
    uncorrected = sum(count for (_, counter), count in worst.items() if counter.endswith("_uncorrected"))
    return {
        "node": node,
        "hosts": list(dict.fromkeys(str(line["host"]) for line in lines)),
        "utilization": utilization,
        "mean": fmean(share for _, share in utilization) if utilization else None,
        "low": min((float(shares["min"]) for _, shares in used), default=None),
        "high": max((float(shares["max"]) for _, shares in used), default=None),
        "device_memory": max((int(line["device_memory_bytes"]) for line in lines if line["device_memory_bytes"]), default=None),
        "host_memory": max((int(line["host_memory_bytes"]) for line in lines if line["host_memory_bytes"]), default=None),
        "corrected": sum(worst.values()) - uncorrected,
        "uncorrected": uncorrected,
        "errors": {kind: count for kind, count in errors.items() if count},
    }


def states(record: RunRecord) -> list[dict[str, Any]]:
    """Return stage, status, duration and place on one time axis of the stages in their order, None where unknown."""
    verdict, spans = record.verdict, {}
    # The report itself is the last one.
    for stage in [one for one in Stage if one not in UNUSUAL or one not in record.skipped][:-1]:
        result, failure = record.results.get(stage), record.failures.get(stage)
        if result:
            status = "refused" if verdict.kind == "refused" and stage is verdict.stage else "done"
            spans[stage] = status, time_of(result.started), time_of(result.finished)
        elif failure:
            spans[stage] = "failed", None, time_of(failure.time)
        else:
            status = "skipped" if stage in record.skipped else "not finished" if stage is verdict.stage else "not reached"
            spans[stage] = status, None, None
    moments = [moment.timestamp() for _, *span in spans.values() for moment in span if moment]
    found = []
    for stage, (status, started, finished) in spans.items():
        begin, end = started or finished, finished or started
        placed = bar(begin.timestamp(), end.timestamp(), min(moments), max(moments)) if begin and end else None
        found.append(
            {
                "stage": stage,
                "status": status,
                "started": started,
                "finished": finished,
                "duration": finished - started if started and finished else None,
                "bar": placed,
            }
        )
    return found


def render(record: RunRecord) -> bytes:
    """Return the page."""
    plan, scores = record.plan, record.scorecard or record.metrics(Stage.EVALUATE)
    rules = gate_rules(_gate(record), scores)
    timeline = states(record)
    moments = moments_of(timeline)
    return render_page(
        "report.html.j2",
        title=(plan.config.report.title if plan else None) or f"Run {record.paths.run_id}",
        record=record,
        run_id=record.paths.run_id,
        root=record.paths.root,
        plan=plan,
        written=now(),
        verdict=record.verdict,
        failure=record.failures.get(record.verdict.stage) if record.verdict.stage else None,
        states=timeline,
        metrics={stage.value: record.metrics(stage) for stage in Stage},
        took=max(moments) - min(moments) if moments else None,
        refused_rows=plan.train.bad_rows + (plan.embed.bad_rows if plan.embed.source == "corpus" else 0) if plan else None,
        gate=_gate(record),
        rules=rules,
        rule_whiskers=whiskers({str(number): rule["change"] for number, rule in enumerate(rules)}),
        data=compared_data(plan.profile, record.last.profile if record.last else None) if plan and plan.profile else [],
        settings=changed_settings(record.asked, record.last.config) if record.last else [],
        scores=scores,
        metric_names=(*METRICS, ACCURACY, MACRO_F1),
        baseline="Published" if plan and plan.published else "Parent",
        whiskers=whiskers(changes if isinstance(changes := scores.get("difference"), Mapping) else {}),
        charts=training_charts(record.training, plan.config.gate.metric_of_each if plan else METRICS[0]),
        utilization=utilization_chart(record.hosts),
        bill=record.bill,
        queues={stage: spec.queue for stage, spec in STAGES.items()},
        configuration=json.dumps(plan.config.model_dump(mode="json"), indent=2) if plan else "",
        versions=_versions(record),
        shown_shards=50,
        files=_files(record),
    )


def training_charts(logged: list[dict[str, Any]], metric: str) -> list[Chart]:
    """Return the curves of training: the loss, and the gate's metric on part of the hold-out, as far as they were logged."""
    steps = [line for line in logged if isinstance(line.get("step"), int)]
    curves = {"Training loss": ("loss",), f"{metric} on part of the hold-out": ("validation", metric)}
    charts = (
        line_chart(
            {keys[-1]: [(line["step"], value) for line in steps if isinstance(value := inside(line, *keys), float)]},
            x_label="step",
            y_label=y_label,
        )
        for y_label, keys in curves.items()
    )
    return [chart for chart in charts if chart]


def utilization_chart(hosts: list[dict[str, Any]]) -> Chart | None:
    """Return the utilization of the cores: a line per node, or for many nodes the least busy one, the mean and the busiest."""
    start = min((moment for host in hosts for moment, _ in host["utilization"]), default=0.0)
    series: dict[str, list[tuple[float, float]]] = {
        f"node {host['node']}": [((moment - start) / 60, share) for moment, share in host["utilization"]] for host in hosts
    }
    if len(series) > MOST_LINES:
        minutes: dict[int, list[float]] = {}
        for points in series.values():
            for minute, share in points:
                minutes.setdefault(int(minute), []).append(share)
        in_order = sorted(minutes.items())
        series = {
            "lowest node": [(minute, min(shares)) for minute, shares in in_order],
            "mean": [(minute, sum(shares) / len(shares)) for minute, shares in in_order],
            "highest node": [(minute, max(shares)) for minute, shares in in_order],
        }
    return line_chart(series, x_label="minutes", y_label="Utilization of the cores, percent")


def whiskers(differences: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return, by metric, the places of its interval, its value, zero and the allowed drop on one common scale, in percent."""
    intervals = {
        metric: figures
        for metric, change in differences.items()
        if all(key in (figures := figures_of(change, *INTERVAL, "allowed")) for key in INTERVAL)
    }
    extent = max((abs(figures[key]) for figures in intervals.values() for key in INTERVAL), default=0.0) or 1.0
    return {
        metric: {"zero": 50.0, **{key: round(50 + 46 * value / extent, 2) for key, value in figures.items()}}
        for metric, figures in intervals.items()
    }


def gate_rules(gate: Mapping[str, Any], scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every rule of the gate in its order: the primary one, that against the reference, and the guardrails.

    Returns:
        name, metric, verdict, allowed; scores: with the `queries` and `units` that it judges; bound: `at_least` or `at_most`;
        change: the difference with its bounds and the allowed drop, of which `whiskers` makes the interval.
    """
    budget, guardrails, metric = gate.get("reference"), gate.get("guardrails"), gate.get("metric")
    bound = "at_least" if gate.get("undecided") == "refuse" else "at_most"
    rules: list[tuple[Any, Any, str, Mapping[str, Any]]] = [
        ("all queries", scores, bound, {**gate, "verdict": gate.get("primary")}),
        *([("all weeks", scores.get("reference"), bound, {"metric": metric, **budget})] if isinstance(budget, Mapping) else []),
        *(
            (rule.get("slice"), inside(scores, "slices", rule.get("slice")), "at_most", rule)
            for rule in (guardrails if isinstance(guardrails, list) else ())
            if isinstance(rule, Mapping)
        ),
    ]
    return [
        {
            **{key: rule.get(key) for key in ("metric", "verdict", "allowed")},
            "name": name,
            "scores": found,
            "bound": bound,
            "change": {**change, "allowed": -rule["allowed"] if is_number(rule.get("allowed")) else None},
        }
        for name, found, bound, rule in rules
        if isinstance(change := inside(found, "difference", rule.get("metric")), Mapping)
    ]


def compared_data(profile: DataProfile, last: DataProfile | None) -> list[tuple[str, float | None, float | None, int]]:
    """Return the data's profile as (name, this week's figure, last week's, digits); the shares that changed most come first.

    Args:
        last: None: unknown.
    """
    figures = [(what, getattr(profile, name), getattr(last, name, None), digits) for what, name, digits in PROFILED]
    shares = [
        (f"share of {name[:-1]} {key}, %", 100 * found.get(key, 0.0), 100 * before.get(key, 0.0) if last else None, 1)
        for name in ("locales", "tasks")
        for found, before in [(getattr(profile, name), getattr(last, name, {}))]
        for key in sorted({*found, *before} - {""})
    ]
    return figures + sorted(shares, key=lambda row: -abs(row[1] - (row[2] or 0.0)))[:MOST_SHARES]


def changed_settings(asked: Mapping[str, Any], last: RunConfig) -> list[list[str]]:
    """Return key, last week's value and this week's of every setting that differs, values as JSON."""
    both = flattened(last.model_dump(mode="json")), flattened(asked)
    return [
        [key, *(json.dumps(values.get(key), ensure_ascii=False) for values in both)]
        for key in sorted({*both[0], *both[1]})
        if both[0].get(key) != both[1].get(key)
    ]


def ended_run(record: RunRecord) -> EndedRun:
    """Return the run's record for the history of its registry name."""
    verdict, gate, bill = record.verdict, _gate(record), record.bill
    metric, moments = str(gate.get("metric") or ""), moments_of(states(record))
    mode = "rollback" if record.asked.get("rollback") else str(record.asked.get("mode", "train"))
    changes = {
        "difference": inside(record.scorecard, "difference", metric),
        "reference": inside(record.scorecard, "reference", "difference", str(inside(gate, "reference", "metric") or metric)),
    }
    return EndedRun(
        run=record.paths.run_id,
        time=record.plan.created if record.plan else min(moments).isoformat() if moments else now(),
        mode=mode,
        outcome={"published": "accepted" if mode == "train" else mode, "refused": "refused"}.get(verdict.kind, "failed"),
        headline=verdict.headline,
        reason=verdict.reason,
        metric=metric,
        reference=(record.plan and record.plan.reference) or "",
        at_most=bill.at_most,
        figures={
            **figures_of(gate, "baseline", "new"),
            **{
                f"{name}{end}": value
                for name, change in changes.items()
                for key, end in (("value", ""), ("low", "_low"), ("high", "_high"))
                for value in figures_of(change, key).values()
            },
            **figures_of(record.metrics(Stage.PUBLISH), "documents"),
            **(figures_of({"usd": bill.usd, "node_hours": bill.node_hours}, "usd", "node_hours") if record.uses else {}),
            **({"seconds": (max(moments) - min(moments)).total_seconds()} if moments else {}),
            **figures_of(record.scorecard.get("drift"), "cosine", "cosine_p1", "overlap@10", "new_on_old"),
        },
    )


def moments_of(timeline: list[dict[str, Any]]) -> list[datetime]:
    """Return when stages started and finished, as far as it is known."""
    return [moment for state in timeline for moment in (state["started"], state["finished"]) if moment]


def _gate(record: RunRecord) -> Mapping[str, Any]:
    return gate if isinstance(gate := record.metrics(Stage.EVALUATE).get("gate"), Mapping) else {}


def _versions(record: RunRecord) -> dict[str, str]:
    """Return package -> version, with the stages where versions differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for stage, result in record.results.items():
        for package, version in result.versions.items():
            found.setdefault(package, {}).setdefault(str(version), []).append(stage.value)
    return {
        package: ", ".join(
            f"{version} ({', '.join(stages)})" if len(versions) > 1 else version for version, stages in versions.items()
        )
        for package, versions in sorted(found.items())
    }


def _files(record: RunRecord) -> list[tuple[str, str]]:
    """Return (name relative to the run folder, description) of the files and folders worth opening."""
    paths = record.paths
    described = {
        paths.plan: "every decision about this run",
        paths.quarantine: "input rows that were refused, with the reason",
        paths.metrics: "every logged training step",
        paths.host_monitor(0).rsplit("/", 1)[0]: "the use of the hosts, a line per minute",
        paths.tensorboard: "the same for TensorBoard",
        paths.scorecard: "all evaluation numbers",
        paths.model: "the model, a sentence-transformers folder",
        paths.embed_manifest: "the embeddings: every part with its checksum, and the lists of documents without one",
    }
    return [
        (uri.removeprefix(f"{paths.root}/"), what)
        for uri, what in described.items()
        if any(found == uri or found.startswith(f"{uri}/") for found in record.files)
    ]


def _object(data: bytes) -> dict[str, Any]:
    loaded = json.loads(data)
    if not isinstance(loaded, dict):
        raise ValueError("not a JSON object")
    return loaded


def _node_health(data: bytes) -> dict[str, Any]:
    record = _object(data)
    if not isinstance(record.get("tests"), list):
        raise ValueError("no list of tests")
    return record


def _json_lines(data: bytes) -> list[dict[str, Any]]:
    return [_object(line) for line in data.splitlines() if line.strip()]
