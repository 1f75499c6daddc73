"""Values of queries as a file: they come back exactly, and nothing else is taken for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import BadData
from pipeline.evaluation.query_values import QueryValues

VALUES = QueryValues(
    ((2**64 - 1, None), (7, "de"), (7, "en")),
    {"ndcg@10": np.array([1 / 3, 0.0, 1.0]), "recall@1": np.array([0.0, 0.0, 1.0])},
)


def test_come_back_exactly(tmp_path: Path) -> None:
    VALUES.write(tmp_path / "new" / "values.parquet")
    found = QueryValues.read(tmp_path / "new" / "values.parquet")
    assert found.queries == VALUES.queries
    assert {metric: values.tolist() for metric, values in found.values.items()} == {
        "ndcg@10": [1 / 3, 0.0, 1.0],
        "recall@1": [0.0, 0.0, 1.0],
    }
    assert found.means() == {"ndcg@10": (1 / 3 + 1.0) / 3, "recall@1": 1 / 3}


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"query_hash": pa.array([1], pa.int64()), "locale": pa.array(["x"]), "ndcg@10": [0.5]}, "does not hold"),
        ({"query_hash": pa.array([1], pa.uint64()), "ndcg@10": [0.5]}, "does not hold"),
        ({"query_hash": pa.array([1], pa.uint64()), "locale": pa.array(["x"])}, "does not hold"),
        ({"query_hash": pa.array([1], pa.uint64()), "locale": pa.array(["x"]), "ndcg@10": ["0.5"]}, "does not hold"),
        ({"query_hash": pa.array([1, 1], pa.uint64()), "locale": pa.array(["x", "x"]), "ndcg@10": [0.5, 0.5]}, "not whole"),
        ({"query_hash": pa.array([1], pa.uint64()), "locale": pa.array(["x"]), "ndcg@10": [float("nan")]}, "not whole"),
        (
            {"query_hash": pa.array([1], pa.uint64()), "locale": pa.array(["x"]), "ndcg@10": pa.array([None], pa.float64())},
            "not whole",
        ),
        (
            {"query_hash": pa.array([], pa.uint64()), "locale": pa.array([], pa.string()), "ndcg@10": pa.array([], pa.float64())},
            "not whole",
        ),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, columns: dict[str, object], match: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "values.parquet")
    with pytest.raises(BadData, match=match):
        QueryValues.read(tmp_path / "values.parquet")


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    VALUES.write(tmp_path / "values.parquet")
    whole = (tmp_path / "values.parquet").read_bytes()
    for broken in (b"", b"{}", whole[: len(whole) // 2]):
        (tmp_path / "values.parquet").write_bytes(broken)
        with pytest.raises(BadData, match="cannot be read"):
            QueryValues.read(tmp_path / "values.parquet")
