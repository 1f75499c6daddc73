"""evaluate: rank the hold-out's candidates with the new model and the baseline, and say whether the new one may be published.

The baseline is the published model, which the new one would replace, or the parent while nothing is published. A parent that is a
third model is measured too, for the reader; and the new one on the hold-out of the reference (pipeline/evaluation/reference).
Every model is ranked by vectors of the size that it is published with, and the new one by those of all its Matryoshka sizes, too.
Reads these models and `plan/rows`; writes everything to `evaluate/scorecard.json`, and what each query got with the new model to
`evaluate/queries.parquet` (`trnpipe parity` compares it with another run's); with `report.texts` the queries that changed most to
`evaluate/changes.json`. The verdict is part of the result: the stage ends with 0 either way, and the state machine's Choice acts
on what it says.

All ranks of the host share the work: each encodes some of the texts, and ranks all candidates for some of the queries. The new
model's vectors stay in `evaluate/vectors.npy`: once it is the published model, they are not computed again
(pipeline/evaluation/reuse).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline import store
from pipeline.backends.device import Device, open_device
from pipeline.config import ModelConfig, RunConfig
from pipeline.contract import EAGER_KINDS, Artifact, Metric
from pipeline.dataset.classes import NO_CLASS
from pipeline.dataset.golden import GOLDEN
from pipeline.dataset.row_files import PUBLISHED
from pipeline.dataset.tokens import TextTokenizer
from pipeline.evaluation.changes import largest_changes
from pipeline.evaluation.classification import ACCURACY, MACRO_F1, macro_f1
from pipeline.evaluation.drift import measure_drift
from pipeline.evaluation.exchange import exchange
from pipeline.evaluation.gate import judge_model
from pipeline.evaluation.holdout import Holdout, read_holdout, read_judged, read_texts
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.reference import REFERENCE, VALUES
from pipeline.evaluation.retrieval import Block, retrieve
from pipeline.evaluation.retrieval_metrics import METRICS
from pipeline.evaluation.reuse import published_vectors
from pipeline.evaluation.statistics import CONFIDENCE, Integers, Units, Values, resampled, weighted_means
from pipeline.evaluation.vectors import Vectors, kept_vectors, shortened, write_vectors
from pipeline.graphs.compiled import encode_function, known_graphs
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.log import log
from pipeline.model.classifier import load_classifier, places_of
from pipeline.model.folder import WEIGHTS, load_encoder, own_form
from pipeline.model.inference import TokenList, encode
from pipeline.model.inventory import read_dimensions, read_max_length
from pipeline.plan import RunPlan, own_parts
from pipeline.run.context import StageContext, StageOutput

PerQuery = dict[str, Values]
"""Metric -> its value for every query, in the order of `Holdout.queries`."""

VECTORS = "vectors-{}.npy"
"""The leader's local file with the vectors of a measured model."""

FRESH = "fresh"
"""Slice of the newest week's queries."""

DRIFT = "drift"
"""Slice of the documents: their vectors before and after (pipeline/evaluation/drift)."""

MIXED = "mixed"
"""Slice of all queries, of the new model, against the documents of the published one: for readers that mix them."""

BOUNDS = ("low", "high", "at_least", "at_most")


