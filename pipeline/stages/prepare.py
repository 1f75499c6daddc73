"""prepare: decide everything about a run, once. Reads input.json, the parent and all shards; writes plan.json and the row files.

In this order, cheap refusals first: configuration, parent, shards that are new, every row of every shard, and only then
tokenizing. The row files are in place before the plan, and the plan is written only if there is none: a run that is taken up
again keeps the plan it has.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedConfig

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.config import Deployment, KeyRole, RunConfig, RunInput, build_config, keys_of
from pipeline.contract import Artifact, Metric, Queue, RunPaths, Stage, StageResult, now, registry_uri
from pipeline.cost import cost_of, most
from pipeline.dataset.arrow import PUBLISHED, Lengths, WrittenRows, write_rows
from pipeline.dataset.ids import IdDigest, repeated
from pipeline.dataset.rows import BadRow, check_columns
from pipeline.dataset.shards import (
    CorpusScan,
    InputFile,
    ShardScan,
    find_shards,
    hash_shards,
    locate_repeats,
    scan_corpus,
    scan_training,
)
from pipeline.dataset.split import Selection, select, split_new
from pipeline.dataset.steps import count_steps
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.estimate.memory import known_capacity, require_memory, totals
from pipeline.estimate.requirements import attempt_minutes, over, refuse, requirements
from pipeline.estimate.variant import plan_world
from pipeline.estimate.workload import Workload
from pipeline.graphs.compiled import missing_sets, plan_graphs
from pipeline.model.encoder import family_of
from pipeline.model.folder import WEIGHTS, inspect_folder, own_form, transformer_folder
from pipeline.model.parent import ResolvedParent, resolve_parent
from pipeline.model.shape import ModelShape, fetch_without_weights, read_shape
from pipeline.plan import (
    EmbedPlan,
    ExpectedCost,
    GraphsPlan,
    HoldoutPlan,
    MemoryPlan,
    Parent,
    PartPlan,
    PlannedWorld,
    Published,
    RowFile,
    RunPlan,
    Shard,
    Span,
    TrainPlan,
    part_count,
)
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.registry import Pointer, read_pointer
from pipeline.training.resumption import resumed_run

log = logging.getLogger("trnpipe")

NOT_PLANNED = frozenset(keys_of(KeyRole.EXECUTION, RunConfig))
"""Settings of how an execution is carried out, not of what it computes: they may differ when a run resumes."""

LISTED_PROBLEMS = 20

LISTED_SHARDS = 20
"""Shards named in result.json, which must stay small; all of them are in the plan."""

SHORTEST_TEXT = 3
"""Tokens of a text, the two that every family puts around it included."""


def run(context: StageContext) -> StageOutput:
    """Plan the run, or keep the plan that is there."""
    request = read_request(context.paths)
    plan = kept_plan(context.paths, request) or new_plan(context, request)
    for name, value in plan.summary().items():
        log.info("plan: %s = %s", name, value)
    return output(context.paths, plan)


def read_request(paths: RunPaths) -> RunInput:
    """What the state machine was started with.

    Raises:
        MissingInput: no input.json.
        BadConfig: it does not have the form that the state machine writes.
    """
    try:
        return RunInput.model_validate_json(store.read_bytes(paths.input))
    except ValidationError as error:
        raise BadConfig(
            "the run's input cannot be read",
            value=[f"{paths.input}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()],
            rule="{deployment: {config, allowed_nodes, read, local_paths, prices, ...}, execution, execution_arn}, as the state "
            "machine writes it",
        ) from error


# ---- a run that is taken up again ------------------------------------------------------------------------------------


def kept_plan(paths: RunPaths, request: RunInput) -> RunPlan | None:
    """The plan that an earlier execution made, if there is one and it can still be followed.

    Raises:
        BadConfig: the execution asks for something else than was planned.
        MissingInput: the row files are gone.
    """
    if not store.exists(paths.plan):
        return None
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    contradictions = list(_contradictions(plan, request.execution))
    if contradictions:
        raise BadConfig(
            "the execution's input contradicts the plan of the run it takes up",
            value=contradictions,
            rule="a plan is immutable",
            remedy="leave these keys out to continue the run, or start a new one",
        )
    check_nodes(plan.world.nodes, request.deployment.allowed_nodes)
    planned = {"parent": plan.parent, "published model": plan.published}
    folders = [(f"the plan's {name}", model.folder) for name, model in planned.items() if model]
    places_of(paths, request).check([*plan.config.uris(), *folders])
    check_row_files(paths, plan)
    check_compiled(paths, plan.graphs, plan.config)
    log.info("keeping the plan of %s", plan.created)
    return plan


def check_row_files(paths: RunPaths, plan: RunPlan, *, content: bool = False) -> None:
    """Refuse to go on without the row files that the plan speaks of.

    Args:
        content: compare their hashes too, not only their sizes.
    """
    gone = []
    for name, file in plan.row_files.items():
        uri = store.join(paths.rows, name)
        info = store.stat(uri)
        if info is None or info.size != file.size or (content and store.sha256(uri) != file.sha256):
            gone.append(uri)
    if gone:
        raise MissingInput(
            "row files of the run are gone or have changed",
            value=gone,
            rule="they stay as prepare wrote them for as long as the run lasts",
            remedy="start a new run",
        )


def _contradictions(plan: RunPlan, execution: Mapping[str, Any]) -> Iterator[str]:
    planned = plan.config.model_dump(mode="json")
    asked = build_config(planned, execution).model_dump(mode="json")
    for path in _leaves(execution, asked):
        there, given = _at(planned, path), _at(asked, path)
        if path[0] not in NOT_PLANNED and there != given:
            yield f"{'.'.join(path)}: the plan has {json.dumps(there)}, the input {json.dumps(given)}"


def _leaves(values: Mapping[str, Any], known: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        inner = known.get(key)
        if isinstance(value, Mapping) and value and isinstance(inner, Mapping):
            yield from _leaves(value, inner, (*path, key))
        else:
            yield (*path, key)


def _at(record: Any, path: Sequence[str]) -> Any:
    for name in path:
        record = record.get(name) if isinstance(record, Mapping) else None
    return record


# ---- a new run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run continues from, before its weights are looked at.

    Attributes:
        uri: of the model.
        run: the run that made it, None if none of this bucket did.
        first_runs: sha256 of every shard that the model has been trained on -> the run that was first to (empty: unknown).
    """

    uri: str
    run: str | None
    first_runs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scans:
    """All rows of all shards, checked; `corpus` is None where the training rows' documents are the corpus."""

    new: list[ShardScan]
    earlier: list[ShardScan]
    corpus: list[CorpusScan] | None
    digest: IdDigest

    @property
    def embedded(self) -> Sequence[ShardScan | CorpusScan]:
        """What embed reads, by URI, so that parts hold much the same rows every week."""
        found: Sequence[ShardScan | CorpusScan] = [*self.new, *self.earlier] if self.corpus is None else self.corpus
        return sorted(found, key=lambda scan: scan.file.uri)


