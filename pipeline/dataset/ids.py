"""A digest that proves a set of ids complete without the ids, and that parts can add up."""

from __future__ import annotations

import hashlib
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
