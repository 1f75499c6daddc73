"""Read shards as blocks of some thousand rows in columns: the same rows and refusals as rows.py gives, many times faster.

Columns are decoded and checked as a whole. What that cannot accept for certain, single rows or a whole block, goes through
rows.py, which decides.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.dataset.columns import CORPUS_COLUMNS, TRAINING_COLUMNS, Columns, fields_of, filled, resolve
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, Hashes
from pipeline.dataset.records import (
    BLOCK_BYTES,
    LARGE_LINE_BYTES,
    BadRow,
    RawRows,
    Record,
    column_values,
    delimiter,
    file_columns,
    is_text,
    json_records,
    line_blocks,
    raw_records,
    raw_rows,
)
from pipeline.dataset.rows import (
    CONTROL,
    MAX_ID_CHARACTERS,
    RefusedRow,
    checked,
    corpus_row,
    group,
    negatives,
    normalized_hash,
    training_row,
)

_TEXTS = [("id", pa.string()), ("document", pa.string()), ("locale", pa.string()), ("line", pa.int64())]
SCHEMAS = {
    DOCUMENTS: pa.schema([*_TEXTS, ("document_hash", pa.uint64())]),
    PAIRS: pa.schema(
        [
            *_TEXTS,
            ("query", pa.string()),
            ("negatives", pa.list_(pa.string())),
            ("task", pa.string()),
            ("label", pa.float32()),
            ("group", pa.string()),
            ("document_hash", pa.uint64()),
            ("query_hash", pa.uint64()),
        ]
    ),
}
"""Columns of a block of each kind of rows: what rows.py names so (`document`: the text of a corpus row), and
`normalized_hashes`."""

SPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""What str.strip strips."""

NORMAL = bytes.maketrans(
    string.ascii_uppercase.encode() + b"".join(character.encode() for character in SPACE if character.isascii()),
    string.ascii_lowercase.encode() + b" " * sum(character.isascii() for character in SPACE),
)
CONTROLS = re.escape(CONTROL)
LARGEST = float(np.finfo(np.float32).max)
HASHED_BYTES = 128 << 10
"""Text that is normalized at once: with all that is made of it, it fits into a processor's cache."""

DIGITS = 430
"""Python reads no integer of more than 4300 digits: ten times this."""


class Block(NamedTuple):
    """Some rows of a shard, in the file's order: the good ones, see SCHEMAS, and the refused ones."""

    rows: pa.Table
    bad: list[BadRow]


def read_blocks(uri: str, kind: str, given: Mapping[str, str], path: str = "") -> Iterator[Block]:
    """Yield all rows of a shard.

    Args:
        kind: PAIRS or DOCUMENTS, the rows of the file.
        given: `data.columns`.
        path: where to read it, if it is not its URI: a local copy, which errors do not name.

    Raises:
        BadData, BadConfig, MissingInput, Transient: as `rows.read_training_rows`.
    """
    columns = shard_columns(uri, kind, given, path)
    found = _arrow_rows(uri, columns, path) if uri.endswith(".parquet") or delimiter(uri) else _json_rows(uri, columns, path)
    for rows in found:
        yield _block(uri, kind, columns, rows)


def shard_columns(uri: str, kind: str, given: Mapping[str, str], path: str = "") -> Columns:
    """Return the columns of a shard, as they were recognised."""
    return resolve(uri, TRAINING_COLUMNS if kind == PAIRS else CORPUS_COLUMNS, given, file_columns(uri, path))


