"""Read the shape of an encoder, which decides its memory and its floating-point operations, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline import store
from pipeline.config import ModelConfig
from pipeline.model.encoder import Encoder, new_encoder
from pipeline.model.families import family_of
from pipeline.model.folder import inspect_folder
from pipeline.model.inventory import fetch_without_weights, transformer_folder
from pipeline.run_inputs import ModelShape


def read_shape(folder: Path, config: ModelConfig) -> ModelShape:
    """The shape of a model folder, of which only the configuration is read.

    Raises:
        MissingInput, BadConfig, BadData: as `load_encoder`, weights aside.
    """
    backbone, _ = inspect_folder(folder, config)
    with torch.device("meta"):
        encoder = new_encoder(backbone, config)
    return shape_of(encoder)


def shape_of(encoder: Encoder) -> ModelShape:
    """The shape of an encoder, whose weights may be on `meta`."""
    config: Any = encoder.config
    family = family_of(config)
    stored = getattr(config, "dtype", None)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        largest=max(parameter.numel() for parameter in encoder.parameters()),
        words=encoder.word_embeddings.numel(),
        multiplied=sum(module.weight.numel() for module in encoder.backbone.modules() if isinstance(module, nn.Linear)),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        intermediate=(1 + family.gated) * int(config.intermediate_size),
        head=sum(layer.weight.numel() for layer in encoder.head_layers.values()),
        dimension=encoder.dimension,
        dropout=float(getattr(config, family.dropout)),
        fused=family.fused,
        gated=family.gated,
        stored_bytes=stored.itemsize if isinstance(stored, torch.dtype) else torch.float32.itemsize,
    )


def fetch_shape(uri: str, config: ModelConfig, scratch: Path) -> ModelShape:
    """The shape of a model wherever it is, without fetching its weights.

    Args:
        uri: as model.initial: a folder, or a weight file with `config.base` or with config.json in its folder.
        scratch: local folder for what is fetched.

    Raises:
        MissingInput: nothing there, or no config.json.
        BadConfig, BadData: as `read_shape`.
    """
    is_file = store.exists(uri)
    folder = fetch_without_weights(uri.rsplit("/", 1)[0] if is_file else uri, scratch / "shape")
    if config.base and (is_file or not (transformer_folder(folder) / "config.json").is_file()):
        folder = fetch_without_weights(config.base, scratch / "base")
    return read_shape(folder, config)
