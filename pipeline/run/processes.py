"""Processes of this host that other programs started: found and read in /proc (Linux), ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.log import log

PROC = Path("/proc")
POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
"""Time for processes to end after SIGKILL; one that does not hangs in the kernel or in a driver."""


def signal_group(group: int, number: int) -> bool:
    """Signal all processes of a group; returns whether there were any. (macOS answers EPERM where only zombies are left.)"""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_group(process: subprocess.Popen[bytes], *, grace_seconds: float = 0.0) -> None:
    """End a process that was started in a session of its own, and all that it started in it.

    Args:
        grace_seconds: from SIGTERM to SIGKILL; 0: SIGKILL at once.
    """
    try:
        if grace_seconds:
            _signal_and_wait(process, signal.SIGTERM, grace_seconds)
    finally:  # also where the wait is interrupted
        _signal_and_wait(process, signal.SIGKILL, KILL_SECONDS)
    if process.poll() is None:
        log.warning("process %d does not end: it hangs in the kernel or in a driver", process.pid)


def _signal_and_wait(process: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    signal_group(process.pid, number)
    # A leader that is not reaped still counts as one of its group.
    until(lambda: process.poll() is not None and not signal_group(process.pid, 0), seconds)


def until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until this is done; return whether it was in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def all_processes() -> dict[int, dict[str, str]]:
    """Return the fields of /proc/PID/status by process id; empty where there is no /proc."""
    return {int(path.name): fields for path in PROC.glob("[0-9]*") if (fields := status(int(path.name)))}


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status (proc_pid_status(5)); empty if there is no such process."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in _read(pid, "status").splitlines())}


def children(parent: int) -> list[int]:
    """Return the children of a process."""
    return [pid for pid, fields in all_processes().items() if fields["PPid"] == str(parent)]


def lives(pid: int) -> bool:
    """Whether the process runs, or could: neither gone nor a zombie that its stopped parent has not fetched."""
    return status(pid).get("State", "Z")[0] not in "ZX"


def environment(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with; empty if it is gone."""
    return dict(part.split("=", 1) for part in _read(pid, "environ").split("\0") if "=" in part)


def tree_memory(root: int) -> int:
    """Return the resident memory of a process and all below it, each at its own peak so far, in bytes; 0 without /proc."""
    processes = all_processes()
    family = {root}
    while grown := {pid for pid, fields in processes.items() if int(fields["PPid"]) in family} - family:
        family |= grown
    return sum(int(processes[pid].get("VmHWM", "0 kB").split()[0]) * 1024 for pid in family & processes.keys())


def _read(pid: int, name: str) -> str:
    """Return a file of /proc/PID; empty if the process is gone."""
    try:
        return (PROC / str(pid) / name).read_text("utf-8", "replace")
    except OSError:
        return ""
