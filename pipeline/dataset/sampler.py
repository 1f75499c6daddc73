"""The global order of training batches, a file for each epoch: plan writes them, every rank takes its own rows of each batch.

In an epoch the rows are grouped by the bucket of their document, shuffled, and cut into global batches (ranks x batch size
rows, all of one bucket). The rest of a bucket moves to the next longer one; masked rows fill up the rest of the longest bucket in
use. The batches of all buckets are then shuffled. So every row comes exactly once per epoch for any
number of ranks, all ranks do the same number of steps, and the order depends on seed, lengths and the global batch alone, not on
the number of ranks that share it. Shuffling is sorting by a hash of the row: it needs memory for a part of the rows only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.external_sort import ExternalSort
from pipeline.dataset.ingested import Hashes, mixed

MASKED = -1
"""Row number of a filler: it has no text and must not count in the loss."""

Lengths = Iterable[NDArray[np.int32]]
"""Tokens of the documents of consecutive rows, in pieces of any size; read several times."""

ROW = np.dtype([("key", np.uint64), ("row", np.int32)])


@dataclass(frozen=True, slots=True)
class Layout:
    """The batches of every epoch.

    Attributes:
        buckets: static lengths, ascending.
        natural: rows of each bucket by the length of their document.
        rows: rows of each bucket after moving remainders up.
        global_batch: rows of a batch.
    """

    buckets: tuple[int, ...]
    natural: tuple[int, ...]
    rows: tuple[int, ...]
    global_batch: int

    @property
    def bucket_rows(self) -> dict[int, int]:
        """Bucket -> rows trained on at its length; buckets without rows are left out."""
        return {bucket: rows for bucket, rows in zip(self.buckets, self.rows, strict=True) if rows}

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return sum(-(-rows // self.global_batch) for rows in self.rows)


def lay_out(lengths: Lengths, buckets: Sequence[int], global_batch: int) -> Layout:
    """Count the batches of each bucket.

    Raises:
        ValueError: no rows, or a document longer than the longest bucket.
    """
    natural = np.zeros(len(buckets) + 1, np.int64)
    for piece in lengths:
        natural += np.bincount(np.searchsorted(np.asarray(buckets), piece), minlength=len(natural))
    if not natural.sum():
        raise ValueError("there are no rows to order")
    if natural[-1]:
        raise ValueError(f"{natural[-1]} documents are longer than the longest bucket, {buckets[-1]} tokens")
    # Only the last bucket in use may not fill its batches.
    last = int(np.flatnonzero(natural)[-1])
    rows, carried = [], 0
    for number, count in enumerate(natural[:-1].tolist()):
        available = count + carried
        carried = available % global_batch if number < last else 0
        rows.append(available - carried)
    return Layout(tuple(buckets), tuple(natural[:-1].tolist()), tuple(rows), global_batch)


def write_order(path: Path, lengths: Lengths, layout: Layout, seed: int, epoch: int) -> None:
    """Write the order of an epoch: (steps, 1 + global batch) int32, of each batch its bucket and its rows, MASKED for fillers.

    Needs memory for a million rows, and for a number per batch; disk for the rows beside the file (`path` with another suffix).
    """
    sorts = [
        ExternalSort(path.with_suffix(f".{bucket}"), count, ROW)
        for bucket, count in zip(layout.buckets, layout.natural, strict=True)
    ]
    salts = [_salt(seed, epoch, bucket) for bucket in layout.buckets]
    first = 0
    for piece in lengths:
        owners = np.searchsorted(np.asarray(layout.buckets), piece)
        for owner in np.unique(owners):
            rows = first + np.flatnonzero(owners == owner)
            sorts[owner].add(key=_keys(rows, salts[owner]), row=rows)
        first += len(piece)

    np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(layout.steps, 1 + layout.global_batch)).flush()
    places = np.argsort(_keys(np.arange(layout.steps), _salt(seed, epoch, 0)))
    done = 0
    waiting = np.empty(0, np.int32)
    for bucket, count, sort, salt in zip(layout.buckets, layout.rows, sorts, salts, strict=True):
        # What the shorter bucket left over takes part in the shuffling.
        sort.add(key=_keys(waiting, salt), row=waiting)
        waiting, missing = waiting[:0], count
        for records in sort:
            waiting = np.concatenate([waiting, records["row"]])
            whole = min(len(waiting), missing) // layout.global_batch * layout.global_batch
            done += _put(path, places[done:], bucket, waiting[:whole])
            waiting, missing = waiting[whole:], missing - whole
        if missing:
            done += _put(path, places[done:], bucket, waiting)
            waiting = waiting[:0]


def _put(path: Path, places: NDArray[np.int64], bucket: int, rows: NDArray[np.int32]) -> int:
    """Write consecutive batches to their places; return how many there are."""
    # Mapped anew each time: pages that were written are no longer this process's memory.
    order = np.lib.format.open_memmap(path, mode="r+")
    size = order.shape[1] - 1
    batches: int = -(-len(rows) // size)
    filled = np.full(batches * size, MASKED, np.int32)
    filled[: len(rows)] = rows
    order[places[:batches], 0] = bucket
    order[places[:batches], 1:] = filled.reshape(batches, size)
    return batches


def _keys(numbers: NDArray[np.integer], salt: np.uint64) -> Hashes:
    """Return a distinct random number for each number: the same in every NumPy release, unlike Generator.permutation's."""
    return mixed(numbers.astype(np.uint64) ^ salt)


def _salt(*parts: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:8], "big"))
