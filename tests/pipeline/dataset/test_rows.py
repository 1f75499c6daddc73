"""Reading rows: every format gives the same rows, every bad row is named with its place, damaged files are refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline import store
from pipeline.dataset import records as records_module
from pipeline.dataset.columns import check_columns
from pipeline.dataset.ingested import DOCUMENTS, TOMBSTONE
from pipeline.dataset.records import BadRow, file_columns
from pipeline.dataset.rows import normalized_hash, read_blocks
from pipeline.errors import BadConfig, BadData, MissingInput
from tests.pipeline.read_rows import CorpusRow, TrainingRow, read_corpus_rows, read_training_rows

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "query": " first query ", "document": "Erstes Dokument – größer", "locale": "de", "label": 2, "other": [1]},
    {"id": "7", "query": "second", "document": "second document", "task": "search", "label": 0.5},
    {"id": "c", "query": "third", "document": "third document", "locale": None, "label": None},
]
ROWS = [
    TrainingRow("a", "first query", "Erstes Dokument – größer", "de", None, 2.0, 1),
    TrainingRow("7", "second", "second document", None, "search", 0.5, 2),
    TrainingRow("c", "third", "third document", None, None, 1.0, 3),
]


def jsonl(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def write_shard(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        columns = ["id", "query", "document", "locale", "task", "label"]
        pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in records]), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(jsonl(records)))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(jsonl(records)))
    else:
        path.write_bytes(jsonl(records))
    return path


def write_csv(path: Path, records: list[dict[str, Any]]) -> Path:
    text = io.StringIO(newline="")
    names = ["id", "query", "document", "locale", "task", "label"]
    delimiter = "\t" if ".tsv" in path.name else ","
    writer = csv.DictWriter(text, names, delimiter=delimiter, extrasaction="ignore", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(records)
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(text.getvalue().encode()))
    return path


def only_row(data: bytes, folder: Path) -> TrainingRow | BadRow:
    path = folder / "one.jsonl"
    path.write_bytes(data)
    (row,) = read_training_rows(str(path), {})
    return row


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "s.jsonl.zst", "s.parquet"])
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    assert list(read_training_rows(str(write_shard(tmp_path / name, RECORDS)), {})) == ROWS


@pytest.mark.parametrize("text", [pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()], ids=str)
def test_parquet_has_several_types_of_text(text: pa.DataType, tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.parquet", RECORDS)
    table = pq.read_table(path)
    kinds = [field.with_type(text) if field.type == pa.string() else field for field in table.schema]
    pq.write_table(table.cast(pa.schema(kinds)), path)
    assert pq.read_schema(path) == pa.schema(kinds)
    assert list(read_training_rows(str(path), {})) == ROWS


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("listed", [pa.list_, pa.large_list])
def test_parquet_has_several_types_of_negatives(listed: Any, text: pa.DataType, tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    given = [["one", "two"], None, ["three"]]
    texts = pa.array(["a", "b", "c"], text)
    pq.write_table(pa.table({"query": texts, "document": texts, "negatives": pa.array(given, listed(text))}), path)
    assert [row.negatives for row in read_training_rows(str(path), {})] == [("one", "two"), (), ("three",)]


@pytest.mark.parametrize("name", ["s.csv", "s.tsv", "s.csv.gz", "s.tsv.zst"])
def test_csv_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    assert list(read_training_rows(str(write_csv(tmp_path / name, RECORDS)), {})) == ROWS


def test_csv_has_quoted_breaks_empty_cells_and_bad_rows_in_their_places(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_bytes(
        b'\xef\xbb\xbfid,query,document,label\na,q,"one,\ntwo ""three""",\nonly,two\n\n'
        b"b,q,d,x\nc,,d,1\nd,q,\xff,1\ne,q,d,0.5\nf,q,d,1,more\n"
    )
    good, *bad, last, longer = read_training_rows(str(path), {})
    assert good == TrainingRow("a", "q", 'one,\ntwo "three"', None, None, 1.0, 1)
    assert [(row.at, row.reason) for row in [*bad, longer] if isinstance(row, BadRow)] == [
        (f"{path}:2", "has 2 values, not 4"),
        (f"{path}:3", "'label' is not a number"),
        (f"{path}:4", "lacks the field 'query'"),
        (f"{path}:5", "is not UTF-8"),
        (f"{path}:7", "has 5 values, not 4"),
    ]
    assert last == TrainingRow("e", "q", "d", None, None, 0.5, 6)


