"""The documents to embed, as the ingested shards hold them: part by part with their tokens, or the text of one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.ingested import Hashes

Mask = NDArray[np.bool_]


def winners(keys: Hashes, documents: Hashes) -> tuple[Mask, Mask]:
    """Return which rows are the first of their key, and which have another document than the first of their key.

    Rows that repeat a key with the same document, as several queries for one document do, are neither.
    """
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]]) != 0)
    leaders = np.repeat(order[begins], np.diff(begins, append=len(order)))
    first, conflicts = np.empty(len(keys), np.bool_), np.empty(len(keys), np.bool_)
    first[order] = order == leaders
    conflicts[order] = documents[order] != documents[leaders]
    return first, conflicts
