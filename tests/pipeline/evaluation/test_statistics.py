"""The paired bootstrap against intervals that theory knows, and the correction for many tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pipeline.evaluation.statistics import (
    ONE_SIDED,
    Units,
    Values,
    bootstrap,
    holm,
    normal_share,
    resampled,
    weighted_means,
)


def resampled_means(differences: Values, units: Units, **drawn: Any) -> Values:
    return resampled(partial(weighted_means, differences), units, **drawn)


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


def test_queries_of_one_unit_are_no_more_evidence_than_one() -> None:
    rng = np.random.default_rng(4)
    once = rng.normal(size=(400, 1))
    queries = np.repeat(once, 5, axis=0)
    units = Units.of(np.arange(2000), np.repeat(np.arange(400, dtype=np.uint64) << np.uint64(40), 5))
    alone = resampled_means(once, Units.single(400), samples=2000, seed=0).std()
    assert resampled_means(queries, units, samples=2000, seed=0).std() == pytest.approx(alone, rel=0.1)
    assert resampled_means(queries, Units.single(2000), samples=2000, seed=0).std() == pytest.approx(alone / 5**0.5, rel=0.1)


def test_a_query_weighs_as_its_units_were_drawn() -> None:
    # Two units: a query of the first, one of the second, one of both.
    units = Units.of(np.array([0, 1, 2, 2, 2]), np.array([7, 9, 7, 9, 9], np.uint64))
    assert [column.tolist() for column in units] == [[0, 1, 2, 2], [0, 1, 0, 1]]
    means = resampled_means(np.array([[0.0], [3.0], [9.0]]), units, samples=100, seed=0)
    # Drawn: the first twice (0 x 2 + 9 x 1) / 3, each once 12 / 3, the second twice (3 x 2 + 9) / 3.
    assert {round(value, 9) for value in means[:, 0].tolist()} == {3.0, 4.0, 5.0}
    own = units.within(np.array([False, True, True]))
    assert [column.tolist() for column in own] == [[0, 1, 1], [1, 0, 1]]


def test_holm_rejects_from_the_smallest_on() -> None:
    assert holm([0.04, 0.001, 0.02]) == [True, True, True]
    assert holm([0.04, 0.03, 0.001]) == [False, False, True]
    assert holm([0.06]) == [False]
    assert holm([]) == []
    wrong = sum(any(holm(np.random.default_rng(trial).uniform(size=20).tolist())) for trial in range(2000))
    assert wrong / 2000 == pytest.approx(0.05, abs=3 * (0.05 * 0.95 / 2000) ** 0.5)


def test_shares_of_the_normal_distribution() -> None:
    assert [normal_share(0), normal_share(ONE_SIDED), normal_share(-1.959964)] == pytest.approx([0.5, 0.95, 0.025], abs=1e-6)
