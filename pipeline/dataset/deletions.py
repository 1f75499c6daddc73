"""Read `data.delete`: rows that must not be trained on, evaluated on or embedded from now on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.columns import Columns
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import Hashes
from pipeline.dataset.records import BadRow, file_columns, read_records
from pipeline.dataset.shards import find_shards
from pipeline.errors import BadData

SETTING = "data.delete"
HASH = re.compile(r"[0-9a-f]{16}")
COLUMNS = ("id", "hash")


@dataclass(frozen=True, slots=True)
class Deletions:
    """Ids, and hashes of documents' texts (rows.normalized_hash), all distinct and sorted; `digest` is empty without any."""

    ids: tuple[str, ...] = ()
    documents: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Equal lists have equal digests, however their files are divided."""
        if not self.ids and not self.documents:
            return ""
        return hashlib.sha256(repr((self.ids, self.documents)).encode()).hexdigest()[:32]

    def affected(self, ids: pa.ChunkedArray, documents: pa.ChunkedArray) -> np.ndarray:
        """Return which rows are named, (rows,) bool: by the id, or by the hash of the document."""
        named = pc.is_in(ids, value_set=pa.array(self.ids, pa.string()))
        hashes = pc.is_in(documents, value_set=pa.array(self.documents, pa.uint64()))
        return np.asarray(pc.or_(named, hashes), np.bool_)

    def id_hashes(self) -> Hashes:
        """Return the hashes of the ids."""
        return np.array([id_hash(one) for one in self.ids], np.uint64)


def read_deletions(uris: Sequence[str]) -> Deletions:
    """Read the lists: shards of rows {id} or {hash}.

    Raises:
        BadData: a row that names neither.
        MissingInput, BadConfig: a URI that names no list.
    """
    ids: set[str] = set()
    documents: set[int] = set()
    for shard in find_shards(uris, SETTING) if uris else ():
        names = {name: name for name in COLUMNS if name in file_columns(shard.uri)}
        for line, record in read_records(shard.uri, Columns(names=names, templates={}, missing=(), hints={})):
            values = {} if isinstance(record, BadRow) else {name: record.get(name) for name in names}
            identifier, found = values.get("id"), str(values.get("hash") or "")
            if identifier not in (None, ""):
                ids.add(str(identifier))
            elif HASH.fullmatch(found):
                documents.add(int(found, 16))
            else:
                raise BadData(
                    "a row of a deletion list names nothing",
                    value=f"{shard.uri}:{line}",
                    rule=f"each row of {SETTING} has an id, or a hash of 16 hexadecimal digits",
                    remedy="correct the list: a deletion must not be passed over",
                )
    return Deletions(tuple(sorted(ids)), tuple(sorted(documents)))
