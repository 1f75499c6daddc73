"""Attention for rows of tokens without padding: several padded batches are computed as one row that holds their tokens only.

Everything in a backbone but attention looks at one token at a time, so it needs neither padding nor rows. Attention gathers each
batch's tokens into padded rows again, and what it makes of them back into the one row. Shapes depend on the data, so this is for
devices that compile no graphs. (Known as unpadding since Zeng et al. 2022, "Boosting Distributed Training Performance of the
Unpadded BERT Model".)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import eager_attention_forward

PLAIN, FUSED = "unpadded", "unpadded-sdpa"
"""What the library knows these attentions by: inside a padded batch by plain products, or by its fused kernel."""


class PaddedBatch(NamedTuple):
    """A batch whose tokens are computed without its padding.

    Attributes:
        tokens, mask: (B, L) int64; the mask is 1 for tokens and 0 for padding, which ends rows.
        places: (T,) int64, where the mask is 1 when it is flattened. From the host: finding them would stop the device.
    """

    tokens: Tensor
    mask: Tensor
    places: Tensor


class Rows(NamedTuple):
    """One padded batch inside the one row.

    Attributes:
        start, stop: its tokens.
        slots: (B * L,) of each slot the token it holds, padding any.
        places: (T,) of each token its slot.
        additive: (B, 1, 1, L), 0 for tokens and far below for padding.
        local: the same for layers that see a window: (B, 1, L, L), far below beyond it, too.
    """

    start: int
    stop: int
    slots: Tensor
    places: Tensor
    additive: Tensor
    local: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """B and L."""
        return self.additive.shape[0], self.additive.shape[3]

    def padded(self, row: Tensor) -> Tensor:
        """(all tokens, D) to (B, L, D) of this batch. Padding holds the values of some token."""
        padded: Tensor = _Pad.apply(row[self.start : self.stop], self.slots, self.places)  # type: ignore[no-untyped-call]
        return padded.view(*self.shape, -1)

    def unpadded(self, padded: Tensor) -> Tensor:
        """(B, L, ...) to (T, D) of this batch."""
        flat: Tensor = _Unpad.apply(padded.reshape(self.slots.shape[0], -1), self.places)  # type: ignore[no-untyped-call]
        return flat


def rows_of(batches: Sequence[PaddedBatch], masked: float, window: int | None = None) -> list[Rows]:
    """What attention needs to know of batches that are computed as one row, in this order.

    Args:
        masked: is added to the scores of padding.
        window: see `beyond`; None: every layer sees the whole text.
    """
    rows, start = [], 0
    for batch in batches:
        stop = start + batch.places.shape[0]
        slots = (batch.mask.reshape(-1).cumsum(0) - 1).clamp_(min=0)
        local = additive = ((1 - batch.mask) * masked)[:, None, None, :]
        if window is not None:
            local = additive + beyond(torch.arange(batch.mask.shape[1], device=additive.device)[None], window) * masked
        rows.append(Rows(start, stop, slots, batch.places, additive, local))
        start = stop
    return rows


def beyond(positions: Tensor, window: int) -> Tensor:
    """(B, L) to (B, 1, L, L): which tokens are further from which than a window, in each direction, lets a layer see."""
    return ((positions[:, :, None] - positions[:, None, :]).abs() > window)[:, None]


class _Pad(torch.autograd.Function):
    """(T, D) to (B * L, D). Padding must not matter: as keys it is masked, and results of padded queries are not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Padding has no gradient, so this is a selection as well, where autograd's own would add up all slots.
        [places] = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


class _Unpad(torch.autograd.Function):
    """(B * L, D) to (T, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.slots = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [places] = ctx.saved_tensors
        return gradients[0].new_zeros((ctx.slots, gradients[0].shape[1])).index_copy_(0, places, gradients[0]), None


def _unpadded(attention: Any) -> Any:
    """An attention of the library's, made fit for unpadded rows; padded batches it is called for directly, as ever."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        rows: Sequence[Rows] | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """query, key, value: (B, heads, L, D / heads), with `rows` (1, heads, T, D / heads). Returns (B, L, heads, D / heads)."""
        if rows is None:
            return attention(module, query, key, value, attention_mask, **options)[0], None
        heads, size = query.shape[1], query.shape[3]
        flat = [x.transpose(1, 2).reshape(-1, heads * size) for x in (query, key, value)]
        found = []
        for own in rows:
            padded = [own.padded(x).view(*own.shape, heads, size).transpose(1, 2) for x in flat]
            mask = own.local if getattr(module, "sliding_window", None) else own.additive
            # In the type of the scores: a mask in fp32 would make fp32 of them, for no digit more.
            result = attention(module, *padded, mask.to(query.dtype), **options)[0]
            found.append(own.unpadded(result))
        return torch.cat(found).view(1, -1, heads, size), None

    return forward


AttentionInterface.register(PLAIN, _unpadded(eager_attention_forward))
AttentionInterface.register(FUSED, _unpadded(sdpa_attention_forward))
