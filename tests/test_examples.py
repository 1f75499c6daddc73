"""The examples, as their README files tell to run them, with a small encoder and few rows."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from pipeline.config import ModelConfig
from pipeline.dataset.rows import normalized_hash
from pipeline.model.classifier import add_classifiers
from pipeline.model.folder import load_encoder, save_folder
from tests.chain.runs import LocalState
from tests.tiny import WORDS, make_model

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "device.precision": "fp32",
    "train.query_length": 24,
    "train.length": 32,
    "train.batch_size": 16,
    "train.steps": 60,
    "train.learning_rate": "2e-3",
    "train.validate_every": 60,
    "train.validation_queries": 8,
    "health_check.memory_mib": 1,
    "health_check.storage_mib": 1,
    "embed.length": 32,
    "embed.children": 1,
}


def reviews(count: int) -> list[dict[str, str]]:
    """Reviews with the label 0 use half of the words, those with 1 the other half; a title has two words of its review."""
    draw, found = random.Random(0), []
    for number in range(count):
        label = number % 2
        words = draw.sample(WORDS[label::2], 8)
        found.append({"title": " ".join(words[:2]), "content": " ".join(words[2:] + words[:2]), "label": str(label)})
    return found


def example(name: str, state: str) -> list[str]:
    """The arguments of the command for a state folder in an example's README, in which a backslash continues a line."""
    told = (EXAMPLES / name / "README.md").read_text().replace("\\\n", " ")
    [command] = [line for line in re.findall(r"^trnpipe (.*)$", told, re.MULTILINE) if f"--state {state}" in line]
    return shlex.split(command)


def run(arguments: list[str], folder: Path, **more: str) -> Path:
    """Run an example's command in a folder, with a small encoder and settings that make it small; return the run's folder."""
    make_model(folder / "parent")
    (folder / "examples").symlink_to(EXAMPLES)
    words = [str(folder / "parent") if word == "demo" else word for word in arguments]
    settings = [word for name, value in {**SMALL, **more}.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "pipeline.cli", *words, "--nodes", "1", "--device", "cpu", *settings]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [found] = LocalState(folder / words[words.index("--state") + 1], Path()).runs
    return found


@pytest.mark.long
def test_reviews(tmp_path: Path) -> None:
    rows = reviews(400)
    (tmp_path / "reviews").mkdir()
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "reviews" / "week-1.csv")
    done = run(example("reviews", "reviews-state"), tmp_path, **{"train.tasks.label.query_length": "28"})
    scores = json.loads((done / "evaluate" / "scorecard.json").read_text())
    assert scores["slices"]["task:label"]["new"]["accuracy"] > 0.8
    assert scores["gate"]["metric"] == "ndcg@10"
    parts = sorted((done / "embed").rglob("part-*.parquet"))
    found = {row["id"]: row["label.class"] for part in parts for row in pq.read_table(part).to_pylist()}
    # Without ids, the hash of a review is its id; reviews of the same words are one document.
    right = [found[f"{normalized_hash(row['content']):016x}"] == row["label"] for row in rows]
    assert sum(right) > 0.8 * len(right) > 300


@pytest.mark.parametrize("family", [BertConfig, RobertaConfig, XLMRobertaConfig, MPNetConfig])
def test_a_classifier_of_the_first_token_is_one_of_transformers(tmp_path: Path, family: Any) -> None:
    """The code of the README, in a process without ours, has the classes of sentence-transformers' modules."""
    make_model(tmp_path / "parent", family=family)
    # A plain backbone: the pooling is the configuration's. It comes from a classifier of several labels for one text.
    backbone = AutoModel.from_pretrained(tmp_path / "parent", problem_type="multi_label_classification", num_labels=7)
    backbone.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tmp_path / "parent").save_pretrained(tmp_path / "base")
    size = AutoConfig.from_pretrained(tmp_path / "base").hidden_size
    form = ModelConfig.model_validate({"pooling": "cls", "normalize": False, "head": [{"out": size, "activation": "tanh"}]})
    encoder = load_encoder(tmp_path / "base", form)
    add_classifiers(encoder, tmp_path, {"label": ("bad", "good", "neither")})
    torch.nn.init.normal_(encoder.classifiers["label"].weight)  # type: ignore[arg-type]
    save_folder(encoder, tmp_path / "model", tmp_path / "base", max_length=16)
    [code] = re.findall(r"```python\n(.*?)```", (EXAMPLES / "reviews" / "README.md").read_text(), re.DOTALL)
    code, text = code.replace("max_length=128", "max_length=16"), " ".join(WORDS[:70])
    compare = f"""
import json
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense

embedding = torch.from_numpy(SentenceTransformer("model").encode([{text!r}]))
expected = Dense.load("model/classifiers/label")({{"sentence_embedding": embedding}})["sentence_embedding"][0].softmax(dim=0)
classes = json.load(open("model/classifiers/label/classes.json"))
found = {{one["label"]: one["score"] for one in classify([{text!r}], truncation=True, max_length=16)[0]}}
print(json.dumps([found, dict(zip(classes, expected.tolist()))]))
"""
    command = [sys.executable, "-I", "-c", code + compare]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found, expected = json.loads(done.stdout.splitlines()[-1])
    assert expected.keys() == {"bad", "good", "neither"}
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(expected.values()) > 0.4
    # The next model is trained from this folder.
    again = load_encoder(tmp_path / "model", form).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in encoder.state_dict().items() if name in again)
    assert len(again) == len(encoder.state_dict()) - 2  # the classifier's own
    # transformers 4 takes no other names.
    names = {name.partition(".")[0] for name in load_file(tmp_path / "model" / "model.safetensors")}
    assert names == {encoder.backbone.base_model_prefix, "classifier"}


