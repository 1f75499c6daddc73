"""The global order of training batches: every rank computes the same one, and takes its own rows from each batch.

In an epoch the rows are grouped by the bucket of their document, shuffled, and cut into global batches (ranks x batch size
rows, all of one bucket). The rest of a bucket moves to the next longer one; masked rows fill up the rest of the longest bucket in
use. The batches of all buckets are then shuffled. So every row comes exactly once per epoch for any
number of ranks, all ranks do the same number of steps, and the order depends on the global batch alone, not on the number of
ranks that share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

MASKED = -1
"""Row index of a filler: it has no text and must not count in the loss."""


class ScheduledBatch(NamedTuple):
    """One rank's share of one global batch.

    Attributes:
        step: from 0, over all epochs.
        bucket: static document length in tokens.
        rows: (batch size,) indices of rows, MASKED for fillers.
    """

    step: int
    bucket: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The global batches of an epoch in their order: bucket of each, and rows (batches, ranks x batch size)."""

    buckets: NDArray[np.int64]
    rows: NDArray[np.int64]


class Schedule:
    """The batches of all epochs.

    Args:
        lengths: (rows,) document lengths in tokens, none above the longest bucket.
        buckets: static lengths, ascending.
        batch_size: rows per rank and step.
        ranks: number of ranks.
        seed: of the shuffling.

    Attributes:
        steps_per_epoch: global batches of an epoch.
        bucket_rows: bucket -> rows trained on at its length, after moving remainders; buckets without rows are left out.

    Raises:
        ValueError: no rows, or a document longer than the longest bucket.
    """

    def __init__(self, lengths: ArrayLike, buckets: Sequence[int], batch_size: int, ranks: int, seed: int) -> None:
        found = np.asarray(lengths, dtype=np.int64)
        if found.size == 0:
            raise ValueError("there are no rows to schedule")
        if found.max() > buckets[-1]:
            raise ValueError(f"a document has {found.max()} tokens, the longest bucket {buckets[-1]}")
        self._batch_size = batch_size
        self._global_batch = batch_size * ranks
        self._ranks = ranks
        self._seed = seed
        natural = np.searchsorted(np.asarray(buckets), found)
        used = np.unique(natural)
        self._buckets = [int(buckets[index]) for index in used]
        self._members = [np.flatnonzero(natural == index) for index in used]
        self._rows_per_bucket = self._move_remainders([len(members) for members in self._members])
        self.bucket_rows = {bucket: rows for bucket, rows in zip(self._buckets, self._rows_per_bucket, strict=True) if rows}
        self.steps_per_epoch = sum(-(-rows // self._global_batch) for rows in self._rows_per_bucket)

    def batches(self, rank: int, start_step: int = 0, stop_step: int | None = None) -> Iterator[ScheduledBatch]:
        """Yield a rank's batches from `start_step` on: without end, or up to (not including) `stop_step`.

        A late start costs no more than a start at 0: the schedule lays out only the epoch of `start_step`.
        """
        if not 0 <= rank < self._ranks:
            raise ValueError(f"rank {rank} is not among {self._ranks} ranks")
        own = slice(rank * self._batch_size, (rank + 1) * self._batch_size)
        step = start_step
        while stop_step is None or step < stop_step:
            number, position = divmod(step, self.steps_per_epoch)
            epoch = self._epoch(number)
            last = self.steps_per_epoch if stop_step is None else min(self.steps_per_epoch, position + stop_step - step)
            for index in range(position, last):
                yield ScheduledBatch(step, int(epoch.buckets[index]), epoch.rows[index, own])
                step += 1

    def _move_remainders(self, counts: list[int]) -> list[int]:
        """Return the rows of each bucket after moving remainders up; only the last may not fill its batches."""
        moved, carried = [], 0
        for count in counts[:-1]:
            available = count + carried
            carried = available % self._global_batch
            moved.append(available - carried)
        return [*moved, counts[-1] + carried]

    def _epoch(self, number: int) -> _Epoch:
        # Raw bits of a counter-based generator are the same in every NumPy release; Generator.permutation is not promised to be.
        random = np.random.Philox(np.random.SeedSequence([self._seed, number]))
        carried = np.empty(0, np.int64)
        rows, buckets = [], []
        for bucket, members, count in zip(self._buckets, self._members, self._rows_per_bucket, strict=True):
            shuffled = _shuffled(np.concatenate([members, carried]), random)
            kept, carried = shuffled[:count], shuffled[count:]
            batches = -(-count // self._global_batch)
            filled = np.full(batches * self._global_batch, MASKED, np.int64)
            filled[:count] = kept
            rows.append(filled.reshape(batches, self._global_batch))
            buckets.append(np.full(batches, bucket, np.int64))
        order = _shuffled(np.arange(self.steps_per_epoch), random)
        return _Epoch(np.concatenate(buckets)[order], np.concatenate(rows)[order])


def _shuffled(values: NDArray[np.int64], random: np.random.Philox) -> NDArray[np.int64]:
    keys = np.asarray(random.random_raw(len(values)), dtype=np.uint64)
    return values[np.argsort(keys, kind="stable")]