def normalized_hashes(texts: pa.Array) -> Hashes:
    """Return rows.normalized_hash of each text, (rows,)."""
    step = max(1, HASHED_BYTES * len(texts) // max(texts.nbytes, 1))
    return np.concatenate(
        [np.empty(0, np.uint64), *(_normalized_hashes(texts.slice(start, step)) for start in range(0, len(texts), step))]
    )


def _normalized_hashes(texts: pa.Array) -> Hashes:
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    content = b"" if data is None else memoryview(data)[offsets[0] : offsets[-1]]
    lowered = np.frombuffer(bytes(content).translate(NORMAL), np.uint8)
    offsets = offsets - offsets[0]
    # In ASCII, case folding and collapsing white space is this: lower case, and no space behind another one.
    spaces = np.append(lowered == ord(" "), True)
    kept = np.ones(len(lowered), np.bool_)
    np.logical_and(spaces[1:-1], spaces[:-2], out=kept[1:])
    dropped = np.flatnonzero(kept[1:]) + 1
    np.logical_not(kept[1:], out=kept[1:])
    collapsed: Any = memoryview((lowered[kept] if len(dropped) else lowered).data)
    moved = (offsets - np.searchsorted(dropped, offsets)).tolist()
    # Python's own functions know the rest: other characters, and white space around a text.
    simple = (np.diff(offsets) > 0) & ~spaces[offsets[:-1]] & ~spaces[offsets[1:] - 1]
    simple[np.searchsorted(offsets, np.flatnonzero(lowered >= 0x80), "right") - 1] = False
    sha256 = hashlib.sha256
    digests = [sha256(collapsed[start:stop]).digest()[:8] for start, stop in pairwise(moved)]
    found = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
    others = np.flatnonzero(~simple)
    found[others] = [normalized_hash(text) for text in texts.take(pa.array(others)).to_pylist()]
    return found


def id_hashes(ids: pa.Array | pa.ChunkedArray) -> Hashes:
    """Return ids.id_hash of each id, (rows,)."""
    return np.fromiter(map(id_hash, ids.to_pylist()), np.uint64, len(ids))


class _Unsure(Exception):
    """The values of a block may be wrong: rows.py looks at each row."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of a file.

    Attributes:
        lines: their numbers.
        sure: those whose values are all there.
        refused: other rows among them, with their numbers.
        read: returns a column of the file, as a list or in Arrow; None: it has none of that name.
        records: returns the records of some rows, chosen by place.
    """

    lines: NDArray[np.int64]
    sure: NDArray[np.bool_]
    refused: Sequence[tuple[int, BadRow]]
    read: Callable[[str], Any]
    records: Callable[[list[int]], Iterable[tuple[int, Record | BadRow]]]


def _arrow_rows(uri: str, columns: Columns, path: str) -> Iterator[_Rows]:
    for raw in raw_rows(uri, columns, path):
        yield _Rows(
            raw.lines, np.ones(len(raw.lines), np.bool_), raw.refused, partial(_column, raw), partial(_chosen_records, uri, raw)
        )


def _column(raw: RawRows, name: str) -> Any:
    if name in raw.types:
        raise _Unsure
    if name == raw.numbers and name in raw.columns.schema.names:
        return raw.values(name)
    return raw.columns.column(name) if name in raw.columns.schema.names else None


def _chosen_records(uri: str, raw: RawRows, places: list[int]) -> Iterator[tuple[int, Record | BadRow]]:
    columns = raw.columns.take(pa.array(places, pa.int64()))
    return raw_records(uri, raw._replace(lines=raw.lines[places], columns=columns, refused=[]))


def _json_rows(uri: str, columns: Columns, path: str) -> Iterator[_Rows]:
    lines = _Lines(columns)
    number = 1
    for block in line_blocks(uri, path, BLOCK_BYTES):
        found = lines.decode(block) if block else None
        decoded = [lines.decode_one(line) for line in _divided(block)] if found is None else found
        yield _Rows(
            np.arange(number, number + len(decoded)),
            np.array([row is not None for row in decoded]),
            (),
            partial(lines.column, [lines.nothing if row is None else row for row in decoded]),
            partial(_numbered_records, uri, block, number),
        )
        number += len(decoded)


def _numbered_records(uri: str, block: bytes | None, first: int, places: Iterable[int]) -> Iterator[tuple[int, Record | BadRow]]:
    lines = _divided(block)
    return json_records(uri, ((first + place, lines[place]) for place in places))


def _divided(block: bytes | None) -> Sequence[bytes | None]:
    """Return the lines of a block of `line_blocks` without their ends."""
    return [None] if block is None else block.removesuffix(b"\n").split(b"\n")


class _Lines:
    """Decodes lines of JSON, if they are certain to hold what rows.py finds in them."""

    def __init__(self, columns: Columns) -> None:
        number = str | int | float | None
        kinds: dict[str, Any] = {"id": number, "group": number, "label": float | None, "negatives": list[str] | str | None}
        types: dict[str, Any] = {}
        for name, column in columns.names.items():
            for field in fields_of(column):
                kind = number if "{" in column else kinds.get(name, str | None)
                # Of a column in two uses, the values are looked at in each.
                types[field] = kind if types.get(field, kind) == kind else Any
        names = {field: f"field_{place}" for place, field in enumerate(types)}
        self._attributes = {field: attrgetter(name) for field, name in names.items()}
        # The first one refuses other columns.
        self._decoders = [
            msgspec.json.Decoder(
                msgspec.defstruct(
                    "Row",
                    [(names[field], kind, None) for field, kind in types.items()],
                    rename={name: field for field, name in names.items()},
                    forbid_unknown_fields=only,
                    gc=False,
                )
            )
            for only in (True, False)
        ]
        self.nothing = self._decoders[1].type()

    def decode(self, block: bytes) -> list[Any] | None:
        """Return the rows of a block of whole lines; None: one of them is uncertain."""
        content = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(content == ord("\n"))
        if not len(ends) or ends[-1] != len(block) - 1:
            return None
        starts = np.append(0, ends[:-1] + 1)
        # Every line from brace to brace, and as many rows as lines: no row on two lines, and no line with two rows.
        braces = (content[starts] == ord("{")).all() and (content[ends - 1] == ord("}")).all()
        rows = self._decoded(block, "decode_lines") if braces and (ends - starts).max() <= LARGE_LINE_BYTES else None
        return rows if rows and len(rows) == len(ends) else None

    def decode_one(self, line: bytes | None) -> Any:
        """Return the row of a line; None: it is uncertain."""
        return None if line is None or len(line) > LARGE_LINE_BYTES else self._decoded(line, "decode")

    def column(self, rows: Sequence[Any], name: str) -> list[Any] | None:
        """Return a column of decoded rows; None: nobody wants one of that name."""
        return list(map(self._attributes[name], rows)) if name in self._attributes else None

    def _decoded(self, data: bytes, method: str) -> Any:
        for decoder in self._decoders:
            with suppress(msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
                return getattr(decoder, method)(data)
            if not _is_plain(data):
                break
        return None


def _is_plain(block: bytes) -> bool:
    r"""Return whether msgspec refuses what json does: in columns that nobody wants it does not look for halves of surrogate pairs
    (`\ud83d`), for bytes that are not UTF-8, and for integers that are too long."""
    sampled = np.frombuffer(block, np.uint8)[::DIGITS]
    digits = ((sampled >= ord("0")) & (sampled <= ord("9"))).tobytes()
    return rb"\ud" not in block and rb"\uD" not in block and b"\1" * 10 not in digits and (block.isascii() or _is_utf8(block))


def _is_utf8(block: bytes) -> bool:
    ends = pa.py_buffer(np.array([0, len(block)], np.int64))
    whole = pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(block)])
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _block(uri: str, kind: str, columns: Columns, rows: _Rows) -> Block:
    try:
        table, sure = _checked_columns(kind, columns, rows)
    except (_Unsure, pa.ArrowException, TypeError, ValueError, OverflowError):
        table, sure = SCHEMAS[kind].empty_table(), np.zeros(len(rows.lines), np.bool_)
    if sure.all():
        return Block(table, [bad for _, bad in rows.refused])
    good, bad = [], list(rows.refused)
    places = np.flatnonzero(~sure).tolist()
    make: Any = training_row if kind == PAIRS else corpus_row
    for row in checked(uri, columns, make, rows.records(places)):
        if isinstance(row, BadRow):
            bad.append((int(row.at.rpartition(":")[2]), row))
        else:
            good.append(row)
    if good:
        table = pa.concat_tables([table.filter(pa.array(sure)) if len(table) else table, _table(kind, good)])
        table = table.take(pa.array(np.argsort(np.asarray(table["line"]))))
    elif len(table):
        table = table.filter(pa.array(sure))
    return Block(table.combine_chunks(), [each for _, each in sorted(bad, key=lambda each: each[0])])


