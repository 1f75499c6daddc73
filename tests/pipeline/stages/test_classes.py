"""Tasks whose rows are classified, from the shard to the report: rows, batches, training, evaluation, the model folder."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from pipeline import store
from pipeline.contract import Stage
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData
from pipeline.evaluation.reference import write_reference
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
from pipeline.stages import evaluate, plan_rows
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpoint import MANIFEST_FILE
from tests.gangs import on_xla
from tests.pipeline.stages.planning import Bench, refusal, rows
from tests.pipeline.training.xla_scenarios import SCENARIO

COLORS = {
    "warm": ["red", "orange", "amber", "rust"],
    "cold": ["blue", "teal", "navy", "cyan"],
    "Grey": ["ash", "slate", "lead", "fog"],
}
SETTINGS: dict[str, Any] = {
    "nodes": 1,
    "device": {"ranks_per_node": 1},
    "data": {"holdout_by": "query"},
    "train": {
        "tasks": {"color": {"classes": [*COLORS]}},
        "batch_by": "task",
        "batch_size": 8,
        "steps": 60,
        "learning_rate": 5e-3,
        "validate_every": 60,
        "checkpoint_every": 30,
    },
}


def classified(count: int, seed: int = 0, task: str = "color") -> list[dict[str, Any]]:
    """Texts of two words of one class."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        name = draw.choice([*COLORS])
        text = f"{draw.choice(COLORS[name])} {draw.choice(COLORS[name])} {number}"
        # Case and white space are no difference, as in the hashes of all texts.
        found.append({"id": f"{task}{seed}-{number}", "query": text, "document": f" {name.upper()} ", "task": task})
    return found


@pytest.fixture
def shop(bench: Bench) -> Bench:
    for section, values in SETTINGS.items():
        bench.config[section] = bench.config.get(section, {}) | values if isinstance(values, dict) else values
    bench.shard("pairs.jsonl", rows(0, 150, task="search"))
    bench.shard("colors.jsonl", classified(240))
    bench.config["data"]["corpus"] = [bench.shard("corpus.jsonl", rows_of_corpus(), folder="corpus")]
    return bench


def rows_of_corpus() -> list[dict[str, Any]]:
    return [{"id": f"d{number}", "text": f"document {number}"} for number in range(20)]