def new_plan(context: StageContext, request: RunInput) -> RunPlan:
    """Decide everything, write the row files, then the plan.

    Raises:
        BadConfig, BadData, MissingInput: see the functions below. Nothing is read before every URI has been checked.
    """
    paths, scratch = context.paths, context.scratch
    config = build_config(request.deployment.config, request.execution)
    check_columns(config.data.columns)
    check_nodes(config.nodes, request.deployment.allowed_nodes)
    places = places_of(paths, request)
    places.check(config.uris())
    world = plan_world(config)
    pointer = read_pointer(paths.bucket_root, config.registry) if config.registry is not None else None
    if pointer:
        places.check([("the registry's model", pointer.model)], BadData)
    origin = find_origin(config, paths, pointer)
    new, earlier = training_files(context, config, origin)
    corpus = corpus_files(context, config)
    resolved = resolve_parent(origin.uri, config.model, scratch)
    backbone, tokenizer = check_parent(resolved.folder, config)
    graphs = plan_graphs(config, world, backbone, paths.bucket_root)
    if world.precision == "compiler":
        log.warning(
            "device.precision = compiler: neuronx-cc casts the optimizer's arithmetic to %s too (--auto-cast=%s), which may lose "
            "small updates; compare with a run of device.precision = bf16 before publishing: trnpipe parity RUN_A RUN_B",
            config.compile.auto_cast_type,
            config.compile.training_cast(world.precision),
        )
    warn_small_micro_batch(config, world.kind)
    check_compiled(paths, graphs, config)
    published, published_tokens = None, None
    if pointer and pointer.model == origin.uri:
        published = Published(run=pointer.run, folder=pointer.model, sha256=resolved.sha256, registry_etag=pointer.etag)
    elif pointer:
        published, published_tokens = plan_published(context, config, world, pointer, tokenizer, graphs)
    memory = check_memory(resolved.folder, config, world, paths)

    scans = scan(context, config, new, earlier, corpus)
    check_repeats(context, scans, config.data.columns)
    selection = select(
        scans.new,
        scans.earlier,
        holdout_fraction=config.data.holdout_fraction,
        replay_fraction=config.data.replay_fraction,
        distractors=config.evaluate.candidates,
        seed=config.seed,
    )
    check_selection(selection, config)
    shards = plan_shards(selection, origin, paths.run_id)
    embed = plan_embedding(config, scans, shards, world)
    limits = DataLimits(
        shape=read_shape(resolved.folder, config.model),
        deployment=request.deployment,
        config=config,
        world=world,
        models=2 if pointer is None or pointer.model == origin.uri else 3,
    )
    limits.check(selection, embed)
    rows_folder = scratch / "rows"
    written = tokenize(context, config, selection, shards, tokenizer, rows_folder, published_tokens)
    check_holdout(written.queries, config)
    limits.check(selection, embed, written)

    plan = RunPlan(
        run=paths.run_id,
        created=now(),
        config=config,
        parent=place_parent(paths, origin, resolved),
        published=published,
        world=world,
        train=plan_training(config, world, selection, shards, written),
        holdout=HoldoutPlan(
            rows=written.rows["holdout.arrow"], queries=written.queries, candidates=written.rows["candidates.arrow"]
        ),
        embed=embed,
        graphs=graphs,
        memory=memory,
        expected_cost=expect_cost(config, paths, embed.children, request.deployment, pointer),
        row_files=upload_rows(paths, rows_folder, written),
        seen=tuple(sorted({*origin.first_runs, *(file.sha256 for file in new)})),
    )
    train = plan.train.model_copy(update={"resumed": resumed_run(plan, paths)})
    return write_plan(paths, plan.model_copy(update={"train": train}).sealed())


