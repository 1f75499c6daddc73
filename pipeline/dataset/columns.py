"""Choose a file's columns: those that `data.columns` names, else those that their usual names tell."""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

from pipeline.errors import BadConfig, BadData
from pipeline.log import log

TRAINING_COLUMNS = ("id", "query", "document", "locale", "task", "label", "negatives", "group")
CORPUS_COLUMNS = ("id", "text", "locale", "deleted")
OPTIONAL_COLUMNS = frozenset({"id", "locale", "task", "label", "negatives", "group", "deleted"})

USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "anchor", "question"),
    "document": ("document", "positive", "answer", "passage", "content", "text"),
    "text": ("text", "document", "passage", "content"),
    "locale": ("locale", "language"),
}
"""Names of columns, in any case, in the data sets that sentence-transformers, MS MARCO and Natural Questions use."""

LISTED_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one file.

    Attributes:
        names: our name -> the file's column, a template or a constant; without `id` where documents are known by their text.
        templates: each template in `names` -> its parts, see `parts_of`.
        missing: our names of required columns that the file does not have.
        hints: reason for which rows are refused -> what to add to it.
    """

    names: Mapping[str, str]
    templates: Mapping[str, tuple[tuple[str, str], ...]]
    missing: tuple[str, ...]
    hints: Mapping[str, str]

    @property
    def wanted(self) -> list[str]:
        """The file's columns that are read, each once."""
        return list(dict.fromkeys(field for name in self.names.values() for field in fields_of(name)))


def check_columns(columns: Mapping[str, str], setting: str = "data.columns") -> None:
    """Refuse a mapping of a column we do not have, or to a template that cannot be read.

    Raises:
        BadConfig: naming the keys that the setting takes, or the template.
    """
    known = sorted({*TRAINING_COLUMNS, *CORPUS_COLUMNS})
    if unknown := [f"{setting}.{name}" for name in columns if name not in known]:
        raise BadConfig("unknown column", value=unknown, rule=f"its keys are our names: {', '.join(known)}")
    for name, column in columns.items():
        try:
            parts = parts_of(column)
        except ValueError as error:
            raise BadConfig(
                "invalid template",
                value=f"{setting}.{name} = {column!r}: {error}",
                rule='columns in braces: "{title}. {brand}"',
            ) from error
        if "{" in column and not any(field for _, field in parts):
            raise BadConfig("a template names no column", value=f"{setting}.{name} = {column!r}")


def parts_of(template: str) -> tuple[tuple[str, str], ...]:
    """Return a template's parts: literal text, and the column that follows it (empty at the end).

    Raises:
        ValueError: a brace without its other half, or a conversion or format after a column's name.
    """
    parts = list(string.Formatter().parse(template))
    if any(form or conversion or field == "" for _, field, form, conversion in parts):
        raise ValueError("braces hold the name of a column and nothing else")
    return tuple((literal, field or "") for literal, field, *_ in parts)


def constant_of(name: str) -> str | None:
    """Return the text that all rows have, where a name says it: `=TEXT`. None: it names columns, or says that rows have none."""
    return name[1:] or None if name.startswith("=") else None


def fields_of(name: str) -> list[str]:
    """Return the file's columns that a name or a template reads."""
    if name.startswith("="):
        return []
    return [field for _, field in parts_of(name) if field] if "{" in name else [name]


def filled(parts: Sequence[tuple[str, str]], record: Mapping[str, Any]) -> str | None:
    """Return a template's text with the record's values; empty ones are left out. None if all are empty.

    Raises:
        TypeError: a value is neither text nor a number.
    """
    values = [record.get(field) for _, field in parts if field]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal, type(None))):
            raise TypeError(str(value))
    if not any(str(value).strip() for value in values if value is not None):
        return None
    texts = iter("" if value is None else str(value) for value in values)
    return "".join(literal + (next(texts) if field else "") for literal, field in parts)


def resolve(uri: str, ours: Sequence[str], given: Mapping[str, str], present: Sequence[str]) -> Columns:
    """Choose a file's columns; a choice other than our own names is logged once.

    Args:
        ours: our names.
        given: `data.columns`.
        present: the file's columns; empty if it has no row.

    Raises:
        BadData: a column can be read in more than one way.
    """
    taken = {field for name in ours if name in given for field in fields_of(given[name])}
    names = {}
    for name in ours:
        found = [
            column for column in present if column.strip().casefold() in USUAL_NAMES.get(name, (name,)) and column not in taken
        ]
        names[name] = given.get(name, found[0] if len(found) == 1 else name)
        if len(found) > 1 and name not in given and name not in found:
            raise BadData(
                f"more than one column may be the {name}",
                value=f"{uri}: {', '.join(found)}",
                rule="a column is recognised by its name only where one reading is possible",
                remedy=f"name it: --set data.columns.{name}={found[0]}",
            )
    if names["id"] == "id" and present and "id" not in present and "id" not in given:
        del names["id"]
    # A delta may have nothing but deletions.
    optional = OPTIONAL_COLUMNS | ({"text"} if names.get("deleted") in present else set())
    missing = tuple(
        name
        for name, column in names.items()
        if (name not in optional or name in given) and present and not set(fields_of(column)) <= set(present)
    )
    used = {field for name, column in names.items() if name not in missing for field in fields_of(column)}
    unused = [column for column in present if column not in used]
    choice = [f"{name} is {column!r}" for name, column in names.items() if column != name and name not in missing]
    if "id" not in names:
        choice.append("documents have no id: the hash of their text is their id")
    if choice:
        _log_choice("; ".join([*choice, f"not used: {', '.join(unused[:LISTED_COLUMNS])}"] if unused else choice))
    return Columns(
        names=names,
        templates={column: parts_of(column) for column in names.values() if "{" in column and fields_of(column)},
        missing=missing,
        hints={f"lacks the field {names[name]!r}": _hint(name, present, unused) for name in missing},
    )


@cache
def _log_choice(choice: str) -> None:
    log.info("columns: %s", choice)


def _hint(name: str, present: Sequence[str], unused: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, unused, 1) or (unused if len(unused) == 1 else ["COLUMN"])
    return f"; the file's columns are {', '.join(present[:LISTED_COLUMNS])}: add --set data.columns.{name}={near[0]}"
