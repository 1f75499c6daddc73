"""A digest that proves a set of ids complete without the ids, and that parts can add up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MODULUS = 1 << 128


@dataclass(frozen=True, slots=True)
class IdDigest:
    """Count and sum of the ids' 64-bit BLAKE2b hashes: equal for equal multisets of ids, in any order.

    Written as `COUNT:SUM` with the sum as 32 hex digits.
    """

    count: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.count}:{self.total:032x}"

    @classmethod
    def of(cls, hashes: NDArray[np.uint64]) -> IdDigest:
        """Return the digest of the ids with these hashes."""
        # In halves, whose sums do not overflow.
        low, high = (int(half.sum(dtype=np.uint64)) for half in (hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32)))
        return cls(len(hashes), (low + (high << 32)) % MODULUS)

    @classmethod
    def joined(cls, digests: Iterable[IdDigest]) -> IdDigest:
        """Return the digest of the ids of all digests."""
        together = list(digests)
        return cls(sum(one.count for one in together), sum(one.total for one in together) % MODULUS)

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


def id_hashes(ids: Iterable[str]) -> NDArray[np.uint64]:
    """Return the hash of each id."""
    return np.fromiter(map(id_hash, ids), np.uint64)
