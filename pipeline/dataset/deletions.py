"""Read `data.delete`: documents and texts that must not be trained on, evaluated with or embedded from now on.

A list is a text file with one entry a line: an id, or `hash:` and the 16 hexadecimal digits of a text's hash
(rows.normalized_hash), as `document_hash` of the published parts has it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline import store
from pipeline.contract import Record
from pipeline.errors import BadData, MissingInput

SETTING = "data.delete"
PREFIX = "hash:"
HASH = re.compile(f"{PREFIX}([0-9a-f]{{16}})")


def have_negatives(rows: pa.Table | pa.RecordBatch, hashes: pa.Array) -> NDArray[np.bool_]:
    """Return which rows have one of these documents as a negative: (rows,)."""
    lists, found = rows.column("negative_hashes"), np.zeros(rows.num_rows, np.bool_)
    named = np.asarray(pc.is_in(pc.list_flatten(lists), value_set=hashes))
    found[np.repeat(np.arange(rows.num_rows), pc.list_value_length(lists).to_numpy())[named]] = True
    return found


@dataclass(frozen=True, slots=True)
class Deletions(Record):
    """What must not be used: ids, and hashes of texts; distinct and sorted."""

    ids: tuple[str, ...] = ()
    hashes: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Equal entries have equal digests, however they are divided into lists; empty without any."""
        return hashlib.sha256(self.to_json()).hexdigest()[:32] if len(self) else ""

    def __len__(self) -> int:
        return len(self.ids) + len(self.hashes)

    def named(self, rows: pa.Table | pa.RecordBatch) -> NDArray[np.bool_]:
        """Return which rows are named by their `id`, or by the hash of any of their texts, as far as they have them: (rows,)."""
        found = np.zeros(rows.num_rows, np.bool_)
        if "negative_hashes" in rows.schema.names:
            found |= have_negatives(rows, pa.array(self.hashes, pa.uint64()))
        for name, values in (("id", self.ids), ("document_hash", self.hashes), ("query_hash", self.hashes)):
            if name in rows.schema.names:
                column = rows.column(name)
                found |= np.asarray(pc.is_in(column, value_set=pa.array(values, column.type)))
        return found

    def to_json(self) -> bytes:
        # On one line, as ever: the digest names what is ingested.
        return json.dumps(asdict(self)).encode()


def read_deletions(uris: Sequence[str]) -> Deletions:
    """Read lists, and all files of folders of lists.

    Raises:
        MissingInput: a URI names nothing.
        BadData: a line is neither an id nor a hash.
    """
    ids: set[str] = set()
    hashes: set[int] = set()
    for uri in uris:
        lists = [uri] if not uri.endswith("/") and store.exists(uri) else [info.uri for info in store.list_objects(uri)]
        if not lists:
            raise MissingInput(
                "no deletion list found",
                value=f"{SETTING}: {uri}",
                rule="a text file, or a folder of them",
                remedy="check the URI",
            )
        for one in lists:
            for number, line in enumerate(store.read_bytes(one).split(b"\n"), 1):
                _read_entry(f"{one}:{number}", line, ids, hashes)
    return Deletions(tuple(sorted(ids)), tuple(sorted(hashes)))


def _read_entry(at: str, line: bytes, ids: set[str], hashes: set[int]) -> None:
    try:
        entry = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        entry = PREFIX
    if found := HASH.fullmatch(entry):
        hashes.add(int(found[1], 16))
    elif entry.startswith(PREFIX):
        raise BadData(
            "an entry of a deletion list cannot be read",
            value=f"{at}: {line[:100]!r}",
            rule="each line has an id in UTF-8, or hash: and 16 hexadecimal digits in lower case",
            remedy="correct the list: no deletion is passed over",
        )
    elif entry:
        ids.add(entry)
