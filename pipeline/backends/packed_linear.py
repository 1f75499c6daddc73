"""Linear layers for inference on processors: bf16 weights in the layout that oneDNN multiplies from, reordered once.

Given plain weights, oneDNN reorders them for every product. The operations are those that torch's own compiler puts in the place
of a frozen module's linear layers (torch/_inductor/fx_passes/mkldnn_fusion.py, torch 2.9).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUActivation


class PackedLinear(nn.Module):
    """The result of `linear`, in bf16 and for inference only.

    Args:
        linear: is not needed any more.
        gelu: apply GELU (the exact one) to the result while it is in the cache.
    """

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach().to(torch.bfloat16).contiguous()
        # None: for any number of rows. A layout for one number is slower for all others.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._after: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")
        self._bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features in) bf16 to (..., features out) bf16."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, *self._after))


def can_pack() -> bool:
    """Whether oneDNN is there and computes in bf16 on this processor."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer inside a module, and join the activation of BERT-like feed-forward layers to it."""
    for parent in list(module.modules()):
        activation = getattr(parent, "intermediate_act_fn", None)
        gelu = isinstance(activation, GELUActivation) and activation.act is F.gelu
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child, gelu=gelu))
        if gelu:
            parent.intermediate_act_fn = nn.Identity()
