"""Shapes of models: published sizes, operations as torch counts them, and reading them without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, PreTrainedConfig, XLMRobertaConfig

from pipeline import store
from pipeline.config import ModelConfig
from pipeline.errors import MissingInput
from pipeline.model.encoder import new_encoder
from pipeline.model.shape import fetch_shape, read_shape, shape_of
from tests.tiny import make_model

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # All with their pooler, which an encoder here does not have. all-MiniLM-L6-v2, bert-base-uncased, bert-large-uncased.
        (BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536), 22_713_216),
        (BertConfig(), 109_482_240),
        (BertConfig(**LARGE), 335_141_888),
        (XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1, **LARGE), 559_890_432),
    ],
)
def test_parameters_are_as_many_as_published(config: PreTrainedConfig, parameters: int) -> None:
    with torch.device("meta"):
        shape = shape_of(new_encoder(config, ModelConfig()))
    assert shape.parameters == parameters - shape.hidden**2 - shape.hidden


@pytest.mark.parametrize("head", [None, {"hidden": 48}, [{"out": 48}, {"out": 24}]])
def test_operations_are_those_that_torch_counts(head: Any) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=80, vocab_size=50)
    encoder = new_encoder(config, ModelConfig.model_validate({"head": head}))
    tokens = torch.ones(5, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(tokens, torch.ones_like(tokens))
    assert 5 * shape_of(encoder).flops(24) == counter.get_total_flops()
    assert shape_of(encoder).dimension == (24 if isinstance(head, list) else 32)


def test_the_shape_of_a_parent_in_a_bucket_is_read_without_its_weights(tmp_path: Path, s3_root: str) -> None:
    make_model(tmp_path / "model", head=8)
    model = ModelConfig.model_validate({"head": {"hidden": 8}})
    expected = read_shape(tmp_path / "model", model)
    store.upload_folder(tmp_path / "model", f"{s3_root}/parent")
    scratch = tmp_path / "scratch"
    assert fetch_shape(f"{s3_root}/parent", model, scratch) == expected
    assert [path.name for path in scratch.rglob("*.safetensors")] == ["head.safetensors"]
    assert fetch_shape(f"{s3_root}/parent/model.safetensors", model, tmp_path / "file") == expected
    with pytest.raises(MissingInput, match="no model"):
        fetch_shape(f"{s3_root}/absent", model, tmp_path / "absent")


def test_the_shape_of_a_bare_weight_file_is_its_bases(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "weights").mkdir()
    (tmp_path / "model/model.safetensors").rename(tmp_path / "weights/old.safetensors")
    model = ModelConfig(base=str(tmp_path / "model"))
    expected = read_shape(tmp_path / "model", model)
    assert fetch_shape(str(tmp_path / "weights/old.safetensors"), model, tmp_path / "scratch") == expected
