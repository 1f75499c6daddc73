"""Graceful shutdown: SIGTERM sets a flag that long work reads between two steps, before it saves its progress and ends.

Batch sends SIGTERM when a job times out, an execution is stopped or a host is reclaimed. Without a handler the process would end
at once, and lose everything since its last checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class ShutdownRequest:
    """Whether this process received SIGTERM."""

    received: bool = False


@contextmanager
def graceful_shutdown() -> Iterator[ShutdownRequest]:
    """Record SIGTERM within this context and do nothing else; its sender kills a process that takes too long to end.

    In threads other than the main one it does nothing, because Python sets no signal handlers there.
    """
    request = ShutdownRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        request.received = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