def run(context: StageContext) -> StageOutput | None:
    """Compare the models on the whole hold-out.

    Returns:
        The leader's output; None on the other ranks.

    Raises:
        BadData: a model whose embeddings are not finite.
    """
    plan, config = context.plan, context.plan.config
    context.heartbeat.beat(note="fetching rows")
    rows = store.local_folder(context.paths.rows, context.scratch / "rows")
    holdout = read_judged(rows, config)
    device = open_alone(context, plan.world.kind, plan.world.precision)
    watch = GraphWatch(
        device=device,
        known=known_graphs(context),
        stop=config.compile.new_graphs == "stop",
        cloudwatch=context.cloudwatch,
    )
    started = time.monotonic()
    models = models_to_measure(context, device, holdout, rows)
    total = sum(model.tokens for model in models)
    measured: dict[str, PerQuery] = {}
    encoded: dict[str, EncodedTexts] = {}
    done = 0
    for model in models:
        own = encode_texts(context, model, done, total)
        encoded[model.name] = share_vectors(context, model, own)
        measured[model.name] = measure(context, model, encoded[model.name])
        done += model.tokens
        if model.name == "new":
            sizes = measure_sizes(context, model, own, measured["new"])
    drift = None
    if plan.published:
        old_texts, new_texts = encoded.get("published", encoded["parent"]), encoded["new"]
        drift = measure_drift(old_texts.candidates, new_texts.candidates) if context.world.is_leader else None
        if old_texts.queries.shape[1] == new_texts.queries.shape[1] and holdout.candidates:
            measured[MIXED] = measure(context, replace(models[-1], name=MIXED), replace(old_texts, queries=new_texts.queries))
    golden = {
        f"{GOLDEN}:{one.name}": compare_on(context, rows / GOLDEN / one.name, one.name, models) for one in config.evaluate.sets
    }
    classified = compare_classes(context, rows, models, encoded)
    reference = None
    if plan.reference:
        exam = read_judged(rows / REFERENCE, config)
        # Most of its texts are in this week's hold-out, too.
        known = kept_vectors(context.scratch / VECTORS.format("new"), texts_of(exam))
        new_model = models[0]
        again = share_out(context, REFERENCE, new_model.folder, new_model.form, new_model.size, new_model.device, exam, known)
        own = encode_texts(context, again, done, done + again.tokens)
        measured[REFERENCE] = measure(context, again, share_vectors(context, again, own))
        reference = exam, QueryValues.read(rows / REFERENCE / VALUES)
    seconds = time.monotonic() - started
    watch.check(0)
    device.close()
    if not context.world.is_leader:
        return None
    graphs = watch.report(context) if plan.graphs else None

    new, parent = measured["new"], measured["parent"]
    baseline = measured.get("published", parent)
    every = np.ones(len(holdout.queries), np.bool_)
    scores = classified.pop("", None) or compare(baseline, new, holdout.units, every, config)
    if baseline is not parent:
        scores["parent"] = means(parent)
    slices = {name: compare(baseline, new, holdout.units, chosen, config) for name, chosen in slices_of(holdout).items()}
    slices |= {**golden, **classified}
    if reference:
        exam, before = reference
        scores[REFERENCE] = compare(
            before.of(exam.keys), measured[REFERENCE], exam.units, np.ones(len(exam.queries), np.bool_), config
        )
    drifted: dict[str, Any] = {}
    if drift:
        drifted[DRIFT] = {"queries": drift["documents"], "units": drift["documents"], "difference": drift.pop("difference")}
        if MIXED in measured:
            drifted[MIXED] = compare(baseline, measured[MIXED], holdout.units, every, config)
            drift["new_on_old"] = drifted[MIXED]["difference"][config.gate.metric]["value"]
    gate = judge_model({**scores, "slices": {**slices, **drifted}}, config.gate, plan.published)
    log.info("gate: %s: %s", gate["verdict"], gate["reason"])
    context.cloudwatch.write(
        {
            Metric.QUALITY: gate["new"],
            Metric.BASELINE_QUALITY: gate["baseline"],
            Metric.GATE_DROP: -gate["difference"],
            Metric.COSINE: (drift or {}).get("cosine", math.nan),
            Metric.NEIGHBOUR_OVERLAP: (drift or {}).get("overlap@10", math.nan),
        },
        Verdict=gate["verdict"],
    )
    counts = {
        "candidates": len(holdout.candidates),
        "reused": sum(int((model.place >= 0).sum()) for model in models),
    }
    store.write_json(
        context.paths.scorecard, {**counts, **scores, "sizes": sizes, "gate": gate, "slices": slices, "drift": drift}
    )
    if config.report.texts:
        ranked = {
            name: (measured[model.name][config.gate.metric], vectors[place])
            for name, model in (("before", models[-1]), ("after", models[0]))  # the last one is the baseline
            for place, vectors in [kept_vectors(context.scratch / VECTORS.format(model.name), model.texts)]
        }
        store.write_json(context.paths.query_changes, largest_changes(holdout, ranked, TextTokenizer(models[0].folder).decode))
    values = context.scratch / "queries.parquet"
    QueryValues(holdout.keys, new).write(values)
    written = store.upload(values, context.paths.query_values)
    weights = store.join(context.paths.model, WEIGHTS)
    inputs = {"parent": plan.parent, "published": plan.published}
    return StageOutput(
        inputs={
            **{name: Artifact(model.folder, model.sha256) for name, model in inputs.items() if model},
            "model": Artifact(weights, store.sha256(weights)),
        },
        outputs={
            "scorecard": Artifact(context.paths.scorecard, store.sha256(context.paths.scorecard)),
            "queries": written,
            "vectors": store.upload(context.scratch / VECTORS.format("new"), context.paths.vectors),
        },
        metrics={
            **counts,
            **scores,
            "gate": gate,
            "drift": drift,
            "refresh": embeds_alike(plan, models[-1].folder),
            "queries_per_second": len(measured) * len(holdout.queries) / seconds,
            "graphs": graphs,
        },
    )


