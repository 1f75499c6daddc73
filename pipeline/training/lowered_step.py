"""The graphs of a training step as any rank of any number of ranks would compile them; nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pipeline.backends.lowering import LoweredGraph, LoweringDevice
from pipeline.config import RunConfig
from pipeline.model.encoder import Encoder
from pipeline.run.world import World
from pipeline.training.step import RecentLosses, build_optimizer, prepare_encoder, step_seed, train_step
from pipeline.training.trial import TrialBatches


def lower_training(encoder: Encoder, config: RunConfig, precision: str, world: World) -> list[LoweredGraph]:
    """Return the graphs of a step in the order of the sync points.

    Args:
        encoder: on the host; it is moved to the lowering device.
        precision: resolved.
        world: the rank whose graphs are asked for, and how many there are.
    """
    device = LoweringDevice(precision, world, config.device.loader)
    prepare_encoder(encoder, config.train, device)
    encoder.to(device.torch_device).train()
    optimizer = build_optimizer(encoder, config.train, device, adds_up=config.adds_up(device.kind))
    losses = RecentLosses(config.train.log_every, device)
    device.results = lambda: _results(encoder, optimizer, losses)
    device.sync()
    batches = TrialBatches(config, world, encoder.config.vocab_size, config.cuts_batches(device.kind), steps=1)
    device.graphs_lowered.clear()
    for position, batch in enumerate(batches.iterate(0, 1)):
        train_step(
            encoder,
            optimizer,
            device,
            {name: tensor.to(device.torch_device) for name, tensor in batch.items()},
            config.train,
            losses,
            seed_of=partial(step_seed, config.seed, position, 0),
            last=position == config.train.accumulation - 1,
            sync_points=config.device.sync_points,
        )
        device.sync()
    return list(device.graphs_lowered)


def _results(encoder: Encoder, optimizer: torch.optim.Optimizer, losses: RecentLosses) -> Iterator[Tensor]:
    for parameter in encoder.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        yield from optimizer.state.get(parameter, {}).values()
    for group in optimizer.param_groups:
        yield group["lr"]
    yield from losses.tensors
