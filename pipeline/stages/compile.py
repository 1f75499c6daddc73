"""compile: every graph of the run ahead of time, by a trial of the train command itself, on as many ranks as will train.

`xla` runs the trial and records which graphs it met; XLA on a CPU compiles in every process again, but what training may meet is
known. `neuron` runs `neuron_parallel_compile` around the trial, which fills the persistent cache, and traces the encoder for
evaluate and embed. Either way the two compiled sets that the plan names are complete afterwards; where they are already, nothing
is done, and the state machine does not even start this stage. `cpu` and `cuda` run operations one by one and have no graphs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from pipeline.contract import STAGES
from pipeline.errors import BadConfig, Defect, TrnpipeError
from pipeline.model.compiled import GraphSet, missing_sets, read_set, set_uri, traces_uri, write_set
from pipeline.model.encoder import prepare_for_inference
from pipeline.model.folder import load_encoder
from pipeline.model.inference import encode_shapes, for_encoding
from pipeline.runtime import failure, gang, neuron_compile, neuron_launch, store
from pipeline.runtime.context import NODE_FOLDER, StageContext, StageOutput
from pipeline.runtime.device import Device
from pipeline.runtime.heartbeat import COMPILE_PATIENCE
from pipeline.runtime.hlo import GraphDescription, describe
from pipeline.training.setup import joined
from pipeline.training.trial import run_trial

log = logging.getLogger("trnpipe")

JOIN_SECONDS = 900
"""For the torchruns of all nodes to find each other; hosts of a gang start minutes apart."""

SHARE_OF_TIMEOUT = 0.95
"""Of the stage's time, for compiling: what is left is for saying what was wrong."""

POLL_SECONDS = 2.0

OUT_OF_MEMORY = ("NCC_EOOM", "NCC_EVRF009", "Failed to alloc DEVICE memory")
"""How neuronx-cc and the runtime say that a graph needs more memory than a core has (SDK 2.29.1, compiler/error-codes)."""


def run(context: StageContext) -> StageOutput | None:
    """Make what is missing of the plan's compiled sets; rank 0 speaks for the stage."""
    plan = context.plan
    if plan.graphs is None:
        return _nothing(context, f"the kind `{plan.world.kind}` runs operations one by one and has no graphs")
    if not missing_sets(context.paths.bucket_root, plan.graphs):
        return _nothing(context, "both compiled sets are there")
    if plan.world.kind != "neuron":
        return compile_here(context)
    if neuron_compile.extraction_mode():
        trace_rank(context)
        return None
    return compile_on_neuron(context)


def _nothing(context: StageContext, reason: str) -> StageOutput | None:
    if not context.world.is_leader:
        return None
    log.info("nothing is compiled: %s", reason)
    return StageOutput(metrics={"compiles": False, "graphs": 0, "reason": reason})


def compile_here(context: StageContext) -> StageOutput | None:
    """Run the trial in this process and record what it met (`xla`)."""
    graphs = context.plan.graphs
    assert graphs is not None
    began = time.monotonic()
    with joined(context, context.plan) as device:
        trial = run_trial(context, device)
        described = {key: _describe(device, key) for key in sorted(trial.all)}
    root, run_id = context.paths.bucket_root, context.paths.run_id
    infer = {key: described[key] for key in sorted(trial.infer)}
    write_set(set_uri(root, "infer", graphs.infer), GraphSet(fingerprint=graphs.infer, run=run_id, graphs=infer))
    write_set(set_uri(root, "train", graphs.train), GraphSet(fingerprint=graphs.train, run=run_id, graphs=described))
    seconds = time.monotonic() - began
    log.info("%d graphs, %d of them for encoding, in %.0f s", len(described), len(infer), seconds)
    return StageOutput(
        metrics={
            "compiles": True,
            "graphs": len(described),
            "infer_graphs": len(infer),
            "trial_steps": trial.steps,
            "seconds": seconds,
            "train": graphs.train,
            "infer": graphs.infer,
        }
    )


# Neuron: one process per node runs this stage; the trial's ranks are its own, below neuron_parallel_compile.


