"""compile: every graph of the run ahead of time, by a trial of the train command itself, on as many ranks as will train.

`xla` runs the trial and records which graphs it met; XLA on a CPU compiles in every process again, but training's graphs are then
known. `neuron` runs `neuron_parallel_compile` around the trial, which fills the persistent cache; then a step of every graph on
all ranks, which shows whether they load and fit; and traces the encoder for evaluate and embed. Either way the two compiled sets
that the plan names are complete afterwards; where they exist already, the state machine does not even start this stage. `cpu` and
`cuda` run operations one by one and have no graphs.

With `compile.where = cpu`, two stages do the slow part before the gang's health check: collect runs the trial on the gang and
compiles nothing, precompile compiles its graphs and traces the encoder on a host without a device. compile then finds both, and
compiles only what they have left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from pipeline import store
from pipeline.backends.hlo import GraphDescription, describe
from pipeline.backends.traced import FORM, TracedEncoder, trace_encoder
from pipeline.config import ModelConfig
from pipeline.contract import Stage, attempt_seconds
from pipeline.errors import BadConfig, Defect, ExitCode, FailureKind, TrnpipeError
from pipeline.graphs.compiled import GraphSet, inference_in_bf16, read_set, require_faithful, traces_uri, write_set
from pipeline.graphs.fingerprint import missing_sets, set_uri
from pipeline.host import gang
from pipeline.log import log
from pipeline.model.encoder import new_encoder
from pipeline.model.folder import inspect_folder
from pipeline.model.inference import batch_rows, inference_form
from pipeline.run import failure
from pipeline.run.context import NODE_FOLDER, StageContext, StageOutput
from pipeline.run_inputs import GraphsPlan
from pipeline.sdk import compile_cache, known_errors, neuron_launch
from pipeline.training.setup import gang_device
from pipeline.training.trial import run_trial

JOIN_SECONDS = 900
"""For the torchruns of all nodes to find each other; hosts of a gang start minutes apart."""

SHARE_OF_TIMEOUT = 0.95
"""Share of the stage's time for compiling and loading; the rest is for reporting a failure."""

POLL_SECONDS = 2.0

LOADING_SECONDS = 1800 + JOIN_SECONDS
"""For the gang to load what it compiled and run it once: seconds per graph, once nodes have met and ranks have the model."""

LOADING = "TRNPIPE_TRIAL_LOADS"
"""Set for the ranks of a trial that runs what is compiled."""

TARGET_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Tells Neuron's libraries on a host without a device what to compile for (github.com/huggingface/optimum-neuron/pull/961)."""

RANDOM_WEIGHTS_SCALE = 0.02
"""The standard deviation with which BERT's own weights begin."""


def run(context: StageContext) -> StageOutput | None:
    """Make the missing ones of the plan's compiled sets, or the stage's share of them; rank 0 returns the stage's output."""
    plan = context.plan
    if plan.graphs is None:
        return _nothing(context, f"the kind `{plan.world.kind}` runs operations one by one and has no graphs")
    if not missing_sets(context.paths.bucket_root, plan.graphs):
        return _nothing(context, "both compiled sets are there")
    if plan.world.kind != "neuron":
        return compile_here(context, plan.graphs)
    if compile_cache.extraction_mode() or LOADING in os.environ:
        # One rank of a trial: below neuron_parallel_compile, which compiles what the ranks wrote down when they have ended, or
        # after it, with the compiled graphs.
        with gang_device(context, plan) as device:
            run_trial(context, device, loading=device.computes)
        return None
    return {Stage.COLLECT: collect, Stage.PRECOMPILE: precompile}.get(context.stage, compile_on_neuron)(context, plan.graphs)


def _nothing(context: StageContext, reason: str) -> StageOutput | None:
    if not context.world.is_leader:
        return None
    log.info("nothing is compiled: %s", reason)
    return StageOutput(metrics={"compiles": False, "graphs": 0, "reason": reason})


def compile_here(context: StageContext, graphs: GraphsPlan) -> StageOutput | None:
    """Run the trial in this process and record what it met (`xla`)."""
    began = time.monotonic()
    with gang_device(context, context.plan) as device:
        trial = run_trial(context, device)
        modules = {key: device.graph_module(key) for key in sorted(trial.all)}
    described = {key: describe(module) if module else None for key, module in modules.items()}
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


