"""The rank processes of one node: the supervisor starts and polls them, makes them show their stacks, and stops them.

Two forms: the supervisor starts every rank itself (`ProcessRanks`), or torchrun does (`TorchrunRanks`, gangs on Neuron). A rank
that fails on its own becomes a `StageFailure`: the one that it left in the node folder, else one made from its exit status; on
Neuron a line of output that explains it replaces both (pipeline/sdk/known_errors.py). Ranks that the supervisor stopped are not
failures.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from pipeline.contract import StageFailure
from pipeline.errors import Defect, ExitCode, FailureKind, Transient, TrnpipeError
from pipeline.host.exhaustion import MEMORY_REMEDY, kernel_kills
from pipeline.host.launch import RankLaunch
from pipeline.host.output import Output
from pipeline.log import log
from pipeline.ports import free_port
from pipeline.run import failure, processes, tether
from pipeline.sdk import neuron_launch
from pipeline.sdk.known_errors import Action, LogFinding

STACKS_SECONDS = 5.0
"""Writing every Python stack takes milliseconds; a process that cannot do it in this time does not react to signals."""

KILL_SECONDS = 10.0
"""A process that SIGKILL has not ended in this time hangs in a driver; its node ends without it, and its container too."""


class Ranks(ABC):
    """All rank processes of this node.

    Attributes:
        numbers: their ranks, the node's first one first.
    """

    def __init__(self, launch: RankLaunch, output: Output) -> None:
        self.numbers = launch.ranks
        self._launch = launch
        self._output = output
        self._kills_before = kernel_kills()
        # Outside a gang no other host needs to know the port, and other runs on this host must not use it.
        self._port = launch.node.port if launch.nodes > 1 else free_port()
        self._stopped: set[int] = set()
        """Ranks that the supervisor has signalled, whose end is therefore no failure."""

    @property
    def ended(self) -> bool:
        """Whether all of this node's ranks have ended, and their launcher too."""
        return not self.running()

    @property
    @abstractmethod
    def succeeded(self) -> bool:
        """Whether every rank has ended with exit code 0."""

    @abstractmethod
    def running(self) -> list[int]:
        """Return the ranks whose processes have not ended and must therefore write heartbeats."""

    @abstractmethod
    def failures(self) -> list[StageFailure]:
        """Return the failures of ranks that ended on their own."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to all processes that are left."""

    @abstractmethod
    def _living(self) -> dict[int, int]:
        """Return the processes by rank that have started and not ended."""

    def abort_with_stacks(self, first: Sequence[int]) -> None:
        """End every rank by SIGABRT, which writes its Python stacks to the log, one rank after another so that they stay legible.

        Args:
            first: ranks to begin with.
        """
        living = self._living()
        for rank in dict.fromkeys((*(rank for rank in first if rank in living), *sorted(living))):
            log.error("stacks of rank %d:", rank)
            # A process that was stopped sees the signal only when it continues.
            self._signal(rank, living[rank], signal.SIGABRT, signal.SIGCONT)
            if not processes.until(lambda rank=rank: rank not in self.running(), STACKS_SECONDS):  # type: ignore[misc]
                log.error("rank %d does not react to signals: it hangs in the kernel or in a driver", rank)
            self._output.pump()
        self.kill()

    def interrupt(self) -> None:
        """Send SIGTERM to the ranks alone, which end in their own time."""
        for rank, pid in self._living().items():
            self._signal(rank, pid, signal.SIGTERM)

    def _signal(self, rank: int, pid: int, *signals: signal.Signals) -> None:
        self._stopped.add(rank)
        for number in signals:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _terminate(self) -> None:
        """Send SIGTERM to all processes that are left."""
        self.interrupt()

    def wait(self, seconds: float) -> bool:
        """Give the ranks time to end; return whether all have."""
        return processes.until(lambda: self.ended, seconds)

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM to all running ranks, and SIGKILL to those that still run after the grace period."""
        self._terminate()
        if not self.wait(grace_seconds):
            log.warning("ranks %s did not end %g seconds after SIGTERM: killing them", self.running(), grace_seconds)
            self.kill()

    def explained(self, found: StageFailure) -> StageFailure:
        """Return a rank's failure as the output explains it, where it does and the failure itself does not."""
        if found.kind not in (FailureKind.LOST_PEER, FailureKind.UNEXPECTED):
            return found
        if (finding := self._output.finding(found.rank)) is None:
            return found
        rank, line = finding
        if not line.is_cause and (found.kind is FailureKind.LOST_PEER or line.row.action is not Action.FOLLOW):
            return found
        log.error("rank %d ended with: %s", found.rank, found.what)
        # The moment is the failure's: lines that other ranks print later explain it, but came from it.
        return replace(self._describe(line.error(self._launch.node), rank), time=found.time)

    def finding(self, rank: int) -> LogFinding | None:
        """Return the line of the node's output that explains why this rank stalls, or says what it waits for."""
        finding = self._output.finding(rank)
        return finding[1] if finding else None

    def _unexplained(self, rank: int, code: int) -> StageFailure:
        """Return the failure of a rank that ended with this status and left none."""
        end = unexplained_end(rank, code, out_of_memory=kernel_kills() > self._kills_before)
        return self.explained(self._describe(end, rank))

    def _describe(self, error: TrnpipeError, rank: int) -> StageFailure:
        launch = self._launch
        return failure.describe(error, stage=launch.stage, run=launch.run, node=launch.node, rank=rank)


