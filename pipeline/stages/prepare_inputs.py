"""prepare's part that begins a run: everything that is decided before a row is read. It loads the model's framework."""

from __future__ import annotations

import hashlib
import json

from pipeline import store
from pipeline.config import RunInput, build_config
from pipeline.contract import RunPaths, now
from pipeline.dataset.columns import check_columns
from pipeline.dataset.ingested import IDENTITY_VERSION
from pipeline.dataset.listing import list_documents, list_pairs
from pipeline.dataset.row_files import Lengths
from pipeline.errors import BadData, Superseded
from pipeline.estimate.memory import decide_sharding, known_capacity, require_memory, totals
from pipeline.estimate.variant import plan_world
from pipeline.evaluation.reference import read_reference
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.log import log
from pipeline.model.folder import text_positions
from pipeline.model.parent import resolve_parent
from pipeline.model.shape import read_shape
from pipeline.run.context import StageContext
from pipeline.run.registry import read_pointer
from pipeline.run_inputs import MemoryPlan, Published, RunInputs
from pipeline.stages.prepare_checks import check_compiled, check_corpus, check_nodes, keep_deletions, places_of
from pipeline.stages.prepare_parent import as_it_embedded, check_parent, find_lineage, find_origin, place_parent, plan_published


def new_inputs(context: StageContext, request: RunInput) -> RunInputs:
    """Decide everything that needs no row, and write it unless it is there by now.

    Raises:
        BadConfig, BadData, MissingInput: see the functions below. Nothing is read before every URI has been checked.
    """
    paths, scratch = context.paths, context.scratch
    config = build_config(request.deployment.config, request.execution)
    for setting, (_, columns) in config.data.training.items():
        check_columns(columns, setting.rpartition(".")[0] + ".columns")
    check_nodes(config.nodes, request.deployment.allowed_nodes)
    check_corpus(config)
    places = places_of(paths, request)
    places.check(config.uris())
    world = plan_world(config)
    pointer = read_pointer(paths.bucket_root, config.registry) if config.registry is not None else None
    if pointer:
        mined = [("the registry's embeddings", pointer.embeddings)] if config.train.mine else []
        places.check([("the registry's model", pointer.model), *mined], BadData)
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
    identity = {
        setting: hashlib.sha256(json.dumps([IDENTITY_VERSION, sorted(columns.items())]).encode()).hexdigest()[:32]
        for setting, (_, columns) in config.data.training.items()
    }
    lineage = find_lineage(paths.bucket_root, origin.run, identity, config)
    resolved = resolve_parent(origin.uri, config.model, scratch)
    shape = read_shape(resolved.folder, config.model)
    backbone, tokenizer = check_parent(resolved.folder, config, shape.dimension)
    # Prepare runs on another host than the ranks do, unless all of them share a local run folder.
    capacity = known_capacity(config, world.kind, here=not store.is_s3(paths.root))
    config = decide_sharding(config, shape, world, capacity)
    graphs = plan_graphs(config, world, backbone, paths.bucket_root)
    if world.precision == "compiler":
        log.warning(
            "device.precision = compiler: neuronx-cc casts the optimizer's arithmetic to %s too (--auto-cast=%s), which may lose "
            "small updates; compare with a run of device.precision = bf16 before publishing: trnpipe parity RUN_A RUN_B",
            config.compile.auto_cast_type,
            config.compile.training_cast(world.precision),
        )
    check_compiled(paths, graphs, config)
    published, published_lineage = None, lineage
    # The published model lacks a prompt that is new, so its own tokens are others.
    if pointer and ((pointer.model == origin.uri and not resolved.converted) or config.mode == "refresh"):
        published = Published(
            run=pointer.run,
            folder=pointer.model,
            sha256=resolved.sha256 if pointer.model == origin.uri else str(pointer.content.get("model_sha256")),
            embeddings=pointer.embeddings,
            epoch=pointer.epoch,
        )
    elif pointer:
        published = plan_published(context, config, world, pointer, tokenizer, Lengths.of(config), graphs)
        published_lineage = find_lineage(paths.bucket_root, pointer.run, identity, config)
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


def write_inputs(paths: RunPaths, inputs: RunInputs) -> RunInputs:
    """Write the inputs unless there are some by now; return those that are there."""
    try:
        store.write_bytes(paths.inputs, inputs.to_json(), if_absent=True)
    except store.Conflict:
        log.warning("another prepare of this run was faster; keeping its inputs")
        return RunInputs.from_json(store.read_bytes(paths.inputs))
    return inputs
