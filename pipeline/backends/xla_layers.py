"""Layers, formulated for XLA's CPU compiler. What they compute is what torch's own compute.

That compiler (torch-xla 2.9) has two weaknesses, which make up most of a training step besides its matrix products:

- A sum over rows or columns is a slow loop, 8 to 25 times torch's; a product with ones is as fast as torch's sum.
- It repeats cheap operations in every kernel that needs them, and so repeats all gradients of the residual stream from the last
  layer on in every layer: barriers where a LayerNorm begins and ends keep them. Its own removal of barriers comes too early for
  that and is switched off (pipeline/backends/xla.py).

tests/benchmarks/xla_step.py measures a training step with and without.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 4
"""Rows of ones in a product: the quickest of 1, 2, 4, 8 and 16."""


def adapt(module: nn.Module, precision: str) -> None:
    """Formulate a module's layers for a precision, `fp32` or `bf16`."""
    if precision == "fp32":
        reformulate(module)
    else:
        round_once(module)


def reformulate(module: nn.Module) -> None:
    """Give all linear layers and LayerNorms inside another `forward`; parameters and names stay."""
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.bias is not None:
            layer.forward = MethodType(_linear, layer)  # type: ignore[method-assign]
        elif type(layer) is nn.LayerNorm and layer.bias is not None and len(layer.normalized_shape) == 1:
            layer.forward = MethodType(_layer_norm, layer)  # type: ignore[method-assign]


def round_once(module: nn.Module) -> None:
    """Compute activations of bf16 in fp32 and round the result, as torch's kernels do; torch-xla rounds after every operation.

    That alone makes embeddings of MiniLM a fifth less exact: |error| 0.0087 instead of 0.0074, against fp32 and length 1.
    """
    for layer in module.modules():
        # How transformers' activation modules hold torch's function.
        if getattr(layer, "act", None) is F.gelu:
            layer.forward = MethodType(_gelu, layer)


def _gelu(_layer: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(x.float()).to(x.dtype)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return cast(Tensor, _Linear.apply(x, layer.weight, layer.bias))  # type: ignore[no-untyped-call]


def _layer_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return cast(Tensor, _LayerNorm.apply(x, layer.weight, layer.bias, layer.eps))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """x W^T + b, (..., I) to (..., O); the gradient of b is a product with ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (_rows(x) @ weight.t() + bias).reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = _rows(gradients[0])
        return (rows @ weight).reshape(x.shape), rows.t() @ _rows(x), _sum_of_rows(rows)


class _LayerNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) w + b over the last dimension, whose sums are products with ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = _kept(x)
        ones = torch.ones_like(weight)
        mean = _weighted_mean(x, ones)
        centered = x - mean
        scale = torch.rsqrt(_weighted_mean(centered * centered, ones) + eps)
        ctx.save_for_backward(x, mean, scale, weight)
        return _kept(centered * scale * weight + bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, scale, weight = ctx.saved_tensors
        gradient = _kept(gradients[0])
        normalized = (x - mean) * scale
        product = gradient * normalized
        # Means of the weighted gradient, and of it times the normalized rows: the weights stand in for the ones.
        found = scale * (gradient * weight - _weighted_mean(gradient, weight) - normalized * _weighted_mean(product, weight))
        return _kept(found), _sum_of_rows(_rows(product)), _sum_of_rows(_rows(gradient)), None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _sum_of_rows(x: Tensor) -> Tensor:
    """(N, D) to (D,)."""
    return (torch.ones(ROWS, len(x), device=x.device) @ x)[0]


def _weighted_mean(x: Tensor, weights: Tensor) -> Tensor:
    """(..., D) and (D,) to (..., 1): the weighted mean over the last dimension."""
    return (_rows(x) @ weights[:, None]).reshape(*x.shape[:-1], 1) / len(weights)


def _kept(x: Tensor) -> Tensor:
    """The same values, computed once for all that use them."""
    kept = x.clone()
    xm.optimization_barrier_([kept])
    return kept