def trace_rank(context: StageContext) -> None:
    """One rank of the trial below neuron_parallel_compile, which compiles what the ranks wrote down when they have ended."""
    with joined(context, context.plan) as device:
        run_trial(context, device, extracting=True)


def compile_on_neuron(context: StageContext) -> StageOutput | None:
    """Fill the persistent cache with training's graphs, all nodes together, and trace the encoder on the first one.

    Raises:
        BadConfig: a graph that does not fit the device's memory.
        Defect: a graph that could not be compiled, with the compiler's words.
    """
    graphs = context.plan.graphs
    assert graphs is not None
    began = time.monotonic()
    root, run_id, leader = context.paths.bucket_root, context.paths.run_id, context.world.is_leader
    train_uri, infer_uri = set_uri(root, "train", graphs.train), set_uri(root, "infer", graphs.infer)
    metrics: dict[str, Any] = {}
    trained: GraphSet | None = None
    if not store.exists(train_uri):
        neuron_compile.register(graphs.cache, run_id)
        try:
            if leader:
                others = neuron_compile.others(graphs.cache, run_id)
                # No compiler of this gang is at work before all nodes' ranks have met, so every lock that is there is an earlier
                # attempt's, however young.
                neuron_compile.clear_stale_locks(graphs.cache, in_use=bool(others), older_seconds=0)
            summary = compile_training(context)
            node = context.world.node
            record = {**asdict(summary), "attempt": node.attempt, "job": node.job}
            store.write_json(context.paths.compiled_node(node.node), record)
            if leader:
                wait_for_nodes(context)
                trained = GraphSet(fingerprint=graphs.train, run=run_id, graphs=cached_graphs(graphs.cache))
        finally:
            if leader:
                neuron_compile.unregister(graphs.cache, run_id)
        metrics |= {"train_compiled": summary.compiled, "train_cached": summary.cached, "train_seconds": summary.seconds}
    if not leader:
        return None
    if not store.exists(infer_uri):
        write_set(infer_uri, GraphSet(fingerprint=graphs.infer, run=run_id, graphs=trace_encoders(context)))
    if trained:
        # Last of all: with it, the run's sets are complete.
        write_set(train_uri, trained)
    return StageOutput(
        metrics={
            "compiles": True,
            "graphs": len(read_set(train_uri).graphs),
            "infer_graphs": len(read_set(infer_uri).graphs),
            "seconds": time.monotonic() - began,
            "train": graphs.train,
            "infer": graphs.infer,
            **metrics,
        }
    )


def compile_training(context: StageContext) -> neuron_compile.Summary:
    """Run neuron_parallel_compile around this node's share of the trial.

    Raises:
        TrnpipeError: why a rank of the trial failed; see also `neuron_compile.parallel_compile` and `require_compiled`.
    """
    plan, node = context.plan, context.world.node
    assert plan.graphs is not None
    ranks = context.scratch / "trial-ranks"
    ranks.mkdir()
    command = neuron_launch.torchrun_command(
        ["pipeline.rank", context.stage.value, context.paths.root],
        nodes=plan.world.nodes,
        node=node.node,
        ranks_per_node=plan.world.ranks_per_node,
        leader=context.world.leader,
        port=context.world.port,
        join_seconds=JOIN_SECONDS,
    )
    lines = 0

    def beat(line: str) -> None:
        nonlocal lines
        if line:
            lines += 1
            sys.stdout.write(f"{line}\n")
        # A compiler says nothing for a long time; the tool's own time limit ends it.
        context.heartbeat.beat(note=f"neuron_parallel_compile, {lines} lines so far", patience=COMPILE_PATIENCE)

    try:
        summary = neuron_compile.parallel_compile(
            command,
            flags=plan.graphs.compiler_flags,
            cache=plan.graphs.cache,
            parallel=plan.config.compile.parallel,
            timeout=STAGES[context.stage].timeout_minutes * 60 * SHARE_OF_TIMEOUT,
            on_line=beat,
            environment={**os.environ, NODE_FOLDER: str(ranks)},
        )
    except TrnpipeError as error:
        # The tool knows only that its command failed; the ranks have said why.
        cause = failure.cause(found for found in map(partial(failure.read_failure, ranks), _own_ranks(context)) if found)
        raise failure.error_of(cause) if cause else error from error
    require_compiled(summary)
    return summary


