"""The `cuda` kind: eager torch, one GPU per rank, NCCL between ranks, bf16 autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.backends.device import resolve_precision
from pipeline.backends.eager import EagerDevice
from pipeline.errors import BadConfig
from pipeline.run.world import World


class CudaDevice(EagerDevice):
    kind = "cuda"

    def _prepare(self, value: Tensor) -> Tensor:
        return value.pin_memory()

    def _put(self, value: Tensor) -> Tensor:
        return value.to(self.torch_device, non_blocking=True)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def restore_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)


def open_device(precision: str, world: World, *, timeout_seconds: int) -> CudaDevice:
    """Join the gang with NCCL on GPU number local rank.

    Raises:
        BadConfig: fewer GPUs than ranks on this node.
    """
    if torch.cuda.device_count() <= world.local_rank:
        raise BadConfig(
            "this node has fewer GPUs than ranks",
            value=f"{torch.cuda.device_count()} GPUs, {world.local_size} ranks",
            rule="one GPU per rank",
            remedy="set device.ranks_per_node to the number of GPUs",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return CudaDevice(device, resolve_precision("cuda", precision), world, backend="nccl", timeout_seconds=timeout_seconds)
