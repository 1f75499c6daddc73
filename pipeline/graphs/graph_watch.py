"""Reports graphs that a stage compiles although they should have been compiled ahead of time.

Two probes, because neither suffices alone: the process's own counter of graphs it met for the first time, which also counts
those whose compiled form was waiting for it, and the keys of the graphs, which are compared with the recorded ones when it
has risen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline import store
from pipeline.backends.counts import GraphCounts
from pipeline.backends.device import Device
from pipeline.backends.hlo import GraphDescription, describe, difference
from pipeline.contract import Metric
from pipeline.errors import Defect
from pipeline.graphs.compiled import KnownGraphs
from pipeline.log import log
from pipeline.run.cloudwatch import EmbeddedMetrics
from pipeline.run.context import StageContext


@dataclass(frozen=True, slots=True)
class UnrecordedGraph:
    """A graph that was not recorded.

    Attributes:
        step: steps done when the watch found it.
        cause: the difference from the most similar graph met before, recorded or new.
    """

    key: str
    step: int
    cause: str


@dataclass(kw_only=True)
class GraphWatch:
    """One rank's watch.

    Attributes:
        known: graphs recorded by compile; None: no comparison (the trial itself, and ranks whose leader compares for all).
        stop: end the run at the first new graph.
        cloudwatch: counts new graphs; None: no CloudWatch.
        new: those that were met and not recorded.
        last_compiled_step: steps done when a graph was last met for the first time; everything after it compiled nothing.
    """

    device: Device
    known: KnownGraphs | None = None
    stop: bool = False
    cloudwatch: EmbeddedMetrics | None = None
    new: list[UnrecordedGraph] = field(default_factory=list)
    last_compiled_step: int = 0
    _counts: GraphCounts = field(default_factory=GraphCounts)
    _seen: set[str] = field(default_factory=set)
    _others: set[str] = field(default_factory=set)
    _new_descriptions: list[GraphDescription] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.known is not None:
            # A compiler's cache that other sets share holds their graphs, too, which need no compiling.
            self._others = self.device.graphs() - self.known.keys()

    def check(self, step: int) -> None:
        """Read the counters; cheap as long as nothing was compiled.

        Raises:
            Defect: a new graph, or an operation that the device does not have, if `stop` says so.
        """
        counts = self.device.graph_counts()
        if counts == self._counts:
            return
        before, self._counts = self._counts, counts
        problems = [
            f"{name} ran on the host {times} times: the device has no such operation"
            for name, times in counts.fallbacks.items()
            if name not in before.fallbacks
        ]
        if counts.compiled > before.compiled:
            self.last_compiled_step = step
            found = self._new_graphs(step)
            problems += [f"graph {graph.key}: {graph.cause}" for graph in found]
            if found and self.cloudwatch:
                self.cloudwatch.write({Metric.NEW_GRAPHS: len(found)}, Step=step)
        for problem in problems:
            log.warning("step %d: not compiled ahead of time: %s", step, problem)
        if problems and self.stop:
            raise Defect(
                "graphs that were not compiled ahead of time",
                value=problems,
                rule="compile.new_graphs = stop: everything is compiled ahead of time",
                remedy="see the cause; with compile.new_graphs = report the run continues and compiles them",
            )

    def metrics(self) -> dict[str, float]:
        """Counts for a line of metrics: graphs met for the first time, those not recorded, operations that ran on the host."""
        return {
            "graphs_compiled": self._counts.compiled,
            "new_graphs": len(self.new),
            "fallbacks": sum(self._counts.fallbacks.values()),
        }

    def report(self, context: StageContext) -> dict[str, Any]:
        """Write the graphs that this process met to the run folder; return the counts for the stage's metrics."""
        counts = {
            "compiled": self._counts.compiled,
            "new": len(self.new),
            "last_compiled_step": self.last_compiled_step,
            "fallbacks": dict(self._counts.fallbacks),
        }
        store.write_json(
            context.paths.graphs(context.stage, context.world.node.index),
            {**counts, "new": [asdict(graph) for graph in self.new], "keys": sorted(self._seen)},
        )
        return counts

    def _new_graphs(self, step: int) -> list[UnrecordedGraph]:
        if self.known is None:
            return []
        keys = self.device.graphs() - self._seen - self._others
        self._seen |= keys
        found = []
        for key in sorted(keys - self.known.keys()):
            if (module := self.device.graph_module(key)) is None:
                found.append(UnrecordedGraph(key, step, "its program is not kept"))
                continue
            description = describe(module)
            # Also with new ones: what makes a graph per step shows between these.
            alike = [graph for graph in (*self.known.values(), *self._new_descriptions) if graph is not None]
            found.append(UnrecordedGraph(key, step, difference(description, alike)))
            self._new_descriptions.append(description)
        self.new += found
        return found
