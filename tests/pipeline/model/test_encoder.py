"""The encoder against the library's own way of masking, and the head that changes nothing at first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from pipeline.config import HeadConfig, ModelConfig
from pipeline.errors import BadConfig
from pipeline.model.encoder import (
    PackedEncoder,
    ResidualHead,
    checkpoint_activations,
    new_encoder,
    prepare_for_inference,
    prepare_for_training,
    texts_per_row,
)
from pipeline.model.unpadded import PaddedBatch

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
BACKBONES = {
    "bert": lambda: BertConfig(**SIZES),
    "roberta": lambda: RobertaConfig(**SIZES),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, pad_token_id=1),
    "mpnet": lambda: MPNetConfig(**SIZES),
    # The longest of the texts below sees past its window, of two tokens in each direction.
    "modernbert": lambda: ModernBertConfig(**SIZES, pad_token_id=0, local_attention=4, global_attn_every_n_layers=2),
}


def some_batch(padding: int) -> tuple[Tensor, Tensor]:
    """Rows of 16, 9 and 3 tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 50, (3, 16), generator=generator)
    mask = (torch.arange(16)[None, :] < torch.tensor([16, 9, 3])[:, None]).long()
    return tokens * mask + padding * (1 - mask), mask


@pytest.fixture(params=BACKBONES)
def backbone(request: pytest.FixtureRequest) -> PreTrainedConfig:
    torch.manual_seed(0)
    return BACKBONES[request.param]()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_equals_library_with_its_own_mask(backbone: PreTrainedConfig, pooling: str) -> None:
    encoder = new_encoder(backbone, ModelConfig(pooling=pooling)).eval()
    tokens, mask = some_batch(backbone.pad_token_id)
    with torch.no_grad():
        hidden = encoder.backbone(input_ids=tokens, attention_mask=mask).last_hidden_state
        expected = torch.stack(
            [row[0] if pooling == "cls" else row[: int(n)].mean(0) for row, n in zip(hidden, mask.sum(1), strict=True)]
        )
        torch.testing.assert_close(encoder(tokens, mask), F.normalize(expected, dim=-1), rtol=0, atol=1e-6)


