"""Stands for torch-neuronx where there is no Trainium: what AWS's documents say its functions do, on the host's processor.

Documents, of AWS Neuron SDK 2.29.1: "PyTorch NeuronX Tracing API" (`trace`: an executable of one shape that is saved and loaded
like any ScriptModule; with `inline_weights_to_neff=False` its weights stay beside it, and it cannot run before
`move_trace_to_device`) and "Weight Replacement API" (`replace_weights`, by the names of the traced module's state). What
happens when torch-xla is loaded beside it is in `xla`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["move_trace_to_device", "replace_weights", "trace"]


class _Executable(nn.Module):
    """A traced module of three inputs of one shape, with what it was compiled with: readable in a saved file, too."""

    def __init__(self, traced: torch.jit.ScriptModule, shape: list[int], compiler_args: list[str], split: bool) -> None:
        super().__init__()
        self.traced = traced
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


def trace(
    func: nn.Module,
    example_inputs: tuple[Tensor, Tensor, Tensor],
    *,
    compiler_args: Sequence[str] = (),
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> torch.jit.ScriptModule:
    if not cpu_backend:
        raise RuntimeError("no NeuronCore: only with cpu_backend is something compiled here")
    if not any(argument.startswith("--target") for argument in compiler_args):
        raise RuntimeError("cpu_backend needs --target: there is no host to ask")
    traced = torch.jit.trace(func, example_inputs)
    shape, split = list(example_inputs[0].shape), not inline_weights_to_neff
    return torch.jit.script(_Executable(traced, shape, list(compiler_args), split))


def replace_weights(neuron_model: torch.jit.ScriptModule, weights: Mapping[str, Tensor] | nn.Module) -> None:
    if not neuron_model.split:
        raise RuntimeError("the weights are in the executable")
    given = weights.state_dict() if isinstance(weights, nn.Module) else weights
    with torch.no_grad():
        # Buffers are there too, whether a checkpoint holds them or not.
        for name, tensor in neuron_model.traced.state_dict().items():
            tensor.copy_(given[name])


def move_trace_to_device(trace: torch.jit.ScriptModule, device_id: int) -> None:
    if device_id != 0:
        raise RuntimeError(f"this process holds one NeuronCore, there is no number {device_id}")
    trace.on_core = True
