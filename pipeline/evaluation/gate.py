"""The quality gate: whether a model is good enough to replace the published one, and whether the hold-out can show that.

The primary rule is a test of non-inferiority: what decides is not the measured difference but how much the new model may be
worse, given how few queries were asked. The other rules are guardrails: they refuse only what is surely worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import GateConfig
from pipeline.errors import BadConfig
from pipeline.evaluation.statistics import ONE_SIDED, holm, normal_share
from pipeline.run_inputs import Published

ROUNDING = 1e-12
"""Slack of the gate's comparison: means differ by about 1e-16 for no reason, and equal models must not be refused."""

FIRST_DEVIATION = 0.3
"""Standard deviation of a query's difference in ndcg@10 where no evaluation has measured one: that between an encoder for general
texts and one that was trained for the task is 0.2 to 0.3, between two weeks' models 0.1."""

LEAST_UNITS = 100
"""A slice of fewer units is reported and not judged: the distribution of its mean is not known well enough."""

LEAST_SHARE = 0.5
"""Share of weeks in which an unchanged model must pass."""


def passing_share(queries: int, deviation: float, gate: GateConfig) -> float:
    """Return the share of weeks in which a model passes that is in truth as good as the baseline.

    Args:
        deviation: standard deviation of a query's difference.
    """
    margin = gate.max_drop * math.sqrt(queries) / max(deviation, ROUNDING)
    return normal_share(margin - ONE_SIDED if gate.undecided == "refuse" else margin + ONE_SIDED)


def needed_queries(gate: GateConfig, deviation: float = FIRST_DEVIATION) -> int:
    """Return the queries with which an unchanged model passes in LEAST_SHARE of the weeks."""
    return math.ceil((deviation * ONE_SIDED / gate.max_drop) ** 2) if gate.undecided == "refuse" else 1


def check_holdout(queries: int, gate: GateConfig, deviation: float | None = None) -> str:
    """Refuse a hold-out on which the gate would refuse good models more often than not; return in words what it can decide.

    Args:
        deviation: that of the last evaluation; None: there was none.

    Raises:
        BadConfig: too few queries, or none at all.
    """
    known = FIRST_DEVIATION if deviation is None else deviation
    share = passing_share(queries, known, gate)
    source = "which is assumed, as nothing is measured yet" if deviation is None else "as in the last evaluation"
    refuse = gate.undecided == "refuse"
    words = (
        f"{queries:,} distinct queries whose differences deviate by {known:.2f}, {source}: an unchanged model passes in "
        f"{share:.0%} of the weeks, and one that {'fell' if refuse else 'did not fall'} by more than {gate.max_drop:.2%} is "
        f"{'accepted' if refuse else 'refused'} in at most 5 %"
    )
    if queries < needed_queries(gate, known):
        raise BadConfig(
            "the hold-out is too small to judge the model",
            value=words,
            rule=f"gate.max_drop = {gate.max_drop:g}: an unchanged model passes in {LEAST_SHARE:.0%} of the weeks at least",
            remedy=f"hold out {needed_queries(gate, known):,} queries with data.holdout_fraction and more data, "
            "raise gate.max_drop, or set gate.undecided=accept, which refuses only what is surely worse",
        )
    return words