@pytest.mark.parametrize("data", [b"", b"id,query\na,q\n", gzip.compress(b"id,query,document\n", mtime=0)[:-4]])
def test_csv_that_cannot_be_read_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / ("s.csv.gz" if data[:2] == b"\x1f\x8b" else "s.csv")
    path.write_bytes(data)
    with pytest.raises(BadData):
        list(read_training_rows(str(path), {}))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": "a", "anchor": "q", "positive": "d", "negative": "n"}, ("a", "q", "d", None)),
        ({"id": "a", "Question": "q", "Answer": "d", "Language": "de"}, ("a", "q", "d", "de")),
        ({"id": "a", "query": "q", "passage": "d", "locale": "fr", "language": "de"}, ("a", "q", "d", "fr")),
        ({"id": "a", "query": "q", "document": "d", "text": "t"}, ("a", "q", "d", None)),
    ],
)
@pytest.mark.parametrize("name", ["s.jsonl", "s.parquet", "s.csv"])
def test_columns_are_recognised(name: str, record: dict[str, str], expected: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "s.parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    elif name == "s.csv":
        path.write_text(f"{','.join(record)}\n{','.join(record.values())}\n")
    else:
        path.write_bytes(jsonl([record]))
    assert file_columns(str(path)) == list(record)
    assert list(read_training_rows(str(path), {})) == [TrainingRow(*expected, None, 1.0, 1)]


def test_a_column_with_two_readings_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(jsonl([{"id": "a", "query": "q", "passage": "p", "text": "t"}]))
    with pytest.raises(BadData) as error:
        list(read_training_rows(str(path), {}))
    assert f"{path}: passage, text" in str(error.value)
    assert "--set data.columns.document=passage" in str(error.value)
    assert [row.document for row in read_training_rows(str(path), {"document": "text"}) if not isinstance(row, BadRow)] == ["t"]
    # A column that is another one's by configuration is no candidate.
    path.write_bytes(jsonl([{"id": "a", "passage": "p", "text": "t"}]))
    assert list(read_training_rows(str(path), {"query": "text"})) == [TrainingRow("a", "t", "p", None, None, 1.0, 1)]


def test_a_refusal_names_the_columns_and_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(jsonl([{"id": "a", "query": "q", "doc": "d", "locale": "de"}]))
    (row,) = read_training_rows(str(path), {})
    assert isinstance(row, BadRow)
    assert row.reason == (
        "lacks the field 'document'; the file's columns are id, query, doc, locale: add --set data.columns.document=doc"
    )


def test_templates_join_columns(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    records = [
        {"query": "q", "title": "Shoe", "brand": "B{}", "size": 42},
        {"query": "q", "title": "Hat"},
        {"query": "q", "title": " "},
    ]
    path.write_bytes(jsonl([{"id": "x", **record} for record in [*records, {"query": "q", "title": ["Hat"]}]]))
    columns = {"document": "{title}. {brand} {size}"}
    first, second, empty, nested = read_training_rows(str(path), columns)
    assert (first.document, second.document) == ("Shoe. B{} 42", "Hat.")  # type: ignore[union-attr]
    assert isinstance(empty, BadRow)
    assert isinstance(nested, BadRow)
    assert nested.reason == "a column of the template is neither text nor a number"
    table = pa.Table.from_pylist([{"query": "q", "title": "Shoe", "brand": None, "size": 42}])
    pq.write_table(table, tmp_path / "s.parquet")
    (row,) = read_training_rows(str(tmp_path / "s.parquet"), columns)
    assert row.document == "Shoe.  42"  # type: ignore[union-attr]
    for template in ("{title", "{title!r}", "{title:>9}", "{}", "{{title}}"):
        with pytest.raises(BadConfig, match="template"):
            check_columns({"document": template})


def test_without_ids_a_document_is_known_by_its_normalized_text(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(
        jsonl([{"query": "1", "document": "The  Text"}, {"query": "2", "document": "the text"}, {"query": "3", "document": "x"}])
    )
    rows = [row for row in read_training_rows(str(path), {}) if isinstance(row, TrainingRow)]
    assert [row.id for row in rows] == [f"{normalized_hash(text):016x}" for text in ("the text", "the text", "x")]
    (bad, *_) = read_training_rows(str(path), {"id": "key"})
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("lacks the field 'key'")


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "s.jsonl.zst", "s.parquet"])
def test_object_storage_gives_the_same_rows(name: str, tmp_path: Path, s3_root: str) -> None:
    uri = store.join(s3_root, "data", name)
    store.upload(write_shard(tmp_path / name, RECORDS), uri)
    assert list(read_training_rows(uri, {})) == ROWS


def test_columns_are_mapped_and_integer_ids_are_text(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(jsonl([{"key": 12, "title": "q", "body": "d"}]))
    columns = {"id": "key", "query": "title", "document": "body"}
    assert list(read_training_rows(str(path), columns)) == [TrainingRow("12", "q", "d", None, None, 1.0, 1)]
    path.write_bytes(jsonl([{"key": 12, "text": "t", "locale": "fr"}]))
    assert list(read_corpus_rows(str(path), {"id": "key"})) == [CorpusRow("12", "t", "fr", 1)]


def test_unknown_columns_are_refused() -> None:
    check_columns({"text": "body", "id": "key"})
    with pytest.raises(BadConfig, match=r"data\.columns\.querry"):
        check_columns({"querry": "title"})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'["a"]', "is not a JSON object"),
        (b'{"id": "a", "query": "q"}', "lacks the field 'document'"),
        (b'{"id": "a", "query": null, "document": "d"}', "lacks the field 'query'"),
        (b'{"id": null, "query": "q", "document": "d"}', "lacks the field 'id'"),
        (b'{"id": "a", "query": " \\u00a0", "document": "d"}', "'query' is empty"),
        (b'{"id": "a", "query": ["q"], "document": "d"}', "'query' is not text"),
        (b'{"id": "", "query": "q", "document": "d"}', "'id' is empty"),
        (b'{"id": "a\\u0000b", "query": "q", "document": "d"}', "'id' has a control character"),
        (b'{"id": "a\\nb", "query": "q", "document": "d"}', "'id' has a control character"),
        (b'{"id": 1' + b"0" * 1100 + b', "query": "q", "document": "d"}', "'id' is longer than 1024 characters"),
        (b'{"id": "a", "query": "\\u0000", "document": "d"}', "'query' is empty"),
        (b'{"id": "a", "query": "q", "document": " \\u0000 \\u0001"}', "'document' is empty"),
        (b'{"id": true, "query": "q", "document": "d"}', "'id' is neither text nor an integer"),
        (b'{"id": 1.5, "query": "q", "document": "d"}', "'id' is neither text nor an integer"),
        (b'{"id": "a", "query": "q", "document": "d", "label": "1"}', "'label' is not a number"),
        (b'{"id": "a", "query": "q", "document": "d", "label": NaN}', "'label' is not a number"),
        (b'{"id": "a", "query": "q", "document": "d", "label": true}', "'label' is not a number"),
        (b'{"id": "a", "query": "q", "document": "d", "locale": 3}', "'locale' is not text"),
        (b'{"id": "a", "query": "q\xff", "document": "d"}', "is not UTF-8"),
        (b'{"id": "a", "query": "q\\ud800", "document": "d"}', "is not UTF-8"),
        ('{"id": "a", "query": "q", "document": "d"}'.encode("utf-16"), "is not UTF-8"),
    ],
)
def test_a_bad_row_is_named(line: bytes, reason: str, tmp_path: Path) -> None:
    good = b'{"id": "g", "query": "q", "document": "d"}'
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join([good, line.replace(b"\n", b""), good]))
    first, bad, last = read_training_rows(str(path), {})
    assert isinstance(bad, BadRow)
    assert bad.at == f"{path}:2"
    assert bad.reason.startswith(reason)
    json.dumps(bad._asdict(), ensure_ascii=False).encode()  # can be quarantined
    assert [row.line for row in (first, last) if isinstance(row, TrainingRow)] == [1, 3]


