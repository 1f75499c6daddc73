"""Buckets: consecutive tensors that are sent or updated as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)


def buckets(tensors: Iterable[TensorT], limit: int) -> Iterator[list[TensorT]]:
    """Yield the tensors in their order, in lists of at most `limit` elements; a larger tensor has a list of its own."""
    bucket: list[TensorT] = []
    elements = 0
    for tensor in tensors:
        if bucket and elements + tensor.numel() > limit:
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket
