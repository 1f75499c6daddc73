"""The results of a health check, and how the ranks of a node join them into one judgement of the host.

The stage health_check uses it and, in short form, training.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import store
from pipeline.contract import now
from pipeline.errors import UnhealthyHost
from pipeline.files import write_atomically
from pipeline.host.own_job import instance_id
from pipeline.log import log
from pipeline.run.context import StageContext

POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRecord:
    """One test on one rank.

    Attributes:
        value: the measured value, in `unit`.
        floor, ceiling: the bound for `value`; None: measured without judging.
        seconds: duration of the whole test.
        detail: what was tried, and what was wrong.
    """

    __test__ = False  # not a test case of pytest's

    name: str
    rank: int
    passed: bool
    value: float
    floor: float | None = None
    ceiling: float | None = None
    unit: str = ""
    seconds: float = 0.0
    detail: str = ""


class NodeReport:
    """Collects the records of a node's ranks through the node's scratch folder, which works where collectives fail.

    Args:
        uri: where the node's first rank publishes all records; None: nowhere.
        wait_seconds: for the node's other ranks, beyond what each round needs.
    """

    def __init__(self, context: StageContext, *, uri: str | None, wait_seconds: float) -> None:
        self._context = context
        self._uri = uri
        self._wait_seconds = wait_seconds
        self._earlier: list[TestRecord] = []
        # One rank asks ECS; the others read the answer in the first rank's part of every round.
        self._instance = instance_id() if context.world.local_rank == 0 else ""

    def judge(self, round_name: str, records: list[TestRecord], *, wait_seconds: float = 0.0) -> None:
        """Join this rank's records of a round with those of the node's other ranks; the node's first rank publishes them all.

        Args:
            wait_seconds: how long a rank of this round may take longer than this one.

        Raises:
            UnhealthyHost: a test failed on one of the node's ranks, the same on all of them.
        """
        world = self._context.world
        own = {"instance": self._instance, "records": [asdict(record) for record in records]}
        write_atomically(self._path(round_name, world.local_rank), json.dumps(own).encode())
        deadline = time.monotonic() + self._wait_seconds + wait_seconds
        parts = [
            json.loads(self._wait_for(self._path(round_name, local_rank), deadline)) for local_rank in range(world.local_size)
        ]
        joined = [TestRecord(**record) for part in parts for record in part["records"]]
        if world.local_rank == 0:
            self.publish(joined)
        if failed := [record for record in joined if not record.passed]:
            raise UnhealthyHost(
                f"{self._where(parts[0]['instance'])} failed its health check: "
                + ", ".join(sorted({record.name for record in failed})),
                value=[describe(record) for record in failed],
                rule="every test gives the known answer and reaches its floor (health_check in the configuration)",
                remedy="the run is retried on another host; if this host fails again, take it out of service",
            )

    def publish(self, records: list[TestRecord]) -> None:
        """Log these records and write them down with those of earlier rounds; for the node's first rank."""
        for record in records:
            log.info("%s %s", "ok    " if record.passed else "FAILED", describe(record))
        self._earlier += records
        if self._uri is None:
            return
        node = self._context.world.node
        store.write_json(
            self._uri,
            {
                "node": node.node,
                "host": node.host,
                "instance": self._instance,
                "attempt": node.attempt,
                "time": now(),
                "passed": all(record.passed for record in self._earlier),
                "tests": [asdict(record) for record in self._earlier],
            },
        )

    def _where(self, instance: str) -> str:
        node = self._context.world.node
        return f"node {node.node} ({', '.join(dict.fromkeys(filter(None, (node.host, instance))))})"

    def _path(self, round_name: str, local_rank: int) -> Path:
        return self._context.scratch / f"health-{round_name}-{local_rank}.json"

    def _wait_for(self, path: Path, deadline: float) -> str:
        while not path.exists():
            if time.monotonic() > deadline:
                raise UnhealthyHost(
                    f"{self._where(self._instance)}: a rank did not finish its tests",
                    value=path.stem,
                    rule="the ranks of a node finish a round of tests together",
                    remedy="see that rank's log; the run is retried on another host",
                )
            # The other rank shows its progress by its own heartbeat.
            self._context.heartbeat.beat(note="waiting for the node's other ranks")
            time.sleep(POLL_SECONDS)
        return path.read_text()


def describe(record: TestRecord) -> str:
    """Return a record in one line."""
    bound = f", floor {record.floor:g}" if record.floor else "" if record.ceiling is None else f", at most {record.ceiling:g}"
    return f"rank {record.rank} {record.name}: {record.value:.4g} {record.unit}{bound}" + (
        f" ({record.detail})" if record.detail else ""
    )
