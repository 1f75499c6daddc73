"""What tests of stages share: a tiny real encoder with its tokenizer, and run folders planned over real shards by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline import store
from pipeline.config import RunConfig, build_config
from pipeline.contract import DEPLOYMENT_VARIABLE, RunPaths, Stage, StageResult, now
from pipeline.dataset.ingested import DOCUMENTS
from pipeline.dataset.row_files import SCHEMAS
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.model.folder import WEIGHTS
from pipeline.plan import HoldoutPlan, RunPlan, Shard, TrainPlan, part_count
from pipeline.run import heartbeat
from pipeline.run.cloudwatch import EXECUTION_VARIABLE, is_record
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import NodeWorld, World
from pipeline.run_inputs import InputShard, Parent, PlannedWorld, Published
from tests.pipeline.ingesting import ingest, name_shard, plan_documents, tokenizer_plan
from tests.pipeline.nodes import planned_ranks, scripted_stage, supervise  # noqa: F401 - fixtures
from tests.tiny import WORDS, Head, head_form, make_model

SMALL = {
    "device": {"kind": "cpu", "precision": "fp32", "threads_per_rank": 1},
    "train": {"query_length": 12, "length": 32},
    "embed": {"length": 32, "tokens_per_batch": 256},
    "evaluate": {"bootstrap_samples": 200},
    "gate": {"undecided": "accept"},
}
Text = tuple[str, str]


@pytest.fixture
def heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[StageContext], list[dict[str, Any]]]:
    """A function that makes a context's heartbeats real ones, none of them thinned out, and gives the list that they go to."""

    def record(context: StageContext) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0)
        monkeypatch.setattr(heartbeat, "write_atomically", lambda _, data: found.append(json.loads(data)))
        context.heartbeat = Heartbeat(tmp_path, 0)
        return found

    return record


@pytest.fixture
def cloudwatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, Any]]]:
    """A process in a container of a deployment, and a function that gives the metrics it has printed since the last call."""
    monkeypatch.setenv(EXECUTION_VARIABLE, "AWS_ECS_EC2")
    monkeypatch.setenv(DEPLOYMENT_VARIABLE, "search")
    return lambda: [json.loads(line) for line in capsys.readouterr().out.splitlines() if is_record(line)]


def make_texts(count: int, seed: int = 0) -> list[Text]:
    """(id, text) of documents of 2 to 40 words; some are longer than every bucket."""
    rng = np.random.default_rng(seed)
    return [(f"doc-{index:04d}", " ".join(rng.choice(WORDS, size=rng.integers(2, 41)))) for index in range(count)]


@dataclass
class PlannedRun:
    """A run folder whose plan is written; stages are called in this process."""

    paths: RunPaths
    plan: RunPlan
    scratch: Path
    texts: list[Text]

    def context(self, stage: Stage, child: int = 0) -> StageContext:
        scratch = self.scratch / f"{stage}-{child}"
        scratch.mkdir(parents=True, exist_ok=True)
        world = World(node=NodeWorld(array_index=child))
        return StageContext(stage=stage, paths=self.paths, world=world, scratch=scratch, heartbeat=Heartbeat(None, 0))

    def finish(self, stage: Stage, output: StageOutput) -> StageResult:
        """Write a stage's result as its rank does."""
        result = StageResult(
            stage=stage.value,
            run=self.plan.run,
            status="done",
            started=now(),
            finished=now(),
            fingerprint=self.plan.fingerprint,
            inputs=output.inputs,
            outputs=output.outputs,
            metrics=output.metrics,
            versions={"torch": torch.__version__},
        )
        store.write_bytes(self.paths.result(stage), result.to_json())
        return result

    def replan(self, **changes: Any) -> None:
        """Write another plan in the place of this one."""
        self.plan = self.plan.model_copy(update=changes).sealed()
        store.write_bytes(self.paths.plan, self.plan.to_json())


PlanRun = Callable[..., PlannedRun]