@pytest.mark.parametrize(
    "other",
    [
        {"pooling": "mean"},
        {"normalize": True},
        {"head": None},
        {"head": [{"out": 8, "activation": "tanh"}]},
        {"head": [{"out": 32, "activation": "gelu"}]},
        {"tasks": ("label", "stars")},
        {"family": ModernBertConfig},
    ],
    ids=str,
)
def test_another_form_does_not_pass_for_a_classifier_of_transformers(tmp_path: Path, other: dict[str, Any]) -> None:
    make_model(tmp_path / "parent", family=other.pop("family", BertConfig))
    AutoModel.from_pretrained(tmp_path / "parent").save_pretrained(tmp_path / "base")
    tasks = other.pop("tasks", ("label",))
    form = {"pooling": "cls", "normalize": False, "head": [{"out": 32, "activation": "tanh"}]}
    settings = json.loads((tmp_path / "base" / "config.json").read_text())
    labels = {"id2label": {"0": "good"}, "label2id": {"good": 0}, "problem_type": "regression"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings | labels))
    encoder = load_encoder(tmp_path / "base", ModelConfig.model_validate(form | other))
    add_classifiers(encoder, tmp_path, dict.fromkeys(tasks, ("bad", "good")))
    save_folder(encoder, tmp_path / "model", tmp_path / "base")
    assert not any("classifier" in name or "pooler" in name for name in load_file(tmp_path / "model" / "model.safetensors"))
    assert labels.keys().isdisjoint(json.loads((tmp_path / "model" / "config.json").read_text()))


def shop(folder: Path, queries: int) -> None:
    """The files of the Shopping Queries data set, with eight judged products of each query: exact ones have all its words,
    irrelevant ones none. Each judgement has a word of its own, which a small encoder learns in a few steps."""
    draw, examples, products = random.Random(0), [], []
    for query in range(queries):
        words, locale = draw.sample(WORDS[4:], 3), draw.choice(["us", "es"])
        for number, label in enumerate("EESSCCII"):
            others = [word for word in WORDS[4:] if word not in words]
            title = [WORDS[number // 2], *words[: 3 - number // 2], *draw.sample(others, 2)]
            common = {"product_id": f"B{query:04d}{number}", "product_locale": locale}
            judged = {
                "query": " ".join(words),
                "query_id": query,
                "esci_label": label,
                "split": "test" if query % 5 == 0 else "train",
            }
            examples.append({**common, **judged, "example_id": len(examples), "small_version": 1, "large_version": 1})
            products.append({**common, "product_title": " ".join(title), "product_brand": draw.choice([None, "acme"])})
            products[-1] |= {
                "product_color": None,
                "product_bullet_point": " ".join(draw.sample(words, 1)),
                "product_description": "",
            }
    folder.mkdir()
    for name, rows in (("examples", examples), ("products", products)):
        schema = pa.schema([(key, pa.int64() if isinstance(value, int) else pa.string()) for key, value in rows[0].items()])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / f"shopping_queries_dataset_{name}.parquet")


@pytest.mark.long
def test_esci(tmp_path: Path) -> None:
    shop(tmp_path / "esci", 300)
    command = [sys.executable, EXAMPLES / "esci" / "rows.py", tmp_path / "esci", tmp_path / "esci" / "rows"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told == "2400 judgements of 2400 products\n"
    more = {"data.holdout_fraction": "0.2", "gate.undecided": "accept", "train.steps": "120"}
    more["train.tasks.esci.query_length"] = "28"
    done = run(example("esci", "esci/state"), tmp_path, **more)
    slices = json.loads((done / "evaluate" / "scorecard.json").read_text())["slices"]
    assert {"locale:us", "locale:es", "task:search", "task:esci", "golden:esci"} <= slices.keys()
    assert slices["golden:esci"]["queries"] == 60
    # Each class would be right in a quarter of the texts.
    assert slices["task:esci"]["new"]["accuracy"] > 0.6
    plan = json.loads((done / "plan.json").read_text())
    assert plan["train"]["strata"].keys() == {"esci/es", "esci/us", "search/es", "search/us"}
    assert plan["config"]["train"]["negatives"] == 2