def compile_on_neuron(context: StageContext, graphs: GraphsPlan) -> StageOutput | None:
    """Fill the persistent cache with training's graphs, all nodes together, and trace the encoder on the first one.

    Raises:
        BadConfig: a graph that is too large for the device or the compiler, or what else settings can help.
        Defect: a graph that could not be compiled, with the compiler's words.
        TrnpipeError: graphs that do not run, see `load_training`.
    """
    began = time.monotonic()
    root, run_id, leader = context.paths.bucket_root, context.paths.run_id, context.world.is_leader
    train_uri, infer_uri = set_uri(root, "train", graphs.train), set_uri(root, "infer", graphs.infer)
    metrics: dict[str, Any] = {}
    trained: GraphSet | None = None
    if not store.exists(train_uri):
        with use_of_cache(context, graphs):
            summary = compile_training(context, graphs)
            require_compiled(summary)
            node = context.world.node
            store.write_json(
                context.paths.compiled_node(node.node), {**asdict(summary), "attempt": node.attempt, "job": node.job}
            )
            wait_for_nodes(context)
            if leader:
                trained = GraphSet(fingerprint=graphs.train, run=run_id, graphs=cached_graphs(graphs.cache, summary.modules))
            metrics["loading_seconds"] = load_training(context)
        metrics |= _figures(summary)
    if not leader:
        return None
    if not store.exists(infer_uri):
        trace(context, graphs)
        # No program is kept of it.
        write_set(infer_uri, GraphSet(fingerprint=graphs.infer, run=run_id, graphs={FORM: None}))
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


def collect(context: StageContext, graphs: GraphsPlan) -> StageOutput | None:
    """Write training's graphs to the persistent cache and compile none, all nodes together."""
    if store.exists(set_uri(context.paths.bucket_root, "train", graphs.train)):
        return _nothing(context, "training's compiled set is there")
    summary = compile_training(context, graphs, half="collect")
    if not context.world.is_leader:
        return None
    store.write_json(context.paths.collected, summary.modules)
    return StageOutput(metrics={"graphs": len(summary.modules), "train_cached": summary.cached, "seconds": summary.seconds})


def precompile(context: StageContext, graphs: GraphsPlan) -> StageOutput:
    """Compile what collect has written, and trace the encoder, on a host without a device.

    Raises:
        TrnpipeError: as `compile_on_neuron`, before a gang starts.
    """
    began = time.monotonic()
    root, config = context.paths.bucket_root, context.plan.config.compile
    metrics: dict[str, Any] = {}
    if not store.exists(set_uri(root, "train", graphs.train)):
        os.environ[TARGET_OVERRIDE] = config.target
        with use_of_cache(context, graphs):
            summary = compile_training(context, graphs, half="compile")
        # The tool compiles what other runs have collected, too; what it says of those is theirs.
        collected = store.read_json(context.paths.collected)
        require_compiled(replace(summary, failed=tuple(graph for graph in summary.failed if graph.module in collected)))
        metrics = _figures(summary)
    if not store.exists(set_uri(root, "infer", graphs.infer)):
        os.environ[TARGET_OVERRIDE] = config.infer_target
        trace(context, graphs)
        metrics["traced"] = True
    return StageOutput(metrics={"seconds": time.monotonic() - began, **metrics})


def _figures(summary: compile_cache.Summary) -> dict[str, Any]:
    return {"train_compiled": summary.compiled, "train_cached": summary.cached, "train_seconds": summary.seconds}


@contextmanager
def use_of_cache(context: StageContext, graphs: GraphsPlan) -> Iterator[None]:
    """Announce this run to the others that share the cache, and remove the locks of its earlier attempts."""
    run_id, leader = context.paths.run_id, context.world.is_leader
    compile_cache.register(graphs.cache, run_id)
    try:
        if leader:
            # No compiler of this job is at work yet (a gang's start when all nodes' ranks have met), so every lock that is there
            # is an earlier attempt's, however young.
            compile_cache.clear_locks(graphs.cache, in_use=bool(compile_cache.others(graphs.cache, run_id)))
        yield
    finally:
        if leader:
            compile_cache.unregister(graphs.cache, run_id)


def compile_training(
    context: StageContext, graphs: GraphsPlan, *, half: Literal["collect", "compile"] | None = None
) -> compile_cache.Summary:
    """Run neuron_parallel_compile around this node's share of the trial, or one half of it.

    Raises:
        TrnpipeError: why a rank of the trial failed; see also `compile_cache.parallel_compile`.
    """
    with trial_folder(context, "extracting") as ranks:
        return compile_cache.parallel_compile(
            # The tool demands a command also where it runs none.
            ["true"] if half == "compile" else trial_command(context),
            flags=graphs.compiler_flags,
            cache=graphs.cache,
            parallel=context.plan.config.compile.parallel,
            timeout=compile_seconds(context),
            on_line=_beat(context, "neuron_parallel_compile"),
            environment={**os.environ, NODE_FOLDER: str(ranks)},
            half=half,
        )


