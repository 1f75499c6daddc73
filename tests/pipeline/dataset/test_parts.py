"""Parts: what is written comes back, as a stream and in both number formats; what is not a part is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dataset.parts import PartRecord, PartWriter, read_part
from pipeline.errors import BadData

RECORD = PartRecord(
    sha256="ab",
    size=10,
    rows=2,
    ids="2:00",
    dimension=4,
    dtype="float32",
    model="cd",
    fingerprint="ef",
    tokens=7,
    padded_tokens=16,
    started="2026-01-05T00:00:00+00:00",
    finished="2026-01-05T00:00:02+00:00",
    seconds=2.0,
    documents_per_second=1.0,
)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_come_back_in_order(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "part.parquet"
    vectors = np.random.default_rng(0).normal(size=(7, 4)).astype(dtype)
    ids = [f"ä-{row}" for row in range(7)]
    with PartWriter(path, 4, dtype) as writer:
        writer.write(ids[:5], vectors[:5], ["de", None, "de", "fr", None])
        writer.write(ids[5:], vectors[5:])
    assert pq.read_metadata(path).num_rows == 7
    assert pq.ParquetFile(path).metadata.num_row_groups == 2
    batches = list(read_part(path))
    assert [identifier for found, *_ in batches for identifier in found] == ids
    assert [locale for *_, locales in batches for locale in locales] == ["de", None, "de", "fr", None, None, None]
    found = np.concatenate([embeddings for _, embeddings, _ in batches])
    assert found.dtype == dtype
    assert np.array_equal(found, vectors)


def test_schema_is_a_fixed_size_list(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    with PartWriter(path, 3, "float16") as writer:
        writer.write(["a"], np.ones((1, 3), np.float32))
    schema = pq.read_schema(path)
    assert schema.field("embedding").type.list_size == 3
    assert schema.field("embedding").type.value_type == pa.float16()
    assert not schema.field("id").nullable


def test_documents_are_known_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    with PartWriter(path, 3, "float32") as writer:
        writer.write(["a"], np.ones((1, 3), np.float32), documents=np.array([2**64 - 1], np.uint64))
        writer.write(["b"], np.ones((1, 3), np.float32))
    assert pq.read_table(path).column_names == ["id", "embedding", "locale", "document_hash", "token_hash"]
    assert pq.read_table(path)["document_hash"].to_pylist() == [2**64 - 1, None]


@pytest.mark.parametrize(("columns", "locale"), [(["id", "embedding"], None), (["id", "embedding", "locale"], "de")])
def test_a_part_of_an_earlier_release_has_fewer_columns(tmp_path: Path, columns: list[str], locale: str | None) -> None:
    path = tmp_path / "part.parquet"
    with PartWriter(path, 3, "float32") as writer:
        writer.write(["a"], np.ones((1, 3), np.float32), ["de"])
    pq.write_table(pq.read_table(path).select(columns), path)
    [(ids, _, locales)] = read_part(path)
    assert (ids, locales) == (["a"], [locale])


def test_shape_must_fit(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "part.parquet", 3, "float32") as writer, pytest.raises(ValueError, match="do not fit"):
        writer.write(["a", "b"], np.ones((1, 3), np.float32))


def test_torn_file_is_bad_data(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    with PartWriter(path, 4, "float32") as writer:
        writer.write([str(row) for row in range(100)], np.ones((100, 4), np.float32))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadData, match="cannot be read"):
        list(read_part(path))


def test_other_parquet_is_bad_data(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": ["a"], "embedding": [[1.0]]}), path)
    with pytest.raises(BadData, match="not a part"):
        list(read_part(path))
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(BadData):
        list(read_part(path))


def test_record_comes_back() -> None:
    assert PartRecord.from_json(RECORD.to_json()) == RECORD


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"rows": 3}'])
def test_broken_record_is_bad_data(data: bytes) -> None:
    with pytest.raises(BadData):
        PartRecord.from_json(data)
