"""Lists of rows that must not be used any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.dataset.deletions import Deletions, read_deletions
from pipeline.dataset.ids import id_hash
from pipeline.errors import BadData


def test_lists_of_every_kind_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\nx\ny\n")
    (tmp_path / "b.jsonl").write_text('{"id": 7}\n{"hash": "00000000000000ff"}\n{"id": "x"}\n')
    found = read_deletions([str(tmp_path)])
    assert found == Deletions(("7", "x", "y"), (255,))
    rows = found.affected(pa.chunked_array([["x", "z", "z", "7"]]), pa.chunked_array([pa.array([1, 255, 2, 3], pa.uint64())]))
    assert rows.tolist() == [True, True, False, True]
    assert found.id_hashes().tolist() == [id_hash(one) for one in ("7", "x", "y")]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x"}\n{"id": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "y"}\n{"id": "x"}\n')
    one, other = (read_deletions([str(tmp_path / name)]).digest for name in ("a.jsonl", "b.jsonl"))
    assert one == other != Deletions(("x",)).digest
    assert (read_deletions([]).digest, Deletions(("x",)).digest == "") == ("", False)
    assert not np.any(Deletions().affected(pa.chunked_array([["x"]]), pa.chunked_array([pa.array([1], pa.uint64())])))


@pytest.mark.parametrize("row", ['{"name": "x"}', '{"id": ""}', '{"hash": "xyz"}', "no JSON"])
def test_a_row_that_names_nothing_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"id": "x"}}\n{row}\n')
    with pytest.raises(BadData, match="names nothing") as caught:
        read_deletions([str(tmp_path / "a.jsonl")])
    assert str(caught.value.value) == f"{tmp_path}/a.jsonl:2"
