"""train: continue the parent on the run's rows, with checkpoints that later attempts resume from; write the finished model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from pipeline import store
from pipeline.backends.device import Device
from pipeline.contract import EAGER_KINDS, Artifact
from pipeline.dataset.seen import write_seen
from pipeline.evaluation.holdout import read_judged
from pipeline.graphs.compiled import known_graphs
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.health.quick import quick_check
from pipeline.model.card import CARD, model_card
from pipeline.model.encoder import Encoder
from pipeline.model.folder import WEIGHTS, save_folder
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.shutdown import graceful_shutdown
from pipeline.sdk.monitor import HostMonitor
from pipeline.training.batches import Padding, TrainingBatches
from pipeline.training.checkpoint import CheckpointRetention, CheckpointWriter
from pipeline.training.host_state import host_weights
from pipeline.training.learning_rate import learning_rate
from pipeline.training.loop import Training, train
from pipeline.training.metrics import MetricsLog
from pipeline.training.setup import TrainState, gang_device, load_state
from pipeline.training.state import Progress


def run(context: StageContext) -> StageOutput | None:
    """Train all of the plan's steps, from the newest checkpoint or the parent.

    Returns:
        The leader's output; None on the other ranks.

    Raises:
        BadConfig: other ranks than the plan's.
        BadData: losses that are not finite.
        MissingInput: rows, parent or compiled graphs are not there, or all checkpoints are corrupt.
        UnhealthyHost: this node's host is sick, or becomes so.
        Transient: the process received SIGTERM, or storage fails.
        Defect: ranks whose weights are not the same; a graph that was not compiled ahead, where that ends a run.
    """
    plan, config = context.plan, context.plan.config
    with gang_device(context, plan) as device, ExitStack() as stack:
        # All ranks have the same graphs: one of them asks the storage for what was recorded and what is new.
        known = known_graphs(context) if context.world.is_leader else None
        watch = GraphWatch(device=device, known=known, stop=config.compile.new_graphs == "stop", cloudwatch=context.cloudwatch)
        quick_check(context, device, config.health_check)
        monitor = stack.enter_context(HostMonitor(context, device.kind))
        context.heartbeat.beat(note="fetching rows")
        rows = store.local_folder(context.paths.rows, context.scratch / "rows")
        state = load_state(context, device)
        progress = state.progress
        resumed_from = progress.step if state.checkpoint else None
        # Before the checkpoints, so that an upload on its way is not cut off by what ends the training.
        shutdown = stack.enter_context(graceful_shutdown())
        metrics = checkpoints = None
        if context.world.is_leader:
            local = context.scratch / "train"
            resumed = state.checkpoint.metrics if state.checkpoint else None
            metrics = stack.enter_context(MetricsLog(local / "logs", resumed, progress.step, context.cloudwatch))
            checkpoints = stack.enter_context(
                CheckpointWriter(
                    context.paths,
                    local,
                    plan.fingerprint,
                    CheckpointRetention(
                        newest=config.train.keep_checkpoints, every=config.train.keep_every, best=config.train.keep_best
                    ),
                    graphs=plan.graphs.train if plan.graphs else "",
                    resumed=resumed_from,
                )
            )
        train(
            Training(
                config=config,
                steps=plan.train.steps,
                device=device,
                encoder=state.encoder,
                optimizer=state.optimizer,
                source=state.source,
                batches=TrainingBatches(
                    rows,
                    context.world,
                    config.train,
                    padding=padding(device, state.encoder),
                    apart=config.cuts_batches(device.kind),
                    learning_rate=partial(
                        learning_rate, config.train, steps=plan.train.steps, warmup_steps=plan.train.warmup_steps
                    ),
                    shards=[shard.uri for shard in (*plan.train.new, *plan.train.replay)],
                ),
                validation=read_judged(rows, config, most=config.train.validation_queries),
                heartbeat=context.heartbeat,
                watch=watch,
                monitor=monitor,
                shutdown=shutdown,
                metrics=metrics,
                checkpoints=checkpoints,
            ),
            progress,
        )
        if not context.world.is_leader:
            state.optimizer.masters()
            return None
        output = finish(context, device, state, host_weights(state.encoder, state.optimizer, device), progress)
        write_seen(context.paths.bucket_root, plan, rows, progress.step, context.scratch)
        output.metrics["resumed_from"] = resumed_from
        if plan.graphs:
            output.metrics["graphs"] = watch.report(context)
        return output


def padding(device: Device, encoder: Encoder) -> Padding:
    """Return how much of a batch has to be padding."""
    if device.kind not in EAGER_KINDS:
        return Padding.PACKED
    return Padding.NONE if encoder.unpads else Padding.LONGEST


def finish(
    context: StageContext, device: Device, state: TrainState, weights: Mapping[str, Tensor], progress: Progress
) -> StageOutput:
    """Write the finished model and return the stage's output.

    Args:
        weights: the encoder's state on the host.
    """
    context.heartbeat.beat(progress.step, progress.step, unit="pairs", note="writing the model")
    folder = context.scratch / "train" / "model"
    # As embed cuts texts and embeddings: all who embed with the folder do it alike.
    embed = context.plan.config.embed
    save_folder(state.encoder, folder, state.source, weights, embed.length, embed.dimensions)
    (folder / CARD).write_text(model_card(context.plan, folder, progress.step, progress.pairs), encoding="utf-8")
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
            "checkpoint_stall_seconds": progress.stalled,
            "checkpoint_stall_share": progress.stalled / (progress.seconds + progress.stalled) if progress.seconds else 0.0,
            "padding_share": 1.0 - progress.tokens / progress.slots if progress.slots else 0.0,
            "device": device.kind,
            "precision": device.precision,
            "ranks": device.world.size,
        },
    )
