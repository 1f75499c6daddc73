"""Graphs as a rank of a gang of any size would compile them, without a gang: recorded with torch-xla on the host, never run.

On Neuron the gradient all-reduce and the all-gather of embeddings are inside the graphs, with the number of ranks in them. Here
that can be seen without a single NeuronCore, and compared between ranks and settings.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
from torch import Tensor

from pipeline.backends.hlo import GraphDescription, describe
from pipeline.backends.lazy import LazyDevice
from pipeline.config import LoaderConfig, RunConfig
from pipeline.model.encoder import Encoder
from pipeline.run.world import World
from pipeline.training.step import RecentLosses, build_optimizer, prepare_encoder, step_seed, train_step
from pipeline.training.trial import TrialBatches


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """One graph in HLO.

    Attributes:
        fingerprint: SHA-256 of its text; equal on every rank of a correct program.
        description: what goes in, what is constant, which operations and collectives.
        text: HLO text.
    """

    fingerprint: str
    description: GraphDescription
    text: str


class LoweringDevice(LazyDevice):
    """A `Device` whose sync points write the pending graph down instead of running it. Every value is 0 afterwards.

    Args:
        world: any rank of any number of ranks.

    Attributes:
        graphs_lowered: in the order of the sync points.
        results: names what graphs are for: tensors whose pending values are their outputs, like those that `sync` is given. Set
            it before the first sync point.
    """

    kind = "xla"
    computes = False

    def __init__(self, precision: str, world: World, loader: LoaderConfig | None = None) -> None:
        # torch-xla leaves all-reduces out where there is one process (torch-xla 2.9, core/xla_model.py).
        os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
        super().__init__(precision, world, loader or LoaderConfig())
        self.graphs_lowered: list[LoweredGraph] = []
        self.results: Callable[[], Iterable[Tensor]] = tuple

    def sync(self, *kept: Tensor) -> None:
        if pending := [tensor for tensor in (*self.results(), *kept) if _is_pending(tensor)]:
            self.graphs_lowered.append(lower(pending))
        for tensor in pending:
            tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.torch_device)
        torch_xla._XLAC._set_all_reduce_token(str(self.torch_device), None)


def lower(tensors: list[Tensor]) -> LoweredGraph:
    """The HLO module that computes these tensors."""
    text = torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    module = torch_xla._XLAC._get_xla_tensors_hlo_proto(tensors)
    return LoweredGraph(hashlib.sha256(text.encode()).hexdigest()[:32], describe(module), text)


def _is_pending(tensor: Tensor) -> bool:
    """Whether a tensor is still to be computed: its value is neither data on the device, nor the host's, nor a constant."""
    information = torch_xla._XLAC._get_xla_tensor_debug_info(tensor)
    recorded = next((line for line in information.splitlines() if line.startswith("IR: ")), "IR: None")
    return recorded != "IR: None" and "xla::device_data" not in recorded and "prim::Constant" not in recorded


def lower_training(encoder: Encoder, config: RunConfig, precision: str, world: World) -> list[LoweredGraph]:
    """Return the graphs of a step of each form (tasks with classes have others) in the order of the sync points.

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
    steps, batches_of_step = 1 + len(config.train.classes), config.train.accumulation
    device.graphs_lowered.clear()
    for position, batch in enumerate(batches.iterate(0, steps)):
        train_step(
            encoder,
            optimizer,
            device,
            {name: tensor.to(device.torch_device) for name, tensor in batch.items()},
            config.train,
            losses,
            seed_of=partial(step_seed, config.seed, position, 0),
            last=position % batches_of_step == batches_of_step - 1,
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
