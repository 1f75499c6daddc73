"""Lowers training steps of the tiny model in many settings: `python -m tests.pipeline.training.lowered FOLDER`; JSON at the end.

A program of its own, because torch-xla takes over the process that loads it. `lowered`: setting -> graphs, each with
its fingerprint, description, the number of operations in its text and the types that they compute; `planted`: the same for a
program that differs between ranks; `modules`: small HLO modules, base64.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, ModernBertConfig, MPNetConfig, PreTrainedConfig, XLMRobertaConfig

from pipeline.config import RunConfig, build_config
from pipeline.model.classifier import add_classifiers
from pipeline.model.encoder import Encoder, new_encoder
from pipeline.model.folder import inspect_folder
from pipeline.run.world import World
from pipeline.training import step
from tests.pipeline.training.lowering import lower_training
from tests.tiny import make_model

BASE = {"train": {"batch_size": 2, "query_length": 4, "length": 16, "batch_tokens": 48}}
CLASSES: dict[str, Any] = {
    "data": {"holdout_by": "query", "corpus": ["s3://bucket/corpus"]},
    "train": {
        "batch_by": "task",
        "tasks": {"color": {"classes": ["warm", "cold"]}, "size": {"classes": ["large", "small", "none"]}},
    },
}
SETTINGS: dict[str, tuple[int, int, dict[str, Any], str]] = {
    # name: rank, ranks, settings, precision
    "rank 0": (0, 64, {}, "fp32"),
    "rank 5": (5, 64, {}, "fp32"),
    "rank 63": (63, 64, {}, "fp32"),
    "32 ranks": (0, 32, {}, "fp32"),
    "alone": (0, 1, {}, "fp32"),
    "batch": (0, 64, {"train": {"batch_size": 4}}, "fp32"),
    "length": (0, 64, {"train": {"length": 8}}, "fp32"),
    "rate": (0, 64, {"train": {"learning_rate": 1e-3}, "seed": 9}, "fp32"),
    "one sync": (0, 64, {"device": {"sync_points": 1}}, "fp32"),
    "accumulation": (0, 64, {"train": {"accumulation": 3}}, "fp32"),
    "checkpointed": (0, 64, {"train": {"activation_checkpointing": True, "dropout": 0.1}}, "fp32"),
    "checkpointed, rank 63": (63, 64, {"train": {"activation_checkpointing": True, "dropout": 0.1}}, "fp32"),
    "bf16": (0, 64, {}, "bf16"),
    "sharded": (0, 64, {"train": {"shard_optimizer": True}}, "fp32"),
    "bf16 weights": (0, 64, {"train": {"shard_optimizer": True, "bf16_weights": True}}, "bf16"),
    "bf16 weights, rank 63": (63, 64, {"train": {"shard_optimizer": True, "bf16_weights": True}}, "bf16"),
    "sharded, rank 63": (63, 64, {"train": {"shard_optimizer": True}}, "fp32"),
    "sharded, accumulation": (0, 64, {"train": {"shard_optimizer": True, "accumulation": 2}}, "fp32"),
    "frozen words": (0, 64, {"train": {"freeze_word_embeddings": True}}, "fp32"),
    "sizes": (0, 64, {"train": {"dimensions": [16, 8]}}, "fp32"),
    "sizes, rank 63": (63, 64, {"train": {"dimensions": [8, 16]}}, "fp32"),
    "classes": (0, 64, CLASSES, "fp32"),
    "classes, rank 63": (63, 64, CLASSES, "fp32"),
    "classes, sharded": (0, 64, {**CLASSES, "train": {**CLASSES["train"], "shard_optimizer": True}}, "fp32"),
    "cut": (0, 64, {"train": {"batch_size": 4, "micro_batches": 2, "dropout": 0.1}}, "fp32"),
    "cut, rank 63": (63, 64, {"train": {"batch_size": 4, "micro_batches": 2, "dropout": 0.1}}, "fp32"),
    "cut, alone": (0, 1, {"train": {"batch_size": 4, "micro_batches": 2, "dropout": 0.1}}, "fp32"),
    "cut, one sync": (0, 64, {"train": {"batch_size": 4, "micro_batches": 2}, "device": {"sync_points": 1}}, "fp32"),
    "cut, accumulation": (0, 64, {"train": {"batch_size": 4, "micro_batches": 2, "accumulation": 2}}, "fp32"),
}


FAMILIES = {"bert": BertConfig, "xlm-roberta": XLMRobertaConfig, "mpnet": MPNetConfig, "modernbert": ModernBertConfig}
LAYERS = (2, 5)
CUT = {"batch_size": 4, "micro_batches": 2}
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    ", sharded": {"shard_optimizer": True},
    ", cut": CUT,
    ", cut, sharded": {**CUT, "shard_optimizer": True},
}


def lower(folder: Path, rank: int, ranks: int, settings: dict[str, Any], precision: str) -> list[dict[str, Any]]:
    """The graphs of a step."""
    config = build_config(BASE, settings)
    backbone, _ = inspect_folder(folder, config.model)
    encoder = new_encoder(backbone, config.model)
    add_classifiers(encoder, folder, config.train.classes)
    return lower_encoder(encoder, config, precision, World(rank=rank, size=ranks))


def lower_family(family: type[PreTrainedConfig], layers: int, train: dict[str, Any]) -> list[dict[str, Any]]:
    """The graphs of an encoder of this family, in bf16."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    backbone = family(vocab_size=105, pad_token_id=1, num_hidden_layers=layers, **sizes)
    config = build_config(BASE, {"train": train})
    return lower_encoder(new_encoder(backbone, config.model), config, "bf16", World(rank=1, size=64))