def check_nodes(nodes: int, allowed: Sequence[int]) -> None:
    """Refuse a node count without job definitions: Batch cannot change a gang's size when it submits it."""
    if nodes not in allowed:
        raise BadConfig(
            "this number of nodes is not deployed",
            value=f"nodes = {nodes}",
            rule=f"one of {', '.join(map(str, sorted(allowed)))}",
            remedy="choose one of these, or add it to the deployment's node counts and deploy",
        )


def places_of(paths: RunPaths, request: RunInput) -> AllowedUris:
    """Where the URIs of this run may lead."""
    deployment = request.deployment
    return AllowedUris(own=paths.bucket_root, read=deployment.read, local_paths=deployment.local_paths)


def check_compiled(paths: RunPaths, graphs: GraphsPlan | None, config: RunConfig) -> None:
    """Refuse a run whose graphs are not compiled where nothing may be compiled.

    Raises:
        BadConfig: a compiled set is missing, and compile.enabled is false.
    """
    missing = missing_sets(paths.bucket_root, graphs)
    if missing and not config.compile.enabled:
        raise BadConfig(
            "the run's graphs are not compiled, and compiling is disabled",
            value=missing,
            rule="compile.enabled = false: only a run whose compiled sets are complete may start",
            remedy="set compile.enabled = true for one run with the same model form, shapes, ranks and versions",
        )


def find_origin(config: RunConfig, paths: RunPaths, pointer: Pointer | None) -> Origin:
    """The parent: the one that the execution names, else the published model, else the initial one.

    Raises:
        BadConfig: none of them is there.
        MissingInput: the plan of the published model's run is gone.
        BadData: that plan cannot be read.
    """
    if config.model.parent is None and pointer is not None:
        log.info("parent: %s, published by run %s", pointer.model, pointer.run)
        return Origin(uri=pointer.model, run=pointer.run, first_runs=seen_shards(paths, pointer.run))
    uri = config.model.parent or config.model.initial
    if uri is None:
        where = "" if config.registry is None else f"; {registry_uri(paths.bucket_root, config.registry)} is not there"
        raise BadConfig(
            "there is no model to start from",
            value=f"registry = {config.registry}, model.initial = null, model.parent = null{where}",
            rule="a run continues from model.parent, else from what the registry names, else from model.initial",
            remedy="set model.initial to a model folder or checkpoint",
        )
    if run_id := _run_of(uri, paths):
        uri = uri.rstrip("/")  # as the registry names a run's model
    seen = seen_shards(paths, run_id) if run_id and store.exists(_sibling(paths, run_id).plan) else {}
    log.info("parent: %s, model.%s", uri, "initial" if config.model.parent is None else "parent")
    return Origin(uri=uri, run=run_id, first_runs=seen)


