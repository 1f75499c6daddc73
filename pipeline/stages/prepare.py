"""prepare: decide all that needs no row, and list the input files. Reads input.json and the parent; writes prepare/inputs.json.

Cheap refusals first: configuration, URIs, parent (prepare_parent), memory. The list of files is the run's input: what arrives
later is the next run's. The file is written only if there is none: a run that resumes keeps what it has. Which files are to be
ingested is looked up every time, and written to prepare/missing.json.

Once the gate has decided, prepare comes again and lists the corpus anew, as it is embedded then: prepare/corpus.json. A refresh
begins with that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.config import KeyRole, RunConfig, RunInput, build_config, keys_of
from pipeline.contract import Artifact, RunPaths, Stage, StageResult, now
from pipeline.dataset.columns import check_columns
from pipeline.dataset.deletions import Deletions, read_deletions
from pipeline.dataset.ingested import SCHEMA_VERSION, IngestedShard
from pipeline.dataset.listing import list_documents, list_pairs
from pipeline.dataset.row_files import Lengths
from pipeline.errors import BadConfig, BadData, Superseded
from pipeline.estimate.memory import known_capacity, require_memory, totals
from pipeline.estimate.variant import plan_world
from pipeline.evaluation.reference import read_reference
from pipeline.graphs.fingerprint import missing_sets, plan_graphs
from pipeline.log import log
from pipeline.model.folder import text_positions
from pipeline.model.parent import resolve_parent
from pipeline.model.shape import read_shape
from pipeline.plan import EmbedPlan, RunPlan
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.registry import read_pointer
from pipeline.run.request import read_request
from pipeline.run_inputs import Corpus, EmbedModel, GraphsPlan, InputShard, MemoryPlan, MissingShards, Published, RunInputs
from pipeline.stages.prepare_parent import as_it_embedded, check_parent, find_lineage, find_origin, place_parent, plan_published

NOT_PLANNED = frozenset(keys_of(KeyRole.EXECUTION, RunConfig))
"""Settings of how an execution is carried out, not of what it computes: they may differ when a run resumes."""

LOOKS_AT_ONCE = 16
"""Ingested shards that are looked at together: a few requests each."""


def run(context: StageContext) -> StageOutput:
    """Decide the run's inputs, or keep those that are there."""
    request = read_request(context.paths)
    inputs = kept_inputs(context.paths, request) or new_inputs(context, request)
    corpus = corpus_to_embed(context.paths, inputs, request.deployment.noncurrent_days)
    missing = missing_shards(context.paths, inputs.config, corpus.shards if corpus else inputs.shards)
    store.write_bytes(context.paths.missing, missing.model_dump_json().encode())
    metrics = {**inputs.summary(), "ingest_children": missing.children}
    for name, value in metrics.items():
        log.info("prepare: %s = %s", name, value)
    models = {"parent": inputs.parent, "published": inputs.published}
    data = store.read_bytes(context.paths.inputs)
    return StageOutput(
        inputs={name: Artifact(model.folder, model.sha256) for name, model in models.items() if model},
        outputs={"inputs": Artifact(context.paths.inputs, hashlib.sha256(data).hexdigest(), len(data))},
        metrics=metrics,
    )


def kept_inputs(paths: RunPaths, request: RunInput) -> RunInputs | None:
    """Return what an earlier execution decided, if there is anything and it can still be followed.

    Raises:
        BadConfig: the execution asks for something else.
    """
    if not store.exists(paths.inputs):
        return None
    inputs = RunInputs.from_json(store.read_bytes(paths.inputs))
    planned = inputs.config.model_dump(mode="json")
    asked = build_config(planned, request.execution).model_dump(mode="json")
    given = {key: value for key, value in request.execution.items() if key not in NOT_PLANNED}
    if contradictions := list(_contradictions(planned, asked, given)):
        raise BadConfig(
            "the execution's input contradicts the plan of the run that it resumes",
            value=contradictions,
            rule="a plan is immutable",
            remedy="leave these keys out to continue the run, or start a new one",
        )
    check_nodes(inputs.world.nodes, request.deployment.allowed_nodes)
    models = {"parent": inputs.parent, "published model": inputs.published}
    folders = [(f"the plan's {name}", model.folder) for name, model in models.items() if model]
    places_of(paths, request).check([*inputs.config.uris(), *folders])
    check_compiled(paths, inputs.graphs, inputs.config)
    log.info("keeping the inputs of %s", inputs.created)
    return inputs


