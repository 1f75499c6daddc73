"""Exact search on a device: the best documents of many queries by inner product, as `faiss.knn` finds them on the host.

One block of queries meets one block of documents in a product and a `topk`. Blocks are filled up to one size, so a device that
compiles has one graph. The blocks' results come together on the host, in FAISS's heap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.evaluation.retrieval import CANDIDATES_AT_ONCE, QUERIES_AT_ONCE

if TYPE_CHECKING:
    import faiss

    from pipeline.backends.device import Device
    from pipeline.evaluation.vectors import Vectors

LEAST = float(np.finfo(np.float32).min)
"""Score of what fills a block up. A heap begins with it, and takes only what is larger."""


class DeviceSearch:
    """The search for so many documents of each query.

    Args:
        dimension: of an embedding.
        depth: documents of each query, at most CANDIDATES_AT_ONCE.
        flags: neuronx-cc's.
        path: of the traced form (neuron).
    """

    def __init__(self, device: Device, dimension: int, depth: int, flags: Sequence[str], path: Path) -> None:
        def best_of_block(queries: Tensor, documents: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            return tuple((queries @ documents.T + bias).topk(depth))

        self._device = device
        self._best_of_block: Callable[..., tuple[Tensor, ...]] = best_of_block
        if device.kind == "neuron":
            from pipeline.backends.neuron import traced_function

            sizes = ((QUERIES_AT_ONCE, dimension), (CANDIDATES_AT_ONCE, dimension), (CANDIDATES_AT_ONCE,))
            self._best_of_block = traced_function(best_of_block, tuple(map(torch.zeros, sizes)), path, flags=flags)

    def blocks(self, queries: Vectors) -> list[Tensor]:
        """Put queries, (n, D), on the device."""
        return [
            self._filled(torch.from_numpy(queries[start : start + QUERIES_AT_ONCE]), QUERIES_AT_ONCE)
            for start in range(0, len(queries), QUERIES_AT_ONCE)
        ]

    def _filled(self, rows: Tensor, size: int, value: float = 0.0) -> Tensor:
        missing = (0, size - len(rows))
        return F.pad(rows, missing if rows.ndim == 1 else (0, 0, *missing), value=value).to(self._device.torch_device)

    def add(self, best: faiss.ResultHeap, queries: Sequence[Tensor], vectors: Vectors, first: int) -> None:
        """Take more documents into each query's best ones.

        Args:
            queries: `blocks` of all of the heap's.
            vectors: of the documents, (m, D).
            first: number of the first of them.
        """
        for start in range(0, len(vectors), CANDIDATES_AT_ONCE):
            own = torch.from_numpy(vectors[start : start + CANDIDATES_AT_ONCE])
            block = self._filled(own, CANDIDATES_AT_ONCE), self._filled(torch.zeros(len(own)), CANDIDATES_AT_ONCE, LEAST)
            for number, rows in enumerate(np.split(np.arange(best.nq), range(QUERIES_AT_ONCE, best.nq, QUERIES_AT_ONCE))):
                found = self._best_of_block(queries[number], *block)
                self._device.sync(*found)
                scores, places = (values.cpu().numpy()[: len(rows)] for values in found)
                best.add_result_subset(rows, scores, places + (first + start))