def compare_on(context: StageContext, folder: Path, name: str, models: Sequence[MeasuredModel]) -> dict[str, Any]:
    """Compare the new model and its baseline on another hold-out; all ranks call it together.

    Args:
        folder: of its row files.
        name: for the ranks' files.
        models: as `models_to_measure` returns them: the new one first, the baseline last.
    """
    found = []
    for model in (models[-1], models[0]):
        exam = read_holdout(folder, tokens_of(context, model))
        again = share_out(context, f"{name}-{model.name}", model.folder, model.form, model.size, model.device, exam)
        found.append(measure(context, again, share_vectors(context, again, encode_texts(context, again, 0, again.tokens))))
    return compare(found[0], found[1], exam.units, np.ones(len(exam.queries), np.bool_), context.plan.config)


def compare_classes(
    context: StageContext, rows: Path, models: Sequence[MeasuredModel], encoded: Mapping[str, EncodedTexts]
) -> dict[str, Any]:
    """Compare the classifiers of the new model and its baseline; all ranks call it together.

    Args:
        rows: local folder of row files.
        models: as `models_to_measure` returns them: the new one first, the baseline last.
        encoded: model -> its vectors of the texts, where nothing else is measured.

    Returns:
        `task:NAME` -> what `compare` returns, of accuracy and macro F1. Without `baseline` and `difference`
        where the baseline has no classifier for the task. And "" -> that of all texts, where they are what is judged.
    """
    config = context.plan.config
    if not config.train.classes or not (exam := read_texts(rows)).queries:
        return {}
    predicted = []
    for model in (models[-1], models[0]):
        texts, name = encoded[model.name], f"{model.name}-texts"
        if model.holdout.classes is None:
            own_texts = read_texts(rows, tokens_of(context, model))
            model = share_out(context, name, model.folder, model.form, None, model.device, own_texts)
            texts = share_vectors(context, model, encode_texts(context, model, 0, model.tokens))
        predicted.append(classify(context, replace(model, name=name), texts))
    tasks, true, scores = np.array(exam.tasks), np.asarray(exam.classes), dict[str, Any]()
    baseline, new = ({ACCURACY: (own == true).astype(np.float64)} for own in predicted)
    # Each task's classes, and its texts without one, have their own numbers.
    apart = (1 + max(map(len, config.train.classes.values()))) * np.unique(tasks, return_inverse=True)[1]
    for task in [*config.train.classes, *([""] if config.classifies_only else [])]:
        if not (chosen := (tasks == task) | (task == "")).any():
            log.warning("task %s: no row of it is held out, so nothing is known of its classifier", task)
            continue
        *each, right = ((own + apart)[chosen] for own in (*predicted, true))
        scores[task and f"task:{task}"] = compared = compare(
            baseline, new, exam.units, chosen, config, {MACRO_F1: [partial(macro_f1, own, right) for own in each]}
        )
        if task and (predicted[0][chosen] == NO_CLASS).all():
            del compared["baseline"], compared["difference"]
    return scores


def tokens_of(context: StageContext, model: MeasuredModel) -> str:
    """Return the folder, below that of the row files, with a model's tokens."""
    published = context.plan.published
    return PUBLISHED if model.name == "published" and published is not None and published.own_tokens else ""


def embeds_alike(plan: RunPlan, folder: Path) -> bool:
    """Return whether the run can embed with the published model, where its own is refused: it would cut texts as that one's
    folder says, and has its tokens, its form and its graphs."""
    published = plan.published
    if published is None or published.own_tokens or not published.same_graphs:
        return False
    return own_form(folder, plan.config.model) == plan.config.model and read_max_length(folder) in (
        None,
        plan.config.embed.length,
    )


