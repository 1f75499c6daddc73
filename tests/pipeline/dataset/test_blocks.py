"""Blocks of rows: whatever a shard holds, the same rows and refusals as the exact readers give, and hashes as of single texts."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.dataset import records as records_module
from pipeline.dataset import rows as rows_module
from pipeline.dataset.ingested import DOCUMENTS, PAIRS
from pipeline.dataset.records import BadRow
from pipeline.dataset.rows import SCHEMAS, SPACE, Block, normalized_hash, normalized_hashes, read_blocks
from pipeline.errors import TrnpipeError
from tests.benchmarks.row_by_row import read_corpus_rows, read_training_rows
from tests.pipeline.fuzz.mutations import documents, files, texts, values
from tests.pipeline.fuzz.test_fuzz_rows import COLUMNS, SAMPLES

PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
ROW = {
    "id": "a",
    "query": "what is it",
    "document": "it is this",
    "locale": "en",
    "task": None,
    "label": 1.0,
    "negatives": ["not this"],
    "group": "g",
}
GIVEN: list[Mapping[str, str]] = [
    {},
    {"query": "locale"},
    {"document": "{query}: {label} {id}"},
    {"id": "query", "negatives": "document"},
    {"id": "label", "label": "id"},
    {"group": "{id}", "label": "{label}"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


def rows_of(found: Sequence[Block], kind: str) -> list[tuple[Any, ...]]:
    """The good rows of blocks, as the exact readers have them."""
    rows: list[tuple[Any, ...]] = []
    for block in found:
        assert block.rows.schema == SCHEMAS[kind]
        block.rows.validate(full=True)
        for row in block.rows.to_pylist():
            assert row["document_hash"] == normalized_hash(row["document"])
            if kind == DOCUMENTS:
                rows.append((row["id"], row["document"], row["locale"], row["line"]))
                continue
            assert row["query_hash"] == normalized_hash(row["query"])
            label = row["label"], row["line"], tuple(row["negatives"]), row["group"]
            rows.append((row["id"], row["query"], row["document"], row["locale"], row["task"], *label))
    return rows


def check_same(path: Path, given: Mapping[str, str] = {}) -> list[Block]:
    """Compare blocks with the exact readers, for both kinds of rows; return the blocks of pairs."""
    pairs: list[Block] = []
    for kind, read in ((DOCUMENTS, read_corpus_rows), (PAIRS, read_training_rows)):
        pairs = []
        columns = {"text": "document", **given} if kind == DOCUMENTS else given
        try:
            exact: list[Any] = list(read(str(path), columns))  # type: ignore[operator]
        except TrnpipeError as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                list(read_blocks(str(path), kind, columns))
            continue
        pairs = list(read_blocks(str(path), kind, columns))
        assert [bad for block in pairs for bad in block.bad] == [row for row in exact if isinstance(row, BadRow)]
        good = [row if kind == DOCUMENTS else single(row) for row in exact if not isinstance(row, BadRow)]
        assert rows_of(pairs, kind) == good
    return pairs


def single(row: Any) -> tuple[Any, ...]:
    """A row with its label in single precision."""
    largest = float(np.finfo(np.float32).max)
    return tuple(row._replace(label=float(np.float32(np.clip(row.label, -largest, largest)))))


LINES = [
    b'{"id": 1.0, "query": "q", "document": "d"}',
    b'{"id": 99999999999999999999999, "query": "q", "document": "d"}',
    b'{"id": -0, "query": "q", "document": "d"}',
    b'{"id": 1' + b"0" * 5000 + b', "query": "b", "document": "c"}',
    b'{"id": "a", "query": "b", "document": "c", "x": 1' + b"0" * 5000 + b"}",
    b'{"id": "a", "query": "b", "document": "c", "x": "\\ud800"}',
    b'{"id": "a", "query": "b", "document": "c", "x": "\\uDFFF"}',
    b'{"id": "a", "query": "b", "document": "c", "x": "\xff"}',
    b'{"id": "a", "query": "b", "document": "c", "\xff": 1}',
    b'{"id": "a", "query": "b", "document": "c", "label": 1' + b"0" * 400 + b"}",
    b'{"id": "a", "query": "b", "document": "c", "label": 1e999}',
    b'{"id": "a", "query": "b", "document": "c", "label": 1e300}',
    b'{"id": "a", "query": "b", "document": "c", "label": NaN}',
    b'{"id": "a", "query": "b", "document": "c", "label": true}',
    b'{"id": "a", "query": "b", "document": "c", "label": 9007199254740993}',
    b'{"id": "a", "id": "b", "query": "b", "document": "c"}',
    b'{"\\u0069d": "a", "query": "b", "document": "c"}',
    b'{"id": "a", "query": "b", "document": "c"} {"id": "a", "query": "b", "document": "c"}',
    b'{"id": "a", "query": "b", "document": "c"}{"id": "a", "query": "b", "document": "c"}\n',
    b'{"id": "a", "query":\n"b", "document": "c"}',
    b'{"id": "a",\n"query": "b"}',
    b' {"id": "a", "query": "b", "document": "c"}\r',
    b"",
    b"   ",
    b"\xef\xbb\xbf" + json.dumps(ROW).encode(),
    b'{"id": "a\x7f", "query": "b", "document": "c"}',
    b'{"id": "\\u00a0", "query": "b", "document": "c"}',
    '{"id": "\u3000ы", "query": "\u2003 b\u0085\x1f", "document": "\\u0001\\u0002 "}'.encode(),
    '{"id": "ä", "query": "\\u001cb\\u001f", "document": "\\u0000c"}'.encode(),
    b'{"id": "' + b"i" * 1024 + b'", "query": "q", "document": "d"}',
    b'{"id": "' + "ä".encode() * 1024 + b'", "query": "q", "document": "d"}',
    b'{"id": "' + b"i" * 1025 + b'", "query": "q", "document": "d"}',
    b'{"id": "a", "query": "b", "document": "c", "negatives": "n"}',
    b'{"id": "a", "query": "b", "document": "c", "negatives": []}',
    b'{"id": "a", "query": "b", "document": "c", "negatives": [" n ", "m"]}',
    b'{"id": "a", "query": "b", "document": "c", "negatives": ["n", null]}',
    b'{"id": "a", "query": "b", "document": "c", "negatives": ["n", " "]}',
    b'{"id": "a", "query": "b", "document": "c", "negatives": 3}',
    b'{"id": "a", "query": "b", "document": "c", "group": 3}',
    b'{"id": "a", "query": "b", "document": "c", "group": " "}',
    b'{"id": "a", "query": "b", "document": "c", "group": 3.5}',
    b'{"id": "a", "query": "b", "document": "c", "group": true}',
]


@given(
    st.lists(st.sampled_from(LINES) | files(ROW) | documents(ROW).map(json.dumps).map(str.encode), max_size=6),
    st.sampled_from(sorted(PACKED)),
    st.sampled_from(GIVEN),
    st.integers(0, 3),
    st.booleans(),
)
@example(LINES, "", {}, 0, True)
@example([json.dumps(ROW).encode()] * 3, ".gz", {}, 3, True)
def test_any_lines(folder: Path, lines: list[bytes], suffix: str, given: Mapping[str, str], after: int, only_ours: bool) -> None:
    path = folder / f"shard.jsonl{suffix}"
    good = [json.dumps({**ROW, "id": number, **({} if only_ours else {"more": [1]})}).encode() for number in range(after)]
    path.write_bytes(PACKED[suffix](b"\n".join([*good, *lines, *good, b""])))
    check_same(path, given)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_each_line_alone(folder: Path, line: bytes) -> None:
    path = folder / "one.jsonl"
    path.write_bytes(line)
    check_same(path)


def test_lines_of_every_size_are_divided_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.dataset.unpack.READ_BYTES", 100)
    monkeypatch.setattr(records_module, "MAX_ROW_BYTES", 2000)
    monkeypatch.setattr(records_module, "BLOCK_BYTES", 1000)
    path = tmp_path / "s.jsonl"
    sizes = [10, 90, 400, 1000, 1900, 2500, 20, 2001, 30, 5000]
    path.write_bytes(b"\n".join(json.dumps({**ROW, "document": "x" * size}).encode() for size in sizes))
    found = check_same(path)
    assert [len(block.bad) for block in found if block.bad] == [1, 1, 1, 1]
    assert len(found) > 4


def test_most_rows_are_not_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    exact = rows_module.values_at

    def counted(column: Any, places: Sequence[int]) -> list[Any]:
        looked.append(len(places))
        return exact(column, places)

    monkeypatch.setattr(rows_module, "values_at", counted)
    rows = [{**ROW, "id": number, "more": {"x": "ü"}, "group": None, "negatives": None} for number in range(2000)]
    rows[1000]["query"] = ""
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{**row, "id": str(row["id"]), "more": 1} for row in rows]), tmp_path / "s.parquet")
    for name in ("s.jsonl", "s.parquet"):
        [block] = read_blocks(str(tmp_path / name), PAIRS, {})
        assert (len(block.rows), len(block.bad)) == (1999, 1)
    assert looked == [1, 1]


@given(
    st.fixed_dictionaries({name: st.sampled_from(sorted(COLUMNS)) for name in ROW}),
    st.sampled_from(GIVEN),
    st.booleans(),
)
def test_parquet_of_any_types(folder: Path, kinds: dict[str, str], given: Mapping[str, str], text: bool) -> None:
    path = folder / "types.parquet"
    if text:
        kinds = {**kinds, "query": "string", "document": "dictionary"}
    columns = {name: pa.array([SAMPLES[kind], None, SAMPLES[kind]], COLUMNS[kind]) for name, kind in kinds.items()}
    pq.write_table(pa.table(columns), path)
    check_same(path, given)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "id": st.binary(max_size=4) | st.none(),
                "query": texts.map(lambda text: text.encode(errors="surrogatepass")),
                "document": st.text(max_size=9).map(str.encode) | st.just(b"\xed\xa0\x80"),
                "locale": st.none() | st.just(b"de"),
                "negatives": st.none() | st.lists(st.sampled_from([b"n", b" n", b"\xff", b" ", None]), max_size=3),
            }
        ),
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
)
def test_parquet_of_any_bytes(folder: Path, rows: list[dict[str, Any]], binary: bool, dictionary: bool) -> None:
    """Columns of text may hold bytes that are none: their writer decides what it checks."""
    path = folder / "bytes.parquet"
    columns: dict[str, pa.Array] = {}
    for name in ("id", "query", "document", "locale", "negatives"):
        kind = pa.list_(pa.binary()) if name == "negatives" else pa.binary()
        column = pa.array([row[name] for row in rows], kind)
        columns[name] = column if binary else column.view(pa.list_(pa.string()) if name == "negatives" else pa.string())
    pq.write_table(pa.table(columns), path, use_dictionary=dictionary)
    check_same(path)


def test_lists_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    wanted = [["n", " m "], None, [], ["x"] * 70_000, [""], ["last"]]
    table = pa.table(
        {"id": ["a", "b", "c", "d", "e", "f"], "query": ["q"] * 6, "document": ["d"] * 6, "negatives": wanted},
    )
    pq.write_table(table, path)
    [block] = check_same(path)
    assert block.rows["negatives"].to_pylist() == [["n", "m"], [], [], ["last"]]
    assert [row.reason for row in block.bad] == ["is longer than 16 MiB", "'negatives' is empty"]
    # With another name the same list is no text.
    [block] = check_same(path, {"negatives": "id", "group": "negatives"})
    assert {row.reason for row in block.bad} == {"'negatives' is neither text nor an integer"}


@given(
    st.lists(
        st.lists(st.text(max_size=5) | st.sampled_from(["1", "0.5", "1_0", " 2", "nan", "ä\u2003"]), max_size=7), max_size=8
    ),
    st.sampled_from([".csv", ".tsv", ".csv.gz"]),
    st.sampled_from([*GIVEN, {"negatives": "id"}]),
    st.text(max_size=6),
)
def test_csv(folder: Path, rows: list[list[str]], suffix: str, given: Mapping[str, str], more: str) -> None:
    path = folder / f"shard{suffix}"
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if ".tsv" in suffix else ",")
    writer.writerow(["id", "query", "document", "label", "locale"])
    writer.writerow(["a", "q", "d", "1", "de"])
    writer.writerows([row if len(row) > 2 else ["b", "q", "d", *row[:2]] for row in rows])
    data = (text.getvalue() + more).encode(errors="surrogatepass")
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    check_same(path, given)


def test_a_copy_is_read_and_the_original_named(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name, data in (("s.jsonl.gz", gzip.compress(b"{}")[:-4]), ("s.parquet", b"PAR1"), ("s.csv.zst", b"")):
        copy.write_bytes(data)
        with pytest.raises(TrnpipeError) as caught:
            list(read_blocks(f"s3://bucket/{name}", PAIRS, {}, str(copy)))
        assert f"s3://bucket/{name}" in str(caught.value)
        assert str(copy) not in str(caught.value)


def test_space_is_what_strip_strips() -> None:
    assert set(SPACE) == {chr(point) for point in range(sys.maxunicode + 1) if chr(point).isspace()}


HARD = [
    *("", " ", "a", "A  b", " a", "a ", "a\x1cb\x1d\x1e\x1f c", "a\x85b", "a\u00a0\u2003b", "ſtraße", "İ", "ﬁ ﬂ", "Ǆ", "e\u0301"),
    *(
        "a\x00b",
        "\x00",
        "x" * 100_000,
        "tab\t\tnew\n\n\n line",
        "ＡＢＣ",
        "１２",
        "a\u200bb",
        "𝒜",
        "\ufffd",
        "\x7f\x7f",
        "ẞ ß SS",
    ),
]


@given(st.lists(st.sampled_from(HARD) | st.text(max_size=30) | st.text("ab AB\t\n\x1c", max_size=30), max_size=20), st.data())
@example(HARD, None)
@example(["a\n", "\nb"], None)
def test_hashes_of_a_column_are_those_of_its_texts(column: list[str], data: Any) -> None:
    found = pa.array([text for text in column if text.encode(errors="replace").decode() == text], pa.string())
    if data:
        start = data.draw(st.integers(0, len(found)))
        found = found.slice(start, data.draw(st.integers(0, len(found) - start)))
    assert normalized_hashes(found).tolist() == [normalized_hash(text) for text in found.to_pylist()]


@given(st.lists(values, max_size=3))
def test_any_values(folder: Path, found: list[Any]) -> None:
    path = folder / "values.jsonl"
    path.write_text("".join(json.dumps({**ROW, name: value}) + "\n" for value in found for name in ROW))
    check_same(path)
