"""The heartbeat by which a rank shows its supervisor progress: `heartbeat-RANK.json` in the node folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract import STAGES, Stage
from pipeline.files import write_atomically

HEARTBEAT_SECONDS = 0.5

COMPILE_PATIENCE = STAGES[Stage.COMPILE].timeout_minutes * 60
"""Seconds that a whole compilation may take: a compiler prints nothing for a long time, and Batch ends the stage then."""

FIRST_STEP_PATIENCE = 1800
"""Seconds for the first step of a device that compiles: it loads compiled graphs and compiles a missing one."""


class Heartbeat:
    """Progress of this rank, for the watchdog and for people. Cheap enough to call at every step.

    Args:
        folder: the node folder shared with the supervisor; None outside a supervisor (tests, tools): nothing is written.
        rank: this rank.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = heartbeat_path(folder, rank) if folder else None
        self._written = 0.0
        self._patience = 0.0

    def beat(
        self,
        done: float = 0,
        total: float = 0,
        *,
        work: float = 0.0,
        total_work: float = 0.0,
        unit: str = "",
        rate: float = 0.0,
        note: str = "",
        patience: float = 0.0,
    ) -> None:
        """Record progress.

        Args:
            done, total: in steps, texts or documents; total 0: unknown.
            work, total_work: the same in tokens, which give the remaining time where the longest texts go first; total_work 0:
                `done` and `total` give it.
            unit: what `rate` counts per second, e.g. `pairs` or `documents`.
            rate: per second, as measured lately.
            note: the current work, a few words.
            patience: seconds until the next heartbeat at the latest, where that is longer than usual (a compilation); it holds
                until the next heartbeat.
        """
        moment = time.monotonic()
        # A change of patience is never thinned out: a long one would be missed, or outlive its reason.
        thinned_out = moment - self._written < HEARTBEAT_SECONDS and done != total and patience == self._patience
        if self._path is None or thinned_out:
            return
        self._written, self._patience = moment, patience
        record = {
            "time": time.time(),
            "done": done,
            "total": total,
            "unit": unit,
            "rate": rate,
            "note": note,
            **({"work": work, "total_work": total_work} if total_work else {}),
            **({"patience": patience} if patience else {}),
        }
        write_atomically(self._path, json.dumps(record).encode())


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}.json"


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank without a new heartbeat for `seconds`, longer than its deadline; `last` is the note of its last one, if any."""

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
        progress_seconds: between two heartbeats of a rank, unless its last one asked for longer.
        patience_seconds: the longest that a heartbeat may ask for.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        *,
        startup_seconds: float,
        progress_seconds: float,
        patience_seconds: float = COMPILE_PATIENCE,
    ) -> None:
        self._folder = folder
        self._startup_seconds = startup_seconds
        self._progress_seconds = progress_seconds
        self._patience_seconds = patience_seconds
        self._seen: dict[int, tuple[int, float]] = dict.fromkeys(ranks, (0, time.monotonic()))
        """rank -> version of its heartbeat file (0: none yet) and when that version was first seen."""

    def stalls(self, running: Sequence[int]) -> list[Stall]:
        """Return the running ranks that are past their deadline, the longest stalled one first."""
        moment = time.monotonic()
        found = []
        for rank in running:
            version, since = self._seen[rank]
            newest = self._version(rank)
            if newest != version:
                self._seen[rank] = (newest, moment)
                continue
            if moment - since <= (self._progress_seconds if version else self._startup_seconds):
                continue
            last = self.read(rank)
            asked = min(float(last.get("patience", 0.0)), self._patience_seconds)
            deadline = max(self._progress_seconds, asked) if version else self._startup_seconds
            if moment - since > deadline:
                found.append(Stall(rank, moment - since, deadline, str(last.get("note", ""))))
        return sorted(found, key=lambda stall: -stall.seconds)

    def read(self, rank: int) -> dict[str, Any]:
        """Return a rank's newest heartbeat, empty before the first."""
        try:
            return dict(json.loads(heartbeat_path(self._folder, rank).read_text()))
        except FileNotFoundError:
            return {}

    def _version(self, rank: int) -> int:
        try:
            return heartbeat_path(self._folder, rank).stat().st_mtime_ns
        except FileNotFoundError:
            return 0
