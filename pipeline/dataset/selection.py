"""Choose the rows that a run trains on and is evaluated with: from one 64-bit hash of each row, slice of keys by slice.

Rows, not files, are new or seen: a row is new if no run of the parent's lineage was trained on it with the same label. The
hold-out is the first slices of the key space, so it is the same in every week, however rows are cut into files. Replayed rows are
a window of the other slices, whose place depends on the seed and on the new shards: the same run replays the same rows again,
another week others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.ingested import READ_ROWS, SLICES, Hashes, IngestedShard, identities, positive
from pipeline.dataset.reading import in_threads
from pipeline.dataset.seen import SeenRows

Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]

LONGEST_GAP = 1 << 10
"""Rows that are read in vain rather than in a request of its own: about a megabyte."""

GROUP_ROWS = 1 << 18
"""Rows whose hashes are in memory at a time, if a slice has not more: with everything computed from them some 30 MB."""


def holdout_slices(fraction: float) -> int:
    """Return how many slices of keys are held out."""
    return max(1, round(fraction * SLICES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of some slices that count; of equal rows as many as may be repeated. All arrays are (rows,).

    Attributes:
        shard, file, row: where each is: numbers of shard and file, and the row in the file.
        slices: slice of its key.
        versions: see pipeline/dataset/ingested.row_versions.
        repeat: 1 for the first of equal rows, 2 for the second, and so on.
        seen: whether the lineage was trained on it.
    """

    shard: Numbers
    file: Numbers
    row: Numbers
    slices: Numbers
    versions: Hashes
    repeat: Numbers
    seen: Mask

    def take(self, chosen: NDArray[Any]) -> Group:
        """Return some of the rows."""
        return Group(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def __len__(self) -> int:
        return len(self.row)


class HashedRows:
    """The rows of all training shards.

    Args:
        shards: ingested shards of pairs, in the order in which they were listed.
        seen: rows of the lineage.
        max_repeats: `data.max_repeats`.
        cache: local folder for the hashes, which are fetched once.
    """

    def __init__(self, shards: Sequence[IngestedShard], seen: SeenRows, max_repeats: int, cache: Path) -> None:
        self._shards = shards
        self._cache = cache
        self._seen = seen
        self._max_repeats = max_repeats
        # Of rows that contradict each other the newest counts; it comes first.
        age = [(one.shard.modified, one.shard.uri) for one in shards]
        self._newest_first = sorted(range(len(shards)), key=age.__getitem__, reverse=True)

    @cached_property
    def per_slice(self) -> Numbers:
        """(SLICES,) rows, equal ones included."""
        return rows_per_slice(self._shards)

    def read(self, first: int, last: int) -> Group:
        """Return the rows of the slices [first, last)."""
        ranges = [
            (number, file, *self._shards[number].rows_in(file, first, last))
            for number in self._newest_first
            for file in reversed(range(len(self._shards[number].profile.files)))
        ]
        ranges = [one for one in ranges if one[2] < one[3]]

        def hashes(one: tuple[int, int, int, int]) -> Hashes:
            number, file, start, stop = one
            # A file keeps the order of lines among equal rows: the last one is the newest.
            found: Hashes = self._shards[number].hashes(file, start, stop, self._cache)["version"][::-1]
            return found

        versions = np.concatenate([np.empty(0, np.uint64), *in_threads(hashes, ranges)])
        order, repeat = _counted(versions, self._max_repeats)
        # As the hashes, each range from its end.
        shard, file, row = located([(*place, stop - 1, start - 1) for *place, start, stop in ranges], order)
        versions = versions[order]
        return Group(
            shard=shard,
            file=file,
            row=row,
            slices=self._slices(ranges, first, last)[order],
            versions=versions,
            repeat=repeat,
            seen=np.isin(versions, self._seen.versions(first, last)),
        )

    def _slices(self, ranges: Sequence[tuple[int, int, int, int]], first: int, last: int) -> Numbers:
        begins = (self._shards[number].profile.files[file].slices[first : last + 1] for number, file, *_ in ranges)
        found = (np.repeat(np.arange(first, last), np.diff(each))[::-1] for each in begins)
        return np.concatenate([np.empty(0, np.int64), *found])


def _counted(versions: Hashes, max_repeats: int) -> tuple[Numbers, Numbers]:
    """Return the rows that count, and of each the how manieth of equal ones it is.

    Args:
        versions: of rows, newest first.
    """
    known = identities(versions)
    order = np.argsort(known, kind="stable")
    begins = np.flatnonzero(np.diff(known[order], prepend=~known[order[:1]]) != 0)
    sizes = np.diff(begins, append=len(order))
    current = versions[order] == np.repeat(versions[order[begins]], sizes)
    before = np.cumsum(current) - current
    repeat = before - np.repeat(before[begins], sizes) + 1
    counts = current & (repeat <= max_repeats)
    return order[counts], repeat[counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows to train on.

    Attributes:
        new, replay: (SLICES,) rows that no run of the lineage was trained on, and others to train on again.
    """

    new: Numbers
    replay: Numbers

    @property
    def rows(self) -> int:
        """All of them."""
        return int(self.new.sum() + self.replay.sum())

    def choose(self, group: Group) -> Group:
        """Return the rows to train on, in the order of shards, files and rows."""
        trainable = group.take(positive(group.versions))
        # Of a slice that is not replayed as a whole, the rows with the smallest hashes.
        order = np.lexsort((trainable.repeat, trainable.versions, trainable.slices))
        again = order[trainable.seen[order]]
        begins = np.searchsorted(trainable.slices[again], np.arange(SLICES))
        place = np.arange(len(again)) - begins[trainable.slices[again]]
        chosen = ~trainable.seen & (self.new[trainable.slices] > 0)
        chosen[again] = place < self.replay[trainable.slices[again]]
        taken = np.flatnonzero(chosen)
        return trainable.take(taken[np.lexsort((trainable.row[taken], trainable.file[taken], trainable.shard[taken]))])


def select(
    rows: HashedRows,
    *,
    holdout_fraction: float,
    replay_fraction: float,
    seed: int,
    new_shards: Sequence[str],
    beat: Callable[[int], None],
) -> Selection:
    """Count what there is to train on. Rows with a label of 0 or less are no pairs to train on.

    Args:
        replay_fraction: rows to replay for each new one; without any new row, the share of the seen rows.
        new_shards: names of the shards that the lineage did not have.
        beat: called with the rows that were looked at.
    """
    new, seen = np.zeros(SLICES, np.int64), np.zeros(SLICES, np.int64)
    held = holdout_slices(holdout_fraction)
    for first, last in groups(rows.per_slice, held, SLICES):
        group = rows.read(first, last)
        trainable = positive(group.versions)
        new += np.bincount(group.slices[trainable & ~group.seen], minlength=SLICES)
        seen += np.bincount(group.slices[trainable & group.seen], minlength=SLICES)
        beat(int(rows.per_slice[:last].sum()))
    wanted = min(int(seen.sum()), math.ceil(replay_fraction * int(new.sum() or seen.sum())))
    digest = hashlib.sha256(":".join([str(seed), *sorted(new_shards)]).encode()).digest()
    start = held + int.from_bytes(digest[:8], "big") % max(SLICES - held, 1)
    window = np.array([*range(start, SLICES), *range(held, start)], np.int64)
    before = np.cumsum(seen[window]) - seen[window]
    replay = np.zeros(SLICES, np.int64)
    replay[window] = np.clip(wanted - before, 0, seen[window])
    return Selection(new=new, replay=replay)


def rows_per_slice(shards: Sequence[IngestedShard]) -> Numbers:
    """Return the rows of all shards in each slice, (SLICES,)."""
    found = np.zeros(SLICES, np.int64)
    for shard in shards:
        for file in shard.profile.files:
            found += np.diff(file.slices)
    return found


def groups(per_slice: Numbers, first: int, last: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Divide the slices [first, last) into ranges of one slice or at most `most` rows, leaving out those without rows."""
    begin, held = first, 0
    for number in range(first, last):
        rows = int(per_slice[number])
        if held and held + rows > (most or GROUP_ROWS):
            yield begin, number
            begin, held = number, 0
        held += rows
    if held:
        yield begin, last


def located(ranges: Sequence[tuple[int, ...]], rows: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return where rows are: numbers of shard and file, and the row in the file.

    Args:
        ranges: numbers of shard and file, first row, and the one behind the last; backwards where that is smaller.
        rows: places in the rows of all ranges, one range behind the other.
    """
    shard, file, start, stop = np.array(ranges, np.int64).reshape(-1, 4).T
    ends = np.cumsum(abs(stop - start))
    owner = np.searchsorted(ends, rows, "right")
    within = rows - (ends - abs(stop - start))[owner]
    return shard[owner], file[owner], start[owner] + within * np.sign(stop - start)[owner]


def pieces(shard: Numbers, file: Numbers, row: Numbers) -> Iterator[tuple[int, int, Numbers, Numbers]]:
    """Yield what a reader of files reads at once: shard, file, rows of that file, and their places among all.

    Args:
        shard, file, row: where the rows are, in this order. All arrays are (rows,).
    """
    keys = np.stack([shard, file, row // READ_ROWS])
    apart = np.any(np.diff(keys, prepend=-1) != 0, axis=0) | (np.diff(row, prepend=0) > LONGEST_GAP)
    begins = np.flatnonzero(apart)
    for start, stop in zip(begins.tolist(), [*begins[1:].tolist(), len(row)], strict=False):
        yield int(shard[start]), int(file[start]), row[start:stop], np.arange(start, stop)
