"""Read the records of shards in columns: JSON Lines, CSV and TSV (plain, gzip, zstd) and Parquet, some thousand rows at a time.

A shard is never held in memory as a whole, and longer rows than MAX_ROW_BYTES are refused.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import store
from pipeline.dataset.columns import Columns
from pipeline.dataset.unpack import READ_BYTES, Unpacked, arrow_errors, damaged, pieces
from pipeline.errors import BadConfig, BadData

PACKED = ("", ".gz", ".zst")
CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*(kind + packed for kind in (".jsonl", *CSV_DELIMITERS) for packed in PACKED), ".parquet")

VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
"""Types of columns that DataFusion and others write, and what they are read as: Arrow computes little with them (pyarrow 26)."""

MAX_ROW_BYTES = 16 << 20
"""Longer lines, and Parquet rows with longer texts, are refused unread: one row must not fill the memory."""

ITEM_BYTES = 256
"""What an item of a list in a Parquet row counts besides its text: in Python it takes more than that."""

FIRST_ROWS = 100
"""Rows of a JSON Lines file that tell its columns."""

ESTIMATE_BYTES = 256 << 20
"""Text whose lines are counted, about a second of work."""

EXCERPT_CHARACTERS = 200
BLOCK_BYTES = 1 << 20
"""Lines that are read together."""

PARQUET_BATCH_ROWS = 2048
PARQUET_BATCH_BYTES = 64 << 20
"""Text of a batch whose rows are as long as in the mean of their row group."""

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Record = dict[str, Any]
DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)
Column: TypeAlias = "pa.Array | list[Any]"


class BadRow(NamedTuple):
    """A refused row: its location (`file:line`), the reason, and its beginning."""

    at: str
    reason: str
    row: str


class Records(NamedTuple):
    """Consecutive records of a shard, in columns.

    Attributes:
        lines: their numbers, (rows,): lines of JSON Lines, rows of other files, from 1.
        columns: the wanted ones that the file has, (rows,) each: texts in Arrow are valid UTF-8, lists hold Python values. The
            type of a column that cannot be rows stands for each of its values.
        refused: other rows among them, with their numbers.
        record: returns a record by its place in the columns.
    """

    lines: NDArray[np.int64]
    columns: dict[str, Column]
    refused: list[tuple[int, BadRow]]
    record: Callable[[int], Record]


def is_shard(uri: str) -> bool:
    """Return whether the name has the suffix of a shard."""
    return uri.endswith(SUFFIXES)


def file_columns(uri: str, path: str = "") -> list[str]:
    """Return a shard's columns: of Parquet and CSV all, of JSON Lines those of the first rows.

    Args:
        path: where to read it, if it is not its URI: a local copy, which errors do not name.

    Raises:
        BadData: the file is damaged.
        BadConfig: its name has no known suffix.
    """
    if not is_shard(uri):
        raise BadConfig("this kind of file is not read", value=uri, rule=f"a shard's name ends in one of {', '.join(SUFFIXES)}")
    if uri.endswith(".parquet"):
        with store.open_read(path or uri) as stream, arrow_errors(uri):
            return list(pq.read_schema(stream).names)
    if delimiter(uri):
        return _csv_header(uri, path)
    lines = _split(next(_line_blocks(uri, path), b""))[:FIRST_ROWS]
    records = (_json_record(uri, number, line) for number, line in enumerate(lines, 1))
    return list(dict.fromkeys(key for record in records if isinstance(record, dict) for key in record))


def estimate_rows(uri: str, size: int) -> int:
    """Return how many rows a shard has; if it is long and no Parquet, an estimate from its first ESTIMATE_BYTES.

    Args:
        size: of the shard, in bytes.

    Raises:
        BadData: the file is damaged.
    """
    with store.open_read(uri) as stream, arrow_errors(uri):
        if uri.endswith(".parquet"):
            return int(pq.read_metadata(stream).num_rows)
        lines = read = 0
        for piece in pieces(uri, stream):
            lines += piece.count(b"\n")
            read += len(piece)
            if read >= ESTIMATE_BYTES:
                lines = round(lines * max(1.0, size / stream.tell()))
                break
        return lines - bool(lines and delimiter(uri))


def read_records(uri: str, columns: Columns, path: str = "") -> Iterator[Records]:
    """Yield all records of a shard, in the file's order.

    Args:
        path: see `file_columns`.

    Raises:
        BadData: the file is cut off, damaged, or a Parquet or CSV file without a column.
        MissingInput, Transient: it cannot be read.
    """
    if not (uri.endswith(".parquet") or delimiter(uri)):
        return _json_records(uri, path, columns)
    _refuse_missing(uri, columns)
    return _parquet_records(uri, path, columns) if uri.endswith(".parquet") else _csv_records(uri, path, columns)


def _refuse_missing(uri: str, columns: Columns) -> None:
    if columns.missing:
        raise BadData(
            "a file lacks a column",
            value=[
                f"{uri}: {columns.names[name]}{columns.hints[f'lacks the field {columns.names[name]!r}']}"
                for name in columns.missing
            ],
            rule="every file has the columns of its rows",
            remedy="name the file's column under data.columns, or remove the file from the folder",
        )


def values_at(column: Column, places: Sequence[int]) -> list[Any]:
    """Return the Python values of some rows."""
    return [column[place] for place in places] if isinstance(column, list) else _values(column.take(pa.array(places, pa.int64())))


def _json_records(uri: str, path: str, columns: Columns) -> Iterator[Records]:
    first = 1
    for block in _line_blocks(uri, path):
        records = _decoded_block(block)
        lines, refused, behind = np.arange(first, first + len(records)), list[tuple[int, BadRow]](), first + len(records)
        if not records:
            found = [(number, _json_record(uri, number, line)) for number, line in enumerate(_split(block), first)]
            lines = np.array([number for number, record in found if isinstance(record, dict)], np.int64)
            records = [record for _, record in found if isinstance(record, dict)]
            refused = [(number, record) for number, record in found if isinstance(record, BadRow)]
            behind = first + len(found)
        fields = {field: _values_of(records, field) for field in columns.wanted}
        yield Records(lines=lines, columns=fields, refused=refused, record=records.__getitem__)
        first = behind


def _values_of(records: Sequence[Record], field: str) -> list[Any]:
    try:
        return list(map(itemgetter(field), records))
    except KeyError:
        return [record.get(field) for record in records]


def _decoded_block(block: bytes) -> list[Record]:
    """Return the records of a block of lines; none if not every line is certain to hold one."""
    content = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(content == ord("\n"))
    starts = np.append(0, ends + 1)[: len(ends)]
    # Every line from brace to brace, and as many records as lines: no record on two lines, and no line with two records.
    whole = len(ends) and ends[-1] == len(block) - 1 and (ends - starts).max() <= MAX_ROW_BYTES
    if whole and (content[starts] == ord("{")).all() and (content[ends - 1] == ord("}")).all():
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            records = cast(list[Record], DECODER.decode_lines(block))
            return records if len(records) == len(ends) else []
    return []


def _json_record(uri: str, number: int, line: bytes) -> Record | BadRow | None:
    """Return the record of a line, or why it has none; None for a blank line."""
    if len(line) > MAX_ROW_BYTES:
        return bad_row(uri, number, f"is longer than {MAX_ROW_BYTES >> 20} MiB", "")
    if not line or line.isspace():
        return None
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return cast(Record, DECODER.decode(line))
    excerpt = line[: 4 * EXCERPT_CHARACTERS].decode(errors="replace")
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        if SURROGATE_ESCAPE.search(line):
            # Half of an escaped surrogate pair parses, but is no text that can be written down again.
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeError:
        return bad_row(uri, number, "is not UTF-8", excerpt)
    except (ValueError, RecursionError) as error:
        return bad_row(uri, number, f"is not JSON: {error}", excerpt)
    return record if isinstance(record, dict) else bad_row(uri, number, "is not a JSON object", excerpt)


def _split(block: bytes) -> list[bytes]:
    return block.removesuffix(b"\n").split(b"\n")


def _line_blocks(uri: str, path: str) -> Iterator[bytes]:
    """Yield the text of whole lines, about BLOCK_BYTES together; of a line that is too long only the beginning."""
    with store.open_read(path or uri) as stream:
        reader = io.BufferedReader(Unpacked(pieces(uri, stream)), READ_BYTES)
        while block := reader.read(BLOCK_BYTES):
            # To the end of the last line, but no further than any line may reach.
            block += reader.readline(MAX_ROW_BYTES + 1)
            yield block
            while not block.endswith(b"\n") and (block := reader.readline(READ_BYTES)):
                pass


def delimiter(uri: str) -> str | None:
    """Return the delimiter of a CSV or TSV file, None for other files."""
    return CSV_DELIMITERS.get(uri.removesuffix(".gz").removesuffix(".zst")[-4:])


def _csv_header(uri: str, path: str) -> list[str]:
    """Return the columns that the first row of a CSV file names."""
    with store.open_read(path or uri) as stream:
        data = io.BufferedReader(Unpacked(pieces(uri, stream))).read(READ_BYTES)
    try:
        # Not by Arrow, whose threads read on in a Python file, and may find the interpreter at its end.
        lines = io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline="")
        header = next(filter(None, csv.reader(lines, delimiter=cast(str, delimiter(uri)))), None)
        "".join(header or ()).encode()
    except (csv.Error, UnicodeEncodeError) as error:
        raise damaged(uri, f"the row of names: {error}") from error
    if header is None:
        raise damaged(uri, "the file is empty")
    return header


def _csv_records(uri: str, path: str, columns: Columns) -> Iterator[Records]:
    """Yield the rows in the file's order, numbered from 1 after the row of names: values as bytes, empty ones null."""
    present = file_columns(uri, path)
    wanted = [name for name in columns.wanted if name in present]
    # A row with a value too many, behind the last one: where it does not come, it is within quotes.
    end = (delimiter(uri) or ",") * len(present)
    # Rows with another number of values than there are columns.
    invalid: list[arrow_csv.InvalidRow] = []
    line = 0

    def skip(row: arrow_csv.InvalidRow) -> str:
        invalid.append(row)
        return "skip"

    with store.open_read(path or uri) as stream, arrow_errors(uri):
        reader = arrow_csv.open_csv(
            pa.PythonFile(io.BufferedReader(Unpacked(chain(pieces(uri, stream), [f"\n{end}\n".encode()]))), "r"),
            # Rows have numbers only where one thread parses them.
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=MAX_ROW_BYTES),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter(uri), newlines_in_values=True, invalid_row_handler=skip),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=wanted,
                column_types=dict.fromkeys(wanted, pa.binary()),
                check_utf8=False,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        for batch in reader:
            # Arrow counts the row of names, too, and has read ahead.
            numbers = np.setdiff1d(np.arange(1, 1 + len(batch) + len(invalid)) + line, [row.number - 1 for row in invalid])
            lines = numbers[: len(batch)]
            line = int(lines[-1]) if len(lines) else line
            passed = sum(row.number <= line for row in invalid)
            yield _arrow_records(uri, lines, batch, _invalid_rows(uri, invalid[:passed]), number=columns.names.get("label", ""))
            del invalid[:passed]
        if not invalid or invalid[-1].text != end:
            raise damaged(uri, "a quote is not closed")
        yield Records(np.empty(0, np.int64), {}, _invalid_rows(uri, invalid[:-1]), lambda _: {})