def test_what_is_not_wrong_with_a_line(tmp_path: Path) -> None:
    assert isinstance(only_row(b'\xef\xbb\xbf{"id": "a", "query": "q", "document": "d"}\r\n', tmp_path), TrainingRow)
    assert isinstance(only_row(b'\n  \n{"id": "a", "query": "\\ud83d\\ude00", "document": "d"}', tmp_path), TrainingRow)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"[" + b"1," * (3 << 20) + b"1]\n" + jsonl(RECORDS[:1]))
    bad, good = read_training_rows(str(path), {})
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("is longer than")
    assert good == ROWS[0]._replace(line=2)


def test_parquet_rows_that_are_too_long_are_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "s.parquet"
    documents = ["d", "x" * (1 << 20), "e"]
    pq.write_table(pa.table({"id": ["1", "2", "3"], "query": ["q"] * 3, "document": documents}), path)
    first, bad, last = read_training_rows(str(path), {})
    assert isinstance(bad, BadRow)
    assert (bad.at, bad.reason) == (f"{path}:2", "is longer than 1 MiB")
    assert [row.id for row in (first, last) if isinstance(row, TrainingRow)] == ["1", "3"]


def test_lists_in_parquet_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"document": ["d"], "query": pa.array([["q"]]), "id": ["1"]}), path)
    (bad,) = read_training_rows(str(path), {})
    assert isinstance(bad, BadRow)
    assert (bad.at, bad.reason) == (f"{path}:1", "'query' is not text")


