"""One rank of one stage: `python -m pipeline.runtime.rank STAGE --run URI`, started by the node's supervisor only.

Reads who it is from the environment, calls the stage function, writes `STAGE/result.json` on the rank that returned an
output, and turns whatever went wrong into `failure-RANK.json` in the node folder plus an exit code.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import traceback
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from pipeline.contract import RunPaths, Stage, StageFailure, StageResult, now
from pipeline.errors import Defect, ExitCode, Transient, TrnpipeError
from pipeline.runtime import store
from pipeline.runtime.context import Heartbeat, StageContext, StageOutput, node_folder
from pipeline.runtime.world import World
from pipeline.stages import stage_function

log = logging.getLogger("trnpipe")

REPORTED_PACKAGES = (
    "trnpipe",
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "transformers",
    "tokenizers",
    "pyarrow",
    "numpy",
)
PEER_TROUBLE = (
    "connection closed by peer",
    "connection reset by peer",
    "connect timeout",
    "timed out waiting",
    "socket timeout",
    "nccl",
)
"""Words of gloo's and NCCL's errors when another rank went away (torch 2.9: gloo/transport/tcp/pair.cc, TCPStore)."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.runtime.rank")
    parser.add_argument("stage", type=Stage)
    parser.add_argument("--run", required=True)
    options = parser.parse_args(arguments)
    world = World.from_environment()
    configure_logging(world)
    paths = RunPaths(options.run)
    try:
        run_stage(options.stage, paths, world)
    except BaseException as error:
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise
        return fail(options.stage, paths, world, error)
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
        output = stage_function(stage)(context)
        if output is not None:
            write_result(context, started, output)


def write_result(context: StageContext, started: str, output: StageOutput) -> None:
    result = StageResult(
        stage=context.stage.value,
        run=context.paths.run_id,
        status="done",
        started=started,
        finished=now(),
        fingerprint=context.plan.fingerprint,
        inputs=output.inputs,
        outputs=output.outputs,
        metrics=output.metrics,
        versions=versions(),
    )
    store.write_bytes(context.paths.result(context.stage), result.to_json())


def fail(stage: Stage, paths: RunPaths, world: World, error: BaseException) -> int:
    """Log the failure with its four parts last, leave it for the supervisor, and return the exit code."""
    expected = as_expected(error, world)
    if expected is not error or expected.exit_code == ExitCode.DEFECT:
        log.error("".join(traceback.format_exception(error)).rstrip())
    for line in expected.lines():
        log.error(line)
    values = expected.value if isinstance(expected.value, (list, tuple)) else [] if expected.value is None else [expected.value]
    failure = StageFailure(
        stage=stage.value,
        run=paths.run_id,
        exit_code=int(expected.exit_code),
        what=expected.what,
        value=[str(value) for value in values[:20]],
        rule=expected.rule,
        remedy=expected.remedy,
        node=world.node.node,
        rank=world.rank,
        attempt=world.node.attempt,
        host=platform.node(),
        time=now(),
    )
    folder = node_folder()
    if folder:
        (folder / f"failure-{world.rank}.json").write_text(json.dumps(asdict(failure)))
    return int(expected.exit_code)


def as_expected(error: BaseException, world: World) -> TrnpipeError:
    """The error in our own terms: ours as it is, a lost peer as transient, a full disk by name, anything else as a defect."""
    if isinstance(error, TrnpipeError):
        return error
    text = str(error).lower()
    if world.size > 1 and isinstance(error, RuntimeError) and any(words in text for words in PEER_TROUBLE):
        return Transient(
            "another rank went away during a collective", value=str(error).splitlines()[0], remedy="see the other nodes' logs"
        )
    if isinstance(error, OSError) and error.errno == 28:
        return Transient("the disk is full", value=str(error), remedy="use a larger root volume or fewer kept checkpoints")
    if isinstance(error, MemoryError):
        return Defect("out of host memory", value=str(error), remedy="use a smaller batch or a larger instance")
    return Defect(f"{type(error).__name__}: {error}", rule="this is a mistake in trnpipe", remedy="report it with the log above")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def configure_logging(world: World) -> None:
    """One line per record on stderr, with node and rank; Batch and the local runner keep them per node."""
    where = f"node {world.node.node} rank {world.rank}"
    logging.basicConfig(
        level=os.environ.get("TRNPIPE_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s %(levelname)-7s [{where}] %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


if __name__ == "__main__":
    # Daemon threads of the framework must not outlive a failed rank: leave at once, with everything flushed.
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
