"""Read the records of shards: JSON Lines, CSV and TSV (plain, gzip, zstd) and Parquet as one stream of dicts and refused rows.

A shard is never held in memory as a whole, and no row of it, however it is packed, can fill the memory.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import store
from pipeline.dataset.columns import Columns
from pipeline.errors import BadConfig, BadData, first_line

PACKED = ("", ".gz", ".zst")
CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*(kind + packed for kind in (".jsonl", *CSV_DELIMITERS) for packed in PACKED), ".parquet")

MAX_ROW_BYTES = 16 << 20
"""Longer lines, and Parquet rows with longer texts, are refused unread: one row must not fill the memory."""

LARGE_LINE_BYTES = 1 << 20
MAX_ELEMENTS = 1 << 16
"""Keys and list items of a large line. Python needs some 30 times the bytes of a JSON document that is all keys."""

FIRST_ROWS = 100
"""Rows of a JSON Lines file that tell its columns."""

ESTIMATE_BYTES = 256 << 20
"""Text whose lines are counted, about a second of work."""

EXCERPT_CHARACTERS = 200
READ_BYTES = 1 << 20
COMPRESSED_READ_BYTES = 64 << 10
"""Size of a piece of compressed input, which may expand a thousandfold."""

PARQUET_BATCH_ROWS = 1024
PARQUET_BATCH_BYTES = 64 << 20
"""Text of a batch from a dictionary, one large value of which may be in every row."""

MAX_CHUNK_BYTES = 1 << 30
MAX_EXPANSION = 20
"""A column of a row group may be larger than MAX_CHUNK_BYTES, decompressed, only if it expands less than MAX_EXPANSION times.

Arrow decompresses page by page; a page may be as large as its chunk, up to 2 GiB (its size has 31 bits), but usual pages have
about a megabyte."""

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Record = dict[str, Any]


class BadRow(NamedTuple):
    """A refused row: its location (`file:line`), the reason, and its beginning."""

    at: str
    reason: str
    row: str


def is_shard(uri: str) -> bool:
    """Return whether the name has the suffix of a shard."""
    return uri.endswith(SUFFIXES)


def file_columns(uri: str) -> list[str]:
    """Return a shard's columns: of Parquet and CSV all, of JSON Lines those of the first rows.

    Raises:
        BadData: the file is damaged.
        BadConfig: its name has no known suffix.
    """
    if not is_shard(uri):
        raise BadConfig("this kind of file is not read", value=uri, rule=f"a shard's name ends in one of {', '.join(SUFFIXES)}")
    if uri.endswith(".parquet"):
        with store.open_read(uri) as stream, _arrow_errors(uri):
            return list(pq.read_schema(stream).names)
    if _delimiter(uri):
        with _csv_reader(uri, [], []) as reader:
            return list(reader.schema.names)
    first = _json_records(uri, _first_lines(uri))
    return list(dict.fromkeys(key for _, record in first if isinstance(record, dict) for key in record))


def estimate_rows(uri: str, size: int) -> int:
    """Return how many rows a shard has; if it is long and no Parquet, an estimate from its first ESTIMATE_BYTES.

    Args:
        size: of the shard, in bytes.

    Raises:
        BadData: the file is damaged.
    """
    with store.open_read(uri) as stream, _arrow_errors(uri):
        if uri.endswith(".parquet"):
            return int(pq.read_metadata(stream).num_rows)
        lines = read = 0
        for piece in _pieces(uri, stream):
            lines += piece.count(b"\n")
            read += len(piece)
            if read >= ESTIMATE_BYTES:
                lines = round(lines * max(1.0, size / stream.tell()))
                break
        return lines - bool(lines and _delimiter(uri))


def read_records(uri: str, columns: Columns) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield every record of a shard with its number (lines of JSON Lines, rows of other files), in the file's order.

    Raises:
        BadData: the file is cut off, damaged, or a Parquet or CSV file without a column.
        MissingInput, Transient: it cannot be read.
    """
    if uri.endswith(".parquet"):
        return _parquet_records(uri, columns)
    return _csv_records(uri, columns) if _delimiter(uri) else _json_records(uri, _lines(uri))


