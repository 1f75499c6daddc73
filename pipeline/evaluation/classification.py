"""Metrics of classified texts. numpy only."""

from __future__ import annotations

import numpy as np

from pipeline.evaluation.statistics import Integers, Values

ACCURACY, MACRO_F1 = "accuracy", "macro-f1"


def macro_f1(predicted: Integers, true: Integers, weights: Values) -> float:
    """Return the mean F1 of the classes that occur among the true ones, as scikit-learn's `f1_score` with these as `labels`.

    Args:
        predicted, true: (N,) numbers of classes; -1 is none.
        weights: of the texts, (N,), as its `sample_weight`. A class whose texts weigh nothing does not occur.
    """
    size = 2 + int(max(predicted.max(), true.max()))
    right, answers, there = (
        np.bincount(classes + 1, own, size)
        for classes, own in ((true, weights * (predicted == true)), (predicted, weights), (true, weights))
    )
    return float((2 * right / np.maximum(answers + there, 1e-300)).sum() / max(np.count_nonzero(there), 1))
