"""BERT-base with random weights on a task with classes: steps of the train stage beside those of transformers' Trainer.

    make bench ARGS=--help                         (sets up .bench, the peers' environment)
    python -m tests.benchmarks.peers.bert_steps [--steps 6] [--batch 16] [--length 128] [--threads 2]

The model of AWS's sample of review classification: BertForSequenceClassification, two labels, without dropout, fp32. Texts are
docstrings, cut to `--length` tokens, with a label by their package. Every step has all rows, so that both have the same batches;
AdamW with a constant rate and a large epsilon, as with a small one it makes full steps out of gradients that are rounding. One
process each, one after the other.

Printed: the loss of each step of both, and its relative difference; the median seconds of a step after the first; and the peak
memory of the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from infra.local.demo import initial_folder
from pipeline.config import ModelConfig
from pipeline.contract import Stage
from pipeline.model.classifier import add_classifiers
from pipeline.model.folder import load_encoder, save_folder
from tests.benchmarks.peers.__main__ import peer
from tests.benchmarks.peers.texts import pairs
from tests.benchmarks.train_step import KEEP_MEMORY
from tests.pipeline.stages.planning import Bench, held_out

CLASSES = ("0", "1")
"""1: it is torch's."""
FRACTION = 0.05
HELD_OUT = 4
RATE, EPSILON = 1e-4, 1e-3
"""The peer has the same."""


class Measured(NamedTuple):
    """The loss and the seconds of each step, and the process's peak memory in MiB."""

    losses: list[float]
    seconds: list[float]
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--steps", 6), ("--batch", 16), ("--length", 128), ("--threads", 2)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    rows = [
        {"query": pair.document, "document": CLASSES[pair.id.startswith("torch.")], "task": "label"}
        for pair in pairs()
        if len(pair.document) > 4 * options.length
    ]
    held = [row for row in rows if held_out({"document": row["query"]}, FRACTION)][:HELD_OUT]
    train = [row for row in rows if not held_out({"document": row["query"]}, FRACTION)][: options.batch]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        measured = [trainer(folder, train, options)]
        # As ranks are started; a process reads it at its start.
        os.environ |= KEEP_MEMORY
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            measured.append(pool.submit(stage, folder, train, held, options).result())
    print(f"{'step':<10}{'Trainer':>12}{'trnpipe':>12}{'relative difference':>22}")
    for step, (theirs, ours) in enumerate(zip(*(one.losses for one in measured), strict=True), 1):
        print(f"{step:<10}{theirs:>12.7f}{ours:>12.7f}{abs(ours / theirs - 1):>22.1e}")
    seconds = [statistics.median(one.seconds[1:]) for one in measured]
    print(f"{'s/step':<10}{seconds[0]:>12.2f}{seconds[1]:>12.2f}{seconds[1] / seconds[0]:>21.2f}x")
    print(f"{'MiB':<10}{measured[0].memory:>12.0f}{measured[1].memory:>12.0f}{measured[1].memory / measured[0].memory:>21.2f}x")


def write_models(folder: Path) -> None:
    """One model as transformers has it, and the same as trnpipe has it."""
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    theirs = BertForSequenceClassification(BertConfig(num_labels=len(CLASSES), **none))
    tokenizer = AutoTokenizer.from_pretrained(initial_folder())
    theirs.bert.save_pretrained(folder / "base")
    for place in ("theirs", "base"):
        tokenizer.save_pretrained(folder / place)
    theirs.save_pretrained(folder / "theirs")
    torch.save({name.replace("pooler.dense", "pooler.0"): each for name, each in theirs.state_dict().items()}, folder / "gpu.pt")
    head = [{"out": theirs.config.hidden_size, "activation": "tanh"}]
    form = {"pooling": "cls", "normalize": False, "head": head, "head_key": "bert.pooler.{}"}
    ours = load_encoder(folder / "base", ModelConfig.model_validate(form), [folder / "gpu.pt"])
    add_classifiers(ours, folder, {"label": CLASSES})
    ours.classifiers["label"].load_state_dict(theirs.classifier.state_dict())
    save_folder(ours, folder / "ours", folder / "base")


def trainer(folder: Path, train: list[dict[str, Any]], options: argparse.Namespace) -> Measured:
    """The Trainer's steps, in the peers' environment."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in train))
    numbers = {"steps": options.steps, "batch": options.batch, "length": options.length, "threads": options.threads}
    numbers["learning-rate"] = RATE
    words = [word for name, value in numbers.items() for word in (f"--{name}", value)]
    return Measured(**peer("classify", "--model", folder / "theirs", "--pairs", folder / "rows.jsonl", *words))


def stage(folder: Path, train: list[dict[str, Any]], held: list[dict[str, Any]], options: argparse.Namespace) -> Measured:
    """The stages up to train."""
    (folder / "scratch").mkdir()
    bench = Bench(str(folder / "bucket"), folder / "scratch", folder / "ours")
    bench.shard("rows.jsonl", [*train, *held])
    corpus = bench.shard("corpus.jsonl", [{"id": "one", "text": "one"}], folder="corpus")
    bench.config |= {
        "nodes": 1,
        "model": {**bench.config["model"], "pooling": "cls", "normalize": False, "head": [{"out": 768, "activation": "tanh"}]},
        "device": {"kind": "cpu", "ranks_per_node": 1, "precision": "fp32", "threads_per_rank": options.threads},
        "data": {**bench.config["data"], "corpus": [corpus], "holdout_by": "query", "holdout_fraction": FRACTION},
        "gate": {"metric": "accuracy", "undecided": "accept"},
        "train": {
            "tasks": {"label": {"classes": CLASSES}},
            "batch_by": "task",
            "epochs": options.steps,
            "batch_size": options.batch,
            "batch_tokens": options.batch * options.length,
            "query_length": options.length,
            "length": options.length,
            "learning_rate": RATE,
            "epsilon": EPSILON,
            "schedule": "constant",
            "warmup_fraction": 0.0,
            "weight_decay": 0.0,
            "clip_norm": None,
            "dropout": 0.0,
            "log_every": 1,
            "validate_every": 10**6,
            "validation_queries": 1,
            "checkpoint_every": 10**6,
            "keep_checkpoints": 1,
        },
        "embed": {"children": 1, "length": options.length},
    }
    bench.start("one")
    bench.stage(Stage.TRAIN, "one")
    lines = [json.loads(line) for line in Path(bench.paths("one").metrics).read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured([line["loss"] for line in steps], [line["step_seconds"] for line in steps], memory)


if __name__ == "__main__":
    main()