def test_a_zstd_frame_that_asks_for_a_gigabyte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=0)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(packer.compress(jsonl(RECORDS)) + packer.flush())
    with pytest.raises(BadData, match="cut off or damaged"):
        list(read_training_rows(str(path), {}))


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=12), st.integers(1, 7), st.booleans())
def test_lines_are_the_same_whatever_the_size_of_the_pieces(lines: list[bytes], size: int, ends: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "pieces", lambda uri, stream: iter(pieces))
        found = [line for block in records_module._line_blocks(__file__, "") for line in records_module._split(block)]
    expected = data.split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


@pytest.mark.parametrize("name", ["s.jsonl.gz", "s.jsonl.zst", "s.parquet"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_a_cut_off_file_is_refused(name: str, keep: float, tmp_path: Path) -> None:
    records = [{"id": str(number), "query": f"query {number**5}", "document": f"document {number**7}"} for number in range(2000)]
    path = write_shard(tmp_path / name, records)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(BadData, match="cut off or damaged") as caught:
        list(read_training_rows(str(path), {}))
    assert str(path) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["s.csv", "s.tsv", "s.csv.gz", "s.tsv.zst"])
@pytest.mark.parametrize("column", ["query", "document"])
@pytest.mark.parametrize("final", ["", "\n"])
def test_a_quote_that_is_not_closed_is_refused(name: str, column: str, final: str, tmp_path: Path) -> None:
    """Up to the end of the file, all would be one value."""
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    comma, path = "\t" if ".tsv" in name else ",", tmp_path / name
    lines = [{"query": f"query {number}", "document": f"document {number}"} for number in range(500)]

    def write() -> None:
        path.write_bytes(
            pack(("\n".join(["query" + comma + "document", *map(comma.join, map(dict.values, lines))]) + final).encode())
        )

    write()
    assert [row.document for row in read_training_rows(str(path), {})] == [row["document"] for row in lines]  # type: ignore[union-attr]
    lines[2][column] = f'"{lines[2][column]}'
    write()
    with pytest.raises(BadData, match="a quote is not closed"):
        list(read_training_rows(str(path), {}))


def test_decimals_in_parquet_are_numbers(tmp_path: Path) -> None:
    """As Spark writes prices."""
    path = tmp_path / "s.parquet"
    prices = pa.array([Decimal("1.50"), Decimal("0.00")], pa.decimal128(12, 2))
    pq.write_table(pa.table({"query": ["a b", "c d"], "name": ["shoe", "boot"], "price": prices, "label": prices}), path)
    found = list(read_training_rows(str(path), {"document": "{name}. {price}"}))
    assert [(row.document, row.label) for row in found if not isinstance(row, BadRow)] == [
        ("shoe. 1.50", 1.5),
        ("boot. 0.00", 0.0),
    ]


@pytest.mark.parametrize("name", ["s.jsonl.gz", "s.jsonl.zst", "s.parquet"])
def test_a_file_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(jsonl(RECORDS) * 10)
    with pytest.raises(BadData, match="cut off or damaged"):
        list(read_training_rows(str(path), {}))


def test_a_damaged_parquet_page_is_refused(tmp_path: Path) -> None:
    records = [{"id": str(number), "query": f"query {number**5}", "document": f"document {number**7}"} for number in range(5000)]
    path = write_shard(tmp_path / "s.parquet", records)
    data = bytearray(path.read_bytes())
    data[2000:6000] = b"\xa5" * 4000
    path.write_bytes(data)
    with pytest.raises(BadData, match="cut off or damaged"):
        list(read_training_rows(str(path), {}))


@pytest.mark.parametrize(("name", "compress"), [("s.jsonl.gz", gzip.compress), ("s.jsonl.zst", zstandard.compress)])
def test_files_of_several_members_are_read_to_the_end(name: str, compress: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"".join(compress(jsonl([record])) for record in RECORDS))
    assert list(read_training_rows(str(path), {})) == ROWS
    if name.endswith(".gz"):
        path.write_bytes(path.read_bytes() + b"\0" * 100)  # as tapes and some tools pad
        assert list(read_training_rows(str(path), {})) == ROWS


def test_bad_rows_in_parquet_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    queries = pa.array([b"q", None, b"q\xff", b" "], pa.binary())
    pq.write_table(pa.table({"id": pa.array([1, 2, 3, 4]), "query": queries, "document": ["d"] * 4}), path)
    good, *bad = read_training_rows(str(path), {})
    assert good == TrainingRow("1", "q", "d", None, None, 1.0, 1)
    assert [(row.at, row.reason) for row in bad if isinstance(row, BadRow)] == [
        (f"{path}:2", "lacks the field 'query'"),
        (f"{path}:3", "is not UTF-8"),
        (f"{path}:4", "'query' is empty"),
    ]


def test_text_columns_of_parquet_that_hold_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    text = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0"), pa.py_buffer(b"a\xffb"))
    pq.write_table(pa.table({"id": ["1", "2", "3"], "query": text, "document": ["d"] * 3}), path)
    first, bad, last = read_training_rows(str(path), {})
    assert isinstance(first, TrainingRow)
    assert isinstance(bad, BadRow)
    assert bad.reason == "is not UTF-8"
    assert isinstance(last, TrainingRow)


def test_a_parquet_file_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"id": ["1"], "title": ["q"], "document": ["d"]}), path)
    with pytest.raises(BadData, match="lacks a column"):
        list(read_training_rows(str(path), {}))
    assert len(list(read_training_rows(str(path), {"query": "title"}))) == 1