def compile_seconds(context: StageContext) -> float:
    """Return the seconds for compiling: the attempt less the time for loading, but at least half of it; all where none loads.

    Batch retries an attempt that ends itself in time, with its compiled graphs in the cache; one that Batch ends is not retried.
    """
    seconds = attempt_seconds(context.stage) * SHARE_OF_TIMEOUT
    return seconds if context.stage == Stage.COLLECT else max(seconds - LOADING_SECONDS, seconds / 2)


def load_training(context: StageContext) -> float:
    """Run a real step of every compiled graph on all ranks and discard the results; return the seconds it took.

    Compiling needs no device. Whether programs load, and fit the device's memory together, would otherwise first show in train.

    Raises:
        NoProgress: it did not end in time.
        TrnpipeError: why a rank failed, or what the log says of it.
    """
    began = time.monotonic()
    with trial_folder(context, "loading") as ranks:
        compile_cache.run_command(
            trial_command(context),
            timeout=min(LOADING_SECONDS, attempt_seconds(context.stage) * SHARE_OF_TIMEOUT - compile_seconds(context)),
            on_line=_beat(context, "running every graph once"),
            environment={**os.environ, NODE_FOLDER: str(ranks), LOADING: "1"},
        )
    seconds = time.monotonic() - began
    log.info("every graph loads and runs: %.0f s", seconds)
    return seconds


def trial_command(context: StageContext) -> list[str]:
    """Return the command line of this node's share of a trial."""
    world, node = context.plan.world, context.world.node
    return neuron_launch.torchrun_command(
        ["pipeline.stages.rank", context.stage.value, context.paths.root],
        nodes=world.nodes,
        node=node.node,
        ranks_per_node=world.ranks_per_node,
        leader=context.world.leader,
        port=context.world.port,
        join_seconds=JOIN_SECONDS,
    )


@contextmanager
def trial_folder(context: StageContext, name: str) -> Iterator[Path]:
    """Yield the folder in which a trial's ranks leave their failures.

    Raises:
        TrnpipeError: a rank's failure, where the block ends with an error that explains less.
    """
    ranks = context.scratch / f"trial-{name}"
    ranks.mkdir()
    try:
        yield ranks
    except TrnpipeError as error:
        per_node = context.plan.world.ranks_per_node
        own = range(context.world.rank * per_node, (context.world.rank + 1) * per_node)
        cause = failure.cause(found for rank in own if (found := failure.read_failure(ranks, rank)))
        # For an unexpected exception the log may have a better explanation, which the error is then.
        if cause is None or (cause.kind is FailureKind.UNEXPECTED and not isinstance(error, Defect)):
            raise
        raise failure.error_of(cause) from error


def _beat(context: StageContext, note: str) -> Callable[[str], None]:
    """Return a function that writes a line of a trial's output to the log and counts it as progress."""
    lines = 0

    def beat(line: str) -> None:
        nonlocal lines
        if line:
            lines += 1
            sys.stdout.write(f"{line}\n")
        # A compiler prints nothing for a long time; the trial's own time limit ends it.
        context.heartbeat.beat(note=f"{note}, {lines} lines so far", patience=attempt_seconds(context.stage))

    return beat


def require_compiled(summary: compile_cache.Summary) -> None:
    """Refuse to continue with graphs that have no compiled form.

    Raises:
        BadConfig: one is too large for the device or the compiler, or what else settings can help.
        Defect: any other reason; the compiler's own words are the value.
    """
    if not summary.failed:
        return
    words = [f"{graph.module}: {line}" for graph in summary.failed for line in graph.words]
    finding = known_errors.classify(words)
    if finding and finding.row.exit_code == ExitCode.BAD_CONFIG:
        raise BadConfig(
            finding.row.meaning,
            value=words,
            rule=f"{len(summary.failed)} of {summary.graphs} graphs failed",
            remedy=finding.row.remedy,
        )
    raise Defect(
        "the compiler could not compile every graph",
        value=words,
        rule=f"{len(summary.failed)} of {summary.graphs} graphs failed",
        remedy="report it with the compiler's words; what is compiled already stays in the cache",
    )


