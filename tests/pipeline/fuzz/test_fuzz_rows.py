"""Shards from anybody: every line is a row, a refused row, or the file is bad data; in bounded memory and time."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.dataset.columns import check_columns
from pipeline.dataset.records import MAX_ROW_BYTES, BadRow
from pipeline.errors import BadConfig, BadData
from tests.pipeline.fuzz.mutations import files, texts, values
from tests.pipeline.read_rows import CorpusRow, TrainingRow, read_corpus_rows, read_training_rows

ROW = {"id": "a", "query": "what is it", "document": "it is this", "locale": "en", "task": None, "label": 1.0}
PACKED = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.ZstdCompressor().compress}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def read(path: Path) -> list[TrainingRow | CorpusRow | BadRow]:
    """All rows, which are what the stages rely on: texts that can be written down, numbers that can be computed with."""
    rows = [*read_training_rows(str(path), {}), *read_corpus_rows(str(path), {"text": "document"})]
    for row in rows:
        for text in row:
            if isinstance(text, str):
                text.encode()
        if isinstance(row, BadRow):
            assert row.reason
            assert len(row.row) <= 200
        else:
            assert row.id.strip()
            assert row.line >= 1
        if isinstance(row, TrainingRow):
            assert row.query == row.query.strip() != ""
            assert abs(row.label) < float("inf")
    return rows


@given(st.lists(files(ROW), max_size=4), st.sampled_from(sorted(PACKED)))
@example([b'{"id": "a", "query": "b", "document": "c", "label": 1' + b"0" * 400 + b"}"], ".jsonl")
@example([b'{"id": 1' + b"0" * 5000 + b', "query": "b", "document": "c"}'], ".jsonl")
@example([b'{"id": "a", "query": "b", "document": "\\ud800"}'], ".jsonl")
@example([b'{"id": "a", "query": "b", "document": "c", "label": NaN}'], ".jsonl")
@example([b'{"id": "a", "id": "b", "query": "b", "document": "c"}'], ".jsonl")
@example([b"\xef\xbb\xbf{}", b"\xef\xbb\xbf{}"], ".jsonl")
def test_any_line_is_a_row_or_a_refused_one(folder: Path, lines: list[bytes], suffix: str) -> None:
    path = folder / f"shard{suffix}"
    path.write_bytes(PACKED[suffix](b"\n".join(lines)))
    rows = read(path)
    assert len(rows) <= 2 * sum(line.count(b"\n") + 1 for line in lines)


@given(st.sampled_from([".jsonl.gz", ".jsonl.zst"]), st.data())
def test_packed_files_broken_anywhere_are_bad_data(folder: Path, suffix: str, data: st.DataObject) -> None:
    lines = b"".join(json.dumps({**ROW, "id": str(number)}).encode() + b"\n" for number in range(50))
    packed = PACKED[suffix](lines)
    at = data.draw(st.integers(1, len(packed) - 1))
    changed = (
        packed[:at] if data.draw(st.booleans()) else packed[:at] + data.draw(st.binary(min_size=1, max_size=3)) + packed[at:]
    )
    path = folder / f"broken{suffix}"
    path.write_bytes(changed)
    try:
        rows = read(path)
    except BadData as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        # Neither format guards every byte (names, padding): what is read then is what was written, or refused line by line.
        assert len(rows) >= 100 or any(isinstance(row, BadRow) for row in rows)


COLUMNS: dict[str, pa.DataType] = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "binary_view": pa.binary_view(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("ns", tz="UTC"),
    "duration": pa.duration("ns"),
    "list": pa.list_(pa.string()),
    "large_list of string_view": pa.large_list(pa.string_view()),
    "struct": pa.struct([("a", pa.int64())]),
    "map": pa.map_(pa.string(), pa.int64()),
    "decimal": pa.decimal128(38, 10),
    "null": pa.null(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "time": pa.time64("ns"),
}
SAMPLES: dict[str, Any] = {
    "string": "x",
    "large_string": "x",
    "string_view": "x",
    "binary": b"\xff\xfe",
    "binary_view": b"\xff\xfe",
    "int": 2**62,
    "float": float("nan"),
    "bool": True,
    "date": 10**6,
    "timestamp": 2**62 + 1,
    "duration": 2**62 + 1,
    "list": ["x"],
    "large_list of string_view": ["x"],
    "struct": {"a": 1},
    "map": [("a", 1)],
    "decimal": 1,
    "null": None,
    "dictionary": "x",
    "time": 1,
}


@given(st.fixed_dictionaries({name: st.sampled_from(sorted(COLUMNS)) for name in ("id", "query", "document", "label")}))
def test_parquet_of_any_types(folder: Path, kinds: dict[str, str]) -> None:
    path = folder / "types.parquet"
    columns = {name: pa.array([SAMPLES[kind], None], COLUMNS[kind]) for name, kind in kinds.items()}
    pq.write_table(pa.table(columns), path)
    try:
        read(path)
    except BadData as error:
        assert str(path) in str(error)  # noqa: PT017


@given(st.data())
def test_damaged_parquet_is_bad_data(folder: Path, data: st.DataObject) -> None:
    path = folder / "damaged.parquet"
    pq.write_table(pa.table({name: [str(value)] * 5 for name, value in ROW.items()}), path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "splice"]))
    changed = {
        "cut": whole[:at],
        "flip": whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :],
        "splice": whole[:at] + b"\x00\xff" + whole[at:],
    }[kind]
    path.write_bytes(changed)
    try:
        read(path)
    except BadData as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("suffix", sorted(PACKED))
def test_a_line_without_an_end_does_not_fill_the_memory(folder: Path, suffix: str) -> None:
    path = folder / f"endless{suffix}"
    path.write_bytes(PACKED[suffix](b"[" * (8 * MAX_ROW_BYTES)))
    tracemalloc.start()
    try:
        rows = list(read_training_rows(str(path), {}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [row.reason for row in rows if isinstance(row, BadRow)] == ["is longer than 16 MiB"]
    assert peak < 4 * MAX_ROW_BYTES


def _pathological() -> Iterator[bytes]:
    yield b"[" * (MAX_ROW_BYTES - 1)
    yield b'{"a":' * (MAX_ROW_BYTES // 5 - 1)
    yield b'{"id": ' + b"9" * (1 << 20) + b"}"
    yield b'{"id": "' + b"\\ud800" * (1 << 20) + b'"}'
    yield b" " * (MAX_ROW_BYTES - 1)


@pytest.mark.parametrize("depth", [10, 300, 900, 980, 990, 1000, 1100, 2000, 10_000, 90_000])
def test_nesting_of_any_depth(folder: Path, depth: int) -> None:
    path = folder / "deep.jsonl"
    path.write_bytes(b'{"id": "a", "query": ' + b"[" * depth + b"]" * depth + b"}\n" + json.dumps(ROW).encode())
    refused, good = read_training_rows(str(path), {})
    assert isinstance(refused, BadRow)
    assert isinstance(good, TrainingRow)


@pytest.mark.parametrize("line", _pathological(), ids=range(5))
def test_long_lines_take_no_longer_than_their_length(folder: Path, line: bytes) -> None:
    path = folder / "long.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(ROW).encode())
    started = time.process_time()
    rows = list(read_training_rows(str(path), {}))
    assert time.process_time() - started < 20
    assert isinstance(rows[-1], TrainingRow)
    assert all(isinstance(row, BadRow) for row in rows[:-1])


@given(texts | values.map(str))
def test_names_of_columns(folder: Path, name: str) -> None:
    path = folder / "named.jsonl"
    path.write_text(json.dumps(ROW))
    columns = {"query": name}
    try:
        check_columns(columns)
    except BadConfig:  # a template that cannot be read
        return
    for row in read_training_rows(str(path), columns):
        assert isinstance(row, (TrainingRow, BadRow))
