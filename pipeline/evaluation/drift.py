"""Drift: how far the vectors of a new model are from those that readers of the published embeddings have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.retrieval import Block, rank
from pipeline.evaluation.statistics import ONE_SIDED, Integers, Values

NEIGHBOURS = 10
MOST_DOCUMENTS = 20_000
"""Documents whose neighbours among each other are compared."""


def cosines(old: Tensor, new: Tensor) -> Values:
    """Return the cosine between the vectors that two models give each document, (documents,).

    Args:
        old, new: (documents, D) fp32.
    """
    found: Values = torch.nn.functional.cosine_similarity(old, new).double().numpy()
    return found


def overlaps(old: Tensor, new: Tensor) -> Values:
    """Return the share of each document's nearest NEIGHBOURS, by inner product, that it has with both models, (documents,).

    Args:
        old, new: (documents, D) fp32, documents > 1; the dimensions may differ.
    """
    before, after = _neighbours(old), _neighbours(new)
    shared: Values = (before[:, :, None] == after[:, None, :]).any(axis=2).mean(axis=1)
    return shared


def _neighbours(vectors: Tensor) -> Integers:
    own = np.arange(len(vectors))
    ranked = rank(vectors, [(own, vectors)], NEIGHBOURS + 1)
    others = np.argsort(ranked == own[:, None], axis=1, kind="stable")[:, : min(NEIGHBOURS, len(vectors) - 1)]
    return np.take_along_axis(ranked, others, axis=1)


def measure_drift(old: Sequence[Block], new: Sequence[Block]) -> dict[str, Any]:
    """Return the drift of the documents that two models have encoded.

    Args:
        old, new: vectors of the same documents, at least two, by their indices.

    Returns:
        `{documents, difference: {metric: {value, error, at_most}}}`, as of a slice: of `cosine` and `overlap@10` the mean less
        1, its standard error, and the bound that it is below with 95 % confidence; and `cosine`, `cosine_p1`, `overlap@10`: means
        and 1st percentile. Without cosines where the dimensions differ.
    """
    before, after = _joined(old), _joined(new)
    found = {"overlap@10": overlaps(before[:MOST_DOCUMENTS], after[:MOST_DOCUMENTS])}
    result: dict[str, Any] = {"documents": len(after)}
    if before.shape == after.shape:
        found["cosine"] = cosines(before, after)
        result["cosine_p1"] = float(np.quantile(found["cosine"], 0.01))
    result |= {name: float(values.mean()) for name, values in found.items()}
    return {**result, "difference": {name: _below_one(values) for name, values in found.items()}}


def _below_one(values: Values) -> dict[str, float]:
    value, error = float(values.mean()) - 1, float(values.std()) / math.sqrt(len(values))
    return {"value": value, "error": error, "at_most": value + ONE_SIDED * error}


def _joined(blocks: Sequence[Block]) -> Tensor:
    order = np.argsort(np.concatenate([indices for indices, _ in blocks]))
    return torch.cat([vectors for _, vectors in blocks])[torch.from_numpy(order)]