def test_classes_are_learned_judged_saved_and_continued(shop: Bench) -> None:
    shop.start("first")
    plan = shop.plan("first")
    trained = shop.rows("first")
    assert {row["class"] for row in trained if row["task"] == "color"} == {0, 1, 2}
    assert all(not row["document_tokens"] for row in trained if row["task"] == "color")
    assert all(row["class"] == -1 and row["document_tokens"] for row in trained if row["task"] == "search")
    held = shop.rows("first", "classes.arrow")
    assert len(held) > 20
    assert {row["task"] for row in held} == {"color"}
    # No class is a document, and no classified text a query.
    assert {row["task"] for row in shop.rows("first", "holdout.arrow")} == {"search"}
    assert plan.train.strata.keys() == {"color", "search"}

    output = shop.stage(Stage.TRAIN, "first")
    assert output is not None
    shop.stage(Stage.EVALUATE, "first")
    found = store.read_json(shop.paths("first").scorecard)["slices"]["task:color"]
    assert found["queries"] == len(held)
    # The parent knows no classes. A guess would be right in a third of the rows.
    assert found.keys() == {"queries", "units", "new"}
    assert found["new"]["accuracy"] > 0.8
    assert found["new"]["macro-f1"] > 0.8

    folder = Path(shop.paths("first").model)
    texts = [row["query"] for row in classified(40, seed=1)]
    right = [text.split()[0] in COLORS[name] for text, name in zip(texts, their_classes(folder, texts), strict=True)]
    assert sum(right) > 0.8 * len(right)

    classes = embedded(shop, "first")
    assert {name for name, _ in classes} <= set(COLORS)
    assert all(1 / 3 <= probability <= 1 for _, probability in classes)
    documents = [row["text"] for row in rows_of_corpus()]
    assert [name for name, _ in classes] == their_classes(folder, documents)

    # Next week: another order of the classes, and one more.
    shop.train("first")
    shop.publish("first", str(folder))
    shop.config["model"] = {}
    shop.config["train"]["tasks"] = {"color": {"classes": ["Grey", "bright", "warm", "cold"]}}
    # Hardly a change: what the classes are after it, they were before.
    shop.config["train"] |= {"steps": 2, "learning_rate": 1e-6}
    shop.config["gate"]["guardrails"] = [{"slice": "task:*", "metric": name} for name in ("accuracy", "macro-f1")]
    shop.shard("more.jsonl", [*rows(150, 200, task="search"), *classified(60, seed=2)])
    shop.start("second")
    shop.stage(Stage.TRAIN, "second")
    shop.stage(Stage.EVALUATE, "second")
    slices = store.read_json(shop.paths("second").scorecard)["slices"]
    assert slices["task:color"]["baseline"]["accuracy"] > 0.8
    assert slices["task:color"]["new"]["accuracy"] == pytest.approx(slices["task:color"]["baseline"]["accuracy"], abs=0.05)
    changes = slices["task:color"]["difference"]
    assert set(changes) == {"accuracy", "macro-f1"}
    values = [slices["task:color"][model]["macro-f1"] for model in ("new", "baseline")]
    assert changes["macro-f1"]["value"] == pytest.approx(values[0] - values[1], abs=1e-12)
    assert changes["macro-f1"]["low"] <= changes["macro-f1"]["value"] <= changes["macro-f1"]["high"]
    gate = store.read_json(shop.paths("second").scorecard)["gate"]
    judged = {(rule["slice"], rule["metric"]) for rule in gate["guardrails"]}
    assert judged == {("task:color", "accuracy"), ("task:color", "macro-f1")}
    home = Path(shop.paths("second").model) / "classifiers" / "color"
    assert json.loads((home / "classes.json").read_text()) == ["Grey", "bright", "warm", "cold"]
    assert load_file(home / "model.safetensors")["linear.weight"].shape == (4, 32)


@pytest.fixture
def labels(bench: Bench) -> Bench:
    """A model that classifies reviews: no row searches anything."""
    for section, values in {**SETTINGS, "gate": {"metric": "accuracy", "max_drop": 0.2}}.items():
        bench.config[section] = bench.config.get(section, {}) | values if isinstance(values, dict) else values
    bench.shard("colors.jsonl", [{**row, "locale": "de" if len(row["id"]) % 2 else "en"} for row in classified(400)])
    bench.config["data"]["corpus"] = [bench.shard("corpus.jsonl", rows_of_corpus(), folder="corpus")]
    return bench


def publish(bench: Bench, run: str) -> None:
    """Train, evaluate and publish a run; the next one has new rows and two steps."""
    bench.stage(Stage.TRAIN, run)
    bench.stage(Stage.EVALUATE, run)
    bench.train(run)
    bench.publish(run, bench.paths(run).model)
    write_reference(bench.root, "current", run)
    bench.config["model"] = {}
    bench.config["train"]["steps"] = 2
    bench.shard("more.jsonl", classified(80, seed=2))


