"""The training loop: steps, and now and then a line of metrics, a validation, a checkpoint. The same on every kind of device."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.backends.device import Device
from pipeline.config import RunConfig
from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadData, Transient
from pipeline.evaluation.holdout import Holdout
from pipeline.evaluation.validation import validate
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.log import log
from pipeline.model.encoder import Encoder
from pipeline.run.context import Heartbeat
from pipeline.run.heartbeat import FIRST_STEP_PATIENCE
from pipeline.run.shutdown import ShutdownRequest
from pipeline.sdk.monitor import HostMonitor
from pipeline.training.batches import Batches
from pipeline.training.checkpoint import CheckpointWriter
from pipeline.training.digest import chain
from pipeline.training.host_state import checkpoint_files
from pipeline.training.metrics import MetricsLog
from pipeline.training.optimizer import AdamW
from pipeline.training.state import MetricsWindow, Progress
from pipeline.training.step import RecentLosses, require_equal_weights, step_seed, train_step

FIRST_STEPS = 32
"""Steps of an attempt in which every graph has been loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everything that takes part in a rank's training.

    Attributes:
        steps: optimizer steps of the whole run.
        source: a model folder with the tokenizer.
        watch: compares compiled graphs with the recorded ones.
        monitor: watches the host.
        shutdown: whether to end before the last step.
        metrics, checkpoints: the leader's; None on the other ranks.
    """

    config: RunConfig
    steps: int
    device: Device
    encoder: Encoder
    optimizer: AdamW
    source: Path
    batches: Batches
    validation: Holdout
    heartbeat: Heartbeat
    watch: GraphWatch
    monitor: HostMonitor
    shutdown: ShutdownRequest
    metrics: MetricsLog | None
    checkpoints: CheckpointWriter | None


def train(run: Training, progress: Progress) -> None:
    """Train from `progress.step` to the last step; `progress` is kept up to date throughout.

    Raises:
        BadData: a loss or gradient that is not finite, named by step and rows.
        UnhealthyHost: this node's hardware fails.
        Transient: the process received SIGTERM, and has written a checkpoint first (the leader); or an upload failed.
    """
    config, device = run.config.train, run.device
    losses = RecentLosses(config.log_every, device)
    if progress.step == 0:
        _validate(run, progress)
    run.encoder.train()
    clock = _start_clock(run)
    first = progress.step
    for number, batch in enumerate(device.batches(run.batches.iterate(progress.step, run.steps))):
        # The sync point that ended the step before came with this batch.
        run.watch.check(progress.step)
        position = number % config.accumulation
        complete = position == config.accumulation - 1
        train_step(
            run.encoder,
            run.optimizer,
            device,
            batch,
            config,
            losses,
            seed_of=partial(step_seed, run.config.seed, progress.step * config.accumulation + position, device.world.rank),
            last=complete,
            sync_points=run.config.device.sync_points,
        )
        if not complete:
            continue
        _count(run, progress, first)
        if run.checkpoints is not None:
            run.checkpoints.check()

        step, last = progress.step, progress.step == run.steps
        log_due, validation_due, checkpoint_due = (
            last or step % every == 0 for every in (config.log_every, config.validate_every, config.checkpoint_every)
        )
        # Of the ranks that received SIGTERM only the leader ends here, which can write a checkpoint without the others; they take
        # part in its steps until it is gone, or they are killed. Joined steps are not cut: that would be a graph that is not
        # compiled. And only together with the others can a rank write a checkpoint of a sharded optimizer.
        whole = step % run.config.device.loader.batches_per_execution == 0 and (checkpoint_due or not run.optimizer.sharded)
        told = run.shutdown.received and device.world.is_leader and whole
        if not (log_due or validation_due or checkpoint_due or told):
            continue
        run.monitor.check()
        # Reading cuts the graph where it stands: only ever at the end of a step.
        device.sync()
        _read(run, progress, losses)
        clock = _spend(run, progress, clock)
        if log_due:
            _log(run, progress)
        if validation_due:
            _validate(run, progress)
        if checkpoint_due:
            require_equal_weights(run.encoder, run.device)
        if checkpoint_due or told:
            _checkpoint(run, progress, validated=validation_due)
        if told:
            raise _interrupted(run, progress)
        if validation_due or checkpoint_due:
            clock = _start_clock(run)
    run.watch.check(progress.step)
    if run.checkpoints is not None:
        run.checkpoints.wait()


def _interrupted(run: Training, progress: Progress) -> Transient:
    """Return the failure of an interrupted training, once its checkpoint is uploaded.

    Raises:
        TrnpipeError: the upload failed.
    """
    if run.checkpoints is not None:
        run.checkpoints.wait()
    return Transient(
        "training was interrupted",
        value=f"after step {progress.step} of {run.steps}",
        rule="a checkpoint of this step is written; the next attempt resumes from it",
        remedy="none is needed, unless this was unintended",
    )


def _count(run: Training, progress: Progress, first: int) -> None:
    facts = run.batches.take_facts(progress.step)
    progress.step += 1
    progress.data_digest = chain(progress.data_digest, facts.digest)
    for target in (progress, progress.window):
        target.pairs += facts.pairs
        target.tokens += facts.tokens
        target.slots += facts.slots
    rate = progress.pairs / progress.seconds if progress.seconds else 0.0
    patience = FIRST_STEP_PATIENCE if run.device.kind not in EAGER_KINDS and progress.step - first < FIRST_STEPS else 0.0
    run.heartbeat.beat(progress.step, run.steps, unit="pairs", rate=rate, note="training", patience=patience)


def _read(run: Training, progress: Progress, losses: RecentLosses) -> None:
    """Fetch the losses of the latest steps; the first one that is not finite ends the run, before a checkpoint can hold it."""
    values = losses.read()
    for number, (loss, norm) in enumerate(values, start=progress.step - len(values)):
        if run.device.computes and not (math.isfinite(loss) and math.isfinite(norm)):
            raise BadData(
                "the loss or its gradient is not finite",
                value=[
                    f"step {number + 1}: loss {loss}, gradient norm {norm}",
                    *(f"row {row}" for row in run.batches.row_ids(number)),
                ],
                rule="loss and gradient are numbers at every step; the rows are those of the first step where they are not",
                remedy="look at these rows, or lower train.learning_rate",
            )
    progress.window.losses += [loss for loss, _ in values]
    progress.window.norms += [norm for _, norm in values]


def _start_clock(run: Training) -> float:
    # A validation waits for its own batches, which are not training's.
    run.device.waits.seconds = 0.0
    return time.monotonic()


def _spend(run: Training, progress: Progress, since: float) -> float:
    moment = time.monotonic()
    progress.window.waited += run.device.waits.seconds
    run.device.waits.seconds = 0.0
    progress.seconds += moment - since
    progress.window.seconds += moment - since
    return moment


def _log(run: Training, progress: Progress) -> None:
    window, progress.window = progress.window, MetricsWindow()
    progress.loss = sum(window.losses) / len(window.losses)
    if run.metrics is None:
        return
    values = {
        "loss": progress.loss,
        "lr": float(run.device.read(run.optimizer.param_groups[0]["lr"])[0]),
        "grad_norm": sum(window.norms) / len(window.norms),
        "pairs_per_second": window.pairs / window.seconds,
        "step_seconds": window.seconds / len(window.losses),
        "data_wait_share": window.waited / window.seconds,
        "padding_share": 1.0 - window.tokens / window.slots,
        "checkpoint_stall_seconds": window.stalled,
    }
    if run.device.kind not in EAGER_KINDS:
        values |= run.watch.metrics()
    values |= run.monitor.latest()
    run.metrics.training(progress.step, values, progress.data_digest)
    log.info(
        "step %d of %d: loss %.4f, lr %.3g, gradient norm %.3f, %.0f pairs/s",
        progress.step,
        run.steps,
        values["loss"],
        values["lr"],
        values["grad_norm"],
        values["pairs_per_second"],
    )


def _validate(run: Training, progress: Progress) -> None:
    found = validate(
        run.encoder,
        run.device,
        run.validation,
        run.config.embed,
        lambda *_: run.heartbeat.beat(progress.step, run.steps, unit="pairs", note="validation"),
    )
    if found is None or run.metrics is None:
        return
    values = found.means()
    progress.first_validation = progress.first_validation or values
    progress.last_validation = values
    run.metrics.validation(progress.step, found)
    log.info("step %d: %s", progress.step, ", ".join(f"{name} {value:.4f}" for name, value in values.items()))


def _checkpoint(run: Training, progress: Progress, *, validated: bool) -> None:
    """Hand a copy of everything to the writer; what this costs is time in which training waits.

    Args:
        validated: whether this step was evaluated, so that the checkpoint may turn out to be the best one.
    """
    progress.checkpoints += 1
    if run.checkpoints is None or run.metrics is None:
        if run.optimizer.sharded:
            run.optimizer.masters()
            run.optimizer.host_state()
        return
    begun = time.monotonic()
    run.heartbeat.beat(progress.step, run.steps, unit="pairs", note="checkpoint")
    run.metrics.snapshot(run.checkpoints.folder(progress.step))
    files = checkpoint_files(run.encoder, run.optimizer, run.device, run.source)
    score = progress.last_validation.get(run.config.gate.metric_of_each) if validated else None
    run.checkpoints.save(progress, files, score=score)
    stalled = time.monotonic() - begun
    for target in (progress, progress.window):
        target.stalled += stalled