def seen_shards(paths: RunPaths, run_id: str) -> dict[str, str]:
    """Shards that a run's model has been trained on: sha256 -> the run that was first to, empty if unknown.

    Read with as few expectations as possible: the plan may be one of an earlier version of trnpipe.
    """
    uri = _sibling(paths, run_id).plan
    try:
        record = json.loads(store.read_bytes(uri))
        seen = dict.fromkeys(record["seen"], "")
        shards = [*record["train"]["new"], *record["train"]["replay"], *record["embed"]["shards"]]
        seen.update((shard["sha256"], shard["first_run"]) for shard in shards if shard["sha256"] in seen)
        return seen
    except MissingInput as error:
        raise MissingInput(
            "the plan of the parent's run is gone, so nobody can say which shards are new",
            value=uri,
            remedy="restore it, or set model.parent to the model itself: every shard then counts as new",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadData("the plan of the parent's run cannot be read", value=f"{uri}: {error!r}", remedy="restore it") from error


def _sibling(paths: RunPaths, run_id: str) -> RunPaths:
    return RunPaths(f"{paths.bucket_root}/runs/{run_id}")


def _run_of(uri: str, paths: RunPaths) -> str | None:
    """The run in whose folder a model is, None if it is elsewhere."""
    folder = f"{paths.bucket_root}/runs/"
    return uri[len(folder) :].split("/")[0] if uri.startswith(folder) else None


def training_files(context: StageContext, config: RunConfig, origin: Origin) -> tuple[list[InputFile], list[InputFile]]:
    """New and earlier training shards.

    Raises:
        BadConfig: data.train is empty.
        MissingInput: a URI names nothing, or nothing is new.
    """
    if not config.data.train:
        raise BadConfig(
            "there is nothing to train on",
            value="data.train = []",
            rule="data.train names at least one shard or folder of shards",
            remedy="set data.train",
        )
    files = _hashed(context, config.data.train, "data.train")
    new, earlier = split_new(files, origin.first_runs)
    log.info("training shards: %d new, %d the parent has been trained on", len(new), len(earlier))
    if not new and config.data.require_new:
        raise MissingInput(
            "no training shard is new",
            value=f"{len(files)} shards under {', '.join(config.data.train)}, all of them seen by run {origin.run}",
            rule="data.require_new: a run needs shards that its parent has not been trained on",
            remedy="upload new shards, or set data.require_new=false to train on earlier rows only",
        )
    return new, earlier


def corpus_files(context: StageContext, config: RunConfig) -> list[InputFile] | None:
    """Corpus shards, None if the documents of the training rows are the corpus."""
    return _hashed(context, config.data.corpus, "data.corpus") if config.data.corpus else None


def _hashed(context: StageContext, uris: Sequence[str], setting: str) -> list[InputFile]:
    shards = find_shards(uris, setting)
    total = sum(shard.size for shard in shards)
    log.info("%s: %d shards, %.1f MB", setting, len(shards), total / 1e6)
    return hash_shards(shards, lambda done: context.heartbeat.beat(done, total, unit="bytes", note=f"hashing {setting}"))


def check_parent(folder: Path, config: RunConfig) -> tuple[PreTrainedConfig, TextTokenizer]:
    """The parent's backbone and tokenizer, once the configured lengths fit the model.

    Raises:
        BadConfig: a length above the model's positions, or a tokenizer that is not the model's.
    """
    backbone, _ = inspect_folder(folder, config.model)
    positions = _positions(backbone)
    lengths = {
        "train.query_length": config.train.query_length,
        "train.buckets": max(config.train.buckets),
        "embed.buckets": max(config.embed.buckets),
    }
    problems = [f"{key}: {length}" for key, length in lengths.items() if length > positions]
    if problems:
        raise BadConfig(
            "a length is more than the model has positions for",
            value=problems,
            rule=f"at most {positions} tokens ({backbone.model_type})",
            remedy=f"choose lengths up to {positions}",
        )
    tokenizer = TextTokenizer(transformer_folder(folder))
    if tokenizer.vocabulary > backbone.vocab_size:
        raise BadConfig(
            "the tokenizer does not belong to the model",
            value=f"{tokenizer.vocabulary} token ids, {backbone.vocab_size} rows in the embedding table",
            rule="every token id has a row",
            remedy="put the model's own tokenizer into its folder",
        )
    return backbone, tokenizer


def _positions(backbone: PreTrainedConfig) -> int:
    """Tokens of the longest text."""
    # RoBERTa and its like count positions from the padding token's id on: 514 of them are 512 tokens.
    padding = 1 + (backbone.pad_token_id or 0) if family_of(backbone).counts_from_padding else 0
    return int(backbone.max_position_embeddings) - padding


def plan_published(
    context: StageContext,
    config: RunConfig,
    world: PlannedWorld,
    pointer: Pointer,
    tokenizer: TextTokenizer,
    graphs: GraphsPlan | None,
) -> tuple[Published, tuple[TextTokenizer, Lengths] | None]:
    """The published model where it is not the parent: its form may be another one.

    Args:
        tokenizer, graphs: the parent's.

    Returns:
        What evaluate must know of it, and how its texts are tokenized; None: as the parent's.

    Raises:
        MissingInput: it is gone.
        BadConfig, BadData: it cannot be loaded.
    """
    try:
        folder = fetch_without_weights(pointer.model, context.scratch / PUBLISHED)
        sha256 = store.sha256(store.join(pointer.model, WEIGHTS))
    except MissingInput as error:
        raise MissingInput(
            "the published model is gone",
            value=error.value,
            rule="the gate compares a new model with the one that it would replace",
            remedy="restore it from the bucket's versions, or set registry to another name, under which nothing is published yet",
        ) from error
    form = config.model_copy(update={"model": own_form(folder, config.model)})
    backbone, _ = inspect_folder(folder, form.model)
    own = TextTokenizer(transformer_folder(folder))
    wanted, longest = _lengths(config), _positions(backbone)
    lengths = replace(wanted, query=min(wanted.query, longest), candidate=min(wanted.candidate, longest))
    same_tokens = (own.digest, lengths) == (tokenizer.digest, wanted)
    fits = plan_graphs(form, world, backbone, context.paths.bucket_root)
    published = Published(
        run=pointer.run,
        folder=pointer.model,
        sha256=sha256,
        registry_etag=pointer.etag,
        own_tokens=not same_tokens,
        same_graphs=(fits and fits.infer) == (graphs and graphs.infer),
    )
    return published, None if same_tokens else (own, lengths)


def warn_small_micro_batch(config: RunConfig, kind: str) -> None:
    """A batch without divisors of a fair size is cut into very small pieces, each with a forward pass of its own."""
    batch, most, found = config.train.batch_size, config.most_compiled_pairs, config.micro_batch_on(kind)
    if config.train.micro_batch is None and 2 * found < min(batch, most):
        log.warning(
            "batches of %d pairs are computed %d at a time, although %d fit: %d has no larger divisor; train.batch_size = %d has",
            batch,
            found,
            most,
            batch,
            batch // most * most,
        )


def check_memory(folder: Path, config: RunConfig, world: PlannedWorld, paths: RunPaths) -> MemoryPlan:
    """What the run will need of device and host.

    Raises:
        BadConfig: more than there is.
    """
    # Prepare runs on another host than the ranks do, unless all of them share a local run folder.
    capacity = known_capacity(config, world.kind, here=not store.is_s3(paths.root))
    return MemoryPlan(**totals(require_memory(read_shape(folder, config.model), config, world, capacity)))


class Quarantine:
    """Every refused row, in a local file that is uploaded at the end, whichever way it comes; use as a context manager."""

    def __init__(self, path: Path, uri: str) -> None:
        self.first: list[BadRow] = []
        self._uri = uri
        self._path = path
        self._stream = path.open("w", encoding="utf-8")

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.close()
        if self.first:
            store.upload(self._path, self._uri)
            log.warning("refused rows are listed in %s", self._uri)
        else:
            store.delete(self._uri)  # of an earlier attempt on other data

    def refuse(self, row: BadRow) -> None:
        self._stream.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
        if len(self.first) < LISTED_PROBLEMS:
            self.first.append(row)


def scan(
    context: StageContext,
    config: RunConfig,
    new: Sequence[InputFile],
    earlier: Sequence[InputFile],
    corpus: Sequence[InputFile] | None,
) -> Scans:
    """Check every row of every shard.

    Raises:
        BadData: a damaged file, or more bad rows than allowed.
    """
    columns = config.data.columns
    digest = IdDigest()
    training_ids = digest if corpus is None else IdDigest()
    beat = partial(_beat_rows, context, "checking rows")
    with Quarantine(context.scratch / "quarantine.jsonl", context.paths.quarantine) as quarantine:
        scans = Scans(
            new=scan_training(new, columns, training_ids, quarantine.refuse, beat),
            earlier=scan_training(earlier, columns, training_ids, quarantine.refuse, beat),
            corpus=None if corpus is None else scan_corpus(corpus, columns, digest, quarantine.refuse, beat),
            digest=digest,
        )
        scanned = (*scans.new, *scans.earlier, *(scans.corpus or ()))
        context.cloudwatch.write({Metric.QUARANTINED_ROWS: sum(scan.bad_rows for scan in scanned)})
        # Each by itself, or a long history would hide a spoilt week.
        limit = config.data.max_bad_fraction
        check_bad_rows("new training shards", scans.new, limit, quarantine)
        check_bad_rows("earlier training shards", scans.earlier, limit, quarantine)
        check_bad_rows("corpus", scans.corpus or [], limit, quarantine)
    return scans


def _beat_rows(context: StageContext, note: str, done: int) -> None:
    context.heartbeat.beat(done, unit="rows", note=note)


def check_bad_rows(name: str, scans: Sequence[ShardScan | CorpusScan], limit: float, quarantine: Quarantine) -> None:
    """Refuse data of which more than `limit` (a fraction) is bad."""
    bad = sum(scan.bad_rows for scan in scans)
    total = bad + sum(scan.rows for scan in scans)
    log.info("%s: %d rows, %d of them refused", name, total, bad)
    if bad > limit * total:
        raise BadData(
            f"too many rows of the {name} are bad: {bad} of {total}",
            value=[f"{row.at}: {row.reason}" for row in quarantine.first],
            rule=f"data.max_bad_fraction = {limit:g}",
            remedy="correct the rows, all of which are listed in prepare/quarantine.jsonl, or raise data.max_bad_fraction",
        )


def check_repeats(context: StageContext, scans: Scans, columns: Mapping[str, str]) -> None:
    """Refuse a corpus in which two rows have one id: each id gets one embedding.

    Raises:
        BadData: with both places of each repeated id.
    """
    suspects = repeated([scan.ids for scan in scans.embedded])
    if not len(suspects):
        return
    source = "documents" if scans.corpus is None else "corpus"
    beat = partial(_beat_rows, context, "locating repeated ids")
    found = locate_repeats([scan.file for scan in scans.embedded], source, columns, suspects, beat)
    if found:
        listed = [f"id {identifier!r}: {' and '.join(places[:2])}" for identifier, places in found.items()]
        raise BadData(
            f"{len(found)} ids occur more than once in the corpus",
            value=listed,
            rule="an id names one row among all shards of all weeks",
            remedy="remove the repeated rows, or give them ids of their own",
        )


def check_selection(selection: Selection, config: RunConfig) -> None:
    """Refuse a run without rows to train on or to evaluate with.

    Raises:
        BadData: naming the counts that led there.
    """
    good = sum(scan.rows for scan in selection.scans)
    held = sum(int((mask & scan.positive).sum()) for mask, scan in zip(selection.holdout, selection.scans, strict=True))
    trained = selection.train_rows(new=True) + selection.train_rows(new=False)
    if not trained:
        raise BadData(
            "there is no row to train on",
            value=[
                f"{good} good rows, {held} positive ones held out, {sum(selection.new)} new shards",
                f"data.replay_fraction = {config.data.replay_fraction:g}",
            ],
            rule="a row is trained on if its label is above 0 and its document is not held out",
            remedy="add rows; without new shards, data.replay_fraction says which share of the earlier rows is used",
        )
    if not held:
        raise BadData(
            "the hold-out is empty",
            value=f"{good} good rows, data.holdout_fraction = {config.data.holdout_fraction:g}",
            rule="rows with a label above 0 are held out by hash of their document",
            remedy="add rows or raise data.holdout_fraction",
        )


def check_holdout(queries: int, config: RunConfig) -> None:
    """Refuse now what evaluate would refuse after days of training."""
    if queries < config.gate.min_queries and not config.gate.allow_small:
        raise BadConfig(
            "the hold-out is too small to judge a model",
            value=f"{queries} distinct queries",
            rule=f"gate.min_queries = {config.gate.min_queries}",
            remedy="raise data.holdout_fraction, add data, or set gate.allow_small=true to judge all the same",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLimits:
    """What the hosts of a deployment can hold.

    Attributes:
        models: how many evaluate measures.
    """

    shape: ModelShape
    deployment: Deployment
    config: RunConfig
    world: PlannedWorld
    models: int

    def check(self, selection: Selection, embed: EmbedPlan, written: WrittenRows | None = None) -> None:
        """Refuse more data than a stage can hold, before days are spent on it; warn of what would take too long.

        Args:
            written: the row files; None: before there are any. Texts then count as short as they can be, and the hold-out's
                queries not at all, so that what is refused is certain.

        Raises:
            BadConfig: names everything that is too much and what helps.
        """
        if self.deployment.local_paths:
            return  # All stages share a machine, whose other uses are unknown.
        scans = selection.scans
        held = [scan.documents[mask] for scan, mask in zip(scans, selection.holdout, strict=True)]
        work = Workload(
            train_rows=selection.train_rows(new=True) + selection.train_rows(new=False),
            scanned_rows=sum(scan.rows for scan in scans),
            corpus_rows=embed.rows,
            own_corpus=embed.source == "corpus",
            queries=written.queries if written else 0,
            candidates=len(np.unique(np.concatenate(held))),
            shard_rows=max(shard.rows for shard in embed.shards),
            query_tokens=SHORTEST_TEXT,
            document_tokens=float(written.document_lengths.mean()) if written else SHORTEST_TEXT,
        )
        found = list(
            requirements(
                work,
                self.shape,
                self.config,
                self.world,
                parts=len(embed.parts),
                ranks=embed.children * (self.config.embed.ranks_per_child or self.world.ranks_per_node),
                node_memory=known_capacity(self.config, self.world.kind, here=False).host,
                embed_host=self.deployment.hosts.get(Queue.EMBED),
                minutes=attempt_minutes(self.deployment.timeouts),
                models=self.models,
            )
        )
        refuse(found)
        for one in over(found):
            if written:
                log.warning("%s: %s of %s; %s", one.what, one.shown(one.amount), one.shown(one.limit), one.remedy)


def plan_shards(selection: Selection, origin: Origin, run_id: str) -> dict[str, Shard]:
    """URI -> training shard, new ones first, as the plan has it."""
    return {
        scan.file.uri: Shard(
            uri=scan.file.uri,
            sha256=scan.file.sha256,
            size=scan.file.size,
            rows=scan.rows,
            bad_rows=scan.bad_rows,
            holdout_rows=int(held.sum()),
            first_run=run_id if is_new else origin.first_runs[scan.file.sha256],
        )
        for scan, held, is_new in zip(selection.scans, selection.holdout, selection.new, strict=True)
    }


def _trained_shards(selection: Selection, shards: Mapping[str, Shard], *, new: bool) -> tuple[Shard, ...]:
    """New shards, all of them; or the earlier ones that rows are replayed of."""
    return tuple(
        shards[scan.file.uri]
        for scan, train, is_new in zip(selection.scans, selection.train, selection.new, strict=True)
        if is_new == new and (is_new or train.any())
    )


def tokenize(
    context: StageContext,
    config: RunConfig,
    selection: Selection,
    shards: Mapping[str, Shard],
    tokenizer: TextTokenizer,
    folder: Path,
    published: tuple[TextTokenizer, Lengths] | None,
) -> WrittenRows:
    """Write the row files into a local folder."""
    folder.mkdir(exist_ok=True)
    trained = [*_trained_shards(selection, shards, new=True), *_trained_shards(selection, shards, new=False)]
    written = write_rows(
        folder,
        selection,
        {shard.uri: number for number, shard in enumerate(trained)},
        config.data.columns,
        tokenizer,
        _lengths(config),
        partial(_beat_rows, context, "tokenizing"),
        published,
    )
    log.info("tokenized: %s", ", ".join(f"{rows} rows in {name}" for name, rows in written.rows.items()))
    return written


def _lengths(config: RunConfig) -> Lengths:
    return Lengths(query=config.train.query_length, document=max(config.train.buckets), candidate=max(config.embed.buckets))


def plan_training(
    config: RunConfig, world: PlannedWorld, selection: Selection, shards: Mapping[str, Shard], written: WrittenRows
) -> TrainPlan:
    """Steps and shards of training."""
    return TrainPlan(
        new=_trained_shards(selection, shards, new=True),
        replay=_trained_shards(selection, shards, new=False),
        rows=written.rows["train.arrow"],
        new_rows=selection.train_rows(new=True),
        replay_rows=selection.train_rows(new=False),
        bad_rows=sum(scan.bad_rows for scan in selection.scans),
        not_positive=sum(int((~scan.positive).sum()) for scan in selection.scans),
        **asdict(count_steps(written.document_lengths, config, world.ranks)),
    )


def plan_embedding(config: RunConfig, scans: Scans, shards: Mapping[str, Shard], world: PlannedWorld) -> EmbedPlan:
    """The corpus and its parts: enough of them for every rank of every child."""
    embedded = scans.embedded
    rows = [scan.rows for scan in embedded]
    if not sum(rows):
        raise BadData("the corpus is empty", value=list(config.data.corpus), rule="there is at least one document to embed")
    ranks = config.embed.ranks_per_child or world.ranks_per_node
    parts = plan_parts(rows, config.embed.rows_per_part, config.embed.children * ranks)
    return EmbedPlan(
        source="documents" if scans.corpus is None else "corpus",
        shards=tuple(shards[scan.file.uri] if scans.corpus is None else _corpus_shard(scan) for scan in embedded),
        rows=sum(rows),
        bad_rows=sum(scan.bad_rows for scan in embedded),
        ids=str(scans.digest),
        parts=parts,
        children=min(config.embed.children, len(parts)),
    )


def _corpus_shard(scan: ShardScan | CorpusScan) -> Shard:
    file = scan.file
    return Shard(uri=file.uri, sha256=file.sha256, size=file.size, rows=scan.rows, bad_rows=scan.bad_rows)


def plan_parts(rows: Sequence[int], rows_per_part: int, least: int) -> tuple[PartPlan, ...]:
    """Cut the rows of consecutive shards into parts of nearly equal size.

    Args:
        rows: good rows of each shard, at least one in all.
        rows_per_part: at most this many in a part.
        least: at least this many parts, as long as each has a row.
    """
    total = sum(rows)
    count = part_count(total, rows_per_part, least)
    starts = np.concatenate([[0], np.cumsum(rows)]).tolist()
    parts = []
    for index in range(count):
        first, last = index * total // count, (index + 1) * total // count
        spans = [
            Span(shard=shard, start=max(first, start) - start, stop=min(last, start + size) - start)
            for shard, (start, size) in enumerate(zip(starts, rows, strict=False))
            if max(first, start) < min(last, start + size)
        ]
        parts.append(PartPlan(spans=tuple(spans), rows=last - first))
    return tuple(parts)


def expect_cost(
    config: RunConfig, paths: RunPaths, children: int, deployment: Deployment, pointer: Pointer | None
) -> ExpectedCost:
    """What the run may cost: as much as the one published last, and at most what its time budget allows."""
    prices = deployment.prices.by_queue()
    at_once = min(children, deployment.embed_hosts or children)
    at_most = most(prices, nodes=config.nodes, children=at_once, time_budget=config.time_budget)
    used = used_by(paths, pointer.run) if pointer else {}
    if pointer is None or not used:
        return ExpectedCost(at_most=at_most)
    return ExpectedCost(run=pointer.run, node_hours=sum(used.values()), as_before=cost_of(used, prices), at_most=at_most)


def used_by(paths: RunPaths, run_id: str) -> dict[Stage, float]:
    """The node-hours that a run's report counted, stage by stage; empty where there is none that does."""
    try:
        result = StageResult.from_json(store.read_bytes(_sibling(paths, run_id).result(Stage.REPORT)))
        return {Stage(name): float(stage["node_hours"]) for name, stage in result.metrics["cost"]["stages"].items()}
    except (MissingInput, BadData, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a report never failed a run, and neither does one that is missing


def place_parent(paths: RunPaths, origin: Origin, resolved: ResolvedParent) -> Parent:
    """The parent where every stage can load it: where it is, or converted into the run folder."""
    folder = origin.uri
    if resolved.converted:
        folder = store.join(paths.stage(Stage.PREPARE), "parent")
        store.upload_folder(resolved.folder, folder)
    return Parent(uri=origin.uri, folder=folder, sha256=resolved.sha256, run=origin.run)


def upload_rows(paths: RunPaths, folder: Path, written: WrittenRows) -> dict[str, RowFile]:
    """Copy the row files into the run folder."""
    files = {}
    for name in written.rows:
        artifact = store.upload(folder / name, store.join(paths.rows, name))
        files[name] = RowFile(sha256=artifact.sha256, size=artifact.size, rows=written.rows[name])
    return files


def write_plan(paths: RunPaths, plan: RunPlan) -> RunPlan:
    """Write the plan unless there is one by now; returns the one that is there.

    Raises:
        MissingInput: another prepare planned this run at the same time, on other data.
    """
    try:
        store.write_bytes(paths.plan, plan.to_json(), if_absent=True)
    except store.Conflict:
        log.warning("another prepare of this run was faster; keeping its plan")
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        check_row_files(paths, plan, content=True)
    return plan


# ---- both ------------------------------------------------------------------------------------------------------------


def output(paths: RunPaths, plan: RunPlan) -> StageOutput:
    """What result.json says. The state machine skips the compile stage where no compiled set is missing."""
    shards = [("train", shard) for shard in (*plan.train.new, *plan.train.replay)]
    if plan.embed.source == "corpus":
        shards += [("corpus", shard) for shard in plan.embed.shards]
    models = {"parent": plan.parent, "published": plan.published}
    inputs = {name: Artifact(model.folder, model.sha256) for name, model in models.items() if model}
    for number, (kind, shard) in enumerate(shards[:LISTED_SHARDS]):
        inputs[f"{kind}-{number:05d}"] = Artifact(shard.uri, shard.sha256, shard.size)
    data = store.read_bytes(paths.plan)
    outputs = {"plan": Artifact(paths.plan, hashlib.sha256(data).hexdigest(), len(data))}
    for name, file in plan.row_files.items():
        outputs[name] = Artifact(store.join(paths.rows, name), file.sha256, file.size)
    metrics = {**plan.summary(), "compile": bool(missing_sets(paths.bucket_root, plan.graphs))}
    return StageOutput(inputs=inputs, outputs=outputs, metrics=metrics)
