"""evaluate: rank the hold-out's candidates with the new model and the baseline, and say whether the new one may be published.

The baseline is the published model, which the new one would replace, or the parent while nothing is published. A parent that is a
third model is measured too, for the reader. Reads these models and `prepare/rows`; writes everything to
`evaluate/scorecard.json`, and what each query got with the new model to `evaluate/queries.parquet` (`trnpipe parity` compares it
with another run's). The verdict is part of the result: the stage ends with 0 either way, and the state machine's Choice acts on
what it says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from pipeline import store
from pipeline.backends.device import Device, open_device
from pipeline.config import ModelConfig, RunConfig
from pipeline.contract import EAGER_KINDS, Artifact, Metric
from pipeline.dataset.row_files import HOLDOUT_FILES, PUBLISHED, read_table
from pipeline.errors import BadData
from pipeline.evaluation.gate import check_holdout, judge_model
from pipeline.evaluation.query_values import QueryKey, QueryValues
from pipeline.evaluation.retrieval import METRICS, retrieve
from pipeline.evaluation.statistics import Values, bootstrap
from pipeline.graphs.compiled import encode_function, known_graphs
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.model.folder import WEIGHTS, load_encoder, own_form
from pipeline.model.inference import encode
from pipeline.plan import Published, RunPlan
from pipeline.run.context import StageContext, StageOutput

log = logging.getLogger("trnpipe")

PerQuery = dict[str, Values]
"""Metric -> its value for every query, in the order of `Holdout.queries`."""


def run(context: StageContext) -> StageOutput:
    """Compare the models on the whole hold-out.

    Raises:
        BadConfig: the hold-out is smaller than the gate asks for.
        BadData: a model whose embeddings are not finite.
    """
    plan, config = context.plan, context.plan.config
    holdout = read_holdout(context)
    check_holdout(len(holdout.queries), config.gate)
    threads = config.device.threads_per_rank
    device = open_device(plan.world.kind, plan.world.precision, context.world, threads=threads, inference=True)
    watch = GraphWatch(
        device=device,
        known=known_graphs(context),
        stop=config.compile.new_graphs == "stop",
        cloudwatch=context.cloudwatch,
    )
    started = time.monotonic()
    folders = {"parent": plan.parent.folder, "new": context.paths.model}
    measured = {name: measure(context, device, holdout, name, folder) for name, folder in folders.items()}
    new, baseline = measured["new"], measured["parent"]
    if plan.published and "published" in measured_models(plan):
        baseline = measured["published"] = measure_published(context, device, holdout, plan.published)
    seconds = time.monotonic() - started
    watch.check(0)
    graphs = watch.report(context) if plan.graphs else None
    device.close()

    scores = compare(baseline, new, samples=config.evaluate.bootstrap_samples, seed=config.seed)
    if baseline is not measured["parent"]:
        scores["parent"] = means(measured["parent"])
    gate = judge_model(scores, config.gate, plan.published)
    log.info("gate: %s: %s", gate["verdict"], gate["reason"])
    context.cloudwatch.write(
        {
            Metric.NDCG: scores["new"]["ndcg@10"],
            Metric.BASELINE_NDCG: scores["baseline"]["ndcg@10"],
            Metric.GATE_DROP: -gate["difference"],
        },
        Verdict=gate["verdict"],
    )
    counts = {"queries": len(holdout.queries), "candidates": len(holdout.candidates)}
    scorecard = {**counts, **scores, "gate": gate, "locales": compare_locales(baseline, new, holdout.locales, config)}
    store.write_json(context.paths.scorecard, scorecard)
    values = context.scratch / "queries.parquet"
    QueryValues(holdout.keys, new).write(values)
    written = store.upload(values, context.paths.query_values)
    weights = store.join(context.paths.model, WEIGHTS)
    models = {"parent": plan.parent, "published": plan.published}
    return StageOutput(
        inputs={
            **{name: Artifact(model.folder, model.sha256) for name, model in models.items() if model},
            "model": Artifact(weights, store.sha256(weights)),
        },
        outputs={
            "scorecard": Artifact(context.paths.scorecard, store.sha256(context.paths.scorecard)),
            "queries": written,
        },
        metrics={
            **counts,
            **scores,
            "gate": gate,
            "queries_per_second": len(measured) * len(holdout.queries) / seconds,
            "graphs": graphs,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Distinct queries of the hold-out with their relevant documents among the candidates.

    Attributes:
        queries: token ids of each query.
        candidates: token ids of each candidate document.
        relevant: per query, index of a relevant candidate -> its gain (> 0).
        keys: per query, what it is known by in other runs: the hash of its text, and its locale (None where rows have none).
    """

    queries: Sequence[Sequence[int]]
    candidates: Sequence[Sequence[int]]
    relevant: list[dict[int, float]]
    keys: tuple[QueryKey, ...]

    @property
    def locales(self) -> list[str | None]:
        return [locale for _, locale in self.keys]


def measured_models(plan: RunPlan) -> list[str]:
    """Return the models that are measured, in their order."""
    third = plan.published is not None and plan.published.folder != plan.parent.uri
    return ["parent", "new", *(["published"] if third else [])]


def read_holdout(context: StageContext, folder: str = "") -> Holdout:
    """Return the hold-out that prepare fixed, joined to its candidates.

    Args:
        folder: below `prepare/rows`, with a slash behind it; empty: the hold-out in the parent's tokens.

    Raises:
        BadData: a held-out document is not among the candidates.
    """
    tables = (store.join(context.paths.rows, f"{folder}{name}") for name in HOLDOUT_FILES)
    return join_holdout(*(read_table(store.local_file(uri, context.scratch / "rows" / folder)) for uri in tables))


