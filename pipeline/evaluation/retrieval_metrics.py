"""Retrieval metrics: how well queries find their relevant documents among all candidates, per query, in the terms of trec_eval.

numpy only: what loads no framework measures with it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.statistics import Integers, Values

METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
DEPTH = 100


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


def ranked_depth(known: Relevant) -> int:
    """Return how many candidates of each query have to be ranked, so that DEPTH are left without the known ones."""
    return DEPTH + int(np.bincount(known.query).max(initial=0))


def measure_others(ranked: Integers, relevant: Relevant, known: Relevant) -> dict[str, Values]:
    """Return the metrics of every query, as if the known candidates of a query were none; arguments as of `measure_rankings`.

    Args:
        ranked: as many as `ranked_depth` says.
    """
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
