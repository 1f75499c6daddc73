"""Resource exhaustion: a full disk or no memory left, recognized by errno, a library's text or the kernel's count.

Libraries hide it well: safetensors and tokenizers put the system's text into errors of their own, torch's allocator raises a
RuntimeError, and the kernel simply kills a process.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.errors import Defect, Transient, TrnpipeError, causes, first_line

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
FULL_DISK_TEXT = re.compile("|".join(re.escape(os.strerror(number)) for number in sorted(FULL_DISK)))
NO_MEMORY_TEXT = re.compile(rf"{re.escape(os.strerror(errno.ENOMEM))}|can't allocate memory", re.IGNORECASE)

KILL_COUNTS = tuple(map(Path, ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")))
"""A container's own (cgroup v2, v1), and the whole host's."""

MEMORY_REMEDY = (
    "use fewer ranks per node (device.ranks_per_node), less at once (train.micro_batches, train.batch_size, "
    "embed.tokens_per_batch) or smaller parts (embed.rows_per_part), or a host with more memory"
)


def exhaustion(error: BaseException) -> TrnpipeError | None:
    """Return the exception as our own type if the disk or the host's memory is its cause, else None."""
    for cause in causes(error):
        if _is_full_disk(cause):
            return Transient(
                "the disk is full",
                value=[first_line(cause), *_free_space(cause)],
                rule="scratch space holds a model, its checkpoint on the way out, and the parts or rows a rank works on",
                remedy="use a larger root volume, or free space on it; the run is retried on any free host",
            )
        if isinstance(cause, MemoryError) or (isinstance(cause, (OSError, RuntimeError)) and NO_MEMORY_TEXT.search(str(cause))):
            return Defect("out of host memory", value=first_line(cause), remedy=MEMORY_REMEDY)
    return None


def kernel_kills() -> int:
    """Return how many processes the kernel has killed out of memory, as far as this container can see; 0 where it cannot."""
    total = 0
    for path in KILL_COUNTS:
        with suppress(OSError):
            total += sum(map(int, re.findall(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)))
    return total


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL_DISK
    return isinstance(error, Exception) and FULL_DISK_TEXT.search(str(error)) is not None


def _free_space(error: BaseException) -> Iterator[str]:
    """Yield the free space of the file systems that the error may concern."""
    name = getattr(error, "filename", None)
    for folder in {Path(name).parent if isinstance(name, str) else None, Path(tempfile.gettempdir())} - {None}:
        with suppress(OSError):
            usage = shutil.disk_usage(str(folder))
            yield f"{folder}: {usage.free / 1e6:,.0f} of {usage.total / 1e6:,.0f} MB are free"