def test_a_run_of_classes_alone_is_judged_by_its_accuracy(labels: Bench) -> None:
    bench = labels
    bench.config["gate"]["guardrails"] = [{"slice": "locale:de", "metric": "accuracy"}]
    bench.start("first")
    held = bench.rows("first", "classes.arrow")
    plan = bench.plan("first")
    assert (plan.holdout.queries, plan.holdout.candidates, plan.train.strata.keys()) == (len(held), 0, {"color"})
    trained = bench.stage(Stage.TRAIN, "first")
    assert trained is not None
    bench.stage(Stage.EVALUATE, "first")
    scores = store.read_json(bench.paths("first").scorecard)
    # The parent has no classifier, and so answers nothing.
    assert scores["baseline"] == {"accuracy": 0.0, "macro-f1": 0.0}
    assert scores["new"]["accuracy"] > 0.8
    assert scores["gate"]["verdict"] == "accepted"
    first = scores
    assert scores["slices"].keys() == {"locale:de", "locale:en", "task:color"}
    assert evaluated_by(bench, "first", 3) == scores
    assert scores["slices"]["task:color"]["new"]["accuracy"] == scores["new"]["accuracy"]
    assert trained.metrics["last_validation"] == pytest.approx({"accuracy": scores["new"]["accuracy"]}, abs=1e-9)
    assert len(embedded(bench, "first")) == len(rows_of_corpus())

    bench.train("first")
    bench.publish("first", bench.paths("first").model)
    write_reference(bench.root, "current", "first")
    bench.config["model"] = {}
    bench.config["gate"]["guardrails"] = [{"slice": "locale:*", "metric": "accuracy"}]
    bench.shard("more.jsonl", classified(80, seed=2))
    bench.config["train"]["steps"] = 2
    bench.start("second")
    bench.stage(Stage.TRAIN, "second")
    bench.stage(Stage.EVALUATE, "second")
    scores = store.read_json(bench.paths("second").scorecard)
    assert scores["baseline"]["accuracy"] > 0.8
    judged = [(one["slice"], one["metric"]) for one in scores["gate"]["guardrails"]]
    assert judged == [("locale:de", "accuracy"), ("locale:en", "accuracy")]
    assert scores["drift"]["documents"] == scores["queries"]
    # What the first model answered to its own hold-out.
    assert scores["reference"]["queries"] == len(held)
    assert scores["reference"]["baseline"]["accuracy"] == first["new"]["accuracy"]
    assert "new_on_old" not in scores["drift"]


SIZES = {"small": ["tiny", "little", "short"], "large": ["huge", "giant", "vast"]}


def test_macro_f1_may_decide(labels: Bench) -> None:
    """It is the mean F1 of the classes of all tasks. What accuracy alone has, the budget of all weeks and curves, stays its."""
    bench, draw = labels, random.Random(3)
    shard = [
        {"id": f"s{number}", "query": f"{draw.choice(SIZES[name])} s{number}", "document": name, "task": "size"}
        for number in range(150)
        for name in [draw.choice([*SIZES])]
    ]
    # Wrong ones, so that no model has them all.
    for row in shard[::5]:
        row["document"] = draw.choice([*SIZES])
    bench.shard("sizes.jsonl", shard)
    bench.config["gate"]["metric"] = "macro-f1"
    # sentence-transformers, whose answers are compared, does not cut texts shorter.
    tasks = {name: {"classes": [*classes], "query_length": 32} for name, classes in (("color", COLORS), ("size", SIZES))}
    bench.config["train"] |= {"tasks": tasks, "steps": 30}
    bench.start("first")
    trained = bench.stage(Stage.TRAIN, "first")
    assert trained is not None
    bench.stage(Stage.EVALUATE, "first")
    scores = store.read_json(bench.paths("first").scorecard)
    texts = {row["id"]: (row["query"], row["document"].strip().casefold()) for row in (*classified(400), *shard)}
    found: list[float] = []
    for task, classes in (("color", COLORS), ("size", SIZES)):
        held = [texts[row["id"]] for row in bench.rows("first", "classes.arrow") if row["task"] == task]
        folder = Path(bench.paths("first").model)
        answers = [name.casefold() for name in their_classes(folder, [text for text, _ in held], task)]
        own = [f1([right for _, right in held], answers, name.casefold()) for name in classes]
        assert scores["slices"][f"task:{task}"]["new"]["macro-f1"] == pytest.approx(sum(own) / len(own), abs=1e-9)
        found += own
    assert scores["new"]["macro-f1"] == pytest.approx(sum(found) / len(found), abs=1e-9)
    gate = scores["gate"]
    assert (gate["metric"], gate["new"], gate["baseline"]) == ("macro-f1", scores["new"]["macro-f1"], 0.0)
    assert gate["at_least"] == scores["difference"]["macro-f1"]["at_least"] < gate["difference"] < 1
    assert scores["new"]["macro-f1"] != scores["new"]["accuracy"]
    assert trained.metrics["last_validation"].keys() == {"accuracy"}
    kept = store.read_json(store.join(bench.paths("first").checkpoint(30), MANIFEST_FILE))
    assert kept["score"] == trained.metrics["last_validation"]["accuracy"]
    assert "in training 32 of a query" in store.read_bytes(store.join(bench.paths("first").model, "README.md")).decode()

    publish(bench, "first")
    bench.start("second")
    bench.stage(Stage.TRAIN, "second")
    bench.stage(Stage.EVALUATE, "second")
    scores = store.read_json(bench.paths("second").scorecard)
    assert scores["gate"]["baseline"] == scores["baseline"]["macro-f1"] > 0.3
    assert scores["gate"]["reference"]["metric"] == "accuracy"
    assert scores["gate"]["reference"]["difference"] == scores["reference"]["difference"]["accuracy"]["value"]


