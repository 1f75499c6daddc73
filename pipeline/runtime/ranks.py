"""The rank processes of one node, as their supervisor handles them: started, polled, made to show their stacks, stopped.

A rank that ends badly of itself becomes a `StageFailure`: the one it left in the node folder, else one made of its exit
status. Ranks that were stopped from here are no failures.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract import Stage, StageFailure
from pipeline.errors import Defect, ExitCode, Transient, TrnpipeError
from pipeline.runtime import failure
from pipeline.runtime.world import NodeWorld

log = logging.getLogger("trnpipe")

POLL_SECONDS = 0.1
STACKS_SECONDS = 5.0
"""Writing every Python stack takes milliseconds; a process that cannot do it in this time does not react to signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the ranks of this node are started with.

    Attributes:
        ranks_per_node: processes to start; a gang's nodes all start as many.
        nodes: nodes whose ranks form one world: the gang's, or 1.
        kind: the device kind, empty where there is no plan yet.
        folder: the node folder.
    """

    stage: Stage
    run: str
    node: NodeWorld
    nodes: int
    ranks_per_node: int
    kind: str
    folder: Path

    def rank(self, local_rank: int) -> int:
        return (self.node.node if self.nodes > 1 else 0) * self.ranks_per_node + local_rank

    def environment(self, local_rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of one rank: torchrun's names and what keeps the frameworks from guessing, over `base`."""
        alone_on_host = self.nodes == 1
        environment = {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **base,
            "RANK": str(self.rank(local_rank)),
            "WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": "127.0.0.1" if alone_on_host else self.node.leader,
            "MASTER_PORT": str(port),
            "TRNPIPE_NODE_DIR": str(self.folder),
            "TRNPIPE_SUPERVISOR_PID": str(os.getpid()),
            # On SIGABRT and on crashes every thread's Python stack goes to the log.
            "PYTHONFAULTHANDLER": "1",
        }
        if self.kind not in ("neuron", "xla"):
            # With torch-xla installed, Hugging Face libraries choose the XLA device by themselves.
            environment["USE_TORCH_XLA"] = "0"
        if self.kind == "cpu":
            # glibc gives every large block back to the kernel and faults its pages in again at the next step: keep them. Without
            # these a training step of MiniLM takes 1.07 times as long (tests/benchmarks/train_step.py).
            environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
        if alone_on_host or (self.node.leader.startswith("127.") and not self.node.is_main):
            # gloo takes the interface that the host name resolves to, which on laptops and in bare containers may be none.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return environment


class _Rank:
    """One process and what is known of its end."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.ended = False
        self.stopped = False
        self.failure: StageFailure | None = None


class Ranks:
    """All rank processes of this node."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        # Outside a gang nobody else has to know the port, and other runs on this host must not meet it.
        port = launch.node.port if launch.nodes > 1 else free_port()
        self._ranks = [self._start(local_rank, port) for local_rank in range(launch.ranks_per_node)]

    def _start(self, local_rank: int, port: int) -> _Rank:
        launch = self._launch
        command = [sys.executable, "-m", "pipeline.rank", launch.stage.value, "--run", launch.run]
        process = subprocess.Popen(command, env=launch.environment(local_rank, port, os.environ))
        log.info("rank %d is process %d", launch.rank(local_rank), process.pid)
        return _Rank(launch.rank(local_rank), process)

    @property
    def numbers(self) -> list[int]:
        return [rank.rank for rank in self._ranks]

    def running(self) -> list[int]:
        """The ranks whose processes have not ended; the first call after an end turns it into a failure or none."""
        for rank in self._ranks:
            code = None if rank.ended else rank.process.poll()
            if code is not None:
                rank.ended = True
                rank.failure = self._failure(rank, code)
        return [rank.rank for rank in self._ranks if not rank.ended]

    def failures(self) -> list[StageFailure]:
        """How ranks failed that ended of themselves."""
        self.running()
        return [rank.failure for rank in self._ranks if rank.failure is not None]

    def wait(self, seconds: float) -> bool:
        """Give the ranks time to end; whether all have."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to all that run, SIGKILL to those that are still there after the grace."""
        self._signal(self._living(), signal.SIGTERM)
        if not self.wait(grace_seconds):
            log.warning("ranks %s did not end %g seconds after SIGTERM: killing them", self.running(), grace_seconds)
            self.kill()

    def kill(self) -> None:
        self._signal(self._living(), signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
        self.running()

    def abort_with_stacks(self, first: Sequence[int]) -> None:
        """End every rank by SIGABRT, which writes its Python stacks to the log, one rank after another so that they stay legible.

        Args:
            first: ranks to begin with.
        """
        order = {number: place for place, number in enumerate(first)}
        for rank in sorted(self._living(), key=lambda rank: order.get(rank.rank, len(order))):
            log.error("stacks of rank %d:", rank.rank)
            # A process that somebody stopped sees the signal only when it goes on.
            self._signal([rank], signal.SIGABRT, signal.SIGCONT)
            try:
                rank.process.wait(STACKS_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("rank %d does not react to signals: it hangs in the kernel or in a driver", rank.rank)
        self.kill()

    def _living(self) -> list[_Rank]:
        running = set(self.running())
        return [rank for rank in self._ranks if rank.rank in running]

    def _signal(self, ranks: Sequence[_Rank], *signals: signal.Signals) -> None:
        for rank in ranks:
            rank.stopped = True
            for number in signals:
                rank.process.send_signal(number)

    def _failure(self, rank: _Rank, code: int) -> StageFailure | None:
        if code == 0:
            return None
        left = failure.read_failure(self._launch.folder, rank.rank)
        if left is not None or rank.stopped:
            return left
        launch = self._launch
        error = unexplained_end(rank.rank, code)
        return failure.describe(error, stage=launch.stage, run=launch.run, node=launch.node, rank=rank.rank)


def unexplained_end(rank: int, code: int) -> TrnpipeError:
    """What to say of a rank that ended with this status and left no explanation."""
    if code < 0:
        name = signal.Signals(-code).name
        return Transient(
            f"rank {rank} was killed by {name}",
            value=f"signal {-code}",
            rule="a killed process may do better in a new attempt",
            remedy="SIGKILL usually comes from the host's out-of-memory killer: fewer ranks or smaller batches"
            if name == "SIGKILL"
            else "see the log above",
        )
    error = Defect(
        f"rank {rank} ended without an explanation", value=f"exit status {code}", remedy="report it with the log above"
    )
    if code in ExitCode.__members__.values():
        error.exit_code = ExitCode(code)
    return error


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