def _table(kind: str, rows: Sequence[Any]) -> pa.Table:
    """Return rows of rows.py in columns."""
    columns: dict[str, Any] = {}
    for name, values in zip(rows[0]._fields, zip(*rows, strict=True), strict=True):
        ours = "document" if name == "text" else name
        columns[ours] = values if name == "label" else pa.array(values, SCHEMAS[kind].field(ours).type)
    return _with_hashes(kind, columns)


def _with_hashes(kind: str, columns: Mapping[str, Any]) -> pa.Table:
    found = dict(columns)
    if kind == PAIRS:
        found["label"] = pa.array(np.clip(found["label"], -LARGEST, LARGEST).astype(np.float32))
    for name in ("document", "query")[: 2 if kind == PAIRS else 1]:
        found[f"{name}_hash"] = pa.array(normalized_hashes(found[name]))
    if "id" not in found:
        found["id"] = pa.array([f"{value:016x}" for value in found["document_hash"].to_pylist()], pa.string())
    return pa.table([found[name] for name in SCHEMAS[kind].names], schema=SCHEMAS[kind])


def _checked_columns(kind: str, columns: Columns, rows: _Rows) -> tuple[pa.Table, NDArray[np.bool_]]:
    """Return all rows in columns, and which of them are certain to be good.

    Raises:
        _Unsure, ArrowException, TypeError, ValueError, OverflowError: none is.
    """
    count = len(rows.lines)
    sure = rows.sure.copy()

    def read(name: str) -> Any:
        column = columns.names[name]
        found = _filled(rows, column, columns.templates[column]) if column in columns.templates else rows.read(column)
        return pa.nulls(count) if found is None else found

    document = "document" if kind == PAIRS else "text"
    made: dict[str, Any] = {"line": pa.array(rows.lines), "locale": _strings(read("locale"))}
    for name in (document, "query")[: 2 if kind == PAIRS else 1]:
        text = pc.utf8_trim(_strings(read(name)), SPACE)
        sure &= _has_text(text)
        made["document" if name == document else name] = text.fill_null("")
    if "id" in columns.names:
        made["id"] = _strings(_written(read("id")))
        sure &= _is_id(made["id"])
    if kind == PAIRS:
        made["task"] = _strings(read("task"))
        label = _labels(read("label"))
        sure &= np.isfinite(label)
        made["label"] = label
        for name, checked_value in (("negatives", negatives), ("group", group)):
            values, fits = _each(read(name), checked_value)
            made[name] = pa.array(values, SCHEMAS[kind].field(name).type)
            sure &= fits
    return _with_hashes(kind, made), sure


