"""compile says honestly where there is nothing to compile: on eager kinds, and where both sets are complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.contract import Stage
from pipeline.graphs.compiled import GraphSet, write_set
from pipeline.graphs.fingerprint import set_uri
from pipeline.run.world import World
from pipeline.run_inputs import GraphsPlan, PlannedWorld
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
def test_complete_sets_leave_nothing_to_compile(plan_run: Any, kind: str) -> None:
    """Without loading a framework for it. (Sets that are missing: test_graphs, test_neuron.)"""
    run = plan_run()
    run.replan(
        world=PlannedWorld(kind=kind, precision="fp32", nodes=1, ranks_per_node=1), graphs=GraphsPlan(train="one", infer="other")
    )
    for name, fingerprint in (("train", "one"), ("infer", "other")):
        graphs = GraphSet(fingerprint=fingerprint, run="earlier", graphs={"key": None})
        write_set(set_uri(run.paths.bucket_root, name, fingerprint), graphs)
    output = stage.run(run.context(Stage.COMPILE))
    assert output is not None
    assert output.metrics == {"compiles": False, "graphs": 0, "reason": "both compiled sets are there"}