def start(launch: RankLaunch) -> Ranks:
    """Start this node's ranks with the planned launcher."""
    return TorchrunRanks(launch) if launch.launcher == neuron_launch.TORCHRUN else ProcessRanks(launch)


class ProcessRanks(Ranks):
    """Ranks that are children of the supervisor."""

    def __init__(self, launch: RankLaunch) -> None:
        self._logs = launch.folder / "output"
        self._logs.mkdir()
        # Only Neuron's messages are known errors: the output of others goes to the log unchanged.
        self._captured = launch.kind == "neuron"
        super().__init__(launch, Output(launch.ranks if self._captured else (), self._paths, nodes=launch.nodes))
        self._processes = {launch.rank(number): self._start(number, self._port) for number in range(launch.ranks_per_node)}
        self._ended: dict[int, StageFailure | None] = {}

    def _paths(self, rank: int) -> tuple[Path, Path]:
        return self._logs / f"{rank}.out", self._logs / f"{rank}.err"

    def _start(self, local_rank: int, port: int) -> subprocess.Popen[bytes]:
        rank = self._launch.rank(local_rank)
        with ExitStack() as files:
            streams: list[IO[bytes] | None] = (
                [files.enter_context(open(path, "wb")) for path in self._paths(rank)] if self._captured else [None, None]
            )
            process = subprocess.Popen(
                [sys.executable, "-m", *self._launch.program()],
                env=self._launch.environment(local_rank, port, os.environ),
                stdout=streams[0],
                stderr=streams[1],
            )
        log.info("rank %d is process %d", rank, process.pid)
        return process

    @property
    def succeeded(self) -> bool:
        return all(process.poll() == 0 for process in self._processes.values())

    def running(self) -> list[int]:
        """The first call after a rank's end turns it into a failure or none."""
        self._output.pump()
        for rank, process in self._processes.items():
            if rank not in self._ended and process.poll() is not None:
                self._output.pump()
                self._ended[rank] = self._failure(rank, process.returncode)
        return [rank for rank in self._processes if rank not in self._ended]

    def failures(self) -> list[StageFailure]:
        self.running()
        return [found for found in self._ended.values() if found is not None]

    def kill(self) -> None:
        for rank, pid in self._living().items():
            self._signal(rank, pid, signal.SIGKILL)
        if not self.wait(KILL_SECONDS):
            log.error("ranks %s outlive SIGKILL: they hang in the kernel or in a driver", self.running())
        self._output.pump(end=True)

    def _living(self) -> dict[int, int]:
        return {rank: self._processes[rank].pid for rank in self.running()}

    def _failure(self, rank: int, code: int) -> StageFailure | None:
        if code == 0:
            return None
        left = failure.read_failure(self._launch.folder, rank)
        if rank in self._stopped:
            return left
        return self._unexplained(rank, code) if left is None else self.explained(left)


