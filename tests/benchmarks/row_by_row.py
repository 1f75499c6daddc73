"""The former scan of shards: reads and checks rows one by one in Python.

The baseline of tests/benchmarks/ingest.py, and the reference that the checks in columns (pipeline/dataset/rows.py) are compared
with. Frozen: it changes only if the rules of rows change.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import store
from pipeline.dataset import records as limits
from pipeline.dataset.columns import CORPUS_COLUMNS, TRAINING_COLUMNS, Columns, filled, resolve
from pipeline.dataset.records import BadRow, _number, bad_row, delimiter, file_columns, written
from pipeline.dataset.rows import RefusedRow, normalized_hash
from pipeline.dataset.unpack import READ_BYTES, Unpacked, arrow_errors, pieces

ITEM_BYTES = limits.ITEM_BYTES

PARQUET_BATCH_ROWS = 2048
PARQUET_BATCH_BYTES = 64 << 20
"""Text of a batch: rows are as long as in the mean of their row group, or as the largest value of a dictionary, one of which may
be in every row."""

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Record = dict[str, Any]

MAX_ID_CHARACTERS = 1024

CONTROL = "".join(map(chr, range(0x20))) + "\x7f"
CONTROL_CHARACTER = re.compile(f"[{re.escape(CONTROL)}]")


class TrainingRow(NamedTuple):
    """A pair to train or evaluate on; `line` counts from 1 (Parquet: the row's number), texts are stripped and not empty.

    Attributes:
        negatives: documents that do not answer the query.
        group: of what is held out together, where `data.holdout_by` says so.
    """

    id: str
    query: str
    document: str
    locale: str | None
    task: str | None
    label: float
    line: int
    negatives: tuple[str, ...] = ()
    group: str | None = None


class CorpusRow(NamedTuple):
    """A document to embed."""

    id: str
    text: str
    locale: str | None
    line: int


RowT = TypeVar("RowT", TrainingRow, CorpusRow)


def read_training_rows(uri: str, columns: Mapping[str, str]) -> Iterator[TrainingRow | BadRow]:
    """Yield every row of a training shard, in the file's order.

    Args:
        columns: our column name -> the file's; other columns have our names.

    Raises:
        BadData: the file is cut off, damaged, or a Parquet file without a column.
        BadConfig: its name has no known suffix.
        MissingInput, Transient: it cannot be read.
    """
    return _rows(uri, TRAINING_COLUMNS, columns, training_row)


def read_corpus_rows(uri: str, columns: Mapping[str, str]) -> Iterator[CorpusRow | BadRow]:
    """Yield every row of a corpus shard; otherwise as `read_training_rows`."""
    return _rows(uri, CORPUS_COLUMNS, columns, corpus_row)


def _rows(
    uri: str, ours: Sequence[str], given: Mapping[str, str], make: Callable[[Record, Mapping[str, str], int], RowT]
) -> Iterator[RowT | BadRow]:
    columns = resolve(uri, ours, given, file_columns(uri))
    return checked(uri, columns, make, read_records(uri, columns))


def checked(
    uri: str,
    columns: Columns,
    make: Callable[[Record, Mapping[str, str], int], RowT],
    records: Iterable[tuple[int, Record | BadRow]],
) -> Iterator[RowT | BadRow]:
    """Yield the row of each record, or its refusal.

    Args:
        make: `training_row` or `corpus_row`.
    """
    for line, record in records:
        if isinstance(record, BadRow):
            yield record
            continue
        try:
            for template, parts in columns.templates.items():
                record[template] = _filled(parts, record)
            yield make(record, columns.names, line)
        except RefusedRow as refusal:
            yield bad_row(uri, line, str(refusal) + columns.hints.get(str(refusal), ""), written(record))


def _filled(parts: Sequence[tuple[str, str]], record: Record) -> str | None:
    try:
        return filled(parts, record)
    except TypeError as error:
        raise RefusedRow("a column of the template is neither text nor a number") from error


def training_row(record: Record, names: Mapping[str, str], line: int) -> TrainingRow:
    """
    Args:
        names: our name -> the file's.

    Raises:
        RefusedRow: a value is not what it should be.
    """
    query, document = _text(record, names["query"]), _text(record, names["document"])
    return TrainingRow(
        _identifier(record, names, document),
        query,
        document,
        _optional_text(record, names["locale"]),
        _optional_text(record, names["task"]),
        _label(record, names["label"]),
        line,
        negatives(record.get(names["negatives"]), names["negatives"]),
        group(record.get(names["group"]), names["group"]),
    )


def corpus_row(record: Record, names: Mapping[str, str], line: int) -> CorpusRow:
    """Arguments and errors as of `training_row`."""
    text = _text(record, names["text"])
    return CorpusRow(_identifier(record, names, text), text, _optional_text(record, names["locale"]), line)


def _identifier(record: Record, names: Mapping[str, str], text: str) -> str:
    """Return the row's id; in a file without ids, the hash of its text, so that equal documents are one."""
    column = names.get("id")
    if column is None:
        return f"{normalized_hash(text):016x}"
    value = record.get(column)
    if value is None:
        raise RefusedRow(f"lacks the field {column!r}")
    identifier = _written(value, column)
    if not identifier.strip():
        raise RefusedRow(f"{column!r} is empty")
    if len(identifier) > MAX_ID_CHARACTERS:
        raise RefusedRow(f"{column!r} is longer than {MAX_ID_CHARACTERS} characters")
    # Ids are keys of other systems' files, where a NUL ends a string and a line break ends a row.
    if CONTROL_CHARACTER.search(identifier):
        raise RefusedRow(f"{column!r} has a control character")
    return identifier


def _written(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise RefusedRow(f"{column!r} is neither text nor an integer")
    return str(value)


def _text(record: Record, column: str) -> str:
    return _stripped(record.get(column), column)


def _stripped(value: Any, column: str) -> str:
    if value is None:
        raise RefusedRow(f"lacks the field {column!r}")
    if not isinstance(value, str):
        raise RefusedRow(f"{column!r} is not text")
    text = value.strip()
    if not text.strip(CONTROL + " "):
        raise RefusedRow(f"{column!r} is empty")
    return text


def _optional_text(record: Record, column: str) -> str | None:
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise RefusedRow(f"{column!r} is not text")
    return value


def negatives(value: Any, column: str) -> tuple[str, ...]:
    """Return the negatives of a row, none for null.

    Raises:
        RefusedRow: it is neither a text nor a list of texts, or a text is empty.
    """
    if value is None:
        return ()
    if not isinstance(value, (str, list)) or not all(isinstance(one, str) for one in value):
        raise RefusedRow(f"{column!r} is neither text nor a list of texts")
    return tuple(_stripped(one, column) for one in ([value] if isinstance(value, str) else value))


def group(value: Any, column: str) -> str | None:
    """Return the group of a row; an empty one is none.

    Raises:
        RefusedRow: it is neither a text nor an integer.
    """
    return None if value is None else _written(value, column).strip() or None


def _label(record: Record, column: str) -> float:
    value = record.get(column)
    if value is None:
        return 1.0
    try:
        label = math.nan if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) else float(value)
    except OverflowError:
        label = math.inf
    if not math.isfinite(label):
        raise RefusedRow(f"{column!r} is not a number")
    return label


class RawRows(NamedTuple):
    """Consecutive rows of a CSV or Parquet file as it has them.

    Attributes:
        lines: numbers of the rows in `columns`.
        columns: those that are wanted.
        refused: rows among them that are not in `columns`, with their numbers.
        types: column that is not read -> its type, which stands for every value.
        numbers: column whose texts are numbers, where they can be: CSV knows none.
    """

    lines: NDArray[np.int64]
    columns: pa.RecordBatch
    refused: list[tuple[int, BadRow]]
    types: Mapping[str, pa.DataType] = {}
    numbers: str = ""

    def values(self, name: str) -> list[Any]:
        """Return a column's Python values, see `column_values`."""
        found = column_values(self.columns.column(name))
        return list(map(_number, found)) if name == self.numbers else found


def read_records(uri: str, columns: Columns) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield every record of a shard with its number (lines of JSON Lines, rows of other files), in the file's order.

    Raises:
        BadData: the file is cut off, damaged, or a Parquet or CSV file without a column.
        MissingInput, Transient: it cannot be read.
    """
    if uri.endswith(".parquet") or delimiter(uri):
        return (row for raw in raw_rows(uri, columns) for row in raw_records(uri, raw))
    return json_records(uri, enumerate(_lines(uri), 1))


def raw_rows(uri: str, columns: Columns, path: str = "") -> Iterator[RawRows]:
    """Yield the rows of a CSV or Parquet file; arguments and errors as of `read_records` and `file_columns`."""
    return _parquet_rows(uri, path, columns) if uri.endswith(".parquet") else _csv_rows(uri, path, columns)


def raw_records(uri: str, raw: RawRows) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield the rows one by one, with the refused ones in their places."""
    refused = iter(raw.refused)
    next_refused = next(refused, None)
    names = raw.columns.schema.names
    for line, *row in zip(raw.lines.tolist(), *map(raw.values, names), strict=True):
        while next_refused and next_refused[0] < line:
            yield next_refused
            next_refused = next(refused, None)
        record = {**raw.types, **dict(zip(names, row, strict=True))}
        if any(isinstance(value, UnicodeDecodeError) for value in row):
            yield line, bad_row(uri, line, "is not UTF-8", str(record))
        else:
            yield line, record
    if next_refused:
        yield next_refused
        yield from refused


def json_records(uri: str, lines: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield the records of numbered lines, without blank ones.

    Args:
        lines: None for one that is too long.
    """
    for number, line in lines:
        if line is None:
            yield number, bad_row(uri, number, f"is longer than {limits.MAX_ROW_BYTES >> 20} MiB", "")
            continue
        if not line or line.isspace():
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


def _lines(uri: str, path: str = "") -> Iterator[bytes | None]:
    """Yield lines without their ends; None for a line that is too long."""
    for block in line_blocks(uri, path):
        if block is None:
            yield None
        else:
            yield from block.removesuffix(b"\n").split(b"\n")


def line_blocks(uri: str, path: str = "", least: int = 1) -> Iterator[bytes | None]:
    """Yield whole lines with their ends; None for a line that is too long.

    Args:
        path: see `file_columns`.
        least: bytes that are yielded together; the last ones, and those before a line that is too long, are fewer.
    """
    with store.open_read(path or uri) as stream:
        tail: bytes | None = b""
        whole: list[bytes] = []
        for piece in pieces(uri, stream):
            first, newline, rest = piece.partition(b"\n")
            if tail is not None:
                tail += first
                if len(tail) > limits.MAX_ROW_BYTES:
                    tail = None
            if not newline:
                continue
            if tail is None:
                yield from filter(None, [b"".join(whole)])
                yield None
                whole = []
            else:
                whole += (tail, newline)
            end = rest.rfind(newline) + 1
            whole.append(rest[:end])
            tail = rest[end:]
            if sum(map(len, whole)) >= least:
                yield b"".join(whole)
                whole = []
        yield from filter(None, [b"".join([*whole, tail or b""])])
        if tail is None:
            yield None


@contextmanager
def _csv_reader(uri: str, path: str, columns: Sequence[str], invalid: list[csv.InvalidRow]) -> Iterator[csv.CSVStreamingReader]:
    """Open a CSV file; its first row names the columns, all values are bytes, empty ones null.

    Args:
        path: see `file_columns`.
        columns: those to read; empty: all.
        invalid: gets rows with another number of values than there are columns.
    """

    def skip(row: csv.InvalidRow) -> str:
        invalid.append(row)
        return "skip"

    with store.open_read(path or uri) as stream, arrow_errors(uri):
        reader = csv.open_csv(
            pa.PythonFile(io.BufferedReader(Unpacked(pieces(uri, stream))), "r"),
            # Rows have numbers only where one thread parses them.
            read_options=csv.ReadOptions(use_threads=False, block_size=limits.MAX_ROW_BYTES),
            parse_options=csv.ParseOptions(delimiter=delimiter(uri), newlines_in_values=True, invalid_row_handler=skip),
            convert_options=csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.binary()),
                check_utf8=False,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        yield reader


def _csv_rows(uri: str, path: str, columns: Columns) -> Iterator[RawRows]:
    """Yield the rows in the file's order, numbered from 1 after the row that names the columns."""
    limits._refuse_missing(uri, columns)
    present = set(file_columns(uri, path))
    wanted = [name for name in columns.wanted if name in present]
    number = columns.names.get("label", "")
    invalid: list[csv.InvalidRow] = []
    line = 0

    def refused_here() -> Iterator[tuple[int, BadRow]]:
        nonlocal line
        while invalid and invalid[0].number == line + 2:  # Arrow counts the row of names too
            row = invalid.pop(0)
            line += 1
            yield line, bad_row(uri, line, f"has {row.actual_columns} values, not {row.expected_columns}", row.text)

    with _csv_reader(uri, path, wanted, invalid) as reader:
        for batch in reader:
            lines = np.empty(len(batch), np.int64)
            refused: list[tuple[int, BadRow]] = []
            done = 0
            while done < len(batch):
                refused += refused_here()
                # Good rows until the next refused one.
                run = min(len(batch) - done, invalid[0].number - line - 2 if invalid else len(batch))
                lines[done : done + run] = np.arange(line + 1, line + run + 1)
                done, line = done + run, line + run
            yield RawRows(lines, batch, refused, numbers=number)
        if refused := list(refused_here()):
            yield RawRows(np.empty(0, np.int64), pa.RecordBatch.from_pylist([], reader.schema), refused)


def _parquet_rows(uri: str, path: str, columns: Columns) -> Iterator[RawRows]:
    limits._refuse_missing(uri, columns)
    with store.open_read(path or uri) as stream, arrow_errors(uri):
        metadata = pq.read_metadata(stream)
        schema = metadata.schema.to_arrow_schema()
        present = [name for name in columns.wanted if name in schema.names]
        # Other lists and the like are not text whatever they hold, so they are not read: their type stands for every value.
        listed = [name for name in present if name == columns.names.get("negatives") and _is_list(schema.field(name).type)]
        nested = {name: schema.field(name).type for name in present if schema.field(name).type.num_fields and name not in listed}
        wanted = [name for name in present if name not in nested]
        paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        items = [item for item in paths if item.startswith(tuple(f"{name}." for name in listed))]

        def opened(dictionaries: Sequence[str]) -> pq.ParquetFile:
            return pq.ParquetFile(
                stream, metadata=metadata, buffer_size=READ_BYTES, pre_buffer=False, read_dictionary=dictionaries
            )

        # Lists come as dictionaries always: equal texts in them are then in memory once.
        file, dictionaries = opened(items), opened([*(name for name in wanted if name not in listed), *items])
        line = 0
        for batch in _batches(file, dictionaries, wanted):
            lengths = sum((_text_lengths(column) for column in batch.columns), np.zeros(len(batch), np.int64))
            kept = lengths <= limits.MAX_ROW_BYTES
            # Lists have no limit but this.
            full = np.diff(np.cumsum(lengths * kept) // PARQUET_BATCH_BYTES)
            for start, stop in pairwise([0, *(np.flatnonzero(full) + 1).tolist(), len(batch)]):
                lines = line + 1 + np.arange(start, stop)
                rows, good = batch.slice(start, stop - start), kept[start:stop]
                too_long = f"is longer than {limits.MAX_ROW_BYTES >> 20} MiB"
                refused = [(number, bad_row(uri, number, too_long, "")) for number in lines[~good].tolist()]
                yield RawRows(lines[good], rows if good.all() else rows.filter(pa.array(good)), refused, nested)
            line += len(batch)


def _batches(file: pq.ParquetFile, dictionaries: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the file's rows. If a dictionary has large values, each of which may be in every row, batches have fewer rows.

    Args:
        dictionaries: the same file, opened to read these columns as dictionaries.
    """
    for group in range(file.num_row_groups):
        first = next(dictionaries.iter_batches(1, row_groups=[group], columns=columns), None)
        columns_read = [column for column in first.columns if _is_dictionary(column)] if first else []
        largest = max((int(_text_lengths(column.dictionary).max(initial=1)) for column in columns_read), default=1)
        row_group = file.metadata.row_group(group)
        mean = row_group.total_byte_size // max(row_group.num_rows, 1)
        rows = max(1, min(PARQUET_BATCH_ROWS, PARQUET_BATCH_BYTES // max(largest, mean)))
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
            yield pa.record_batch([column.cast(_without_view(column.type)) for column in batch.columns], names=batch.schema.names)


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_without_view(kind.value_type))
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _is_dictionary(column: pa.Array) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def _is_list(kind: pa.DataType) -> bool:
    """Return whether values are lists of text."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    return is_text(_without_view(item.value_type if pa.types.is_dictionary(item) else item))


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are text or bytes."""
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in kinds)


def _text_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the bytes of each row's text (rows,), 0 where the column has none. An item of a list counts ITEM_BYTES more."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        ends = np.concatenate([[0], np.cumsum(_text_lengths(column.values) + ITEM_BYTES)])[np.asarray(column.offsets)]
        return np.where(np.asarray(column.is_valid()), np.diff(ends), 0)
    values = column.dictionary if _is_dictionary(column) else column
    if not is_text(values.type):
        return np.zeros(len(column), np.int64)
    lengths = pc.binary_length(values)
    if values is not column:
        lengths = lengths.take(column.indices)
    return np.asarray(lengths.fill_null(0), np.int64)


def column_values(column: pa.Array) -> list[Any]:
    """Return Python values: for text that is not UTF-8 the exception, for values that Python cannot hold their type."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _lists(column)
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


def _lists(column: pa.Array) -> list[Any]:
    items, lengths = iter(column_values(column.flatten())), pc.list_value_length(column).to_pylist()
    rows = [None if length is None else list(islice(items, length)) for length in lengths]
    wrong = ([item for item in row or () if isinstance(item, UnicodeDecodeError)] for row in rows)
    return [found[0] if found else row for row, found in zip(rows, wrong, strict=True)]


def _decoded(value: bytes | None) -> str | UnicodeDecodeError | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return error
