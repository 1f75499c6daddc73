"""Sort more records by a 64-bit key than memory holds: in partitions of the key space on disk, one in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[Any]

PARTITION_ROWS = 1 << 20
"""Records of a partition, about: keys are hashes, so that all partitions have much the same."""


class ExternalSort:
    """Takes records piece by piece, and yields them in the order of their keys. The order depends on the records alone.

    Args:
        folder: for the partitions; it must not exist, and is gone after the iteration.
        rows: expected records.
        kind: a structured type with the field `key` (uint64), whose values are distinct or equal in all fields.
    """

    def __init__(self, folder: Path, rows: int, kind: np.dtype[Any]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._kind = kind
        self._bits = (rows // PARTITION_ROWS).bit_length()

    def add(self, **fields: Any) -> None:
        """Add records: one array for each field, all of one length."""
        records = np.empty(len(fields["key"]), self._kind)
        for name, values in fields.items():
            records[name] = values
        # A shift by 64 bits is undefined.
        owners = (records["key"] >> np.uint64(1)) >> np.uint64(63 - self._bits)
        records = records[np.argsort(owners, kind="stable")]
        counts = np.bincount(owners.astype(np.int64), minlength=1 << self._bits)
        for owner, piece in enumerate(np.split(records, np.cumsum(counts)[:-1])):
            if len(piece):
                with open(self._folder / str(owner), "ab") as stream:
                    # Not `tofile`, which loses the last bytes silently where the disk is full (numpy 2).
                    stream.write(piece.tobytes())

    def __iter__(self) -> Iterator[Records]:
        for owner in range(1 << self._bits):
            path = self._folder / str(owner)
            if path.exists():
                records = np.fromfile(path, self._kind)
                yield records[np.argsort(records["key"], kind="stable")]
        shutil.rmtree(self._folder)