def _contradictions(
    planned: Mapping[str, Any], asked: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield every key that the execution's input gives another value than the plan.

    Args:
        planned, asked: the plan's configuration without and with the input.
        given: the input's keys.
    """
    for key, value in given.items():
        before, after = planned.get(key), asked.get(key)
        if isinstance(value, Mapping) and value and isinstance(after, Mapping):
            yield from _contradictions(before or {}, after, value, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}: the plan has {json.dumps(before)}, the input {json.dumps(after)}"


def new_inputs(context: StageContext, request: RunInput) -> RunInputs:
    """Decide everything that needs no row, and write it unless it is there by now.

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
    if config.mode == "train" and pointer and pointer.held:
        raise Superseded(
            "models are held: none is published under this registry name",
            value=f"{config.registry}: held since {pointer.held}",
            rule="a rollback, or trnpipe registry hold, stops new models until they are released; refreshes go on",
            remedy=f"trnpipe registry release --name {config.registry}; or set registry=null for a run that publishes nowhere",
        )
    origin = find_origin(config, paths, pointer)
    if config.mode == "refresh":
        config = as_it_embedded(config, paths.bucket_root, origin.run)
    identity = hashlib.sha256(json.dumps([SCHEMA_VERSION, sorted(config.data.columns.items())]).encode()).hexdigest()[:32]
    lineage = find_lineage(paths.bucket_root, origin.run, identity, config)
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
    published, published_lineage = None, lineage
    if pointer and (pointer.model == origin.uri or config.mode == "refresh"):
        published = Published(
            run=pointer.run,
            folder=pointer.model,
            sha256=resolved.sha256 if pointer.model == origin.uri else str(pointer.content.get("model_sha256")),
            epoch=pointer.epoch,
        )
    elif pointer:
        published = plan_published(context, config, world, pointer, tokenizer, Lengths.of(config), graphs)
        published_lineage = find_lineage(paths.bucket_root, pointer.run, identity, config)
    shape = read_shape(resolved.folder, config.model)
    # Prepare runs on another host than the ranks do, unless all of them share a local run folder.
    capacity = known_capacity(config, world.kind, here=not store.is_s3(paths.root))
    memory = MemoryPlan(**totals(require_memory(shape, config, world, capacity)))
    planned_tokenizer = tokenizer.plan(text_positions(backbone))
    deletions = keep_deletions(paths, config, request.deployment.noncurrent_days)
    inputs = RunInputs(
        run=paths.run_id,
        created=now(),
        config=config,
        parent=place_parent(paths, origin, resolved),
        published=published,
        world=world,
        graphs=graphs,
        memory=memory,
        shape=shape,
        tokenizer=planned_tokenizer,
        shards=(
            *list_documents(config, planned_tokenizer, deletions.digest),
            *(list_pairs(config, planned_tokenizer, deletions.digest) if config.mode == "train" else ()),
        ),
        lineage=lineage,
        published_lineage=() if published_lineage == lineage else published_lineage,
        identity=identity,
        deletions=deletions.digest,
        reference=read_reference(paths.bucket_root, config.registry) if config.registry is not None else None,
    )
    return write_inputs(paths, inputs)


def keep_deletions(paths: RunPaths, config: RunConfig, noncurrent_days: int | None) -> Deletions:
    """Read what the run must not use, and keep it with the run.

    Args:
        noncurrent_days: how long the bucket keeps old versions; None: it keeps none.

    Raises:
        BadConfig: longer than `data.delete_days`.
        MissingInput, BadData: see `read_deletions`.
    """
    data = config.data
    deletions = read_deletions(data.delete)
    if data.delete and not len(deletions):
        log.warning("data.delete names nothing: its lists are empty")
    if len(deletions):
        if (noncurrent_days or 0) > data.delete_days:
            raise BadConfig(
                "the bucket keeps deleted rows longer than they may be kept",
                value=f"old versions: {noncurrent_days} days",
                rule=f"data.delete_days = {data.delete_days}",
                remedy="deploy with retention.noncurrent_days at most that, or raise data.delete_days",
            )
        store.write_bytes(paths.deletions(deletions.digest), deletions.to_json())
    return deletions


def corpus_to_embed(paths: RunPaths, inputs: RunInputs, noncurrent_days: int | None) -> Corpus | None:
    """List what is to be embedded, once a model is known that embeds it; None before that.

    A run that trains takes days until then, and others may have published newer documents. What has been published stays.

    Args:
        noncurrent_days: as in `keep_deletions`.
    """
    model = model_to_embed(paths, inputs)
    if model is None:
        return None
    last = Corpus.from_json(store.read_bytes(paths.corpus)) if store.exists(paths.corpus) else None
    if last and is_published(paths):
        return last
    pointer = read_pointer(paths.bucket_root, inputs.config.registry) if inputs.config.registry is not None else None
    own = RunPaths(f"{paths.bucket_root}/runs/{model.run}").embed_manifest
    deletions = keep_deletions(paths, inputs.config, noncurrent_days).digest
    corpus = Corpus(
        model=model,
        listed=now(),
        round=last.round + 1 if last else 1,
        shards=list_documents(inputs.config, inputs.tokenizer, deletions),
        deletions=deletions,
        # The newest of one form first: it has what refreshes have embedded since the model's own run.
        earlier=tuple(dict.fromkeys([*([pointer.embeddings] if pointer else []), own])),
    )
    store.write_bytes(paths.corpus, corpus.model_dump_json(indent=1).encode())
    log.info("prepare: to be embedded with the model of run %s", model.run)
    return corpus


def model_to_embed(paths: RunPaths, inputs: RunInputs) -> EmbedModel | None:
    """Return the model that embeds: the run's own, once the gate has accepted it; in a refresh, and in a run whose model was
    refused, the published one. None: the run has still to train, or what it has embeds nothing."""
    if inputs.config.mode == "refresh":
        assert inputs.parent.run is not None, "a refresh begins with the model of a run"
        return EmbedModel(run=inputs.parent.run, folder=inputs.parent.folder, sha256=inputs.parent.sha256)
    if not (store.exists(paths.plan) and store.exists(paths.result(Stage.EVALUATE))):
        return None
    result = StageResult.from_json(store.read_bytes(paths.result(Stage.EVALUATE)))
    if result.fingerprint != RunPlan.from_json(store.read_bytes(paths.plan)).fingerprint:
        return None
    if result.metrics["gate"]["verdict"] == "accepted":
        return EmbedModel(run=inputs.run, folder=paths.model, sha256=result.inputs["model"].sha256)
    if inputs.published and result.metrics["refresh"]:
        return EmbedModel(run=inputs.published.run, folder=inputs.published.folder, sha256=inputs.published.sha256)
    return None


def is_published(paths: RunPaths) -> bool:
    """Whether publish is done with what the run embedded last."""
    if not (store.exists(paths.embed_plan) and store.exists(paths.result(Stage.PUBLISH))):
        return False
    result = StageResult.from_json(store.read_bytes(paths.result(Stage.PUBLISH)))
    plan = EmbedPlan.from_json(store.read_bytes(paths.embed_plan))
    return result.fingerprint == plan.fingerprint and not result.metrics["again"]


def missing_shards(paths: RunPaths, config: RunConfig, shards: Sequence[InputShard]) -> MissingShards:
    """Return what is not ingested yet."""
    with ThreadPoolExecutor(LOOKS_AT_ONCE, "look") as pool:
        found = pool.map(lambda shard: IngestedShard(paths.bucket_root, shard).is_ingested(), shards)
        missing = [shard for shard, there in zip(shards, found, strict=True) if not there]
    files = {(shard.uri, shard.version) for shard in missing}
    children = min(config.data.ingest_children, len(files))
    return MissingShards(shards=tuple(missing), children=children)


def write_inputs(paths: RunPaths, inputs: RunInputs) -> RunInputs:
    """Write the inputs unless there are some by now; return those that are there."""
    try:
        store.write_bytes(paths.inputs, inputs.to_json(), if_absent=True)
    except store.Conflict:
        log.warning("another prepare of this run was faster; keeping its inputs")
        return RunInputs.from_json(store.read_bytes(paths.inputs))
    return inputs


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
    """Return the URIs that this run may use."""
    deployment = request.deployment
    return AllowedUris(own=paths.bucket_root, read=deployment.read, local_paths=deployment.local_paths)


def check_compiled(paths: RunPaths, graphs: GraphsPlan | None, config: RunConfig) -> None:
    """Refuse a run whose graphs are not compiled where nothing may be compiled.

    Raises:
        BadConfig: a compiled set is missing, and the run may not compile it.
    """
    refresh = config.mode == "refresh"
    missing = missing_sets(paths.bucket_root, graphs, ["infer"] if refresh else ["train", "infer"])
    if missing and (refresh or not config.compile.enabled):
        raise BadConfig(
            "the run's graphs are not compiled, and it compiles none",
            value=missing,
            rule="compile.enabled = false, or mode = refresh: only a run whose compiled sets are complete may start",
            remedy="set compile.enabled = true for one weekly run with the same model form, shapes, ranks and versions",
        )


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
