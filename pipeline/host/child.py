"""A stage as a child process, started as its container would be: its exit code, duration and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import store
from pipeline.contract import RunPaths, Stage, StageFailure
from pipeline.errors import MissingInput
from pipeline.run.processes import end_group, tree_memory
from pipeline.sdk.neuron_launch import LAUNCHER_NAMES

POLL_SECONDS = 0.2
STOP_SECONDS = 40.0
"""From SIGTERM to SIGKILL: the supervisor's own 20 seconds for its ranks, and time to write how the stage ended."""


def run_stage(
    stage: Stage, run: str, *, log: Path, timeout_seconds: float, on_poll: Callable[[], None], keep_open: tuple[int, ...] = ()
) -> tuple[int, int, bool]:
    """Run `trnpipe stage STAGE --run RUN` as the only node of its job and wait for its end.

    Args:
        run: the run folder.
        log: file for the stage's output.
        timeout_seconds: after this it is terminated.
        on_poll: called several times a second while it runs; its exception ends the stage.
        keep_open: file descriptors that the stage's supervisor inherits.

    Returns:
        Its exit code, negative for a signal as in `subprocess`; the largest host memory of its processes at one moment, in bytes,
        each counted with its own peak of resident memory; whether it was stopped because it took too long.
    """
    deadline = time.monotonic() + timeout_seconds
    with open(log, "wb") as stream:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the stage.
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "stage", stage.value, "--run", RunPaths(run).root],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # Alone: without the variables of a Batch job or a torchrun gang.
            env={
                name: value
                for name, value in os.environ.items()
                if name not in LAUNCHER_NAMES and not name.startswith("AWS_BATCH_")
            },
            start_new_session=True,
            pass_fds=keep_open,
        )
    memory, timed_out = 0, False
    try:
        while process.poll() is None and not timed_out:
            memory = max(memory, tree_memory(process.pid))
            on_poll()
            time.sleep(POLL_SECONDS)
            timed_out = process.poll() is None and time.monotonic() > deadline
    finally:
        end_group(process, grace_seconds=STOP_SECONDS)
    return process.wait(), memory, timed_out


def progress_note(paths: RunPaths, stage: Stage) -> str:
    """Return the progress of a running stage in words."""
    try:
        record = store.read_json(paths.progress(stage, 0))
    except (MissingInput, ValueError):
        return "starting"
    done = f" {record['done']:.0f} of {record['total']:.0f}" if record.get("total") else ""
    return f"{record.get('note') or 'starting'}{done}"


def read_failure(paths: RunPaths, stage: Stage) -> StageFailure | None:
    """Return why a stage failed, None without a record."""
    uri = paths.failure(stage)
    return StageFailure.from_json(store.read_bytes(uri)) if store.exists(uri) else None


def sentence(what: str, value: Any) -> str:
    """Return a failure in one line."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return f"{what}: {first}" if first else what
