"""The device of `cpu` and `cuda`: eager torch with torch.distributed. Gradients are reduced explicitly, without DDP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint

from pipeline.backends.buckets import buckets
from pipeline.backends.counts import GraphCounts, Waits
from pipeline.backends.device import Batch, EncodeFunction, ModuleT
from pipeline.config.sections import PREFETCH_BATCHES
from pipeline.run.ahead import ahead
from pipeline.run.world import World

REDUCE_BUCKET_ELEMENTS = 8 << 20
"""Gradients are joined into pieces of this many elements (32 MiB in fp32) before they are reduced: fewer, larger messages."""


class EagerDevice:
    """A `Device` on which every operation runs when it is written. See `pipeline.backends.device.Device`."""

    kind = "eager"
    compiles = False
    computes = True

    def __init__(self, torch_device: torch.device, precision: str, world: World, *, backend: str, timeout_seconds: int) -> None:
        self.torch_device = torch_device
        self.precision = precision
        self.world = world
        self.waits = Waits()
        if world.size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group(
                backend,
                store=_store(world, timeout),
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                # NCCL must know which GPU a rank's barriers are on; gloo wants none.
                device_id=torch_device if torch_device.type == "cuda" else None,
            )

    def place(self, module: ModuleT) -> ModuleT:
        return module.to(self.torch_device)

    def for_inference(self, encoder: nn.Module, traces: Path | None) -> EncodeFunction:  # noqa: ARG002 - needs none
        return self.place(encoder)

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        prepared = ({name: self._prepare(value) for name, value in batch.items()} for batch in batches)
        for batch in self.waits.on(ahead(prepared, PREFETCH_BATCHES)):
            yield {name: self._put(value) for name, value in batch.items()}

    def _prepare(self, value: Tensor) -> Tensor:
        """Prepare a tensor in the background."""
        return value

    def _put(self, value: Tensor) -> Tensor:
        """Put the tensor on the device, in the order of the consumer's operations."""
        return value

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.torch_device.type, dtype=torch.bfloat16, enabled=self.precision != "fp32")

    def gather(self, rows: Tensor) -> Tensor:
        return _EagerGather.apply(rows, self.world) if self.world.size > 1 else rows  # type: ignore[no-untyped-call]

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.world.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in buckets(gradients, REDUCE_BUCKET_ELEMENTS):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self.world.size
            for gradient, mean in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def checkpointed(self) -> Callable[..., Any]:
        return partial(checkpoint, use_reentrant=False)

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def restore_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def sync(self, *kept: Tensor) -> None:
        pass

    def read(self, value: Tensor) -> list[float]:
        return [float(item) for item in value.detach().reshape(-1).tolist()]

    def from_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.torch_device) for name, tensor in tensors.items()}

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def graph_counts(self) -> GraphCounts:
        return GraphCounts()

    def graphs(self) -> set[str]:
        return set()

    def graph_module(self, key: str) -> bytes | None:  # noqa: ARG002 - there are no graphs
        return None

    def all_reduce(self, value: Tensor) -> Tensor:
        result = value.clone()
        if self.world.size > 1:
            dist.all_reduce(result)
        return result

    def reduce_scatter(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value.clone()
        result = value.new_empty((value.shape[0] // self.world.size, *value.shape[1:]))
        dist.reduce_scatter_tensor(result, value.contiguous())
        return result

    def broadcast(self, value: Tensor) -> Tensor:
        result = value.clone()
        if self.world.size > 1:
            dist.broadcast(result, src=0)
        return result

    def barrier(self) -> None:
        if self.world.size > 1:
            dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _EagerGather(torch.autograd.Function):
    """All-gather of rows whose backward adds up what every rank's loss says about this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        ctx.rows = rows.shape[0]
        gathered = rows.new_empty((world.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        own = gradient.new_empty((ctx.rows, *gradient.shape[1:]))
        dist.reduce_scatter_tensor(own, gradient)
        return own, None


def _store(world: World, timeout: timedelta) -> Store:
    """Return the store in which the ranks find each other. A store that opens its own socket listens on every address."""
    opens = world.is_leader and not world.has_store
    descriptor = socket.create_server((world.node.listen, world.port)).detach() if opens else None
    return TCPStore(world.leader, world.port, world.size, is_master=opens, timeout=timeout, master_listen_fd=descriptor)
