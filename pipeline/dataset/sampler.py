"""The order of training pairs: plan packs them into bins and writes the bins of every step, and every rank takes its own.

Each epoch's pairs are shuffled. A bin is a few rows of one length, which the texts of its pairs share (Encoder.packed); the next
bin takes the pairs that have waited longest and still fit, looking at some that wait behind them (first fit in a window), so what
does not fit comes first in the bin after it. So every pair comes exactly once an epoch, rows are nearly full whatever lengths
texts have, and the order depends on the seed, the lengths and the bins alone, not on the number of ranks that share a step's
bins. Shuffling is sorting by a hash of the row: it needs memory for a part of the rows only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.external_sort import ExternalSort
from pipeline.dataset.ingested import Hashes, mixed
from pipeline.errors import BadData
from pipeline.packing import BinShape, texts_per_row

MASKED = -1
"""Row number of a filler: it has no text and must not count in the loss."""

WINDOW = 64
"""Pairs that wait for room. With 64, rows of 256 tokens are 98 to 99 % full; more gain a few tenths of a percent, and time."""

LISTED_PAIRS = 1 << 14
"""Pairs that are Python's integers at a time, which take ten times as much memory."""

Lengths = Iterable[NDArray[np.int32]]
"""Tokens of the query, the document and the negatives of consecutive rows, (n, texts), 0 for none, in pieces of any size; read
several times."""


class Strata(NamedTuple):
    """Strata of rows; the pairs of a step are of one stratum.

    Attributes:
        numbers: the stratum of each row, from 0, in the same pieces as the lengths.
        rows: number of rows of each stratum.
        weights: each stratum's share of the steps is its share of these; None: every pair comes once an epoch.
    """

    numbers: Iterable[NDArray[np.int32]]
    rows: Sequence[int]
    weights: Sequence[float] | None = None


Numbers = NDArray[np.integer]
Pair = tuple[int, list[int]]
"""A row, and the tokens of its texts."""

Place = tuple[int, int, int]
"""Of a text: the row, the first token in it, and the number of the text in it, from 0."""


class Bin:
    """The rows of a bin while pairs are placed in it; the same pairs in the same order always get the same places."""

    def __init__(self, shape: BinShape) -> None:
        self._length = shape.length
        self._left = [shape.length] * shape.rows
        self._texts = [0] * shape.rows

    def add(self, *lengths: int) -> list[Place] | None:
        """Place the texts of a pair, query first, of so many tokens each; None: there is no room."""
        before, places = (self._left.copy(), self._texts.copy()), list[Place]()
        # The query, which is short, last.
        for tokens in (*lengths[1:], lengths[0]):
            if (place := self._place(tokens)) is None:
                self._left, self._texts = before
                return None
            places.append(place)
        return [places[-1], *places[:-1]]

    def _place(self, tokens: int) -> Place | None:
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


