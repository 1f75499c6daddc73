"""Metrics of classified texts, against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score

from pipeline.evaluation.classification import macro_f1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weighted", [False, True])
def test_macro_f1_is_scikit_learns(seed: int, weighted: bool) -> None:
    draw = np.random.default_rng(seed)
    true, predicted = draw.integers(0, 6, 200), draw.integers(-1, 8, 200)
    # As the bootstrap has them: texts that were not drawn, and others drawn several times.
    weights = draw.integers(0, 3, 200).astype(float) if weighted else np.ones(200)
    there = sorted({*true[weights > 0].tolist()})
    expected = f1_score(true, predicted, labels=there, average="macro", sample_weight=weights, zero_division=0)
    assert macro_f1(predicted, true, weights) == pytest.approx(expected, abs=1e-12)


def test_a_class_that_was_not_drawn_does_not_count() -> None:
    true, predicted = np.array([0, 0, 1]), np.array([0, 1, 0])
    assert macro_f1(predicted, true, np.array([1.0, 1.0, 0.0])) == pytest.approx(2 / 3)
    assert macro_f1(predicted, true, np.zeros(3)) == 0.0
