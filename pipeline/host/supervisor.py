"""The supervisor of a node, for every kind of device: `trnpipe stage NAME --run URI` in a container runs it.

It starts the node's ranks, watches them, and reduces the outcome to one exit code, because Batch sees nothing else. It goes
through these states and never back:

    checking   which run, is the stage done already, how many ranks
    watching   ranks run; ended by: all done, a rank failed, a rank stalls, SIGTERM, a node of the gang failed or vanished,
               the attempt's time is almost over
    stopping   the node's other ranks are ended; this node writes how it ended
    settling   main node of a gang only: whose failure came first? wait for the nodes that still run
    ended      `failure.json` written or removed, the four parts of the failure as the last log lines, exit

It loads no framework, so that it starts at once and survives its ranks.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import FrameType

from pipeline import store
from pipeline.contract import (
    EMBEDDING,
    METRICS,
    RUN_PARAMETER,
    STAGES,
    STAGES_WITHOUT_PLAN,
    TRIAL_STAGES,
    Metric,
    Queue,
    Record,
    RunPaths,
    Shape,
    Stage,
    StageFailure,
    StageResult,
    check_run_folder,
)
from pipeline.cost import NOTE_SECONDS, NodeAttempt
from pipeline.errors import (
    BadConfig,
    BadData,
    Defect,
    ExitCode,
    FailureKind,
    MissingInput,
    NoProgress,
    Transient,
    TrnpipeError,
    one_line,
)
from pipeline.host import gang, own_job
from pipeline.host.child import read_failure
from pipeline.host.deadlines import Deadlines
from pipeline.host.exhaustion import exhaustion
from pipeline.host.launch import RankLaunch
from pipeline.host.ranks import Ranks, start
from pipeline.log import log
from pipeline.run import failure
from pipeline.run.cloudwatch import EmbeddedMetrics
from pipeline.run.heartbeat import Stall, Watchdog
from pipeline.run.logs import configure_logging
from pipeline.run.processes import until
from pipeline.run.world import NodeWorld
from pipeline.sdk import neuron_launch

TICK_SECONDS = 0.1

OPEN_FILES = 65535
"""Each rank of a gang holds sockets to many others (training-troubleshooting.rst, "Too many open files")."""


def run(stage: Stage, run_uri: str) -> int:
    """Run this node's share of a stage and return the exit code for Batch.

    Args:
        run_uri: the run folder; the literal `Ref::run` where Batch did not replace it.
    """
    node = NodeWorld.from_environment()
    configure_logging(f"node {node.index}")
    try:
        deadlines = Deadlines.from_environment()
        uri = own_job.run_uri_of_job(node.job) if run_uri == f"Ref::{RUN_PARAMETER}" else run_uri
        paths = RunPaths(check_run_folder(uri))
    except TrnpipeError as error:
        return conclude(failure.describe(error, stage=stage, run="", node=node, rank=0))
    configure_logging(f"{paths.run_id} node {node.index}")
    return Supervisor(stage, paths, node, deadlines).run()


def conclude(ended: StageFailure | None) -> int:
    """Write the last lines of the log and return the exit code."""
    if ended is None:
        return ExitCode.DONE
    for line in failure.error_of(ended).lines():
        log.error(line)
    return ended.exit_code


class Supervisor:
    """One attempt of one stage on one node.

    Methods that end something return the failure that ended it, None after success.
    """

    def __init__(self, stage: Stage, paths: RunPaths, node: NodeWorld, deadlines: Deadlines) -> None:
        self._stage = stage
        self._paths = paths
        self._node = node
        self._deadlines = deadlines
        self._in_gang = STAGES[stage].shape == Shape.GANG and node.nodes > 1
        self._cloudwatch = EmbeddedMetrics.from_environment(stage, paths.run_id, node)
        self._peers = (
            gang.Peers(
                paths,
                stage,
                node,
                stale_seconds=deadlines.stale_seconds,
                start_seconds=deadlines.peer_start_seconds,
                ended=own_job.ended_nodes,
            )
            if self._in_gang and node.is_main
            else None
        )
        self._signal: signal.Signals | None = None
        self._started = datetime.now(timezone.utc)
        # The main node's end is the gang's, and its leader writes the checkpoint while all ranks still take part.
        self._attempt_ends = time.monotonic() + deadlines.attempt_seconds if STAGES[stage].resumes and node.is_main else math.inf
        self._noted: float | None = None
        self._noting = threading.Lock()

    def run(self) -> int:
        """Go through all states; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # An aborted rank has written its stacks; gigabytes of core dump would only fill the host's disk.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        done = False
        try:
            numbers = PlanNumbers.read(self._stage, self._paths)
            done = self._is_done(numbers)
            ended = None if done else self._attempt(numbers)
        except TrnpipeError as error:
            ended = self._describe(error)
        except OSError as error:
            # This node's own failure: its disk is full, most likely.
            log.exception("the supervisor cannot continue")
            ended = self._describe(exhaustion(error) or failure.unexpected(error))
        reached = not self._in_gang or self._best_effort(partial(gang.write_exit, self._paths, self._stage, self._node, ended))
        if ended and ended.exit_code == ExitCode.UNHEALTHY_HOST and ended.node == self._node.index:
            self._cloudwatch.write({Metric.UNHEALTHY_HOSTS: 1})
            own_job.leave_cluster()  # no retry lands on this host
        if self._peers and not done:
            ended = self._settle(self._peers, ended)
        if self._node.is_main:
            reached = self._best_effort(lambda: self._publish_failure(ended, done))
        if reached:  # a storage outage must not block shutdown
            self._best_effort(lambda: self._note(ended.exit_code if ended else ExitCode.DONE))
        return conclude(ended)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    # Checking.

    def _is_done(self, numbers: PlanNumbers) -> bool:
        uri = self._paths.result(self._stage)
        if STAGES[self._stage].always_runs or not store.exists(uri):
            return False
        done = StageResult.from_json(store.read_bytes(uri)).fingerprint == numbers.fingerprint
        if done:
            log.info("%s is done already: %s", self._stage, uri)
        return done

    def _launch(self, numbers: PlanNumbers, folder: Path) -> RankLaunch:
        """Decide how the ranks are started.

        Raises:
            BadConfig: the job, or the host, is not what the plan or the device kind needs.
        """
        spec = STAGES[self._stage]
        shape = spec.shape
        node = self._node
        kind = neuron_launch.kind_of(numbers.kind, spec)
        if spec.queue == Queue.EMBED:
            # The ranks of these hosts need no collectives.
            nodes, ranks_per_node = 1, numbers.ranks_per_child or numbers.ranks_per_node
        elif shape != Shape.GANG:
            nodes, ranks_per_node = 1, 1
        elif numbers.nodes != self._node.nodes:
            raise BadConfig(
                "the job's gang is not the plan's",
                value=f"{self._node.nodes} nodes in the job, {numbers.nodes} in the plan",
                rule="the world size is fixed by the plan: it is part of every compiled graph",
                remedy="submit the job definition for the plan's node count, or plan a new run",
            )
        else:
            nodes, ranks_per_node = numbers.nodes, numbers.ranks_per_node
        if kind == "neuron":
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            if most != resource.RLIM_INFINITY and most < OPEN_FILES:
                raise BadConfig(
                    "too few open files are allowed",
                    value=f"hard limit {most}",
                    rule=f"at least {OPEN_FILES}: every rank holds connections to many others",
                    remedy=f"set the ulimit `nofile` of the job definition to {OPEN_FILES}",
                )
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            if self._stage in TRIAL_STAGES:
                # The node's one process joins no collectives.
                ranks_per_node = 1
            if nodes > 1 and node.is_main and node.leader.startswith("127."):
                # The Neuron root communicator listens on the leader's address, and all ranks must name it alike.
                node = replace(node, leader=neuron_launch.own_address())
        return RankLaunch(
            stage=self._stage,
            run=self._paths.root,
            node=node,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            kind=kind,
            folder=folder,
            launcher=neuron_launch.launcher(kind, self._stage, spec),
            # evaluate and embed pass their own flags to the compiler.
            compiler_flags=numbers.compiler_flags if shape == Shape.GANG else "",
            cache=numbers.cache,
            graph_environment=numbers.environment if shape == Shape.GANG else {},
            join_seconds=self._deadlines.startup_seconds + self._deadlines.peer_start_seconds,
        )

    # Watching and stopping.

    def _attempt(self, numbers: PlanNumbers) -> StageFailure | None:
        self._tell_start()
        with tempfile.TemporaryDirectory(prefix="trnpipe-node-", ignore_cleanup_errors=True) as name:
            launch = self._launch(numbers, Path(name))
            log.info("%s: %d rank(s) on node %d of %d", self._stage, launch.ranks_per_node, self._node.node, launch.nodes)
            ranks = start(launch)
            # torchrun starts its ranks when all nodes have come, single processes wait for the others with a heartbeat.
            waits_first = launch.launcher == neuron_launch.TORCHRUN and launch.nodes > 1
            watchdog = Watchdog(
                launch.folder,
                ranks.numbers,
                startup_seconds=launch.join_seconds if waits_first else self._deadlines.startup_seconds,
                progress_seconds=self._deadlines.progress_seconds,
                patience_seconds=self._deadlines.patience_seconds,
            )
            reporter = Reporter(lambda: self._report(watchdog.read(ranks.numbers[0])), self._deadlines.publish_seconds)
            try:
                return self._watch(ranks, watchdog, reporter)
            finally:
                ranks.kill()
                # The main node still needs what the reporter used; elsewhere slow storage must not block shutdown.
                reporter.stop(wait=self._peers is not None and self._signal is None)

    def _tell_start(self) -> None:
        if self._node.is_main and self._node.attempt > 1:
            self._cloudwatch.write({Metric.RETRIES: 1})
        if self._node.is_main and self._cloudwatch.enabled and self._stage in METRICS[Metric.QUEUE_WAIT_SECONDS].stages:
            # In a thread: Batch may be slow to answer.
            threading.Thread(target=self._tell_queue_wait, name="queue-wait", daemon=True).start()

    def _tell_queue_wait(self) -> None:
        if (waited := own_job.queue_wait_seconds(self._node.job, now=time.time())) is not None:
            self._cloudwatch.write({Metric.QUEUE_WAIT_SECONDS: waited})

    def _watch(self, ranks: Ranks, watchdog: Watchdog, reporter: Reporter) -> StageFailure | None:
        while True:
            running = ranks.running()
            if self._signal:
                ended = self._interrupted(self._signal)
                if self._in_gang and not self._node.is_main:
                    # At once, so that the leader writes a checkpoint while all ranks are still there to finish its step.
                    self._best_effort(partial(gang.write_exit, self._paths, self._stage, self._node, ended))
                ranks.stop(self._deadlines.stop_seconds)
                return ended
            # Asked before their failures: a rank that fails between the two questions counts in the next round.
            all_ended = ranks.ended
            if ranks.failures():
                self._end_ranks(ranks)
                return failure.cause(ranks.failures())
            if all_ended:
                return None
            if stalls := watchdog.stalls(running):
                ranks.abort_with_stacks([stall.rank for stall in stalls])
                return self._stalled(ranks, stalls)
            if trouble := reporter.trouble:
                if trouble.kind is FailureKind.TERMINATED:
                    ranks.stop(self._deadlines.stop_seconds)
                else:
                    self._end_ranks(ranks)
                return failure.cause([trouble, *ranks.failures()])
            if time.monotonic() > self._attempt_ends - self._deadlines.lead_seconds:
                return self._wind_down(ranks)
            if not reporter.is_alive():
                raise Defect("the supervisor's reporting thread ended", remedy="report it with the log above")
            time.sleep(TICK_SECONDS)

    def _wind_down(self, ranks: Ranks) -> StageFailure | None:
        """Let the ranks save their progress, from which the next attempt continues; None if they finish the stage."""
        limit = f"{self._deadlines.attempt_seconds / 60:g} minutes"
        log.info("%s is interrupted: an attempt ends after %s", self._stage, limit)
        ranks.interrupt()
        latest = self._attempt_ends - self._deadlines.lead_seconds / 4
        until(lambda: bool(self._signal or ranks.ended or ranks.failures()), latest - time.monotonic())
        if ranks.succeeded:
            return None
        self._end_ranks(ranks)
        worse = [found for found in ranks.failures() if not ExitCode(found.exit_code).retryable]
        return failure.cause(worse) or self._describe(
            Transient(
                f"the attempt's time is over before {self._stage} is done",
                value=f"{limit}, of which the last {self._deadlines.lead_seconds / 60:g} are for saving the progress",
                rule="Batch retries no attempt that exceeds its limit, so the stage ends before",
                remedy=f"none for one more attempt, which resumes; if {self._stage} needs more than two, raise "
                f"`timeouts.{self._stage}`",
            )
        )

    def _stalled(self, ranks: Ranks, stalls: list[Stall]) -> StageFailure:
        """Return the failure of ranks that made no progress, or the cause that their output names."""
        longest = stalls[0]
        value = [f"no heartbeat for {longest.seconds:.0f} seconds" + (f" after `{longest.last}`" if longest.last else "")]
        finding = ranks.finding(longest.rank)
        if finding and not finding.is_cause:
            value.append(finding.line)  # what it waits for
        error = NoProgress(
            f"rank {longest.rank} made no progress",
            value=value,
            rule=f"a heartbeat at least every {longest.deadline:g} seconds",
            remedy="see the stacks of all ranks above; the run is retried",
        )
        if finding and finding.is_cause:
            log.error(" | ".join(error.lines()))
            return self._describe(finding.error(self._node))
        return self._describe(error)

    def _end_ranks(self, ranks: Ranks) -> None:
        """End the ranks that still run and have lost a peer, after time to report what they saw and to finish an upload."""
        if not ranks.wait(self._deadlines.peer_grace_seconds):
            ranks.stop(self._deadlines.upload_seconds)

    def _report(self, heartbeat: dict[str, object]) -> StageFailure | None:
        """Publish progress and, on the main node, look for failures of the other nodes. Runs in the reporter's thread.

        Storage that is unreachable for a moment is not a failure; storage that refuses is one: it would refuse the result too.
        """
        try:
            gang.write_progress(self._paths, self._stage, self._node, heartbeat)
            self._note(None)
            if self._peers is None:
                return None
            self._peers.poll()
            lost = self._peers.lost()
            return failure.cause(self._peers.failures()) or (self._describe(lost) if lost else None)
        except (Transient, OSError) as error:
            log.warning("progress could not be published: %s", one_line(error))
            return None
        except TrnpipeError as error:
            return self._describe(error)

    # Settling.

    def _settle(self, peers: gang.Peers, own: StageFailure | None) -> StageFailure | None:
        """Return the failure that explains the others, once every node has reported how it ended or its time is over."""
        deadline = time.monotonic() + self._deadlines.outlive_seconds
        while True:
            self._best_effort(peers.poll)
            ended = failure.cause([*peers.failures(), *([own] if own else [])])
            if not peers.running():
                return ended
            if self._signal:
                return ended or self._interrupted(self._signal)
            if ended:
                deadline = min(deadline, time.monotonic() + self._deadlines.settle_seconds)
            elif lost := peers.lost():
                return self._describe(lost)
            if time.monotonic() > deadline:
                return ended if ended and ended.kind is not FailureKind.LOST_PEER else self._unsettled(peers, ended)
            time.sleep(min(1.0, self._deadlines.publish_seconds))

    def _unsettled(self, peers: gang.Peers, ended: StageFailure | None) -> StageFailure:
        """Return the failure for nodes without a record of their end: they are gone, or still run long after the others."""
        if suspects := peers.silent(3 * self._deadlines.publish_seconds) + peers.absent():
            return self._describe(gang.gone(suspects, "left no record of how it ended"))
        return ended or self._describe(
            Transient(
                "nodes of the gang still run long after the main node is done",
                value=[f"node {node}" for node in peers.running()],
                rule=f"all end within {self._deadlines.outlive_seconds:g} seconds",
                remedy="see their logs",
            )
        )

    # Ended.

    def _publish_failure(self, ended: StageFailure | None, done: bool) -> None:
        """Write `failure.json`, or remove an earlier attempt's; a child of an array leaves those of other children alone."""
        uri = self._paths.failure(self._stage)
        if ended is not None:
            store.write_bytes(uri, ended.to_json())
        elif (earlier := read_failure(self._paths, self._stage)) and (
            done or earlier.node == self._node.index or STAGES[self._stage].shape != Shape.ARRAY
        ):
            store.delete(uri)

    def _note(self, exit_code: int | None) -> None:
        """Record how long this node has been used (pipeline/cost.py): now and then, and finally when it ends."""
        node = self._node
        with self._noting:
            due = self._noted is None or time.monotonic() - self._noted > NOTE_SECONDS / 2
            if exit_code is None and not due:
                return
            store.write_bytes(
                self._paths.node_attempt(self._stage, node.job, node.attempt, node.index),
                NodeAttempt(
                    node=node.index,
                    attempt=node.attempt,
                    job=node.job,
                    host=node.host,
                    started=self._started,
                    seen=datetime.now(timezone.utc),
                    exit_code=exit_code,
                ).to_json(),
            )
            self._noted = time.monotonic() if exit_code is None else math.inf

    def _best_effort(self, action: Callable[[], None]) -> bool:
        """Do something in the run folder whose failure must not hide how the stage ended; return whether it succeeded."""
        try:
            action()
        except (TrnpipeError, OSError) as error:
            log.warning("the run folder could not be read or written: %s", one_line(error))
            return False
        return True

    def _interrupted(self, received: signal.Signals) -> StageFailure:
        return self._describe(
            Transient(
                f"the node was terminated by {received.name}",
                value=f"{self._stage} on node {self._node.index}",
                rule="the next attempt resumes an interrupted stage",
                remedy="none is needed, unless this was unintended: a job timeout, a terminated job, a reclaimed host",
                kind=FailureKind.TERMINATED,
            )
        )

    def _describe(self, error: TrnpipeError) -> StageFailure:
        return failure.describe(error, stage=self._stage, run=self._paths.run_id, node=self._node, rank=0)


