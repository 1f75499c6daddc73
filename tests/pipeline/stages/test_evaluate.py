"""evaluate: both models over a real hold-out, the interval of the difference, and the gate's verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import GateConfig
from pipeline.contract import Stage
from pipeline.data.arrow import SCHEMAS
from pipeline.data.query_values import QueryValues
from pipeline.errors import BadConfig, BadData
from pipeline.model.retrieval import METRICS
from pipeline.runtime import store
from pipeline.stages import evaluate


def test_equal_models_are_accepted(plan_run: Any, cloudwatch: Any) -> None:
    run = plan_run()
    output = evaluate.run(run.context(Stage.EVALUATE))
    metrics = output.metrics
    assert metrics["gate"]["verdict"] == "accepted"
    assert metrics["queries"] == 30
    assert metrics["candidates"] == 100
    # Queries are parts of their documents: a model that told nothing apart would be near 0.01.
    assert metrics["parent"]["recall@10"] > 0.3
    for metric in METRICS:
        assert metrics["parent"][metric] == metrics["new"][metric]
        assert metrics["difference"][metric] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert output.inputs["model"].sha256 == run.plan.parent.sha256
    run.finish(Stage.EVALUATE, output)
    [told] = cloudwatch()
    assert (told["Ndcg"], told["ParentNdcg"], told["GateDrop"]) == (metrics["new"]["ndcg@10"], metrics["parent"]["ndcg@10"], 0.0)

    scorecard = store.read_json(run.paths.scorecard)
    assert scorecard["new"] == metrics["new"]
    assert set(scorecard["locales"]) == {"de", "en"}
    assert scorecard["locales"]["de"]["queries"] == 10
    assert set(scorecard["locales"]["de"]["new"]) == set(METRICS)
    values = QueryValues.read(Path(output.outputs["queries"].uri))
    assert values.means() == metrics["new"]
    assert len(set(values.queries)) == 30
    assert {locale for _, locale in values.queries} == {"de", "en", None}


def test_worse_model_is_refused_with_exit_0(plan_run: Any) -> None:
    run = plan_run(model_seed=7, settings={"gate": {"max_drop": 0.0}})
    parent = store.read_bytes(store.join(run.plan.parent.folder, "model.safetensors"))
    new_uri = store.join(run.paths.model, "model.safetensors")
    # The parent is the better one by construction: the new model's weights are almost all zero.
    store.write_bytes(new_uri, _without_words(parent))
    output = evaluate.run(run.context(Stage.EVALUATE))
    gate = output.metrics["gate"]
    assert gate["verdict"] == "refused"
    assert gate["new"] < gate["parent"]
    assert gate["difference"] == pytest.approx(gate["new"] - gate["parent"])
    assert gate["metric"] == "ndcg@10"
    assert "ndcg@10 fell by" in gate["reason"]
    difference = output.metrics["difference"]["ndcg@10"]
    assert difference["low"] < difference["value"] < difference["high"] < 0
    assert json.loads(run.finish(Stage.EVALUATE, output).to_json())["status"] == "done"


def _without_words(weights: bytes) -> bytes:
    from safetensors.torch import load, save

    tensors = load(weights)
    words = "embeddings.word_embeddings.weight"
    tensors[words] = tensors[words][:1].expand_as(tensors[words]).clone()
    return save(tensors, metadata={"format": "pt"})


def test_not_a_number_is_bad_data(plan_run: Any) -> None:
    from safetensors.torch import load, save

    run = plan_run()
    uri = store.join(run.paths.model, "model.safetensors")
    tensors = load(store.read_bytes(uri))
    tensors["embeddings.LayerNorm.weight"].fill_(3e38)  # finite, but what is computed with it is not
    store.write_bytes(uri, save(tensors, metadata={"format": "pt"}))
    with pytest.raises(BadData, match="not finite"):
        evaluate.run(run.context(Stage.EVALUATE))


def test_small_holdout_is_refused_before_encoding(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run(settings={"gate": {"allow_small": False}})
    monkeypatch.setattr(evaluate, "encode", lambda *_: pytest.fail("encoded although the hold-out is too small"))
    with pytest.raises(BadConfig, match="too small") as refusal:
        evaluate.run(run.context(Stage.EVALUATE))
    assert "gate.allow_small" in refusal.value.remedy
    assert refusal.value.exit_code == 64


def test_no_query_at_all_is_refused_even_if_small_is_allowed() -> None:
    with pytest.raises(BadConfig):
        evaluate.check_size(0, GateConfig(allow_small=True))
    evaluate.check_size(1, GateConfig(allow_small=True))
    evaluate.check_size(2000, GateConfig())


def _tables(rows: list[tuple[int, int, float, str | None]], candidates: list[int]) -> tuple[pa.Table, pa.Table]:
    holdout = {
        "id": [str(row) for row in range(len(rows))],
        "query_tokens": [[2, query, 3] for query, *_ in rows],
        "query_hash": [query for query, *_ in rows],
        "document_hash": [document for _, document, *_ in rows],
        "label": [label for *_, label, _ in rows],
        "locale": [locale for *_, locale in rows],
    }
    documents = {"document_tokens": [[2, place, 3] for place in range(len(candidates))], "document_hash": candidates}
    return pa.table(holdout, schema=SCHEMAS["holdout.arrow"]), pa.table(documents, schema=SCHEMAS["candidates.arrow"])


def test_rows_of_one_query_are_joined() -> None:
    big = 2**64 - 1
    rows = [
        (5, big, 1.0, None),
        (6, 20, 0.0, None),
        (5, 20, 0.5, None),
        (5, 20, 2.0, None),
        (5, 20, 1.0, "de"),
        (7, 30, 1.0, "de"),
    ]
    holdout = evaluate.join_holdout(*_tables(rows, [30, 20, big]))
    assert holdout.queries == [[2, 5, 3], [2, 5, 3], [2, 7, 3]]
    assert holdout.relevant == [{2: 1.0, 1: 2.0}, {1: 1.0}, {0: 1.0}]
    assert holdout.locales == [None, "de", "de"]


def test_document_that_is_no_candidate_is_bad_data() -> None:
    with pytest.raises(BadData, match="not among the candidates"):
        evaluate.join_holdout(*_tables([(5, 20, 1.0, None)], [30]))


def test_comparison_is_paired_and_seeded() -> None:
    rng = np.random.default_rng(0)
    parent = rng.uniform(size=500)
    scores = dict.fromkeys(METRICS, parent)
    better = dict.fromkeys(METRICS, parent + 0.01)
    # The models differ by the same amount on every query, so the interval has no width, however far queries are apart.
    difference = evaluate.compare(scores, better, samples=100, seed=1)["difference"]["mrr@10"]
    assert difference["low"] == pytest.approx(0.01)
    assert difference["high"] == pytest.approx(0.01)
    noisy = {metric: rng.uniform(size=500) for metric in METRICS}
    assert evaluate.compare(scores, noisy, samples=50, seed=1) == evaluate.compare(scores, noisy, samples=50, seed=1)
    assert evaluate.compare(scores, noisy, samples=50, seed=1) != evaluate.compare(scores, noisy, samples=50, seed=2)


@pytest.mark.parametrize(
    ("parent", "new", "max_drop", "verdict"),
    [
        (0.5, 0.5, 0.0, "accepted"),
        (0.5, 0.499, 0.001, "accepted"),
        (0.3, 0.299, 0.001, "accepted"),  # 0.299 - 0.3 is a little below -0.001 in binary
        (0.5, 0.4989, 0.001, "refused"),
        (0.5, 0.4999, 0.0, "refused"),
        (0.5, 0.6, 0.0, "accepted"),
    ],
)
def test_gate(parent: float, new: float, max_drop: float, verdict: str) -> None:
    scores = {"parent": {"mrr@10": parent}, "new": {"mrr@10": new}, "difference": {"mrr@10": {"value": new - parent}}}
    gate = evaluate.judge(scores, GateConfig(metric="mrr@10", max_drop=max_drop))
    assert gate["verdict"] == verdict
    assert gate["allowed"] == max_drop