def f1(true: list[str], answers: list[str], name: str) -> float:
    """The F1 score of one class, as its definition has it."""
    hits = sum(right == answer == name for right, answer in zip(true, answers, strict=True))
    return 2 * hits / (true.count(name) + answers.count(name))


def test_next_week_may_write_its_classes_otherwise(labels: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """In another order, case and form of Unicode: they stay the same classes."""
    labels.start("first")
    publish(labels, "first")
    labels.config["train"] |= {
        "tasks": {"color": {"classes": ["\uff27REY", "Warm", "cold "]}},
        "learning_rate": 1e-7,
    }
    labels.start("second")
    labels.stage(Stage.TRAIN, "second")
    labels.stage(Stage.EVALUATE, "second")
    scores = store.read_json(labels.paths("second").scorecard)
    assert scores["baseline"]["accuracy"] > 0.8
    assert scores["new"] == scores["baseline"]
    # What was kept of the reference are numbers of classes, in its own order.
    assert "reference" not in scores
    assert "has another kind of hold-out, other tokens, lengths or classes, or test files" in caplog.text


def test_the_published_model_is_measured_behind_its_own_prompts(labels: Bench) -> None:
    labels.start("first")
    publish(labels, "first")
    labels.config["model"] = {"prompts": {"query": "q ", "color": "classify "}}
    labels.start("second")
    held = {row["query_hash"] for row in labels.rows("second", "classes.arrow")}
    labels.stage(Stage.TRAIN, "second")
    labels.stage(Stage.EVALUATE, "second")
    scores = store.read_json(labels.paths("second").scorecard)
    del labels.config["model"]["prompts"]
    labels.start("third")
    assert {row["query_hash"] for row in labels.rows("third", "classes.arrow")} == held
    labels.stage(Stage.TRAIN, "third")
    labels.stage(Stage.EVALUATE, "third")
    assert scores["baseline"] == store.read_json(labels.paths("third").scorecard)["baseline"]
    assert scores["baseline"]["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("classes", "afresh"), [([*COLORS], False), (["Grey", "cold", "warm"], True), ([*COLORS, *"abcdefghijkl"], True)]
)
def test_adamw_goes_on_only_with_the_same_classes(
    labels: Bench, caplog: pytest.LogCaptureFixture, classes: list[str], afresh: bool
) -> None:
    """Its state has a row for each class, in their order."""
    labels.config["train"] |= {"steps": 2, "checkpoint_every": 2, "validate_every": 2}
    labels.start("first")
    publish(labels, "first")
    labels.config["train"] |= {"continue_optimizer": True, "tasks": {"color": {"classes": classes}}}
    labels.start("second")
    labels.stage(Stage.TRAIN, "second")
    assert ("it starts afresh" in caplog.text) == afresh


@pytest.mark.parametrize("name", ["training", "type", "items"])
def test_a_task_may_have_the_name_of_an_attribute_of_modules(bench: Bench, name: str) -> None:
    for section, values in SETTINGS.items():
        bench.config[section] = bench.config.get(section, {}) | values if isinstance(values, dict) else values
    bench.config["train"] |= {"tasks": {name: {"classes": [*COLORS]}}, "steps": 4}
    bench.shard("pairs.jsonl", rows(0, 60, task="search"))
    bench.shard("colors.jsonl", classified(100, task=name))
    bench.config["data"]["corpus"] = [bench.shard("corpus.jsonl", rows_of_corpus(), folder="corpus")]
    bench.start("one")
    bench.stage(Stage.TRAIN, "one")
    bench.stage(Stage.EVALUATE, "one")
    assert "macro-f1" in store.read_json(bench.paths("one").scorecard)["slices"][f"task:{name}"]["new"]
    home = Path(bench.paths("one").model) / "classifiers" / name
    # Trained, and not what a classifier begins with.
    assert load_file(home / "model.safetensors")["linear.bias"].any()


def evaluated_by(bench: Bench, run: str, ranks: int) -> dict[str, Any]:
    """The scorecard of a host with several ranks, here threads over one scratch folder."""
    scratch = bench.scratch / f"{run}-ranks"
    contexts = [
        StageContext(
            stage=Stage.EVALUATE,
            paths=bench.paths(run),
            world=World(rank=rank, size=ranks, local_rank=rank, local_size=ranks),
            scratch=scratch,
            heartbeat=Heartbeat(None, rank),
        )
        for rank in range(ranks)
    ]
    scratch.mkdir()
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(evaluate.run, contexts, timeout=60))
    found: dict[str, Any] = store.read_json(bench.paths(run).scorecard)
    return found


