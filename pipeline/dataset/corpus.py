"""The documents to embed, as the ingested shards hold them: one part with its tokens, or one text.

Of the rows of one id, the first counts: of the newest generation, then in the order in which the shards are listed. If it is a
tombstone, the document is gone. Ids with one hash are refused, so a key stands for an id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import DOCUMENTS, FACTS, SLICES, TOKENS, TOMBSTONE, Hashes, IngestedShard, part_range
from pipeline.errors import BadData
from pipeline.run_inputs import InputShard

READERS = 16
"""Files that are read at once: a part has a few rows in each, so most of the time is waiting for storage."""

[DOCUMENT_TOKENS] = TOKENS[DOCUMENTS]

Cut = Callable[[pa.ListArray], pa.ListArray]
File = tuple[IngestedShard, int]


def leaders(keys: Hashes) -> NDArray[np.int64]:
    """Return the first row that has the key of each row, (rows,)."""
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]]) != 0)
    found = np.empty(len(keys), np.int64)
    found[order] = np.repeat(order[begins], np.diff(begins, append=len(order)))
    return found


@dataclass(frozen=True)
class CorpusReader:
    """Reads documents from ingested shards.

    Args:
        bucket_root: the folder that holds `ingested/`.
        shards: of kind DOCUMENTS, in the order in which they were listed.
    """

    bucket_root: str
    shards: Sequence[InputShard]

    @cached_property
    def files(self) -> list[File]:
        """The files of all shards; whose rows come first, count."""
        shards = [IngestedShard(self.bucket_root, shard) for shard in sorted(self.shards, key=lambda shard: -shard.generation)]
        with ThreadPoolExecutor(READERS, "profiles") as readers:
            files = [len(profile.files) for profile in readers.map(lambda shard: shard.profile, shards)]
        return [(shard, number) for shard, count in zip(shards, files, strict=True) for number in range(count)]

    def read_part(self, index: int, count: int, cut: Cut | None = None) -> pa.Table:
        """Return the documents of one of `count` parts, one for each id, in the order of their keys.

        Args:
            cut: shortens token ids.

        Returns:
            The columns of FACTS, and with `cut` DOCUMENT_TOKENS. Takes memory for these and a copy of them.

        Raises:
            MissingInput: an ingested shard is gone.
            BadData: two ids with one hash.
        """
        with ThreadPoolExecutor(READERS, "documents") as readers:
            begins, tables = zip(*readers.map(partial(_facts, index, count), self.files), strict=True)
            facts = pa.concat_tables(tables)
            keys = facts["key"].to_numpy()
            leader = leaders(keys)
            first = leader == np.arange(len(keys))
            _check_ids(facts["id"].filter(pa.array(~first)), facts["id"].take(pa.array(leader[~first])))
            first &= facts["document_hash"].to_numpy() != TOMBSTONE
            order = np.argsort(keys[first])
            documents = facts.filter(pa.array(first)).take(pa.array(order))
            if cut is None:
                return documents
            if not documents.num_rows:
                return documents.append_column(DOCUMENT_TOKENS, pa.array([], pa.list_(pa.int32())))
            masks = np.split(first, np.cumsum([table.num_rows for table in tables])[:-1])
            pieces = readers.map(partial(_tokens, cut), self.files, begins, masks)
            tokens = pa.chunked_array([piece for found in pieces for piece in found])
        return documents.append_column(DOCUMENT_TOKENS, tokens.take(pa.array(order)))

    def text(self, identifier: str) -> str:
        """Return the text of a document.

        Raises:
            MissingInput: an ingested shard is gone.
            BadData: no shard has the document.
        """
        key = np.uint64(id_hash(identifier))
        place = int(key) * SLICES >> 64

        def find(file: File) -> list[int]:
            shard, number = file
            start, stop = shard.rows_in(number, place, place + 1)
            found: list[int] = (start + np.flatnonzero(shard.hashes(number, start, stop)["key"] == key)).tolist()
            return found

        with ThreadPoolExecutor(READERS, "texts") as readers:
            for (shard, number), rows in zip(self.files, readers.map(find, self.files), strict=True):
                if rows:
                    [table] = shard.texts(number, rows[0], rows[0] + 1)
                    return str(table["texts"][0][0])
        raise BadData(
            "no ingested shard has the document",
            value=identifier,
            rule="the plan lists the shards of every document that it embeds",
            remedy="name the bucket of the run that published it",
        )


def _check_ids(ids: pa.ChunkedArray, leaders: pa.ChunkedArray) -> None:
    for row in np.flatnonzero(np.asarray(pc.not_equal(ids, leaders)))[:1].tolist():
        raise BadData(
            "two ids have the same hash",
            value=[ids[row].as_py(), leaders[row].as_py()],
            rule="documents are told apart by the first 64 bits of BLAKE2b of their ids",
            remedy="change one of the ids",
        )


def _facts(index: int, count: int, file: File) -> tuple[int, pa.Table]:
    """Return the facts of a part's rows in one file, and the first of these rows."""
    shard, number = file
    # More parts than slices: the part is inside of one.
    start, stop = shard.rows_in(number, index * SLICES // count, -(-(index + 1) * SLICES // count))
    facts = pa.concat_tables([FACTS[DOCUMENTS].empty_table(), *shard.facts(number, start, stop)])
    first, last = (np.uint64(limit) for limit in part_range(index, count))
    keys = facts["key"].to_numpy()
    begin, end = np.searchsorted(keys, first), np.searchsorted(keys, last, "right")
    return start + int(begin), facts.slice(begin, end - begin)


def _tokens(cut: Cut, file: File, begin: int, taken: NDArray[np.bool_]) -> list[pa.ListArray]:
    """Return the tokens of some of the rows of a file that begin with `begin`."""
    shard, number = file
    found: list[pa.ListArray] = []
    done = 0
    for table in shard.tokens(number, begin, begin + len(taken)):
        found += map(cut, table[DOCUMENT_TOKENS].filter(pa.array(taken[done : done + table.num_rows])).chunks)
        done += table.num_rows
    return found
