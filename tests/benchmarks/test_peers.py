"""What the comparison with other libraries measures on a processor without bf16 instructions."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.benchmarks.peers import __main__ as peers


def test_ways_that_the_processor_emulates_are_skipped_by_name() -> None:
    every = ["embed", "train", "input"]
    names = ["embed: {} bf16", "embed: {} openvino-bf16", "train: {} bf16"]
    assert peers.skipped(every, "fp32") == [name.format("sentence-transformers") for name in names]
    assert peers.skipped(every, "bf16") == []
    assert peers.computed(peers.EMBED_WAYS, "fp32") == ["default", "onnx", "openvino"]
    assert peers.computed(peers.EMBED_WAYS, "bf16") == list(peers.EMBED_WAYS)


def test_the_peak_is_measured_in_what_the_processor_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    types: list[torch.dtype] = []
    product = torch.Tensor.__matmul__

    def recorded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        types.append(left.dtype)
        return product(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", recorded)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        monkeypatch.setattr(peers, "resolve_precision", lambda kind, wanted, precision=precision: precision)
        types.clear()
        assert peers.peak(size=8, times=1) > 0
        assert set(types) == {dtype}


def test_the_table_says_what_is_missing() -> None:
    about: dict[str, Any] = {"processor": "P", "cores": 2, "bf16": ["avx512_bf16"], "peak_gflops": 90.0, "torch": "2.9"}
    text = {}
    for precision in ("fp32", "bf16"):
        screen = Console(file=io.StringIO(), width=peers.WIDTH)
        found = {"machine": {**about, "precision": precision}, "skipped": peers.skipped(["train"], precision), "rows": []}
        screen.print(peers.table(found))
        text[precision] = " ".join(screen.file.getvalue().split())  # type: ignore[attr-defined]
    assert "P, 2 cores, bf16 no faster, 90 GFLOP/s per core in fp32, torch 2.9" in text["fp32"]
    assert "train: sentence-transformers bf16: skipped, the processor is no faster in bf16" in text["fp32"]
    assert "P, 2 cores, avx512_bf16, 90 GFLOP/s per core in bf16, torch 2.9" in text["bf16"]
    assert "skipped" not in text["bf16"]
