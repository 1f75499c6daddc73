"""prepare: decide everything about a run, once. Reads input.json, the parent and all shards; writes plan.json and the row files.

In this order, cheap refusals first: configuration, parent (prepare_parent), shards that are new, every row of every shard, and
only then tokenizing (prepare_rows). The row files are in place before the plan, and the plan is written only if there is none: a
run that resumes keeps the plan it has.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.config import Deployment, KeyRole, RunConfig, RunInput, build_config, keys_of
from pipeline.contract import Artifact, RunPaths, Stage, StageResult, now
from pipeline.cost import cost_of, most
from pipeline.dataset.arrow import Lengths, WrittenRows
from pipeline.dataset.columns import check_columns
from pipeline.dataset.distinct import DISTINCT, write_distinct
from pipeline.dataset.shards import CorpusScan, ShardScan
from pipeline.dataset.split import Selection, select
from pipeline.dataset.steps import count_steps
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.estimate.memory import known_capacity, require_memory, totals
from pipeline.estimate.variant import plan_world
from pipeline.evaluation.gate import check_holdout
from pipeline.graphs.compiled import missing_sets
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.model.parent import resolve_parent
from pipeline.model.shape import read_shape
from pipeline.plan import (
    EmbedPlan,
    ExpectedCost,
    GraphsPlan,
    HoldoutPlan,
    MemoryPlan,
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
from pipeline.stages.prepare_parent import check_parent, find_origin, place_parent, plan_published, sibling
from pipeline.stages.prepare_rows import (
    Scans,
    check_amounts,
    check_selection,
    hash_files,
    plan_shards,
    scan,
    tokenize,
    trained_shards,
    training_files,
)
from pipeline.training.resumption import resumed_run

log = logging.getLogger("trnpipe")

NOT_PLANNED = frozenset(keys_of(KeyRole.EXECUTION, RunConfig))
"""Settings of how an execution is carried out, not of what it computes: they may differ when a run resumes."""

LISTED_SHARDS = 20
"""Shards named in result.json, which must stay small; all of them are in the plan."""


def run(context: StageContext) -> StageOutput:
    """Plan the run, or keep the plan that is there."""
    request = read_request(context.paths)
    plan = kept_plan(context.paths, request) or new_plan(context, request)
    for name, value in plan.summary().items():
        log.info("plan: %s = %s", name, value)
    return output(context.paths, plan)


def read_request(paths: RunPaths) -> RunInput:
    """Return the input that the state machine was started with.

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


def kept_plan(paths: RunPaths, request: RunInput) -> RunPlan | None:
    """Return the plan that an earlier execution made, if there is one and it can still be followed.

    Raises:
        BadConfig: the execution asks for something other than what was planned.
        MissingInput: the row files are gone.
    """
    if not store.exists(paths.plan):
        return None
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    planned = plan.config.model_dump(mode="json")
    asked = build_config(planned, request.execution).model_dump(mode="json")
    given = {key: value for key, value in request.execution.items() if key not in NOT_PLANNED}
    if contradictions := list(_contradictions(planned, asked, given)):
        raise BadConfig(
            "the execution's input contradicts the plan of the run that it resumes",
            value=contradictions,
            rule="a plan is immutable",
            remedy="leave these keys out to continue the run, or start a new one",
        )
    check_nodes(plan.world.nodes, request.deployment.allowed_nodes)
    models = {"parent": plan.parent, "published model": plan.published}
    folders = [(f"the plan's {name}", model.folder) for name, model in models.items() if model]
    places_of(paths, request).check([*plan.config.uris(), *folders])
    check_row_files(paths, plan)
    check_compiled(paths, plan.graphs, plan.config)
    log.info("keeping the plan of %s", plan.created)
    return plan


