"""Facts about this host: its processor, its cores, the versions of installed packages."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path

REPORTED_PACKAGES = (
    *("trnpipe", "torch", "torch-xla", "torch-neuronx", "neuronx-cc"),
    *("transformers", "tokenizers", "pyarrow", "numpy"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of those of REPORTED_PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def processor() -> str:
    """Return the processor's name, as Linux knows it, else the architecture."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.machine()


def available_cores() -> int:
    """Return the number of cores this process may run on (macOS has no affinity: all of them)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
