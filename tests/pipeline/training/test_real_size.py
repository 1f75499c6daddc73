"""A model of real size, 303M parameters: two steps, and the second one again from a checkpoint, in the memory foretold; and what
64 ranks would compile for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.estimate import memory

NEEDED_BYTES = 9 << 30
LOWERING_BYTES = 12 << 30

# As the supervisor starts a rank on processors.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}


def real_size(argument: str, **environment: str) -> dict[str, Any]:
    """What the program of that name finds."""
    command = [sys.executable, "-m", "tests.pipeline.training.real_size", argument]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def require_memory(needed: int) -> None:
    if not Path("/proc/self/status").is_file() or memory.this_host_bytes() < needed:
        pytest.skip(f"needs Linux and {needed >> 30} GB of memory")


@pytest.mark.long
def test_trains_and_resumes_in_the_memory_that_was_foretold(tmp_path: Path) -> None:
    require_memory(NEEDED_BYTES)
    try:
        found = real_size(str(tmp_path / "real"), USE_TORCH_XLA="0", **ALLOCATOR)
    finally:
        shutil.rmtree(tmp_path / "real", ignore_errors=True)
    assert 300e6 < found["parameters"] < 310e6
    assert found["resumed_from"] == 1
    assert found["whole"][0] == 2
    assert found["resumed"] == found["whole"]
    assert found["base"] == pytest.approx(memory.PROCESS_BYTES + memory.LIBRARY_BYTES, rel=0.3)
    assert found["expected_peak"] == pytest.approx(found["peak"], rel=0.3)
    assert found["peak"] < NEEDED_BYTES


@pytest.mark.long
def test_64_ranks_would_compile_the_same() -> None:
    require_memory(LOWERING_BYTES)
    found = real_size("--lower")
    first, last = found["ranks"]["0"], found["ranks"]["63"]
    assert first == last
    # Two micro-batches: the embeddings of each, the loss over all, the backward pass of each, the reduction and the update.
    embed, same_embed, loss, backward, same_backward, update = first
    assert (embed, backward) == (same_embed, same_backward)
    assert embed["collectives"] == backward["collectives"] == {}
    assert set(loss["collectives"]) == {"all-gather x64", "reduce-scatter x64"}
    # 24 layers of 303M parameters: their gradients, 1.2 GB, are reduced in pieces of 50 MiB.
    assert set(update["collectives"]) == {"all-reduce x64"}
    assert 24 <= update["collectives"]["all-reduce x64"] <= 30
    # Queries and documents pass together; each alone, they took more than 20,000.
    assert 10_000 < backward["operations"] < 20_000
    # Of each of 390 tensors it cuts and shapes pieces; arithmetic is that of whole vectors. One by one, they took 20,000.
    assert update["operations"] < 8_000
    assert found["peak"] < LOWERING_BYTES
