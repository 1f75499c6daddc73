"""Ties a process to the one that started it: when the parent ends in any way, Linux kills the child.

An orphaned rank would compute in vain and hold its NeuronCore. A program of others (torchrun, neuron_parallel_compile) is tied by
starting it as `python -m pipeline.run.tether PROGRAM ...`, which ties itself and then becomes the program. Each link of
the chain names itself to the next in TRNPIPE_PARENT_PID. Elsewhere than on Linux (local runs on macOS) nothing is tied.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from pipeline.errors import ExitCode

PARENT = "TRNPIPE_PARENT_PID"
"""The process that this one must not outlive; absent where a person started it."""

ANY_PARENT = "--any-parent"
"""Option: tie to the process that started this one, which is another program."""

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h. The setting outlives exec; children do not inherit it."""


def tied(command: Sequence[str], *, any_parent: bool = False) -> list[str]:
    """Return the command line that runs `command` tied to the process that starts it, which passes its pid in TRNPIPE_PARENT_PID.

    Args:
        any_parent: the starting process is another program, whose pid is not passed.
    """
    return [sys.executable, "-m", __name__, *([ANY_PARENT] if any_parent else []), *command]


def tie_to_parent() -> None:
    """Die with the process that TRNPIPE_PARENT_PID names; end at once if it is already gone."""
    parent = os.environ.get(PARENT)
    if parent is not None and sys.platform.startswith("linux"):
        _die_with_parent()
        # The kernel reports only deaths from now on.
        if os.getppid() != int(parent):
            os._exit(ExitCode.TRANSIENT)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: list[str]) -> None:
    if command[0] == ANY_PARENT:
        command = command[1:]
        if sys.platform.startswith("linux"):
            _die_with_parent()
    else:
        tie_to_parent()
    os.environ[PARENT] = str(os.getpid())
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
