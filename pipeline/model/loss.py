"""The contrastive loss of a bi-encoder with in-batch negatives from all ranks. Static shapes, no branch on data.

What depends on the rows alone (whose document is whose, and what must not count as a negative) is prepared on the host and comes
in as data: see DocumentRole. So the graph is the same on every rank, and no hash has to travel between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

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
) -> Tensor:
    """Cross entropy of each query's own document among all documents of the global batch that count for it.

    Args:
        queries, documents: (B, D) fp32, this rank's pairs.
        roles: (B, N) integers, see DocumentRole, for the documents of all ranks in rank order. One POSITIVE per row, padding
            rows included.
        weights: (B,) fp32, of each query in the result. With (ranks / valid queries of all ranks) for valid rows and 0 for
            padding, the mean of all ranks' losses is the mean over all valid queries.
        temperature: by which similarities are divided.
        gather: (B, D) of this rank to (N, D) of all, with gradients.

    Returns:
        A scalar.
    """
    scores = queries.float() @ gather(documents.float()).T / temperature
    positive = (scores * (roles == DocumentRole.POSITIVE)).sum(dim=1)
    competing = torch.where(roles == DocumentRole.IGNORED, MASKED, scores)
    return ((torch.logsumexp(competing, dim=1) - positive) * weights).sum()