class TorchrunRanks(Ranks):
    """Ranks that are children of torchrun; the supervisor finds, signals and judges them itself (Linux).

    torchrun itself ends all ranks as soon as one has failed, waits half a minute for them, and ends with 1 whatever happened.
    """

    def __init__(self, launch: RankLaunch) -> None:
        self._logs = launch.folder / "torchrun"
        self._logs.mkdir()
        super().__init__(
            launch,
            Output(launch.ranks, lambda rank: neuron_launch.rank_output(self._logs, rank - launch.rank(0)), nodes=launch.nodes),
        )
        command = neuron_launch.torchrun_command(
            launch.program(),
            nodes=launch.nodes,
            node=launch.node.node if launch.nodes > 1 else 0,
            ranks_per_node=launch.ranks_per_node,
            leader=launch.leader,
            port=self._port,
            join_seconds=launch.join_seconds,
            log_dir=self._logs,
        )
        environment = {
            name: value
            for name, value in {"OMP_NUM_THREADS": "1", **launch.common_environment(os.environ)}.items()
            if name not in neuron_launch.LAUNCHER_NAMES and not name.startswith(neuron_launch.REMOVED_PREFIXES)
        }
        own = launch.folder / "torchrun.out", launch.folder / "torchrun.err"
        self._own = Output([-1], lambda _: own, nodes=1)
        with open(own[0], "wb") as out, open(own[1], "wb") as err:
            self._process = subprocess.Popen(tether.tied(command), env=environment, stdout=out, stderr=err)
        log.info("torchrun is process %d", self._process.pid)
        self._pids: dict[int, int] = {}
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
        """Include ranks that torchrun has not started yet: they must write heartbeats, too."""
        self._poll()
        if self._failures is not None:
            return []
        return [rank for rank in self.numbers if rank not in self._pids or processes.lives(self._pids[rank])]

    def failures(self) -> list[StageFailure]:
        """Return a rank's failure as soon as the rank is gone: torchrun may wait long for the others."""
        self._poll()
        if self._failures is not None:
            return self._failures
        return self._left([rank for rank, pid in self._pids.items() if not processes.lives(pid)])

    def kill(self) -> None:
        self._stopped.update(self.numbers)
        self._find()
        # torchrun first: it must start no more ranks.
        self._process.kill()
        for pid in self._living().values():
            # Its session, because a compiler or a loader that it started would outlive it.
            processes.signal_group(pid, signal.SIGKILL)
        self._process.wait()
        if not processes.until(lambda: not self._living(), KILL_SECONDS):
            log.error("ranks %s outlive SIGKILL: they hang in the kernel or in a driver", list(self._living()))
        self._poll()

    def abort_with_stacks(self, first: Sequence[int]) -> None:
        # torchrun would end the other ranks once the first one is gone, before they have shown their stacks.
        self._process.send_signal(signal.SIGSTOP)
        super().abort_with_stacks(first)

    def _living(self) -> dict[int, int]:
        self._find()
        return {rank: pid for rank, pid in self._pids.items() if processes.lives(pid)}

    def _terminate(self) -> None:
        self._stopped.update(self.numbers)
        if self._process.poll() is None:
            # It forwards the signal to its ranks.
            self._process.send_signal(signal.SIGTERM)

    def _poll(self) -> None:
        if self._failures is not None:
            return
        code = self._process.poll()
        self._find()
        self._output.pump(end=code is not None)
        self._own.pump(end=code is not None)
        if code is not None:
            self._failures = self._judge(code)

    def _find(self) -> None:
        """Find the processes of ranks that torchrun has started since the last call."""
        if len(self._pids) == len(self.numbers):
            return
        for pid in processes.children(self._process.pid):
            rank = processes.environment(pid).get("RANK", "")
            if rank.isdecimal() and int(rank) in self.numbers and int(rank) not in self._pids:
                self._pids[int(rank)] = pid
                log.info("rank %s is process %d", rank, pid)

    def _left(self, ranks: Sequence[int]) -> list[StageFailure]:
        """Return the failures that these ranks left; each file is read once."""
        for rank in ranks:
            left = None if rank in self._found else failure.read_failure(self._launch.folder, rank)
            if left is not None:
                self._found[rank] = left if rank in self._stopped else self.explained(left)
        return [self._found[rank] for rank in ranks if rank in self._found]

    def _judge(self, code: int) -> list[StageFailure]:
        """Return the failures that torchrun's end implies."""
        if code == 0:
            return []
        left = self._left(self.numbers)
        if left or self._stopped:
            return left
        if first := neuron_launch.FAILED_RANK.search((self._launch.folder / "torchrun.err").read_text("utf-8", "replace")):
            return [self._unexplained(self._launch.rank(int(first["rank"])), int(first["code"]))]
        # torchrun was killed and its ranks died with it; or the other nodes never came.
        error = torchrun_end(code, self._own.last_lines(-1), started=bool(self._pids))
        return [self.explained(self._describe(error, self.numbers[0]))]