def test_other_names_and_absent_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"s\.txt"):
        list(read_training_rows(str(tmp_path / "s.txt"), {}))
    with pytest.raises(MissingInput):
        list(read_training_rows(str(tmp_path / "s.jsonl"), {}))


def test_normalized_hash() -> None:
    # Fixed: which side of the hold-out a document is on must never change.
    assert normalized_hash("hello world") == 0xB94D27B9934D3E08
    assert normalized_hash("  Hello\t\nWORLD ") == normalized_hash("hello world")
    assert normalized_hash("Ｓtraße") == normalized_hash("strasse")  # full width S, sharp s
    assert normalized_hash("hello worlds") != normalized_hash("hello world")


def test_a_row_may_say_that_a_document_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"id": "a", "text": "one"}\n{"id": "b", "deleted": true}\n{"id": "c", "text": "three", "deleted": false}\n'
        '{"id": "d", "deleted": "yes"}\n{"deleted": true}\n{"id": "e", "deleted": null}\n'
        '{"id": "f", "text": 1, "deleted": "TRUE"}\n'
    )
    [block] = read_blocks(str(path), DOCUMENTS, {})
    found = [(row["id"], row["document"], row["deleted"], row["document_hash"] == TOMBSTONE) for row in block.rows.to_pylist()]
    assert found == [("a", "one", False, False), ("b", "", True, True), ("c", "three", False, False), ("f", "", True, True)]
    assert [(bad.at.rpartition(":")[2], bad.reason) for bad in block.bad] == [
        ("4", "'deleted' is neither true nor false"),
        ("5", "lacks the field 'id'"),
        ("6", "lacks the field 'text'"),
    ]
    only = tmp_path / "b.csv"
    only.write_text("id,deleted\nx,true\n")
    [block, _] = read_blocks(str(only), DOCUMENTS, {})
    assert block.rows["deleted"].to_pylist() == [True]
    # Without ids nothing can be named.
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"deleted": true}\n')
    [block] = read_blocks(str(tmp_path / "c.jsonl"), DOCUMENTS, {})
    assert [bad.reason for bad in block.bad] == ["lacks the field 'id'"]
