"""Traced forms beside the encoder on the host: each weight that was not replaced shows, and so does another model's layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, ModernBertConfig, MPNetConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig

from pipeline.config import CompileConfig, ModelConfig
from pipeline.errors import Defect
from pipeline.graphs.compiled import LEAST_COSINE, inference_in_bf16, require_faithful
from pipeline.model.inference import probe_rows
from pipeline.stages.compile import random_encoder

VOCABULARY = 100
SHAPE = (8, 32)


def packed(family: type[PreTrainedConfig], layers: int = 2, *, bf16: bool = False) -> nn.Module:
    backbone = family(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **({"pad_token_id": 0} if family is ModernBertConfig else {}),
    )
    return random_encoder(backbone, ModelConfig(head={"hidden": 8}), bf16)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [BertConfig, RobertaConfig, XLMRobertaConfig, MPNetConfig, ModernBertConfig])
def test_every_weight_that_keeps_nan_shows(family: type[PreTrainedConfig]) -> None:
    encoder = packed(family)
    traced = copy.deepcopy(encoder)
    for shape in (SHAPE, (1, 44)):
        assert require_faithful(traced, encoder, shape, VOCABULARY) > 1 - 1e-5
    for name, weight in traced.state_dict().items():
        kept = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(Defect, match="gives other embeddings than the encoder"):
            require_faithful(traced, encoder, SHAPE, VOCABULARY)
        weight.copy_(kept)
        assert torch.equal(encoder.state_dict()[name], kept)


@pytest.mark.parametrize("family", [BertConfig, RobertaConfig, XLMRobertaConfig, MPNetConfig, ModernBertConfig])
def test_weights_in_bf16_embed_as_those_in_fp32_and_take_half_the_bytes(family: type[PreTrainedConfig]) -> None:
    encoder, exact = packed(family, bf16=True), packed(family)
    assert 0.999 < require_faithful(encoder, exact, SHAPE, VOCABULARY) < 1
    kept, whole = encoder.get_submodule("encoder"), exact.get_submodule("encoder")
    for name in ("backbone", "head"):
        bytes_of = [sum(weight.nbytes for weight in one.get_submodule(name).state_dict().values()) for one in (kept, whole)]
        assert bytes_of[0] * (2 if name == "backbone" else 1) == bytes_of[1]


@pytest.mark.parametrize(
    ("kind", "precision", "settings", "expected"),
    [
        ("neuron", "bf16", {}, True),
        ("neuron", "compiler", {}, True),
        ("neuron", "fp32", {}, False),
        ("neuron", "bf16", {"infer_auto_cast": "none"}, False),
        ("neuron", "fp32", {"infer_auto_cast": "matmult"}, True),
        ("neuron", "bf16", {"infer_auto_cast_type": "fp8_e4m3"}, False),
        ("cpu", "bf16", {"infer_auto_cast": "none"}, True),
        ("xla", "fp32", {"infer_auto_cast": "matmult"}, False),
    ],
)
def test_weights_are_in_bf16_where_products_are(kind: str, precision: str, settings: dict[str, str], expected: bool) -> None:
    assert inference_in_bf16(CompileConfig.model_validate(settings), kind, precision) is expected


def test_casts_pass_and_a_layer_of_another_model_does_not() -> None:
    encoder = packed(BertConfig, layers=12)

    def in_bf16(*rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeddings: Tensor = encoder(*rows)
            return embeddings

    assert LEAST_COSINE < 0.999 < require_faithful(in_bf16, encoder, SHAPE, VOCABULARY) < 1
    stale = copy.deepcopy(encoder)
    for name, weight in stale.state_dict().items():
        if ".layer.10." in name:
            weight.copy_(torch.randn_like(weight) * 0.3)
    with pytest.raises(Defect) as error:
        require_faithful(stale, encoder, SHAPE, VOCABULARY)
    assert error.value.value.startswith("8 x 32 tokens: least cosine 0.")


@pytest.mark.parametrize(
    ("slots", "length", "texts"), [(2, 32, [0, 1, 2, 3, 4]), (1, 44, [0, 1, 2, 3, 4]), (1, 7, [0]), (3, 8, [0, 1, 2])]
)
def test_probe_rows_hold_short_texts_and_a_long_one(slots: int, length: int, texts: list[int]) -> None:
    (tokens, segments, positions), found = probe_rows(slots, length, VOCABULARY)
    assert found.tolist() == texts
    assert tokens.shape == segments.shape == positions.shape == (slots, length)
    assert 0 <= tokens.min() <= tokens.max() < VOCABULARY
    if slots > 1:
        assert positions[-1].tolist() == list(range(length))
        assert set(segments[-1].tolist()) == {1}
    # A text's positions count from 0 without a gap.
    for row in range(slots):
        for segment in set(segments[row].tolist()) - {0}:
            own = positions[row][segments[row] == segment].tolist()
            assert own == list(range(len(own)))
