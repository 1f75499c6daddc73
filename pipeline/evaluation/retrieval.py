"""Exact search: every query is scored against every candidate, block by block; only its best candidates so far are kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import BadData
from pipeline.evaluation.retrieval_metrics import Relevant, measure_others, ranked_depth
from pipeline.evaluation.statistics import Integers, Values

QUERIES_AT_ONCE = 512
CANDIDATES_AT_ONCE = 8192
"""Queries and candidates of a block of scores: 16 MiB of fp32."""

GROUP = 16
"""Scores whose maximum stands for them where a bound is sought."""

Block = tuple[Integers, Tensor]
"""Some candidates: their indices among all, (c,), and their embeddings, (c, D) fp32."""


def retrieve(
    queries: Tensor, candidates: Sequence[Block], relevant: Relevant, known: Relevant | None = None
) -> dict[str, Values]:
    """Rank all candidates for every query by inner product and measure the rankings.

    Args:
        queries: (Q, D) fp32.
        candidates: in any order, on any device.
        known: candidates that are left out of the rankings of their queries.

    Returns:
        See `measure_rankings`.

    Raises:
        BadData: an embedding that is not finite.
        ValueError: see `measure_rankings`.
    """
    known = known or Relevant.of(())
    return measure_others(rank(queries, candidates, ranked_depth(known)), relevant, known)


def rank(queries: Tensor, candidates: Sequence[Block], k: int) -> Integers:
    """Return the indices of the best min(k, C) candidates of every query, best first; of equal scores the smaller index.

    Raises:
        BadData: an embedding that is not finite.
    """
    blocks = [
        (torch.from_numpy(indices[start : start + CANDIDATES_AT_ONCE]), vectors[start : start + CANDIDATES_AT_ONCE])
        for indices, vectors in candidates
        for start in range(0, len(indices), CANDIDATES_AT_ONCE)
    ]
    if not all(bool(torch.isfinite(vectors).all()) for vectors in (queries, *(vectors for _, vectors in blocks))):
        raise BadData(
            "embeddings that are not finite", rule="every value of an embedding is a number", remedy="look at the model"
        )
    k = min(k, sum(len(indices) for indices, _ in blocks))
    chunks = [
        _best(queries[start : start + QUERIES_AT_ONCE], blocks, k).cpu() for start in range(0, len(queries), QUERIES_AT_ONCE)
    ]
    # The lower half of a key is minus an index.
    return (-torch.cat(chunks) & 0xFFFFFFFF).numpy() if chunks else np.empty((0, k), dtype=np.int64)


def _best(queries: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """Return the keys of each query's best candidates, (q, k), best first."""
    best = queries.new_full((len(queries), k), torch.iinfo(torch.int64).min, dtype=torch.int64)
    bound = queries.new_full((len(queries), 1), -torch.inf)
    for indices, vectors in blocks:
        scores = queries @ vectors.to(queries.device).T
        if scores.shape[1] >= k * GROUP:
            # k groups have a score as large as the least of their maxima, so less is not among the best k.
            groups = scores[:, : scores.shape[1] // GROUP * GROUP].view(len(queries), -1, GROUP).amax(dim=2)
            bound = torch.maximum(bound, groups.topk(k, dim=1).values[:, -1:])
        row, column = (scores >= bound).nonzero(as_tuple=True)
        keys = _sortable(scores[row, column]) - indices.to(queries.device)[column]
        counts = torch.bincount(row, minlength=len(queries))
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        found = best.new_full((len(queries), int(counts.max())), torch.iinfo(torch.int64).min)
        found[row, place] = keys
        best = torch.cat([best, found], dim=1).topk(k, dim=1).values
    return best


def _sortable(scores: Tensor) -> Tensor:
    """Return int64 keys in the order of the scores, with a lower half of zeros; `topk` promises nothing about equal scores."""
    # Bits of floats order like integers once the magnitude of negative ones is flipped; adding 0 makes -0.0 into 0.0.
    bits = (scores.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) << 32
