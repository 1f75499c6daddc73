"""How a rank shows its supervisor that it gets on: by `heartbeat-RANK.json` in the node folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEARTBEAT_SECONDS = 0.5


class Heartbeat:
    """Progress of this rank, for the watchdog and for people. Cheap enough to call at every step.

    Args:
        folder: the node folder shared with the supervisor; None outside a supervisor (tests, tools): nothing is written.
        rank: this rank.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = heartbeat_path(folder, rank) if folder else None
        self._written = 0.0

    def beat(self, done: float = 0, total: float = 0, *, unit: str = "", rate: float = 0.0, note: str = "") -> None:
        """Say that work goes on.

        Args:
            done, total: in `unit`s that remaining time is computed from (steps, documents); total 0: unknown.
            unit: what `rate` counts per second, e.g. `pairs` or `documents`.
            rate: per second, as measured lately.
            note: what is being done now, a few words.
        """
        moment = time.monotonic()
        if self._path is None or (moment - self._written < HEARTBEAT_SECONDS and done != total):
            return
        self._written = moment
        record = {"time": time.time(), "done": done, "total": total, "unit": unit, "rate": rate, "note": note}
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record))
        temporary.replace(self._path)


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}.json"


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank whose heartbeat stood still for `seconds`, longer than its deadline; `last` is what it said last, if anything."""

    rank: int
    seconds: float
    deadline: float
    last: str


class Watchdog:
    """Watches the heartbeats of a node's ranks. A heartbeat counts when its file changes, by the watcher's own clock.

    Args:
        folder: the node folder.
        ranks: the node's ranks.
        startup_seconds: until a rank's first heartbeat.
        progress_seconds: between two heartbeats of a rank.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], *, startup_seconds: float, progress_seconds: float) -> None:
        self._folder = folder
        self._startup_seconds = startup_seconds
        self._progress_seconds = progress_seconds
        started = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = dict.fromkeys(ranks, (0, started))
        """rank -> version of its heartbeat file (0: none yet) and when that version was first seen."""

    def stalls(self, running: Sequence[int]) -> list[Stall]:
        """The running ranks that are past their deadline, the one that has been still for longest first."""
        moment = time.monotonic()
        found = []
        for rank in running:
            version, since = self._seen[rank]
            newest = self._version(rank)
            if newest != version:
                self._seen[rank] = (newest, moment)
                continue
            deadline = self._progress_seconds if version else self._startup_seconds
            if moment - since > deadline:
                found.append(Stall(rank, moment - since, deadline, str(self.read(rank).get("note", ""))))
        return sorted(found, key=lambda stall: -stall.seconds)

    def read(self, rank: int) -> dict[str, Any]:
        """A rank's newest heartbeat, empty before the first."""
        try:
            record: dict[str, Any] = json.loads(heartbeat_path(self._folder, rank).read_text())
        except FileNotFoundError:
            return {}
        return record

    def _version(self, rank: int) -> int:
        try:
            return heartbeat_path(self._folder, rank).stat().st_mtime_ns
        except FileNotFoundError:
            return 0
