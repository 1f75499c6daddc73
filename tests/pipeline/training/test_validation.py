"""The evaluation inside training: which queries it takes, and its numbers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline.config import EmbedConfig
from pipeline.data.arrow import SCHEMAS
from pipeline.errors import BadData
from pipeline.model.retrieval import retrieve
from pipeline.runtime.device import open_device
from pipeline.runtime.world import World
from pipeline.training.validation import read_validation_set, validate
from tests.tiny import make_model


def write(folder: Path, holdout: list[tuple[int, int, float, str | None]], candidates: list[int]) -> Path:
    """Rows (query, document, label, locale), hashes for texts; the tokens of a text are its hash, twice for a document."""
    folder.mkdir(exist_ok=True)
    tables = {
        "holdout.arrow": {
            "id": [str(index) for index in range(len(holdout))],
            "query_tokens": [[query] for query, *_ in holdout],
            "query_hash": [query for query, *_ in holdout],
            "document_hash": [document for _, document, *_ in holdout],
            "label": [label for _, _, label, _ in holdout],
            "locale": [locale for *_, locale in holdout],
        },
        "candidates.arrow": {"document_tokens": [[value, value] for value in candidates], "document_hash": candidates},
    }
    for name, columns in tables.items():
        with pa.ipc.new_file(str(folder / name), SCHEMAS[name]) as writer:
            writer.write_table(pa.table(columns, schema=SCHEMAS[name]))
    return folder


def test_queries_in_the_order_of_their_hashes_with_their_own_documents(tmp_path: Path) -> None:
    rows = [
        (30, 103, 1.0, None),
        (10, 101, 2.0, None),
        (10, 102, 1.0, None),
        (10, 101, 3.0, None),  # the same pair again: the larger gain
        (20, 101, 1.0, "en"),
        (20, 104, 1.0, "de"),
        (5, 105, 0.0, None),  # not relevant to anything
    ]
    data = read_validation_set(write(tmp_path / "rows", rows, [105, 104, 103, 102, 101]), 3)
    assert data.queries == [[10], [20], [20]]
    assert data.candidates == [[104, 104], [102, 102], [101, 101]]
    assert data.relevant == [{2: 3.0, 1: 1.0}, {0: 1.0}, {2: 1.0}]
    assert len(read_validation_set(tmp_path / "rows", 100).queries) == 4


def test_holdouts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="not among the candidates"):
        read_validation_set(write(tmp_path / "rows", [(1, 101, 1.0, None)], [102]), 10)
    with pytest.raises(BadData, match="no query"):
        read_validation_set(write(tmp_path / "rows", [(1, 101, 0.0, None)], [101]), 10)


def test_equals_evaluation_by_hand(tmp_path: Path) -> None:
    rows = [(query, 50 + query % 7, 1.0, None) for query in range(10, 40)]
    data = read_validation_set(write(tmp_path / "rows", rows, list(range(50, 57))), 30)
    encoder = make_model(tmp_path / "model")
    device = open_device("cpu", "fp32", World(), threads=1)
    found = validate(encoder, device, data, EmbedConfig(buckets=(4, 8), tokens_per_batch=24), lambda done: None)
    with torch.no_grad():
        queries, candidates = (
            encoder(torch.tensor(texts), torch.ones_like(torch.tensor(texts))) for texts in (data.queries, data.candidates)
        )
    expected = {name: float(values.mean()) for name, values in retrieve(queries, candidates, data.relevant).items()}
    assert found == pytest.approx(expected)
    assert 0 < expected["mrr@10"] < 1
