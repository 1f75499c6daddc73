"""The rank processes of one node, as their supervisor handles them: started, polled, made to show their stacks, stopped.

Two forms: the supervisor starts every rank itself (`ProcessRanks`), or torchrun does (`TorchrunRanks`, gangs on Neuron). A rank
that ends badly of itself becomes a `StageFailure`: the one it left in the node folder, else one made of its exit status; on
Neuron both give way to a line of output that explains them (pipeline/sdk/known_errors.py). Ranks that were stopped from
here are no failures.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from pipeline.contract import StageFailure
from pipeline.errors import Defect, ExitCode, FailureKind, Transient, TrnpipeError
from pipeline.host.exhaustion import MEMORY_REMEDY, kernel_kills
from pipeline.host.launch import Launch
from pipeline.host.output import Output
from pipeline.run import failure, processes, tether
from pipeline.run.world import ROOT_COMM_PORT
from pipeline.sdk import neuron_launch
from pipeline.sdk.known_errors import Action, Finding

log = logging.getLogger("trnpipe")

POLL_SECONDS = 0.1
STACKS_SECONDS = 5.0
"""Writing every Python stack takes milliseconds; a process that cannot do it in this time does not react to signals."""

KILL_SECONDS = 10.0
"""A process that SIGKILL has not ended in this time hangs in a driver; its node ends without it, and its container too."""


class Ranks(ABC):
    """All rank processes of this node.

    Attributes:
        numbers: their ranks, the node's first one first.
    """

    def __init__(self, launch: Launch, output: Output | None) -> None:
        self.numbers = [launch.rank(local_rank) for local_rank in range(launch.ranks_per_node)]
        self._launch = launch
        self._output = output
        self._kills_before = kernel_kills()

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether nothing of this node's ranks is left, their launcher included."""

    @property
    @abstractmethod
    def succeeded(self) -> bool:
        """Whether every rank has ended with exit code 0."""

    @abstractmethod
    def running(self) -> list[int]:
        """The ranks whose processes have not ended, and which therefore owe heartbeats."""

    @abstractmethod
    def failures(self) -> list[StageFailure]:
        """How ranks failed that ended of themselves."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to all that is left."""

    @abstractmethod
    def abort_with_stacks(self, first: Sequence[int]) -> None:
        """End every rank by SIGABRT, which writes its Python stacks to the log, one rank after another so that they stay legible.

        Args:
            first: ranks to begin with.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """SIGTERM to the ranks alone: each ends as it sees fit, in its own time."""

    def _terminate(self) -> None:
        """SIGTERM to all that is left."""
        self.interrupt()

    def wait(self, seconds: float) -> bool:
        """Give the ranks time to end; whether all have."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to all that run, SIGKILL to those that are still there after the grace."""
        self._terminate()
        if not self.wait(grace_seconds):
            log.warning("ranks %s did not end %g seconds after SIGTERM: killing them", self.running(), grace_seconds)
            self.kill()

    def explained(self, found: StageFailure) -> StageFailure:
        """Return a rank's failure as the output explains it, where it does and the failure itself does not."""
        if self._output is None or found.kind not in (FailureKind.LOST_PEER, FailureKind.UNEXPECTED):
            return found
        finding = self._output.finding(found.rank)
        if finding is None:
            return found
        rank, line = finding
        if not line.is_cause and (found.kind is FailureKind.LOST_PEER or line.row.action is not Action.FOLLOW):
            return found
        log.error("rank %d ended with: %s", found.rank, found.what)
        record = self._describe(line.error(self._launch.node), rank)
        # The moment is the failure's: lines that other ranks print later explain it, but came from it.
        return replace(record, time=found.time)

    def hint(self, rank: int) -> str:
        """What a stalled rank waits for, by its output; empty if unknown."""
        finding = self._output.finding(rank) if self._output else None
        return finding[1].line if finding and not finding[1].is_cause else ""

    def cause(self, rank: int) -> Finding | None:
        """What in the node's output would explain that this rank stalls."""
        finding = self._output.finding(rank) if self._output else None
        return finding[1] if finding and finding[1].is_cause else None

    def _unexplained(self, rank: int, code: int) -> StageFailure:
        """The failure of a rank that ended with this status and left none."""
        killed = kernel_kills() > self._kills_before
        return self.explained(self._describe(unexplained_end(rank, code, out_of_memory=killed), rank))

    def _describe(self, error: TrnpipeError, rank: int) -> StageFailure:
        launch = self._launch
        return failure.describe(error, stage=launch.stage, run=launch.run, node=launch.node, rank=rank)

    def _pump(self, *, end: bool = False) -> None:
        if self._output:
            self._output.pump(end=end)


