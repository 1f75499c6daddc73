"""One optimizer step, the optimizer it moves with, and the losses that stay on the device until somebody asks for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.contract import EAGER_KINDS
from pipeline.errors import Defect
from pipeline.model.contrastive import contrastive_loss
from pipeline.model.encoder import Encoder
from pipeline.model.unpadded import PaddedBatch
from pipeline.runtime.device import Batch, Device

TOWERS = ("query", "document")


def build_optimizer(encoder: nn.Module, config: TrainConfig, device: Device) -> torch.optim.AdamW:
    """AdamW without decay on biases and normalization. The learning rate is a tensor that every step fills from its batch.

    On lazy devices its state exists from the beginning, because a first step that makes it would be a graph of its own; and
    so do gradients that several batches add up in.
    """
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
    for parameter in parameters:
        if not fused:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=device.torch_device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        if config.accumulation > 1:
            parameter.grad = torch.zeros_like(parameter)
    device.sync()
    return optimizer


class RecentLosses:
    """Loss and gradient norm of the latest steps, kept on the device: reading them each step would stop it every time.

    Args:
        capacity: steps between two readings at most.
    """

    def __init__(self, capacity: int, device: Device) -> None:
        self._device = device
        self._values = torch.zeros((capacity, 2), device=device.torch_device)
        self._started = torch.zeros((), device=device.torch_device)
        self._unread = 0
        # What is there before the first step is data like everything later, not a constant of the first graph.
        device.sync()

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What is kept on the device."""
        return self._values, self._started

    def add(self, loss: Tensor) -> None:
        """The loss of a batch, all or part of its step's."""
        self._started = self._started + loss.detach()

    def reduce(self) -> None:
        """Make the step's loss the mean of all ranks: with the gradients, where ranks meet anyway. Reading then needs nobody."""
        self._started = self._device.all_reduce(self._started) / self._device.world.size

    def push(self, norm: Tensor) -> None:
        """The step is complete, with this gradient norm."""
        # Shifting, not writing at an index: the index would be a constant of the graph, and every step a new graph.
        self._values = torch.cat([self._values[1:], torch.stack([self._started, norm.detach()])[None]])
        self._started = torch.zeros_like(self._started)
        self._unread += 1

    def read(self) -> list[tuple[float, float]]:
        """Wait for the device; (loss, gradient norm) of each step since the last reading. Needs no other rank."""
        if self._unread == 0:
            return []
        flat = self._device.read(self._values)
        pairs = list(zip(flat[0::2], flat[1::2], strict=True))[-self._unread :]
        self._unread = 0
        return pairs


def train_step(
    encoder: Encoder,
    optimizer: torch.optim.Optimizer,
    device: Device,
    batch: Batch,
    config: TrainConfig,
    losses: RecentLosses,
    *,
    last: bool = True,
    sync_points: int = 2,
) -> None:
    """Forward and backward through both towers; then mean gradient of all ranks, clipping, update. Nothing is read back.

    The end of a step is a sync point too, which comes with the next batch (`Device.batches`) or a reading.

    Args:
        last: False for a batch whose gradients are only added up, to be used with those of the step's last batch.
        sync_points: 2 ends a piece of work after the backward pass as well.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with device.autocast():
        queries, documents = both_towers(encoder, batch)
    loss = contrastive_loss(
        queries, documents, batch["roles"], batch["weights"], temperature=config.temperature, gather=device.gather
    )
    loss.backward()  # type: ignore[no-untyped-call]
    losses.add(loss)
    if not last:
        return
    device.reduce_gradients(parameters)
    losses.reduce()
    if sync_points == 2:
        device.sync()
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or float("inf"))
    for group in optimizer.param_groups:
        group["lr"].copy_(batch["learning_rate"].reshape(()))
    device.step(optimizer)
    optimizer.zero_grad(set_to_none=config.accumulation == 1)
    losses.push(norm)


def both_towers(encoder: Encoder, batch: Batch) -> tuple[Tensor, ...]:
    """Embeddings of a batch's queries and of its documents, both (B, D) fp32."""
    if "query_places" in batch:
        return encoder.unpadded(
            *(PaddedBatch(batch[f"{tower}_tokens"], batch[f"{tower}_mask"], batch[f"{tower}_places"]) for tower in TOWERS)
        )
    return tuple(encoder(batch[f"{tower}_tokens"], batch[f"{tower}_mask"]) for tower in TOWERS)


def require_equal_weights(encoder: nn.Module, device: Device) -> None:
    """Without a wrapper that broadcasts, ranks stay alike because they do alike: prove it, by two sums of every weight.

    Equal weights give equal sums on equal devices; copying all weights of all ranks to the host would cost seconds and memory.

    Raises:
        Defect: this rank's weights are not the leader's.
    """
    if device.world.size == 1:
        return
    with torch.no_grad():
        sums = [reduced for parameter in encoder.parameters() for reduced in (parameter.sum(), parameter.abs().sum())]
        require_equal(device, torch.stack(sums))


def require_equal(device: Device, values: Tensor) -> None:
    """Compare what every rank has found of its weights with the leader's.

    Raises:
        Defect: they differ.
    """
    if device.world.size == 1:
        return
    own, leaders = device.read(values), device.read(device.broadcast(values))
    if own != leaders:
        raise Defect(
            "this rank's weights are not the leader's",
            value=f"rank {device.world.rank}: {sum(one != other for one, other in zip(own, leaders, strict=True))} sums differ",
            rule="all ranks start from the same weights and take the same steps",
            remedy="report it with the logs of all ranks; a single rank that differs points at its device",
        )


def step_seed(seed: int, batch: int, rank: int) -> int:
    """Makes dropout a function of (seed, batch number, rank): no random state is saved, and a resumed run draws the same."""
    return int(np.random.SeedSequence([seed, batch, rank]).generate_state(1, np.uint64)[0] >> 1)