def open_alone(context: StageContext, kind: str, precision: str) -> Device:
    """Open a device without collectives, for encoding."""
    return open_device(kind, precision, context.world, threads=context.plan.config.device.threads_per_rank, inference=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model that is measured, and how the ranks share the work.

    Attributes:
        name: `parent`, `new`, `published`, or `reference`: the new one on the reference's hold-out.
        folder: local model folder.
        form: the model's pooling, normalization and head.
        size: of the embeddings that are ranked, the published ones; None: whole ones.
        device: it encodes on this one.
        holdout: in its own tokens.
        texts: its candidates, then its queries.
        place: of each text among `vectors`, -1 where it is computed: (N,).
        vectors: that are not computed again, (n, size).
        shares: rank -> the texts whose vectors it computes or takes, ascending indices (n,).
        queries: those that this rank ranks.
        tokens: that this rank encodes.
    """

    name: str
    folder: Path
    form: ModelConfig
    size: int | None
    device: Device
    holdout: Holdout
    texts: list[TokenList]
    place: Integers
    vectors: Vectors
    shares: list[Integers]
    queries: range
    tokens: int


def models_to_measure(context: StageContext, device: Device, holdout: Holdout, rows: Path) -> list[MeasuredModel]:
    """Return the models that are measured.

    The run's graphs are those of the new model. A published model of another form runs on the host's processor, in fp32, as only
    a run that changes the form needs it.

    Args:
        rows: local folder of row files.
    """
    plan, published = context.plan, context.plan.published
    found = [
        prepare(context, device, holdout, "new", context.paths.model),
        prepare(context, device, holdout, "parent", plan.parent.folder),
    ]
    if published is None or published.folder == plan.parent.folder:
        return found
    if published.own_tokens:
        holdout = read_judged(rows, plan.config, PUBLISHED)
    if not published.same_graphs:
        log.info("the published model has another form than the run's graphs: it runs on the host's processor")
        device = open_alone(context, "cpu", "fp32")
    return [*found, prepare(context, device, holdout, "published", published.folder)]


def prepare(context: StageContext, device: Device, holdout: Holdout, name: str, uri: str) -> MeasuredModel:
    """Fetch a model and divide its work among the ranks, which all call this together.

    Args:
        uri: of the model folder.
    """
    plan = context.plan
    context.heartbeat.beat(note=f"fetching the {name} model")
    folder = store.local_folder(uri, context.scratch / name)
    form = own_form(folder, plan.config.model)
    if name == "parent" and plan.graphs and form != plan.config.model:
        # The run's graphs have a head, and the parent has none.
        device = open_alone(context, "cpu", "fp32")
    size = read_dimensions(folder)
    known = None
    if plan.published and uri == plan.published.folder:
        known = published_vectors(context, plan.published, device, texts_of(holdout))
    elif name == "parent":
        size = size or plan.config.embed.dimensions  # to show what training has changed: its embeddings are not published
    return share_out(context, name, folder, form, size, device, holdout, known)


def texts_of(holdout: Holdout) -> list[TokenList]:
    """Return the texts of a hold-out: its candidates, then its queries."""
    return [*holdout.candidates, *holdout.queries]


def share_out(
    context: StageContext,
    name: str,
    folder: Path,
    form: ModelConfig,
    size: int | None,
    device: Device,
    holdout: Holdout,
    known: tuple[Integers, Vectors] | None = None,
) -> MeasuredModel:
    """Return a model with the texts of a hold-out divided among the ranks.

    Args:
        known: see `published_vectors`; None: every vector is computed.
    """
    world, texts = context.world, texts_of(holdout)
    place, vectors = known or (np.full(len(texts), -1), np.empty((0, 0), np.float32))
    # Every rank gets as many of the long texts and of those that are computed.
    computed, taken = np.flatnonzero(place < 0), np.flatnonzero(place >= 0)
    return MeasuredModel(
        name=name,
        folder=folder,
        form=form,
        size=size,
        device=device,
        holdout=holdout,
        texts=texts,
        place=place,
        vectors=vectors,
        shares=[np.union1d(computed[rank :: world.size], taken[rank :: world.size]) for rank in range(world.size)],
        queries=own_parts(len(holdout.queries), world.size, world.rank),
        tokens=sum(len(texts[row]) for row in computed[world.rank :: world.size]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTexts:
    """A model's vectors.

    Attributes:
        candidates: of all ranks' shares; all texts where they are classified.
        own, queries: those that this rank ranks, and their vectors, (q, D) on the device that scores.
    """

    candidates: list[Block]
    own: range
    queries: Tensor


def encode_texts(context: StageContext, model: MeasuredModel, before: int, total: int) -> Vectors:
    """Return the whole vectors that this rank computes with one model, (n, D).

    Args:
        before, total: tokens that this rank has encoded with other models, and encodes with all of them.
    """
    config, device, own = context.plan.config.embed, model.device, model.shares[context.world.rank]
    context.heartbeat.beat(note=f"loading the {model.name} model")
    encoder = load_encoder(model.folder, model.form)
    dimension = encoder.dimension
    encode_with = encode_function(context, device, encoder)
    texts = [model.texts[row] for row in own[model.place[own] < 0]]
    begun = time.monotonic()

    def beat(done: int, share: float) -> None:
        context.heartbeat.beat(
            done,
            len(texts),
            work=before + share * model.tokens,
            total_work=total,
            unit="texts",
            rate=done / max(time.monotonic() - begun, 1e-9),
            note=f"encoding with the {model.name} model",
        )

    found = encode(encode_with, device, texts, config.length, config.tokens_per_batch, on_progress=beat).embeddings
    vectors: Vectors = found.reshape(-1, dimension).numpy()
    return vectors


def share_vectors(context: StageContext, model: MeasuredModel, found: Vectors) -> EncodedTexts:
    """Return one model's vectors of the hold-out's texts, in the size that is ranked; all ranks call it together.

    Args:
        found: see `encode_texts`.
    """
    # A parent without the run's head can have smaller embeddings than the size that is published.
    size = min(model.size or found.shape[1], found.shape[1])
    own, device = model.shares[context.world.rank], model.device
    computed = model.place[own] < 0
    vectors = np.empty((len(own), size), np.float32)
    vectors[computed] = shortened(found, size, normalize=model.form.normalize)
    vectors[~computed] = model.vectors[model.place[own[~computed]]].reshape(-1, size)
    shared = [torch.from_numpy(one) for one in exchange(context, f"{model.name}-vectors", vectors)]
    blocks = list(zip(model.shares, shared, strict=True))
    if context.world.is_leader and (model.name == "new" or context.plan.config.report.texts):
        write_vectors(context.scratch / VECTORS.format(model.name), model.texts, blocks, size)
    # A share begins with its candidates.
    count = len(model.holdout.candidates)
    candidates = [(rows[rows < count], one[: np.count_nonzero(rows < count)]) for rows, one in blocks] if count else blocks
    queries = torch.empty((len(model.queries), size))
    for rows, one in blocks:
        first, last = np.searchsorted(rows, [count + model.queries.start, count + model.queries.stop])
        queries[torch.from_numpy(rows[first:last] - count - model.queries.start)] = one[first:last]
    if device.kind in EAGER_KINDS:
        queries = queries.to(device.torch_device)
    return EncodedTexts(candidates=candidates, own=model.queries, queries=queries)


def measure_sizes(context: StageContext, model: MeasuredModel, found: Vectors, known: PerQuery) -> list[dict[str, Any]]:
    """Measure the new model in each of its sizes, the largest first; all ranks call it together.

    Args:
        found: see `encode_texts`.
        known: values in the size that is published.

    Returns:
        `{size, bytes, published, metric: mean}` of each; `bytes` of an embedding.
    """
    config, full = context.plan.config, found.shape[1]
    published = model.size or full
    cut = config.train.dimensions if model.holdout.classes is None else ()  # a classifier takes whole embeddings
    sizes = sorted({full, published, *cut}, reverse=True)
    measured = {published: known}
    for size in set(sizes) - {published}:
        other = replace(model, name=f"{model.name}-{size}", size=size)
        measured[size] = measure(context, other, share_vectors(context, other, found))
    return [
        {"size": size, "bytes": np.empty(size, config.embed.dtype).nbytes, "published": size == published} | means(measured[size])
        for size in sizes
    ]


def measure(context: StageContext, model: MeasuredModel, texts: EncodedTexts) -> PerQuery:
    """Return every metric for every query, or classified text; all ranks call it together.

    Args:
        model: its `name` is that of the ranks' files.
    """
    holdout = model.holdout
    if holdout.classes is not None:
        return {ACCURACY: (classify(context, model, texts) == holdout.classes).astype(np.float64)}
    context.heartbeat.beat(note=f"ranking with the {model.name} model")
    relevant, known = (pairs.of_queries(texts.own) for pairs in (holdout.relevant, holdout.known))
    values = retrieve(texts.queries, texts.candidates, relevant, known)
    own_values = np.stack([values[metric] for metric in METRICS])
    return dict(zip(METRICS, np.concatenate(exchange(context, f"{model.name}-values", own_values), axis=1), strict=True))


def classify(context: StageContext, model: MeasuredModel, texts: EncodedTexts) -> Integers:
    """Return the number that each text's class has in `train.classes` of its task; all ranks call it together.

    NO_CLASS, which is never right, where the model has no classifier for the task, or has a class that the run does not have.
    """
    vectors, tasks = texts.queries.cpu(), np.array(model.holdout.tasks)[texts.own]
    found = np.full(len(vectors), NO_CLASS)
    for task, names in context.plan.config.train.classes.items():
        if classifier := load_classifier(model.folder, task, vectors.shape[1], normalized=model.form.normalize):
            numbers = np.array(places_of(classifier.classes, names))
            with torch.no_grad():
                found[tasks == task] = numbers[classifier(vectors[torch.from_numpy(tasks == task)]).argmax(dim=1).numpy()]
    return np.concatenate(exchange(context, f"{model.name}-classes", found))


def means(values: PerQuery) -> dict[str, float]:
    """Return each metric's mean over the queries."""
    return {metric: float(own.mean()) for metric, own in values.items()}


def compare(
    baseline: PerQuery,
    new: PerQuery,
    units: Units,
    chosen: NDArray[np.bool_],
    config: RunConfig,
    others: Mapping[str, Sequence[Callable[[Values], float]]] = {},
) -> dict[str, Any]:
    """Compare two models on some of the queries.

    Args:
        others: metrics that are no means over queries -> of the baseline and the new model, what gives it for the weights of
            these queries.

    Returns:
        `{queries, units, baseline: {metric: mean}, new: {metric: mean}, difference: {metric: {value, error, low, high, at_least,
        at_most}}}`: of the mean difference new - baseline the standard error, the 95 % interval, and the bounds that it is
        above, or below, with 95 % confidence.
    """
    baseline, new = ({metric: values[chosen] for metric, values in model.items()} for model in (baseline, new))
    own = units.within(chosen)
    differences = np.stack([new[metric] - baseline[metric] for metric in baseline], axis=1)

    def changes(weights: Values) -> Values:
        return np.append(
            weighted_means(differences, weights), [after(weights) - before(weights) for before, after in others.values()]
        )

    drawn = resampled(changes, own, samples=config.evaluate.bootstrap_samples, seed=config.seed)
    alike, tail = np.ones(len(differences)), 1 - CONFIDENCE
    bounds = np.quantile(drawn, [tail / 2, 1 - tail / 2, tail, 1 - tail], axis=0).T.tolist()
    errors, values = drawn.std(axis=0).tolist(), changes(alike).tolist()
    return {
        "queries": len(differences),
        "units": int(own.unit.max()) + 1,
        "baseline": means(baseline) | {metric: before(alike) for metric, (before, _) in others.items()},
        "new": means(new) | {metric: after(alike) for metric, (_, after) in others.items()},
        "difference": {
            metric: {"value": value, "error": error, **dict(zip(BOUNDS, each, strict=True))}
            for metric, value, error, each in zip((*baseline, *others), values, errors, bounds, strict=True)
        },
    }


def slices_of(holdout: Holdout) -> dict[str, NDArray[np.bool_]]:
    """Return which queries are of each locale and task, and of the newest week if they are some of all: (queries,)."""
    found: dict[str, NDArray[np.bool_]] = {}
    for kind, values in (("locale", holdout.locales), ("task", holdout.tasks)):
        names = np.array([value or "" for value in values])
        found |= {f"{kind}:{name}": names == name for name in sorted(filter(None, {*values}))}
    if holdout.fresh is not None and 0 < holdout.fresh.sum() < len(holdout.fresh):
        found[FRESH] = holdout.fresh
    return found
