"""Proof that two runs were fed the same batches bit for bit, whatever devices and however many ranks they had.

The digest of a step covers the global batch as the host has it before it is split among ranks and sent to devices: static
shape, which rows are padding, tokens and hashes of the others, in order. Masks, roles and weights follow from these. The
digests of all steps are chained, so the newest one stands for all data so far. The learning rate is left out: it is a
setting, and its last bit may depend on the host's mathematical library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def digest_batch(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 in hex of named arrays: names, types, shapes and values, little-endian, in the order given."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        values = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.data)
    return digest.hexdigest()


def chain(before: str, batch: str) -> str:
    """Digest of all batches so far.

    Args:
        before: of the batches before this one, empty at the beginning.
        batch: this batch's own.
    """
    return hashlib.sha256(f"{before}\n{batch}".encode()).hexdigest()
