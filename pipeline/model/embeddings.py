"""Embeddings whose gradients need no scatter. Parameters, their names and the values are those of the library's modules.

Autograd's gradient of an embedding adds up rows one by one, at indices that are data: slow on accelerators. Only the word
embeddings need that; the tables of positions, relative positions and token types are so small that a product does it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class ProductEmbedding(nn.Embedding):
    """An embedding with a product of its indices, one-hot, as gradient.

    Attributes:
        first: row of the first position, where indices are consecutive positions; None: any row may be looked up.
    """

    first: int | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's
        rows = range(len(self.weight)) if self.first is None else range(self.first, self.first + input.shape[-1])
        found: Tensor = _LookUp.apply(input, self.weight, rows)  # type: ignore[no-untyped-call]
        return found


class _LookUp(torch.autograd.Function):
    """(...) indices within `rows` and (R, D) to (..., D)."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, rows: range) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.all_rows = rows, len(weight)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        [indices] = ctx.saved_tensors
        flat = gradients[0].flatten(0, -2)
        chosen = torch.arange(ctx.rows.start, ctx.rows.stop, device=flat.device)[:, None] == indices.flatten()
        return None, F.pad(chosen.to(flat.dtype) @ flat, (0, 0, ctx.rows.start, ctx.all_rows - ctx.rows.stop)), None


def avoid_scatters(backbone: PreTrainedModel, first_position: int) -> None:
    """Give all embeddings but the words' a product as gradient.

    Args:
        first_position: row of the first position.
    """
    words = backbone.get_input_embeddings()
    for name, module in backbone.named_modules():
        if isinstance(module, nn.Embedding) and module is not words:
            module.__class__ = ProductEmbedding
            if name.endswith("position_embeddings"):
                cast(ProductEmbedding, module).first = first_position
