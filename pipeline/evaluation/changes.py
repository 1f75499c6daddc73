"""`evaluate/changes.json`: the queries whose metric rose and fell most from the baseline to the new model, as texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.evaluation.holdout import Holdout
from pipeline.evaluation.statistics import Values
from pipeline.evaluation.vectors import Vectors

if TYPE_CHECKING:
    from pipeline.model.inference import TokenList

LISTED = 10


def largest_changes(
    holdout: Holdout, models: Mapping[str, tuple[Values, Vectors]], decode: Callable[[TokenList], str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the LISTED queries that rose most and those that fell most, in this order.

    Args:
        models: `before` and `after`: one metric of every query, (Q,), and the vectors of all candidates, then of all queries,
            (C + Q, D).
        decode: token ids -> text.

    Returns:
        `{rose: [...], fell: [...]}`; each query with `query` and `relevant` (its text and that of its most relevant document),
        `locale`, and for both models `before` and `after` (the metric), `best_before` and `best_after` (text of the first
        document).
    """
    change = models["after"][0] - models["before"][0]
    order = np.argsort(change, kind="stable").tolist()

    def shown(query: int) -> dict[str, Any]:
        relevant, known = (pairs.of_queries(range(query, query + 1)) for pairs in (holdout.relevant, holdout.known))
        texts = {"query": holdout.queries[query], "relevant": holdout.candidates[relevant.candidate[relevant.gain.argmax()]]}
        for name, (_, vectors) in models.items():
            scores = vectors[: len(holdout.candidates)] @ vectors[len(holdout.candidates) + query]
            scores[known.candidate] = -np.inf  # they count neither as found nor as wrong
            texts[f"best_{name}"] = holdout.candidates[scores.argmax()]
        measured = {name: float(values[query]) for name, (values, _) in models.items()}
        return {**measured, "locale": holdout.locales[query], **{name: decode(tokens) for name, tokens in texts.items()}}

    return {
        "rose": [shown(query) for query in order[::-1][:LISTED] if change[query] > 0],
        "fell": [shown(query) for query in order[:LISTED] if change[query] < 0],
    }
