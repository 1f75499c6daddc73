"""SIGTERM as something that long work looks at between two steps: a host is taken away, a job times out, an execution is stopped.

Without it the process would be gone at once, and with it all that it has done since it last wrote something down.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interruption:
    """Whether this process received SIGTERM."""

    asked: bool = False


@contextmanager
def noticed() -> Iterator[Interruption]:
    """Within this context SIGTERM is noted and nothing else; its sender kills the process if it takes too long to end.

    Does nothing in other threads than the main one, where Python lets no handler be set.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def notice(_number: int, _frame: FrameType | None) -> None:
        interruption.asked = True

    before = signal.signal(signal.SIGTERM, notice)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGTERM, before)
