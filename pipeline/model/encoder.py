"""The encoder: a BERT-like backbone, pooling, an optional MLP as head, normalization. Static shapes, no branch on data.

The backbone is the library's model, given an additive attention mask and position ids of our own: what the library derives from a
2D mask by itself depends on the values in it (it skips a mask that masks nothing), and every such choice is another graph on a
device that compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.errors import BadConfig
from pipeline.model import unpadded
from pipeline.model.embeddings import avoid_scatters
from pipeline.model.families import family_of
from pipeline.model.unpadded import PaddedBatch
from pipeline.packing import texts_per_row

if TYPE_CHECKING:
    from pipeline.config import HeadConfig, ModelConfig

MASKED = -30_000.0
"""Added to the score of a masked position: its probability is exactly 0, and the number is finite in fp32, bf16 and fp16."""

HEAD_SEED = 0x7E57
"""The random weights of a new head are the same on every rank and in every stage that makes one."""

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "identity": nn.Identity}
"""By their names in `model.head`."""


class ResidualHead(nn.Module):
    """x + W2 relu(W1 x + b1) + b2. With W2 and b2 zero, as they are at first, embeddings pass unchanged.

    Args:
        dimension: of the embeddings.
        hidden: width of the inner layer.
    """

    def __init__(self, dimension: int, hidden: int) -> None:
        super().__init__()
        self.inner = _random_layer(dimension, hidden, torch.Generator().manual_seed(HEAD_SEED))
        self.outer = nn.Linear(hidden, dimension)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.outer(F.relu(self.inner(x)))
        return x + residual


def new_head(dimension: int, config: HeadConfig) -> ResidualHead | nn.Sequential:
    """Return a new head: one that changes nothing, or layers with random weights, which can be of another size.

    Args:
        dimension: of pooled vectors.
    """
    if config.hidden is not None:
        return ResidualHead(dimension, config.hidden)
    generator = torch.Generator().manual_seed(HEAD_SEED)
    modules: list[nn.Module] = []
    for layer in config.layers:
        modules += [_random_layer(dimension, layer.out, generator), ACTIVATIONS[layer.activation]()]
        dimension = layer.out
    return nn.Sequential(*modules)


def _random_layer(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer, bound = nn.Linear(inputs, outputs), inputs**-0.5
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class Classifiers(nn.ModuleDict):
    """Task -> its classifier. A task may have the name of an attribute of modules, such as `type`, which a ModuleDict refuses."""

    __setattr__: Any = object.__setattr__

    def add_module(self, name: str, module: Any) -> None:
        self._modules[name] = module


class Encoder(nn.Module):
    """Token ids to embeddings.

    Args:
        backbone: a family's model, without its pooler.
        pooling: `mean` over the tokens or the first (`cls`).
        normalize: to unit length.
        head: between pooling and normalization.

    Attributes:
        dimension: of the embeddings.
        max_length: tokens that the positions allow.
        classifiers: task -> its classifier, of those that are trained (pipeline/model/classifier).
    """

    def __init__(
        self, backbone: PreTrainedModel, *, pooling: str, normalize: bool, head: ResidualHead | nn.Sequential | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.classifiers = Classifiers()
        self.pooling = pooling
        self.normalize = normalize
        self._family = family_of(self.config)
        self.dimension = [int(self.config.hidden_size), *(layer.out_features for layer in self.head_layers.values())][-1]
        embeddings: Any = self.backbone.get_submodule("embeddings")
        self._first_position = int(embeddings.padding_idx) + 1 if self._family.counts_from_padding else 0
        self.max_length = int(self.config.max_position_embeddings) - self._first_position

    @property
    def config(self) -> PreTrainedConfig:
        """The backbone's configuration."""
        return self.backbone.config

    @property
    def word_embeddings(self) -> Tensor:
        """The words' table, (V, D)."""
        return cast(Tensor, self.backbone.get_input_embeddings().weight)

    @property
    def head_layers(self) -> dict[str, nn.Linear]:
        """The head's layers in order, by their names in the encoder's state; none without a head."""
        return {name: layer for name, layer in self.named_modules() if name.startswith("head.") and isinstance(layer, nn.Linear)}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Embed a batch.

        Args:
            tokens: (B, L) int64, padded with any valid id.
            mask: (B, L) int64, 1 for tokens and 0 for padding; every row has at least one token.

        Returns:
            (B, D) fp32.
        """
        additive = ((1 - mask) * MASKED)[:, None, None, :]
        positions = self._positions(tokens)
        hidden = self._hidden(tokens, positions, attention_mask=self._masks(additive, positions))
        # From here on in fp32, whatever the backbone computed in: a mean over 256 tokens loses too much in bf16.
        with torch.autocast(tokens.device.type, enabled=False):
            return self._finish(pool(hidden.float(), mask, self.pooling))

    def packed(self, tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        """Embed a batch whose rows hold several texts each, one behind the other: what `forward` makes of each alone.

        Rows of one length are full whatever lengths texts have, and nothing in the shapes depends on them. (Known as packing
        since Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".)

        Args:
            tokens: (B, L) int64, padded with any valid id.
            segments: (B, L) int64, 1 for a row's first text, 2 for its second, up to `texts_per_row(L)`; 0 for padding.
            positions: (B, L) int64, from 0 in each text; for padding any that the model has.

        Returns:
            (B * texts_per_row(L), D) fp32, the texts of a row behind each other; rows without a text are 0, or what the head
            makes of 0.
        """
        # Padding sees padding, so no softmax is over nothing.
        additive = (segments[:, :, None] != segments[:, None, :]).to(self.backbone.dtype)[:, None] * MASKED
        hidden = self._hidden(tokens, positions + self._first_position, attention_mask=self._masks(additive, positions))
        with torch.autocast(tokens.device.type, enabled=False):
            return self._finish(pool_packed(hidden.float(), segments, positions, self.pooling).flatten(0, 1))

    @property
    def unpads(self) -> bool:
        """Whether `unpadded` is there; see `prepare_for_training`."""
        return self.config._attn_implementation in (unpadded.PLAIN, unpadded.FUSED)

    def unpadded(self, *batches: PaddedBatch) -> tuple[Tensor, ...]:
        """What `forward` makes of each batch, computed together and without their padding.

        Returns:
            (B, D) fp32 for each.
        """
        tokens = torch.cat([batch.tokens.reshape(-1)[batch.places] for batch in batches])
        positions = [self._positions(batch.tokens).expand_as(batch.tokens).reshape(-1)[batch.places] for batch in batches]
        rows = unpadded.rows_of(batches, MASKED, self.config.sliding_window if self._family.windows else None)
        # Without masks: where the library gets none, it makes its own.
        masks = {"full_attention": None, "sliding_attention": None} if self._family.windows else None
        hidden = self._hidden(tokens[None], torch.cat(positions)[None], attention_mask=masks, rows=rows)[0]
        with torch.autocast(tokens.device.type, enabled=False):
            pooled = [
                pool(own.padded(hidden).float(), batch.mask, self.pooling) for own, batch in zip(rows, batches, strict=True)
            ]
            return torch.split(self._finish(torch.cat(pooled)), [batch.mask.shape[0] for batch in batches])

    def _positions(self, tokens: Tensor) -> Tensor:
        """(B, L) to (1, L): the same in every row."""
        return torch.arange(tokens.shape[1], device=tokens.device)[None, :] + self._first_position

    def _masks(self, additive: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """(B, 1, 1 or L, L) to what layers of each kind add to their scores; one for all where all layers see the whole text.

        Args:
            positions: (1 or B, L), in each text; a text's places follow each other.
        """
        if not self._family.windows:
            return additive
        local = additive + unpadded.beyond(positions, self.config.sliding_window).to(additive.dtype) * MASKED
        return {"full_attention": additive, "sliding_attention": local}

    def _hidden(self, tokens: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        if self._family.token_types:
            # One for all tokens: texts that stand alone are of type 0.
            arguments["token_type_ids"] = torch.zeros_like(tokens[:1, :1])
        hidden: Tensor = self.backbone(input_ids=tokens, position_ids=positions, **arguments).last_hidden_state
        return hidden

    def _finish(self, pooled: Tensor) -> Tensor:
        if self.head is not None:
            pooled = self.head(pooled)
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def require_length(encoder: Encoder, length: int, setting: str) -> None:
    """A static length needs that many positions, however short the texts are.

    Args:
        setting: where the length comes from, for the message.

    Raises:
        BadConfig: the encoder has fewer.
    """
    if length > encoder.max_length:
        raise BadConfig(
            "a static length is longer than the encoder allows",
            value=f"{setting}: {length}",
            rule=f"at most {encoder.max_length}, the number of its position embeddings",
            remedy=f"shorten {setting}",
        )


def prepare_for_inference(encoder: Encoder, *, fused_attention: bool) -> None:
    """Choose how attention is computed in evaluation and embedding: by the library's fused kernel, or by plain products."""
    encoder.backbone.set_attn_implementation("sdpa" if fused_attention and encoder._family.fused else "eager")


def prepare_for_training(
    encoder: Encoder,
    *,
    fused_attention: bool,
    unpadded_rows: bool = False,
    dropout: float | None = None,
    scatters: bool = True,
) -> None:
    """Choose how attention and dropout are computed in training; the saved configuration keeps its own values.

    Attention probabilities are trained without dropout (hidden states keep theirs): fused kernels cannot drop them everywhere,
    and drawing them costs more than the attention itself.

    Args:
        fused_attention: False on processors, whose fused kernel has a backward pass far slower than plain products (torch 2.9).
        unpadded_rows: allow `Encoder.unpadded`, where the library lets attention be replaced (`Encoder.unpads` says so).
        dropout: of hidden states; None: as configured in the model.
        scatters: False on devices where a scatter is slow: only the gradient of the word embeddings then has one.
    """
    if not scatters:
        avoid_scatters(encoder.backbone, encoder._first_position)
    for module in encoder.backbone.modules():
        if isinstance(module, nn.Dropout) and dropout is not None:
            module.p = dropout
    attention: Any
    for attention in (module for module in encoder.backbone.modules() if isinstance(module, encoder._family.attention)):
        if hasattr(attention, "dropout"):
            attention.dropout.p = 0.0
        else:
            attention.attention_dropout = 0.0
    if unpadded_rows and encoder._family.fused:
        encoder.backbone.set_attn_implementation(unpadded.FUSED if fused_attention else unpadded.PLAIN)
    elif not fused_attention:
        encoder.backbone.set_attn_implementation("eager")


def checkpoint_activations(encoder: Encoder, checkpoint: Callable[..., Any]) -> None:
    """Keep only each layer's input for the backward pass, and compute the layer again there.

    Args:
        checkpoint: the device's, see `Device.checkpointed`.
    """

    encoder.backbone._set_gradient_checkpointing(
        enable=True,
        # Without gradients nothing is kept: the first pass through micro-batches needs no checkpoint.
        gradient_checkpointing_func=lambda function, *arguments: (
            checkpoint(function, *arguments) if torch.is_grad_enabled() else function(*arguments)
        ),
    )


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """(B, L, D) to (B, D): the first token, or the mean over the tokens that are not padding."""
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask.to(hidden.dtype)
    return (hidden * weights[:, :, None]).sum(dim=1) / weights.sum(dim=1, keepdim=True)


def pool_packed(hidden: Tensor, segments: Tensor, positions: Tensor, pooling: str) -> Tensor:
    """(B, L, D) to (B, texts_per_row(L), D): each text's first token, or the mean over its tokens; 0 where there is no text."""
    # int: where a module is traced, a shape is a tensor.
    numbers = torch.arange(1, texts_per_row(int(segments.shape[1])) + 1, device=segments.device)
    members = segments[:, None, :] == numbers[None, :, None]
    if pooling == "cls":
        members = members & (positions == 0)[:, None, :]
    weights = members.to(hidden.dtype)
    return (weights @ hidden) / weights.sum(dim=2, keepdim=True).clamp(min=1)


class PackedEncoder(nn.Module):
    """An encoder that is called with packed rows, see `Encoder.packed`."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        return self.encoder.packed(tokens, segments, positions)


def new_encoder(backbone: PreTrainedConfig, config: ModelConfig) -> Encoder:
    """An encoder with random weights (a new residual head changes nothing, see `new_head`).

    Args:
        backbone: the backbone's configuration.
        config: pooling, normalization and head.

    Raises:
        BadConfig: unsupported family.
    """
    family = family_of(backbone)
    backbone._attn_implementation = "sdpa" if family.fused else "eager"
    head = new_head(int(backbone.hidden_size), config.head) if config.head else None
    return Encoder(family.model(backbone).float(), pooling=config.pooling, normalize=config.normalize, head=head)
