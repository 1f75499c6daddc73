"""Plans a training run over rows made here: what plan would leave behind, for tests that start at train."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import store
from pipeline.config import build_config
from pipeline.contract import RunPaths, now
from pipeline.dataset.row_files import SCHEMAS, row_schemas
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.steps import write_steps
from pipeline.dataset.tokens import TextTokenizer
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.model.folder import WEIGHTS, inspect_folder
from pipeline.plan import EmbedPlan, HoldoutPlan, RowFile, RunPlan, Shard, TrainPlan
from pipeline.run_inputs import Parent, PlannedWorld
from tests.pipeline.ingesting import tokenizer_plan
from tests.tiny import WORDS, Head, head_form, make_model

SETTINGS = {
    "seed": 5,
    "device": {"kind": "cpu", "precision": "fp32", "threads_per_rank": 1},
    "embed": {"length": 32, "tokens_per_batch": 512},
    "train": {
        "batch_size": 8,
        "query_length": 8,
        "length": 32,
        "learning_rate": 2e-3,
        "log_every": 4,
        "validate_every": 8,
        "checkpoint_every": 6,
        "validation_queries": 20,
    },
}


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Queries are two words of their documents."""
    rng = np.random.default_rng(seed)
    documents = [list(rng.choice(WORDS, size=rng.integers(3, 24))) for _ in range(count)]
    return [(" ".join(rng.permutation(words)[:2]), " ".join(words)) for words in documents]


def write_rows(folder: Path, model: Path, query_length: int, longest: int, *, rows: int, held: int, negatives: int = 0) -> None:
    """The Arrow files of a run's rows, which have so many negatives at most, by turns."""
    folder.mkdir(parents=True)
    tokenizer = TextTokenizer(model)
    train, holdout = pairs(rows, 1), pairs(held, 2)
    documents = tokenizer.encode([document for _, document in train], longest)
    files: dict[str, dict[str, Any]] = {
        "train.arrow": {
            "query_tokens": tokenizer.encode([query for query, _ in train], query_length),
            "document_tokens": documents,
            "query_hash": [normalized_hash(query) for query, _ in train],
            "document_hash": [normalized_hash(document) for _, document in train],
            "key": [normalized_hash(document) for _, document in train],
            "version": [normalized_hash(query) | 1 for query, _ in train],
            "new": [True] * rows,
            "task": [None] * rows,
            "locale": [None] * rows,
            "shard": [0] * rows,
            "line": list(range(1, rows + 1)),
            "class": [-1] * rows,
        },
        "holdout.arrow": {
            "id": [f"held-{index}" for index in range(held)],
            "query_tokens": tokenizer.encode([query for query, _ in holdout], query_length),
            "query_hash": [normalized_hash(query) for query, _ in holdout],
            "document_hash": [normalized_hash(document) for _, document in holdout],
            "label": [1.0] * held,
            "locale": [None] * held,
            "task": [None] * held,
            "key": [normalized_hash(document) for _, document in holdout],
            "new": [True] * held,
        },
        "candidates.arrow": {
            "document_tokens": tokenizer.encode([document for _, document in holdout], longest),
            "document_hash": [normalized_hash(document) for _, document in holdout],
            "id": [f"held-{index}" for index in range(held)],
        },
        "known.arrow": {name: [] for name in SCHEMAS["known.arrow"].names},
    }
    for number in range(negatives):
        texts = [document if row % (negatives + 1) > number else "" for row, (_, document) in enumerate(pairs(rows, 3 + number))]
        tokens = tokenizer.encode(texts, longest)
        files["train.arrow"] |= {
            f"negative_{number}_tokens": [each if text else [] for each, text in zip(tokens, texts, strict=True)],
            f"negative_{number}_hash": [normalized_hash(text) if text else 0 for text in texts],
        }
    for name, columns in files.items():
        table = pa.table(columns, schema=row_schemas(pa.uint16(), negatives)[name])
        with pa.ipc.new_file(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)


def plan_training(
    paths: RunPaths,
    local: Path,
    *,
    ranks: int = 1,
    nodes: int = 1,
    steps: int | None = None,
    rows: int = 150,
    head: Head | None = None,
    kind: str = "cpu",
    parent: Path | None = None,
    sections: Mapping[str, Any] | None = None,
    **train: Any,
) -> RunPlan:
    """Write rows, parent and plan into a run folder.

    Args:
        parent: a model folder; None: a tiny random one is made.
        sections: settings beside those of `train`.
    """
    model = {"model": {"head": head_form(head)}}
    config = build_config(SETTINGS, {"device": {"kind": kind}, "train": train}, model, sections or {})
    settings = config.train
    if parent is None:
        make_model(local / "parent", head=head)
    else:
        shutil.copytree(parent, local / "parent")
    lengths = settings.query_length, settings.length
    write_rows(local / "rows", local / "parent", *lengths, rows=rows, held=40, negatives=settings.negatives)
    enough = build_config(config.model_dump(mode="json"), {"train": {"steps": steps}} if steps else {})
    counts = write_steps(local / "rows", rows, enough, ranks)
    files = {
        name: RowFile(sha256=artifact.sha256, size=artifact.size, rows={"train.arrow": rows}.get(name, 40))
        for name, artifact in store.upload_folder(local / "rows", paths.rows).items()
    }
    uri = store.join(paths.bucket_root, "parent")
    store.upload_folder(local / "parent", uri)
    world = PlannedWorld(kind=kind, precision=config.device.precision, nodes=nodes, ranks_per_node=ranks // nodes)
    plan = RunPlan(
        run=paths.run_id,
        created=now(),
        config=config,
        parent=Parent(uri=uri, folder=uri, sha256=store.sha256_file(local / "parent" / WEIGHTS)),
        world=world,
        train=TrainPlan(
            new=(Shard(uri=store.join(paths.bucket_root, "rows.jsonl"), sha256="0" * 64, size=1, rows=rows, new_rows=rows),),
            replay=(),
            rows=rows,
            new_rows=rows,
            replay_rows=0,
            steps=counts.steps,
            warmup_steps=2,
        ),
        holdout=HoldoutPlan(rows=40, queries=40, candidates=40),
        embed=EmbedPlan(
            source="documents",
            shards=(),
            tokenizer=tokenizer_plan(TextTokenizer(local / "parent")),
            rows=0,
            ids="",
            parts=(),
            children=1,
        ),
        graphs=plan_graphs(config, world, inspect_folder(local / "parent", config.model)[0], paths.bucket_root),
        row_files=files,
    ).sealed()
    store.write_bytes(paths.plan, plan.to_json())
    return plan
