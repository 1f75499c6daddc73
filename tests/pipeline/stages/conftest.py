"""What tests of prepare and plan share: a tiny model, and a bucket to plan runs in."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, BertTokenizerFast

from tests.pipeline.stages.planning import Bench

POSITIONS = 48


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with random weights and a tokenizer of letters and digits."""
    folder = tmp_path_factory.mktemp("model")
    characters = string.ascii_lowercase + string.digits
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{one}" for one in characters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Bench:
    (tmp_path / "scratch").mkdir()
    return Bench(str(tmp_path / "bucket"), tmp_path / "scratch", model)