def require_compiled(summary: neuron_compile.Summary) -> None:
    """Refuse to go on with graphs that have no compiled form.

    Raises:
        BadConfig: one does not fit the device's memory.
        Defect: any other reason; the compiler's own words are the value.
    """
    if not summary.failed:
        return
    words = [f"{graph.module}: {line}" for graph in summary.failed for line in graph.words]
    if any(sign in line for line in words for sign in OUT_OF_MEMORY):
        raise BadConfig(
            "a graph does not fit the device's memory",
            value=words,
            rule=f"{len(summary.failed)} of {summary.graphs} graphs failed",
            remedy="lower train.batch_size, or set train.accumulation or train.activation_checkpointing",
        )
    raise Defect(
        "the compiler could not compile every graph",
        value=words,
        rule=f"{len(summary.failed)} of {summary.graphs} graphs failed",
        remedy="compile.optlevel = 1 avoids many failures; what is compiled already stays in the cache",
    )


def wait_for_nodes(context: StageContext) -> None:
    """Until every node has said that it is done; a node that fails or vanishes ends the gang, whose supervisor watches."""
    for node in range(context.world.node.nodes):
        while not _has_compiled(context, node):
            context.heartbeat.beat(note=f"waiting for node {node} to compile", patience=COMPILE_PATIENCE)
            time.sleep(POLL_SECONDS)


def _has_compiled(context: StageContext, node: int) -> bool:
    """Whether a node is done in this attempt; what it left in an earlier one says nothing."""
    uri = context.paths.compiled_node(node)
    return store.exists(uri) and gang.same_attempt(store.read_json(uri), context.world.node)


def cached_graphs(cache: str) -> dict[str, GraphDescription | None]:
    """Descriptions of all graphs in the cache.

    Raises:
        Defect: one has no compiled form, or there are none at all.
    """
    states = neuron_compile.modules(cache)
    if not states:
        raise Defect(
            "the trial has left no graph in the cache",
            value=cache,
            rule="every graph of training is there after neuron_parallel_compile",
            remedy="see the log above for which cache it used",
        )
    if unfinished := [f"{key}: {state.value}" for key, state in states.items() if state != neuron_compile.State.DONE]:
        raise Defect(
            "graphs are left without a compiled form",
            value=unfinished,
            rule="neuron_parallel_compile said that all were compiled",
            remedy="start the run again; what is compiled already stays in the cache",
        )
    return {key: describe(store.read_bytes(store.join(cache, key, neuron_compile.HLO_FILE))) for key in states}


def trace_encoders(context: StageContext) -> dict[str, GraphDescription | None]:
    """Trace the encoder for every shape of evaluate and embed and store the forms; their names (their programs are not kept)."""
    from pipeline.runtime import neuron

    plan, config = context.plan, context.plan.config
    assert plan.graphs is not None
    neuron.require_neuron()
    context.heartbeat.beat(note="tracing encoders")
    encoder = load_encoder(store.local_folder(plan.parent.folder, context.scratch / "parent"), config.model)
    prepare_for_inference(encoder, fused_attention=False)
    folder = context.scratch / "traces"
    shapes = encode_shapes(config.embed.buckets, config.embed.tokens_per_batch)
    packed = for_encoding(encoder, plan.world.kind).eval()
    names: dict[str, GraphDescription | None] = {}
    for shape in shapes:
        context.heartbeat.beat(note=f"tracing the encoder for {shape[0]} x {shape[1]} tokens", patience=COMPILE_PATIENCE)
        flags = plan.graphs.infer_compiler_flags.split()
        (path,) = neuron.trace_encoder(packed, [shape], folder, flags=flags, precision=plan.world.precision)
        names[path.name] = None
    store.upload_folder(folder, traces_uri(context.paths.bucket_root, plan.graphs.infer))
    return names


def _own_ranks(context: StageContext) -> range:
    per_node = context.plan.world.ranks_per_node
    return range(context.world.rank * per_node, (context.world.rank + 1) * per_node)


def _describe(device: Device, key: str) -> GraphDescription | None:
    module = device.graph_module(key)
    return describe(module) if module else None
