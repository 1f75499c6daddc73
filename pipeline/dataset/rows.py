"""Read rows from shards: JSON Lines (plain, gzip, zstd) and Parquet as one stream of good rows and refused rows.

The only reader of input data. prepare, and embed through `DocumentReader`, decide by the same code which rows are good, so that
"good row number n of this shard" means the same row everywhere. A shard is never held in memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import store
from pipeline.errors import BadConfig, BadData, first_line
from pipeline.plan import Shard

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TRAINING_COLUMNS = ("id", "query", "document", "locale", "task", "label")
CORPUS_COLUMNS = ("id", "text", "locale")
OPTIONAL_COLUMNS = frozenset({"locale", "task", "label"})

MAX_ROW_BYTES = 16 << 20
"""Longer lines, and Parquet rows with longer texts, are refused unread: one row must not fill the memory."""

LARGE_LINE_BYTES = 1 << 20
MAX_ELEMENTS = 1 << 16
"""Keys and list items of a large line. Python needs some 30 times the bytes of a JSON document that is all keys."""

MAX_ID_CHARACTERS = 1024

CONTROL = "".join(map(chr, range(0x20))) + "\x7f"
CONTROL_CHARACTER = re.compile(f"[{re.escape(CONTROL)}]")

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


class TrainingRow(NamedTuple):
    """A pair to train or evaluate on; `line` counts from 1 (Parquet: the row's number), texts are stripped and not empty."""

    id: str
    query: str
    document: str
    locale: str | None
    task: str | None
    label: float
    line: int


class CorpusRow(NamedTuple):
    """A document to embed."""

    id: str
    text: str
    locale: str | None
    line: int


class BadRow(NamedTuple):
    """A refused row: its location (`file:line`), the reason, and its beginning."""

    at: str
    reason: str
    row: str


RowT = TypeVar("RowT", TrainingRow, CorpusRow)
Record = dict[str, Any]


class _Refused(Exception):
    """The reason why a record is not a row."""


def is_shard(uri: str) -> bool:
    """Return whether the name has the suffix of a shard."""
    return uri.endswith(SUFFIXES)


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse a mapping of a column we do not have.

    Raises:
        BadConfig: naming the keys that `data.columns` takes.
    """
    known = sorted({*TRAINING_COLUMNS, *CORPUS_COLUMNS})
    unknown = [f"data.columns.{name}" for name in columns if name not in known]
    if unknown:
        raise BadConfig("unknown column", value=unknown, rule=f"keys of data.columns are our names: {', '.join(known)}")


def read_training_rows(uri: str, columns: Mapping[str, str]) -> Iterator[TrainingRow | BadRow]:
    """Yield every row of a training shard, in the file's order.

    Args:
        columns: our column name -> the file's; other columns have our names.

    Raises:
        BadData: the file is cut off, damaged, or a Parquet file without a column.
        BadConfig: its name has no known suffix.
        MissingInput, Transient: it cannot be read.
    """
    return _rows(uri, _file_columns(TRAINING_COLUMNS, columns), _training_row)


def read_corpus_rows(uri: str, columns: Mapping[str, str]) -> Iterator[CorpusRow | BadRow]:
    """Yield every row of a corpus shard; otherwise as `read_training_rows`."""
    return _rows(uri, _file_columns(CORPUS_COLUMNS, columns), _corpus_row)


def read_documents(shard: Shard, source: str, columns: Mapping[str, str], start: int, stop: int) -> Iterator[tuple[str, str]]:
    """Yield one range of documents, see `DocumentReader.read`."""
    return DocumentReader(source, columns).read(shard, start, stop)


class DocumentReader:
    """Reads ids and texts of ranges of shards' good rows. A shard is a stream, so a range that begins at the end of the previous
    one or later in the same shard continues from there: ranges in their order cost one pass over the rows.

    Args:
        source: `corpus` (rows {id, text}) or `documents` (the documents of training rows).
        columns: as for `read_training_rows`.
    """

    def __init__(self, source: str, columns: Mapping[str, str]) -> None:
        self._source = source
        self._columns = columns
        self._uri = ""
        self._row = 0
        self._good: Iterator[TrainingRow | CorpusRow] = iter(())

    def read(self, shard: Shard, start: int, stop: int) -> Iterator[tuple[str, str]]:
        """Yield ids and texts of the good rows [start, stop) of a shard, as the plan counted them. One range at a time.

        Raises:
            BadData: the shard differs from the planned one.
        """
        info = store.stat(shard.uri)
        if info is not None and info.size != shard.size:
            raise _changed(shard, f"{info.size} bytes, {shard.size} when the run was planned")
        if shard.uri != self._uri or start < self._row:
            self._open(shard)
        # Invariant: self._row is the number of the next good row, wherever the caller stops.
        while self._row < stop:
            row = next(self._good, None)
            if row is None:
                found = max(self._row - start, 0)
                self.close()
                raise _changed(shard, f"rows [{start}, {stop}) were planned, {found} of them are there")
            self._row += 1
            if self._row > start:
                yield row.id, row.text if isinstance(row, CorpusRow) else row.document
        if stop == shard.rows:
            self.close()

    def close(self) -> None:
        """Close the open shard; the next read opens it again."""
        self._uri, self._row, self._good = "", 0, iter(())

    def _open(self, shard: Shard) -> None:
        self.close()
        found: Iterator[TrainingRow | CorpusRow | BadRow]
        corpus = self._source == "corpus"
        found = read_corpus_rows(shard.uri, self._columns) if corpus else read_training_rows(shard.uri, self._columns)
        self._uri, self._good = shard.uri, (row for row in found if not isinstance(row, BadRow))


def normalized_hash(text: str) -> int:
    """Return the first 8 bytes of the SHA-256 of the text after NFKC, case folding and collapsing white space, as an integer."""
    if not text.isascii():  # NFKC leaves ASCII unchanged
        text = unicodedata.normalize("NFKC", text)
    normalized = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.sha256(normalized.encode()).digest()[:8], "big")


def _rows(uri: str, names: Mapping[str, str], make: Callable[[Record, Mapping[str, str], int], RowT]) -> Iterator[RowT | BadRow]:
    if not is_shard(uri):
        raise BadConfig("this kind of file is not read", value=uri, rule=f"a shard's name ends in one of {', '.join(SUFFIXES)}")
    records = _parquet_records(uri, names) if uri.endswith(".parquet") else _json_records(uri)
    for line, record in records:
        if isinstance(record, BadRow):
            yield record
            continue
        try:
            yield make(record, names, line)
        except _Refused as refusal:
            yield _bad(uri, line, str(refusal), _written(record))


def _training_row(record: Record, names: Mapping[str, str], line: int) -> TrainingRow:
    return TrainingRow(
        _identifier(record, names["id"]),
        _text(record, names["query"]),
        _text(record, names["document"]),
        _optional_text(record, names["locale"]),
        _optional_text(record, names["task"]),
        _label(record, names["label"]),
        line,
    )


def _corpus_row(record: Record, names: Mapping[str, str], line: int) -> CorpusRow:
    return CorpusRow(
        _identifier(record, names["id"]), _text(record, names["text"]), _optional_text(record, names["locale"]), line
    )


def _identifier(record: Record, column: str) -> str:
    value = record.get(column)
    if value is None:
        raise _Refused(f"lacks the field {column!r}")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _Refused(f"{column!r} is neither text nor an integer")
    identifier = str(value)
    if not identifier.strip():
        raise _Refused(f"{column!r} is empty")
    if len(identifier) > MAX_ID_CHARACTERS:
        raise _Refused(f"{column!r} is longer than {MAX_ID_CHARACTERS} characters")
    # Ids are keys of other systems' files, where a NUL ends a string and a line break ends a row.
    if CONTROL_CHARACTER.search(identifier):
        raise _Refused(f"{column!r} has a control character")
    return identifier


def _text(record: Record, column: str) -> str:
    value = record.get(column)
    if value is None:
        raise _Refused(f"lacks the field {column!r}")
    if not isinstance(value, str):
        raise _Refused(f"{column!r} is not text")
    value = value.strip()
    if not value.strip(CONTROL + " "):
        raise _Refused(f"{column!r} is empty")
    return value


def _optional_text(record: Record, column: str) -> str | None:
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise _Refused(f"{column!r} is not text")
    return value


def _label(record: Record, column: str) -> float:
    value = record.get(column)
    if value is None:
        return 1.0
    try:
        label = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        label = math.inf
    if not math.isfinite(label):
        raise _Refused(f"{column!r} is not a number")
    return label


def _json_records(uri: str) -> Iterator[tuple[int, Record | BadRow]]:
    for number, line in enumerate(_lines(uri), 1):
        if line is None:
            yield number, _bad(uri, number, f"is longer than {MAX_ROW_BYTES >> 20} MiB", "")
            continue
        if not line or line.isspace():
            continue
        if len(line) > LARGE_LINE_BYTES and _has_many_elements(line):
            yield number, _bad(uri, number, f"has more than {MAX_ELEMENTS:,} keys and list items", line.decode(errors="replace"))
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if SURROGATE_ESCAPE.search(line):
                # Half of an escaped surrogate pair parses, but is no text that can be written down again.
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeError:
            yield number, _bad(uri, number, "is not UTF-8", line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            yield number, _bad(uri, number, f"is not JSON: {error}", line.decode(errors="replace"))
        else:
            is_object = isinstance(record, dict)
            yield number, record if is_object else _bad(uri, number, "is not a JSON object", line.decode())


def _has_many_elements(line: bytes) -> bool:
    unescaped = line.replace(rb"\\", b"").replace(rb"\"", b"")
    # Each element has a quote or a comma outside of quotes; counting quotes first bounds the split.
    if unescaped.count(b'"') > 4 * MAX_ELEMENTS:
        return True
    return b"".join(unescaped.split(b'"')[::2]).count(b",") > MAX_ELEMENTS


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


def _parquet_records(uri: str, names: Mapping[str, str]) -> Iterator[tuple[int, Record | BadRow]]:
    with store.open_read(uri) as stream, _arrow_errors(uri):
        metadata = pq.read_metadata(stream)
        schema = metadata.schema.to_arrow_schema()
        present = set(schema.names)
        missing = [name for column, name in names.items() if name not in present and column not in OPTIONAL_COLUMNS]
        if missing:
            raise BadData(
                "a Parquet file lacks a column",
                value=[f"{uri}: {name}" for name in missing],
                rule=f"its columns are {', '.join(sorted(present))}",
                remedy="name the file's column under data.columns, or remove the file from the folder",
            )
        # Lists and the like are not text whatever they hold, so they are not read: their type stands for every value.
        nested = {
            name: schema.field(name).type for name in names.values() if name in present and schema.field(name).type.num_fields
        }
        wanted = [name for name in names.values() if name in present and name not in nested]
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
                    yield line, _bad(uri, line, f"is longer than {MAX_ROW_BYTES >> 20} MiB", "")
                    continue
                _, *row = next(rows)
                record = nested | dict(zip(batch.schema.names, row, strict=True))
                if any(isinstance(value, UnicodeDecodeError) for value in row):
                    yield line, _bad(uri, line, "is not UTF-8", str(record))
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


def _file_columns(ours: tuple[str, ...], columns: Mapping[str, str]) -> dict[str, str]:
    return {name: columns.get(name, name) for name in ours}


def _written(record: Record) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # too deeply nested, or too long a number
        return ""


def _bad(uri: str, line: int, reason: str, row: str) -> BadRow:
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


def _changed(shard: Shard, detail: str) -> BadData:
    return BadData(
        "a shard has changed since the run was planned",
        value=f"{shard.uri}: {detail}",
        rule="shards never change; new data is a new file",
        remedy="put the old file back, or start a new run",
    )
