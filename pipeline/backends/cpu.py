"""The `cpu` kind: eager torch on host cores, gloo between ranks, bf16 autocast where the processor has the instructions."""

from __future__ import annotations

import torch

from pipeline.backends.device import resolve_precision
from pipeline.backends.eager import EagerDevice
from pipeline.run.world import World


class CpuDevice(EagerDevice):
    kind = "cpu"


def open_device(precision: str, world: World, *, timeout_seconds: int) -> CpuDevice:
    """Join the gang with gloo."""
    # Denormals cost far more than they are worth here, and only some processors treat them alike.
    torch.set_flush_denormal(True)
    return CpuDevice(
        torch.device("cpu"), resolve_precision("cpu", precision), world, backend="gloo", timeout_seconds=timeout_seconds
    )
