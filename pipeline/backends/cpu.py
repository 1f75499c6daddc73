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
        """In bf16 as a whole: autocast would turn every layer's activations into fp32 and back.

        Pooling and head stay fp32, see `Encoder.forward`.
        """
        if self.precision == "bf16":
            backbone = encoder.get_submodule("backbone").to(torch.bfloat16)
            if can_pack():
                pack_linears(backbone)
        return encoder


def open_device(precision: str, world: World, *, timeout_seconds: int) -> CpuDevice:
    """Join the gang with gloo."""
    # Denormals cost far more than they are worth here, and only some processors treat them alike.
    torch.set_flush_denormal(True)
    return CpuDevice(
        torch.device("cpu"), resolve_precision("cpu", precision), world, backend="gloo", timeout_seconds=timeout_seconds
    )
