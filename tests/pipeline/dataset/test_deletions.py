"""Lists of what must not be used any more."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.dataset.deletions import Deletions, read_deletions
from pipeline.errors import BadData, MissingInput


def test_lists_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfx\r\n\r\n  y z\n")
    (tmp_path / "b").write_text("hash:00000000000000ff\nx\n7")
    found = read_deletions([str(tmp_path), str(tmp_path / "b")])
    assert found == Deletions(("7", "x", "y z"), (255,))
    assert len(found) == 4
    assert Deletions.from_json(found.to_json()) == found


def test_rows_are_named_by_id_and_by_the_hash_of_each_text() -> None:
    deletions = Deletions(("a",), (5, 2**64 - 1))
    rows = pa.table(
        {
            "id": ["a", "b", "c", "d"],
            "document_hash": pa.array([1, 2**64 - 1, 3, 4], pa.uint64()),
            "query_hash": pa.array([9, 9, 5, 6], pa.uint64()),
        }
    )
    assert deletions.named(rows).tolist() == [True, True, True, False]
    assert deletions.named(rows.select(["id", "document_hash"])).tolist() == [True, True, False, False]
    assert not Deletions().named(rows).any()


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_text("y\nx\nx\n")
    one, other = (read_deletions([str(tmp_path / name)]).digest for name in "ab")
    assert one == other
    assert one not in ("", Deletions(("x",)).digest)
    assert Deletions().digest == read_deletions([]).digest == ""


@pytest.mark.parametrize("entry", [b"hash:", b"hash:00FF", b"hash:00000000000000FF", b"\xff"])
def test_an_entry_that_cannot_be_read_is_refused(tmp_path: Path, entry: bytes) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"x\n" + entry)
    with pytest.raises(BadData, match="cannot be read") as caught:
        read_deletions([str(path)])
    assert f"{path}:2" in str(caught.value)


def test_a_list_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no deletion list"):
        read_deletions([str(tmp_path / "none")])
