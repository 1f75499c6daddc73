"""The contrastive loss of a bi-encoder with in-batch negatives from all ranks. Static shapes, no branch on data.

What depends on the rows alone (whose document is whose, and what must not count as a negative) is prepared on the host and comes
in as data: see DocumentRole. So the graph is the same on every rank, and no hash has to travel between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.model.encoder import MASKED


class DocumentRole(IntEnum):
    """The role of a document of the global batch for a query."""

    IGNORED = -1
    NEGATIVE = 0
    POSITIVE = 1


def contrastive_loss(
    queries: Tensor,
    documents: Tensor,
    roles: Tensor,
    weights: Tensor,
    *,
    temperature: float,
    gather: Callable[[Tensor], Tensor],
    dimensions: Sequence[int] = (),
    normalize: bool = True,
) -> Tensor:
    """Cross entropy of each query's own document among all documents of the global batch that count for it.

    With Matryoshka sizes (Kusupati et al. 2022, arXiv:2205.13147) the sum of this and the same of every size's prefixes.

    Args:
        queries: (B, D) fp32, this rank's.
        documents: (M, D) fp32, this rank's: those of its pairs, and their negatives.
        roles: (B, N) integers, see DocumentRole, for the documents of all ranks in rank order. One POSITIVE per row, padding
            rows included.
        weights: (B,) fp32, of each query in the result. With (ranks / valid queries of all ranks) for valid rows and 0 for
            padding, the mean of all ranks' losses is the mean over all valid queries.
        temperature: by which similarities are divided.
        gather: (M, D) of this rank to (N, D) of all, with gradients.
        dimensions: Matryoshka sizes below D.
        normalize: prefixes to length 1, as the embeddings are.

    Returns:
        A scalar.
    """
    own, everyone = queries.float(), gather(documents.float())
    loss = _cross_entropy(own, everyone, roles, weights, temperature)
    for size in dimensions:
        loss = loss + _cross_entropy(
            _prefix(own, size, normalize), _prefix(everyone, size, normalize), roles, weights, temperature
        )
    return loss


def classification_loss(logits: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy of each text's class.

    Args:
        logits: (B, C), this rank's.
        classes: (B,) integers.
        weights: see `contrastive_loss`.

    Returns:
        A scalar.
    """
    logits = logits.float()
    # One-hot: the backward pass of a selection would be a scatter.
    own = torch.arange(logits.shape[1], device=logits.device) == classes[:, None]
    return ((torch.logsumexp(logits, dim=1) - (logits * own).sum(dim=1)) * weights).sum()


def _cross_entropy(queries: Tensor, documents: Tensor, roles: Tensor, weights: Tensor, temperature: float) -> Tensor:
    scores = queries @ documents.T / temperature
    positive = (scores * (roles == DocumentRole.POSITIVE)).sum(dim=1)
    competing = torch.where(roles == DocumentRole.IGNORED, MASKED, scores)
    return ((torch.logsumexp(competing, dim=1) - positive) * weights).sum()


def _prefix(embeddings: Tensor, size: int, normalize: bool) -> Tensor:
    # A split, because XLA makes the backward pass of a slice an update in place (dynamic-update-slice), and of this a padding.
    first, _ = torch.split(embeddings, [size, embeddings.shape[1] - size], dim=1)
    return F.normalize(first, dim=1) if normalize else first
