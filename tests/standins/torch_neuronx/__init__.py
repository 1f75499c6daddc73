"""Stands for torch-neuronx where there is no Trainium: what AWS's documents say its functions do, on the host's processor.

Documents, of AWS Neuron SDK 2.29.1: "PyTorch NeuronX Tracing API" (`trace`: an executable of one shape that is saved and loaded
like any ScriptModule; with `inline_weights_to_neff=False` its weights stay beside it, and it cannot run before
`move_trace_to_device`) and "Weight Replacement API" (`replace_weights` takes a model or its state_dict; buffers outside it stay
in the executable). Where a process sees several cores, executables go to them in turn, while `move_trace_to_device` and inputs
use the first (github.com/huggingface/optimum-neuron/pull/725), so it is refused here. What happens when torch-xla is loaded
beside it is in `xla`.

Variables: STANDIN_UNREPLACED: `replace_weights` leaves names that contain it as they are and says nothing. STANDIN_NO_DEVICE: the
host has none, so `trace` needs to be told the platform as well (github.com/huggingface/optimum-neuron/pull/961), and nothing
moves to a core. STANDIN_NO_TRACE: `trace` fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["move_trace_to_device", "replace_weights", "trace"]


class _Executable(nn.Module):
    """A traced module of three inputs of one shape, with what it was compiled with: readable in a saved file, too."""

    def __init__(
        self, traced: torch.jit.ScriptModule, names: list[str], shape: list[int], compiler_args: list[str], split: bool
    ) -> None:
        super().__init__()
        self.traced = traced
        self.names = names
        self.shape = shape
        self.compiler_args = compiler_args
        self.split = split
        self.on_core = not split

    def forward(self, tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        if not self.on_core:
            raise RuntimeError("the weights are on no NeuronCore")
        for given in (tokens, segments, positions):
            if list(given.shape) != self.shape:
                raise RuntimeError("the executable was compiled for another shape")
        return self.traced(tokens, segments, positions)


@torch.jit.script
def _of_shape(given: Tensor, shape: list[int]) -> Tensor:
    if list(given.shape) != shape:
        raise RuntimeError("the executable was compiled for another shape")
    return given


def trace(
    func: nn.Module | Callable[..., Tensor],
    example_inputs: tuple[Tensor, ...],
    *,
    compiler_args: Sequence[str] = (),
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> torch.jit.ScriptModule:
    if not cpu_backend:
        raise RuntimeError("no NeuronCore: only with cpu_backend is something compiled here")
    if not any(argument.startswith("--target") for argument in compiler_args):
        raise RuntimeError("cpu_backend needs --target: there is no host to ask")
    if "STANDIN_NO_DEVICE" in os.environ and "NEURON_PLATFORM_TARGET_OVERRIDE" not in os.environ:
        raise RuntimeError("If you want to compile on CPU, please supply compiler argument target")
    if "STANDIN_NO_TRACE" in os.environ:
        raise RuntimeError("nothing is to be traced here")
    print("Compiler status PASS", file=sys.stderr)
    if not isinstance(func, nn.Module):
        shapes = [list(example.shape) for example in example_inputs]
        return torch.jit.trace(lambda *inputs: func(*map(_of_shape, inputs, shapes)), example_inputs)
    traced = torch.jit.trace(func, example_inputs)
    shape, split = list(example_inputs[0].shape), not inline_weights_to_neff
    return torch.jit.script(_Executable(traced, list(func.state_dict()), shape, list(compiler_args), split))


def replace_weights(neuron_model: torch.jit.ScriptModule, weights: Mapping[str, Tensor] | nn.Module) -> None:
    if not neuron_model.split:
        raise RuntimeError("the weights are in the executable")
    given = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if set(given) != set(neuron_model.names):
        raise KeyError(f"not the model's state_dict: {sorted(set(given) ^ set(neuron_model.names))}")
    kept = os.environ.get("STANDIN_UNREPLACED")
    held = neuron_model.traced.state_dict()
    with torch.no_grad():
        for name, tensor in given.items():
            if not (kept and kept in name):
                held[name].copy_(tensor)


def move_trace_to_device(trace: torch.jit.ScriptModule, device_id: int) -> None:
    visible = os.environ.get("NEURON_RT_VISIBLE_CORES", "0-31")
    if "STANDIN_NO_DEVICE" in os.environ:
        raise RuntimeError("no NeuronCore")
    if device_id != 0 or not visible.isdigit():
        raise RuntimeError(f"tensors allocated on vnc {device_id} must be allocated on the executable's: visible cores {visible}")
    trace.on_core = True
