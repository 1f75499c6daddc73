"""The records through which the nodes of a gang know of each other: every node's supervisor writes them to the run folder.

Batch looks at the main node's exit alone, and tells no node of another's end. So every node writes that it is alive
(`progress-NODE.json`, rewritten often) and how it ended (`exits/attempt-A/node-N.json`), and the main node reads them.
Records carry job and attempt: those of an earlier attempt, or of an earlier execution of the run, do not count.
Silence is measured with the reader's own clock, from change to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import store
from pipeline.contract import Record, RunPaths, Stage, StageFailure, now
from pipeline.errors import MissingInput, Transient, TrnpipeError
from pipeline.run.world import NodeWorld


def same_attempt(record: dict[str, Any], node: NodeWorld) -> bool:
    return record.get("job") == node.job and record.get("attempt") == node.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExit(Record):
    """`exits/attempt-A/node-N.json`: how a node ended; `failure` is None after success."""

    exit_code: int
    time: str
    failure: StageFailure | None
    node: int
    attempt: int
    job: str
    host: str


def write_progress(paths: RunPaths, stage: Stage, node: NodeWorld, heartbeat: dict[str, Any]) -> None:
    """Record that this node is alive, and its progress.

    Args:
        heartbeat: the newest one of the node's first rank, may be empty.
    """
    store.write_json(
        paths.progress(stage, node.index),
        {
            "done": 0,
            "total": 0,
            "unit": "",
            "rate": 0.0,
            "note": "",
            **heartbeat,
            "time": time.time(),
            "node": node.index,
            "attempt": node.attempt,
            "job": node.job,
        },
    )


def write_exit(paths: RunPaths, stage: Stage, node: NodeWorld, failure: StageFailure | None) -> None:
    """Record how this node ended."""
    store.write_bytes(
        paths.node_exit(stage, node.attempt, node.node),
        NodeExit(
            exit_code=failure.exit_code if failure else 0,
            time=failure.time if failure else now(),
            failure=failure,
            node=node.node,
            attempt=node.attempt,
            job=node.job,
            host=node.host,
        ).to_json(),
    )


ASK_SECONDS = 10.0
"""Interval between two questions to Batch about nodes that have not reported yet."""


class Peers:
    """The other nodes, as the main node sees them.

    Args:
        stale_seconds: a node that reported once and then nothing new for this long is lost.
        start_seconds: a node that has not reported after this long never came.
        ended: returns those of a job's nodes whose containers have ended, so that a node that dies before its first report is
            lost at once; None: Batch is not asked.
    """

    def __init__(
        self,
        paths: RunPaths,
        stage: Stage,
        node: NodeWorld,
        *,
        stale_seconds: float,
        start_seconds: float,
        ended: Callable[[str, Sequence[int]], dict[int, str]] | None = None,
    ) -> None:
        self._paths = paths
        self._stage = stage
        self._node = node
        self._stale_seconds = stale_seconds
        self._start_seconds = start_seconds
        self._exits: dict[int, StageFailure | None] = {}
        moment = time.monotonic()
        self._seen: dict[int, tuple[float, float]] = {peer: (0.0, moment) for peer in range(node.nodes) if peer != node.node}
        """node -> time of its newest report, by its clock (0: none yet), and when this node first saw it, by its own clock."""
        self._polled = moment
        self._ended = ended
        self._asked = moment
        self._ended_before: set[int] = set()

    def poll(self) -> None:
        """Read what is new in the run folder.

        Raises:
            Transient: storage trouble; no node counts as silent while it lasts.
            BadData: the record of a node's end cannot be read.
        """
        self._read_exits()
        for peer in self.running():
            shown = self._sign_of_life(peer)
            if shown is not None and shown != self._seen[peer][0]:
                self._seen[peer] = (shown, time.monotonic())
        self._polled = time.monotonic()

    def running(self) -> list[int]:
        """Return the nodes that have not reported how they ended."""
        return [peer for peer in self._seen if peer not in self._exits]

    def failures(self) -> list[StageFailure]:
        return [failure for failure in self._exits.values() if failure is not None]

    def silent(self, seconds: float) -> list[int]:
        """Return the running nodes that reported once and nothing new for this long."""
        return [peer for peer in self.running() if self._seen[peer][0] and self._polled - self._seen[peer][1] > seconds]

    def absent(self) -> list[int]:
        """Return the nodes that have not reported in this attempt."""
        return [peer for peer in self.running() if not self._seen[peer][0]]

    def lost(self) -> TrnpipeError | None:
        """Return the failure of a node that is lost, None if there is none."""
        if silent := self.silent(self._stale_seconds):
            return gone(silent, f"silent for {self._stale_seconds:g} seconds")
        if absent := [peer for peer in self.absent() if self._polled - self._seen[peer][1] > self._start_seconds]:
            return gone(absent, f"silent since the start, {self._start_seconds:g} seconds ago")
        return self._ended_at_once()

    def _ended_at_once(self) -> TrnpipeError | None:
        """Nodes whose containers have ended without a word: a host or an image that is no good."""
        absent = self.absent()
        if self._ended is None or not absent or time.monotonic() - self._asked < ASK_SECONDS:
            return None
        self._asked = time.monotonic()
        ended = self._ended(self._node.job, absent)
        # Seen ended twice: a report just before its end may not have been read yet.
        again, self._ended_before = self._ended_before & ended.keys(), set(ended)
        lost = sorted(again)
        return gone(lost, f"its container ended before its first report: {ended[lost[0]]}") if lost else None

    def _read_exits(self) -> None:
        for peer in self.running():
            uri = self._paths.node_exit(self._stage, self._node.attempt, peer)
            if store.exists(uri):
                record = NodeExit.from_json(store.read_bytes(uri))
                if same_attempt(asdict(record), self._node):
                    self._exits[peer] = record.failure

    def _sign_of_life(self, peer: int) -> float | None:
        """Return when a node last reported in this attempt, by its own clock; None: not yet."""
        try:
            record = store.read_json(self._paths.progress(self._stage, peer))
            return float(record["time"]) if same_attempt(record, self._node) else None
        except (MissingInput, ValueError, TypeError, KeyError, AttributeError):
            return None  # unreadable counts as absent: the next one comes within seconds


def gone(nodes: Sequence[int], how: str) -> Transient:
    return Transient(
        f"no sign of life from {', '.join(f'node {node}' for node in nodes)}",
        value=how,
        rule="every node of a gang reports until all are done",
        remedy="see that node's log and its host; the run is retried",
    )
