"""The start of training, the same in the train stage and in the trial that compiles for it: device, weights, optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline import store
from pipeline.backends.device import Device, open_device
from pipeline.contract import RunPaths
from pipeline.errors import BadConfig
from pipeline.log import log
from pipeline.model.classifier import add_classifiers, load_classifiers
from pipeline.model.encoder import Encoder, require_length
from pipeline.model.folder import load_encoder
from pipeline.plan import RunPlan
from pipeline.run.context import StageContext
from pipeline.training.checkpoint import Checkpoint, fetch_checkpoint, find_checkpoint, open_checkpoint
from pipeline.training.host_state import OPTIMIZER_FILE, RANDOM_FILE, load_optimizer, restore_random_states
from pipeline.training.optimizer import AdamW
from pipeline.training.state import Progress
from pipeline.training.step import build_optimizer, prepare_encoder, require_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The model, its optimizer and the checkpoint from which training starts on this rank.

    Attributes:
        source: local model folder that the weights come from: the checkpoint's, or the parent.
        checkpoint: the checkpoint to resume from; None: training starts from the parent.
    """

    encoder: Encoder
    optimizer: AdamW
    source: Path
    checkpoint: Checkpoint | None

    @property
    def progress(self) -> Progress:
        return self.checkpoint.progress if self.checkpoint else Progress()


def load_state(context: StageContext, device: Device) -> TrainState:
    """Load the newest checkpoint, or the parent, onto the device; all ranks together.

    Raises:
        BadConfig: other ranks than the plan's, or lengths that the encoder does not have positions for.
        MissingInput: the parent is not there, or all checkpoints are corrupt.
        Defect: ranks that do not start from the same weights.
    """
    plan, config = context.plan, context.plan.config
    if context.world.size != plan.world.ranks:
        raise BadConfig("the number of ranks is not the plan's", value=context.world.size, rule=f"{plan.world.ranks} ranks")
    checkpoint = newest_checkpoint(context, device, checkpoint_sources(context))
    if checkpoint:
        source = checkpoint.folder
    else:
        context.heartbeat.beat(note="fetching the parent")
        source = store.local_folder(plan.parent.folder, context.scratch / "parent")
    encoder = load_encoder(source, config.model)
    add_classifiers(encoder, source, config.train.classes)
    require_length(encoder, config.train.length, "train.length")
    require_length(encoder, config.embed.length, "embed.length")
    prepare_encoder(encoder, config.train, device)
    digest = host_digest(encoder)
    device.place(encoder)
    require_equal(device, digest.to(device.torch_device))
    optimizer = build_optimizer(encoder, config.train, device, adds_up=config.adds_up(device.kind))
    if checkpoint:
        load_optimizer(encoder, optimizer, checkpoint.folder / OPTIMIZER_FILE)
        if context.world.is_leader:
            # The leader's states: every other rank has its own, on which no step depends.
            restore_random_states(device, checkpoint.folder / RANDOM_FILE)
        log.info("resuming from the checkpoint of step %d", checkpoint.progress.step)
    elif config.train.continue_optimizer and plan.parent.run:
        # Whatever plan it is of: the run has ended.
        last = newest_checkpoint(context, device, [(RunPaths(f"{context.paths.bucket_root}/runs/{plan.parent.run}"), "")])
        if not (
            last
            and {task: known.classes for task, known in load_classifiers(last.folder, encoder).items()}.items()
            >= config.train.classes.items()
            and load_optimizer(encoder, optimizer, last.folder / OPTIMIZER_FILE, of_another_run=True)
        ):
            log.warning("run %s left no state of AdamW for these parameters and classes: it starts afresh", plan.parent.run)
    return TrainState(encoder=encoder, optimizer=optimizer, source=source, checkpoint=checkpoint)


@contextmanager
def gang_device(context: StageContext, plan: RunPlan) -> Iterator[Device]:
    """Yield this rank's device, which leaves the gang at the end."""
    settings = plan.config.device
    device = open_device(
        plan.world.kind, plan.world.precision, context.world, threads=settings.threads_per_rank, loader=settings.loader
    )
    try:
        yield device
    finally:
        device.close()


def newest_checkpoint(context: StageContext, device: Device, sources: Sequence[tuple[RunPaths, str]]) -> Checkpoint | None:
    """Return the checkpoint that all ranks load: the leader chooses, one rank of each node fetches it.

    Args:
        sources: folders and fingerprints, see `fetch_checkpoint`, of which the first one with a checkpoint counts.
    """
    scratch = context.scratch / "resumed"
    context.heartbeat.beat(note="looking for a checkpoint")
    looks = ((number, find_checkpoint(*source, scratch)) for number, source in enumerate(sources))
    place, found = next((look for look in looks if look[1]), (0, None)) if context.world.is_leader else (0, None)
    # 0 is no checkpoint.
    chosen = torch.tensor([found.progress.step + 1 if found else 0, place], dtype=torch.int32, device=device.torch_device)
    step, place = (int(value) for value in device.read(device.broadcast(chosen)))
    if step == 0 or not device.computes:
        return None
    if context.world.local_rank == 0 and found is None:
        paths, fingerprint = sources[place]
        fetch_checkpoint(paths, step - 1, fingerprint, scratch)
    device.barrier()
    return open_checkpoint(scratch / f"step-{step - 1:08d}")


def checkpoint_sources(context: StageContext) -> list[tuple[RunPaths, str]]:
    """Return the folders of checkpoints with their plans' fingerprints: this run's, then those of the run that it resumes."""
    own, resumed = (context.paths, context.plan.fingerprint), context.plan.train.resumed
    return [own, (RunPaths(f"{context.paths.bucket_root}/runs/{resumed.run}"), resumed.fingerprint)] if resumed else [own]


def host_digest(encoder: Encoder) -> Tensor:
    """CRC-32 of all weights while they are on the host, as two numbers below 2^16 that fp32 holds exactly."""
    digest = 0
    for tensor in encoder.state_dict().values():
        digest = zlib.crc32(tensor.contiguous().numpy().tobytes(), digest)
    return torch.tensor([digest >> 16, digest & 0xFFFF], dtype=torch.float32)
