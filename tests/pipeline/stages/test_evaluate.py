"""evaluate: the models over a real hold-out, the interval of the difference, and the gate's verdict."""

from __future__ import annotations

import io
import json
import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import BertTokenizerFast

from pipeline import store
from pipeline.config import ModelConfig, build_config
from pipeline.contract import Artifact, Stage, StageResult
from pipeline.dataset.row_files import HOLDOUT_FILES, KNOWN, PUBLISHED, SCHEMAS, read_table
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData
from pipeline.evaluation.drift import overlaps
from pipeline.evaluation.holdout import read_holdout
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.reference import copy_reference
from pipeline.evaluation.retrieval import retrieve
from pipeline.evaluation.retrieval_metrics import METRICS
from pipeline.evaluation.statistics import Units
from pipeline.evaluation.vectors import KEY_BYTES
from pipeline.graphs.compiled import GraphSet, write_set
from pipeline.graphs.fingerprint import set_uri
from pipeline.host.host import versions
from pipeline.model.encoder import new_encoder
from pipeline.model.folder import load_encoder, save_folder
from pipeline.model.inference import pad
from pipeline.run.context import StageOutput
from pipeline.run_inputs import GraphsPlan, PlannedWorld, Published
from pipeline.stages import evaluate
from tests.tiny import make_model

GOLDEN_SET = {"name": "shop", "queries": "s3://b/queries.jsonl", "qrels": "s3://b/test.tsv", "corpus": "s3://b/corpus.jsonl"}


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
        assert set(metrics["difference"][metric].values()) == {0.0}
    assert output.inputs["model"].sha256 == run.plan.parent.sha256
    run.finish(Stage.EVALUATE, output)
    [told] = cloudwatch()
    expected = (metrics["new"]["ndcg@10"], metrics["baseline"]["ndcg@10"], 0.0)
    assert (told["Quality"], told["BaselineQuality"], told["GateDrop"]) == expected
    assert "parent" not in metrics  # it is the baseline

    scorecard = store.read_json(run.paths.scorecard)
    assert scorecard["new"] == metrics["new"]
    slices = scorecard["slices"]
    assert {name: (found["queries"], found["units"]) for name, found in slices.items()} == {
        "locale:de": (10, 10),
        "locale:en": (10, 10),
        "task:search": (15, 15),
        "fresh": (12, 12),
    }
    assert set(slices["locale:de"]["new"]) == set(METRICS)
    assert 0 < slices["fresh"]["new"]["ndcg@10"] != scorecard["new"]["ndcg@10"]
    assert {rule["slice"]: rule["verdict"] for rule in metrics["gate"]["guardrails"]} == dict.fromkeys(slices, "too small")
    values = QueryValues.read(Path(output.outputs["queries"].uri))
    assert values.means() == metrics["new"]
    assert len(set(values.queries)) == 30
    assert {locale for _, locale in values.queries} == {"de", "en", None}