def _filled(rows: _Rows, template: str, parts: Sequence[tuple[str, str]]) -> list[str | None]:
    fields = list(dict.fromkeys(fields_of(template)))
    found = [rows.read(field) for field in fields]
    values = [column_values(column) if isinstance(column, pa.Array) else column for column in found if column is not None]
    present = [field for field, column in zip(fields, found, strict=True) if column is not None]
    return [filled(parts, dict(zip(present, row, strict=True))) for row in zip(*values, strict=True)]


def _strings(column: Any) -> pa.Array:
    """Return a column of text as valid UTF-8.

    Raises:
        _Unsure, ArrowException: it is none.
    """
    if isinstance(column, list):
        return pa.array(column, pa.string())
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_text(column.type) and not pa.types.is_null(column.type):
        raise _Unsure
    text = column.cast(pa.string())
    text.validate(full=True)
    return text


def _written(column: Any) -> Any:
    """Return ids as text, of which integers are some."""
    if isinstance(column, list):
        if all(type(value) in (str, int, type(None)) for value in column):
            return [str(value) if type(value) is int else value for value in column]
        raise _Unsure
    return column.cast(pa.string()) if pa.types.is_integer(column.type) else column


def _has_text(texts: pa.Array) -> NDArray[np.bool_]:
    """Return which stripped texts are certain not to be empty: what they begin with is neither white space nor a control."""
    first = np.asarray(pc.utf8_slice_codeunits(texts, 0, 1).fill_null(""))
    found: NDArray[np.bool_] = (first > " ") & (first != "\x7f")
    return found


def _is_id(ids: pa.Array) -> NDArray[np.bool_]:
    lengths = np.asarray(pc.binary_length(ids).fill_null(0))
    blank = np.asarray(pc.binary_length(pc.utf8_trim(ids, SPACE)).fill_null(0)) == 0
    controls = np.asarray(pc.match_substring_regex(ids, f"[{CONTROLS}]").fill_null(True))
    found: NDArray[np.bool_] = (lengths <= MAX_ID_CHARACTERS) & ~blank & ~controls
    return found


def _labels(column: Any) -> NDArray[np.float64]:
    if not isinstance(column, list):
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
            raise _Unsure
        column = column.cast(pa.float64())
    elif any(isinstance(value, bool) for value in column):
        raise _Unsure
    else:
        column = pa.array(column, pa.float64())
    return np.asarray(column.fill_null(1.0))


def _each(column: Any, check: Callable[[Any, str], Any]) -> tuple[list[Any], NDArray[np.bool_]]:
    """Return the checked values of a column which few files have, and which of them are good."""
    if (column.count(None) if isinstance(column, list) else column.null_count) == len(column):
        return [check(None, "")] * len(column), np.ones(len(column), np.bool_)
    values = column if isinstance(column, list) else column_values(column)
    fits = np.ones(len(values), np.bool_)
    found = []
    for place, value in enumerate(values):
        try:
            found.append(check(value, ""))
        except RefusedRow:
            fits[place] = False
            found.append(None)
    return found, fits
