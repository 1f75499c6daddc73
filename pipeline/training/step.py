"""One optimizer step, and the losses that stay on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import Defect
from pipeline.model.encoder import Encoder, checkpoint_activations, prepare_for_training
from pipeline.model.loss import classification_loss, contrastive_loss
from pipeline.model.unpadded import PaddedBatch
from pipeline.training.micro_batches import CLASSES_OF, TOWERS, micro_batches
from pipeline.training.optimizer import AdamW, FlatAdamW, FusedAdamW

if TYPE_CHECKING:
    from pipeline.backends.device import Batch, Device
    from pipeline.config import TrainConfig


def prepare_encoder(encoder: Encoder, config: TrainConfig, device: Device) -> None:
    """Choose how an encoder computes attention, dropout and activations in training on this device; it is still on the host."""
    # The fused kernel's backward pass is slow on processors (torch 2.9), and graph compilers fuse plain products by themselves.
    prepare_for_training(
        encoder,
        fused_attention=device.kind == "cuda",
        unpadded_rows=not device.compiles,
        dropout=config.dropout,
        scatters=not device.compiles,
    )
    encoder.word_embeddings.requires_grad_(not config.freeze_word_embeddings)
    if config.activation_checkpointing:
        checkpoint_activations(encoder, device.checkpointed())


def build_optimizer(encoder: nn.Module, config: TrainConfig, device: Device, *, adds_up: bool = False) -> AdamW:
    """AdamW without decay on biases and normalization. The learning rate is a tensor that every step fills from its batch.

    On lazy devices its state exists from the beginning, because a first step that makes it would be a graph of its own; and
    so do gradients that several backward passes add up in.

    Args:
        adds_up: a step has several backward passes, see `RunConfig.adds_up`.
    """
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    sharded = config.shard_optimizer is True and device.world.size > 1
    optimizer: AdamW
    if device.compiles or sharded:
        optimizer = FlatAdamW(groups, config, device, sharded=sharded, adds_up=adds_up)
    else:
        optimizer = FusedAdamW(groups, config, device)
    rate = torch.zeros((), device=device.torch_device)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if adds_up:
        for parameter in parameters:
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
        """The mean of all ranks, taken with the gradients, where ranks meet anyway: to read the loss needs no other rank."""
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
    optimizer: AdamW,
    device: Device,
    batch: Batch,
    config: TrainConfig,
    losses: RecentLosses,
    *,
    seed_of: Callable[[int], int],
    last: bool = True,
    sync_points: int = 2,
) -> None:
    """Forward and backward through both towers; then mean gradient of all ranks, clipping, update. Nothing is read back.

    The end of a step is a sync point too, which comes with the next batch (`Device.batches`) or a reading.

    Args:
        batch: see `TrainingBatches.iterate`.
        seed_of: number of a micro-batch -> seed of its dropout.
        last: False for a batch whose gradients are only added up, to be used with those of the step's last batch.
        sync_points: 2 ends a piece of work after the backward pass as well; one in several micro-batches always does.
    """
    parts = micro_batches(batch)
    if len(parts) > 1:
        cached_backward(encoder, device, batch, parts, config, losses, seed_of)
    else:
        device.seed(seed_of(0))
        with device.autocast():
            queries, documents = both_towers(encoder, parts[0])
        loss = task_loss(encoder, queries, documents, batch, config, device)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.add(loss)
    for parameter in encoder.classifiers.parameters():
        if parameter.grad is None:  # of another task: every parameter takes part in every step
            parameter.grad = torch.zeros_like(parameter)
    if not last:
        return
    reduced = optimizer.reduce()
    losses.reduce()
    if sync_points == 2 and len(parts) == 1:
        device.sync(*reduced)
    norm = optimizer.clip(config.clip_norm)
    for group in optimizer.param_groups:
        group["lr"].copy_(batch["learning_rate"].reshape(()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=config.accumulation == 1 and len(parts) == 1)
    losses.push(norm)


def cached_backward(
    encoder: Encoder,
    device: Device,
    batch: Batch,
    parts: Sequence[Batch],
    config: TrainConfig,
    losses: RecentLosses,
    seed_of: Callable[[int], int],
) -> None:
    """Add the gradients of a whole batch's loss to the parameters', with the activations of one micro-batch at a time.

    The loss needs all embeddings at once, the encoder does not: embed every micro-batch without keeping activations; take the
    loss and its gradients with respect to the embeddings; then embed each micro-batch again, and continue the backward pass
    from its embeddings' gradients (gradient caching: Gao et al. 2021, arXiv:2101.06983). The same seed before both forward
    passes gives both the same dropout. On devices that compile, all micro-batches share two graphs, and the loss is a third.
    """
    cached: list[Tensor] = []
    for number, part in enumerate(parts):
        device.seed(seed_of(number))
        with torch.no_grad(), device.autocast():
            embeddings = both_towers(encoder, part)
        device.sync(*embeddings)
        cached += [embedding.detach().requires_grad_() for embedding in embeddings]
    queries, documents = torch.cat(cached[0::2]), torch.cat(cached[1::2])
    loss = task_loss(encoder, queries, documents, batch, config, device)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in cached]
    losses.add(loss)
    device.sync(*gradients)
    for number, part in enumerate(parts):
        device.seed(seed_of(number))
        with device.autocast():
            embeddings = both_towers(encoder, part)
        torch.autograd.backward(embeddings, gradients[2 * number : 2 * number + 2])
        device.sync()


def task_loss(encoder: Encoder, queries: Tensor, documents: Tensor, batch: Batch, config: TrainConfig, device: Device) -> Tensor:
    """This rank's share of a batch's loss, of the kind that its task has, from the embeddings (B, D) of all its texts."""
    for task, classifier in encoder.classifiers.items():
        if (classes := batch.get(f"{CLASSES_OF}{task}")) is not None:
            return classification_loss(classifier(queries), classes, batch["weights"])
    return batch_loss(queries, documents, batch, config, device, normalize=encoder.normalize)


def batch_loss(
    queries: Tensor, documents: Tensor, batch: Batch, config: TrainConfig, device: Device, *, normalize: bool
) -> Tensor:
    """This rank's share of the loss of a batch of pairs."""
    found = partial(
        contrastive_loss,
        weights=batch["weights"],
        temperature=config.temperature,
        gather=device.gather,
        dimensions=config.dimensions,
        normalize=normalize,
    )
    loss = found(queries, documents, batch["roles"])
    if not config.symmetric:
        return loss
    relevant = documents.reshape(len(queries), -1, documents.shape[1])[:, 0]
    return (loss + found(relevant, queries, batch["query_roles"])) / 2


