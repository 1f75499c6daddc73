"""Read many small ranges of objects at a time, in bounded memory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import store

R = TypeVar("R")

READERS = 16
"""Ranges that are read at a time: on S3, each waits for tens of milliseconds."""


M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


def return_memory() -> None:
    """Let this process return large buffers to the system as soon as they are freed.

    Arrow's own allocator keeps what ended threads had, and glibc's raises the size from which on it returns them, up to 32 MiB:
    plan took 900 MiB instead of 260. For stages that compute with such buffers again and again, this is slower.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)


def in_threads(read: Callable[[Any], R], items: Sequence[Any]) -> Iterator[R]:
    """Yield what `read` returns for each item, in their order, some of them ahead."""
    with ThreadPoolExecutor(READERS, "read") as pool:
        for start in range(0, len(items), 2 * READERS):
            yield from pool.map(read, items[start : start + 2 * READERS])


def read_records(uri: str, kind: np.dtype[Any], start: int, stop: int, records: int, cache: Path | None = None) -> NDArray[Any]:
    """Return the records [start, stop) of a file that has nothing else.

    Args:
        records: all that the file has.
        cache: local folder, where a copy of the object is kept: however many ranges of it are read, it is fetched once.

    Raises:
        MissingInput, StorageRefused, Transient.
        BadData: the file has another size.
    """
    if cache is not None and store.is_s3(uri) and start < stop:
        path = cache / hashlib.sha256(uri.encode()).hexdigest()
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            store.download(uri, path, size=kind.itemsize * records)
        uri = str(path)
    return np.frombuffer(store.read_range(uri, kind.itemsize * start, kind.itemsize * stop), kind)
