"""One optimizer step, the optimizer it moves with, and the losses that stay on the device until somebody asks for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.contract import EAGER_KINDS
from pipeline.model.contrastive import contrastive_loss
from pipeline.model.encoder import Encoder
from pipeline.runtime.device import Batch, Device


def build_optimizer(encoder: nn.Module, config: TrainConfig, device: Device) -> torch.optim.AdamW:
    """AdamW without decay on biases and normalization. The learning rate is a tensor that every step fills from its batch."""
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    fused = device.kind in EAGER_KINDS
    # Lazy devices have no fused form; `capturable` keeps the step count in a tensor there, so the graph is constant.
    optimizer = torch.optim.AdamW(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=fused,
        foreach=False if not fused else None,
        capturable=not fused,
    )
    rate = torch.zeros((), device=device.torch_device)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


class RecentLosses:
    """Loss and gradient norm of the latest steps, kept on the device: reading them each step would stop it every time.

    Args:
        capacity: steps between two readings at most.
    """

    def __init__(self, capacity: int, device: Device) -> None:
        self._device = device
        self._values = torch.zeros((capacity, 2), device=device.torch_device)
        self._unread = 0

    def push(self, loss: Tensor, norm: Tensor) -> None:
        # Shifting, not writing at an index: the index would be a constant of the graph, and every step a new graph.
        self._values = torch.cat([self._values[1:], torch.stack([loss.detach(), norm.detach()])[None]])
        self._unread += 1

    def read(self) -> list[tuple[float, float]]:
        """Wait for the device; (loss, gradient norm) of each step since the last reading, as means over all ranks."""
        if self._unread == 0:
            return []
        flat = self._device.read(self._device.all_reduce(self._values) / self._device.world.size)
        pairs = list(zip(flat[0::2], flat[1::2], strict=True))[-self._unread :]
        self._unread = 0
        return pairs


def train_step(
    encoder: Encoder, optimizer: torch.optim.Optimizer, device: Device, batch: Batch, config: TrainConfig, losses: RecentLosses
) -> None:
    """Forward and backward through both towers, mean gradient of all ranks, clipping, update. Nothing is read back."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with device.autocast():
        queries = encoder(batch["query_tokens"], batch["query_mask"])
        documents = encoder(batch["document_tokens"], batch["document_mask"])
    loss = contrastive_loss(
        queries, documents, batch["roles"], batch["weights"], temperature=config.temperature, gather=device.gather
    )
    loss.backward()  # type: ignore[no-untyped-call]
    device.reduce_gradients(parameters)
    device.sync()
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or float("inf"))
    for group in optimizer.param_groups:
        group["lr"].copy_(batch["learning_rate"].reshape(()))
    device.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    losses.push(loss, norm)
    device.sync()


def step_seed(seed: int, step: int, rank: int) -> int:
    """Makes dropout a function of (seed, step, rank): no random state is saved, and a resumed run draws the same."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)
