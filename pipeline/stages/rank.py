"""One rank of one stage: `python -m pipeline.stages.rank STAGE RUN_URI`, started by the node's supervisor or by torchrun.

Reads who it is from the environment, calls the stage function, writes `STAGE/result.json` on the rank that returned an
output, and turns every exception into `failure-RANK.json` in the node folder plus an exit code.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from pipeline import store
from pipeline.contract import STAGES_WITHOUT_PLAN, RunPaths, Stage, StageResult, now
from pipeline.errors import BadConfig, ExitCode, MissingInput, TrnpipeError, first_line
from pipeline.host.exhaustion import exhaustion
from pipeline.host.host import versions
from pipeline.log import log
from pipeline.run import failure, tether
from pipeline.run.context import StageContext, StageOutput, node_folder
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.logs import configure_logging
from pipeline.run.world import World
from pipeline.stages import StageFunction, stage_function

PEER_TROUBLE = ("gloo/transport", "connection closed by peer", "connection reset by peer", "timed out waiting", "nccl")
"""Parts of gloo's and NCCL's plain RuntimeErrors when another rank went away (torch 2.9: gloo/transport/tcp/*.cc)."""


def main(arguments: Sequence[str]) -> int:
    stage, paths = Stage(arguments[0]), RunPaths(arguments[1])
    tether.tie_to_parent()
    world = World.from_environment()
    configure_logging(f"{paths.run_id} node {world.node.index} rank {world.rank}")
    try:
        run_stage(stage, paths, world)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - all others are the stage's failure
        return fail(stage, paths, world, error)
    return ExitCode.DONE


def run_stage(stage: Stage, paths: RunPaths, world: World) -> None:
    """Run the stage function of this rank and write the result if this rank speaks for the stage."""
    folder = node_folder()
    started = now()
    with tempfile.TemporaryDirectory(prefix="trnpipe-") as private:
        scratch = folder / "scratch" if folder else Path(private)
        scratch.mkdir(exist_ok=True)
        context = StageContext(stage=stage, paths=paths, world=world, scratch=scratch, heartbeat=Heartbeat(folder, world.rank))
        context.heartbeat.beat(note="starting")
        output = load(stage)(context)
        if output is not None:
            write_result(context, started, output)


def load(stage: Stage) -> StageFunction:
    """Return the stage's function, with the frameworks that it needs loaded and left out of later garbage collections."""
    # Modules stay, so a collection while they load finds nothing; all of them took a fifth of evaluate's loading time.
    gc.disable()
    # transformers loads scipy, where it is installed, for the losses of other models: a tenth of a rank's loading time.
    # None stops the import.
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    try:
        return stage_function(stage)
    finally:
        if sys.modules["scipy"] is None:
            del sys.modules["scipy"]
        gc.freeze()
        gc.enable()


def write_result(context: StageContext, started: str, output: StageOutput) -> None:
    result = StageResult(
        stage=context.stage.value,
        run=context.paths.run_id,
        status="done",
        started=started,
        finished=now(),
        fingerprint=fingerprint(context),
        inputs=output.inputs,
        outputs=output.outputs,
        metrics=output.metrics,
        versions=versions(),
    )
    store.write_bytes(context.paths.result(context.stage), result.to_json())


def fingerprint(context: StageContext) -> str:
    """Return the plan's fingerprint; empty where a stage may run without a plan, and there is none."""
    try:
        return context.plan.fingerprint_of(context.stage)
    except MissingInput:
        if context.stage in STAGES_WITHOUT_PLAN:
            return ""
        raise


def fail(stage: Stage, paths: RunPaths, world: World, error: BaseException) -> int:
    """Log the failure with its four parts last, leave it for the supervisor, and return the exit code."""
    expected = as_expected(error, world)
    if expected is not error or expected.exit_code == ExitCode.DEFECT:
        log.error("".join(traceback.format_exception(error)).rstrip())
    record = failure.describe(expected, stage=stage, run=paths.run_id, node=world.node, rank=world.rank)
    for line in failure.error_of(record).lines():
        log.error(line)
    folder = node_folder()
    if folder:
        try:
            failure.write_failure(folder, record)
        except OSError as full:
            # Perhaps the full disk is the cause. The exit code is all that Batch needs.
            log.error("the failure cannot be left for the supervisor: %s", full)
    return int(expected.exit_code)


def as_expected(error: BaseException, world: World) -> TrnpipeError:
    """Return the error as one of our own types: resource exhaustion and a lost peer by name, any other as unexpected."""
    if isinstance(error, TrnpipeError):
        return error
    if world.size > 1 and is_peer_trouble(error):
        return failure.lost_peer(first_line(error))
    if exhausted := exhaustion(error):
        return exhausted
    if type(error).__name__ == "OutOfMemoryError":  # torch's; the framework need not be loaded for a stage to fail
        return BadConfig("out of device memory", value=first_line(error), remedy="use a smaller batch, or a device with more")
    return failure.unexpected(error)


def is_peer_trouble(error: BaseException) -> bool:
    """Whether a collective or the rendezvous failed because of another rank."""
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(words in str(error).lower() for words in PEER_TROUBLE)


if __name__ == "__main__":
    # Daemon threads of the framework must not outlive a failed rank: leave at once, with everything flushed. NeuronCores are free
    # when the process is gone: the driver stops their queues and gives locks and memory back while it closes the process's files
    # (ncdev_flush, https://github.com/aws-neuron/aws-neuron-driver/blob/master/neuron_cdev.c).
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
