"""A bucket with shards, run folders and a registry, on which tests run prepare and plan."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import RunPaths, Stage
from pipeline.dataset.ingested import SLICES
from pipeline.dataset.row_files import read_table
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.seen import SeenRecord, write_seen
from pipeline.dataset.selection import holdout_slices
from pipeline.errors import TrnpipeError
from pipeline.plan import RunPlan
from pipeline.run.context import Heartbeat, StageContext, StageOutput
from pipeline.run.world import NodeWorld, World
from pipeline.run_inputs import MissingShards, RunInputs
from pipeline.stages import stage_function
from pipeline.stages.rank import write_result

Config = dict[str, Any]


class Bench:
    """A bucket in a folder, and stages run on it.

    Attributes:
        config: the deployment's configuration.
        deployment: more of the deployment.
    """

    def __init__(self, root: str, scratch: Path, model: Path) -> None:
        self.root = root
        self.scratch = scratch
        self.model = model
        self.deployment: Config = {}
        self.config: Config = {
            "nodes": 2,
            "device": {"kind": "cpu", "ranks_per_node": 2, "precision": "fp32"},
            "data": {"train": [store.join(root, "data")], "holdout_fraction": 0.2, "replay_fraction": 0.5},
            "model": {"parent": str(model)},
            "train": {"batch_size": 4, "query_length": 12, "length": 32},
            "evaluate": {"candidates": 7},
            "gate": {"undecided": "accept"},
            "embed": {"children": 3, "rows_per_part": 50, "length": 40},
        }

    def shard(self, name: str, lines: list[Any], *, folder: str = "data") -> str:
        """Write a JSONL shard; lines that are no bytes are serialized."""
        uri = store.join(self.root, folder, name)
        data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        store.write_bytes(uri, gzip.compress(data) if name.endswith(".gz") else data)
        return uri

    def paths(self, run: str) -> RunPaths:
        return RunPaths(f"{self.root}/runs/{run}")

    def request(self, run: str, execution: Config | None = None, allowed_nodes: tuple[int, ...] = (1, 2)) -> None:
        """What the state machine writes first: the deployment's config is `self.config`."""
        deployment = {"config": self.config, "allowed_nodes": list(allowed_nodes), "local_paths": True, **self.deployment}
        record = {"deployment": deployment, "execution": execution or {}, "execution_arn": "arn"}
        store.write_json(self.paths(run).input, record)

    def stage(self, stage: Stage, run: str, child: int = 0) -> StageOutput | None:
        scratch = self.scratch / f"{run}-{len(list(self.scratch.iterdir()))}"
        scratch.mkdir()
        world = World(node=NodeWorld(array_index=child))
        context = StageContext(stage=stage, paths=self.paths(run), world=world, scratch=scratch, heartbeat=Heartbeat(None, 0))
        output = stage_function(stage)(context)
        if output is not None:
            write_result(context, "", output)
        return output

    def prepare(self, run: str, execution: Config | None = None, allowed_nodes: tuple[int, ...] = (1, 2)) -> StageOutput:
        """An execution up to the end of prepare."""
        self.request(run, execution, allowed_nodes)
        output = self.stage(Stage.PREPARE, run)
        assert output is not None
        return output

    def ingest(self, run: str) -> None:
        """All children of ingest."""
        for child in range(self.missing(run).children):
            self.stage(Stage.INGEST, run, child)

    def start(self, run: str, execution: Config | None = None) -> StageOutput:
        """An execution up to the end of plan."""
        self.prepare(run, execution)
        self.ingest(run)
        output = self.stage(Stage.PLAN, run)
        assert output is not None
        return output

    def train(self, run: str, steps: int | None = None) -> SeenRecord:
        """What train leaves at its end besides the model."""
        found = self.plan(run)
        rows, scratch = Path(self.paths(run).rows), self.scratch / f"{run}-seen"
        return write_seen(self.root, found, rows, found.train.steps if steps is None else steps, scratch)

    def week(self, run: str, execution: Config | None = None) -> RunPlan:
        """A run that is trained and published."""
        self.start(run, execution)
        self.train(run)
        self.publish(run, str(self.model))
        self.config["model"] = {}
        return self.plan(run)

    def inputs(self, run: str) -> RunInputs:
        return RunInputs.from_json(store.read_bytes(self.paths(run).inputs))

    def missing(self, run: str) -> MissingShards:
        return MissingShards.model_validate_json(store.read_bytes(self.paths(run).missing))

    def plan(self, run: str) -> RunPlan:
        return RunPlan.from_json(store.read_bytes(self.paths(run).plan))

    def rows(self, run: str, name: str = "train.arrow") -> list[dict[str, Any]]:
        """The content of a row file."""
        found: list[dict[str, Any]] = read_table(Path(self.paths(run).rows) / name).to_pylist()
        return found

    def publish(self, run: str, model: str) -> None:
        store.write_json(store.join(self.root, "registry", "current.json"), {"model": model, "embeddings": "e", "run": run})

    def quarantine(self, run: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in store.read_bytes(self.paths(run).quarantine).decode().splitlines()]


def rows(start: int, stop: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"row{number}", "query": f"query {number}", "document": f"document {number} " + "and more " * (number % 5), **more}
        for number in range(start, stop)
    ]


def held_out(row: dict[str, Any], fraction: float = 0.2) -> bool:
    return normalized_hash(row["document"]) * SLICES >> 64 < holdout_slices(fraction)


def refusal(kind: type[TrnpipeError], call: Callable[[], object], *words: str) -> TrnpipeError:
    """The error that a call ends with; it must say all of these words, the rule or remedy, and carry its exit code."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.rule or caught.value.remedy
    return caught.value