def both_towers(encoder: Encoder, texts: Batch) -> tuple[Tensor, ...]:
    """Embeddings of a micro-batch's queries (pairs, D) and documents (pairs * documents, D), fp32; any where there is none.

    Args:
        texts: see `packed_texts` and `grouped_texts`.
    """
    chosen = [texts[f"{tower}_texts"] for tower in TOWERS]
    if "segments" in texts:
        embeddings = encoder.packed(texts["tokens"], texts["segments"], texts["positions"])
        # A product rather than a selection, whose backward pass would be a scatter.
        numbers = torch.arange(len(embeddings), device=embeddings.device)
        with torch.autocast(embeddings.device.type, enabled=False):
            return tuple((own[:, None] == numbers).to(embeddings.dtype) @ embeddings for own in chosen)
    groups = range(sum(name.startswith("tokens:") for name in texts))
    if "places:0" in texts:
        batches = [PaddedBatch(*(texts[f"{name}:{group}"] for name in PaddedBatch._fields)) for group in groups]
        found = encoder.unpadded(*batches)
    else:
        found = tuple(encoder(texts[f"tokens:{group}"], texts[f"mask:{group}"]) for group in groups)
    embeddings = torch.cat(found)
    return tuple(embeddings[own] for own in chosen)


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
    """Compare what every rank has found of its weights with the leader's; where nothing computes, only meet the graphs.

    Raises:
        Defect: they differ.
    """
    if device.world.size == 1:
        return
    own, leaders = device.read(values), device.read(device.broadcast(values))
    if device.computes and own != leaders:
        raise Defect(
            "this rank's weights are not the leader's",
            value=f"rank {device.world.rank}: {sum(one != other for one, other in zip(own, leaders, strict=True))} sums differ",
            rule="all ranks start from the same weights and take the same steps",
            remedy="report it with the logs of all ranks; a single rank that differs points at its device",
        )


def step_seed(seed: int, batch: int, rank: int, part: int = 0) -> int:
    """Return the seed of a micro-batch's dropout: a function of its arguments, so no random state is saved and a resumed run
    draws the same.

    31 bits: Neuron narrows integers of 64 bits to 32 (SDK 2.29.1, compiler/error-codes/ESFH002.rst).
    """
    return int(np.random.SeedSequence([seed, batch, rank, part]).generate_state(1, np.uint32)[0] >> 1)