def _invalid_rows(uri: str, rows: Sequence[arrow_csv.InvalidRow]) -> list[tuple[int, BadRow]]:
    return [
        (
            row.number - 1,
            bad_row(uri, row.number - 1, f"has {row.actual_columns} values, not {row.expected_columns}", row.text),
        )
        for row in rows
    ]


def _parquet_records(uri: str, path: str, columns: Columns) -> Iterator[Records]:
    with store.open_read(path or uri) as stream, arrow_errors(uri):
        metadata = pq.read_metadata(stream)
        schema = metadata.schema.to_arrow_schema()
        present = [name for name in columns.wanted if name in schema.names]
        # Other lists and the like are not text whatever they hold, so they are not read: their type stands for every value.
        listed = [
            name
            for name, kind in ((name, schema.field(name).type) for name in present if name == columns.names.get("negatives"))
            if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(_read_as(kind.value_type))
        ]
        nested = {name: schema.field(name).type for name in present if schema.field(name).type.num_fields and name not in listed}
        wanted = [name for name in present if name not in nested]
        file = pq.ParquetFile(stream, metadata=metadata, buffer_size=READ_BYTES, pre_buffer=False)
        line = 0
        for group in range(metadata.num_row_groups):
            size, count = metadata.row_group(group).total_byte_size, metadata.row_group(group).num_rows
            rows = max(1, min(PARQUET_BATCH_ROWS, PARQUET_BATCH_BYTES * count // max(size, 1)))
            for batch in file.iter_batches(rows, row_groups=[group], columns=wanted):
                batch = batch.cast(pa.schema([field.with_type(_read_as(field.type)) for field in batch.schema]))
                lines = line + 1 + np.arange(len(batch))
                good = sum((_text_lengths(column) for column in batch.columns), np.zeros(len(batch), np.int64)) <= MAX_ROW_BYTES
                refused = [
                    (number, bad_row(uri, number, f"is longer than {MAX_ROW_BYTES >> 20} MiB", ""))
                    for number in lines[~good].tolist()
                ]
                yield _arrow_records(uri, lines[good], batch if good.all() else batch.filter(pa.array(good)), refused, nested)
                line += len(batch)


def _read_as(kind: pa.DataType) -> pa.DataType:
    """Return the type that values, or lists of them, are read as."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_read_as(kind.value_type))
    return VIEWS.get(kind, kind)


def _is_text(kind: pa.DataType) -> bool:
    """Return whether values are text or bytes."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _text_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the bytes of each row's text (rows,), 0 where the column has none. An item of a list counts ITEM_BYTES more."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        ends = np.concatenate([[0], np.cumsum(_text_lengths(column.values) + ITEM_BYTES)])[np.asarray(column.offsets)]
        return np.where(np.asarray(column.is_valid()), np.diff(ends), 0)
    values = column.dictionary if pa.types.is_dictionary(column.type) else column
    if not _is_text(values.type):
        return np.zeros(len(column), np.int64)
    lengths = pc.binary_length(values)
    if values is not column:
        lengths = lengths.take(column.indices)
    return np.asarray(lengths.fill_null(0), np.int64)


def _arrow_records(
    uri: str,
    lines: NDArray[np.int64],
    batch: pa.RecordBatch,
    refused: list[tuple[int, BadRow]],
    types: Mapping[str, pa.DataType] = {},
    number: str = "",
) -> Records:
    """Return the rows of a CSV or Parquet file, without those whose text is not UTF-8.

    Args:
        batch: the wanted columns.
        types: column that is not read -> its type.
        number: column whose texts are numbers, where they can be: CSV knows none.
    """
    columns: dict[str, Column] = {name: [kind] * len(lines) for name, kind in types.items()}
    columns |= {name: _decoded(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    if number in columns:
        columns[number] = list(map(_number, values_at(columns[number], range(len(lines)))))
    wrong = sorted(
        {
            place
            for column in columns.values()
            if isinstance(column, list)
            for place, value in enumerate(column)
            if isinstance(value, UnicodeDecodeError)
        }
    )
    if wrong:
        bad = ((int(lines[place]), str(_record(columns, place))) for place in wrong)
        refused = [*refused, *((line, bad_row(uri, line, "is not UTF-8", row)) for line, row in bad)]
        good = np.delete(np.arange(len(lines)), wrong)
        lines = lines[good]
        columns = {
            name: values_at(column, good.tolist()) if isinstance(column, list) else column.take(pa.array(good))
            for name, column in columns.items()
        }
    return Records(lines, columns, refused, partial(_record, columns))


def _record(columns: Mapping[str, Column], place: int) -> Record:
    return {name: values_at(column, [place])[0] for name, column in columns.items()}


def _decoded(column: pa.Array) -> Column:
    """Return a column with its texts as valid UTF-8 in Arrow, else in Python values, where an exception is in place of other
    bytes."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type.num_fields:
        return _lists(column)
    if not _is_text(column.type):
        return column
    try:
        texts = column.cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return [_text(value) for value in column.cast(pa.large_binary()).to_pylist()]
    return texts


def _lists(column: pa.Array) -> list[Any]:
    """Return lists of texts, or an exception in place of one with bytes that are not UTF-8."""
    flat = _decoded(column.flatten())
    items, lengths = iter(values_at(flat, range(len(flat)))), pc.list_value_length(column).to_pylist()
    rows = [None if length is None else list(islice(items, length)) for length in lengths]
    return [next((item for item in row or () if isinstance(item, UnicodeDecodeError)), row) for row in rows]


def _values(column: pa.Array) -> list[Any]:
    """Return Python values, the type in place of those that Python cannot hold."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # times outside of Python's calendar or finer than its clock
        return [column.type if valid else None for valid in column.is_valid().to_pylist()]


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _text(value: bytes | None) -> str | UnicodeDecodeError | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return error


def written(record: Record) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # too deeply nested, or too long a number
        return ""


def bad_row(uri: str, line: int, reason: str, row: str) -> BadRow:
    # The excerpt is written to a UTF-8 file, so half surrogates are replaced.
    return BadRow(f"{uri}:{line}", reason, row[:EXCERPT_CHARACTERS].encode(errors="replace").decode())
