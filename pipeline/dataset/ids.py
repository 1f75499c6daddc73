"""A digest that proves a set of ids complete without the ids, and that parts can add up; and a search for repeated ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MODULUS = 1 << 128
LOW_32 = (1 << 32) - 1


@dataclass(slots=True)
class IdDigest:
    """Count and sum of the ids' 64-bit BLAKE2b hashes: equal for equal multisets of ids, in any order.

    Written as `COUNT:SUM` with the sum as 32 hex digits.
    """

    count: int = 0
    total: int = 0

    def add(self, identifier: str) -> int:
        """Add one id; return its hash."""
        value = id_hash(identifier)
        self.count += 1
        self.total = (self.total + value) % MODULUS
        return value

    def merge(self, other: IdDigest) -> None:
        """Add all ids of another digest."""
        self.count += other.count
        self.total = (self.total + other.total) % MODULUS

    def __str__(self) -> str:
        return f"{self.count}:{self.total:032x}"

    @classmethod
    def of(cls, hashes: NDArray[np.uint64]) -> IdDigest:
        """Return the digest of the ids with these hashes."""
        # In halves, whose sums do not overflow.
        low, high = (int(half.sum(dtype=np.uint64)) for half in (hashes & np.uint64(LOW_32), hashes >> np.uint64(32)))
        return cls(len(hashes), (low + (high << 32)) % MODULUS)

    @classmethod
    def parse(cls, text: str) -> IdDigest:
        """Return the digest that `str` wrote.

        Raises:
            ValueError: the text is not one.
        """
        count, _, total = text.partition(":")
        return cls(int(count), int(total, 16))


def id_hash(identifier: str) -> int:
    """Return the first 8 bytes of the id's BLAKE2b hash as an integer."""
    return int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest(), "big")


def repeated(hashes: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return the values that occur more than once in all arrays together, ascending and each once.

    Needs 16 bytes a value: the arrays and one sorted copy. Two different ids share a 64-bit hash about once in 2^65 / n^2
    corpora of n ids, so callers confirm the result on the ids themselves.
    """
    if not hashes:
        return np.empty(0, np.uint64)
    ordered = np.concatenate(hashes)
    ordered.sort()
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
