"""The `cpu` kind: eager torch on host cores, gloo between ranks, bf16 autocast where the processor has the instructions."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from pipeline.backends.device import EncodeFunction, resolve_precision
from pipeline.backends.eager import EagerDevice
from pipeline.backends.packed_linear import can_pack, pack_linears
from pipeline.run.world import World


class CpuDevice(EagerDevice):
    kind = "cpu"

    def for_inference(self, encoder: nn.Module, traces: Path | None) -> EncodeFunction:  # noqa: ARG002 - needs none
        if self.precision == "bf16" and can_pack():
            pack_linears(encoder.get_submodule("backbone"))
        return encoder


def open_device(precision: str, world: World, *, timeout_seconds: int) -> CpuDevice:
    """Join the gang with gloo."""
    # Denormals cost far more than they are worth here, and only some processors treat them alike.
    torch.set_flush_denormal(True)
    return CpuDevice(
        torch.device("cpu"), resolve_precision("cpu", precision), world, backend="gloo", timeout_seconds=timeout_seconds
    )