@dataclass(frozen=True, slots=True)
class PlanNumbers(Record):
    """The plan's numbers that the supervisor needs. Read without pipeline.plan: the plan was validated when it was written."""

    fingerprint: str = ""
    kind: str = ""
    nodes: int = 1
    ranks_per_node: int = 1
    ranks_per_child: int | None = None
    compiler_flags: str = ""
    cache: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, stage: Stage, paths: RunPaths) -> PlanNumbers:
        """Return the run's numbers; defaults where a stage may run without a plan.

        Raises:
            MissingInput: there is no plan.
            BadData: it cannot be read.
        """
        try:
            # Only prepare has decided where mine's ranks run.
            plan = json.loads(store.read_bytes(paths.inputs if stage is Stage.MINE else paths.plan))
            graphs = plan.get("graphs") or {"compiler_flags": "", "cache": "", "environment": {}}
            # The stages that follow the plan of the embeddings go by its fingerprint.
            embeds = stage in EMBEDDING and store.exists(paths.embed_plan)
            embed_plan = store.read_json(paths.embed_plan) if embeds else {"fingerprint": ""}
            numbers = {
                "fingerprint": embed_plan["fingerprint"] or plan.get("fingerprint", ""),
                **{name: plan["world"][name] for name in ("kind", "nodes", "ranks_per_node")},
                "ranks_per_child": plan["config"]["embed"].get("ranks_per_child"),
                **{name: graphs[name] for name in ("compiler_flags", "cache", "environment")},
            }
            return cls.from_json(json.dumps(numbers).encode())
        except (MissingInput, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if stage in STAGES_WITHOUT_PLAN:
                return cls()  # plan refuses one that cannot be read with its own message, which the report shows
            if isinstance(error, MissingInput):
                raise
            raise BadData(
                "the run's plan cannot be read",
                value=f"{paths.plan}: {error!r}",
                remedy="restore it as plan wrote it, or start a new run",
            ) from error


class Reporter(threading.Thread):
    """Calls `report` every few seconds in a thread of its own: storage may be slow, watching may not.

    Attributes:
        trouble: the first failure that `report` returned.
    """

    def __init__(self, report: Callable[[], StageFailure | None], seconds: float) -> None:
        super().__init__(name="reporter", daemon=True)
        self.trouble: StageFailure | None = None
        self._report = report
        self._seconds = seconds
        self._stop_asked = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            self.trouble = self.trouble or self._report()
            self._stop_asked.wait(self._seconds)

    def stop(self, *, wait: bool) -> None:
        self._stop_asked.set()
        if wait:
            self.join()
