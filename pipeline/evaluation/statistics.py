"""Paired comparison of two models' per-query values: is their difference more than chance? numpy only.

Queries whose documents were held out together are not independent of each other, so whole units of the hold-out are resampled
(the cluster bootstrap: Field and Welsh 2007, "Bootstrapping clustered data").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
ONE_SIDED = 1.6448536269514722
"""Standard deviations from the mean beyond which 5 % of a normal distribution lie."""

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Units(NamedTuple):
    """What was held out together: a query belongs to the unit of each of its relevant documents.

    Attributes:
        query, unit: (N,) distinct pairs of a query's index and a unit's; every query has one.
    """

    query: Integers
    unit: Integers

    @classmethod
    def of(cls, query: Integers, keys: npt.NDArray[np.uint64]) -> Units:
        """Return them from the key (pipeline/dataset/ingested) of each row of a query: (rows,) each."""
        pairs = np.unique(np.stack([query.astype(np.int64), np.unique(keys, return_inverse=True)[1]], axis=1), axis=0)
        return cls(pairs[:, 0], pairs[:, 1])

    @classmethod
    def single(cls, queries: int) -> Units:
        """Return a unit for each query."""
        return cls(np.arange(queries), np.arange(queries))

    def within(self, chosen: npt.NDArray[np.bool_]) -> Units:
        """Return those of some queries, (queries,), which are counted anew."""
        own = chosen[self.query]
        return Units((np.cumsum(chosen) - 1)[self.query[own]], np.unique(self.unit[own], return_inverse=True)[1])


def resampled(statistics: Callable[[Values], Values], units: Units, *, samples: int, seed: int) -> Values:
    """Return statistics of each resample of the units, with replacement: (samples, statistics).

    Args:
        statistics: of weighted queries, (queries,) -> (statistics,). A query weighs as often as its units were drawn on average;
            all of a few units may have been drawn without a query.
    """
    rng, count = np.random.default_rng(seed), int(units.unit.max()) + 1
    shares, found = 1 / np.bincount(units.query), []
    for _ in range(samples):
        drawn = np.bincount(rng.integers(0, count, size=count), minlength=count)
        found.append(statistics(np.bincount(units.query, drawn[units.unit]) * shares))
    return np.stack(found)


def weighted_means(values: Values, weights: Values) -> Values:
    """Return the means of values, (queries, metrics), whose queries have weights: (metrics,)."""
    return cast(Values, weights @ values / max(weights.sum(), 1e-300))


def bootstrap(differences: Values, *, samples: int, seed: int) -> tuple[Values, Values]:
    """Return the 95 % confidence interval of the mean difference: lower and upper bounds, shape (metrics,) each.

    Args:
        differences: new - baseline, shape (queries, metrics). Paired: both models saw the same query, so the spread among
            queries, which is far larger than the difference, cancels out.
    """
    means = resampled(partial(weighted_means, differences), Units.single(len(differences)), samples=samples, seed=seed)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return low, high


def normal_share(deviations: float) -> float:
    """Return the share of a normal distribution below so many standard deviations from its mean."""
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def holm(shares: Sequence[float], level: float = 1 - CONFIDENCE) -> list[bool]:
    """Return which of several hypotheses are rejected, so that one is rejected wrongly with a chance of `level` at most.

    Args:
        shares: p-value of each (Holm 1979, "A simple sequentially rejective multiple test procedure").
    """
    rejected = [False] * len(shares)
    for done, place in enumerate(sorted(range(len(shares)), key=shares.__getitem__)):
        if shares[place] > level / (len(shares) - done):
            break
        rejected[place] = True
    return rejected