def in_size(run: Any, folder: str, size: int) -> dict[str, float]:
    """Every metric's mean with the first so many numbers of a model's embeddings."""
    holdout = read_holdout(Path(run.paths.rows))
    encoder = load_encoder(Path(folder), ModelConfig())
    with torch.no_grad():
        queries, candidates = (
            torch.nn.functional.normalize(encoder(*pad(texts, len(texts), 32))[:, :size], dim=1)
            for texts in (holdout.queries, holdout.candidates)
        )
    values = retrieve(queries, [(np.arange(len(candidates)), candidates)], holdout.relevant, holdout.known)
    return {metric: float(found.mean()) for metric, found in values.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_size_is_measured_and_the_published_one_judged(plan_run: Any, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    run = plan_run(model_seed=3, settings={"train": {"dimensions": [24, 6]}, "embed": {"dimensions": 12, "dtype": "float16"}})
    counts: list[int] = []
    real = evaluate.encode
    monkeypatch.setattr(evaluate, "encode", lambda *a, **o: (counts.append(len(a[2])), real(*a, **o))[1])
    output, *_ = side_by_side(run, ranks)
    assert output is not None
    assert sum(counts) == 2 * 130  # every text once with each model
    scorecard = store.read_json(run.paths.scorecard)
    sizes = scorecard["sizes"]
    facts = [(found["size"], found["bytes"], found["published"]) for found in sizes]
    assert facts == [(32, 64, False), (24, 48, False), (12, 24, True), (6, 12, False)]
    for found in sizes:
        expected = in_size(run, run.paths.model, found["size"])
        assert {metric: found[metric] for metric in METRICS} == pytest.approx(expected, abs=1e-4), found["size"]
    assert len({found["ndcg@10"] for found in sizes}) == len(sizes)
    assert scorecard["new"] == {metric: sizes[2][metric] for metric in METRICS}
    assert scorecard["gate"]["new"] == sizes[2]["ndcg@10"]
    # Nobody reads the parent's embeddings: they are cut alike.
    assert scorecard["baseline"] == pytest.approx(in_size(run, run.plan.parent.folder, 12), abs=1e-4)
    assert np.load(run.paths.vectors)["vector"].shape == (130, 12)


@pytest.mark.parametrize("before", [None, 12])
def test_the_published_model_is_measured_in_its_own_size(plan_run: Any, before: int | None) -> None:
    earlier = plan_run(run="week-00", model_seed=3, settings={"embed": {"dimensions": before}})
    run = plan_run(model_seed=3, settings={"embed": {"dimensions": 6}})
    continue_from(run, earlier)
    earlier.finish(Stage.EVALUATE, evaluate.run(earlier.context(Stage.EVALUATE)))
    rewrite(earlier)
    metrics = evaluate.run(run.context(Stage.EVALUATE)).metrics
    assert metrics["reused"] == 130
    assert metrics["baseline"] == pytest.approx(in_size(run, earlier.paths.model, before or 32), abs=1e-4)
    assert metrics["new"] == pytest.approx(in_size(run, run.paths.model, 6), abs=1e-4)
    assert "cosine" not in metrics["drift"], "their sizes differ"


def test_one_size_is_measured_once(plan_run: Any) -> None:
    run = plan_run()
    evaluate.run(run.context(Stage.EVALUATE))
    [only] = store.read_json(run.paths.scorecard)["sizes"]
    assert (only["size"], only["bytes"], only["published"]) == (32, 128, True)


def test_progress_counts_the_tokens_of_all_models(plan_run: Any, heartbeats: Any) -> None:
    run = plan_run()
    context = run.context(Stage.EVALUATE)
    found = heartbeats(context)
    evaluate.run(context)
    beats = [beat for beat in found if "encoding" in beat["note"]]
    holdout = read_holdout(Path(run.paths.rows))
    tokens = sum(map(len, [*holdout.candidates, *holdout.queries]))
    assert {beat["total_work"] for beat in beats} == {2 * tokens}
    assert [beat["work"] for beat in beats] == sorted(beat["work"] for beat in beats)
    assert beats[-1]["work"] == pytest.approx(2 * tokens)
    first = [beat for beat in beats if "new" in beat["note"]]
    assert first[-1]["work"] == pytest.approx(tokens)
    assert first[0]["work"] / tokens > first[0]["done"] / first[0]["total"]


def test_worse_model_is_refused_with_exit_0(plan_run: Any) -> None:
    run = plan_run(model_seed=7, settings={"gate": {"max_drop": 0.001}})
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
    published = Published(run="week-00", folder=folder, sha256=weights, **settings)
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
        table = table.set_column(place, f"{column}_tokens", pa.array(tokens, table.schema.field(place).type))
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


@pytest.mark.parametrize("compiles", [False, True])
def test_a_parent_without_the_runs_head_is_measured_without_it(
    plan_run: Any, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    before = plan_run(run="week-00")
    expected = evaluate.run(before.context(Stage.EVALUATE)).metrics["new"]
    run = plan_run(head=[{"out": 48, "activation": "relu"}, {"out": 40}], settings={"embed": {"dimensions": 36}})
    continue_from(run, before)
    if compiles:
        for kind, name in (("train", "t"), ("infer", "i")):
            write_set(set_uri(run.paths.bucket_root, kind, name), GraphSet(fingerprint=name, run=run.plan.run, graphs={}))
        run.replan(graphs=GraphsPlan(train="t", infer="i"))
    opened: list[str] = []
    real = evaluate.open_device
    monkeypatch.setattr(evaluate, "open_device", lambda kind, *a, **o: (opened.append(kind), real(kind, *a, **o))[1])
    metrics = evaluate.run(run.context(Stage.EVALUATE)).metrics
    # A head of random layers would be an easy baseline.
    assert metrics["baseline"] == pytest.approx(expected)
    assert [found["size"] for found in store.read_json(run.paths.scorecard)["sizes"]] == [40, 36]
    # The run's graphs have a head.
    assert opened == ["cpu"] * (2 if compiles else 1)
    # With the run's head, the published model must not embed.
    assert metrics["refresh"] is False


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


def side_by_side(run: Any, ranks: int) -> list[StageOutput | None]:
    """Run the stage's ranks in threads over one scratch folder."""
    contexts = [run.context(Stage.EVALUATE) for _ in range(ranks)]
    for rank, context in enumerate(contexts):
        context.world = replace(context.world, rank=rank, size=ranks, local_rank=rank, local_size=ranks)
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(evaluate.run, contexts, timeout=60))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_find_what_one_finds(plan_run: Any, supervise: Any, ranks: int) -> None:
    run = plan_run(settings={"embed": {"ranks_per_child": ranks}})
    alone = evaluate.run(run.context(Stage.EVALUATE))
    expected = QueryValues.read(Path(alone.outputs["queries"].uri))
    node = supervise(Stage.EVALUATE, run.paths.root)
    assert node.wait() == 0
    assert node.log.count("is process") == ranks
    metrics = StageResult.from_json(store.read_bytes(run.paths.result(Stage.EVALUATE))).metrics
    found = QueryValues.read(Path(run.paths.query_values))
    assert found.queries == expected.queries
    for metric, values in expected.values.items():
        assert found.values[metric].tolist() == pytest.approx(values.tolist())
    assert metrics["new"] == pytest.approx(alone.metrics["new"])
    assert (metrics["queries"], metrics["candidates"], metrics["gate"]["verdict"]) == (30, 100, "accepted")


def test_ranks_share_the_texts_and_the_leader_judges(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run()
    encoded: list[list[bytes]] = []
    real = evaluate.encode

    def encode(encoder: Any, device: Any, texts: Any, *arguments: Any, **options: Any) -> Any:
        encoded.append([np.asarray(text, np.int64).tobytes() for text in texts])
        return real(encoder, device, texts, *arguments, **options)

    monkeypatch.setattr(evaluate, "encode", encode)
    leader, *others = side_by_side(run, 3)
    assert leader is not None
    assert others == [None, None]
    holdout = read_holdout(Path(run.paths.rows))
    every = [np.asarray(text, np.int64).tobytes() for text in [*holdout.candidates, *holdout.queries]]
    # With the parent and with the new model.
    assert sorted(text for texts in encoded for text in texts) == sorted([*every, *every])
    assert {len(texts) for texts in encoded} == {43, 44}
    # As many of the long ones, too.
    assert max(sum(map(len, texts)) for texts in encoded) < 1.25 * min(sum(map(len, texts)) for texts in encoded)


def continue_from(run: Any, before: Any) -> None:
    """Let a run continue the model of another one, which the registry named when it was planned."""
    folder = before.paths.model
    weights = store.sha256(store.join(folder, "model.safetensors"))
    run.replan(
        parent=run.plan.parent.model_copy(update={"uri": folder, "folder": folder, "sha256": weights, "run": "week-00"}),
        published=Published(run="week-00", folder=folder, sha256=weights),
    )


@pytest.fixture
def weeks(plan_run: Any) -> tuple[Any, Any]:
    """A run that was evaluated and published, and the run that continues its model."""
    before, run = plan_run(run="week-00", model_seed=3), plan_run(model_seed=3)
    continue_from(run, before)
    before.finish(Stage.EVALUATE, evaluate.run(before.context(Stage.EVALUATE)))
    return before, run


def rewrite(run: Any, **changed: Any) -> None:
    """Change evaluate's result; `versions` are those of this process otherwise, which a test's result lacks."""
    result = StageResult.from_json(store.read_bytes(run.paths.result(Stage.EVALUATE)))
    store.write_bytes(run.paths.result(Stage.EVALUATE), replace(result, **{"versions": versions(), **changed}).to_json())


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_published_models_vectors_are_not_computed_again(
    plan_run: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, ranks: int
) -> None:
    root = request.getfixturevalue("s3_root") if where == "s3" else None
    before, run = plan_run(root, run="week-00"), plan_run(root)
    continue_from(run, before)
    computed = evaluate.run(run.context(Stage.EVALUATE)).metrics
    first, *_ = side_by_side(before, ranks)
    assert first is not None
    before.finish(Stage.EVALUATE, first)
    rewrite(before)
    # Since then two texts have changed.
    kept = store.read_bytes(before.paths.vectors)
    records = np.load(io.BytesIO(kept)).copy()
    assert len(records) == 130
    assert np.linalg.norm(records["vector"], axis=1) == pytest.approx(np.ones(130), abs=1e-5)
    records["key"][[0, 120]] = b"unknown".ljust(KEY_BYTES)
    with tempfile.TemporaryFile() as stream:
        np.save(stream, records)
        stream.seek(0)
        store.write_bytes(before.paths.vectors, stream.read())
    counts: list[int] = []
    real = evaluate.encode
    monkeypatch.setattr(evaluate, "encode", lambda *a, **o: (counts.append(len(a[2])), real(*a, **o))[1])
    output, *_ = side_by_side(run, ranks)
    assert output is not None
    assert (computed["reused"], output.metrics["reused"]) == (0, 128)
    # What is missing; then everything with the new model.
    assert (sum(counts), len(counts)) == (2 + 130, 2 * ranks)
    for name in ("baseline", "new"):
        assert output.metrics[name] == pytest.approx(computed[name], abs=1e-4)
    assert output.metrics["gate"]["verdict"] == "accepted"


def test_reused_vectors_are_those_that_were_kept(weeks: tuple[Any, Any]) -> None:
    before, run = weeks
    rewrite(before)
    good = evaluate.run(run.context(Stage.EVALUATE)).metrics
    records = np.load(before.paths.vectors, mmap_mode="r+")
    records["vector"][:100] *= -1
    records.flush()
    bad = evaluate.run(run.context(Stage.EVALUATE)).metrics
    assert good["reused"] == bad["reused"] == 130
    assert bad["baseline"]["ndcg@10"] < good["baseline"]["ndcg@10"] / 3
    assert bad["new"] == good["new"]


@pytest.mark.parametrize(
    ("changed", "replanned", "reason"),
    [
        ({"inputs": {"model": Artifact("", "0" * 64)}}, {}, "different weights"),
        ({"versions": {"torch": "2.8.0"}}, {}, "different packages"),
        ({}, {"world": PlannedWorld(kind="cpu", precision="bf16", nodes=1, ranks_per_node=1)}, "different device"),
        ({}, {"world": PlannedWorld(kind="neuron", precision="fp32", nodes=1, ranks_per_node=1)}, "different device"),
        ({}, {"config": {"length": 16}}, "different lengths"),
        ({}, {"graphs": GraphsPlan(train="a", infer="b")}, "different compiled forms"),
    ],
)
def test_vectors_of_another_form_are_not_reused(
    weeks: tuple[Any, Any], caplog: pytest.LogCaptureFixture, changed: Any, replanned: Any, reason: str
) -> None:
    before, run = weeks
    rewrite(before, **changed)
    if embed := replanned.get("config"):
        config = before.plan.config
        replanned = {"config": config.model_copy(update={"embed": config.embed.model_copy(update=embed)})}
    before.replan(**replanned)
    caplog.set_level(logging.INFO)
    assert evaluate.run(run.context(Stage.EVALUATE)).metrics["reused"] == 0
    assert f"no vectors of the published model are reused: {reason}" in caplog.text


@pytest.mark.parametrize("damage", ["plan", "result", "missing", "empty", "cut", "other columns"])
def test_vectors_that_cannot_serve_are_no_failure(weeks: tuple[Any, Any], damage: str) -> None:
    before, run = weeks
    rewrite(before)
    vectors = Path(before.paths.vectors)
    if damage == "plan":
        store.write_bytes(before.paths.plan, b'{"run": "of another version"}')
    elif damage == "result":
        rewrite(before, inputs={})
    elif damage == "missing":
        vectors.unlink()
    elif damage == "other columns":
        np.save(vectors, np.zeros(3))
    else:
        vectors.write_bytes(vectors.read_bytes()[: 1000 if damage == "cut" else 0])
    assert evaluate.run(run.context(Stage.EVALUATE)).metrics["reused"] == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_drift_is_that_between_the_published_vectors_and_the_new_ones(plan_run: Any, cloudwatch: Any, ranks: int) -> None:
    """As whoever holds the vectors finds it; a guardrail on it can refuse, and so can one on mixed generations."""
    rules = [{"slice": "drift", "metric": "cosine", "max_drop": 0.2}, {"slice": "mixed", "max_drop": 1.0}]
    before, run = (
        plan_run(run=name, model_seed=seed, settings={"gate": {"max_drop": 1.0, "guardrails": rules}})
        for name, seed in (("week-00", 3), ("week-01", 4))
    )
    continue_from(run, before)
    before.finish(Stage.EVALUATE, evaluate.run(before.context(Stage.EVALUATE)))
    assert store.read_json(before.paths.scorecard)["drift"] is None  # nothing was published before
    output = side_by_side(run, ranks)[0]
    drift = store.read_json(run.paths.scorecard)["drift"]
    assert drift == output.metrics["drift"]
    told = cloudwatch()[-1]
    assert (told["Cosine"], told["NeighbourOverlap"]) == (drift["cosine"], drift["overlap@10"])
    holdout = read_holdout(Path(run.paths.rows))
    old, new = (vectors_of(run, Path(paths.model), holdout.candidates) for paths in (before.paths, run.paths))
    cosines = torch.nn.functional.cosine_similarity(old, new).numpy()
    assert drift["documents"] == len(holdout.candidates) == 100
    assert (drift["cosine"], drift["cosine_p1"]) == pytest.approx((cosines.mean(), np.quantile(cosines, 0.01)), abs=1e-5)
    assert drift["overlap@10"] == pytest.approx(overlaps(old, new).mean(), abs=0.005)
    mixed = retrieve(vectors_of(run, Path(run.paths.model), holdout.queries), [(np.arange(100), old)], holdout.relevant)
    expected = mixed["ndcg@10"].mean() - output.metrics["baseline"]["ndcg@10"]
    assert drift["new_on_old"] == pytest.approx(expected, abs=1e-3)
    gate = output.metrics["gate"]
    verdicts = {rule["slice"]: (rule["metric"], rule["verdict"]) for rule in gate["guardrails"]}
    assert verdicts == {"drift": ("cosine", "refused"), "mixed": ("ndcg@10", "too small")}
    assert (gate["verdict"], "cosine of drift fell by" in gate["reason"]) == ("refused", True)


def test_models_of_equal_quality_differ_by_less_than_their_interval(plan_run: Any, tmp_path: Path) -> None:
    """Random weights of two seeds are equally good: no model chooses what it is examined with."""
    run = plan_run()
    holdout = read_holdout(Path(run.paths.rows))
    measured = []
    for seed in range(12):
        make_model(tmp_path / f"seed-{seed}", seed=100 + seed)
        candidates, queries = (vectors_of(run, tmp_path / f"seed-{seed}", one) for one in (holdout.candidates, holdout.queries))
        measured.append(retrieve(queries, [(np.arange(len(candidates)), candidates)], holdout.relevant))
    every = np.ones(len(holdout.queries), np.bool_)
    found = [
        evaluate.compare(one, other, holdout.units, every, run.plan.config)["difference"]["ndcg@10"]
        for one, other in zip(measured[::2], measured[1::2], strict=True)
    ]
    assert all(one["value"] != 0 for one in found)
    assert sum(one["low"] <= 0 <= one["high"] for one in found) >= 5  # of 6, each with a chance of 95 %


def vectors_of(run: Any, folder: Path, texts: Any) -> torch.Tensor:
    """Vectors of texts, (texts, D), computed one by one."""
    encoder = load_encoder(folder, run.plan.config.model).eval()
    with torch.no_grad():
        rows = [encoder(torch.tensor([text.tolist()]), torch.ones(1, len(text), dtype=torch.int64))[0] for text in texts]
    return torch.stack(rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_golden_sets_are_slices_of_their_own(plan_run: Any, ranks: int) -> None:
    run = plan_run(model_seed=3, settings={"evaluate": {"sets": [GOLDEN_SET]}})
    for name in (*HOLDOUT_FILES, KNOWN):
        store.write_bytes(store.join(run.paths.rows, "golden", "shop", name), store.read_bytes(store.join(run.paths.rows, name)))
    output = side_by_side(run, ranks)[0]
    found = store.read_json(run.paths.scorecard)["slices"]["golden:shop"]
    assert found["queries"] == output.metrics["queries"] == 30
    for model in ("baseline", "new"):
        assert found[model] == pytest.approx(output.metrics[model], abs=1e-6)
    assert found["difference"]["ndcg@10"]["value"] != 0
    [rule] = [rule for rule in output.metrics["gate"]["guardrails"] if rule["slice"] == "golden:shop"]
    assert rule["difference"] == found["difference"]["ndcg@10"]["value"]


def test_comparison_is_paired_and_seeded() -> None:
    rng = np.random.default_rng(0)
    parent = rng.uniform(size=500)
    units, every = Units.single(500), np.ones(500, np.bool_)

    def compare(other: Any, samples: int = 50, seed: int = 1, chosen: Any = every) -> Any:
        config = build_config({"evaluate": {"bootstrap_samples": samples}, "seed": seed})
        models = (dict.fromkeys(METRICS, parent), dict.fromkeys(METRICS, other))
        return evaluate.compare(*models, units, chosen, config)["difference"]["mrr@10"]

    # The models differ by the same amount on every query, so the interval has no width, however far queries are apart.
    same = compare(parent + 0.01, 100)
    assert [same[name] for name in ("value", "low", "high", "at_least", "at_most")] == pytest.approx([0.01] * 5)
    assert same["error"] == pytest.approx(0)
    noisy = rng.uniform(size=500)
    assert compare(noisy) == compare(noisy) != compare(noisy, seed=2)
    wide = compare(noisy, 2000)
    assert wide["low"] < wide["at_least"] < wide["value"] < wide["at_most"] < wide["high"]
    assert wide["value"] - wide["at_least"] == pytest.approx(1.645 * wide["error"], rel=0.1)
    some = compare(noisy, chosen=np.arange(500) < 100)
    assert some["value"] == pytest.approx((noisy - parent)[:100].mean())


def test_known_positives_are_not_wrong(plan_run: Any) -> None:
    run = plan_run()
    before = evaluate.run(run.context(Stage.EVALUATE)).metrics["new"]
    holdout = read_table(Path(run.paths.rows) / "holdout.arrow")
    candidates = read_table(Path(run.paths.rows) / "candidates.arrow")
    queries = holdout.select(["query_hash", "locale"]).to_pylist()
    pairs = [{**query, "document_hash": one} for query in queries for one in candidates["document_hash"].to_pylist()[30:]]
    with pa.ipc.new_file(f"{run.paths.rows}/{KNOWN}", SCHEMAS[KNOWN]) as writer:
        writer.write_table(pa.Table.from_pylist(pairs, SCHEMAS[KNOWN]))
    after = evaluate.run(run.context(Stage.EVALUATE)).metrics["new"]
    # Only documents of other held-out queries are left to be wrong.
    assert after["ndcg@10"] > before["ndcg@10"]


@pytest.fixture
def examined(plan_run: Any) -> Any:
    """A run whose reference is a run with the same hold-out, of which a part is left."""
    before, run = plan_run(run="week-00"), plan_run()
    before.finish(Stage.EVALUATE, evaluate.run(before.context(Stage.EVALUATE)))
    rows, cache = Path(run.paths.rows), run.scratch / "reference"
    kept = copy_reference(before.paths, rows, lambda table: table["document_hash"].to_numpy() % 3 == 0, cache, classified=False)
    assert 0 < kept["reference/holdout.arrow"] < 30
    run.replan(reference="week-00")
    return run


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_new_model_is_compared_with_the_reference(examined: Any, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    counts: list[int] = []
    real = evaluate.encode
    monkeypatch.setattr(evaluate, "encode", lambda *a, **o: (counts.append(len(a[2])), real(*a, **o))[1])
    output, *_ = side_by_side(examined, ranks)
    assert output is not None
    # Every text of the reference is in this hold-out, too.
    assert (sum(counts), len(counts)) == (2 * 130, 3 * ranks)
    scorecard = store.read_json(examined.paths.scorecard)
    found = scorecard["reference"]
    exam = read_holdout(Path(examined.paths.rows) / "reference")
    assert 0 < found["queries"] == len(exam.queries) < 30
    # The same model, and fewer documents to be wrong.
    assert found["difference"]["ndcg@10"]["value"] >= 0
    assert scorecard["gate"]["reference"]["verdict"] == output.metrics["gate"]["reference"]["verdict"] == "passed"


def test_a_model_that_fell_behind_the_reference_is_refused(examined: Any) -> None:
    weights = store.join(examined.plan.parent.folder, "model.safetensors")
    bad = _without_words(store.read_bytes(weights))
    for folder in (examined.plan.parent.folder, examined.paths.model):
        store.write_bytes(store.join(folder, "model.safetensors"), bad)
    gate = evaluate.run(examined.context(Stage.EVALUATE)).metrics["gate"]
    # As good as its parent.
    assert (gate["difference"], gate["verdict"], gate["reference"]["verdict"]) == (0, "refused", "refused")
    assert "against the reference ndcg@10 changed by -" in gate["reason"]
