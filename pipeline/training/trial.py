"""The trial that compile runs: the train command itself on made-up batches, long enough to meet every graph of a whole run.

Some steps (with every batch of a step), a reading, a validation and a checkpoint, then encoding as evaluate and embed do it. The
learning rate rises and falls as in a run: were it in the graph, the trial would notice as little as a run, hence the watch in
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.backends.device import Batch, Device
from pipeline.config import RunConfig
from pipeline.contract import RunPaths
from pipeline.evaluation.holdout import Holdout
from pipeline.evaluation.retrieval_metrics import Relevant
from pipeline.evaluation.statistics import Units
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.health.quick import meet_graphs
from pipeline.log import log
from pipeline.model.inference import encode, for_encoding
from pipeline.model.loss import DocumentRole
from pipeline.run.context import StageContext
from pipeline.run.shutdown import ShutdownRequest
from pipeline.run.world import World
from pipeline.sdk.monitor import HostMonitor
from pipeline.training.batches import StepFacts, packed_texts
from pipeline.training.checkpoint import CheckpointRetention, CheckpointWriter
from pipeline.training.host_state import host_state
from pipeline.training.learning_rate import learning_rate
from pipeline.training.loop import Training, train
from pipeline.training.metrics import MetricsLog
from pipeline.training.micro_batches import CLASSES_OF
from pipeline.training.setup import load_state
from pipeline.training.state import Progress


@dataclass(frozen=True, slots=True)
class TrialBatches:
    """Made-up batches in the shapes of a run.

    Args:
        vocabulary: token ids are below it.
        apart: see `TrainingBatches`.
        steps: how many there are.
    """

    config: RunConfig
    world: World
    vocabulary: int
    apart: bool
    steps: int

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        train = self.config.train
        forms = step_forms(self.config)
        for step in range(start, stop):
            rate = learning_rate(train, step, max(stop, self.steps), max(1, self.steps // 2))
            for _ in range(train.accumulation):
                yield self._batch(rate, forms[step % len(forms)])

    def take_facts(self, step: int) -> StepFacts:  # noqa: ARG002 - every step is alike
        pairs = self.config.train.batch_size * self.world.size * self.config.train.accumulation
        return StepFacts(pairs, pairs, pairs)

    def row_ids(self, step: int) -> list[str]:  # noqa: ARG002 - every step is alike
        return ["(made up)"]

    def _batch(self, rate: float, task: str | None) -> Batch:
        train, shape, size = self.config.train, self.config.train.bin_shape, self.config.train.batch_size
        roles = np.full((size, size * self.world.size * shape.documents), DocumentRole.NEGATIVE, np.int32)
        roles[np.arange(size), shape.documents * (np.arange(size) + self.world.rank * size)] = DocumentRole.POSITIVE
        found = {"roles": roles, "query_roles": roles[:, :: shape.documents].copy()} if train.symmetric else {"roles": roles}
        # The longest query and documents, and room for more pairs.
        lengths = [train.query_length, *[train.length] * shape.documents]
        if task:
            lengths, found = [train.query_length], {f"{CLASSES_OF}{task}": np.zeros(size, np.int32)}
        tokens = [np.arange(length) % self.vocabulary for length in lengths]
        bins = train.bins if self.apart else 1
        parts = [packed_texts([[tokens]] * (train.bins // bins), shape) for _ in range(bins)]
        return {
            **{f"{name}/{number}": tensor for number, part in enumerate(parts) for name, tensor in part.items()},
            **{name: torch.from_numpy(values) for name, values in found.items()},
            "weights": torch.full((size,), 1.0 / size / train.accumulation),
            "learning_rate": torch.tensor([rate], dtype=torch.float32),
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """The graphs that a trial met: keys of those of encoding alone, and of all; and its steps."""

    infer: set[str]
    all: set[str]
    steps: int


def run_trial(context: StageContext, device: Device, *, loading: bool = False) -> Trial:
    """Meet every graph that training, evaluate and embed will meet; where nothing computes, nothing is written.

    Args:
        loading: every graph is compiled already, and runs once: what does not load or does not fit the memory fails here. Nothing
            is written.
    """
    config = context.plan.config
    writes = device.computes and not loading
    state = load_state(context, device)
    log.info("trial: made-up batches, whose losses and metrics mean nothing")
    context.heartbeat.beat(note="trial: encoding")
    form = for_encoding(state.encoder, compiles=device.compiles)
    encode(form, device, [made_up_text(config)], config.embed.length, config.embed.tokens_per_batch)
    infer = device.graphs()
    meet_graphs(device)
    steps = config.device.loader.batches_per_execution if loading else config.compile.trial_steps
    steps *= len(step_forms(config))
    batches = TrialBatches(config, context.world, state.encoder.config.vocab_size, config.cuts_batches(device.kind), steps)
    at_end = dict.fromkeys(("validate_every", "checkpoint_every"), batches.steps)
    local = context.scratch / "trial"
    # A checkpoint needs somewhere to go; this one is not read.
    paths = RunPaths(str(local / "run"))
    with (
        MetricsLog(local / "logs", None, 0) as metrics,
        CheckpointWriter(paths, local, context.plan.fingerprint, CheckpointRetention(newest=1)) as checkpoints,
        HostMonitor(replace(context, paths=paths), device.kind if loading else "", period_seconds=1.0) as monitor,
    ):
        run = Training(
            # With one validation and one checkpoint, at the end.
            config=config.model_copy(update={"train": config.train.model_copy(update=at_end)}),
            steps=batches.steps,
            device=device,
            encoder=state.encoder,
            optimizer=state.optimizer,
            source=state.source,
            batches=batches,
            validation=trial_validation(config, context.world),
            heartbeat=context.heartbeat,
            watch=GraphWatch(device=device),
            monitor=monitor,
            shutdown=ShutdownRequest(),
            metrics=metrics if writes else None,
            checkpoints=checkpoints if writes else None,
        )
        progress = Progress()
        train(run, progress)
        # Joined steps: a run may end with a graph of fewer than are usually joined.
        for rest in range(1, config.device.loader.batches_per_execution):
            train(replace(run, steps=progress.step + rest), progress)
        if memory := monitor.latest().get("device_memory_gib"):
            log.info("with every graph loaded, %.2f GiB of this node's device memory are in use", memory)
    if not device.computes:
        host_state(state.encoder, state.optimizer, device)
    return Trial(infer, device.graphs(), progress.step)


def step_forms(config: RunConfig) -> list[str | None]:
    """Return the forms of a step, which are graphs of their own: of pairs, None, and of each task with classes."""
    return [*([] if config.classifies_only else [None]), *config.train.classes]


def trial_validation(config: RunConfig, world: World) -> Holdout:
    """A candidate and a query for every rank, or a classified text."""
    texts = [made_up_text(config)] * world.size
    task = next(iter(config.train.classes)) if config.classifies_only else None
    return Holdout(
        keys=tuple((number, None) for number in range(world.size)),
        queries=texts,
        candidates=[] if task else texts,
        relevant=Relevant.of([{number: 1.0} for number in range(world.size)]),
        known=Relevant.of(()),
        units=Units.single(world.size),
        tasks=[task] * world.size,
        classes=np.zeros(world.size, np.int32) if task else None,
    )


def made_up_text(config: RunConfig) -> list[int]:
    """Return a row full of tokens that are in every vocabulary."""
    return [1 + place % 8 for place in range(config.embed.length)]
