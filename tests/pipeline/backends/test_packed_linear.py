"""Inference on processors: linear layers with packed weights compute what they computed, and the encoder embeds as in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.backends import cpu
from pipeline.backends.device import open_device
from pipeline.backends.packed_linear import PackedLinear, can_pack, pack_linears
from pipeline.model.inference import encode, inference_form
from pipeline.run.world import World
from tests.tiny import make_model

needs_bf16 = pytest.mark.skipif(not can_pack(), reason="oneDNN has no bf16 on this processor")


@needs_bf16
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 96, bias=bias)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for rows in ((1,), (7,), (3, 5)):
            x = torch.randn(*rows, 48)
            torch.testing.assert_close(packed(x.bfloat16()).float(), linear(x), rtol=2e-2, atol=2e-2)
            expected = F.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16() if bias else None)
            torch.testing.assert_close(packed(x.bfloat16()), expected, rtol=1e-2, atol=1e-2)


@needs_bf16
def test_every_linear_layer_inside_is_replaced() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 4)))
    pack_linears(module)
    assert [type(child).__name__ for child in module.modules() if not list(child.children())] == [
        "PackedLinear",
        "GELU",
        "PackedLinear",
    ]


@needs_bf16
def test_the_activation_of_a_feed_forward_layer_is_joined_to_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = make_model(tmp_path / "model").backbone.encoder.layer[0]
    x = torch.randn(5, 32)
    with torch.inference_mode():
        expected = layer.intermediate(x)
        pack_linears(layer)
        assert isinstance(layer.intermediate.intermediate_act_fn, nn.Identity)
        torch.testing.assert_close(layer.intermediate(x.bfloat16()).float(), expected, rtol=2e-2, atol=2e-2)
    layer = make_model(tmp_path / "other").backbone.encoder.layer[0]
    layer.intermediate.intermediate_act_fn = nn.ReLU()
    pack_linears(layer)
    assert isinstance(layer.intermediate.intermediate_act_fn, nn.ReLU)


@needs_bf16
@pytest.mark.parametrize("packs", [True, False])
def test_bf16_inference_embeds_as_fp32_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    monkeypatch.setattr(cpu, "can_pack", lambda: packs)
    texts = [[2, *range(10, 10 + length), 3] for length in (1, 4, 9, 25, 25, 30)]
    found = {}
    for precision in ("fp32", "bf16"):
        device = open_device("cpu", precision, World(), threads=1, inference=True)
        encoder = make_model(tmp_path / precision, seed=1, head=48).eval()
        placed = device.for_inference(inference_form(encoder, compiles=False, bf16=precision == "bf16"), None)
        kinds = {type(module).__name__ for module in encoder.backbone.modules()}
        assert ("PackedLinear" in kinds) == (packs and precision == "bf16")
        assert {type(layer) for layer in encoder.head_layers.values()} == {nn.Linear}, "the head stays in fp32"
        found[precision] = encode(placed, device, texts, 32, 128).embeddings
        assert found[precision].dtype == torch.float32
    assert F.cosine_similarity(found["bf16"], found["fp32"]).min() > 0.999
    assert not torch.equal(found["bf16"], found["fp32"])