def test_a_class_without_a_held_out_text_is_said(shop: Bench, caplog: pytest.LogCaptureFixture) -> None:
    shop.config["train"]["tasks"] = {"color": {"classes": [*COLORS, "bright", "pale"]}}
    shop.start("one")
    assert "task color: no text of the class bright, pale is held out" in caplog.text
    assert "warm" not in caplog.text


@pytest.mark.parametrize("metric", ["accuracy", "macro-f1"])
def test_rows_to_search_in_a_run_that_is_judged_by_its_classes(shop: Bench, metric: str) -> None:
    shop.config["gate"] = {"metric": metric}
    shop.prepare("one")
    shop.ingest("one")
    words = ("rows of tasks without classes", f"gate.metric = {metric}", "set gate.metric=ndcg@10")
    refusal(BadConfig, lambda: shop.stage(Stage.PLAN, "one"), *words)


def test_held_out_rows_without_tokens_have_no_lengths_either(shop: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.config["train"]["tasks"]["color"]["query_length"] = 5
    shop.config["data"]["max_bad_fraction"] = 0.9
    shop.start("first")
    shop.train("first")
    shop.publish("first", str(shop.model))
    shop.config["model"] = {"prompts": {"query": "q "}}
    encode = TextTokenizer.encode_each

    def without(tokenizer: TextTokenizer, texts: list[str], *more: Any) -> list[Any]:
        return [
            "no token" if "nothing" in text else own for text, own in zip(texts, encode(tokenizer, texts, *more), strict=True)
        ]

    monkeypatch.setattr(TextTokenizer, "encode_each", without)
    monkeypatch.setattr(plan_rows, "HOLDOUT_GROUP", 1)  # a range of slices may have such rows alone
    shop.shard("more.jsonl", rows(150, 200, task="search"))
    shop.shard("odd.jsonl", [{**row, "query": f"nothing {row['id']}"} for row in rows(200, 260, task="search")])
    shop.start("second")
    assert len(shop.rows("second", "holdout.arrow")) == len(shop.rows("second", "published/holdout.arrow")) > 0


def test_each_task_may_have_its_own_length_of_queries(shop: Bench) -> None:
    """In its training rows, in what is held out, and in the tokens of the published model."""
    shop.config["train"]["tasks"]["color"]["query_length"] = 5
    shop.start("first")
    shop.train("first")
    shop.publish("first", str(shop.model))
    shop.config["model"] = {"prompts": {"query": "q ", "color": "classify "}}
    shop.shard("more.jsonl", [*rows(150, 200, task="search"), *classified(60, seed=2)])
    shop.start("second")
    texts = {row["id"]: row["query"] for row in (*classified(240), *classified(60, seed=2), *rows(0, 200, task="search"))}
    plain, prompted = (TextTokenizer(shop.model, {"query": own[0], "color": own[1]}) for own in (("", ""), ("q ", "classify ")))
    files = [("first", "train.arrow", plain), ("first", "classes.arrow", plain), ("first", "holdout.arrow", plain)]
    files += [("second", "classes.arrow", prompted), ("second", "holdout.arrow", prompted)]
    files += [("second", "published/classes.arrow", plain), ("second", "published/holdout.arrow", plain)]
    longest = {}
    for run, name, tokenizer in files:
        for row in shop.rows(run, name):
            length = 5 if row["task"] == "color" else 12
            if "id" in row:
                prompt = tokenizer.prompts["color" if row["task"] == "color" else "query"]
                assert row["query_tokens"] == tokenizer.encode([texts[row["id"]]], length, prompt)[0].tolist()
            longest[name, row["task"]] = max(longest.get((name, row["task"]), 0), len(row["query_tokens"]))
    assert {length for (_, task), length in longest.items() if task == "color"} == {5}
    assert min(length for (_, task), length in longest.items() if task == "search") > 5


PROGRAM = """
import json, sys, torch
from sentence_transformers import SentenceTransformer, models
folder, texts = sys.argv[1], json.loads(sys.argv[2])
embeddings = torch.from_numpy(SentenceTransformer(folder).encode(texts))
classifier = models.Dense.load(folder + "/classifiers/" + sys.argv[3])
classes = json.load(open(folder + "/classifiers/" + sys.argv[3] + "/classes.json"))
found = classifier({"sentence_embedding": embeddings})["sentence_embedding"].argmax(dim=1)
print(json.dumps([classes[number] for number in found.tolist()]))
"""


def their_classes(folder: Path, texts: list[str], task: str = "color") -> list[str]:
    """The classes that a model folder gives texts, with sentence-transformers alone."""
    command = [sys.executable, "-c", PROGRAM, folder, json.dumps(texts), task]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def embedded(bench: Bench, run: str) -> list[tuple[str, float]]:
    """The class of each document of the corpus, by number, as embed writes it."""
    plan = bench.plan(run)
    found = {}
    for child in range(plan.embed.children):
        bench.stage(Stage.EMBED, run, child)
    for index in range(len(plan.embed.parts)):
        for row in pq.read_table(bench.paths(run).part(index, len(plan.embed.parts))).to_pylist():
            found[int(row["id"][1:])] = row["color.class"], row["color.probability"]
    return [found[number] for number in range(len(found))]


def test_class_weights_make_a_steps_loss_the_weighted_mean(shop: Bench) -> None:
    """As torch's cross entropy has it, over all ranks and the batches that a step accumulates."""
    train = {"tasks": {"color": {"class_weights": {"warm": 4.0, "Grey": 0.5}}}, "accumulation": 2, "batch_size": 3}
    shop.start("one", {"train": train, "device": {"ranks_per_node": 2}})
    config, folder = shop.plan("one").config.train, Path(shop.paths("one").rows)
    ranks = [TrainingBatches(folder, World(rank=rank, size=2), config, learning_rate=lambda _: 1e-3) for rank in range(2)]
    batches = list(zip(*(batches.iterate(0, batches.steps) for batches in ranks), strict=True))
    steps = [[*first, *second] for first, second in zip(batches[::2], batches[1::2], strict=True)]
    classified = [step for step in steps if "classes:color" in step[0]]
    assert len(classified) > 1
    for seed, step in enumerate(classified):
        classes = torch.cat([batch["classes:color"] for batch in step]).long()
        weights = torch.cat([batch["weights"] for batch in step])
        logits = torch.randn(len(classes), 3, generator=torch.Generator().manual_seed(seed))
        there = weights > 0
        expected = F.cross_entropy(logits[there], classes[there], weight=torch.tensor([4.0, 1.0, 0.5]))
        losses = F.cross_entropy(logits, classes, reduction="none")
        assert float((losses * weights).sum() / 2) == pytest.approx(float(expected), rel=1e-5)
        assert len(set(weights[there].tolist())) == len(set(classes[there].tolist()))


def test_a_class_that_the_task_does_not_have(shop: Bench) -> None:
    wrong = {"a tiger": "stripes", "a zebra": "stripes", "a leopard": "spots", "a rose": "Warm"}
    uri = shop.shard("wrong.jsonl", [{"query": text, "document": name, "task": "color"} for text, name in wrong.items()])
    shop.prepare("one")
    shop.ingest("one")
    refusal(
        BadData, lambda: shop.stage(Stage.PLAN, "one"), "task color: ", f"{uri}:", "stripes 2 (", "spots 1 (", "warm, cold, Grey"
    )


def test_a_class_that_is_no_more(shop: Bench) -> None:
    """Its rows stay in the files of earlier weeks, which never change."""
    shop.config["train"]["tasks"] = {"color": {"classes": ["warm", "Grey"]}}
    shop.prepare("one")
    shop.ingest("one")
    with pytest.raises(BadData) as caught:
        shop.stage(Stage.PLAN, "one")
    [(name, line)] = re.findall(r"(COLD) \d+ \((hash:[0-9a-f]{16})\)", str(caught.value))
    assert int(line.removeprefix("hash:"), 16) == normalized_hash(name)
    store.write_bytes(f"{shop.root}/delete.txt", line.encode())
    shop.start("two", {"data": {"delete": [f"{shop.root}/delete.txt"]}})
    assert {row["class"] for row in shop.rows("two") if row["task"] == "color"} == {0, 1}


@pytest.mark.parametrize(
    ("slices", "words"), [({"task:color": {}}, "which is assumed"), ({"task:color": {"difference": 0}}, "0.20")]
)
def test_a_baseline_without_a_classifier_says_nothing_of_how_far_weeks_differ(
    shop: Bench, slices: dict[str, Any], words: str
) -> None:
    shop.shard("pairs.jsonl", classified(20, seed=3))
    shop.config["gate"] |= {"metric": "accuracy", "guardrails": []}
    shop.week("one")
    store.write_json(shop.paths("one").scorecard, {"queries": 400, "difference": {"accuracy": {"error": 0.01}}, "slices": slices})
    shop.shard("more.jsonl", classified(60, seed=1))
    shop.start("two")
    assert words in shop.plan("two").holdout.decides


def test_a_head_must_fit_the_classifiers(shop: Bench) -> None:
    shop.start("one")
    shop.stage(Stage.TRAIN, "one")
    shop.train("one")
    shop.publish("one", shop.paths("one").model)
    shop.config["model"] = {}
    shop.shard("more.jsonl", classified(60, seed=1))
    refusal(
        BadConfig,
        lambda: shop.prepare("two", {"model": {"head": [{"out": 16}]}}),
        "the parent's classifiers read embeddings of another size",
        "embeddings of 16 numbers",
        "task color: 32",
    )
    # Where the task has no classes any more, its classifier is left behind.
    shop.prepare("three", {"model": {"head": [{"out": 16}]}, "train": {"tasks": {"color": {"classes": None}}}})


def test_rows_of_a_label_of_0_may_name_any_class(shop: Bench) -> None:
    lines = [{"query": f"zebra {n}", "document": "stripes", "task": "color", "label": 0} for n in range(200)]
    shop.shard("judged.jsonl", lines)
    shop.start("one")
    zebras = {normalized_hash(line["query"]) for line in lines}
    for name in ("train.arrow", "holdout.arrow", "classes.arrow"):
        assert not zebras & {row["query_hash"] for row in shop.rows("one", name)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"batch_by": "any"}}, ["set batch_by to task or locale"]),
        ({"data": {"corpus": []}}, ["names of classes", "set data.corpus"]),
        ({"embed": {"dimensions": 8}}, ["classes of whole embeddings"]),
        ({"data": {"holdout_by": "document"}}, ["hold out whole classes", "query or group"]),
        ({"train": {"tasks": {"color": {"classes": ["warm", "WARM "]}}}}, ["train.tasks.color", "a class is there twice"]),
        ({"train": {"tasks": {"color": {"classes": ["warm"]}}}}, ["at least 2"]),
        ({"gate": {"metric": "accuracy"}, "report": {"texts": True}}, ["report.texts", "leave it out"]),
        ({"train": {"tasks": {"color": {"query_length": 33}}}}, ["train.tasks.color.query_length 33", "train.length, 32"]),
        ({"gate": {"guardrails": [{"slice": "locale:*", "metric": "accuracy"}]}}, ["the slice locale:* has no accuracy"]),
        ({"gate": {"guardrails": [{"slice": "task:color", "max_drop": 0.1}]}}, ["the slice task:color has no ndcg@10"]),
        ({"gate": {"guardrails": [{"slice": "task:search", "metric": "accuracy"}]}}, ["task:search has no accuracy"]),
        ({"gate": {"guardrails": [{"slice": "task:search", "metric": "macro-f1"}]}}, ["task:search has no macro-f1"]),
        ({"gate": {"guardrails": [{"slice": "fresh", "metric": "macro-f1"}]}}, ["the slice fresh has ndcg@10"]),
        (
            {"gate": {"metric": "accuracy", "guardrails": [{"slice": "locale:de"}]}, "report": {"texts": False}},
            ["the slice locale:de has no ndcg@10"],
        ),
        ({"train": {"tasks": {"color": {"class_weights": {"red": 2, "warm": 1}}}}}, ["class_weights: red is not in classes"]),
        ({"train": {"tasks": {"size": {"class_weights": {"small": 2}}}}}, ["class_weights: small is not in classes"]),
        ({"train": {"tasks": {"a/b": {"classes": ["warm", "cold"]}}}}, ["a/b"]),
        ({"device": {"loader": {"batches_per_execution": 2}, "sync_points": 1}}, ["steps of one form"]),
    ],
)
def test_settings_that_cannot_be(shop: Bench, settings: dict[str, Any], words: list[str]) -> None:
    refusal(BadConfig, lambda: shop.prepare("one", settings), *words)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_training_with_classes_meets_the_graphs_of_the_trial(shop: Bench, alone: bool) -> None:
    """On xla, where every form of a step is a graph."""
    settings: dict[str, Any] = {
        "device": {"kind": "xla"},
        "train": {"steps": 8, "batch_tokens": 64},
        "compile": {"trial_steps": 2},
    }
    if alone:
        Path(shop.root, "data", "pairs.jsonl").unlink()
        settings["gate"] = {"metric": "accuracy", "max_drop": 0.9, "undecided": "accept"}
    shop.start("one", settings)
    met = {
        stage: on_xla(SCENARIO, "stage", shop.paths("one").root, stage, shop.scratch / f"xla-{stage}")
        for stage in (Stage.COMPILE, Stage.TRAIN, Stage.EVALUATE)
    }
    # A step of pairs is one graph.
    assert met[Stage.COMPILE]["graphs"] == (6 if alone else 7)
    assert [met[stage]["graphs"]["new"] for stage in (Stage.TRAIN, Stage.EVALUATE)] == [0, 0]
    assert store.read_json(shop.paths("one").scorecard)["slices"]["task:color"]["new"]["accuracy"] > 0
