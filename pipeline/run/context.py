"""The arguments and the result of a stage function."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline import store
from pipeline.contract import EMBEDDING, Artifact, RunPaths, Stage
from pipeline.plan import EmbedPlan, RunPlan
from pipeline.run.cloudwatch import EmbeddedMetrics
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World

__all__ = ["NODE_FOLDER", "Heartbeat", "StageContext", "StageOutput", "node_folder"]

NODE_FOLDER = "TRNPIPE_NODE_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """The result of a stage function on the rank that returns it for the stage; becomes `result.json`."""

    inputs: dict[str, Artifact] = field(default_factory=dict)
    outputs: dict[str, Artifact] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


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
        """The run's plan, with what embed and publish follow now; there is none before stage plan has written it."""
        plan = RunPlan.from_json(store.read_bytes(self.paths.plan))
        if self.stage in EMBEDDING and store.exists(self.paths.embed_plan):
            return plan.model_copy(update={"embed": EmbedPlan.from_json(store.read_bytes(self.paths.embed_plan))})
        return plan

    @cached_property
    def cloudwatch(self) -> EmbeddedMetrics:
        """The metrics of this process."""
        return EmbeddedMetrics.from_environment(self.stage, self.paths.run_id, self.world.node)


def node_folder() -> Path | None:
    """Return the folder that a node's ranks share with their supervisor (TRNPIPE_NODE_DIR), None without one.

    Ranks write `heartbeat-RANK.json` and `failure-RANK.json` there: the supervisor watches the first and publishes the second.
    """
    path = os.environ.get(NODE_FOLDER)
    return Path(path) if path else None
