"""evaluate: the models over a real hold-out, the interval of the difference, and the gate's verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import BertTokenizerFast

from pipeline import store
from pipeline.config import GateConfig, ModelConfig
from pipeline.contract import Stage
from pipeline.dataset.arrow import PUBLISHED, SCHEMAS, read_table
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData
from pipeline.evaluation.gate import check_holdout, judge_model
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.retrieval import METRICS
from pipeline.model.encoder import new_encoder
from pipeline.model.folder import load_encoder, save_folder
from pipeline.plan import Published
from pipeline.stages import evaluate


def test_equal_models_are_accepted(plan_run: Any, cloudwatch: Any) -> None:
    run = plan_run()
    output = evaluate.run(run.context(Stage.EVALUATE))
    metrics = output.metrics
    assert metrics["gate"]["verdict"] == "accepted"
    assert metrics["queries"] == 30
    assert metrics["candidates"] == 100
    # Queries are parts of their documents: a model that told nothing apart would be near 0.01.
    assert metrics["baseline"]["recall@10"] > 0.3
    for metric in METRICS:
        assert metrics["baseline"][metric] == metrics["new"][metric]
        assert metrics["difference"][metric] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert output.inputs["model"].sha256 == run.plan.parent.sha256
    run.finish(Stage.EVALUATE, output)
    [told] = cloudwatch()
    expected = (metrics["new"]["ndcg@10"], metrics["baseline"]["ndcg@10"], 0.0)
    assert (told["Ndcg"], told["BaselineNdcg"], told["GateDrop"]) == expected
    assert "parent" not in metrics  # it is the baseline

    scorecard = store.read_json(run.paths.scorecard)
    assert scorecard["new"] == metrics["new"]
    assert set(scorecard["locales"]) == {"de", "en"}
    assert scorecard["locales"]["de"]["queries"] == 10
    assert set(scorecard["locales"]["de"]["new"]) == set(METRICS)
    values = QueryValues.read(Path(output.outputs["queries"].uri))
    assert values.means() == metrics["new"]
    assert len(set(values.queries)) == 30
    assert {locale for _, locale in values.queries} == {"de", "en", None}


def test_progress_counts_the_tokens_of_all_models(plan_run: Any, heartbeats: Any) -> None:
    run = plan_run()
    context = run.context(Stage.EVALUATE)
    found = heartbeats(context)
    evaluate.run(context)
    beats = [beat for beat in found if "encoding" in beat["note"]]
    holdout = evaluate.read_holdout(run.context(Stage.EVALUATE))
    tokens = sum(map(len, [*holdout.candidates, *holdout.queries]))
    assert {beat["total_work"] for beat in beats} == {2 * tokens}
    assert [beat["work"] for beat in beats] == sorted(beat["work"] for beat in beats)
    assert beats[-1]["work"] == pytest.approx(2 * tokens)
    parent = [beat for beat in beats if "parent" in beat["note"]]
    assert parent[-1]["work"] == pytest.approx(tokens)
    assert parent[0]["work"] / tokens > parent[0]["done"] / parent[0]["total"]


def test_worse_model_is_refused_with_exit_0(plan_run: Any) -> None:
    run = plan_run(model_seed=7, settings={"gate": {"max_drop": 0.0}})
    parent = store.read_bytes(store.join(run.plan.parent.folder, "model.safetensors"))
    new_uri = store.join(run.paths.model, "model.safetensors")
    # The parent is the better one by construction: the new model's weights are almost all zero.
    store.write_bytes(new_uri, _without_words(parent))
    output = evaluate.run(run.context(Stage.EVALUATE))
    gate = output.metrics["gate"]
    assert gate["verdict"] == "refused"
    assert gate["new"] < gate["baseline"]
    assert gate["difference"] == pytest.approx(gate["new"] - gate["baseline"])
    assert gate["metric"] == "ndcg@10"
    assert "ndcg@10 fell by" in gate["reason"]
    difference = output.metrics["difference"]["ndcg@10"]
    assert difference["low"] < difference["value"] < difference["high"] < 0
    assert json.loads(run.finish(Stage.EVALUATE, output).to_json())["status"] == "done"


def publish(run: Any, folder: str, **settings: Any) -> None:
    """Let the registry name the model in `folder` when the run was planned."""
    weights = store.sha256(store.join(folder, "model.safetensors"))
    published = Published(run="week-00", folder=folder, sha256=weights, registry_etag="1", **settings)
    run.replan(published=published)


def test_a_bad_parent_whose_training_changes_nothing_does_not_replace_a_good_model(plan_run: Any) -> None:
    run = plan_run()
    good = store.join(run.paths.bucket_root, "runs", "week-00", "model")
    store.upload_folder(Path(run.plan.parent.folder), good)
    bad = _without_words(store.read_bytes(store.join(good, "model.safetensors")))
    for folder in (run.plan.parent.folder, run.paths.model):
        store.write_bytes(store.join(folder, "model.safetensors"), bad)
    against_parent = evaluate.run(run.context(Stage.EVALUATE))
    assert against_parent.metrics["gate"]["verdict"] == "accepted"

    publish(run, good)
    output = evaluate.run(run.context(Stage.EVALUATE))
    metrics, gate = output.metrics, output.metrics["gate"]
    assert (gate["verdict"], gate["published"]) == ("refused", "week-00")
    assert "published by run week-00" in gate["reason"]
    assert metrics["parent"] == metrics["new"] == against_parent.metrics["baseline"]
    assert metrics["baseline"]["ndcg@10"] > metrics["new"]["ndcg@10"]
    assert output.inputs["published"].uri == good


@pytest.mark.parametrize("same_graphs", [True, False])
def test_a_published_model_of_another_form_is_measured_in_its_own_tokens(
    plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_graphs: bool
) -> None:
    run = plan_run()
    folder = other_form(Path(run.plan.parent.folder), tmp_path / "other")
    tokenizer = TextTokenizer(folder)
    texts = {normalized_hash(text): text for _, text in run.texts}
    queries = {normalized_hash(query): query for query in (" ".join(text.split()[:4]) for text in texts.values())}
    (Path(run.paths.rows) / PUBLISHED).mkdir()
    for name, column, length, known in (("holdout", "query", 12, queries), ("candidates", "document", 32, texts)):
        table = read_table(Path(run.paths.rows) / f"{name}.arrow")
        tokens = tokenizer.encode([known[value] for value in table[f"{column}_hash"].to_pylist()], length)
        place = table.schema.get_field_index(f"{column}_tokens")
        table = table.set_column(place, f"{column}_tokens", pa.array(tokens, pa.list_(pa.int32())))
        with pa.ipc.new_file(f"{run.paths.rows}/{PUBLISHED}/{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    publish(run, str(folder), own_tokens=True, same_graphs=same_graphs)
    opened: list[tuple[str, str]] = []
    real = evaluate.open_device
    monkeypatch.setattr(
        evaluate,
        "open_device",
        lambda kind, precision, *a, **o: (opened.append((kind, precision)), real(kind, precision, *a, **o))[1],
    )
    metrics = evaluate.run(run.context(Stage.EVALUATE)).metrics
    # It is the same model as the parent, in another form.
    assert metrics["baseline"] == pytest.approx(metrics["parent"])
    assert opened == [("cpu", "fp32")] * (1 if same_graphs else 2)


def other_form(source: Path, target: Path) -> Path:
    """A model folder that gives every text the same embedding, with the vocabulary in another order and a head."""
    encoder = load_encoder(source, ModelConfig())
    words = encoder.backbone.embeddings.word_embeddings.weight.data
    order = [*range(5), *range(len(words) - 1, 4, -1)]
    widened = new_encoder(encoder.config, ModelConfig.model_validate({"head": {"hidden": 16}}))
    widened.backbone.load_state_dict(encoder.backbone.state_dict())
    widened.backbone.embeddings.word_embeddings.weight.data = words[order]
    vocabulary = BertTokenizerFast.from_pretrained(source).convert_ids_to_tokens(order)
    tokenizer = target.with_name("vocabulary")
    tokenizer.mkdir()
    (tokenizer / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(tokenizer / "vocab.txt")).save_pretrained(tokenizer)
    save_folder(widened.eval(), target, tokenizer)
    return target


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
        check_holdout(0, GateConfig(allow_small=True))
    check_holdout(1, GateConfig(allow_small=True))
    check_holdout(2000, GateConfig())


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
    ("baseline", "new", "max_drop", "verdict"),
    [
        (0.5, 0.5, 0.0, "accepted"),
        (0.5, 0.499, 0.001, "accepted"),
        (0.3, 0.299, 0.001, "accepted"),  # 0.299 - 0.3 is a little below -0.001 in binary
        (0.5, 0.4989, 0.001, "refused"),
        (0.5, 0.4999, 0.0, "refused"),
        (0.5, 0.6, 0.0, "accepted"),
    ],
)
def test_gate(baseline: float, new: float, max_drop: float, verdict: str) -> None:
    scores = {"baseline": {"mrr@10": baseline}, "new": {"mrr@10": new}, "difference": {"mrr@10": {"value": new - baseline}}}
    gate = judge_model(scores, GateConfig(metric="mrr@10", max_drop=max_drop), None)
    assert gate["verdict"] == verdict
    assert gate["allowed"] == max_drop
