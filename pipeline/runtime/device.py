"""The device protocol: all that training, evaluation and embedding may ask of an accelerator, the same for every kind.

Kinds: `neuron` (torch-xla + torch-neuronx on trn1), `xla` (torch-xla on CPU, one rank), `cuda` (NCCL), `cpu` (gloo). Each lives
in a module of its own beside this one, loaded on demand. Loops are written against this protocol once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadConfig
from pipeline.runtime.world import World

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Batch = Mapping[str, Tensor]

KINDS = (*EAGER_KINDS, "xla", "neuron")
"""Kinds that have a module here."""


class Device(Protocol):
    """One rank's device. Collectives must be called by all ranks in the same order.

    Attributes:
        kind: one of KINDS.
        world: this rank among all ranks.
        torch_device: where tensors live.
        precision: `bf16` or `fp32`: what matrix products are computed in; weights stay fp32.
    """

    kind: str
    world: World
    torch_device: torch.device
    precision: str

    def place(self, module: ModuleT) -> ModuleT:
        """Move a module to the device."""

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches on the device, prepared ahead in the background."""

    def autocast(self) -> AbstractContextManager[None]:
        """Context in which forward passes run in `precision`."""

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows, (n, d) -> (world size * n, d), in rank order; gradients flow back to the rank that owns a row."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over all ranks."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights; gradients must be reduced (and clipped) already."""

    def seed(self, value: int) -> None:
        """Seed the random numbers that modules draw on the device (dropout)."""

    def sync(self) -> None:
        """Mark the end of a piece of work: cuts the graph on lazy devices, nothing elsewhere."""

    def read(self, value: Tensor) -> list[float]:
        """Wait for a tensor of any shape and return it flat. The only place where the host waits for the device."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over all ranks."""

    def reduce_scatter(self, value: Tensor) -> Tensor:
        """Sum over all ranks, of which this rank keeps its share: (world size * n, ...) -> (n, ...)."""

    def broadcast(self, value: Tensor) -> Tensor:
        """Rank 0's value on every rank."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Leave the gang."""


def open_device(kind: str, precision: str, world: World, *, threads: int | None = None, timeout_seconds: int = 1800) -> Device:
    """Join the gang on a device of this kind.

    Args:
        kind: a resolved kind, not `auto`.
        precision: `bf16`, `fp32` or `auto`.
        threads: host threads of this rank; None: as the environment says.
        timeout_seconds: how long a collective may wait for another rank.

    Raises:
        BadConfig: no such kind here, or the kind cannot do what is asked.
    """
    require_available(kind)
    module = import_module(f"pipeline.runtime.{kind}")
    return cast(Device, module.open_device(precision, world, threads=threads, timeout_seconds=timeout_seconds))


def require_available(kind: str) -> None:
    """Refuse a kind of device that has no module here, before hosts are started for it.

    Raises:
        BadConfig: not one of KINDS.
    """
    if kind not in KINDS:
        raise BadConfig(
            "this kind of device is not available in this version",
            value=f"device.kind = {kind}",
            rule=f"one of {', '.join(KINDS)}",
            remedy="set device.kind to one of these",
        )


def resolve_kind(kind: str) -> str:
    """`auto` as the best kind on this host: neuron, else cuda, else cpu."""
    if kind != "auto":
        return kind
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_precision(kind: str, precision: str) -> str:
    """`auto` as bf16 where the device computes in it, else fp32."""
    if precision != "auto":
        return precision
    if kind == "cpu":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"
    if kind == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16"


def default_ranks_per_node(kind: str) -> int:
    """Ranks that use all of a host: 32 NeuronCores of a trn1.32xlarge, every GPU, one CPU process."""
    if kind == "neuron":
        return 32
    if kind == "cuda":
        return max(1, torch.cuda.device_count())
    return 1