@pytest.fixture
def plan_run(tmp_path: Path) -> PlanRun:
    """A function that makes a bucket with a corpus, a parent, a finished model, and a run planned over them."""

    def plan_run(
        root: str | None = None,
        *,
        run: str = "week-01",
        texts: Sequence[Text] | None = None,
        shard_rows: int = 40,
        part_rows: int = 30,
        children: int = 2,
        model_seed: int = 0,
        head: Head | None = None,
        settings: Mapping[str, Any] | None = None,
        published: Published | None = None,
        locales: Sequence[str | None] = (None,),
        without_tokens: Collection[str] = (),
    ) -> PlannedRun:
        root = root or str(tmp_path / "bucket")
        texts = list(texts if texts is not None else make_texts(100))
        config = build_config(SMALL, {"model": {"head": head_form(head)}}, settings or {})
        local = tmp_path / f"models-{run}"
        for name, seed, dimensions in (("parent", 0, None), ("model", model_seed, config.embed.dimensions)):
            make_model(local / name, seed=seed, head=head, dimensions=dimensions)
        paths = RunPaths(store.join(root, "runs", run))
        store.upload_folder(local / "parent", store.join(root, "models", "parent"))
        store.upload_folder(local / "model", paths.model)
        tokenizer = TextTokenizer(local / "parent")
        shards = [
            _ingest_shard(root, index, texts[start : start + shard_rows], locales, tokenizer, without_tokens)
            for index, start in enumerate(range(0, len(texts), shard_rows))
        ]
        parent = Parent(
            uri=store.join(root, "models", "parent"),
            folder=store.join(root, "models", "parent"),
            sha256=store.sha256_file(local / "parent" / WEIGHTS),
        )
        plan = RunPlan(
            run=run,
            created=now(),
            config=config,
            parent=parent,
            published=published,
            world=PlannedWorld(kind="cpu", precision="fp32", nodes=1, ranks_per_node=1),
            train=TrainPlan(
                new=(Shard(uri=store.join(root, "train", "pairs.jsonl"), sha256="a" * 64, size=1000, rows=120, new_rows=90),),
                replay=(),
                rows=90,
                new_rows=90,
                replay_rows=0,
                steps=10,
                warmup_steps=1,
            ),
            holdout=HoldoutPlan(rows=30, queries=30, candidates=len(texts)),
            embed=plan_documents(root, shards, tokenizer, parts=part_count(len(texts), part_rows, children), children=children),
        ).sealed()
        store.write_bytes(paths.plan, plan.to_json())
        _write_rows(paths, config, local / "model", texts, tmp_path / f"rows-{run}")
        return PlannedRun(paths, plan, tmp_path / f"scratch-{run}", texts)

    return plan_run


def _ingest_shard(
    root: str,
    index: int,
    texts: Sequence[Text],
    locales: Sequence[str | None],
    tokenizer: TextTokenizer,
    without_tokens: Collection[str],
) -> InputShard:
    """Ingest documents whose locales take turns; the shard itself is not there."""
    uri = store.join(root, "corpus", f"shard-{index}.jsonl")
    shard = name_shard(uri, DOCUMENTS, size=100 * len(texts), tokenizer=tokenizer_plan(tokenizer), of_pairs=False)
    rows = [
        {"id": key, "text": text, "locale": locale, "line": line}
        for line, ((key, text), locale) in enumerate(zip(texts, cycle(locales), strict=False), 1)
    ]
    ingest(root, shard, rows, tokenizer, without_tokens=without_tokens)
    return shard


def _write_rows(paths: RunPaths, config: RunConfig, model: Path, texts: Sequence[Text], folder: Path) -> None:
    """A hold-out of 30 queries, each the first words of one document, in two locales, 12 of the newest week; every document is a
    candidate."""
    tokenizer = TextTokenizer(model)
    held = texts[:30]
    queries = [" ".join(text.split()[:4]) for _, text in held]
    holdout = {
        "id": [identifier for identifier, _ in held],
        "query_tokens": tokenizer.encode(queries, config.train.query_length),
        "query_hash": [normalized_hash(query) for query in queries],
        "document_hash": [normalized_hash(text) for _, text in held],
        "label": [1.0] * len(held),
        "locale": [("de", "en", None)[index % 3] for index in range(len(held))],
        "task": [("search", None)[index % 2] for index in range(len(held))],
        "key": [normalized_hash(text) for _, text in held],
        "new": [index < 12 for index in range(len(held))],
    }
    candidates = {
        "document_tokens": tokenizer.encode([text for _, text in texts], config.embed.length),
        "document_hash": [normalized_hash(text) for _, text in texts],
        "id": [identifier for identifier, _ in texts],
    }
    folder.mkdir()
    known: dict[str, list[Any]] = {name: [] for name in SCHEMAS["known.arrow"].names}
    for name, columns in (("holdout.arrow", holdout), ("candidates.arrow", candidates), ("known.arrow", known)):
        table = pa.table(columns, schema=SCHEMAS[name])
        with pa.ipc.new_file(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    store.upload_folder(folder, paths.rows)
