"""Read rows from shards' records: one stream of good rows and refused rows.

The only reader of input data.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pipeline.dataset.columns import CORPUS_COLUMNS, TRAINING_COLUMNS, Columns, filled, resolve
from pipeline.dataset.records import BadRow, Record, bad_row, file_columns, read_records, written

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


class RefusedRow(Exception):
    """The reason why a record is not a row."""


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


def normalized_hash(text: str) -> int:
    """Return the first 8 bytes of the SHA-256 of the text after NFKC, case folding and collapsing white space, as an integer."""
    if not text.isascii():  # NFKC leaves ASCII unchanged
        text = unicodedata.normalize("NFKC", text)
    normalized = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.sha256(normalized.encode()).digest()[:8], "big")


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
        label = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        label = math.inf
    if not math.isfinite(label):
        raise RefusedRow(f"{column!r} is not a number")
    return label
