"""What a workload requires of hosts: allowances against what is allocated, and refusals."""

from __future__ import annotations

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

from pipeline.config import ModelConfig, RunConfig, build_config
from pipeline.contract import Stage
from pipeline.dataset.row_files import SCHEMAS, RowWriter
from pipeline.dataset.steps import write_steps
from pipeline.errors import BadConfig
from pipeline.estimate import requirements as limits
from pipeline.estimate.requirements import Requirement, attempt_minutes, over, refuse, requirements
from pipeline.estimate.workload import Workload
from pipeline.evaluation.holdout import join_holdout
from pipeline.evaluation.retrieval_metrics import DEPTH, Relevant, measure_rankings
from pipeline.model.encoder import new_encoder
from pipeline.model.shape import shape_of
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


def test_row_files_are_as_large_as_allowed_for_and_a_rank_holds_none_of_their_rows(tmp_path: Path) -> None:
    rows, rng = 65_536, np.random.default_rng(0)
    columns: dict[str, Any] = {
        "query_tokens": [[1] * 4] * rows,
        "document_tokens": [[1] * 6] * rows,
        **{name: rng.integers(0, 1 << 63, rows).astype(np.uint64) for name in ("query_hash", "document_hash", "key", "version")},
        "new": [True] * rows,
        "task": [None] * rows,
        "locale": [None] * rows,
        "shard": [0] * rows,
        "line": range(rows),
        "class": [-1] * rows,
    }
    with RowWriter(tmp_path, 1 << 20, ["train.arrow"]) as writer:
        writer.add("train.arrow", pa.table(columns))
    config = build_config({"train": {"batch_size": 32, "query_length": 8, "length": 8, "batch_tokens": 512}})
    write_steps(tmp_path, rows, config, 1)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size / rows == pytest.approx(limits.ROW_FILE_BYTES + 4 * (4 + 6), rel=0.1)

    def first_batch() -> Any:
        batches = TrainingBatches(tmp_path, World(), config.train, learning_rate=lambda _: 1e-3)
        return batches, next(batches.iterate(0, 4))

    before = pa.total_allocated_bytes()
    kept, _, held = traced(first_batch)
    assert kept
    # Arrow's own memory is not traced.
    assert held + pa.total_allocated_bytes() - before < rows


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
        "task": [None] * rows,
        "key": documents,
        "new": [True] * rows,
    }
    tokens = [2000 + token for token in range(8)]
    candidates = {"document_tokens": [tokens] * rows, "document_hash": documents, "id": ["i"] * rows}
    made = {
        "holdout.arrow": holdout,
        "candidates.arrow": candidates,
        "known.arrow": {name: [] for name in SCHEMAS["known.arrow"].names},
    }
    tables = [pa.table(columns, SCHEMAS[name]) for name, columns in made.items()]
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
WORK = Workload(
    train_rows=MILLION,
    known_rows=MILLION,
    corpus_rows=MILLION,
    queries=20_000,
    candidates=20_000,
    query_tokens=12,
    document_tokens=96,
)


KNOWN: dict[str, Any] = {"parts": 128, "ranks": 2, "embed_host": "inf2.xlarge", "minutes": attempt_minutes({})}


def required(work: Workload, config: RunConfig | None = None, **changes: Any) -> list[Requirement]:
    return list(requirements(work, SHAPE, config or build_config(), **{**KNOWN, **changes}))


@pytest.mark.parametrize(
    ("changes", "more", "first", "breaks"),
    [
        ({}, {}, None, False),
        ({"train_rows": 195 * MILLION, "document_tokens": 256}, {}, "plan, disk", True),
        ({"queries": 2 * MILLION, "candidates": 2 * MILLION}, {}, "evaluate, memory", True),
        ({"queries": 500_000, "candidates": 500_000}, {}, "evaluate, ranking", False),
        ({"corpus_rows": 100 * MILLION}, {"parts": 2}, "publish, disk", True),
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


def test_shorter_embeddings_need_less_disk_and_every_size_is_ranked() -> None:
    sizes = {"train": {"dimensions": [SHAPE.hidden // 2]}, "embed": {"dimensions": SHAPE.hidden // 4}}
    (_, _, memory, ranking, disk), (_, _, more, longer, less) = (
        [one.amount or 0.0 for one in required(WORK, build_config(each))] for each in ({}, sizes)
    )
    assert memory < more
    assert longer == pytest.approx(2 * ranking)  # two models, and two more sizes of the new one
    assert less < 0.3 * disk


def test_unknown_hosts_are_not_judged() -> None:
    huge = replace(WORK, train_rows=190 * MILLION, queries=9 * MILLION, candidates=9 * MILLION, document_tokens=20)
    assert over(required(huge))
    assert not [one for one in required(huge, embed_host=None) if one.breaks and one.over]


def test_the_hold_out_that_is_proposed_is_enough_and_fits() -> None:
    [memory, *_] = over(required(replace(WORK, known_rows=100 * MILLION, queries=2 * MILLION, candidates=2 * MILLION)))
    assert "data.holdout_fraction=0.00097" in memory.remedy
    assert not over(required(replace(WORK, known_rows=100 * MILLION)))