def wait_for_nodes(context: StageContext) -> None:
    """Wait until every node has compiled. The main node's supervisor ends the gang when a node fails or vanishes."""
    own = context.world.node
    for node in range(own.nodes):
        uri = context.paths.compiled_node(node)
        # A record of an earlier attempt does not count.
        while not (store.exists(uri) and gang.same_attempt(store.read_json(uri), own)):
            context.heartbeat.beat(note=f"waiting for node {node} to compile", patience=attempt_seconds(context.stage))
            time.sleep(POLL_SECONDS)


def cached_graphs(cache: str, own: Collection[str]) -> dict[str, GraphDescription | None]:
    """Return the descriptions of a set's graphs in the cache, by their keys there.

    Args:
        own: names of the graphs that the trial met.

    Raises:
        Defect: one has no compiled form, or there are none at all.
    """
    states = {key: state for key, state in compile_cache.modules(cache).items() if key.rsplit("/", 1)[-1] in own}
    if not states:
        raise Defect(
            "the trial has left no graph in the cache",
            value=cache,
            rule="every graph of training is there after neuron_parallel_compile",
            remedy="see the log above for which cache it used",
        )
    if unfinished := [f"{key}: {state.value}" for key, state in states.items() if state != compile_cache.GraphState.DONE]:
        raise Defect(
            "graphs are left without a compiled form",
            value=unfinished,
            rule="neuron_parallel_compile said that all were compiled",
            remedy="start the run again; what is compiled already stays in the cache",
        )
    return {key: describe(store.read_bytes(store.join(cache, key, compile_cache.HLO_FILE))) for key in states}


def trace(context: StageContext, graphs: GraphsPlan) -> None:
    """Trace the encoder of evaluate and embed, or take over what precompile has traced, and store the form.

    precompile has no core to try the form on and stores it for compile.

    Raises:
        Defect: the form gives other embeddings than the encoder on the host; nothing is stored.
    """
    from pipeline.backends import neuron

    plan, config = context.plan, context.plan.config
    neuron.require_neuron()
    context.heartbeat.beat(note="tracing the encoder")
    backbone, _ = inspect_folder(store.local_folder(plan.parent.folder, context.scratch / "parent"), config.model)
    folder = context.scratch / "traces"
    patience = attempt_seconds(context.stage)
    shape = batch_rows(config.embed.length, config.embed.tokens_per_batch), config.embed.length
    bf16 = inference_in_bf16(config.compile, plan.world.kind, plan.world.precision)
    context.heartbeat.beat(note=f"tracing the encoder for {shape[0]} x {shape[1]} tokens", patience=patience)
    # precompile traces anew each time: compile may have refused what an earlier execution of the run left.
    if context.stage == Stage.COMPILE and store.list_objects(context.paths.traces):
        store.download_folder(context.paths.traces, folder)
    else:
        trace_encoder(random_encoder(backbone, config.model, bf16), shape, folder, flags=graphs.infer_compiler_flags.split())
    if context.stage == Stage.PRECOMPILE:
        store.upload_folder(folder, context.paths.traces)
        return
    context.heartbeat.beat(note="comparing the traced encoder with the encoder on the host", patience=patience)
    # The Neuron runtime keeps a core until its process ends, and the next ranks on this node need all of them.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        least = process.submit(check_trace, folder, backbone, config.model, bf16, shape).result()
    log.info("least cosine of the traced encoder to the encoder on the host: %.5f", least)
    store.upload_folder(folder, traces_uri(context.paths.bucket_root, graphs.infer))


def check_trace(folder: Path, backbone: PreTrainedConfig, config: ModelConfig, bf16: bool, shape: tuple[int, int]) -> float:
    """Give the traced form random weights on one core and compare it with the encoder on the host; see `require_faithful`.

    One core of one node is enough: every core runs the same program, and each process that embeds compares its own again.
    """
    # Before the runtime loads, which takes all cores that it may see.
    os.environ["NEURON_RT_VISIBLE_CORES"] = "0"
    from pipeline.backends import neuron

    neuron.require_neuron()
    packed = random_encoder(backbone, config, bf16)
    return require_faithful(TracedEncoder(folder, packed.state_dict()), packed, shape, int(backbone.vocab_size))


def random_encoder(backbone: PreTrainedConfig, config: ModelConfig, bf16: bool) -> nn.Module:
    """Return an encoder as evaluate and embed call it on `neuron`, with noise on every weight (fresh biases would all be 0)."""
    torch.manual_seed(0x5EED)
    encoder = new_encoder(backbone, config)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(RANDOM_WEIGHTS_SCALE * torch.randn_like(weight))
    return inference_form(encoder, compiles=True, bf16=bf16)
