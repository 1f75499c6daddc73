"""compile: every graph of the run ahead of time, by a trial of the train command itself, on as many ranks as will train.

`xla` runs the trial and records which graphs it met; XLA on a CPU compiles in every process again, but what training may meet is
known. `neuron` runs `neuron_parallel_compile` around the trial, which fills the persistent cache, and traces the encoder for
evaluate and embed. Either way the two compiled sets that the plan names are complete afterwards; where they are already, nothing
is done, and the state machine does not even start this stage. `cpu` and `cuda` run operations one by one and have no graphs.
"""

from __future__ import annotations

import logging
import time

from pipeline.contract import EAGER_KINDS
from pipeline.model.compiled import GraphSet, missing_sets, set_uri, write_set
from pipeline.runtime.context import StageContext, StageOutput
from pipeline.runtime.device import Device
from pipeline.runtime.hlo import GraphDescription, describe
from pipeline.training.setup import joined
from pipeline.training.trial import run_trial

log = logging.getLogger("trnpipe")


def run(context: StageContext) -> StageOutput | None:
    """Make what is missing of the plan's compiled sets; rank 0 speaks for the stage."""
    plan = context.plan
    if plan.graphs is None:
        return _nothing(context, f"the kind `{plan.world.kind}` runs operations one by one and has no graphs")
    missing = missing_sets(context.paths.bucket_root, plan.graphs)
    if not missing:
        return _nothing(context, "both compiled sets are there")
    log.info("to be compiled: %s", ", ".join(missing))
    return compile_here(context)


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


def _describe(device: Device, key: str) -> GraphDescription | None:
    module = device.graph_module(key)
    return describe(module) if module else None
