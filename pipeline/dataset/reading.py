"""Read many small ranges of objects at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

READERS = 16
"""Ranges that are read at a time: on S3, each waits for tens of milliseconds."""


def in_threads(read: Callable[[Any], R], items: Sequence[Any]) -> Iterator[R]:
    """Yield what `read` returns for each item, in their order, some of them ahead."""
    with ThreadPoolExecutor(READERS, "read") as pool:
        for start in range(0, len(items), 2 * READERS):
            yield from pool.map(read, items[start : start + 2 * READERS])
