"""Count the documents to embed and divide them into parts, from the hashes of their ids; find ids with two documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.corpus import leaders
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.ingested import SLICES, TOMBSTONE, Hashes, IngestedShard, part_range
from pipeline.dataset.reading import in_threads
from pipeline.dataset.records import EXCERPT_CHARACTERS, BadRow
from pipeline.dataset.selection import Numbers, groups, located, pieces, rows_per_slice
from pipeline.errors import MissingInput
from pipeline.plan import PartPlan, part_count
from pipeline.run_inputs import InputShard

Places = tuple[Numbers, Numbers, Numbers]
"""Where rows are, see `located`."""


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
    cache: Path,
    refuse: Callable[[BadRow], None],
    beat: Callable[[int], None],
) -> CountedDocuments:
    """Return the documents to embed: the first of each id in the newest generation.

    Args:
        shards: of kind DOCUMENTS, in the order in which they were listed.
        rows_per_part, least: see `part_count`.
        cache: local folder for the hashes, which are fetched once.
        refuse: called with each row whose id has another document in an earlier row of its generation.
        beat: called with the rows that were looked at.
    """
    generations = np.array([shard.shard.generation for shard in shards])
    per_slice = rows_per_slice(shards)
    # Parts of fewer documents are joined from these.
    bins = max(SLICES, part_count(int(per_slice.sum()), rows_per_part, least))
    digests = [IdDigest() for _ in range(bins)]
    conflicts: Counter[int] = Counter()
    removed = 0
    for end, ranges, rows in _hashes(shards, per_slice, cache):
        keys, documents = rows["key"], rows["document_hash"]
        leader = leaders(keys)
        first = leader == np.arange(len(keys))
        removed += int(np.count_nonzero(first & (documents == TOMBSTONE)))
        _add(digests, np.sort(keys[first & (documents != TOMBSTONE)]))
        differs = np.flatnonzero(documents != documents[leader])
        generation = [generations[located(ranges, rows)[0]] for rows in (differs, leader[differs])]
        differs = differs[generation[0] == generation[1]]
        for shard, bad in _refused(shards, located(ranges, differs), located(ranges, leader[differs])):
            conflicts[shard] += 1
            refuse(bad)
        beat(int(per_slice[:end].sum()))
    count = part_count(sum((digest.count for digest in digests), 0), rows_per_part, least)
    parts = [IdDigest.joined(digests[start : start + bins // count]) for start in range(0, bins, bins // count)]
    return CountedDocuments(
        parts=tuple(PartPlan(rows=part.count, ids=str(part)) for part in parts),
        digest=IdDigest.joined(digests),
        conflicts=conflicts,
        removed=removed,
    )


def sample_documents(shards: Sequence[IngestedShard], first: int, most: int, cache: Path) -> tuple[Places, int]:
    """Return where about `most` documents are, those whose text hashes are in the slices [first, last), and `last`.

    So the same documents in every week, and those of the training rows in the same slices (`data.holdout_by: document`).

    Args:
        shards, cache: as of `count_documents`.
    """
    per_slice = rows_per_slice(shards)
    last = min(SLICES, first + max(1, most * SLICES // int(per_slice.sum())))
    low, high = np.uint64(part_range(first, SLICES)[0]), np.uint64(part_range(last - 1, SLICES)[1])
    found = [np.empty((3, 0), np.int64)]
    for _, ranges, rows in _hashes(shards, per_slice, cache):
        documents = rows["document_hash"]
        chosen = (low <= documents) & (documents <= high) & (documents != TOMBSTONE)
        chosen &= leaders(rows["key"]) == np.arange(len(rows))
        found.append(np.stack(located(ranges, np.flatnonzero(chosen))))
    shard, file, row = np.concatenate(found, axis=1)
    return (shard, file, row), last


def _hashes(
    shards: Sequence[IngestedShard], per_slice: Numbers, cache: Path
) -> Iterator[tuple[int, list[tuple[int, int, int, int]], NDArray[Any]]]:
    """Yield the hashes of the rows of some slices, newest generations first: the slice behind them, where they are, and they."""
    order = sorted(range(len(shards)), key=lambda number: -shards[number].shard.generation)
    for begin, end in groups(per_slice, 0, SLICES):
        ranges = [
            (number, file, *shards[number].rows_in(file, begin, end))
            for number in order
            for file in range(len(shards[number].profile.files))
        ]
        yield end, ranges, np.concatenate(list(in_threads(lambda one: shards[one[0]].hashes(*one[1:], cache), ranges)))


def documents_gone(bucket_root: str, before: Sequence[InputShard], now: Sequence[InputShard], cache: Path) -> int | None:
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
            np.concatenate([np.empty(0, np.uint64), *in_threads(lambda one: one[0].hashes(*one[1:], cache)["key"], ranges)])
            for ranges in (
                [(shard, file, *shard.rows_in(file, first, last)) for shard in shards for file in range(len(shard.profile.files))]
                for shards in (left, here)
            )
        )
        gone += len(np.setdiff1d(earlier, present))
    return gone


def _refused(shards: Sequence[IngestedShard], rows: Places, earlier: Places) -> Iterator[tuple[int, BadRow]]:
    """Yield the shards of rows that are refused, and why.

    Args:
        rows, earlier: where the rows are, and the row that each contradicts.
    """
    number, file, row = (np.concatenate(each) for each in zip(rows, earlier, strict=True))
    order = np.lexsort((row, file, number))

    def read(piece: tuple[int, int, Numbers, Numbers]) -> list[dict[str, Any]]:
        shard, file, wanted, _ = piece
        [facts] = shards[shard].facts(file, int(wanted[0]), int(wanted[-1]) + 1)
        found: list[dict[str, Any]] = facts.select(["id", "line"]).take(pa.array(wanted - wanted[0])).to_pylist()
        return [{**fact, "at": f"{shards[shard].shard.uri}:{fact['line']}"} for fact in found]

    sorted_facts = [fact for found in in_threads(read, list(pieces(number[order], file[order], row[order]))) for fact in found]
    facts = [sorted_facts[place] for place in np.argsort(order).tolist()]
    for shard, own, other in zip(rows[0].tolist(), facts, facts[len(rows[0]) :], strict=False):
        yield shard, BadRow(own["at"], f"id {own['id']!r} has another document at {other['at']}", own["id"][:EXCERPT_CHARACTERS])


def _add(digests: list[IdDigest], keys: Hashes) -> None:
    """Add sorted keys to the digests of the intervals that they are in."""
    owners = keys >> np.uint64(64 - len(digests).bit_length() + 1)
    begins = np.flatnonzero(np.diff(owners, prepend=~owners[:1]))
    for owner, own in zip(owners[begins].tolist(), np.split(keys, begins[1:]) if len(keys) else (), strict=True):
        digests[owner] = IdDigest.joined([digests[owner], IdDigest.of(own)])
