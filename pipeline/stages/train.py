"""train: continue the parent on the run's rows, with checkpoints that later attempts go on from; write the finished model."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from pipeline.contract import Artifact
from pipeline.errors import BadConfig, Defect
from pipeline.model.encoder import Encoder, prepare_for_training, require_length
from pipeline.model.folder import WEIGHTS, load_encoder, save_folder
from pipeline.plan import RunPlan
from pipeline.runtime import store
from pipeline.runtime.context import StageContext, StageOutput
from pipeline.runtime.device import Device, open_device
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpoint import (
    OPTIMIZER_FILE,
    Checkpoint,
    CheckpointWriter,
    fetch_checkpoint,
    find_checkpoint,
    load_optimizer,
    open_checkpoint,
)
from pipeline.training.loop import Training, train
from pipeline.training.metrics import MetricsLog
from pipeline.training.schedule_lr import learning_rate
from pipeline.training.state import Progress
from pipeline.training.step import build_optimizer
from pipeline.training.validation import read_validation_set

log = logging.getLogger("trnpipe")


def run(context: StageContext) -> StageOutput | None:
    """Train all of the plan's steps, from the newest checkpoint or the parent.

    Returns:
        The leader's output; None on the other ranks.

    Raises:
        BadConfig: other ranks than the plan's.
        BadData: losses that are not finite.
        MissingInput: rows or parent are not there, or all checkpoints are corrupt.
        Defect: ranks that do not start from the same weights.
    """
    plan, config = context.plan, context.plan.config
    if context.world.size != plan.world.ranks:
        raise BadConfig("the number of ranks is not the plan's", value=context.world.size, rule=f"{plan.world.ranks} ranks")
    with joined(context, plan) as device:
        rows = fetch_once(context, device, context.paths.rows, "rows")
        parent = fetch_once(context, device, plan.parent.folder, "parent")
        checkpoint = newest_checkpoint(context, device)
        progress = checkpoint.progress if checkpoint else Progress()
        resumed_from = checkpoint.progress.step if checkpoint else None

        encoder = device.place(load_encoder(checkpoint.folder if checkpoint else parent, config.model))
        require_length(encoder, max(*config.train.buckets, config.train.query_length), "train.buckets")
        require_length(encoder, max(config.embed.buckets), "embed.buckets")
        prepare_for_training(encoder, fused_attention=device.kind != "cpu", dropout=config.train.dropout)
        require_same_weights(encoder, device)
        optimizer = build_optimizer(encoder, config.train, device)
        if checkpoint:
            load_optimizer(encoder, optimizer, checkpoint.folder / OPTIMIZER_FILE)
            log.info("going on from the checkpoint of step %d", progress.step)
        batches = TrainingBatches(
            rows / "train.arrow",
            context.world,
            batch_size=config.train.batch_size,
            query_length=config.train.query_length,
            buckets=config.train.buckets,
            seed=config.seed,
            learning_rate=partial(learning_rate, config.train, steps=plan.train.steps, warmup_steps=plan.train.warmup_steps),
        )
        with ExitStack() as stack:
            metrics = checkpoints = None
            if context.world.is_leader:
                local = context.scratch / "train"
                metrics = stack.enter_context(
                    MetricsLog(local / "logs", checkpoint.metrics if checkpoint else None, progress.step)
                )
                checkpoints = stack.enter_context(
                    CheckpointWriter(context.paths, local, parent, plan.fingerprint, config.train.keep_checkpoints)
                )
            train(
                Training(
                    config=config,
                    steps=plan.train.steps,
                    device=device,
                    encoder=encoder,
                    optimizer=optimizer,
                    batches=batches,
                    validation=read_validation_set(rows, config.train.validation_queries),
                    heartbeat=context.heartbeat,
                    metrics=metrics,
                    checkpoints=checkpoints,
                ),
                progress,
            )
        if not context.world.is_leader:
            return None
        output = finish(context, device, encoder, parent, progress)
        output.metrics["resumed_from"] = resumed_from
        return output


@contextmanager
def joined(context: StageContext, plan: RunPlan) -> Iterator[Device]:
    """This rank's device for as long as the gang works."""
    threads = plan.config.device.threads_per_rank
    device = open_device(plan.world.kind, plan.world.precision, context.world, threads=threads)
    try:
        yield device
    finally:
        device.close()


def fetch_once(context: StageContext, device: Device, uri: str, name: str) -> Path:
    """A local folder with what stands under `uri`, fetched by one rank of each node for all of them."""
    if not store.is_s3(uri):
        return store.local_folder(uri, context.scratch)
    folder = context.scratch / name
    context.heartbeat.beat(note=f"fetching {name}")
    if context.world.local_rank == 0:
        store.download_folder(uri, folder)
    device.barrier()
    return folder


def newest_checkpoint(context: StageContext, device: Device) -> Checkpoint | None:
    """The checkpoint that all ranks go on from: the leader chooses, one rank of each node fetches it."""
    scratch, fingerprint = context.scratch / "resumed", context.plan.fingerprint
    context.heartbeat.beat(note="looking for a checkpoint")
    found = find_checkpoint(context.paths, fingerprint, scratch) if context.world.is_leader else None
    choice = torch.tensor([found.progress.step if found else -1], dtype=torch.int32, device=device.torch_device)
    step = int(device.read(device.broadcast(choice))[0])
    if step < 0:
        return None
    if context.world.local_rank == 0 and found is None:
        fetch_checkpoint(context.paths, step, fingerprint, scratch)
    device.barrier()
    return open_checkpoint(scratch / f"step-{step:08d}")


def require_same_weights(encoder: Encoder, device: Device) -> None:
    """Without a wrapper that broadcasts, ranks are alike because they start alike: prove that they do.

    Raises:
        Defect: this rank's weights are not the leader's.
    """
    digest = 0
    for tensor in encoder.state_dict().values():
        digest = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), digest)
    mine = torch.tensor([digest >> 16, digest & 0xFFFF], dtype=torch.float32, device=device.torch_device)
    if device.read(device.broadcast(mine)) != device.read(mine):
        raise Defect("this rank's weights are not the leader's", value=f"rank {device.world.rank}")


def finish(context: StageContext, device: Device, encoder: Encoder, parent: Path, progress: Progress) -> StageOutput:
    """Write the finished model, and say what was done."""
    context.heartbeat.beat(progress.step, progress.step, unit="pairs", note="writing the model")
    folder = context.scratch / "train" / "model"
    save_folder(encoder, folder, parent)
    written = store.upload_folder(folder, context.paths.model)
    return StageOutput(
        inputs={"parent": Artifact(context.plan.parent.uri, context.plan.parent.sha256)},
        outputs={
            "model": Artifact(context.paths.model, written[WEIGHTS].sha256, sum(artifact.size for artifact in written.values())),
            "metrics": Artifact(context.paths.metrics, store.sha256(context.paths.metrics)),
        },
        metrics={
            "steps": progress.step,
            "pairs": progress.pairs,
            "seconds": progress.seconds,
            "pairs_per_second": progress.pairs / progress.seconds if progress.seconds else 0.0,
            "final_loss": progress.loss,
            "first_validation": progress.first_validation,
            "last_validation": progress.last_validation,
            "checkpoints": progress.checkpoints,
            "padding_share": 1.0 - progress.tokens / progress.slots if progress.slots else 0.0,
            "device": device.kind,
            "precision": device.precision,
            "ranks": device.world.size,
        },
    )
