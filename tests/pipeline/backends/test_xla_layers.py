"""Layers as the kind `xla` computes them, against torch's own, in a process of its own (torch-xla)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gangs import run_gang

PROGRAM = """
import copy, json, sys
import torch
from torch import nn
from pipeline.backends.device import open_device
from pipeline.run.world import World
import torch_xla

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(24, 24), nn.LayerNorm(24, eps=1e-3)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2.0)
            self.norm.bias.uniform_(-1.0, 1.0)
    def forward(self, x):
        return self.norm(x + self.inner(x))

torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(24, 8, bias=False))
x, toward = torch.randn(5, 7, 24), torch.randn(5, 7, 8)
device = open_device("xla", sys.argv[3], World())
placed = device.place(copy.deepcopy(model))
model.double()(x.double()).backward(toward.double())
inputs = device.from_host({"x": x, "toward": toward})
placed(inputs["x"]).backward(inputs["toward"])
hlo = torch_xla._XLAC._get_xla_tensors_hlo([parameter.grad for parameter in placed.parameters()])
found = device.to_host({name: parameter.grad for name, parameter in placed.named_parameters()})
expected = {name: parameter.grad for name, parameter in model.named_parameters()}
differences = {name: float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected}
print(json.dumps({"differences": differences, "sums": hlo.count(" reduce("), "barriers": hlo.count("opt-barrier(")}))
"""


ACTIVATION = """
import json
import torch
from transformers.activations import ACT2FN
from pipeline.backends.device import open_device
from pipeline.run.world import World

x = torch.linspace(-4, 4, 4001).to(torch.bfloat16)
device = open_device("xla", "bf16", World())
gelu = device.place(ACT2FN["gelu"])
found = device.to_host({"y": gelu(device.from_host({"x": x})["x"])})["y"]
exact = torch.nn.functional.gelu(x.double())
wrong = lambda y: float((y.double() - exact).abs().mean())
print(json.dumps({"dtype": str(found.dtype), "error": wrong(found), "torch": wrong(torch.nn.functional.gelu(x))}))
"""


def answer(program: str, *arguments: str) -> dict[str, Any]:
    [said] = run_gang(program, 1, *arguments)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.slow
def test_gradients_are_those_of_torch() -> None:
    found = answer(PROGRAM, "fp32")
    assert set(found["differences"]) == {
        *(f"{block}.{layer}.{name}" for block in (0, 1) for layer in ("inner", "norm") for name in ("weight", "bias")),
        "2.weight",
    }
    assert max(found["differences"].values()) < 2e-6, found
    # All sums over rows and columns are products, and every LayerNorm keeps what others need too.
    assert found["sums"] == 0
    assert found["barriers"] == 2 * 4


@pytest.mark.long
def test_other_precisions_keep_the_layers_as_they_are() -> None:
    assert answer(PROGRAM, "bf16")["barriers"] == 0


@pytest.mark.long
def test_bf16_activations_are_rounded_once() -> None:
    found = answer(ACTIVATION)
    assert found["dtype"] == "torch.bfloat16"
    assert found["error"] <= 1.01 * found["torch"]
