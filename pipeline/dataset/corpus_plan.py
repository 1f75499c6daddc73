"""Count the documents to embed and divide them into parts, from the hashes of their ids; find ids with two documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.corpus import winners
from pipeline.dataset.ids import MODULUS, IdDigest, repeated
from pipeline.dataset.ingested import SLICES, TOMBSTONE, Hashes, IngestedShard
from pipeline.dataset.reading import in_threads
from pipeline.dataset.records import EXCERPT_CHARACTERS, BadRow
from pipeline.dataset.selection import Mask, groups, rows_per_slice
from pipeline.errors import BadData, MissingInput
from pipeline.plan import InputShard, PartPlan, part_count

Range = tuple[int, int, int, int]
"""Numbers of shard and file, and its rows [start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedDocuments:
    """The documents to embed.

    Attributes:
        parts: see `EmbedPlan`.
        digest: of all ids.
        conflicts: number of a shard -> its rows that are refused.
        removed: ids whose newest row is a tombstone.
    """

    parts: tuple[PartPlan, ...]
    digest: IdDigest
    conflicts: Counter[int]
    removed: int


def count_documents(
    shards: Sequence[IngestedShard],
    rows_per_part: int,
    least: int,
    refuse: Callable[[BadRow], None],
    beat: Callable[[int], None],
) -> CountedDocuments:
    """Return the documents to embed: the first of each id in the newest generation.

    Args:
        shards: of kind DOCUMENTS, in the order in which they were listed.
        rows_per_part, least: see `part_count`.
        refuse: called with each row whose id has another document in an earlier row of its generation.
        beat: called with the rows that were looked at.

    Raises:
        BadData: two ids with one hash.
    """
    order = sorted(range(len(shards)), key=lambda number: -shards[number].shard.generation)
    per_slice = rows_per_slice(shards)
    # Parts of fewer documents are joined from these.
    bins = max(SLICES, part_count(int(per_slice.sum()), rows_per_part, least))
    digests = [IdDigest() for _ in range(bins)]
    conflicts: Counter[int] = Counter()
    removed = 0
    for first, last in groups(per_slice, 0, SLICES):
        ranges = [
            (number, file, *shards[number].rows_in(file, first, last))
            for number in order
            for file in range(len(shards[number].profile.files))
        ]
        keys = list(in_threads(lambda one: shards[one[0]].hashes(*one[1:]), ranges))
        again = repeated(keys)
        # Whether a row is a tombstone is not among its hashes.
        marked = [np.isin(each, again) | bool(shards[one[0]].profile.tombstones) for one, each in zip(ranges, keys, strict=True)]
        taken = np.concatenate([each[~mask] for each, mask in zip(keys, marked, strict=True)])
        if any(mask.any() for mask in marked):
            leaders, gone, refused = _among_repeated(shards, ranges, marked)
            taken, removed = np.concatenate([taken, leaders]), removed + gone
            for number, row in refused:
                conflicts[number] += 1
                refuse(row)
        _add(digests, np.sort(taken))
        beat(int(per_slice[:last].sum()))
    total = sum((digest.count for digest in digests), 0)
    count = part_count(total, rows_per_part, least)
    parts = [_joined(digests[start : start + bins // count]) for start in range(0, bins, bins // count)]
    return CountedDocuments(
        parts=tuple(PartPlan(rows=part.count, ids=str(part)) for part in parts),
        digest=_joined(digests),
        conflicts=conflicts,
        removed=removed,
    )


def documents_gone(bucket_root: str, before: Sequence[InputShard], now: Sequence[InputShard]) -> int | None:
    """Return how many ids of some shards no longer come in others; None if an earlier shard has been removed from the bucket."""
    here, names = [IngestedShard(bucket_root, shard) for shard in now], {shard.rows for shard in now}
    left = [IngestedShard(bucket_root, shard) for shard in before if shard.rows not in names]
    try:
        per_slice = rows_per_slice(left)
    except MissingInput:
        return None
    gone = 0
    for first, last in groups(per_slice, 0, SLICES):
        earlier, present = (
            np.concatenate([np.empty(0, np.uint64), *in_threads(lambda one: one[0].hashes(*one[1:]), ranges)])
            for ranges in (
                [(shard, file, *shard.rows_in(file, first, last)) for shard in shards for file in range(len(shard.profile.files))]
                for shards in (left, here)
            )
        )
        gone += len(np.setdiff1d(earlier, present))
    return gone


def _among_repeated(
    shards: Sequence[IngestedShard], ranges: Sequence[Range], marked: Sequence[Mask]
) -> tuple[Hashes, int, list[tuple[int, BadRow]]]:
    """Return the keys of documents among some rows, each once; the ids that are removed; the rows that contradict an earlier one.

    Args:
        marked: rows of each range: all whose key comes several times, and all that may be tombstones.
    """

    def read(place: int) -> pa.Table:
        (number, file, start, _), rows = ranges[place], np.flatnonzero(marked[place])
        facts = pa.concat_tables(shards[number].facts(file, start + int(rows[0]), start + int(rows[-1]) + 1))
        return facts.take(pa.array(rows - rows[0]))

    places = [place for place, mask in enumerate(marked) if mask.any()]
    tables = list(in_threads(read, places))
    owners = np.repeat([ranges[place][0] for place in places], [table.num_rows for table in tables])
    rows = pa.concat_tables(tables)
    keys = rows["key"].to_numpy()
    documents = rows["document_hash"].to_numpy()
    first, differs = winners(keys, documents)
    leaders = np.flatnonzero(first)
    leaders = leaders[np.argsort(keys[leaders])]
    leader = leaders[np.searchsorted(keys[leaders], keys)]
    generations = np.array([shard.shard.generation for shard in shards])

    def at(row: int) -> str:
        return f"{shards[owners[row]].shard.uri}:{rows['line'][row]}"

    other = np.asarray(pc.not_equal(rows["id"], rows["id"].take(pa.array(leader))))
    for row in np.flatnonzero(other)[:1].tolist():
        raise BadData(
            "two ids have the same hash",
            value=[f"{rows['id'][one]} at {at(one)}" for one in (int(leader[row]), row)],
            rule="documents are told apart by the first 64 bits of BLAKE2b of their ids",
            remedy="change one of the ids",
        )
    refused = []
    for row in np.flatnonzero(differs & (generations[owners] == generations[owners[leader]])).tolist():
        identifier = rows["id"][row].as_py()
        reason = f"id {identifier!r} has another document at {at(int(leader[row]))}"
        refused.append((int(owners[row]), BadRow(at(row), reason, identifier[:EXCERPT_CHARACTERS])))
    present = documents[leaders] != TOMBSTONE
    return keys[leaders[present]], int(np.count_nonzero(~present)), refused


def _add(digests: list[IdDigest], keys: Hashes) -> None:
    """Add sorted keys to the digests of the intervals that they are in."""
    owners = keys >> np.uint64(64 - len(digests).bit_length() + 1)
    begins = np.flatnonzero(np.diff(owners, prepend=~owners[:1]))
    for owner, own in zip(owners[begins].tolist(), np.split(keys, begins[1:]) if len(keys) else (), strict=True):
        digests[owner].merge(IdDigest.of(own))


def _joined(digests: Sequence[IdDigest]) -> IdDigest:
    return IdDigest(sum(one.count for one in digests), sum(one.total for one in digests) % MODULUS)
