"""Retrieval metrics: how well queries find their relevant documents among all candidates, per query, in the terms of trec_eval.

Exact search: every query is scored against every candidate, block by block, and only a query's best candidates so far are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.errors import BadData

METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
DEPTH = 100
QUERIES_AT_ONCE = 512
CANDIDATES_AT_ONCE = 8192
"""Queries and candidates of a block of scores: 16 MiB of fp32."""

GROUP = 16
"""Scores whose maximum stands for them where a bound is sought."""

Integers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

Block = tuple[Integers, Tensor]
"""Some candidates: their indices among all, (c,), and their embeddings, (c, D) fp32."""


class Relevant(NamedTuple):
    """The relevant candidates of all queries: distinct pairs sorted by query, then candidate.

    Attributes:
        query: (N,) indices of queries, each one at least once.
        candidate: (N,) indices of candidates.
        gain: (N,) above 0; weighs linearly in nDCG.
    """

    query: Integers
    candidate: Integers
    gain: Values

    @classmethod
    def of(cls, judged: Sequence[Mapping[int, float]]) -> Relevant:
        """Return them from, per query, index of a candidate -> gain; a gain of 0 or less is none."""
        pairs = [(query, *pair) for query, gains in enumerate(judged) for pair in sorted(gains.items()) if pair[1] > 0]
        query, candidate, gain = zip(*pairs, strict=True) if pairs else ((), (), ())
        return cls(np.array(query, np.int64), np.array(candidate, np.int64), np.array(gain, np.float64))

    def of_queries(self, queries: range) -> Relevant:
        """Return those of consecutive queries, which are counted from 0 then."""
        own = slice(*np.searchsorted(self.query, [queries.start, queries.stop]).tolist())
        return Relevant(self.query[own] - queries.start, self.candidate[own], self.gain[own])


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
    most = int(np.bincount(known.query).max(initial=0))
    ranked = rank(queries, candidates, DEPTH + most)
    order = np.argsort(_found(ranked, known)[1], axis=1, kind="stable")[:, :DEPTH]
    return measure_rankings(np.take_along_axis(ranked, order, axis=1), relevant)


def _found(ranked: Integers, pairs: Relevant) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return the number of the pair that each ranked candidate is with its query, and whether it is one: (Q, k) each."""
    # A pair as one number, to look all of them up at once.
    width = 1 + max(int(indices.max(initial=0)) for indices in (ranked, pairs.candidate))
    # The last one is no pair: it is found where all are smaller.
    numbers = np.append(pairs.query * width + pairs.candidate, np.iinfo(np.int64).max)
    wanted = np.arange(len(ranked))[:, None] * width + ranked
    place = np.searchsorted(numbers, wanted)
    return place.clip(max=max(len(pairs.query) - 1, 0)), numbers[place] == wanted


def measure_rankings(ranked: Integers, relevant: Relevant) -> dict[str, Values]:
    """Return the metrics of every query.

    Args:
        ranked: (Q, k) indices of each query's best candidates, best first; 100 for all metrics.

    Returns:
        For each of METRICS an array (Q,): nDCG@10, the reciprocal rank of the first relevant document within 10 (else 0), and the
        share of a query's relevant documents within 1, 10 and 100 ranks.

    Raises:
        ValueError: a query without a relevant candidate.
    """
    totals = np.bincount(relevant.query, minlength=len(ranked))
    if len(totals) != len(ranked) or not totals.all():
        raise ValueError(f"{len(ranked)} queries, but relevant candidates for {np.count_nonzero(totals)} of {len(totals)}")
    place, hit = _found(ranked, relevant)
    found = np.where(hit, relevant.gain[place], 0.0)
    best = np.lexsort((-relevant.gain, relevant.query))
    order = np.arange(len(best)) - np.repeat(np.cumsum(totals) - totals, totals)
    ideal = np.zeros((len(ranked), 10))
    top = order < 10
    ideal[relevant.query[best][top], order[top]] = relevant.gain[best][top]
    discounts = 1.0 / np.log2(np.arange(2, 12))
    gains, hits = found[:, :10], found > 0
    first = np.where(hits[:, :10].any(axis=1), hits[:, :10].argmax(axis=1) + 1.0, np.inf)
    return {
        "ndcg@10": (gains * discounts[: gains.shape[1]]).sum(axis=1) / (ideal * discounts).sum(axis=1),
        "mrr@10": 1.0 / first,
        **{f"recall@{depth}": hits[:, :depth].sum(axis=1) / totals for depth in (1, 10, 100)},
    }


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
    starts = range(0, len(queries), QUERIES_AT_ONCE)
    chunks = [_best(queries[start : start + QUERIES_AT_ONCE], blocks, k).cpu() for start in starts]
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
