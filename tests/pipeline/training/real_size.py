"""Trains a model of real size for two steps, once in one go and once from the checkpoint between them; tells what it found as JSON.

    python -m tests.pipeline.training.real_size FOLDER

A process of its own, because its memory is one of the results. The model has XLM-R large's layers and the tiny tokenizer's words.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import XLMRobertaConfig

from pipeline.config import ModelConfig
from pipeline.contract import RunPaths, Stage
from pipeline.model import memory
from pipeline.model.encoder import new_encoder
from pipeline.model.folder import WEIGHTS, save_folder
from pipeline.model.watch import GraphWatch
from pipeline.plan import Parent, RunPlan
from pipeline.runtime import store
from pipeline.runtime.context import Heartbeat, StageContext
from pipeline.runtime.device import Device
from pipeline.runtime.world import World
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpoint import CheckpointWriter
from pipeline.training.loop import Training, train
from pipeline.training.metrics import MetricsLog
from pipeline.training.schedule_lr import learning_rate
from pipeline.training.setup import Start, fetch_once, host_digest, joined, start
from pipeline.training.validation import read_validation_set
from tests.pipeline.training.planned import plan_training
from tests.tiny import WORDS

STEPS = 2
XLM_ROBERTA_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
"""config.json of FacebookAI/xlm-roberta-large."""


def main(folder: Path) -> None:
    """Everything; prints one JSON object at the end."""
    found: dict[str, Any] = {"base": process_bytes("VmRSS")}
    paths = RunPaths(f"{folder}/bucket/runs/week-01")
    plan = plan_real_size(paths, folder / "local")
    shape = memory.fetch_shape(plan.parent.folder, plan.config.model, folder)
    found["parameters"] = shape.parameters
    budgets = memory.estimate(shape, plan.config, plan.world, memory.Limits(None, None))
    found["expected_peak"] = next(one.total for one in budgets if (one.stage, one.place) == ("train", "host"))
    gc.collect()

    context = attempt(paths, folder / "first")
    with joined(context, plan) as device, ExitStack() as stack:
        begin = start(context, device)
        local = folder / "first" / "train"
        metrics = stack.enter_context(MetricsLog(local / "logs", None, 0))
        writer = stack.enter_context(CheckpointWriter(paths, local, begin.parent, plan.fingerprint, keep=1))
        progress = begin.progress
        train(training(context, device, begin, steps=1, metrics=metrics, checkpoints=writer), progress)
        writer.wait()
        train(training(context, device, begin, steps=STEPS), progress)
        found["whole"] = [progress.step, progress.loss, host_digest(begin.encoder).tolist()]
        found["peak"] = process_bytes("VmHWM")
    del begin, metrics, writer
    gc.collect()

    context = attempt(paths, folder / "second")
    with joined(context, plan) as device:
        begin = start(context, device)
        progress = begin.progress
        found["resumed_from"] = progress.step
        train(training(context, device, begin, steps=STEPS), progress)
        found["resumed"] = [progress.step, progress.loss, host_digest(begin.encoder).tolist()]
    sys.stdout.write(json.dumps(found) + "\n")


def plan_real_size(paths: RunPaths, local: Path) -> RunPlan:
    """A run of two steps whose parent is large; rows and tokenizer are the tiny ones."""
    tiny = plan_training(
        paths,
        local,
        steps=STEPS,
        rows=8,
        batch_size=2,
        query_length=8,
        buckets=[16],
        validation_queries=2,
        sections={"embed": {"buckets": [16], "tokens_per_batch": 64}, "device": {"threads_per_rank": 2}},
    )
    torch.manual_seed(0)
    backbone = XLMRobertaConfig(vocab_size=len(WORDS) + 5, max_position_embeddings=514, pad_token_id=1, **XLM_ROBERTA_LARGE)
    folder = local / "large"
    save_folder(new_encoder(backbone, ModelConfig()), folder, local / "parent")
    parent = Parent(uri=str(folder), folder=str(folder), sha256=store.sha256_file(folder / WEIGHTS))
    plan = tiny.model_copy(update={"parent": parent}).sealed()
    store.write_bytes(paths.plan, plan.to_json())
    return plan


def attempt(paths: RunPaths, scratch: Path) -> StageContext:
    scratch.mkdir(parents=True)
    return StageContext(stage=Stage.TRAIN, paths=paths, world=World(), scratch=scratch, heartbeat=Heartbeat(None, 0))


def training(
    context: StageContext,
    device: Device,
    begin: Start,
    *,
    steps: int,
    metrics: MetricsLog | None = None,
    checkpoints: CheckpointWriter | None = None,
) -> Training:
    """As the train stage puts it together."""
    config = context.plan.config
    rows = fetch_once(context, device, context.paths.rows, "rows")
    return Training(
        config=config,
        steps=steps,
        device=device,
        encoder=begin.encoder,
        optimizer=begin.optimizer,
        batches=TrainingBatches(
            rows / "train.arrow",
            context.world,
            batch_size=config.train.batch_size,
            accumulation=config.train.accumulation,
            query_length=config.train.query_length,
            buckets=config.train.buckets,
            seed=config.seed,
            learning_rate=partial(learning_rate, config.train, steps=STEPS, warmup_steps=0),
        ),
        validation=read_validation_set(rows, config.train.validation_queries),
        heartbeat=context.heartbeat,
        watch=GraphWatch(device=device),
        metrics=metrics,
        checkpoints=checkpoints,
    )


def process_bytes(name: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS is the memory held now, VmHWM the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
