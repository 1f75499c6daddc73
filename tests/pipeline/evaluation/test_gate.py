"""The gate: what it decides on known differences, how often it is wrong, and what it says of a hold-out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.config import GateConfig, build_config
from pipeline.errors import BadConfig
from pipeline.evaluation.gate import check_holdout, judge_model, needed_queries, passing_share
from pipeline.evaluation.retrieval_metrics import METRICS
from pipeline.evaluation.statistics import Units
from pipeline.run_inputs import Published
from pipeline.stages.evaluate import compare

PUBLISHED = Published(run="week-07", folder="f", sha256="0")


def scores(value: float, at_least: float, at_most: float, **more: Any) -> dict[str, Any]:
    change = {"value": value, "at_least": at_least, "at_most": at_most, "error": (at_most - at_least) / 3.29}
    return {"baseline": {"mrr@10": 0.5}, "new": {"mrr@10": 0.5 + value}, "difference": {"mrr@10": change}, **more}


@pytest.mark.parametrize(
    ("value", "at_least", "at_most", "refuse", "accept"),
    [
        (0.0, 0.0, 0.0, "accepted", "accepted"),
        (0.001, -0.004, 0.006, "accepted", "accepted"),
        (0.3 - 0.305, 0.3 - 0.305, 0.3 - 0.305, "accepted", "accepted"),  # a little below -0.005 in binary
        (0.001, -0.006, 0.008, "refused", "accepted"),  # as good, but who knows
        (-0.006, -0.012, 0.001, "refused", "accepted"),
        (-0.012, -0.018, -0.006, "refused", "refused"),
    ],
)
def test_what_is_undecided_is_refused_or_accepted(
    value: float, at_least: float, at_most: float, refuse: str, accept: str
) -> None:
    for undecided, verdict in (("refuse", refuse), ("accept", accept)):
        gate = GateConfig.model_validate({"metric": "mrr@10", "undecided": undecided})
        found = judge_model(scores(value, at_least, at_most), gate, PUBLISHED)
        assert (found["verdict"], found["allowed"], found["at_least"], found["at_most"]) == (verdict, 0.005, at_least, at_most)
        assert "published by run week-07" in found["reason"]
        bound = at_least if undecided == "refuse" else at_most
        assert f"the change is at {'least' if undecided == 'refuse' else 'most'} {bound:+.5f}" in found["reason"]


def sliced(**falls: tuple[float, float, int]) -> dict[str, Any]:
    """Slices by their fall, its standard error and their units."""
    found = {
        name.replace("_", ":"): {
            "queries": 2 * units,
            "units": units,
            "difference": {"ndcg@10": {"value": -fall, "error": error, "at_most": -fall + 1.645 * error}},
        }
        for name, (fall, error, units) in falls.items()
    }
    main = {"value": 0.0, "at_least": 0.0, "at_most": 0.0}
    return {"baseline": {"ndcg@10": 0.5}, "new": {"ndcg@10": 0.5}, "difference": {"ndcg@10": main}, "slices": found}


def test_a_guardrail_refuses_only_what_is_surely_worse() -> None:
    made = sliced(
        locale_de=(0.05, 0.01, 400),
        locale_fr=(0.05, 0.018, 400),
        locale_it=(0.2, 0.01, 99),
        task_qa=(-0.1, 0.01, 400),
        fresh=(0, 0, 400),
    )
    found = judge_model(made, GateConfig(), None)
    verdicts = {rule["slice"]: rule["verdict"] for rule in found["guardrails"]}
    # Alone, fr would be refused too: a fall of 0.03 more than allowed at an error of 0.018 is one in 21 by chance.
    expected = {"locale:de": "refused", "locale:fr": "passed", "locale:it": "too small", "task:qa": "passed", "fresh": "passed"}
    assert verdicts == expected
    assert found["verdict"] == "refused"
    assert "ndcg@10 of locale:de fell by 0.05000, surely by more than 0.02" in found["reason"]
    alone = judge_model(made, GateConfig.model_validate({"guardrails": [{"slice": "locale:fr"}]}), None)
    assert [(rule["slice"], rule["verdict"]) for rule in alone["guardrails"]] == [("locale:fr", "refused")]
    none = judge_model(made, GateConfig(guardrails=()), None)
    assert (none["verdict"], none["guardrails"]) == ("accepted", [])


def test_unknown_slices_and_metrics_are_refused() -> None:
    for rule in (
        {"slice": "country:de"},
        {"slice": "locale:"},
        {"slice": "fresh", "metric": "ndcg@5"},
        {"slice": "fresh", "metric": "cosine"},
        {"slice": "drift", "metric": "ndcg@10"},
        {"slice": "fresh", "max_drop": 0},
    ):
        with pytest.raises(BadConfig):
            build_config({"gate": {"guardrails": [rule]}})


WEEKS = 2000


def weeks(undecided: str, true_difference: float, seed: int) -> float:
    """Share of simulated weeks that are accepted: 400 documents, of which every third has three queries, the others one.

    Most queries rank their document as before; the others move it by some places, and queries of one document move together.
    """
    rng = np.random.default_rng(seed)
    gate = GateConfig.model_validate({"undecided": undecided, "guardrails": [], "max_drop": 0.02})
    config = build_config({"evaluate": {"bootstrap_samples": 200}})
    documents = np.repeat(np.arange(400), [3 if number % 3 == 0 else 1 for number in range(400)])
    units, every = Units.of(np.arange(len(documents)), documents.astype(np.uint64)), np.ones(len(documents), np.bool_)
    accepted = 0
    for _ in range(WEEKS):
        moved = rng.choice([-0.37, -0.13, 0, 0, 0, 0, 0, 0.13, 0.37], size=400)[documents] + rng.normal(0, 0.02, len(documents))
        baseline = np.full(len(documents), 0.5)
        new = baseline + moved + true_difference
        found = compare(dict.fromkeys(METRICS, baseline), dict.fromkeys(METRICS, new), units, every, config)
        accepted += judge_model(found, gate, None)["verdict"] == "accepted"
    return accepted / WEEKS


@pytest.mark.long
@pytest.mark.parametrize(("undecided", "seed"), [("refuse", 0), ("accept", 1)])
def test_errors_are_as_rare_as_they_are_said_to_be(undecided: str, seed: int) -> None:
    share = weeks(undecided, -0.02, seed)
    wrong = share if undecided == "refuse" else 1 - share
    assert wrong == pytest.approx(0.05, abs=3 * (0.05 * 0.95 / WEEKS) ** 0.5)


@pytest.mark.parametrize(
    ("at_least", "at_most", "refuse", "accept"),
    [(-0.009, 0.0, "accepted", "accepted"), (-0.02, -0.005, "refused", "accepted"), (-0.03, -0.011, "refused", "refused")],
)
def test_a_drop_against_the_reference(at_least: float, at_most: float, refuse: str, accept: str) -> None:
    change = {"value": (at_least + at_most) / 2, "at_least": at_least, "at_most": at_most, "error": 0.001}
    made = scores(0.0, -0.001, 0.001, reference={"difference": {"mrr@10": change}})
    for undecided, verdict in (("refuse", refuse), ("accept", accept)):
        found = judge_model(made, GateConfig.model_validate({"metric": "mrr@10", "undecided": undecided}), PUBLISHED)
        assert found["verdict"] == verdict
        assert ("-0.01 is allowed in all weeks together" in found["reason"]) == (verdict == "refused")


def test_macro_f1_decides_and_accuracy_has_the_budget() -> None:
    """Macro F1 has no values of single texts, so what is kept of the reference is accuracy."""
    gate = GateConfig.model_validate({"metric": "macro-f1"})
    same, fell = ({"value": value, "at_least": value, "at_most": value} for value in (0.0, -0.2))
    for macro, kept, verdict in ((same, same, "accepted"), (fell, same, "refused"), (same, fell, "refused")):
        values = {"accuracy": 0.9, "macro-f1": 0.5}
        made = {"baseline": values, "new": values, "difference": {"accuracy": same, "macro-f1": macro}}
        found = judge_model({**made, "reference": {"difference": {"accuracy": kept}}}, gate, PUBLISHED)
        assert (found["verdict"], found["metric"], found["reference"]["metric"]) == (verdict, "macro-f1", "accuracy")
        assert ("against the reference accuracy changed by -0.20000" in found["reason"]) == (kept is fell)


def test_fifty_two_weeks_of_a_tenth_of_a_percent_are_stopped() -> None:
    rng, queries = np.random.default_rng(2), 6000
    units, every, config = (
        Units.single(queries),
        np.ones(queries, np.bool_),
        build_config({"evaluate": {"bootstrap_samples": 200}}),
    )

    def against(values: Any, baseline: Any) -> dict[str, Any]:
        return compare(dict.fromkeys(METRICS, baseline), dict.fromkeys(METRICS, values), units, every, config)

    reference = published = rng.uniform(size=queries)
    drops = []
    for _ in range(52):
        # Most queries stay as they are.
        new = published - 0.001 + rng.normal(0, 0.08, queries) * (rng.uniform(size=queries) < 0.3)
        found = {**against(new, published), "reference": against(new, reference)}
        gate = GateConfig(guardrails=())
        assert judge_model({**found, "reference": None}, gate, PUBLISHED)["verdict"] == "accepted"  # each week on its own
        if judge_model(found, gate, PUBLISHED)["verdict"] == "accepted":
            published = new
            drops.append(float((new - reference).mean()))
    assert 3 <= len(drops) <= 12
    assert min(drops) > -0.01


def test_the_power_is_said_in_words_and_too_little_is_refused() -> None:
    gate = GateConfig(max_drop=0.01)
    assert needed_queries(gate) == 2435
    assert passing_share(2435, 0.3, gate) == pytest.approx(0.5, abs=1e-3)
    words = check_holdout(9740, gate)
    assert words.startswith(
        "9,740 distinct queries whose differences deviate by 0.30, which is assumed, as nothing is measured yet: "
    )
    assert "an unchanged model passes in 95% of the weeks, and one that fell by more than 1.00% is accepted in at most" in words
    # What is measured counts.
    assert "as in the last evaluation: an unchanged model passes in 100% of the weeks" in check_holdout(2000, gate, 0.1)
    with pytest.raises(BadConfig, match="too small") as refusal:
        check_holdout(2000, gate)
    assert "hold out 2,435 queries" in refusal.value.remedy
    assert refusal.value.exit_code == 64
    lenient = GateConfig(undecided="accept")
    assert "one that did not fall by more than 0.50% is refused in at most 5 %" in check_holdout(1, lenient)
    with pytest.raises(BadConfig):
        check_holdout(0, lenient)
