"""Starts the processes of jobs by forking one that has everything loaded: most of a small run's time would be imports.

    runner ── asks ──► nursery ── forks ──► keeper ── forks ──► node (infra.local.node, own session)
                                                                  └─ forks ──► supervisor ── forks ──► rank

Which processes there are, and what they are to each other, is as with `subprocess.Popen`, whose place `Nursery.start` takes in
the runner: node, supervisor and rank run the same modules with the same arguments and environments. A keeper tells the runner how
its node ended. A node whose host has a PYTHONPATH of its own is started the usual way: what it loads first is the point.
"""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import boto3.session
import botocore.session

import infra.local.node

POLL_SECONDS = 0.01
PIECE_BYTES = 1 << 16
PRELOADED = (
    "boto3.s3.transfer",
    "jinja2",
    "numpy",
    "pipeline.host.own_job",
    "pipeline.host.ranks",
    "pipeline.host.supervisor",
    "pipeline.stages.embed",
    "pipeline.stages.ingest",
    "pipeline.stages.plan",
    "pipeline.stages.prepare",
    "pipeline.stages.prepare_inputs",
    "pipeline.stages.publish",
    "pipeline.stages.report",
    "pyarrow.parquet",
    "rich.console",
    "smart_open",
    "typer",
)
FRAMEWORKS = (
    "pipeline.stages.evaluate",
    "pipeline.stages.health_check",
    "pipeline.stages.train",
    "torch.distributed",
    "transformers.models.bert.modeling_bert",
)
"""What the real stages load besides. Loading starts no thread that a forked process would miss."""


class Nursery:
    """A forking process of one's own; `close` ends it, and everything that it forked ends as its node does.

    Args:
        light: load the stages of tests/chain/light and no framework, instead of the real ones with torch and transformers.
    """

    def __init__(self, *, light: bool) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.chain.nursery", str(theirs.fileno()), "light" if light else "real"]
        # Of a rank's environment, what counts before a framework is loaded.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "USE_TORCH_XLA": "0"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self._python_path = os.environ.get("PYTHONPATH")
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[bytes], **others: Any) -> Any:
        """As `subprocess.Popen(...)` for a node."""
        if env.get("PYTHONPATH") != self._python_path:
            return subprocess.Popen(command, cwd=cwd, env=env, stdout=stdout, **others)
        mine, theirs = os.pipe()
        status, told = os.pipe()
        request = pickle.dumps((list(command), str(cwd), dict(env)))
        with self._lock:
            socket.send_fds(self._socket, [struct.pack(">I", len(request))], [mine, stdout.fileno(), told])
            self._socket.sendall(request)
        for descriptor in (mine, told):
            os.close(descriptor)
        return Kept(status, os.fdopen(theirs, "wb"))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Kept:
    """As much of subprocess.Popen as the runner uses, for a process that a keeper waits for."""

    def __init__(self, status: int, stdin: IO[bytes]) -> None:
        self._status = status
        self.stdin = stdin
        self.returncode: int | None = None
        self.pid = int(self._read())
        self._lock = threading.Lock()

    def _read(self) -> bytes:
        return os.read(self._status, 16)

    def poll(self) -> int | None:
        return self._take(0)

    def wait(self) -> int:
        while (code := self._take(1)) is None:
            pass
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _take(self, seconds: float) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
                # A keeper that is gone without a word was killed with the whole machine.
                self.returncode = int(self._read() or -signal.SIGKILL)
                os.close(self._status)
            return self.returncode


class Forked:
    """As much of subprocess.Popen as a node uses for its supervisor, and a supervisor for its ranks."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: int | None = None, **_: Any
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            become(list(command), os.environ.copy() if env is None else env, stdin)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", timeout or 0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def become(command: list[str], environment: Mapping[str, str], stdin: int | None = None) -> NoReturn:
    """Turn this process into `python -m MODULE ARGUMENT...`, or into a node where no module is named; never returns."""
    code = 0
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if stdin == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        if environment.get("PYTHONFAULTHANDLER"):
            import faulthandler

            faulthandler.enable()
        words = [word for word in command[1:] if word not in ("-I", "-S")]
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__")
        else:
            sys.argv = words
            code = infra.local.node.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter does with it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(requests: socket.socket) -> None:
    """Fork a keeper for every request until the runner is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Ctrl-C is the runner's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        header, descriptors, _, _ = socket.recv_fds(requests, 4, 3)
        if not header:
            return
        data = b""
        (length,) = struct.unpack(">I", header)
        while len(data) < length:
            data += requests.recv(min(PIECE_BYTES, length - len(data)))
        if os.fork() == 0:
            requests.close()
            keep(*pickle.loads(data), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def keep(command: list[str], folder: str, environment: Mapping[str, str], stdin: int, stdout: int, told: int) -> NoReturn:
    """Fork the node and wait for it; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        for source, target in ((stdin, 0), (stdout, 1), (stdout, 2)):
            os.dup2(source, target)
        for descriptor in (stdin, stdout, told):
            os.close(descriptor)
        become(command, environment)
    os.close(stdin)
    os.close(stdout)
    os.write(told, b"%d" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _share_service_models() -> None:
    """Read the services' models once: they are most of what it takes to make a client, and every process makes its own."""
    loader = botocore.session.create_loader()
    botocore.session.create_loader = lambda *_: loader
    for service in ("s3", "batch"):
        boto3.session.Session(region_name="us-east-1").client(service)


def main() -> None:
    from importlib import import_module

    from pipeline.host import ranks

    names = PRELOADED
    if sys.argv[2] == "light":
        from tests.chain.light import mathematics, stages

        mathematics.install()
        stages.install()
    else:
        names += FRAMEWORKS
    for name in names:
        import_module(name)
    forking = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    ranks.subprocess = forking  # type: ignore[assignment]
    infra.local.node.subprocess = forking  # type: ignore[assignment]
    _share_service_models()
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