def test_what_stands_in_the_padding_does_not_matter(backbone: PreTrainedConfig) -> None:
    encoder = new_encoder(backbone, ModelConfig()).eval()
    tokens, mask = some_batch(0)
    with torch.no_grad():
        embeddings = encoder(tokens, mask)
        assert torch.equal(encoder(tokens + 7 * (1 - mask), mask), embeddings)
        torch.testing.assert_close(encoder(tokens[1:2, :9], mask[1:2, :9]), embeddings[1:2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("head", [None, {"hidden": 8}, [{"out": 40, "activation": "gelu"}, {"out": 24}]])
def test_texts_that_share_a_row_do_not_see_each_other(backbone: PreTrainedConfig, pooling: str, head: Any) -> None:
    encoder = new_encoder(backbone, ModelConfig.model_validate({"pooling": pooling, "head": head})).eval()
    if isinstance(encoder.head, ResidualHead):
        torch.nn.init.normal_(encoder.head.outer.weight)
    prepare_for_inference(encoder, fused_attention=False)
    tokens, mask = some_batch(0)
    with torch.no_grad():
        expected = encoder(tokens, mask)
        # 16 tokens, then 9 and 3 in one row of 24 places, and a row without any.
        packed = torch.full((3, 24), 7)
        segments, positions = torch.zeros_like(packed), torch.zeros_like(packed)
        for text, (row, start, number) in enumerate([(0, 0, 1), (1, 0, 1), (1, 9, 2)]):
            length = int(mask[text].sum())
            place = row, slice(start, start + length)
            packed[place], segments[place], positions[place] = tokens[text, :length], number, torch.arange(length)
        found = PackedEncoder(encoder)(packed, segments, positions)
        assert found.shape == (3 * texts_per_row(24), 24 if isinstance(head, list) else 32)
        torch.testing.assert_close(found[[0, 3, 4]], expected, rtol=0, atol=1e-6)
        assert found.isfinite().all()
        # What stands in the padding, and in the other text, does not matter to a text.
        others = torch.where(segments == 2, packed, 11)
        torch.testing.assert_close(encoder.packed(others, segments, positions)[4], expected[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_products_give_the_gradients_of_scatters(backbone: PreTrainedConfig, autocast: bool) -> None:
    """Padded batches, and packed rows, which may be longer than a text can be; embeddings and names are the same to the bit."""
    plain = new_encoder(backbone, ModelConfig())
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for scatters in (True, False):
        encoder = new_encoder(backbone, ModelConfig()).train()
        encoder.load_state_dict(plain.state_dict())
        prepare_for_training(encoder, fused_attention=False, dropout=0.0, scatters=scatters)
        assert encoder.state_dict().keys() == plain.state_dict().keys()
        tokens, mask = some_batch(backbone.pad_token_id)
        packed = torch.cat([tokens[0], tokens[0], tokens[1], tokens[2, :3]])[None]
        segments = torch.tensor([[1] * 16 + [2] * 16 + [3] * 9 + [0] * 7 + [4] * 3])
        positions = torch.cat([torch.arange(16)] * 3 + [torch.arange(3)])[None]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            embeddings = [encoder(tokens, mask), encoder.packed(packed, segments, positions)]
        weights = torch.linspace(-1, 1, 32)
        sum(((one * weights) ** 3).sum() for one in embeddings).backward()  # type: ignore[union-attr]
        found.append((embeddings, [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]))
    (embeddings, gradients), (others, products) = found
    assert all(torch.equal(one, other) for one, other in zip(embeddings, others, strict=True))
    assert len(gradients) == len(list(plain.parameters()))
    for one, other in zip(gradients, products, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=2e-6)


def test_all_tokens_have_the_first_type(backbone: PreTrainedConfig) -> None:
    """Its gradient is the sum over all tokens; the other types have none."""
    if backbone.model_type in ("mpnet", "modernbert"):
        pytest.skip("it has no token types")
    encoder = new_encoder(backbone, ModelConfig(normalize=False))
    encoder(*some_batch(0)).sum().backward()
    types, positions = (encoder.backbone.get_submodule(f"embeddings.{name}_embeddings") for name in ("token_type", "position"))
    torch.testing.assert_close(types.weight.grad[0], positions.weight.grad.sum(0), rtol=0, atol=1e-6)  # type: ignore[index,union-attr]
    assert not types.weight.grad[1:].any()  # type: ignore[index]


def test_bf16_autocast_gives_fp32_unit_vectors_near_fp32(backbone: PreTrainedConfig) -> None:
    encoder = new_encoder(backbone, ModelConfig(head=HeadConfig(hidden=8))).eval()
    tokens, mask = some_batch(0)
    with torch.no_grad():
        exact = encoder(tokens, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeddings = encoder(tokens, mask)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))
    assert float((embeddings * exact).sum(1).min()) > 0.999


def test_graph_does_not_depend_on_the_mask(backbone: PreTrainedConfig) -> None:
    """The same program whatever the mask holds: traced with a full mask, it serves a ragged one."""
    encoder = new_encoder(backbone, ModelConfig()).eval()
    tokens, mask = some_batch(0)
    with torch.no_grad():
        traced = torch.jit.trace(encoder, (tokens, torch.ones_like(mask)))
        torch.testing.assert_close(traced(tokens, mask), encoder(tokens, mask), rtol=0, atol=1e-6)


def test_new_head_changes_nothing_and_is_the_same_everywhere() -> None:
    torch.manual_seed(0)
    plain = new_encoder(BertConfig(**SIZES), ModelConfig()).eval()
    torch.manual_seed(0)
    headed = new_encoder(BertConfig(**SIZES), ModelConfig(head=HeadConfig(hidden=64))).eval()
    headed.backbone.load_state_dict(plain.backbone.state_dict())
    torch.manual_seed(99)
    other = new_encoder(BertConfig(**SIZES), ModelConfig(head=HeadConfig(hidden=64)))
    assert isinstance(headed.head, ResidualHead)
    assert isinstance(other.head, ResidualHead)
    assert bool((headed.head.inner.weight != 0).any())
    assert torch.equal(headed.head.inner.weight, other.head.inner.weight)
    with torch.no_grad():
        assert torch.equal(headed(*some_batch(0)), plain(*some_batch(0)))


def test_new_layers_are_small_and_the_same_everywhere() -> None:
    layers = [{"out": 48, "activation": "tanh"}, {"out": 16}]
    heads = []
    for seed in (0, 99):
        torch.manual_seed(seed)
        encoder = new_encoder(BertConfig(**SIZES), ModelConfig.model_validate({"head": layers})).eval()
        assert encoder.dimension == 16
        heads.append([*encoder.head_layers.values()])
    for inputs, layer, other in zip((32, 48), *heads, strict=True):
        assert torch.equal(layer.weight, other.weight)
        assert 0.9 * inputs**-0.5 < float(layer.weight.detach().abs().max()) <= inputs**-0.5
        assert not layer.bias.any()
    # The layers are not the beginning of one another.
    assert not torch.equal(heads[0][0].weight.flatten()[:100], heads[0][1].weight.flatten()[:100])


def test_layers_follow_one_another() -> None:
    activations = {"relu": torch.relu, "gelu": partial(torch.nn.functional.gelu, approximate="none"), "tanh": torch.tanh}
    layers = [{"out": 16 + index, "activation": name} for index, name in enumerate([*activations, "identity"])]
    encoder = new_encoder(BertConfig(**SIZES), ModelConfig.model_validate({"normalize": False, "head": layers})).eval()
    with torch.no_grad():
        found = encoder(*some_batch(0))
        encoder.head, head = None, encoder.head_layers
        values = encoder(*some_batch(0))
        for activation, layer in zip([*activations.values(), torch.clone], head.values(), strict=True):
            values = activation(values @ layer.weight.T + layer.bias)
    torch.testing.assert_close(found, values)


def test_new_head_learns() -> None:
    encoder = new_encoder(BertConfig(**SIZES), ModelConfig(head=HeadConfig(hidden=64)))
    assert isinstance(encoder.head, ResidualHead)
    encoder(*some_batch(0))[:, 0].sum().backward()
    assert float(encoder.head.outer.weight.grad.abs().sum()) > 0


def test_without_normalization_lengths_differ() -> None:
    encoder = new_encoder(BertConfig(**SIZES), ModelConfig(normalize=False)).eval()
    with torch.no_grad():
        assert float((encoder(*some_batch(0)).norm(dim=1) - 1).abs().min()) > 0.1


def test_unknown_family_is_refused() -> None:
    with pytest.raises(BadConfig, match="not supported") as caught:
        new_encoder(DistilBertConfig(), ModelConfig())
    assert "distilbert" in str(caught.value)


def test_max_length_leaves_out_the_positions_of_padding(backbone: PreTrainedConfig) -> None:
    encoder = new_encoder(backbone, ModelConfig()).eval()
    assert encoder.max_length == (40 if backbone.model_type in ("bert", "modernbert") else 38)
    tokens = torch.full((1, encoder.max_length), 7)
    with torch.no_grad():
        assert bool(torch.isfinite(encoder(tokens, torch.ones_like(tokens))).all())


def without_padding(tokens: Tensor, mask: Tensor) -> PaddedBatch:
    return PaddedBatch(tokens, mask, mask.flatten().nonzero().flatten())


@pytest.mark.parametrize("fused_attention", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_without_padding_give_the_same_embeddings_and_gradients(
    backbone: PreTrainedConfig, fused_attention: bool, pooling: str, checkpointed: bool
) -> None:
    backbone.hidden_dropout_prob = 0.0
    encoder = new_encoder(backbone, ModelConfig(pooling=pooling, head=HeadConfig(hidden=8))).train()
    prepare_for_training(encoder, fused_attention=fused_attention, unpadded_rows=True)
    if backbone.model_type == "mpnet":
        assert not encoder.unpads
        return
    assert encoder.unpads
    if checkpointed:
        checkpoint_activations(encoder, partial(checkpoint, use_reentrant=False))
    tokens, mask = some_batch(backbone.pad_token_id)
    batches = (tokens, mask), (tokens[1:, :9].flip(0), mask[1:, :9].flip(0))
    directions = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))

    def gradients(found: Sequence[Tensor]) -> list[Tensor]:
        loss = sum((one * along[: len(one)]).sum() for one, along in zip(found, directions, strict=True))
        return list(torch.autograd.grad(loss, [one for one in encoder.parameters() if one.requires_grad], allow_unused=True))

    apart = [encoder(*batch) for batch in batches]
    together = encoder.unpadded(*(without_padding(*batch) for batch in batches))
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    for one, other in zip(gradients(apart), gradients(together), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_without_padding_in_bf16_are_as_near_as_padded_ones() -> None:
    torch.manual_seed(0)
    encoder = new_encoder(BertConfig(**SIZES), ModelConfig()).eval()
    prepare_for_training(encoder, fused_attention=False, unpadded_rows=True)
    tokens, mask = some_batch(0)
    with torch.no_grad():
        exact = encoder(tokens, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (embeddings,) = encoder.unpadded(without_padding(tokens, mask))
    assert embeddings.dtype == torch.float32
    assert float((embeddings * exact).sum(1).min()) > 0.999


def test_training_form_changes_no_embedding_and_no_saved_configuration(backbone: PreTrainedConfig, tmp_path: Path) -> None:
    backbone.hidden_dropout_prob = 0.0
    encoder = new_encoder(backbone, ModelConfig()).eval()
    encoder.config.save_pretrained(tmp_path / "before")
    with torch.no_grad():
        expected = encoder(*some_batch(0))
        prepare_for_training(encoder, fused_attention=False, unpadded_rows=True)
        torch.testing.assert_close(encoder.train()(*some_batch(0)), expected, rtol=0, atol=1e-6)
    encoder.config.save_pretrained(tmp_path / "after")
    assert (tmp_path / "after" / "config.json").read_text() == (tmp_path / "before" / "config.json").read_text()
