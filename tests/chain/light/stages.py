"""health_check, train and evaluate with arithmetic in place of mathematics, and everything else as the real stages do it.

The weights are a hash chain: after a step they depend on the weights before it and on the version of every row of the step, so
two trainings end with the same weights only if both took every row of every step exactly once, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np

from pipeline import store
from pipeline.contract import Artifact, Stage, now
from pipeline.dataset.row_files import read_table
from pipeline.dataset.seen import write_seen
from pipeline.errors import Defect, Transient, UnhealthyHost
from pipeline.evaluation.holdout import read_holdout
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.retrieval_metrics import measure_others, ranked_depth
from pipeline.evaluation.vectors import write_vectors
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.shutdown import ShutdownRequest, graceful_shutdown
from pipeline.training.checkpoint import (
    Checkpoint,
    CheckpointRetention,
    CheckpointWriter,
    fetch_checkpoint,
    find_checkpoint,
    open_checkpoint,
)
from pipeline.training.digest import chain
from pipeline.training.metrics import METRICS_FILE
from pipeline.training.state import Progress
from tests.chain.light.exchange import Exchange, joined
from tests.chain.light.mathematics import DIMENSION, PACE_SECONDS, WEIGHTS, Device, Encoder, encode

WEIGHT_BYTES = 64 << 10
MODEL_FILES = ("config.json", "tokenizer.json")
CHECKED_VALUES = list(range(16))


def install() -> None:
    """Put the stages where `pipeline.stages.stage_function` looks first."""
    for stage, function in ((Stage.HEALTH_CHECK, health_check), (Stage.TRAIN, train), (Stage.EVALUATE, evaluate)):
        module = ModuleType(f"pipeline.stages.{stage}")
        module.run = function  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def health_check(context: StageContext) -> StageOutput | None:
    """A sum over all ranks whose every element is known, and a file that comes back as it was written."""
    world, node = context.world, context.world.node
    with joined(world, lambda: context.heartbeat.beat(note="waiting for the gang")) as exchange:
        found = exchange.all_reduce([value + world.rank for value in CHECKED_VALUES])
        expected = [sum(value + rank for rank in range(world.size)) for value in CHECKED_VALUES]
        record = {"node": node.node, "host": node.host, "passed": found == expected, "time": now()}
        store.write_json(context.paths.node_health(node.node), record)
        if store.read_json(context.paths.node_health(node.node)) != record or found != expected:
            raise UnhealthyHost(
                f"node {node.node} ({node.host}) failed its health check: all_reduce",
                value=f"{found}",
                rule=f"{expected}",
                remedy="the run is retried on another host",
            )
        exchange.all_gather("checked")
    return StageOutput(metrics={"nodes": world.size, "passed": True}) if world.is_leader else None


def train(context: StageContext) -> StageOutput | None:
    """All of the plan's steps, from the newest checkpoint or the parent."""
    with joined(context.world, lambda: context.heartbeat.beat(note="waiting for the gang")) as exchange, ExitStack() as stack:
        return Training(context, exchange, stack.enter_context(graceful_shutdown()), stack).run()


class Training:
    """One rank's training: what pipeline/training/loop does, around another step."""

    def __init__(self, context: StageContext, exchange: Exchange, shutdown: ShutdownRequest, stack: ExitStack) -> None:
        self._context = context
        self._exchange = exchange
        self._shutdown = shutdown
        self._rows = store.local_folder(context.paths.rows, context.scratch / "rows")
        self._versions = read_table(self._rows / "train.arrow")["version"].to_pylist()
        self._parent = store.local_folder(context.plan.parent.folder, context.scratch / "parent")
        checkpoint = _newest_checkpoint(context, exchange)
        self.progress = checkpoint.progress if checkpoint else Progress()
        self._resumed = checkpoint.progress.step if checkpoint else None
        self._weights = _digest_of(checkpoint.folder if checkpoint else self._parent)
        self._lines = checkpoint.metrics.read_text().splitlines() if checkpoint else []
        self._writer: CheckpointWriter | None = None
        if context.world.is_leader:
            config = context.plan.config.train
            retention = CheckpointRetention(newest=config.keep_checkpoints, every=config.keep_every, best=config.keep_best)
            self._writer = stack.enter_context(
                CheckpointWriter(
                    context.paths, context.scratch / "train", context.plan.fingerprint, retention, resumed=self._resumed
                )
            )

    def run(self) -> StageOutput | None:
        plan, config = self._context.plan, self._context.plan.config.train
        while self.progress.step < plan.train.steps:
            self._step()
            step, last = self.progress.step, self.progress.step == plan.train.steps
            if self._writer is not None:
                self._writer.check()
            told = self._shutdown.received and self._context.world.is_leader
            due = last or step % config.checkpoint_every == 0
            if due and len({*self._exchange.all_gather(self._weights)}) != 1:
                raise Defect("ranks whose weights are not the same")
            if due or told:
                self._checkpoint()
            if told:
                assert self._writer is not None
                self._writer.wait()
                raise Transient("training was interrupted", value=f"after step {step} of {plan.train.steps}")
        return self._finish() if self._context.world.is_leader else None

    def _step(self) -> None:
        plan, world = self._context.plan.train, self._context.world
        rows = self._versions[self.progress.step % plan.steps :: plan.steps][world.rank :: world.size]
        time.sleep(PACE_SECONDS)
        share = hashlib.sha256(f"{self._weights} {self.progress.step} {rows}".encode()).hexdigest()
        shares = self._exchange.all_gather(share)
        self._weights = hashlib.sha256(" ".join([self._weights, *shares]).encode()).hexdigest()
        self.progress.step += 1
        self.progress.pairs += len(self._versions[self.progress.step % plan.steps :: plan.steps])
        self.progress.data_digest = chain(self.progress.data_digest, " ".join(shares))
        self._lines.append(json.dumps({"step": self.progress.step, "loss": 1 / self.progress.step, "time": time.time()}))
        self._context.heartbeat.beat(self.progress.step, plan.steps, unit="pairs", note="training")

    def _checkpoint(self) -> None:
        self.progress.checkpoints += 1
        if self._writer is None:
            return
        folder = self._writer.folder(self.progress.step)
        (folder / METRICS_FILE).write_text("".join(f"{line}\n" for line in self._lines))
        weights, parent = self._weights, self._parent
        self._writer.save(self.progress, lambda folder: _write_model(folder, weights, parent))

    def _finish(self) -> StageOutput:
        context = self._context
        assert self._writer is not None
        self._writer.wait()
        folder = context.scratch / "train" / "model"
        folder.mkdir(parents=True, exist_ok=True)
        _write_model(folder, self._weights, self._parent)
        written = store.upload_folder(folder, context.paths.model)
        write_seen(context.paths.bucket_root, context.plan, self._rows, self.progress.step, context.scratch)
        return StageOutput(
            inputs={"parent": Artifact(context.plan.parent.uri, context.plan.parent.sha256)},
            outputs={"model": Artifact(context.paths.model, written[WEIGHTS].sha256)},
            metrics={"steps": self.progress.step, "pairs": self.progress.pairs, "resumed_from": self._resumed},
        )