def check_row_files(paths: RunPaths, plan: RunPlan, *, content: bool = False) -> None:
    """Refuse to continue without the row files that the plan names.

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
    corpus = hash_files(context, config.data.corpus, "data.corpus") if config.data.corpus else None
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
    lengths = Lengths(query=config.train.query_length, document=max(config.train.buckets), candidate=max(config.embed.buckets))
    published, published_tokens = None, None
    if pointer and pointer.model == origin.uri:
        published = Published(run=pointer.run, folder=pointer.model, sha256=resolved.sha256, registry_etag=pointer.etag)
    elif pointer:
        published, published_tokens = plan_published(context, config, world, pointer, tokenizer, lengths, graphs)
    shape = read_shape(resolved.folder, config.model)
    # Prepare runs on another host than the ranks do, unless all of them share a local run folder.
    capacity = known_capacity(config, world.kind, here=not store.is_s3(paths.root))
    memory = MemoryPlan(**totals(require_memory(shape, config, world, capacity)))

    scans = scan(context, config, new, earlier, corpus)
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
    check_data = partial(
        check_amounts,
        config=config,
        deployment=request.deployment,
        shape=shape,
        world=world,
        models=2 if pointer is None or pointer.model == origin.uri else 3,
    )
    check_data(selection, embed)
    rows_folder = scratch / "rows"
    written = tokenize(context, config, selection, shards, tokenizer, lengths, rows_folder, published_tokens)
    check_holdout(written.queries, config.gate)
    check_data(selection, embed, written)
    if not all(rows.all() for rows in scans.distinct):
        written.rows[DISTINCT] = write_distinct(rows_folder, scans.distinct)

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
    """Return the URIs that this run may use."""
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


def plan_training(
    config: RunConfig, world: PlannedWorld, selection: Selection, shards: Mapping[str, Shard], written: WrittenRows
) -> TrainPlan:
    """Plan the steps and shards of training."""
    return TrainPlan(
        new=trained_shards(selection, shards, new=True),
        replay=trained_shards(selection, shards, new=False),
        rows=written.rows["train.arrow"],
        new_rows=selection.train_rows(new=True),
        replay_rows=selection.train_rows(new=False),
        bad_rows=sum(scan.bad_rows for scan in selection.scans),
        not_positive=sum(int((~scan.positive).sum()) for scan in selection.scans),
        **asdict(count_steps(written.document_lengths, config, world.ranks)),
    )


def plan_embedding(config: RunConfig, scans: Scans, shards: Mapping[str, Shard], world: PlannedWorld) -> EmbedPlan:
    """Plan the corpus and its parts: enough of them for every rank of every child.

    Raises:
        BadData: the corpus is empty.
    """
    embedded = scans.embedded
    rows = [int(distinct.sum()) for distinct in scans.distinct]
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
    """Estimate the run's cost: as much as the one published last, and at most what its time budget allows."""
    prices = deployment.prices.by_queue()
    at_once = min(children, deployment.embed_hosts or children)
    at_most = most(prices, nodes=config.nodes, children={Stage.EMBED: at_once}, time_budget=config.time_budget)
    used = used_by(paths, pointer.run) if pointer else {}
    if pointer is None or not used:
        return ExpectedCost(at_most=at_most)
    return ExpectedCost(run=pointer.run, node_hours=sum(used.values()), as_before=cost_of(used, prices), at_most=at_most)


def used_by(paths: RunPaths, run_id: str) -> dict[Stage, float]:
    """Return the node-hours that a run's report counted, stage by stage; empty where no report counts them."""
    try:
        result = StageResult.from_json(store.read_bytes(sibling(paths, run_id).result(Stage.REPORT)))
        return {Stage(name): float(stage["node_hours"]) for name, stage in result.metrics["cost"]["stages"].items()}
    except (MissingInput, BadData, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a report never fails a run, and neither does a missing one


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


def output(paths: RunPaths, plan: RunPlan) -> StageOutput:
    """Return the content of result.json. The state machine skips the compile stage where no compiled set is missing."""
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
