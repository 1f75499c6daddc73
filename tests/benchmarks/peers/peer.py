"""One measurement of a peer, in a process and an environment of its own (`requirements.lock`, without torch-xla, which the
Trainer would choose as its device). Prints one JSON line; knows nothing of this project.

    python peer.py embed --way WAY --model FOLDER --corpus ROWS.jsonl --output PART.parquet --threads N
    python peer.py train --way WAY --model FOLDER --pairs ROWS.jsonl --steps N --batch 64 --length 128 --threads N
    python peer.py classify --model FOLDER --pairs ROWS.jsonl --steps N --batch 16 --length 128 --threads N
    python peer.py input --corpus ROWS.jsonl --model FOLDER --length 256
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

WAYS = {"embed": ("default", "bf16", "onnx", "openvino", "openvino-bf16"), "train": ("default", "bf16")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run in (("embed", embed), ("train", train), ("classify", classify), ("input", read)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--length", type=int, default=256)
        command.add_argument("--threads", type=int, default=2)
        if name in WAYS:
            command.add_argument("--way", choices=WAYS[name], required=True)
        command.add_argument("--pairs" if name in ("train", "classify") else "--corpus", type=Path, required=True)
        if name == "embed":
            command.add_argument("--output", type=Path, required=True)
        if name in ("train", "classify"):
            command.add_argument("--steps", type=int, required=True)
            command.add_argument("--batch", type=int, default=64)
            command.add_argument("--learning-rate", type=float, default=5e-5)
    options = parser.parse_args()
    print(json.dumps(options.run(options)))


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def embed(options: argparse.Namespace) -> dict[str, float]:
    """From the first row read to the closed Parquet file; the model is loaded and has run once before."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    more: dict[str, object] = {}
    if options.way == "bf16":
        more = {"model_kwargs": {"dtype": torch.bfloat16}}
    elif options.way == "onnx":
        more = {"backend": "onnx", "model_kwargs": {"provider": "CPUExecutionProvider", "export": True}}
    elif options.way.startswith("openvino"):
        precision = "bf16" if options.way.endswith("bf16") else "f32"
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": options.threads}
        more = {"backend": "openvino", "model_kwargs": {"export": True, "ov_config": settings}}
    model = SentenceTransformer(str(options.model), device="cpu", **more)
    model.max_seq_length = options.length
    model.encode(["a text that warms up"] * 32)
    begun = time.perf_counter()
    rows = read_rows(options.corpus)
    embeddings = model.encode([row["text"] for row in rows], show_progress_bar=False)
    values = pa.array(np.ascontiguousarray(embeddings, dtype=np.float32).reshape(-1))
    table = pa.table(
        {"id": [row["id"] for row in rows], "embedding": pa.FixedSizeListArray.from_arrays(values, embeddings.shape[1])}
    )
    pq.write_table(table, options.output)
    seconds = time.perf_counter() - begun
    return {"rows": len(rows), "seconds": seconds, "rate": len(rows) / seconds}


def train(options: argparse.Namespace) -> dict[str, float]:
    """The Trainer's steps, the first few not counted."""
    import tempfile

    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    torch.set_num_threads(options.threads)
    warm = 3
    moments: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            moments.append(time.perf_counter())

        def on_log(self, _args: object, _state: object, _control: object, logs: dict[str, float], **__: object) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    rows = read_rows(options.pairs)
    data = Dataset.from_dict({"anchor": [row["query"] for row in rows], "positive": [row["document"] for row in rows]})
    model = SentenceTransformer(str(options.model), device="cpu")
    model.max_seq_length = options.length
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=options.learning_rate,
            bf16=options.way == "bf16",
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            logging_steps=5,
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model), callbacks=[Clock()]
        )
        trainer.train()
    seconds = moments[-1] - moments[warm - 1]
    counted = len(moments) - warm
    return {"steps": counted, "seconds": seconds, "rate": counted * options.batch / seconds, "loss": losses[-1]}


def classify(options: argparse.Namespace) -> dict[str, object]:
    """The loss and the seconds of each of the Trainer's steps over all rows, and the process's peak memory in MiB. `document` is
    the number of a text's class. AdamW has a constant rate and a large epsilon."""
    import resource
    import tempfile
    from itertools import pairwise

    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.set_num_threads(options.threads)
    moments: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            moments.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            moments.append(time.perf_counter())

    class Exact(Trainer):
        def compute_loss(self, *arguments: object, **more: object) -> torch.Tensor:
            # What it logs is rounded to four digits.
            loss: torch.Tensor = super().compute_loss(*arguments, **more)
            losses.append(loss.item())
            return loss

    rows = read_rows(options.pairs)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    encoded = tokenizer([row["query"] for row in rows], truncation=True, max_length=options.length)
    data = Dataset.from_dict({**encoded, "labels": [int(row["document"]) for row in rows]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=options.learning_rate,
            adam_epsilon=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = AutoModelForSequenceClassification.from_pretrained(options.model)
        collate = DataCollatorWithPadding(tokenizer)
        Exact(model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Clock()]).train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"losses": losses, "seconds": [end - begin for begin, end in pairwise(moments)], "memory": memory}


def read(options: argparse.Namespace) -> dict[str, float]:
    """`datasets` reads and tokenizes in batches, a DataLoader collates batches padded to their longest row."""
    import tempfile

    from datasets import load_dataset
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with tempfile.TemporaryDirectory() as cache:
        begun = time.perf_counter()
        data = load_dataset("json", data_files=str(options.corpus), split="train", cache_dir=cache)
        data = data.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=options.length),
            batched=True,
            remove_columns=data.column_names,
        )
        tokens = 0
        for batch in DataLoader(data, batch_size=64, collate_fn=DataCollatorWithPadding(tokenizer)):
            tokens += int(batch["attention_mask"].sum())
        seconds = time.perf_counter() - begun
    return {"rows": len(data), "tokens": tokens, "seconds": seconds, "rate": len(data) / seconds}


if __name__ == "__main__":
    main()