def _json_records(uri: str, lines: Iterable[bytes | None]) -> Iterator[tuple[int, Record | BadRow]]:
    for number, line in enumerate(lines, 1):
        if line is None:
            yield number, bad_row(uri, number, f"is longer than {MAX_ROW_BYTES >> 20} MiB", "")
            continue
        if not line or line.isspace():
            continue
        if len(line) > LARGE_LINE_BYTES and _has_many_elements(line):
            yield (
                number,
                bad_row(uri, number, f"has more than {MAX_ELEMENTS:,} keys and list items", line.decode(errors="replace")),
            )
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if SURROGATE_ESCAPE.search(line):
                # Half of an escaped surrogate pair parses, but is no text that can be written down again.
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeError:
            yield number, bad_row(uri, number, "is not UTF-8", line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            yield number, bad_row(uri, number, f"is not JSON: {error}", line.decode(errors="replace"))
        else:
            is_object = isinstance(record, dict)
            yield number, record if is_object else bad_row(uri, number, "is not a JSON object", line.decode())


def _has_many_elements(line: bytes) -> bool:
    unescaped = line.replace(rb"\\", b"").replace(rb"\"", b"")
    # Each element has a quote or a comma outside of quotes; counting quotes first bounds the split.
    if unescaped.count(b'"') > 4 * MAX_ELEMENTS:
        return True
    return b"".join(unescaped.split(b'"')[::2]).count(b",") > MAX_ELEMENTS


def _first_lines(uri: str) -> Iterator[bytes | None]:
    size = 0
    for line in islice(_lines(uri), FIRST_ROWS):
        yield line
        size += len(line or b"")
        if size > READ_BYTES:
            return


def _lines(uri: str) -> Iterator[bytes | None]:
    """Yield lines without their ends; None for a line that is too long."""
    with store.open_read(uri) as stream:
        tail: bytes | None = b""
        for piece in _pieces(uri, stream):
            first, newline, rest = piece.partition(b"\n")
            if tail is not None:
                tail += first
                if len(tail) > MAX_ROW_BYTES:
                    tail = None
            if newline:
                yield tail
                *lines, tail = rest.split(b"\n")
                yield from lines
        if tail is None or tail:
            yield tail


def _pieces(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the stream's content, decompressed.

    Raises:
        BadData: it ends before it is complete, or is damaged.
    """
    if uri.endswith(".gz"):
        yield from _gunzipped(uri, stream)
    elif uri.endswith(".zst"):
        yield from _unzstd(uri, stream)
    else:
        while piece := stream.read(READ_BYTES):
            yield piece


def _gunzipped(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    # Hand-written because the library's own reader does not limit how far a piece may expand.
    member = None
    finished = False
    while chunk := stream.read(COMPRESSED_READ_BYTES):
        more = True
        while chunk or (member is not None and more):
            if member is None:
                # gzip files may be padded with zeros after the last member.
                chunk = chunk.lstrip(b"\0") if finished else chunk
                if not chunk:
                    break
                member, finished = zlib.decompressobj(wbits=31), False
            try:
                piece = member.decompress(chunk, READ_BYTES)
            except zlib.error as error:
                raise _damaged(uri, str(error)) from error
            if piece:
                yield piece
            # The rest waits in the decompressor, even if that has consumed all input.
            chunk, more = member.unconsumed_tail, len(piece) == READ_BYTES
            if member.eof:
                chunk, member, finished = member.unused_data, None, True
    if not finished:
        raise _damaged(uri, "the file ends in the middle of its compressed data")


def _unzstd(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    # Arrow's reader: a few bytes may expand to gigabytes, which come in pieces, and the end of a cut-off file is an error.
    unpacked = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")
    with _arrow_errors(uri):
        while piece := unpacked.read(READ_BYTES):
            yield piece
    if stream.tell() == 0:
        raise _damaged(uri, "the file is empty")


def _delimiter(uri: str) -> str | None:
    """Return the delimiter of a CSV or TSV file, None for other files."""
    name = uri.removesuffix(".gz").removesuffix(".zst")
    return CSV_DELIMITERS.get(name[-4:])


class _Unpacked(io.RawIOBase):
    """A file object over pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = next(self._pieces)
            except StopIteration:
                return 0
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


@contextmanager
def _csv_reader(uri: str, columns: Sequence[str], invalid: list[csv.InvalidRow]) -> Iterator[csv.CSVStreamingReader]:
    """Open a CSV file; its first row names the columns, all values are bytes, empty ones null.

    Args:
        columns: those to read; empty: all.
        invalid: gets rows with another number of values than there are columns.
    """

    def skip(row: csv.InvalidRow) -> str:
        invalid.append(row)
        return "skip"

    with store.open_read(uri) as stream, _arrow_errors(uri):
        reader = csv.open_csv(
            pa.PythonFile(io.BufferedReader(_Unpacked(_pieces(uri, stream))), "r"),
            # Rows have numbers only where one thread parses them.
            read_options=csv.ReadOptions(use_threads=False, block_size=MAX_ROW_BYTES),
            parse_options=csv.ParseOptions(delimiter=_delimiter(uri), newlines_in_values=True, invalid_row_handler=skip),
            convert_options=csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.binary()),
                check_utf8=False,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        yield reader


def _csv_records(uri: str, columns: Columns) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield the rows in the file's order, numbered from 1 after the row that names the columns."""
    _refuse_missing(uri, columns)
    present = set(file_columns(uri))
    wanted = [name for name in columns.wanted if name in present]
    invalid: list[csv.InvalidRow] = []
    line = 0

    def refused_here() -> Iterator[tuple[int, BadRow]]:
        nonlocal line
        while invalid and invalid[0].number == line + 2:  # Arrow counts the row of names too
            row = invalid.pop(0)
            line += 1
            yield line, bad_row(uri, line, f"has {row.actual_columns} values, not {row.expected_columns}", row.text)

    with _csv_reader(uri, wanted, invalid) as reader:
        for batch in reader:
            for row in zip(*map(_column_values, batch.columns), strict=True):
                yield from refused_here()
                line += 1
                if any(isinstance(value, UnicodeDecodeError) for value in row):
                    yield line, bad_row(uri, line, "is not UTF-8", str(row))
                else:
                    record = dict(zip(batch.schema.names, row, strict=True))
                    with suppress(KeyError, TypeError, ValueError):  # CSV knows no numbers
                        record[columns.names["label"]] = float(record[columns.names["label"]])
                    yield line, record
        yield from refused_here()


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


def _parquet_records(uri: str, columns: Columns) -> Iterator[tuple[int, Record | BadRow]]:
    _refuse_missing(uri, columns)
    with store.open_read(uri) as stream, _arrow_errors(uri):
        metadata = pq.read_metadata(stream)
        schema = metadata.schema.to_arrow_schema()
        present = set(schema.names)
        # Lists and the like are not text whatever they hold, so they are not read: their type stands for every value.
        nested = {
            name: schema.field(name).type for name in columns.wanted if name in present and schema.field(name).type.num_fields
        }
        wanted = [name for name in columns.wanted if name in present and name not in nested]
        _check_chunks(uri, metadata, wanted)
        file = pq.ParquetFile(stream, metadata=metadata, buffer_size=READ_BYTES, pre_buffer=False)
        dictionaries = pq.ParquetFile(stream, metadata=metadata, buffer_size=READ_BYTES, pre_buffer=False, read_dictionary=wanted)
        line = 0
        for batch in _batches(file, dictionaries, wanted):
            too_long = sum((_text_lengths(column) for column in batch.columns), np.zeros(len(batch), np.int64)) > MAX_ROW_BYTES
            kept = batch.filter(pa.array(~too_long))
            rows = zip(range(len(kept)), *map(_column_values, kept.columns), strict=True)
            for row_is_too_long in too_long.tolist():
                line += 1
                if row_is_too_long:
                    yield line, bad_row(uri, line, f"is longer than {MAX_ROW_BYTES >> 20} MiB", "")
                    continue
                _, *row = next(rows)
                record = nested | dict(zip(batch.schema.names, row, strict=True))
                if any(isinstance(value, UnicodeDecodeError) for value in row):
                    yield line, bad_row(uri, line, "is not UTF-8", str(record))
                else:
                    yield line, record


def _batches(file: pq.ParquetFile, dictionaries: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the file's rows. If a dictionary has large values, each of which may be in every row, batches have fewer rows.

    Args:
        dictionaries: the same file, opened to read these columns as dictionaries.
    """
    for group in range(file.num_row_groups):
        first = next(dictionaries.iter_batches(1, row_groups=[group], columns=columns), None)
        columns_read = [column for column in first.columns if _is_dictionary(column)] if first else []
        largest = max((int(_text_lengths(column.dictionary).max(initial=1)) for column in columns_read), default=1)
        rows = max(1, min(PARQUET_BATCH_ROWS, PARQUET_BATCH_BYTES // largest))
        yield from file.iter_batches(rows, row_groups=[group], columns=columns)


def _check_chunks(uri: str, metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
    """Refuse a column that would fill the memory, before Arrow reads it.

    Raises:
        BadData: a column of a row group is too large.
    """
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            most = max(MAX_CHUNK_BYTES, MAX_EXPANSION * chunk.total_compressed_size)
            if chunk.path_in_schema in columns and chunk.total_uncompressed_size > min(
                most, MAX_ROW_BYTES * (row_group.num_rows + 1)
            ):
                raise BadData(
                    "a column of a Parquet file is too large to read",
                    value=f"{uri}: {chunk.total_uncompressed_size:,} bytes of {chunk.path_in_schema!r} in row group {group}",
                    rule=f"decompressed, at most {MAX_CHUNK_BYTES >> 30} GiB or {MAX_EXPANSION} times its size in the file, and "
                    f"at most {MAX_ROW_BYTES >> 20} MiB a row",
                    remedy="write the file with smaller row groups",
                )


def _is_dictionary(column: pa.Array) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def _text_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the bytes of each row's text (rows,), 0 where the column has none."""
    values = column.dictionary if _is_dictionary(column) else column
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(is_kind(values.type) for is_kind in kinds):
        return np.zeros(len(column), np.int64)
    lengths = pc.binary_length(values)
    if values is not column:
        lengths = lengths.take(column.indices)
    return np.asarray(lengths.fill_null(0), np.int64)


@contextmanager
def _arrow_errors(uri: str) -> Iterator[None]:
    """Turn Arrow's errors about a file into bad data."""
    try:
        yield
    except (pa.ArrowException, EOFError, UnicodeDecodeError) as error:
        raise _damaged(uri, first_line(error)) from error
    except OSError as error:
        # Storage errors have a cause (the store translates them); Arrow's errors about a file have none.
        if error.__cause__ or error.errno:
            raise
        raise _damaged(uri, first_line(error)) from error


def _column_values(column: pa.Array) -> list[Any]:
    """Return Python values: for text that is not UTF-8 the exception, for values that Python cannot hold their type."""
    if _is_dictionary(column):
        column = column.dictionary_decode()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [_decoded(value) for value in column.to_pylist()]
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]
    except (ValueError, OverflowError):  # times outside of Python's calendar or finer than its clock
        return [column.type if valid else None for valid in column.is_valid().to_pylist()]


def _decoded(value: bytes | None) -> str | UnicodeDecodeError | None:
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
    excerpt = row[:EXCERPT_CHARACTERS].encode(errors="replace").decode()
    return BadRow(f"{uri}:{line}", reason, excerpt)


def _damaged(uri: str, detail: str) -> BadData:
    return BadData(
        "an input file is cut off or damaged",
        value=f"{uri}: {detail}",
        rule="every file must be readable to its end",
        remedy="upload it again, or remove it, and start the run again",
    )