def start(launch: Launch) -> Ranks:
    """Start this node's ranks as the launch says."""
    return TorchrunRanks(launch) if launch.launcher == neuron_launch.TORCHRUN else ProcessRanks(launch)


class _Process:
    """One rank's process and what is known of its end."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.ended = False
        self.stopped = False
        self.failure: StageFailure | None = None


class ProcessRanks(Ranks):
    """Ranks that are children of the supervisor."""

    def __init__(self, launch: Launch) -> None:
        self._logs = launch.folder / "output" if launch.kind == "neuron" else None
        output = None
        if self._logs:
            self._logs.mkdir()
            output = Output(
                [launch.rank(local_rank) for local_rank in range(launch.ranks_per_node)], self._paths, nodes=launch.nodes
            )
        super().__init__(launch, output)
        # Outside a gang no other host has to know the port, and other runs on this host must not meet it.
        port = launch.node.port if launch.nodes > 1 else free_port()
        if launch.kind == "neuron":
            neuron_launch.check_port(port)
        self._processes = [self._start(local_rank, port) for local_rank in range(launch.ranks_per_node)]

    def _paths(self, rank: int) -> tuple[Path, Path]:
        assert self._logs is not None
        return self._logs / f"{rank}.out", self._logs / f"{rank}.err"

    def _start(self, local_rank: int, port: int) -> _Process:
        launch = self._launch
        command = [sys.executable, "-m", *launch.program()]
        environment = launch.environment(local_rank, port, os.environ)
        with ExitStack() as files:
            streams: list[IO[bytes] | None] = [None, None]
            if self._logs:
                streams = [files.enter_context(open(path, "wb")) for path in self._paths(launch.rank(local_rank))]
            process = subprocess.Popen(command, env=environment, stdout=streams[0], stderr=streams[1])
        log.info("rank %d is process %d", launch.rank(local_rank), process.pid)
        return _Process(launch.rank(local_rank), process)

    @property
    def ended(self) -> bool:
        return not self.running()

    @property
    def succeeded(self) -> bool:
        return all(rank.process.poll() == 0 for rank in self._processes)

    def running(self) -> list[int]:
        """The first call after a rank's end turns it into a failure or none."""
        self._pump()
        for rank in self._processes:
            code = None if rank.ended else rank.process.poll()
            if code is not None:
                rank.ended = True
                self._pump()
                rank.failure = self._failure(rank, code)
        return [rank.rank for rank in self._processes if not rank.ended]

    def failures(self) -> list[StageFailure]:
        self.running()
        return [rank.failure for rank in self._processes if rank.failure is not None]

    def kill(self) -> None:
        self._signal(self._living(), signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for rank in self._processes:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("rank %d outlives SIGKILL: it hangs in the kernel or in a driver", rank.rank)
        self.running()
        self._pump(end=True)

    def abort_with_stacks(self, first: Sequence[int]) -> None:
        for rank in sorted(self._living(), key=lambda rank: _place(rank.rank, first)):
            log.error("stacks of rank %d:", rank.rank)
            # A process that was stopped sees the signal only when it continues.
            self._signal([rank], signal.SIGABRT, signal.SIGCONT)
            try:
                rank.process.wait(STACKS_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("rank %d does not react to signals: it hangs in the kernel or in a driver", rank.rank)
            self._pump()
        self.kill()

    def interrupt(self) -> None:
        self._signal(self._living(), signal.SIGTERM)

    def _living(self) -> list[_Process]:
        running = set(self.running())
        return [rank for rank in self._processes if rank.rank in running]

    def _signal(self, ranks: Sequence[_Process], *signals: signal.Signals) -> None:
        for rank in ranks:
            rank.stopped = True
            for number in signals:
                rank.process.send_signal(number)

    def _failure(self, rank: _Process, code: int) -> StageFailure | None:
        if code == 0:
            return None
        left = failure.read_failure(self._launch.folder, rank.rank)
        if rank.stopped:
            return left
        if left is not None:
            return self.explained(left)
        return self._unexplained(rank.rank, code)


class TorchrunRanks(Ranks):
    """Ranks that are children of torchrun: found, signalled and judged over its head (Linux).

    torchrun itself ends all ranks as soon as one has failed, waits half a minute for them, and ends with 1 whatever happened.
    """

    def __init__(self, launch: Launch) -> None:
        self._logs = launch.folder / "torchrun"
        self._logs.mkdir()
        # As for single processes: a gang agrees on the port, a node alone must not meet other runs on its host.
        port = launch.node.port if launch.nodes > 1 else free_port()
        command = neuron_launch.torchrun_command(
            launch.program(),
            nodes=launch.nodes,
            node=launch.node.node if launch.nodes > 1 else 0,
            ranks_per_node=launch.ranks_per_node,
            leader=launch.leader,
            port=port,
            join_seconds=launch.join_seconds,
            log_dir=self._logs,
        )
        first = launch.rank(0)
        ranks = [launch.rank(local_rank) for local_rank in range(launch.ranks_per_node)]
        super().__init__(
            launch, Output(ranks, lambda rank: neuron_launch.rank_output(self._logs, rank - first), nodes=launch.nodes)
        )
        environment = {"OMP_NUM_THREADS": "1", **launch.common_environment(os.environ)}
        for name in list(environment):
            if name in neuron_launch.LAUNCHER_NAMES or name.startswith(neuron_launch.REMOVED_PREFIXES):
                del environment[name]
        self._own = Output([-1], lambda _: (self._logs.parent / "torchrun.out", self._logs.parent / "torchrun.err"), nodes=1)
        with open(launch.folder / "torchrun.out", "wb") as out, open(launch.folder / "torchrun.err", "wb") as err:
            self._process = subprocess.Popen(tether.tied(command), env=environment, stdout=out, stderr=err)
        log.info("torchrun is process %d", self._process.pid)
        self._pids: dict[int, int] = {}
        self._stopped = False
        self._found: dict[int, StageFailure] = {}
        self._failures: list[StageFailure] | None = None

    @property
    def ended(self) -> bool:
        self._poll()
        return self._failures is not None

    @property
    def succeeded(self) -> bool:
        return self._process.poll() == 0

    def running(self) -> list[int]:
        """Ranks that torchrun has not started yet count: their heartbeat is owed all the same."""
        self._poll()
        if self._failures is not None:
            return []
        return [rank for rank in self.numbers if rank not in self._pids or processes.lives(self._pids[rank])]

    def failures(self) -> list[StageFailure]:
        """As soon as a rank has left one and is gone: torchrun may wait long for the others."""
        self._poll()
        if self._failures is not None:
            return self._failures
        gone = [rank for rank, pid in self._pids.items() if not processes.lives(pid)]
        return self._left(gone)

    def kill(self) -> None:
        self._stopped = True
        self._find()
        # torchrun first: it must start nothing more and explain nothing away.
        self._process.kill()
        for pid in self._pids.values():
            if processes.lives(pid):
                # Its session, because a compiler or a loader of its own would outlive it.
                processes.signal_group(pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + KILL_SECONDS
        while any(processes.lives(pid) for pid in self._pids.values()):
            if time.monotonic() > deadline:
                left = [rank for rank, pid in self._pids.items() if processes.lives(pid)]
                log.error("ranks %s outlive SIGKILL: they hang in the kernel or in a driver", left)
                break
            time.sleep(POLL_SECONDS / 10)
        self._poll()

    def abort_with_stacks(self, first: Sequence[int]) -> None:
        self._stopped = True
        self._find()
        # torchrun would end the other ranks when the first one is gone, before they have shown their stacks.
        self._process.send_signal(signal.SIGSTOP)
        for rank in sorted(self._pids, key=lambda rank: _place(rank, first)):
            if not processes.lives(self._pids[rank]):
                continue
            log.error("stacks of rank %d:", rank)
            for number in (signal.SIGABRT, signal.SIGCONT):
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], number)
            deadline = time.monotonic() + STACKS_SECONDS
            while processes.lives(self._pids[rank]) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 10)
            if processes.lives(self._pids[rank]):
                log.error("rank %d does not react to signals: it hangs in the kernel or in a driver", rank)
            self._pump()
        self.kill()

    def interrupt(self) -> None:
        self._stopped = True
        self._find()
        # Not through torchrun, which kills its ranks half a minute later.
        for pid in filter(processes.lives, self._pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _terminate(self) -> None:
        self._stopped = True
        if self._process.poll() is None:
            # It hands the signal on to its ranks.
            self._process.send_signal(signal.SIGTERM)

    def _poll(self) -> None:
        if self._failures is not None:
            return
        code = self._process.poll()
        self._find()
        self._pump(end=code is not None)
        self._own.pump(end=code is not None)
        if code is not None:
            self._failures = self._judge(code)

    def _find(self) -> None:
        """The pids of ranks that torchrun has started since the last call."""
        if len(self._pids) == len(self.numbers):
            return
        for pid in processes.children(self._process.pid):
            rank = processes.environment(pid).get("RANK", "")
            if rank.isdecimal() and int(rank) in self.numbers and int(rank) not in self._pids:
                self._pids[int(rank)] = pid
                log.info("rank %s is process %d", rank, pid)

    def _left(self, ranks: Sequence[int]) -> list[StageFailure]:
        """What these ranks have left, each looked at once."""
        for rank in ranks:
            left = None if rank in self._found else failure.read_failure(self._launch.folder, rank)
            if left is not None:
                self._found[rank] = left if self._stopped else self.explained(left)
        return [self._found[rank] for rank in ranks if rank in self._found]

    def _judge(self, code: int) -> list[StageFailure]:
        """What torchrun's end says about its ranks."""
        if code == 0:
            return []
        left = self._left(self.numbers)
        if left or self._stopped:
            return left
        first = neuron_launch.first_failed_rank((self._logs.parent / "torchrun.err").read_text("utf-8", "replace"))
        if first is not None:
            return [self._unexplained(self._launch.rank(first[0]), first[1])]
        # Killed itself, its ranks died with it; or the other nodes never came.
        error = torchrun_end(code, self._own.last_lines(-1), started=bool(self._pids))
        return [self.explained(self._describe(error, self.numbers[0]))]


def torchrun_end(code: int, last_lines: Sequence[str], *, started: bool) -> TrnpipeError:
    """Return the failure of a torchrun that ended by itself without naming a rank.

    Args:
        started: it had started ranks.
    """
    error: TrnpipeError
    if code < 0:
        error = Transient(
            f"torchrun was killed by {signal.Signals(-code).name}",
            value=f"signal {-code}",
            rule="a killed process may do better in a new attempt",
            remedy="SIGKILL usually comes from the host's out-of-memory killer; see the log above",
        )
    elif code != 1 or started:
        # It refused its command line, or says nothing that we understand.
        value = [f"exit status {code}", *last_lines[-5:]]
        error = Defect("torchrun ended without naming a failed rank", value=value, remedy="report it with the log above")
    else:
        error = Transient(
            "torchrun ended before its ranks had started",
            value=[f"exit status {code}", *[line for line in last_lines if "Error" in line][-3:]],
            rule="the torchruns of all nodes meet at the main node's address",
            remedy="see the logs of the other nodes; the run is retried",
        )
    error.kind = FailureKind.UNEXPECTED
    return error


def _place(rank: int, first: Sequence[int]) -> tuple[int, int]:
    """Where a rank stands when some come first, in their order."""
    return (first.index(rank) if rank in first else len(first), rank)


def unexplained_end(rank: int, code: int, *, out_of_memory: bool = False) -> TrnpipeError:
    """Return the failure of a rank that ended with this status and left no explanation.

    Args:
        out_of_memory: the kernel has killed processes out of memory while the ranks ran.
    """
    error: TrnpipeError
    if code == -signal.SIGKILL and out_of_memory:
        error = Transient(
            f"rank {rank} was killed by the kernel: the host, or the container, is out of memory",
            value=f"signal {signal.SIGKILL.value}, and the kernel counts killed processes (oom_kill)",
            rule="all ranks of a node and what they prefetch fit the memory of the job",
            remedy=f"{MEMORY_REMEDY}; the run is retried from its last checkpoint or part",
        )
    elif code < 0:
        name = signal.Signals(-code).name
        error = Transient(
            f"rank {rank} was killed by {name}",
            value=f"signal {-code}",
            rule="a killed process may do better in a new attempt",
            remedy=f"SIGKILL usually comes from the host's out-of-memory killer: {MEMORY_REMEDY}"
            if name == "SIGKILL"
            else "see the log above",
        )
    else:
        error = Defect(
            f"rank {rank} ended without an explanation", value=f"exit status {code}", remedy="report it with the log above"
        )
        error.exit_code = ExitCode.of(code)
    error.kind = FailureKind.UNEXPECTED
    return error


def free_port() -> int:
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        if port != ROOT_COMM_PORT:
            return port
