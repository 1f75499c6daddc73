"""A model of real size, 303M parameters: two steps, and the second one again from a checkpoint, in the memory foretold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.model import memory

NEEDED_BYTES = 8 << 30


@pytest.mark.slow
def test_trains_and_resumes_in_the_memory_that_was_foretold(tmp_path: Path) -> None:
    if not Path("/proc/self/status").is_file() or memory.this_host_bytes() < NEEDED_BYTES:
        pytest.skip("needs Linux and 8 GB of memory")
    command = [sys.executable, "-m", "tests.pipeline.training.real_size", str(tmp_path / "real")]
    # As the supervisor starts a rank on processors.
    allocator = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
    environment = {**os.environ, "USE_TORCH_XLA": "0", **allocator}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    finally:
        shutil.rmtree(tmp_path / "real", ignore_errors=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert 300e6 < found["parameters"] < 310e6
    assert found["resumed_from"] == 1
    assert found["whole"][0] == 2
    assert found["resumed"] == found["whole"]
    assert found["base"] == pytest.approx(sum(memory.PROCESS_BYTES["eager"]), rel=0.3)
    assert found["expected_peak"] == pytest.approx(found["peak"], rel=0.3)
    assert found["peak"] < NEEDED_BYTES
