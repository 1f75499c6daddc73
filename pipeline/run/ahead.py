"""Make items before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """Iterate in a background thread, `depth` items ahead; its exceptions surface here."""
    iterator = iter(items)
    pool = ThreadPoolExecutor(1, "ahead")
    ready = deque(pool.submit(next, iterator, None) for _ in range(depth))
    try:
        while (item := ready.popleft().result()) is not None:
            ready.append(pool.submit(next, iterator, None))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