def evaluate(context: StageContext) -> StageOutput:
    """A verdict on exactly the weights that are there: better than the baseline whatever they are.

    The vectors and what each query got are right, because publish measures them again.
    """
    holdout = read_holdout(store.local_folder(context.paths.rows, context.scratch / "rows"))
    texts = [*holdout.candidates, *holdout.queries]
    encoder = Encoder(store.sha256(store.join(context.paths.model, WEIGHTS)))
    found = encode(encoder, Device(), texts, (), 0, on_progress=lambda *_: None).embeddings
    write_vectors(context.scratch / "vectors.npy", texts, [(np.arange(len(texts)), found)], DIMENSION)
    candidates, queries = np.split(found.numpy(), [len(holdout.candidates)])
    ranked = np.argsort(-(queries @ candidates.T), axis=1, kind="stable")[:, : ranked_depth(holdout.known)]
    values = measure_others(ranked, holdout.relevant, holdout.known)
    QueryValues(holdout.keys, values).write(context.scratch / "queries.parquet")
    store.upload(context.scratch / "vectors.npy", context.paths.vectors)
    store.upload(context.scratch / "queries.parquet", context.paths.query_values)
    for done in range(10):
        context.heartbeat.beat(done, 10, unit="queries", note="evaluating")
        time.sleep(PACE_SECONDS)
    scores = {"baseline": {"ndcg@10": 0.5}, "new": {"ndcg@10": 0.6}, "difference": {"ndcg@10": 0.1}}
    gate = {"metric": "ndcg@10", "verdict": "accepted", "reason": "ndcg@10 0.6000 is not below 0.4990"}
    weights = store.join(context.paths.model, WEIGHTS)
    store.write_json(context.paths.scorecard, {**scores, "gate": gate})
    return StageOutput(
        inputs={"model": Artifact(weights, store.sha256(weights))},
        outputs={"scorecard": Artifact(context.paths.scorecard, store.sha256(context.paths.scorecard))},
        metrics={**scores, "gate": gate, "refresh": context.plan.published is not None},
    )


def _newest_checkpoint(context: StageContext, exchange: Exchange) -> Checkpoint | None:
    """The leader chooses, one rank of each node fetches, as in pipeline/training/setup."""
    scratch, fingerprint = context.scratch / "resumed", context.plan.fingerprint
    context.heartbeat.beat(note="looking for a checkpoint")
    found = find_checkpoint(context.paths, fingerprint, scratch) if context.world.is_leader else None
    step = exchange.broadcast(found.progress.step if found else None)
    if step is None:
        return None
    if context.world.local_rank == 0 and found is None:
        fetch_checkpoint(context.paths, step, fingerprint, scratch)
    exchange.all_gather("fetched")
    return open_checkpoint(scratch / f"step-{step:08d}")


def _write_model(folder: Path, weights: str, parent: Path) -> None:
    state = bytes.fromhex(weights)
    (folder / WEIGHTS).write_bytes(state + hashlib.shake_256(state).digest(WEIGHT_BYTES))
    for name in MODEL_FILES:
        shutil.copyfile(parent / name, folder / name)


def _digest_of(folder: Path) -> str:
    """The weights' state: their file's first bytes. A parent's file may hold anything."""
    return (folder / WEIGHTS).read_bytes()[:32].hex()
