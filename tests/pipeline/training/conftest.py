"""A run planned for training: real rows of learnable pairs as Arrow files, a tiny parent, a plan; stages run in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract import RunPaths, Stage
from pipeline.plan import RunPlan
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
from tests.pipeline.training.planned import plan_training


@dataclass
class TrainingRun:
    """A run folder with its plan, in which `train` can run."""

    paths: RunPaths
    plan: RunPlan
    scratch: Path
    attempts: int = 0

    def context(self, world: World | None = None) -> StageContext:
        """A new attempt, with a scratch folder of its own."""
        self.attempts += 1
        scratch = self.scratch / str(self.attempts)
        scratch.mkdir(parents=True)
        world = world or World()
        return StageContext(
            stage=Stage.TRAIN, paths=self.paths, world=world, scratch=scratch, heartbeat=Heartbeat(None, world.rank)
        )


@pytest.fixture
def training_run(tmp_path: Path) -> Callable[..., TrainingRun]:
    """A function that plans a run in a folder or bucket."""

    def training_run(root: str | None = None, *, run: str = "week-01", **settings: Any) -> TrainingRun:
        paths = RunPaths(f"{root or tmp_path / 'bucket'}/runs/{run}")
        return TrainingRun(paths, plan_training(paths, tmp_path / run, **settings), tmp_path / run / "scratch")

    return training_run


Lowering = dict[str, Any]
"""What tests.pipeline.training.lowered prints."""


@pytest.fixture(scope="session")
def lowering(tmp_path_factory: pytest.TempPathFactory) -> Lowering:
    """Training steps of the tiny model in many settings, lowered by one process."""
    command = [sys.executable, "-m", "tests.pipeline.training.lowered", str(tmp_path_factory.mktemp("lowering") / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Lowering = json.loads(done.stdout.splitlines()[-1])
    return found
