"""The quality gate: whether a model is good enough to replace the published one, and whether the hold-out can show that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config import GateConfig
from pipeline.errors import BadConfig
from pipeline.plan import Published

ROUNDING = 1e-12
"""Slack of the gate's comparison: means differ by about 1e-16 for no reason, and equal models must not be refused."""


def check_holdout(queries: int, gate: GateConfig) -> None:
    """Refuse to judge on a hold-out that cannot show what the gate asks for.

    Raises:
        BadConfig: fewer queries than `gate.min_queries`, and `gate.allow_small` is not set; or none at all.
    """
    if queries == 0 or (queries < gate.min_queries and not gate.allow_small):
        raise BadConfig(
            "the hold-out is too small to judge the model",
            value=f"{queries} distinct queries",
            rule=f"gate.min_queries = {gate.min_queries}; fewer cannot show a difference of {gate.max_drop:.3%}",
            remedy="raise data.holdout_fraction, add data, or set gate.allow_small=true to judge anyway",
        )


def judge_model(scores: Mapping[str, Mapping[str, Any]], gate: GateConfig, published: Published | None) -> dict[str, Any]:
    """Return the verdict: `accepted` if the new model's metric is at most `gate.max_drop` below the baseline's, else `refused`.

    Args:
        published: the published model that is the baseline; None: the parent is.
    """
    baseline, new = scores["baseline"][gate.metric], scores["new"][gate.metric]
    difference = scores["difference"][gate.metric]["value"]
    accepted = difference >= -gate.max_drop - ROUNDING
    against = f"published by run {published.run}" if published else "the parent"
    change = "is unchanged" if difference == 0 else f"{'rose' if difference > 0 else 'fell'} by {abs(difference):.5f}"
    return {
        "verdict": "accepted" if accepted else "refused",
        "metric": gate.metric,
        "published": published.run if published else None,
        "baseline": baseline,
        "new": new,
        "difference": difference,
        "allowed": gate.max_drop,
        "reason": f"{gate.metric} {change}, from {baseline:.5f} ({against}) to {new:.5f}; "
        f"a drop of up to {gate.max_drop:g} is allowed",
    }
