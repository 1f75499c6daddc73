"""Read shards as blocks of some thousand checked rows in columns, with the refused rows and the reason of each.

The only reader of input data. Each column is checked as a whole; a look at single values follows only where that cannot accept
them for certain.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config.sections import normalized
from pipeline.dataset.columns import CORPUS_COLUMNS, TRAINING_COLUMNS, Columns, constant_of, filled, resolve
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, TOMBSTONE, Hashes, with_values
from pipeline.dataset.records import BadRow, Column, Records, bad_row, file_columns, read_records, values_at, written

MAX_ID_CHARACTERS = 1024

CONTROL = "".join(map(chr, range(0x20))) + "\x7f"
CONTROL_CHARACTER = re.compile(f"[{re.escape(CONTROL)}]")

_TEXTS = [("id", pa.string()), ("document", pa.string()), ("locale", pa.string()), ("line", pa.int64())]
SCHEMAS = {
    DOCUMENTS: pa.schema([*_TEXTS, ("deleted", pa.bool_()), ("document_hash", pa.uint64())]),
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
            ("negative_hashes", pa.list_(pa.uint64())),
        ]
    ),
}
"""Columns of a block of each kind of rows. Texts are stripped and not empty, `document` is also the text of a corpus row, `line`
counts from 1 (CSV and Parquet: the row's number), `negatives` do not answer the query, hashes are `normalized_hash`. A `deleted`
row has no text, and TOMBSTONE for its hash."""

SPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""What str.strip strips."""

NORMAL = bytes.maketrans(
    string.ascii_uppercase.encode() + b"".join(character.encode() for character in SPACE if character.isascii()),
    string.ascii_lowercase.encode() + b" " * sum(character.isascii() for character in SPACE),
)
LARGEST = float(np.finfo(np.float32).max)
HASHED_BYTES = 128 << 10
"""Text that is normalized at once: with all that is made of it, it fits into a processor's cache."""

Checked = tuple[pa.Array, NDArray[np.bool_]]
"""A column, and which of its values are certain to be good; the others are looked at one by one."""


class Block(NamedTuple):
    """Some rows of a shard, in the file's order: the good ones, see SCHEMAS, and the refused ones."""

    rows: pa.Table
    bad: list[BadRow]


class RefusedRow(Exception):
    """The reason why a record is not a row."""


def read_blocks(uri: str, kind: str, given: Mapping[str, str], path: str = "") -> Iterator[Block]:
    """Yield all rows of a shard.

    Args:
        kind: PAIRS or DOCUMENTS, the rows of the file.
        given: `data.columns`: our column name -> the file's; other columns have our names.
        path: where to read it, if it is not its URI: a local copy, which errors do not name.

    Raises:
        BadData: the file is cut off, damaged, or a Parquet or CSV file without a column.
        BadConfig: its name has no known suffix.
        MissingInput, Transient: it cannot be read.
    """
    columns = shard_columns(uri, kind, given, path)
    for records in read_records(uri, columns, path):
        yield _block(uri, kind, columns, records)


def shard_columns(uri: str, kind: str, given: Mapping[str, str], path: str = "") -> Columns:
    """Return the columns of a shard, as they were recognised."""
    return resolve(uri, TRAINING_COLUMNS if kind == PAIRS else CORPUS_COLUMNS, given, file_columns(uri, path))


def normalized_hash(text: str) -> int:
    """Return the first 8 bytes of the SHA-256 of the `normalized` text, as an integer."""
    return int.from_bytes(sha256(normalized(text).encode()).digest()[:8], "big")


def normalized_hashes(texts: pa.Array) -> Hashes:
    """Return `normalized_hash` of each text, (rows,)."""
    step = max(1, HASHED_BYTES * len(texts) // max(texts.nbytes, 1))
    pieces = [_ascii_digests(texts.slice(start, step)) for start in range(0, len(texts), step)]
    found = np.frombuffer(b"".join(digests for digests, _ in pieces), ">u8").astype(np.uint64)
    others = np.flatnonzero(~np.concatenate([np.empty(0, np.bool_), *(simple for _, simple in pieces)]))
    # Python's own functions know the rest: other characters, and white space around a text.
    found[others] = [normalized_hash(text) for text in texts.take(pa.array(others)).to_pylist()]
    return found


def _ascii_digests(texts: pa.Array) -> tuple[bytes, NDArray[np.bool_]]:
    """Return 8 bytes of the SHA-256 of each normalized text, and for which of them they are right."""
    content, offsets = _content(texts)
    folded = content.tobytes().translate(NORMAL)
    lowered = np.frombuffer(folded, np.uint8)
    # In ASCII, case folding and collapsing white space is this: lower case, and no space behind another one.
    spaces = lowered == ord(" ")
    repeated = spaces[1:] & spaces[:-1]
    dropped = np.flatnonzero(repeated) + 1
    collapsed = lowered[np.append(True, ~repeated)].tobytes() if len(dropped) else folded
    moved = (offsets - np.searchsorted(dropped, offsets)).tolist()
    first, last = _ends(texts)
    simple = _is_printable(first) & _is_printable(last)
    if not folded.isascii():
        simple[np.searchsorted(offsets, np.flatnonzero(lowered >= 0x80), "right") - 1] = False
    return b"".join([sha256(collapsed[start:stop]).digest()[:8] for start, stop in pairwise(moved)]), simple


def _content(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of all texts, and the (rows + 1,) offsets of each in them."""
    if not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int32)
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    return np.frombuffer(b"" if data is None else data, np.uint8)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _block(uri: str, kind: str, columns: Columns, records: Records) -> Block:
    count = len(records.lines)
    values, reasons = dict(records.columns), dict[int, str]()
    for template, parts in columns.templates.items():
        fields = [field for _, field in parts if field]
        found = [values_at(values.get(field, [None] * count), range(count)) for field in fields]
        values[template] = texts = []
        for place, row in enumerate(zip(*found, strict=True)):
            try:
                texts.append(filled(parts, dict(zip(fields, row, strict=True))))
            except TypeError:
                texts.append(None)
                reasons.setdefault(place, "a column of the template is neither text nor a number")
    made = {"line": pa.array(records.lines)}
    for name, (convert, check) in CHECKS.items():
        if name in columns.names:
            ours, column = "document" if name == "text" else name, columns.names[name]
            exact, taken = partial(check, column=column), values.get(column, [constant_of(column)] * count)
            if name == "text" and made["deleted"].true_count:
                # Any text will do.
                given = zip(values_at(taken, range(count)), made["deleted"].to_pylist(), strict=True)
                taken = ["deleted" if gone else text for text, gone in given]
            made[ours] = _checked(taken, SCHEMAS[kind].field(ours).type, convert, exact, reasons)
    if "id" not in columns.names and kind == DOCUMENTS:
        for place in np.flatnonzero(made["deleted"]).tolist():
            reasons.setdefault(place, "lacks the field 'id'")
    bad = list(records.refused)
    for place, reason in reasons.items():
        line, record = int(records.lines[place]), records.record(place)
        with suppress(TypeError):
            for template, parts in columns.templates.items():
                record[template] = filled(parts, record)
        bad.append((line, bad_row(uri, line, reason + columns.hints.get(reason, ""), written(record))))
    if reasons:
        good = pa.array(np.delete(np.arange(count), list(reasons)))
        made = {name: column.take(good) for name, column in made.items()}
    for name in ("document", "query")[: 2 if kind == PAIRS else 1]:
        made[f"{name}_hash"] = pa.array(normalized_hashes(made[name]))
    if kind == PAIRS:
        made["negative_hashes"] = with_values(made["negatives"], pa.array(normalized_hashes(made["negatives"].flatten())))
    if "id" not in made:
        # So that equal documents are one.
        made["id"] = pa.array([f"{value:016x}" for value in made["document_hash"].to_pylist()], pa.string())
    if kind == DOCUMENTS and made["deleted"].true_count:
        for name, nothing in (("document", ""), ("document_hash", pa.scalar(TOMBSTONE, pa.uint64()))):
            made[name] = pc.if_else(made["deleted"], nothing, made[name])
    return Block(pa.table([made[name] for name in SCHEMAS[kind].names], schema=SCHEMAS[kind]), [row for _, row in sorted(bad)])


def _checked(
    values: Column, kind: pa.DataType, convert: Callable[[Column], Checked], check: Callable[[Any], Any], reasons: dict[int, str]
) -> pa.Array:
    """Return a checked column, with nulls in refused rows.

    Args:
        convert: checks it as a whole; raises if it cannot.
        check: checks a value; raises RefusedRow.
        reasons: place of a refused row -> the first reason; gets more.
    """
    try:
        found, certain = convert(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        found, certain = pa.nulls(len(values), kind), np.zeros(len(values), np.bool_)
    if certain.all():
        return found
    places, exact = np.flatnonzero(~certain).tolist(), found.to_pylist()
    for place, value in zip(places, values_at(values, places), strict=True):
        exact[place] = None
        try:
            exact[place] = check(value)
        except RefusedRow as refusal:
            reasons.setdefault(place, str(refusal))
    return pa.array(exact, kind)


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise RefusedRow(reason)


def _strings(column: Column) -> Checked:
    texts = pa.array(column, pa.string()) if isinstance(column, list) else column
    if not pa.types.is_string(texts.type) and not pa.types.is_null(texts.type):
        raise TypeError
    return texts.cast(pa.string()), np.ones(len(texts), np.bool_)


def _optional_text(value: Any, column: str) -> str | None:
    _require(value is None or isinstance(value, str), f"{column!r} is not text")
    return cast(str | None, value)


def _texts(column: Column) -> Checked:
    texts = _strings(column)[0].fill_null("")
    first, last = _ends(texts)
    if not (_is_printable(first) & _is_printable(last)).all():
        texts = pc.utf8_trim(texts, SPACE)
        first, _ = _ends(texts)
    return texts, (first > ord(" ")) & (first != ord("\x7f"))


def _text(value: Any, column: str) -> str:
    _require(value is not None, f"lacks the field {column!r}")
    _require(isinstance(value, str), f"{column!r} is not text")
    _require(value.strip().strip(CONTROL + " ") != "", f"{column!r} is empty")
    return str(value.strip())


def _array(column: Column) -> pa.Array:
    if not isinstance(column, list):
        return column
    if bool in set(map(type, column)):  # which Arrow takes for numbers
        raise TypeError
    return pa.array(column)


def _ids(column: Column) -> Checked:
    values = _array(column)
    ids = (values.cast(pa.string()) if pa.types.is_integer(values.type) else _strings(values)[0]).fill_null("")
    content, offsets = _content(ids)
    has_control = bool(((content < ord(" ")) | (content == ord("\x7f"))).any())
    return ids, _is_printable(_ends(ids)[0]) & (np.diff(offsets) <= MAX_ID_CHARACTERS) & ~np.bool_(has_control)


def _identifier(value: Any, column: str) -> str:
    _require(value is not None, f"lacks the field {column!r}")
    identifier = _written(value, column)
    _require(identifier.strip() != "", f"{column!r} is empty")
    _require(len(identifier) <= MAX_ID_CHARACTERS, f"{column!r} is longer than {MAX_ID_CHARACTERS} characters")
    # Ids are keys of other systems' files, where a NUL ends a string and a line break ends a row.
    _require(not CONTROL_CHARACTER.search(identifier), f"{column!r} has a control character")
    return identifier


def _written(value: Any, column: str) -> str:
    _require(isinstance(value, (str, int)) and not isinstance(value, bool), f"{column!r} is neither text nor an integer")
    return str(value)


def _labels(column: Column) -> Checked:
    values = _array(column)
    if not (
        pa.types.is_integer(values.type)
        or pa.types.is_floating(values.type)
        or pa.types.is_decimal(values.type)
        or pa.types.is_null(values.type)
    ):
        raise TypeError
    labels = np.asarray(values.cast(pa.float64()).fill_null(1.0))
    return pa.array(np.clip(labels, -LARGEST, LARGEST).astype(np.float32)), np.isfinite(labels)


def _label(value: Any, column: str) -> float:
    if value is None:
        return 1.0
    is_number = (
        isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and abs(cast(float, value)) <= sys.float_info.max
    )
    _require(is_number, f"{column!r} is not a number")
    return max(-LARGEST, min(float(value), LARGEST))


def _lists(column: Column) -> Checked:
    """Only a column of nulls, which most files have."""
    if (column.count(None) if isinstance(column, list) else column.null_count) < len(column):
        raise TypeError
    return pa.array([[]] * len(column), pa.list_(pa.string())), np.ones(len(column), np.bool_)


def _negatives(value: Any, column: str) -> list[str]:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    _require(is_list, f"{column!r} is neither text nor a list of texts")
    return [_text(text, column) for text in texts]


def _groups(column: Column) -> Checked:
    texts, certain = _strings(column)
    groups = pc.utf8_trim(texts, SPACE)
    return pc.if_else(pc.equal(groups, ""), None, groups), certain


def _group(value: Any, column: str) -> str | None:
    return None if value is None else _written(value, column).strip() or None


def _ends(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the first and the last byte of each text, (rows,); 0 of an empty one."""
    content, offsets = _content(texts)
    if not len(content):
        return np.zeros(len(texts), np.uint8), np.zeros(len(texts), np.uint8)
    full = np.diff(offsets) > 0
    return content[np.minimum(offsets[:-1], len(content) - 1)] * full, content[offsets[1:] - 1] * full


def _is_printable(characters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return (characters > ord(" ")) & (characters < ord("\x7f"))


def _flags(column: Column) -> Checked:
    values = pa.array(column) if isinstance(column, list) else column
    if not (pa.types.is_boolean(values.type) or pa.types.is_null(values.type)):
        raise TypeError
    return values.cast(pa.bool_()).fill_null(False), np.ones(len(values), np.bool_)


def _flag(value: Any, column: str) -> bool:
    # CSV has texts only.
    known = value.strip().casefold() if isinstance(value, str) else value
    _require(known in FLAGS and not isinstance(known, float), f"{column!r} is neither true nor false")
    return FLAGS[known]


FLAGS = {None: False, False: False, True: True, "": False, "false": False, "true": True, "0": False, "1": True}
CHECKS: Mapping[str, tuple[Callable[[Column], Checked], Callable[..., Any]]] = {
    "deleted": (_flags, _flag),
    "query": (_texts, _text),
    "document": (_texts, _text),
    "text": (_texts, _text),
    "id": (_ids, _identifier),
    "locale": (_strings, _optional_text),
    "task": (_strings, _optional_text),
    "label": (_labels, _label),
    "negatives": (_lists, _negatives),
    "group": (_groups, _group),
}
"""Our column -> how to check it as a whole, and each value. A row is refused for the reason that the first column gives."""
