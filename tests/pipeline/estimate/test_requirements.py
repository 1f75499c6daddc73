"""What a workload requires of hosts: allowances against what is allocated, and refusals."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import BertConfig

from pipeline.config import ModelConfig, build_config
from pipeline.contract import Stage
from pipeline.dataset.row_files import SCHEMAS
from pipeline.dataset.shards import InputFile, distinct_documents, scan_corpus, scan_training
from pipeline.dataset.split import select
from pipeline.errors import BadConfig
from pipeline.estimate import requirements as limits
from pipeline.estimate.requirements import Requirement, attempt_minutes, over, refuse, requirements
from pipeline.estimate.workload import Workload
from pipeline.evaluation.holdout import join_holdout
from pipeline.evaluation.retrieval import DEPTH, Relevant, measure_rankings
from pipeline.model.encoder import new_encoder
from pipeline.model.shape import shape_of
from pipeline.plan import PlannedWorld
from pipeline.run.world import World
from pipeline.stages import publish
from pipeline.training.batches import TrainingBatches

MILLION = 1_000_000


def traced(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """A result, the bytes that Python and NumPy keep for it, and those at the worst moment."""
    tracemalloc.start()
    try:
        found = make()
        return (found, *map(float, tracemalloc.get_traced_memory()))
    finally:
        tracemalloc.stop()


def test_prepare_holds_less_of_a_row_than_its_allowance(tmp_path: Path) -> None:
    path, count = tmp_path / "rows.jsonl", 20_000
    with path.open("w") as stream:
        for row in range(count):
            stream.write(
                json.dumps({"id": f"row-{row % 10_000}", "query": f"q {row}", "document": f"d {row}", "text": "t"}) + "\n"
            )
    shard = InputFile(uri=str(path), sha256="0" * 64, size=path.stat().st_size)

    def ignore(_: object) -> None: ...

    scans, kept, _ = traced(lambda: scan_training([shard], {}, ignore, ignore))

    def chosen() -> Any:
        found = select([], scans, holdout_fraction=0.02, replay_fraction=0.1, distractors=1000, seed=0)
        # Of the shard that is being tokenized, masks and hashes are lists.
        masks = (found.holdout[0], found.train[0], found.distractors[0], scans[0].documents)
        return found, [values.tolist() for values in masks]

    _, _, worst = traced(chosen)
    assert 0.5 * limits.PREPARE_ROW_BYTES < (kept + worst) / count < limits.PREPARE_ROW_BYTES
    corpus, kept, _ = traced(lambda: scan_corpus([shard], {}, ignore, ignore))
    _, _, worst = traced(lambda: distinct_documents(corpus))
    assert 0.5 * limits.CORPUS_ROW_BYTES < (kept + worst) / count < limits.CORPUS_ROW_BYTES


def test_a_rank_holds_less_of_a_training_row_than_its_allowance(tmp_path: Path) -> None:
    path, rows = tmp_path / "train.arrow", 65_536
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "id": [f"{'i' * (limits.ID_BYTES - 8)}{row:08d}" for row in range(rows)],
        "query_tokens": [[1] * 4] * rows,
        "document_tokens": [[1] * 6] * rows,
        **{name: rng.integers(0, 1 << 63, rows).astype(np.uint64) for name in ("query_hash", "document_hash")},
        "shard": [0] * rows,
        "line": range(rows),
    }
    with pa.ipc.new_file(str(path), SCHEMAS["train.arrow"]) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMAS["train.arrow"]), max_chunksize=4096)
    assert path.stat().st_size / rows == pytest.approx(limits.ROW_FILE_BYTES + 4 * (4 + 6), rel=0.1)

    def first_batch() -> Any:
        arguments: Any = {"batch_size": 32, "query_length": 8, "buckets": (8,), "seed": 0, "learning_rate": lambda _: 1e-3}
        batches = TrainingBatches(path, World(), **arguments)
        return batches, next(batches.iterate(0, 4))

    before = pa.total_allocated_bytes()
    kept, _, held = traced(first_batch)
    # Arrow's own memory is not traced: two hashes, copied into one piece.
    arrow = pa.total_allocated_bytes() - before
    assert kept
    assert 0.5 * limits.TRAIN_ROW_BYTES < (held + arrow) / rows < limits.TRAIN_ROW_BYTES


def test_evaluate_holds_less_of_a_query_and_its_document_than_their_allowance() -> None:
    rows = 20_000
    documents = np.arange(rows).astype(np.uint64) + (1 << 40)
    holdout: dict[str, Any] = {
        "id": ["i"] * rows,
        "query_tokens": [[1000 + token for token in range(4)]] * rows,
        "query_hash": documents * 3,
        "document_hash": documents,
        "label": [1.0] * rows,
        "locale": [None] * rows,
    }
    candidates = {
        "document_tokens": [[2000 + token for token in range(8)]] * rows,
        "document_hash": documents,
        "id": [f"document {row}" for row in range(rows)],
    }
    tables = (pa.table(holdout, SCHEMAS["holdout.arrow"]), pa.table(candidates, SCHEMAS["candidates.arrow"]))
    _, _, held = traced(lambda: join_holdout(*tables))
    allowed = limits.CANDIDATE_BYTES + limits.QUERY_BYTES
    assert 0.5 * allowed < held / rows < allowed
    relevant = Relevant.of([{row: 1.0} for row in range(rows)])
    ranked = np.arange(rows)[:, None] + np.arange(DEPTH)
    _, _, held = traced(lambda: measure_rankings(ranked, relevant))
    assert 0.5 * limits.RANKING_BYTES < held / rows + ranked.nbytes / rows < limits.RANKING_BYTES


def test_publish_has_as_many_readers_as_are_counted() -> None:
    assert limits.PARTS_AT_ONCE == publish.READERS


with torch.device("meta"):
    SHAPE = shape_of(
        new_encoder(
            BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536), ModelConfig()
        )
    )
WORLD = PlannedWorld(kind="neuron", precision="bf16", nodes=4, ranks_per_node=32)
WORK = Workload(
    train_rows=MILLION,
    scanned_rows=MILLION,
    corpus_rows=MILLION,
    own_corpus=False,
    queries=20_000,
    candidates=20_000,
    shard_rows=100_000,
    query_tokens=12,
    document_tokens=96,
)


def required(work: Workload, **changes: Any) -> list[Requirement]:
    known: dict[str, Any] = {
        "parts": 128,
        "ranks": 128,
        "node_memory": 479 << 30,
        "embed_host": "inf2.xlarge",
        "minutes": attempt_minutes({}),
    }
    return list(requirements(work, SHAPE, build_config({"embed": {"ranks_per_child": 2}}), WORLD, **{**known, **changes}))


@pytest.mark.parametrize(
    ("changes", "more", "first", "breaks"),
    [
        ({}, {}, None, False),
        ({"scanned_rows": 800 * MILLION}, {}, "prepare, memory", True),
        ({"corpus_rows": 3000 * MILLION, "own_corpus": True}, {"parts": 30_000}, "prepare, memory", True),
        ({"train_rows": 195 * MILLION, "document_tokens": 256}, {}, "prepare, disk", True),
        ({"train_rows": 300 * MILLION}, {}, "train, memory of a node", True),
        ({"queries": 2 * MILLION, "candidates": 2 * MILLION}, {}, "evaluate, memory", True),
        ({"queries": 500_000, "candidates": 500_000}, {}, "evaluate, ranking", False),
        ({"corpus_rows": 100 * MILLION}, {"parts": 2}, "publish, disk", True),
        ({"shard_rows": MILLION}, {}, "embed, how often", False),
        # A deployment's own `timeouts`.
        ({"queries": 40_000}, {"minutes": attempt_minutes({Stage.EVALUATE: 1})}, "evaluate, ranking", False),
    ],
)
def test_what_is_too_much_is_named_with_a_remedy(
    changes: dict[str, Any], more: dict[str, Any], first: str | None, breaks: bool
) -> None:
    found = required(replace(WORK, **changes), **more)
    wrong = over(found)
    assert [one.what.startswith(str(first)) for one in wrong[:1]] == [True] * (first is not None)
    assert all(one.remedy for one in found)
    if not breaks:
        refuse(found)
        return
    with pytest.raises(BadConfig, match="more data than a stage can hold") as refused:
        refuse(found)
    assert str(refused.value.value).count(str(first)) == 1
    assert wrong[0].remedy in refused.value.remedy


def test_unknown_hosts_are_not_judged() -> None:
    huge = replace(WORK, train_rows=190 * MILLION, queries=9 * MILLION, candidates=9 * MILLION, document_tokens=20)
    assert over(required(huge, node_memory=1 << 30))
    assert not [one for one in required(huge, node_memory=None, embed_host=None) if one.breaks and one.over]


def test_the_hold_out_that_is_proposed_is_enough_and_fits() -> None:
    [memory, *_] = over(required(replace(WORK, scanned_rows=100 * MILLION, queries=2 * MILLION, candidates=2 * MILLION)))
    assert "data.holdout_fraction=0.0002" in memory.remedy
    assert not over(required(replace(WORK, scanned_rows=100 * MILLION)))
