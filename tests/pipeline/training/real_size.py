"""Trains a model of real size for two steps, in one go and from the checkpoint between them; tells what it found as JSON.

    python -m tests.pipeline.training.real_size FOLDER      trains on `cpu`
    python -m tests.pipeline.training.real_size --lower     writes down what 64 ranks would compile, and runs nothing

Processes of their own, because memory is one of the results. The model has XLM-R large's layers and the tiny tokenizer's words.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import XLMRobertaConfig

from pipeline import store
from pipeline.backends.device import Device
from pipeline.config import build_config
from pipeline.contract import RunPaths, Stage
from pipeline.estimate import memory
from pipeline.evaluation.holdout import read_holdout
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.model.encoder import Encoder, new_encoder, prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.model.shape import shape_of
from pipeline.plan import RunPlan
from pipeline.run.context import Heartbeat, StageContext
from pipeline.run.shutdown import ShutdownRequest
from pipeline.run.world import World
from pipeline.sdk.monitor import HostMonitor
from pipeline.training.batches import Padding, TrainingBatches
from pipeline.training.checkpoint import PROGRESS_FILE, open_checkpoint
from pipeline.training.host_state import OPTIMIZER_FILE, checkpoint_files, load_optimizer
from pipeline.training.learning_rate import learning_rate
from pipeline.training.loop import Training, train
from pipeline.training.setup import gang_device, host_digest
from pipeline.training.state import Progress
from pipeline.training.step import build_optimizer
from tests.pipeline.training.planned import plan_training
from tests.tiny import WORDS

STEPS = 2
RANKS = 64
XLM_ROBERTA_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
"""config.json of FacebookAI/xlm-roberta-large."""


def main(folder: Path) -> None:
    """Everything; prints one JSON object at the end."""
    found: dict[str, Any] = {"base": process_bytes("VmRSS")}
    paths = RunPaths(f"{folder}/bucket/runs/week-01")
    plan = plan_training(
        paths,
        folder / "local",
        steps=STEPS,
        rows=8,
        batch_size=2,
        query_length=8,
        length=16,
        validation_queries=2,
        sections={"embed": {"length": 16, "tokens_per_batch": 64}, "device": {"threads_per_rank": 2}},
    )
    parent, checkpoint = folder / "local" / "parent", folder / "step-00000001"
    context = StageContext(stage=Stage.TRAIN, paths=paths, world=World(), scratch=folder, heartbeat=Heartbeat(None, 0))
    with gang_device(context, plan) as device:
        torch.manual_seed(0)
        encoder = new_encoder(xlm_roberta_large(), plan.config.model)
        shape = shape_of(encoder)
        found["parameters"] = shape.parameters
        budgets = memory.estimate_memory(shape, plan.config, plan.world, memory.MemoryCapacity(None, None))
        found["expected_peak"] = next(one.total for one in budgets if (one.stage, one.place) == ("train", "host"))

        optimizer = begin(encoder, device, plan)
        progress = Progress()
        train(training(context, device, encoder, optimizer, steps=1), progress)
        # What CheckpointWriter leaves in its scratch folder; it would copy the files twice more, and read them as often.
        checkpoint_files(encoder, optimizer, device, parent)(checkpoint)
        (checkpoint / PROGRESS_FILE).write_bytes(progress.to_json())
        train(training(context, device, encoder, optimizer, steps=STEPS), progress)
        found["whole"] = [progress.step, progress.loss, host_digest(encoder).tolist()]
        found["peak"] = process_bytes("VmHWM")
        del encoder, optimizer
        gc.collect()

        resumed = open_checkpoint(checkpoint)
        found["resumed_from"] = resumed.progress.step
        encoder = load_encoder(resumed.folder, plan.config.model)
        optimizer = begin(encoder, device, plan)
        load_optimizer(encoder, optimizer, resumed.folder / OPTIMIZER_FILE)
        train(training(context, device, encoder, optimizer, steps=STEPS), resumed.progress)
        found["resumed"] = [resumed.progress.step, resumed.progress.loss, host_digest(encoder).tolist()]
    sys.stdout.write(json.dumps(found) + "\n")


def lower() -> None:
    """The graphs of a step of 64 ranks, as the first and the last of them would compile them."""
    # Imported here: it takes over the process.
    from tests.pipeline.training.lowering import lower_training

    config = build_config({"train": {"batch_size": 32, "query_length": 32, "length": 128, "micro_batches": 2}})
    found: dict[str, Any] = {"ranks": {}}
    for rank in (0, RANKS - 1):
        encoder = new_encoder(xlm_roberta_large(), config.model)
        graphs = lower_training(encoder, config, "bf16", World(rank=rank, size=RANKS))
        found["ranks"][rank] = [
            {"fingerprint": graph.fingerprint, "operations": graph.description.size, "collectives": graph.description.collectives}
            for graph in graphs
        ]
        del encoder, graphs
        gc.collect()
    found["peak"] = process_bytes("VmHWM")
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    # torch-xla's threads have nothing more to say.
    os._exit(0)


def xlm_roberta_large() -> XLMRobertaConfig:
    return XLMRobertaConfig(vocab_size=len(WORDS) + 5, max_position_embeddings=514, pad_token_id=1, **XLM_ROBERTA_LARGE)


def begin(encoder: Encoder, device: Device, plan: RunPlan) -> torch.optim.AdamW:
    """The optimizer, once the encoder is as training wants it."""
    prepare_for_training(encoder, fused_attention=device.kind == "cuda", dropout=plan.config.train.dropout)
    return build_optimizer(device.place(encoder), plan.config.train, device)


def training(
    context: StageContext, device: Device, encoder: Encoder, optimizer: torch.optim.Optimizer, *, steps: int
) -> Training:
    """As the train stage puts it together."""
    config = context.plan.config
    rows = store.local_folder(context.paths.rows, context.scratch / "rows")
    return Training(
        config=config,
        steps=steps,
        device=device,
        encoder=encoder,
        optimizer=optimizer,
        source=context.scratch / "local" / "parent",
        batches=TrainingBatches(
            rows,
            context.world,
            config.train,
            padding=Padding.LONGEST,
            learning_rate=partial(learning_rate, config.train, steps=STEPS, warmup_steps=0),
        ),
        validation=read_holdout(rows, most=config.train.validation_queries),
        heartbeat=context.heartbeat,
        watch=GraphWatch(device=device),
        monitor=HostMonitor(context, ""),
        shutdown=ShutdownRequest(),
        metrics=None,
        checkpoints=None,
    )


def process_bytes(name: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS is the memory held now, VmHWM the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


if __name__ == "__main__":
    if sys.argv[1] == "--lower":
        lower()
    else:
        main(Path(sys.argv[1]))
