"""One node of a local Batch job: `python -m infra.local.node COMMAND...`, started by the runner in a session of its own.

Runs the command, passes SIGTERM on to it (and to nothing else, as a container runtime does), and ends with its exit code,
128 + n when a signal killed it. Standard input is a pipe from the runner: when it closes, the runner is gone, whatever
killed it, and so everything that the command started is killed as well. Standard library only; it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType


def main() -> int:
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # Before the command is started, which may be told to end as soon as it runs: only the command decides what comes of that.
    signal.signal(signal.SIGTERM, forward)
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    for number in early:
        process.send_signal(number)
    threading.Thread(target=_kill_when_orphaned, daemon=True).start()
    code = process.wait()
    return 128 - code if code < 0 else code


def _kill_when_orphaned() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
