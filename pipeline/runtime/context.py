"""What a stage function is given and what it gives back; how a rank tells its supervisor that it is alive.

A rank and its supervisor share one folder on the node (TRNPIPE_NODE_DIR): `heartbeat-RANK.json` and `failure-RANK.json`
are written there by the rank; the supervisor watches the first and publishes the second.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.contract import Artifact, RunPaths, Stage
from pipeline.plan import RunPlan
from pipeline.runtime import store
from pipeline.runtime.world import World

log = logging.getLogger("trnpipe")

HEARTBEAT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage function returns on the rank that speaks for the stage; becomes `result.json`."""

    inputs: dict[str, Artifact] = field(default_factory=dict)
    outputs: dict[str, Artifact] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


class Heartbeat:
    """Progress of this rank, for the watchdog and for people. Cheap enough to call at every step.

    Args:
        folder: the node folder shared with the supervisor; None outside a supervisor (tests, tools): nothing is written.
        rank: this rank.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = folder / f"heartbeat-{rank}.json" if folder else None
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


@dataclass(kw_only=True)
class StageContext:
    """Everything a stage function may use: the run folder, the plan, who this rank is, a scratch folder, a heartbeat.

    Attributes:
        scratch: local folder of this node's attempt, shared by its ranks, removed afterwards.
    """

    stage: Stage
    paths: RunPaths
    world: World
    scratch: Path
    heartbeat: Heartbeat

    @cached_property
    def plan(self) -> RunPlan:
        """The run's plan; prepare has none yet and must not ask."""
        return RunPlan.from_json(store.read_bytes(self.paths.plan))


def node_folder() -> Path | None:
    """The folder shared with the supervisor, None when there is none."""
    path = os.environ.get("TRNPIPE_NODE_DIR")
    return Path(path) if path else None
