"""What a training step costs a NeuronCore stays within bounds: the benchmark's figures, of an encoder with half the layers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.training.test_real_size import LOWERING_BYTES, require_memory

FIGURES = {
    "real": r"tokens without padding: ([\d.]+)%",
    "operations": r"operations over needed ones: ([\d.]+)",
    "graphs": r"different graphs: (\d+);",
    "scatters": r"scatters: (\d+) ",
    "powers": r"(\d+) of them powers",
    "bytes": r"bytes in collectives over 2 x gradients: ([\d.]+)",
}


@pytest.mark.long
def test_a_step_needs_little_more_than_its_tokens_do() -> None:
    require_memory(LOWERING_BYTES)
    command = [sys.executable, "tests/benchmarks/static_cost.py", "--layers", "12", "--pairs", "4000"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, check=False
    )
    assert result.returncode == 0, result.stderr
    found = {}
    for section in result.stdout.split("\n\n"):
        name = section.strip().partition(":")[0]
        values = {figure: re.search(pattern, section) for figure, pattern in FIGURES.items()}
        found[name] = {figure: float(value[1]) for figure, value in values.items() if value}
    plain, cached, shared, bf16 = (
        found[name] for name in ("plain", "cached", "cached, sharded", "cached, sharded, bf16 weights")
    )
    assert all(step["real"] >= 97 and step["powers"] == 0 for step in (plain, cached, shared, bf16))
    assert (plain["operations"] <= 1.06, cached["operations"] <= 1.40) == (True, True), found
    assert (plain["graphs"], cached["graphs"], shared["graphs"], bf16["graphs"]) == (2, 4, 4, 4)
    # Of word embeddings: one for each backward pass.
    assert (plain["scatters"], cached["scatters"]) == (1, 4)
    assert max(plain["bytes"], cached["bytes"], shared["bytes"]) <= 1.05
    assert bf16["bytes"] <= 0.55
    state = [float(size) for size in re.findall(r"([\d.]+) GB", result.stdout)]
    assert [size <= most for size, most in zip(state, (8.1, 4.3, 2.4), strict=True)] == [True] * 3, state
