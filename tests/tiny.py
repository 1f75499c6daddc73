"""A tiny real encoder with its tokenizer, and texts that it can learn from: what tests run the real stages on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import BertConfig, BertTokenizerFast, PreTrainedConfig

from pipeline.config import ModelConfig
from pipeline.model.encoder import Encoder, ResidualHead, new_encoder
from pipeline.model.folder import save_folder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

SYLLABLES = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu")
Head = int | list[dict[str, Any]]
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]


def head_form(head: Head | None) -> Any:
    """A head as `model.head` has it."""
    return {"hidden": head} if isinstance(head, int) else head


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    head: Head | None = None,
    dimensions: int | None = None,
    family: Callable[..., PreTrainedConfig] = BertConfig,
) -> Encoder:
    """Write a random two-layer encoder (32 dimensions, 100 words) as a model folder; a head, if wanted, that changes embeddings.

    Args:
        head: width of a residual head, or layers.
        dimensions: size of its published embeddings.
    """
    source = folder.parent / f"{folder.name}-tokenizer"
    source.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (source / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    torch.manual_seed(seed)
    config = family(
        vocab_size=len(vocabulary),
        pad_token_id=0,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    encoder = new_encoder(config, ModelConfig.model_validate({"head": head_form(head)}))
    with torch.no_grad():
        # Larger than BERT's own start, so that different words give clearly different embeddings.
        encoder.word_embeddings.normal_()
        if isinstance(encoder.head, ResidualHead):
            encoder.head.outer.weight.normal_(std=0.3)
            encoder.head.outer.bias.normal_(std=0.3)
        elif encoder.head is not None:
            for layer in encoder.head_layers.values():
                layer.bias.normal_(std=0.03)
    save_folder(encoder.eval(), folder, source, dimensions=dimensions)
    return encoder


def write_pairs(path: Path, count: int, *, seed: int = 0, prefix: str = "row") -> Path:
    """Write training rows whose queries are two words of their documents in another order: random at first, learnable."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(count):
            words = list(rng.choice(WORDS, size=rng.integers(3, 24)))
            query = " ".join(rng.permutation(words)[:2])
            row = {"id": f"{prefix}-{index:05d}", "query": query, "document": " ".join(words)}
            stream.write(json.dumps(row) + "\n")
    return path


def sentence_transformer(folder: Path | str) -> SentenceTransformer:
    """Open a model folder with sentence-transformers, which loads for four seconds: not where every worker collects tests."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")