def judge_model(scores: Mapping[str, Any], gate: GateConfig, published: Published | None) -> dict[str, Any]:
    """Return the verdict, `accepted` or `refused`, with what led to it.

    Args:
        scores: `baseline`, `new`, `difference` (see stages/evaluate.compare), and the same of `slices`.
        published: the published model that is the baseline; None: the parent is.
    """
    baseline, new, difference = (scores[name][gate.metric] for name in ("baseline", "new", "difference"))
    decisive = difference["at_least" if gate.undecided == "refuse" else "at_most"]
    accepted = decisive >= -gate.max_drop - ROUNDING
    within = judge_reference(scores.get("reference"), gate)
    guardrails = judge_slices(scores.get("slices", {}), gate)
    broken = [rule for rule in guardrails if rule["verdict"] == "refused"]
    value = difference["value"]
    change = "is unchanged" if value == 0 else f"{'rose' if value > 0 else 'fell'} by {abs(value):.5f}"
    against = f"published by run {published.run}" if published else "the parent"
    least = f"with 95 % confidence the change is at {'least' if gate.undecided == 'refuse' else 'most'} {decisive:+.5f}"
    reasons = [f"{gate.metric} {change}, from {baseline:.5f} ({against}) to {new:.5f}; {least}; {-gate.max_drop:g} is allowed"]
    if within and within["verdict"] == "refused":
        reasons.append(
            f"against the reference {within['metric']} changed by {within['difference']:+.5f}, at {within['bound']} "
            f"{within['decisive']:+.5f}; {-gate.total_drop:g} is allowed in all weeks together"
        )
    reasons += [
        f"{rule['metric']} of {rule['slice']} fell by {-rule['difference']:.5f}, surely by more than {rule['allowed']:g}"
        for rule in broken
    ]
    return {
        "verdict": "accepted" if accepted and not broken and (not within or within["verdict"] == "passed") else "refused",
        "primary": "passed" if accepted else "refused",
        "metric": gate.metric,
        "published": published.run if published else None,
        "baseline": baseline,
        "new": new,
        "difference": value,
        "at_least": difference["at_least"],
        "at_most": difference["at_most"],
        "allowed": gate.max_drop,
        "undecided": gate.undecided,
        "guardrails": guardrails,
        "reference": within,
        "reason": "; ".join(reasons),
    }


def judge_reference(scores: Mapping[str, Any] | None, gate: GateConfig) -> dict[str, Any] | None:
    """Return the verdict on the sum of all weeks' drops: the primary rule, against the reference; None without one."""
    if scores is None:
        return None
    difference = scores["difference"][gate.metric_of_each]
    bound = "least" if gate.undecided == "refuse" else "most"
    decisive = difference[f"at_{bound}"]
    return {
        "metric": gate.metric_of_each,
        "verdict": "passed" if decisive >= -gate.total_drop - ROUNDING else "refused",
        "difference": difference["value"],
        "bound": bound,
        "decisive": decisive,
        "allowed": gate.total_drop,
    }


def judge_slices(slices: Mapping[str, Mapping[str, Any]], gate: GateConfig) -> list[dict[str, Any]]:
    """Return every guardrail of every slice with its verdict: `passed`, `refused`, or `too small` to be judged.

    One of them refuses a model that is no worse anywhere with a chance of 5 % at most (Holm's correction).
    """
    found = list(_rules(slices, gate))
    judged = [rule for rule in found if rule["units"] >= LEAST_UNITS]
    # The chance of such a fall, or a larger one, if the true one were just the allowed one.
    shares = [normal_share((rule["difference"] + rule["allowed"] + ROUNDING) / max(rule["error"], ROUNDING)) for rule in judged]
    for rule, worse in zip(judged, holm(shares), strict=True):
        rule["verdict"] = "refused" if worse else "passed"
    return found


def _rules(slices: Mapping[str, Mapping[str, Any]], gate: GateConfig) -> Iterator[dict[str, Any]]:
    for rule in gate.guardrails:
        for name, scores in slices.items():
            # Models of different dimensions have no cosines; a task without a classifier in the baseline has no difference.
            if rule.slice in (name, f"{name.partition(':')[0]}:*") and rule.metric in scores.get("difference", {}):
                difference = scores["difference"][rule.metric]
                yield {
                    "slice": name,
                    "metric": rule.metric,
                    "queries": scores["queries"],
                    "units": scores["units"],
                    "difference": difference["value"],
                    "error": difference["error"],
                    "at_most": difference["at_most"],
                    "allowed": rule.max_drop,
                    "verdict": "too small",
                }
