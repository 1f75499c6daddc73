"""The order of training pairs: plan packs them into bins and writes the bins of every step, and every rank takes its own.

Each epoch's pairs are shuffled. A bin is a few rows of one length, which the texts of its pairs share (Encoder.packed); the next
bin takes the pairs that have waited longest and still fit, looking at some that wait behind them (first fit in a window), so what
does not fit comes first in the bin after it. So every pair comes exactly once an epoch, rows are nearly full whatever lengths
texts have, and the order depends on the seed, the lengths and the bins alone, not on the number of ranks that share a step's
bins. Shuffling is sorting by a hash of the row: it needs memory for a part of the rows only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.external_sort import ExternalSort
from pipeline.dataset.ingested import Hashes, mixed
from pipeline.packing import BinShape, texts_per_row

MASKED = -1
"""Row number of a filler: it has no text and must not count in the loss."""

WINDOW = 64
"""Pairs that wait for room. With 64, rows of 256 tokens are 98 to 99 % full; more gain a few tenths of a percent, and time."""

Lengths = Iterable[NDArray[np.int32]]
"""Tokens of the queries and documents of consecutive rows, (n, 2), in pieces of any size; read several times."""

Order = NDArray[np.int32]
Pair = tuple[int, int, int]
"""A row, and the tokens of its query and its document."""

ROW = np.dtype([("key", np.uint64), ("row", np.int32), ("query", np.int32), ("document", np.int32)])


class Bin:
    """The rows of a bin while pairs are placed in it; the same pairs in the same order always get the same places."""

    def __init__(self, shape: BinShape) -> None:
        self._length = shape.length
        self._left = [shape.length] * shape.rows
        self._texts = [0] * shape.rows

    def add(self, query: int, document: int) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
        """Place a pair of so many tokens each; None: there is no room.

        Returns:
            Of the query and of the document: the row, the first token in it, and the number of the text in it, from 0.
        """
        if (there := self._place(document)) is None:
            return None
        if (here := self._place(query)) is None:
            self._left[there[0]] += document
            self._texts[there[0]] -= 1
            return None
        return here, there

    def _place(self, tokens: int) -> tuple[int, int, int] | None:
        """Put a text into the fullest row that has room."""
        most = texts_per_row(self._length)
        rows = [row for row, left in enumerate(self._left) if left >= tokens and self._texts[row] < most]
        if not rows:
            return None
        row = min(rows, key=self._left.__getitem__)
        place = row, self._length - self._left[row], self._texts[row]
        self._left[row] -= tokens
        self._texts[row] += 1
        return place


def write_order(path: Path, lengths: Lengths, rows: int, shape: BinShape, bins: int, seed: int, *, limit: tuple[str, int]) -> int:
    """Write the rows of every step, (steps, bins * shape.pairs) int32, MASKED behind the pairs of each bin; return the steps.

    Needs memory for a million rows; disk for the rows beside the file.

    Args:
        rows: number of pairs.
        bins: of a step, all ranks together.
        limit: `epochs` or `steps`, and how many.

    Raises:
        ValueError: no pairs, or one that a bin has no room for.
    """
    if not rows:
        raise ValueError("there are no rows to order")
    kind, most = limit
    epochs = range(most) if kind == "epochs" else count()
    steps = 0
    with open(path, "wb") as stream, TemporaryDirectory(dir=path.parent) as scratch:
        packed = _packed(_shuffled(Path(scratch), lengths, rows, seed, epochs), shape)
        while (kind == "epochs" or steps < most) and (chosen := list(islice(packed, bins))):
            step = np.full((bins, shape.pairs), MASKED, np.int32)
            for number, pairs in enumerate(chosen):
                step[number, : len(pairs)] = pairs
            step.tofile(stream)
            steps += 1
    return steps


def read_order(path: Path, bins: int, pairs: int) -> Order:
    """Map the file that `write_order` left: (steps, bins * pairs)."""
    return np.memmap(path, np.int32, mode="r").reshape(-1, bins * pairs)


def _packed(pairs: Iterator[Pair], shape: BinShape) -> Iterator[list[int]]:
    """Yield the rows of each bin."""
    waiting = list(islice(pairs, WINDOW))
    while waiting:
        bin_, taken, left = Bin(shape), list[int](), list[Pair]()
        for pair in waiting:
            if len(taken) < shape.pairs and bin_.add(*pair[1:]):
                taken.append(pair[0])
            else:
                left.append(pair)
        if not taken:
            raise ValueError(f"a pair of {waiting[0][1:]} tokens does not fit into {shape}")
        yield taken
        waiting = left + list(islice(pairs, WINDOW - len(left)))


def _shuffled(folder: Path, lengths: Lengths, rows: int, seed: int, epochs: Iterable[int]) -> Iterator[Pair]:
    """Yield all pairs of one epoch after another."""
    for epoch in epochs:
        sort, salt, first = ExternalSort(folder / str(epoch), rows, ROW), _salt(seed, epoch), 0
        for piece in lengths:
            numbers = np.arange(first, first + len(piece))
            sort.add(key=_keys(numbers, salt), row=numbers, query=piece[:, 0], document=piece[:, 1])
            first += len(piece)
        for records in sort:
            yield from zip(*(records[name].tolist() for name in ("row", "query", "document")), strict=True)


def _keys(numbers: NDArray[np.integer], salt: np.uint64) -> Hashes:
    """Return a distinct random number for each number: the same in every NumPy release, unlike Generator.permutation's."""
    return mixed(numbers.astype(np.uint64) ^ salt)


def _salt(*parts: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:8], "big"))