def join_holdout(holdout: pa.Table, candidates: pa.Table) -> Holdout:
    """Group the hold-out's rows into distinct queries (text and locale). A query without a relevant document does not count."""
    position = {value: index for index, value in enumerate(candidates["document_hash"].to_pylist())}
    rows_of: dict[tuple[int, str | None], int] = {}
    relevant_of: dict[tuple[int, str | None], dict[int, float]] = {}
    columns = (holdout[name].to_pylist() for name in ("query_hash", "locale", "document_hash", "label"))
    for row, (query, locale, document, label) in enumerate(zip(*columns, strict=True)):
        if document not in position:
            raise BadData(
                "a held-out document is not among the candidates",
                value=f"row {row}",
                rule="candidates hold all hold-out documents",
            )
        if label > 0:
            gains = relevant_of.setdefault((query, locale), {})
            gains[position[document]] = max(label, gains.get(position[document], 0.0))
            rows_of.setdefault((query, locale), row)
    return Holdout(
        queries=holdout["query_tokens"].take(pa.array(rows_of.values(), pa.int64())).to_pylist(),
        candidates=candidates["document_tokens"].to_pylist(),
        relevant=[relevant_of[key] for key in rows_of],
        keys=tuple(rows_of),
    )


def measure_published(context: StageContext, device: Device, holdout: Holdout, published: Published) -> PerQuery:
    """Measure a published model that is not the parent, in its own form.

    The run's graphs are those of the new model. One of another form runs on the host's processor, in fp32, as only a run
    that changes the form needs it.
    """
    config = context.plan.config
    folder = store.local_folder(published.folder, context.scratch / "published")
    if published.own_tokens:
        holdout = read_holdout(context, f"{PUBLISHED}/")
    if not published.same_graphs:
        log.info("the published model has another form than the run's graphs: it runs on the host's processor")
        device = open_device("cpu", "fp32", context.world, threads=config.device.threads_per_rank, inference=True)
    return measure(context, device, holdout, "published", str(folder), own_form(folder, config.model))


def measure(
    context: StageContext, device: Device, holdout: Holdout, name: str, folder: str, form: ModelConfig | None = None
) -> PerQuery:
    """Return every metric of one model for every query.

    Args:
        name: one of `measured_models`.
        form: of the model, where it is another one than the run's.
    """
    config = context.plan.config
    context.heartbeat.beat(note=f"loading the {name} model")
    encoder = load_encoder(store.local_folder(folder, context.scratch / name), form or config.model)
    encode_with = encode_function(context, device, encoder)
    total = len(holdout.queries) + len(holdout.candidates)
    models = measured_models(context.plan)
    tokens = sum(map(len, chain(holdout.candidates, holdout.queries)))
    work = models.index(name) * tokens
    begun = time.monotonic()

    def vectors(token_lists: Sequence[Sequence[int]], before: int) -> Tensor:
        nonlocal work
        own = sum(map(len, token_lists))

        def beat(done: int, share: float) -> None:
            context.heartbeat.beat(
                before + done,
                total,
                work=work + share * own,
                total_work=len(models) * tokens,
                unit="texts",
                rate=(before + done) / max(time.monotonic() - begun, 1e-9),
                note=f"encoding with the {name} model",
            )

        shapes = config.embed.buckets, config.embed.tokens_per_batch
        found = encode(encode_with, device, token_lists, *shapes, on_progress=beat).embeddings
        work += own
        return found

    candidates = vectors(holdout.candidates, 0)
    queries = vectors(holdout.queries, len(holdout.candidates))
    context.heartbeat.beat(note=f"ranking with the {name} model")
    if device.kind in EAGER_KINDS:
        candidates, queries = candidates.to(device.torch_device), queries.to(device.torch_device)
    return retrieve(queries, candidates, holdout.relevant)


def means(values: PerQuery) -> dict[str, float]:
    """Return each metric's mean over the queries."""
    return {metric: float(values[metric].mean()) for metric in METRICS}


def compare(baseline: PerQuery, new: PerQuery, *, samples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the means of both models and the difference new - baseline with its paired bootstrap interval.

    Returns:
        `{baseline: {metric: mean}, new: {metric: mean}, difference: {metric: {value, low, high}}}`.
    """
    differences = np.stack([new[metric] - baseline[metric] for metric in METRICS], axis=1)
    low, high = bootstrap(differences, samples=samples, seed=seed)
    return {
        "baseline": means(baseline),
        "new": means(new),
        "difference": {
            metric: {"value": float(differences[:, column].mean()), "low": float(low[column]), "high": float(high[column])}
            for column, metric in enumerate(METRICS)
        },
    }


def compare_locales(
    baseline: PerQuery, new: PerQuery, locales: Sequence[str | None], config: RunConfig
) -> dict[str, dict[str, Any]]:
    """Return the same comparison for the queries of each locale; empty where rows have none."""
    scores = {}
    for locale in sorted({locale for locale in locales if locale is not None}):
        chosen = np.array([item == locale for item in locales])
        scores[locale] = {
            "queries": int(chosen.sum()),
            **compare(
                {metric: baseline[metric][chosen] for metric in METRICS},
                {metric: new[metric][chosen] for metric in METRICS},
                samples=config.evaluate.bootstrap_samples,
                seed=config.seed,
            ),
        }
    return scores
