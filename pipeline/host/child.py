"""A stage as a child process, started as its container would be: its exit code, duration and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in a unit of ru_maxrss: getrusage(2) says kilobytes on Linux, bytes on macOS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """The end of a stage's process.

    Attributes:
        code: its exit code, negative for a signal as in `subprocess`.
        seconds: from its start to its end.
        memory_bytes: largest host memory of its processes at one moment, each counted with its own peak of resident memory.
        timed_out: it was stopped because it took too long.
    """

    code: int
    seconds: float
    memory_bytes: int
    timed_out: bool


def run_stage(
    stage: Stage, run: str, *, log: Path, timeout_seconds: float, on_poll: Callable[[], None], keep_open: tuple[int, ...] = ()
) -> StageEnd:
    """Run `trnpipe stage STAGE --run RUN` as the only node of its job and wait for its end.

    Args:
        run: the run folder.
        log: file for the stage's output.
        timeout_seconds: after this it is terminated.
        on_poll: called several times a second while it runs; its exception ends the stage.
        keep_open: file descriptors that the stage's supervisor inherits.
    """
    command = [sys.executable, "-m", "pipeline.cli", "stage", stage.value, "--run", RunPaths(run).root]
    started = time.monotonic()
    with open(log, "wb") as stream:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the stage.
        process = subprocess.Popen(
            command,
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
        while (ended := _reap(process)) is None and not timed_out:
            memory = max(memory, tree_memory(process.pid))
            on_poll()
            time.sleep(POLL_SECONDS)
            timed_out = time.monotonic() - started > timeout_seconds
    finally:
        end_group(process, grace_seconds=STOP_SECONDS)
    return StageEnd(
        code=process.wait(),
        seconds=time.monotonic() - started,
        memory_bytes=max(memory, ended or 0),
        timed_out=timed_out and ended is None,
    )


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
    try:
        return StageFailure.from_json(store.read_bytes(paths.failure(stage)))
    except MissingInput:
        return None


def sentence(what: str, value: Any) -> str:
    """Return a failure in one line."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return f"{what}: {first}" if first else what


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """Return the memory of the largest process of the ended tree, in bytes; None while it runs. Popen does not report it."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not pid:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * MAXRSS_UNIT
