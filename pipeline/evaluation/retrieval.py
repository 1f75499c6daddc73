"""Retrieval metrics: how well queries find their relevant documents among all candidates, per query, in the terms of trec_eval.

Exact search: every query is scored against every candidate, in chunks, so that the whole score matrix is never in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.errors import BadData

METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
DEPTH = 100
SCORES_PER_CHUNK = 1 << 24
"""Scores held at once: 64 MiB of fp32, and twice that for the keys they are sorted by."""

Values = npt.NDArray[np.float64]


def retrieve(
    queries: Tensor, candidates: Tensor, relevant: Sequence[Mapping[int, float]], k: int = DEPTH
) -> dict[str, npt.NDArray[np.float64]]:
    """Rank all candidates for every query by inner product and measure the rankings.

    Args:
        queries: (Q, D) fp32.
        candidates: (C, D) fp32, on the same device.
        relevant: per query, index of a candidate -> gain; gains above 0 count as relevant and weigh linearly in nDCG.
        k: depth of the rankings, at least 100 for all metrics.

    Returns:
        For each of METRICS an array (Q,): nDCG@10, the reciprocal rank of the first relevant document within 10 (else 0), and the
        share of a query's relevant documents within 1, 10 and 100 ranks.

    Raises:
        BadData: an embedding that is not finite.
        ValueError: as many queries as relevance judgements are needed, each with at least one relevant candidate.
    """
    if len(relevant) != len(queries):
        raise ValueError(f"{len(queries)} queries, but relevance for {len(relevant)}")
    ranked = rank(queries, candidates, k)
    found = np.zeros(ranked.shape, dtype=np.float64)
    totals = np.empty(len(relevant), dtype=np.int64)
    ideal = np.zeros((len(relevant), 10), dtype=np.float64)
    for query, judged in enumerate(relevant):
        gains = {candidate: gain for candidate, gain in judged.items() if gain > 0}
        if not gains:
            raise ValueError(f"query {query} has no relevant candidate")
        found[query] = [gains.get(candidate, 0.0) for candidate in ranked[query].tolist()]
        totals[query] = len(gains)
        best = sorted(gains.values(), reverse=True)[:10]
        ideal[query, : len(best)] = best
    return _measure(found, totals, ideal)


def rank(queries: Tensor, candidates: Tensor, k: int) -> npt.NDArray[np.int64]:
    """Return the indices of the best min(k, C) candidates of every query, best first; equal scores in the candidates' order."""
    if not (bool(torch.isfinite(queries).all()) and bool(torch.isfinite(candidates).all())):
        raise BadData(
            "embeddings that are not finite", rule="every value of an embedding is a number", remedy="look at the model"
        )
    k = min(k, len(candidates))
    rows = max(1, SCORES_PER_CHUNK // max(1, len(candidates)))
    chunks = [_sortable(chunk @ candidates.T).topk(k, dim=1).indices.cpu() for chunk in torch.split(queries, rows)]
    return torch.cat(chunks).numpy() if chunks else np.empty((0, k), dtype=np.int64)


def _sortable(scores: Tensor) -> Tensor:
    """Return distinct int64 keys in the order of (score, earlier candidate first); `topk` promises nothing about equal scores."""
    # Bits of floats order like integers once the magnitude of negative ones is flipped; adding 0 makes -0.0 into 0.0.
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) - torch.arange(scores.shape[1], device=scores.device)


def _measure(found: Values, totals: npt.NDArray[np.int64], ideal: Values) -> dict[str, npt.NDArray[np.float64]]:
    discounts = 1.0 / np.log2(np.arange(2, 12))
    top = found[:, :10]
    hits = found > 0
    first = np.where(hits[:, :10].any(axis=1), hits[:, :10].argmax(axis=1) + 1.0, np.inf)
    return {
        "ndcg@10": (top * discounts[: top.shape[1]]).sum(axis=1) / (ideal * discounts).sum(axis=1),
        "mrr@10": 1.0 / first,
        **{f"recall@{depth}": hits[:, :depth].sum(axis=1) / totals for depth in (1, 10, 100)},
    }
