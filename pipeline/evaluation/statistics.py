"""Paired comparison of two models' per-query values: is their difference more than chance? numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95

Values = npt.NDArray[np.float64]


def bootstrap(differences: Values, *, samples: int, seed: int) -> tuple[Values, Values]:
    """Return the 95 % confidence interval of the mean difference, by resampling queries with replacement.

    Args:
        differences: new - parent, shape (queries, metrics). Paired: both models saw the same query, so the spread among queries,
            which is far larger than the difference, cancels out.

    Returns:
        Lower and upper bounds, shape (metrics,) each.
    """
    rng = np.random.default_rng(seed)
    queries = len(differences)
    means = np.empty((samples, differences.shape[1]))
    for sample in range(samples):
        # How often each query was drawn: one product instead of a gather, and no (samples, queries) array.
        drawn = np.bincount(rng.integers(0, queries, size=queries), minlength=queries)
        means[sample] = drawn @ differences / queries
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return low, high