def write_order(
    path: Path,
    lengths: Lengths,
    rows: int,
    shape: BinShape,
    bins: int,
    seed: int,
    *,
    limit: tuple[str, int],
    strata: Strata | None = None,
) -> list[int]:
    """Write the rows of every step, (steps, bins * shape.pairs) int32, MASKED behind the pairs of each bin.

    Needs memory for a million rows; disk for the rows in addition to the file.

    Args:
        rows: number of pairs.
        bins: of a step, all ranks together.
        limit: `epochs` or `steps`, and how many. With weights, epochs are as many steps as they have without.
        strata: None: all rows are one.

    Returns:
        The steps of each stratum.

    Raises:
        BadData: no pairs.
        ValueError: one that a bin has no room for.
    """
    if not rows:
        raise BadData(
            "there is no row to train on",
            rule="rows with the query, document or group of a test file (data.holdout, data.tasks.NAME.holdout) are held out",
            remedy="add rows that the test files do not have",
        )
    (kind, most), sizes = limit, [rows] if strata is None else strata.rows
    with TemporaryDirectory(dir=path.parent) as name:
        together = Path(name) / "steps"

        def write(epochs: Iterable[int], steps: Sequence[int | None]) -> list[int]:
            counts = []
            with open(together, "wb") as stream:
                for stratum, wanted in enumerate(steps):
                    own, folder, written = partial(_rows_of, lengths, strata, stratum), Path(name) / str(stratum), 0
                    packed = _packed(_shuffled(folder, own, sizes[stratum], 1 + shape.documents, seed, epochs), shape)
                    while written != wanted and (chosen := list(islice(packed, bins))):
                        step = np.full((bins, shape.pairs), MASKED, np.int32)
                        for number, pairs in enumerate(chosen):
                            step[number, : len(pairs)] = pairs
                        stream.write(step.tobytes())
                        written += 1
                    counts.append(written)
            return counts

        counts = write(range(most), [None] * len(sizes)) if kind == "epochs" else []
        if kind == "steps" or (strata and strata.weights):
            counts = write(count(), _shares(sum(counts) or most, (strata and strata.weights) or sizes))
        # Where a step's middle is in all of its stratum: so the steps of any stratum, large or small, are evenly spread.
        middles = np.concatenate([(np.arange(steps) + 0.5) / steps for steps in counts if steps])
        found = read_order(together, bins, shape.pairs)
        with open(path, "wb") as stream:
            for number in np.argsort(middles, kind="stable").tolist():
                stream.write(found[number].tobytes())
    return counts


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide steps in the ratio of weights: the largest remainders are rounded up."""
    exact = total * np.array(weights, np.float64) / sum(weights)
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    return [int(share) for share in shares]


def read_order(path: Path, bins: int, pairs: int) -> NDArray[np.int32]:
    """Map the file that `write_order` left: (steps, bins * pairs)."""
    return np.memmap(path, np.int32, mode="r").reshape(-1, bins * pairs)


def _packed(pairs: Iterator[Pair], shape: BinShape) -> Iterator[list[int]]:
    """Yield the rows of each bin."""
    waiting = list(islice(pairs, WINDOW))
    while waiting:
        bin_, taken, left = Bin(shape), list[int](), list[Pair]()
        for pair in waiting:
            if len(taken) < shape.pairs and bin_.add(*filter(None, pair[1])):
                taken.append(pair[0])
            else:
                left.append(pair)
        if not taken:
            raise ValueError(f"a pair of {tuple(waiting[0][1])} tokens does not fit into {shape}")
        yield taken
        waiting = left + list(islice(pairs, WINDOW - len(left)))


def _rows_of(lengths: Lengths, strata: Strata | None, stratum: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the numbers (n,) and the lengths (n, texts) of a stratum's rows, in pieces."""
    first = 0
    for piece, numbers in zip(lengths, repeat(stratum) if strata is None else strata.numbers, strict=False):
        own = np.flatnonzero(np.broadcast_to(numbers == stratum, len(piece)))
        yield first + own, piece[own]
        first += len(piece)


def _shuffled(
    folder: Path, pieces: Callable[[], Iterable[tuple[Numbers, Numbers]]], rows: int, texts: int, seed: int, epochs: Iterable[int]
) -> Iterator[Pair]:
    """Yield all pairs of one epoch after another."""
    kind = np.dtype([("key", np.uint64), ("row", np.int32), ("tokens", np.int32, (texts,))])
    for epoch in epochs:
        sort = ExternalSort(folder / str(epoch), rows, kind)
        salt = np.uint64(int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "big"))
        for numbers, tokens in pieces():
            sort.add(key=_keys(numbers, salt), row=numbers, tokens=tokens)
        for records in sort:
            for start in range(0, len(records), LISTED_PAIRS):
                some = records[start : start + LISTED_PAIRS]
                yield from zip(some["row"].tolist(), some["tokens"].tolist(), strict=True)


def _keys(numbers: Numbers, salt: np.uint64) -> Hashes:
    """Return a distinct random number for each number: the same in every NumPy release, unlike Generator.permutation's."""
    return mixed(numbers.astype(np.uint64) ^ salt)