def torchrun_end(code: int, last_lines: Sequence[str], *, started: bool) -> TrnpipeError:
    """Return the failure of a torchrun that ended by itself without naming a rank.

    Args:
        started: it had started ranks.
    """
    if code < 0:
        return _killed("torchrun", code, "SIGKILL usually comes from the host's out-of-memory killer; see the log above")
    if code != 1 or started:
        # It refused its command line, or ended in an unknown way.
        return Defect(
            "torchrun ended without naming a failed rank",
            value=[f"exit status {code}", *last_lines[-5:]],
            remedy="report it with the log above",
            kind=FailureKind.UNEXPECTED,
        )
    return Transient(
        "torchrun ended before its ranks had started",
        value=[f"exit status {code}", *[line for line in last_lines if "Error" in line][-3:]],
        rule="the torchruns of all nodes meet at the main node's address",
        remedy="see the logs of the other nodes; the run is retried",
        kind=FailureKind.UNEXPECTED,
    )


def unexplained_end(rank: int, code: int, *, out_of_memory: bool = False) -> TrnpipeError:
    """Return the failure of a rank that ended with this status and left no explanation.

    Args:
        out_of_memory: the kernel has killed processes out of memory while the ranks ran.
    """
    if code == -signal.SIGKILL and out_of_memory:
        return Transient(
            f"rank {rank} was killed by the kernel: the host, or the container, is out of memory",
            value=f"signal {signal.SIGKILL.value}, and the kernel counts killed processes (oom_kill)",
            rule="all ranks of a node and what they prefetch fit the memory of the job",
            remedy=f"{MEMORY_REMEDY}; the run is retried from its last checkpoint or part",
            kind=FailureKind.UNEXPECTED,
        )
    if code < 0:
        killer = f"SIGKILL usually comes from the host's out-of-memory killer: {MEMORY_REMEDY}"
        return _killed(f"rank {rank}", code, killer if code == -signal.SIGKILL else "see the log above")
    return Defect(
        f"rank {rank} ended without an explanation",
        value=f"exit status {code}",
        remedy="report it with the log above",
        exit_code=ExitCode.of(code),
        kind=FailureKind.UNEXPECTED,
    )


def _killed(who: str, code: int, remedy: str) -> TrnpipeError:
    return Transient(
        f"{who} was killed by {signal.Signals(-code).name}",
        value=f"signal {-code}",
        rule="a killed process may do better in a new attempt",
        remedy=remedy,
        kind=FailureKind.UNEXPECTED,
    )