def lower_encoder(encoder: Encoder, config: RunConfig, precision: str, world: World) -> list[dict[str, Any]]:
    graphs = lower_training(encoder, config, precision, world)
    return [{"fingerprint": graph.fingerprint, **asdict(graph.description), "text": graph.text} for graph in graphs]


def rank_in_the_graph(folder: Path, rank: int) -> list[dict[str, Any]]:
    """With a mistake planted: which row is looked at depends on the rank."""
    contrastive_loss = step.contrastive_loss

    def by_rank(queries: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        return contrastive_loss(queries, *arguments, **settings) + queries[rank % 2].sum()

    step.contrastive_loss = by_rank  # type: ignore[assignment]
    try:
        return lower(folder, rank, 64, {}, "fp32")
    finally:
        step.contrastive_loss = contrastive_loss


def modules() -> dict[str, str]:
    """Small HLO modules that differ in one thing each, base64."""
    import torch_xla

    def module(value: Tensor, constant: float) -> str:
        placed = value.to(torch_xla.device())
        # 0 and 1 are constants of a graph, other numbers inputs (torch-xla 2.9, special scalars).
        result = placed @ placed.T + torch.full((len(value), len(value)), constant, dtype=value.dtype, device=placed.device)
        proto: bytes = torch_xla._XLAC._get_xla_tensors_hlo_proto([result])
        return base64.b64encode(proto).decode()

    two = torch.ones(2, 3)
    return {
        "base": module(two, 0.0),
        "same": module(two + 1, 0.0),
        "shape": module(torch.ones(4, 3), 0.0),
        "dtype": module(two.to(torch.bfloat16), 0.0),
        "constant": module(two, 1.0),
    }


def main(folder: Path) -> None:
    make_model(folder)
    found = {name: lower(folder, *settings) for name, settings in SETTINGS.items()}
    for name, family in FAMILIES.items():
        for layers in LAYERS:
            for form, train in FORMS.items():
                found[f"{name}, {layers} layers{form}"] = lower_family(family, layers, train)
    planted = [rank_in_the_graph(folder, rank) for rank in (0, 63)]
    for graphs in (graph for step_graphs in (*found.values(), *planted) for graph in step_graphs):
        # The number of operations that a text has, to hold the description against; texts are large.
        text = graphs.pop("text")
        # Collectives of vectors: what, type, elements.
        vectors = re.findall(r"= \(?(\w+)\[(\d+)\][^=]*? (all-gather|reduce-scatter)\(", text)
        graphs["vectors"] = [[name, kind, int(size)] for kind, size, name in vectors]
        graphs["lines"] = sum(" = " in line and " parameter(" not in line for line in text.splitlines())
        # Floating-point types that operations compute, also as parts of tuples.
        computed = re.findall(r" = (\(?[^=]*?) (?!parameter|constant)[a-z-]+\(", text)
        graphs["types"] = sorted({kind for result in computed for kind in re.findall(r"\b(bf16|f\d+)\[", result)})
    sys.stdout.write(json.dumps({"lowered": found, "planted": planted, "modules": modules()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # torch-xla's threads have nothing more to say.
    os._exit(0)
