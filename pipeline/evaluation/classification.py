"""Metrics of classified texts. numpy only."""

from __future__ import annotations

import numpy as np

from pipeline.evaluation.statistics import Integers

ACCURACY, MACRO_F1 = "accuracy", "macro-f1"


def macro_f1(predicted: Integers, true: Integers) -> float:
    """Return the mean F1 of the classes that occur among the true ones, as scikit-learn's `f1_score` with these as `labels`.

    Args:
        predicted, true: (N,) numbers of classes.
    """
    scores = []
    for number in np.unique(true):
        hits = np.count_nonzero((predicted == number) & (true == number))
        scores.append(2 * hits / (np.count_nonzero(predicted == number) + np.count_nonzero(true == number)))
    return float(np.mean(scores))
