"""Lower the graphs of a training step as the first and the last rank of a plan would compile them, in a child process.

torch-xla takes over the process that loads it, and an error inside XLA ends a process without an exception: hence a child, on the
host's processor whatever devices there are. It prints one JSON line per rank.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.backends.device import require_available, resolve_precision
from pipeline.backends.hlo import GraphDescription, difference
from pipeline.config import RunConfig
from pipeline.contract import EAGER_KINDS
from pipeline.errors import Defect
from pipeline.model.folder import inspect_folder
from pipeline.model.inventory import fetch_without_weights
from pipeline.plan import RunPlan
from pipeline.run.find_run import mirrored

SHOWN_LINES = 8
"""Last lines of a child's output that are quoted when it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One graph of a step.

    Attributes:
        times: how often it runs in a row (more than once with train.accumulation).
    """

    fingerprint: str
    description: GraphDescription
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The graphs of a plan's step.

    Attributes:
        kind: device type of the graphs; `neuron` where the plan's own has none.
        ranks: the plan's number of ranks, which the graphs contain.
        graphs: rank 0's, in the order in which they run.
        difference: how the last rank's differ, in words; empty: they are the same, byte for byte.
    """

    kind: str
    precision: str
    ranks: int
    graphs: tuple[Graph, ...]
    difference: str


def lower_plan(plan: RunPlan, root: str | None, on_progress: Callable[[str], None]) -> Lowered:
    """Lower a step for rank 0 and for the last rank, and compare them.

    Args:
        root: local bucket that stands for the one the plan names, see `find_run`.

    Raises:
        BadConfig: torch-xla is not installed here, or the parent is not what the configuration says.
        MissingInput: the parent is gone.
        Defect: the child fails.
    """
    require_available("xla")
    eager = plan.world.kind in EAGER_KINDS
    kind = "neuron" if eager else plan.world.kind
    precision = resolve_precision(kind, plan.config.device.precision) if eager else plan.world.precision
    ranks = plan.world.ranks
    chosen = sorted({0, ranks - 1})
    with tempfile.TemporaryDirectory(prefix="trnpipe-lower-") as scratch:
        folder = fetch_without_weights(mirrored(plan.parent.folder, root), Path(scratch) / "parent")
        inspect_folder(folder, plan.config.model)
        request = {
            "config": plan.config.model_dump(mode="json"),
            "model": str(folder.absolute()),
            "precision": precision,
            "ranks": ranks,
            "chosen": chosen,
        }
        found: dict[int, list[Graph]] = {}
        for line in _answers(request, Path(scratch) / "log", plan.graphs.environment if plan.graphs else {}):
            on_progress(f"rank {line['rank']} of {ranks}")
            found[line["rank"]] = [
                Graph(fingerprint=graph["fingerprint"], description=GraphDescription(**graph["description"]), times=1)
                for graph in line["graphs"]
            ]
    if missing := [rank for rank in chosen if not found.get(rank)]:
        raise Defect("the child did not lower all graphs", value=[f"rank {rank}" for rank in missing])
    return Lowered(
        kind=kind,
        precision=precision,
        ranks=ranks,
        graphs=tuple(_merged(found[0])),
        difference=rank_difference(found[0], found[ranks - 1]),
    )


def rank_difference(first: list[Graph], last: list[Graph]) -> str:
    """Return how the last rank's graphs of a step differ from the first's, empty where they do not."""
    if len(first) != len(last):
        return f"{len(last)} graphs instead of {len(first)}"
    differing = [(one, other) for one, other in zip(first, last, strict=True) if one.fingerprint != other.fingerprint]
    return "; ".join(difference(other.description, [one.description]) for one, other in differing)


def _merged(graphs: list[Graph]) -> list[Graph]:
    runs = (list(group) for _, group in groupby(graphs, key=lambda graph: graph.fingerprint))
    return [replace(run[0], times=len(run)) for run in runs]


def _answers(request: dict[str, Any], log: Path, variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Run the child; yield its lines.

    Args:
        variables: the plan's graph variables.

    Raises:
        Defect: the child fails.
    """
    with (
        open(log, "w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "pipeline.commands.graphs_lowered", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Also where there is an accelerator: nothing runs on it, and its cores may be in use.
            env={**os.environ, **variables, "PJRT_DEVICE": "CPU"},
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                yield json.loads(line)
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.kill()
            code = child.wait()
        if code:
            errors.seek(0)
            words = [line for line in errors.read().splitlines() if line.strip()]
            raise Defect(
                "the graphs could not be lowered",
                value=[f"exit code {code}", *words[-SHOWN_LINES:]],
                rule="a training step is recorded on the host for the first and the last rank, and never run",
                remedy="-9 is the host's memory: three copies of the weights are needed; otherwise report it",
            )


def _lower_here(request: dict[str, Any]) -> None:
    """Print the graphs; runs in the child."""
    # Imported here: these take over the process.
    from pipeline.model.encoder import new_encoder
    from pipeline.run.world import World
    from pipeline.training.lowered_step import lower_training

    config = RunConfig.model_validate(request["config"])
    backbone, _ = inspect_folder(Path(request["model"]), config.model)
    for rank in request["chosen"]:
        world = World(rank=rank, size=request["ranks"])
        # Weights are inputs of the graphs, so any will do.
        encoder = new_encoder(backbone, config.model)
        lowered = lower_training(encoder, config, request["precision"], world)
        graphs = [{"fingerprint": one.fingerprint, "description": asdict(one.description)} for one in lowered]
        sys.stdout.write(json.dumps({"rank": rank, "graphs": graphs}) + "\n")
        sys.stdout.flush()
        del encoder
        gc.collect()


if __name__ == "__main__":
    _lower_here(json.loads(sys.argv[1]))
    # torch-xla's threads have nothing more to say.
    os._exit(0)
