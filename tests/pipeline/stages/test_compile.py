"""compile says honestly that eager kinds have nothing to compile, and refuses the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.contract import Stage
from pipeline.errors import BadConfig
from pipeline.plan import World as PlannedWorld
from pipeline.runtime.world import World
from pipeline.stages import compile as stage


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_eager_kinds_have_nothing_to_compile_and_the_result_says_so(plan_run: Any, kind: str) -> None:
    run = plan_run()
    run.replan(world=PlannedWorld(kind=kind, precision="bf16", nodes=1, ranks_per_node=2))
    output = stage.run(run.context(Stage.COMPILE))
    assert output is not None
    assert output.metrics["compiles"] is False
    assert kind in output.metrics["reason"]
    # Only one rank speaks for the stage.
    assert stage.run(replace(run.context(Stage.COMPILE), world=World(rank=1, size=2))) is None


@pytest.mark.parametrize("kind", ["neuron", "xla"])
def test_kinds_with_graphs_are_refused(plan_run: Any, kind: str) -> None:
    run = plan_run()
    run.replan(world=PlannedWorld(kind=kind, precision="bf16", nodes=1, ranks_per_node=1))
    with pytest.raises(BadConfig) as refused:
        stage.run(run.context(Stage.COMPILE))
    assert refused.value.value == kind
