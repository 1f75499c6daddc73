"""The sizes of an encoder that decide its memory and its floating-point operations, read without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline import store
from pipeline.config import ModelConfig
from pipeline.errors import MissingInput
from pipeline.model.encoder import Encoder, family_of, new_encoder
from pipeline.model.folder import HEAD, inspect_folder
from pipeline.model.inventory import WEIGHT_SUFFIXES, transformer_folder

CONFIG_BYTES = 1 << 20
"""Larger files of a model folder are weights or vocabularies, which a shape does not need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of an encoder.

    Attributes:
        parameters: elements of all weights.
        largest: elements of the largest weight, the word embeddings.
        multiplied: elements of the matrices that every token is multiplied with; autocast keeps a copy of them.
        layers, hidden, heads, intermediate: of the backbone.
        head: width of the residual head, 0 without.
        dropout: of hidden states, as the model is configured.
        fused: the library computes attention with torch's fused function where the device has it.
        stored_bytes: per element of the weight file.
    """

    parameters: int
    largest: int
    multiplied: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    head: int
    dropout: float
    fused: bool
    stored_bytes: int

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over a text of `length` tokens, padding included.

        Two for each element of a matrix and token; in attention every token meets every other twice, as a score and as a value
        (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", appendix). Lookups are none.
        """
        attention = 2 * length * self.hidden * self.layers
        return 2.0 * (length * (self.multiplied + attention) + 2 * self.hidden * self.head)


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
    stored = getattr(config, "dtype", None)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        largest=max(parameter.numel() for parameter in encoder.parameters()),
        multiplied=sum(module.weight.numel() for module in encoder.backbone.modules() if isinstance(module, nn.Linear)),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        intermediate=int(config.intermediate_size),
        head=encoder.head.inner.out_features if encoder.head else 0,
        dropout=float(config.hidden_dropout_prob),
        fused=family_of(config).attention == "sdpa",
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


def fetch_without_weights(uri: str, cache: Path) -> Path:
    """A local folder with the small files under `uri`.

    Raises:
        MissingInput: no files there.
    """
    if not store.is_s3(uri):
        return store.local_folder(uri, cache)
    root = uri.rstrip("/")
    files = {info.uri.removeprefix(f"{root}/"): info for info in store.list_objects(root)}
    if not files:
        raise MissingInput("there is no model here", value=uri, remedy="check the URI")
    for name, info in files.items():
        if name == HEAD or (info.size < CONFIG_BYTES and not name.endswith(WEIGHT_SUFFIXES)):
            store.download(info.uri, cache / name)
    return cache
