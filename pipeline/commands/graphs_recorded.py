"""Read the graphs that compile recorded (`graphs/`) and those that the stages met (`STAGE/graphs-NNNNN.json`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline import store
from pipeline.contract import RunPaths, Stage
from pipeline.errors import BadData
from pipeline.graphs.compiled import KnownGraphs, read_set
from pipeline.graphs.fingerprint import set_uri
from pipeline.graphs.graph_watch import UnrecordedGraph
from pipeline.run_inputs import GraphsPlan

STAGES_THAT_MEET = (Stage.TRAIN, Stage.EVALUATE, Stage.EMBED)

NOT_REPORTED = "met, not recorded, and not reported by the stage"
"""Cause of a graph that is not recorded, although the stage that met it does not report it as new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSet:
    """One of a run's two compiled sets.

    Attributes:
        name: `train` or `infer`.
        graphs: their number; None: the set is incomplete or missing.
    """

    name: str
    fingerprint: str
    uri: str
    graphs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedGraph(UnrecordedGraph):
    """A graph that a stage met and compile did not; `number` is the node's, or the array child's."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """The graphs that the processes of one stage met.

    Attributes:
        name: the stage's.
        processes: number of processes that reported.
        compiled: graphs that a process met for the first time, of the process that met most.
        last_compiled_step: steps done when a graph was last met for the first time, of the latest process.
        fallbacks: operation that ran on the host -> how often.
    """

    name: str
    processes: int
    compiled: int
    last_compiled_step: int
    fallbacks: dict[str, int]
    new: tuple[ReportedGraph, ...]


def read_sets(paths: RunPaths, plan: GraphsPlan) -> tuple[list[CompiledSet], KnownGraphs | None]:
    """Return both sets, and all graphs in them, None if one of them is missing.

    Raises:
        BadData: one cannot be read.
    """
    found: list[CompiledSet] = []
    known: dict[str, Any] = {}
    for name, fingerprint in (("train", plan.train), ("infer", plan.infer)):
        uri = set_uri(paths.bucket_root, name, fingerprint)
        graphs = read_set(uri).graphs if store.exists(uri) else None
        known |= graphs or {}
        found.append(CompiledSet(name=name, fingerprint=fingerprint, uri=uri, graphs=None if graphs is None else len(graphs)))
    return found, known if all(one.graphs is not None for one in found) else None


def read_stage(paths: RunPaths, stage: Stage, known: KnownGraphs | None, *, name: str = "") -> StageGraphs | None:
    """Return the graphs that the processes of a stage met, None if none has reported.

    Args:
        known: all recorded graphs; None: do not compare them with the reports.
        name: shown instead of the stage's own.

    Raises:
        BadData: a report cannot be read.
    """
    prefix, suffix = f"{paths.stage(stage)}/graphs-", ".json"
    if not (uris := sorted(info.uri for info in store.list_objects(paths.stage(stage)) if info.uri.startswith(prefix))):
        return None
    compiled = last = 0
    fallbacks: dict[str, int] = {}
    new: list[ReportedGraph] = []
    for uri in uris:
        try:
            record = store.read_json(uri)
            number = int(uri.removeprefix(prefix).removesuffix(suffix))
            reported = [ReportedGraph(number=number, **graph) for graph in record["new"]]
            silent = set(record["keys"]) - known.keys() - {graph.key for graph in reported} if known is not None else set()
            compiled, last = max(compiled, int(record["compiled"])), max(last, int(record["last_compiled_step"]))
            fallbacks = {
                operation: fallbacks.get(operation, 0) + int(record["fallbacks"].get(operation, 0))
                for operation in {**fallbacks, **record["fallbacks"]}
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadData("a stage's report of its graphs cannot be read", value=f"{uri}: {error!r}") from error
        new += reported
        new += [ReportedGraph(key=key, number=number, step=last, cause=NOT_REPORTED) for key in sorted(silent)]
    return StageGraphs(
        name=name or stage.value,
        processes=len(uris),
        compiled=compiled,
        last_compiled_step=last,
        fallbacks=fallbacks,
        new=tuple(new),
    )
