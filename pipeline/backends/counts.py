"""The counters of a device: graphs that it compiled, and the time its consumers waited for data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.backends.device import Batch


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """The graphs that this process has compiled so far; none on eager kinds.

    Attributes:
        compiled: graphs that this process met for the first time (UncachedCompile), also where a stored form was loaded.
        fallbacks: operation -> how often it ran on the host because the device has none (`aten::` counters).
    """

    compiled: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Waits:
    """The seconds that consumers have waited for the next item of `on`."""

    seconds: float = 0.0

    def on(self, items: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the items and count the wait for each."""
        iterator = iter(items)
        while True:
            begun = time.monotonic()
            item = next(iterator, None)
            self.seconds += time.monotonic() - begun
            if item is None:
                return
            yield item
