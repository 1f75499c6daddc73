"""The paired bootstrap: against intervals that theory knows."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation.statistics import bootstrap


def test_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        differences = rng.normal(0.1, 1.0, size=(150, 1))
        low, high = bootstrap(differences, samples=300, seed=trial)
        covered += bool(low[0] <= 0.1 <= high[0])
    assert 0.88 <= covered / 200 <= 0.99


def test_interval_is_that_of_the_normal_distribution_for_many_queries() -> None:
    differences = np.random.default_rng(1).normal(0.02, [0.1, 0.4], size=(4000, 2))
    low, high = bootstrap(differences, samples=2000, seed=0)
    error = 1.96 * differences.std(axis=0) / np.sqrt(4000)
    assert low == pytest.approx(differences.mean(axis=0) - error, abs=0.1 * error.min())
    assert high == pytest.approx(differences.mean(axis=0) + error, abs=0.1 * error.max())


def test_equal_differences_have_no_width_however_far_queries_are_apart() -> None:
    queries = np.random.default_rng(2).uniform(size=(500, 1))
    low, high = bootstrap((queries + 0.01) - queries, samples=100, seed=1)
    assert (low[0], high[0]) == (pytest.approx(0.01), pytest.approx(0.01))
    # Unpaired, the same two lists of values would not show it.
    shuffled = (queries + 0.01) - np.random.default_rng(3).permutation(queries)
    low, high = bootstrap(shuffled, samples=100, seed=1)
    assert low[0] < 0 < high[0]
