"""What the watch over compiled graphs tells CloudWatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.backends.counts import GraphCounts
from pipeline.contract import Metric, Stage
from pipeline.errors import Defect
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.run.cloudwatch import EmbeddedMetrics
from pipeline.run.world import NodeWorld


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
def test_an_unrecorded_graph_is_logged_once_also_where_it_ends_the_run(
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


def test_graphs_of_other_sets_in_a_shared_cache_are_not_new() -> None:
    device = Compiling()
    device.keys = {"of another set"}
    watch = GraphWatch(device=device, known={"recorded": None}, stop=True)  # type: ignore[arg-type]
    device.keys = {"of another set", "recorded"}
    watch.check(1)
    assert watch.new == []
    device.keys = {"of another set", "recorded", "new"}
    with pytest.raises(Defect):
        watch.check(2)
    assert [graph.key for graph in watch.new] == ["new"]
