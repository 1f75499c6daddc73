"""The wrapper around a node's command: exit codes, SIGTERM, and what happens when the runner goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.local import node


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", node.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_commands_exit_code_is_its_own(code: int) -> None:
    process = start(*python(f"import sys; sys.exit({code})"))
    process.wait(20)
    assert process.returncode == code


def test_a_signal_becomes_128_plus_its_number() -> None:
    process = start(*python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    process.wait(20)
    assert process.returncode == 137


def test_sigterm_reaches_a_command_that_has_just_begun() -> None:
    """However soon it comes: the command tells its parent to end before it does anything else."""
    code = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""
    for _ in range(10):
        process = start(sys.executable, "-I", "-S", "-c", code)
        assert process.wait(20) == 75


def test_sigterm_reaches_the_command_and_not_its_children() -> None:
    code = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
def leave(*_):
    child.wait()
    sys.exit(75 if child.returncode == 0 else 1)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
signal.pause()
"""
    process = start(*python(code))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.wait(20)
    assert process.returncode == 75


def test_everything_ends_when_the_runner_is_gone() -> None:
    code = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    process = start(*python(code))
    assert process.stdout is not None
    assert process.stdin is not None
    pid = int(process.stdout.readline())
    process.stdin.close()
    process.wait(20)
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.getpgid(0) != process.pid
