"""What the watch over compiled graphs tells CloudWatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.contract import Metric, Stage
from pipeline.errors import Defect
from pipeline.model.watch import GraphWatch
from pipeline.runtime.device import GraphCounts
from pipeline.runtime.metrics import EmbeddedMetrics
from pipeline.runtime.world import NodeWorld


class Compiling:
    """A device that has met as many graphs as the test says."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def graph_counts(self) -> GraphCounts:
        return GraphCounts(compiled=len(self.keys))

    def graphs(self) -> set[str]:
        return self.keys

    def graph_module(self, key: str) -> bytes | None:
        return None


@pytest.mark.parametrize("stop", [False, True])
def test_a_graph_that_nobody_recorded_is_told_once_also_where_it_ends_the_run(
    cloudwatch: Callable[[], list[dict[str, Any]]], stop: bool
) -> None:
    device = Compiling()
    metrics = EmbeddedMetrics.from_environment(Stage.TRAIN, "week-1", NodeWorld())
    watch = GraphWatch(device=device, known={"recorded": None}, stop=stop, cloudwatch=metrics)  # type: ignore[arg-type]
    device.keys = {"recorded"}
    watch.check(1)
    assert cloudwatch() == []
    device.keys = {"recorded", "new", "newer"}
    if stop:
        with pytest.raises(Defect):
            watch.check(7)
    else:
        watch.check(7)
        watch.check(8)
    [told] = cloudwatch()
    assert (told[Metric.NEW_GRAPHS.value], told["Step"]) == (2, 7)
