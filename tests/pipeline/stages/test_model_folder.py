"""The finished model's folder: sentence-transformers alone computes the published vectors with it, at every length."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from pipeline import store
from pipeline.commands.search import query_encoder
from pipeline.config import HeadConfig, ModelConfig
from pipeline.contract import Stage
from pipeline.errors import BadConfig
from pipeline.graphs.compiled import GraphSet, write_set
from pipeline.graphs.fingerprint import set_uri
from pipeline.model.folder import WEIGHTS, load_encoder, save_folder
from pipeline.run_inputs import GraphsPlan
from pipeline.stages import embed
from tests.pipeline.stages.planning import Bench, refusal
from tests.tiny import WORDS, head_form, make_model

LONGEST = 32
"""Tokens of the longest bucket; the parent's folder says 64."""

PROMPTS = {"query": "bake limo ", "passage": "zuzu titi "}

ALONE = """
import json, sys
from sentence_transformers import SentenceTransformer
texts = json.load(sys.stdin)
model = SentenceTransformer(sys.argv[1], device="cpu")
found = {name: getattr(model, name)(texts).tolist() for name in ("encode", "encode_document", "encode_query")}
print(json.dumps([found, model.max_seq_length, "pipeline" in sys.modules]))
"""


def texts() -> list[str]:
    """Texts of 1 to 80 words, some in capitals; many exceed the longest bucket, and some the model's positions."""
    rng = np.random.default_rng(3)
    made = [" ".join(rng.choice(WORDS, size=length)) for length in range(1, 81)]
    return [text.upper() if index % 3 == 0 else text for index, text in enumerate(made)]


LAYERS = [{"out": 64, "activation": "relu"}, {"out": 24, "activation": "identity"}]


def make_parent(folder: Path, *, prompts: dict[str, str] | None = None, cased: bool = False, **form: Any) -> Path:
    """Write a model folder; `cased`: its tokenizer keeps capitals, and sentence-transformers has to put them in lower case."""
    head = form.pop("head", None)
    source = folder.with_name("made")
    encoder = make_model(source, head=head)
    for name, value in form.items():
        setattr(encoder, name, value)
    save_folder(encoder, folder, source)
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    if cased:
        for name, text in (("tokenizer.json", '"lowercase": true'), ("tokenizer_config.json", '"do_lower_case": true')):
            content = (folder / name).read_text()
            assert text in content
            (folder / name).write_text(content.replace(text, text.replace("true", "false")))
        edit("sentence_bert_config.json", do_lower_case=True)(folder)
    return folder


def published_run(tmp_path: Path, parent: Path, precision: str = "fp32", size: int | None = None, **model: Any) -> Bench:
    """A bucket with one run, from prepare to publish.

    Args:
        size: of the published embeddings.
    """
    (tmp_path / "scratch").mkdir()
    bench = Bench(str(tmp_path / "bucket"), tmp_path / "scratch", parent)
    bench.config |= {
        "nodes": 1,
        "device": {"kind": "cpu", "precision": precision, "threads_per_rank": 1, "ranks_per_node": 1},
        "model": {"parent": str(parent), **model},
        "embed": {"children": 1, "length": LONGEST, "tokens_per_batch": 512, "dimensions": size},
    }
    bench.config["data"] |= {"corpus": [store.join(bench.root, "corpus")], "holdout_fraction": 0.3}
    bench.config["train"] |= {"learning_rate": 1e-3}
    bench.config["gate"] |= {"max_drop": 1.0}
    rng = np.random.default_rng(1)
    documents = [" ".join(rng.choice(WORDS, size=rng.integers(3, 50))) for _ in range(60)]
    pairs = [{"id": f"row{n}", "query": " ".join(text.split()[:2]), "document": text} for n, text in enumerate(documents)]
    bench.shard("pairs.jsonl", pairs)
    bench.shard("corpus.jsonl", [{"id": f"doc{n}", "text": text} for n, text in enumerate(texts())], folder="corpus")
    bench.start("one")
    for stage in (Stage.TRAIN, Stage.EVALUATE, Stage.PREPARE):
        bench.stage(stage, "one")
    bench.ingest("one")
    for stage in (Stage.PLAN, Stage.EMBED, Stage.PUBLISH):
        bench.stage(stage, "one")
    return bench


def vectors(bench: Bench, run: str = "one") -> np.ndarray:
    """The published embeddings of `texts`, in their order."""
    found: dict[str, np.ndarray] = {}
    for part in store.read_json(bench.paths(run).embed_manifest)["parts"]:
        table = pq.read_table(part["uri"])
        found |= dict(zip(table["id"].to_pylist(), np.stack(table["embedding"].to_numpy()), strict=True))
    return np.stack([found[f"doc{number}"] for number in range(len(found))]).astype(np.float64)


def alone(folder: str, asked: list[str]) -> tuple[dict[str, np.ndarray], int]:
    """What a process without trnpipe computes."""
    command = [sys.executable, "-c", ALONE, folder]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found, longest, knows_us = json.loads(done.stdout.splitlines()[-1])
    assert knows_us is False
    return {name: np.array(each) for name, each in found.items()}, longest


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    product: np.ndarray = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    return product


@pytest.mark.parametrize(
    ("parent", "precision", "least", "size"),
    [
        ({}, "fp32", 0.9999, None),
        ({}, "bf16", 0.9995, None),
        ({"prompts": PROMPTS, "cased": True, "head": 48}, "fp32", 0.9999, 12),
        ({"prompts": PROMPTS, "normalize": False}, "fp32", 0.9999, 16),
        ({"head": LAYERS}, "bf16", 0.9995, None),
    ],
    ids=["fp32", "bf16", "prompts, capitals, head, shorter", "prompts, not normalized, shorter", "layers, bf16"],
)
def test_the_folder_alone_gives_the_published_vectors(
    tmp_path: Path, parent: dict[str, Any], precision: str, least: float, size: int | None
) -> None:
    form: dict[str, Any] = {"normalize": parent.get("normalize", True)}
    form |= {"head": head_form(parent.get("head"))}
    whole = LAYERS[-1]["out"] if parent.get("head") == LAYERS else 32
    bench = published_run(tmp_path, make_parent(tmp_path / "parent", **parent), precision, size, **form)
    model, manifest = bench.paths("one").model, store.read_json(bench.paths("one").embed_manifest)
    ours, (theirs, longest) = vectors(bench), alone(model, texts())
    assert (longest, manifest["dimension"], ours.shape[1]) == (LONGEST, size or whole, size or whole)
    for name in ("encode", "encode_document"):
        assert cosines(ours, theirs[name]).min() >= least, name
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), np.linalg.norm(theirs["encode"], axis=1), rtol=1e-2)
    # Not by chance: other texts are far away, and so is a query, whose prompt is another one.
    assert cosines(ours, np.roll(theirs["encode"], 1, axis=0)).mean() < 0.9
    assert (cosines(ours, theirs["encode_query"]).min() < 0.99) == ("prompts" in parent)
    # trnpipe search embeds queries like sentence-transformers, longer ones than those of training, too.
    search = query_encoder(Path(model), bench.plan("one"), manifest["dimension"])
    assert cosines(np.stack([search(text) for text in texts()]), theirs["encode_query"]).min() >= 0.9999


def test_a_card_says_what_the_model_is(tmp_path: Path) -> None:
    bench = published_run(tmp_path, make_parent(tmp_path / "parent", prompts=PROMPTS))
    folder, plan = Path(bench.paths("one").model), bench.plan("one")
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert card.data.base_model == str(tmp_path / "parent")
    facts = dict(line.removeprefix("- **").split("**: ", 1) for line in card.text.splitlines() if line.startswith("- **"))
    assert store.sha256_file(folder / WEIGHTS) in facts["Weights"]
    assert plan.parent.sha256 in facts["Parent"]
    assert facts["Trained on"].startswith(
        f"{plan.train.rows} rows ({plan.train.new_rows} new, 0 seen before): {plan.train.steps} steps"
    )
    assert facts["Longest text"].startswith(f"{LONGEST} tokens")
    assert facts["Prompts"] == 'query "bake limo ", document "zuzu titi "'
    assert (facts["Pooling"], facts["Head"], facts["Lineage"]) == ("mean", "none", "one")
    scorecard = store.read_json(bench.paths("one").scorecard)
    assert "runs/one/evaluate/scorecard.json" in facts["Evaluation"]
    assert scorecard["gate"]["verdict"] == "accepted"


def test_the_next_week_continues_with_the_same_prompts_and_a_longer_lineage(tmp_path: Path) -> None:
    bench = published_run(tmp_path, make_parent(tmp_path / "parent", prompts=PROMPTS))
    bench.config["model"] = {}
    bench.shard("more.jsonl", [{"id": f"new{n}", "query": f"{WORDS[n]} ke", "document": f"{WORDS[n]} ba ke"} for n in range(40)])
    bench.start("two")
    assert bench.inputs("two").tokenizer.digest == bench.inputs("one").tokenizer.digest
    bench.stage(Stage.TRAIN, "two")
    assert "- **Lineage**: one > two\n" in (Path(bench.paths("two").model) / "README.md").read_text()


def test_another_length_is_not_mixed_with_the_published_model(tmp_path: Path) -> None:
    bench = published_run(tmp_path, make_parent(tmp_path / "parent"))
    bench.config["model"] = {}
    # A run whose own model is refused embeds with the published one, if it cuts texts alike.
    for run, length, alike in (("same", LONGEST, True), ("longer", 48, False)):
        bench.config["embed"] |= {"length": length}
        words = [{"id": f"{run}{n}", "query": f"{WORDS[n]} {run}", "document": f"{WORDS[n]} ba {run}"} for n in range(40)]
        bench.shard(f"{run}.jsonl", words)
        bench.start(run)
        bench.stage(Stage.TRAIN, run)
        judged = bench.stage(Stage.EVALUATE, run)
        assert judged is not None
        assert judged.metrics["refresh"] is alike
    # A refresh takes the lengths of the run that made the model. Where it does not know them, it follows the model's folder.
    bench.prepare("daily", {"mode": "refresh"})
    assert bench.inputs("daily").config.embed.length == LONGEST
    store.delete(bench.paths("one").plan)
    refusal(BadConfig, lambda: bench.prepare("late", {"mode": "refresh"}), "max_seq_length = 32", "embed.length = 48")
    bench.config["embed"] |= {"length": LONGEST}
    bench.prepare("as the folder says", {"mode": "refresh"})


def test_a_model_keeps_the_size_of_its_embeddings(tmp_path: Path) -> None:
    bench = published_run(tmp_path, make_parent(tmp_path / "parent"), size=12)
    card = (Path(bench.paths("one").model) / "README.md").read_text()
    assert "- **Published vectors**: the first 12 numbers, float32\n" in card
    bench.config["model"], before = {}, vectors(bench)
    bench.config["embed"] |= {"dimensions": None}
    bench.shard("more.jsonl", [{"id": f"doc{80 + n}", "text": f"{WORDS[n]} more"} for n in range(10)], folder="corpus")
    bench.prepare("daily", {"mode": "refresh"})
    assert bench.inputs("daily").config.embed.dimensions == 12
    bench.ingest("daily")
    for stage in (Stage.PLAN, Stage.EMBED, Stage.PUBLISH):
        bench.stage(stage, "daily")
    embedded = store.read_json(bench.paths("daily").result(Stage.EMBED))["metrics"]
    assert (embedded["dimension"], embedded["copied"], embedded["documents"]) == (12, 80, 90)
    np.testing.assert_array_equal(vectors(bench, "daily")[:80], before)


def test_a_model_that_leaves_its_prompts_out_of_the_mean_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    parent = make_parent(tmp_path / "parent", prompts=PROMPTS)
    path = parent / "1_Pooling" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"include_prompt": False}))
    bench = Bench(str(tmp_path / "bucket"), tmp_path / "scratch", parent)
    bench.shard("pairs.jsonl", [])
    refusal(BadConfig, lambda: bench.prepare("one"), "include_prompt = false", "bake limo")
    (parent / "config_sentence_transformers.json").unlink()
    bench.prepare("one")


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        record = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(record | changes))

    return edit


def without_normalize(folder: Path) -> None:
    path = folder / "modules.json"
    path.write_text(json.dumps([module for module in json.loads(path.read_text()) if "Normalize" not in module["type"]]))


def shorter(folder: Path) -> None:
    made = folder.with_name("shorter")
    save_folder(load_encoder(folder, ModelConfig(head=HeadConfig(hidden=48))), made, folder, dimensions=12)
    shutil.copytree(made, folder, dirs_exist_ok=True)


def other_head(folder: Path) -> None:
    tensors = load_file(folder / "head.safetensors")
    save_file({**tensors, "b2": tensors["b2"] + 0.1}, folder / "head.safetensors")


@pytest.mark.parametrize(
    ("settings", "change", "same"),
    [
        ({}, lambda folder: (folder / "README.md").write_text("another card"), True),
        ({"embed": {"length": 24}}, None, False),
        ({"embed": {"dtype": "float16"}}, None, False),
        ({"model": {"pooling": "cls"}}, edit("1_Pooling/config.json", pooling_mode="cls"), False),
        ({"model": {"normalize": False}}, without_normalize, False),
        ({}, edit("sentence_bert_config.json", max_seq_length=24), False),
        ({}, edit("sentence_bert_config.json", do_lower_case=True), False),
        ({}, edit("config_sentence_transformers.json", prompts=PROMPTS), False),
        ({}, edit("tokenizer_config.json", truncation_side="left"), False),
        ({}, edit("config.json", layer_norm_eps=1e-3), False),
        ({}, other_head, False),
        ({}, shorter, False),
    ],
    ids=[
        "card",
        "length",
        "dtype",
        "pooling",
        "normalize",
        "max_seq_length",
        "lower",
        "prompts",
        "tokenizer",
        "config",
        "head",
        "size",
    ],
)
def test_all_that_decides_a_vector_is_in_the_form(
    plan_run: Any, tmp_path: Path, settings: dict[str, Any], change: Callable[[Path], None] | None, same: bool
) -> None:
    run = plan_run(head=48)
    context = run.context(Stage.EMBED)
    before = embed.open_worker(context, embed.embedding_model(context), [0]).form
    if change:
        change(Path(run.paths.model))
    config = run.plan.config.model_dump(mode="json")
    for section, values in settings.items():
        config[section] |= values
    run.replan(config=type(run.plan.config).model_validate(config))
    context = run.context(Stage.EMBED)
    assert (embed.open_worker(context, embed.embedding_model(context), [0]).form == before) is same


def test_the_compilers_casts_are_in_the_form(plan_run: Any) -> None:
    run = plan_run()
    forms = set()
    for kind, name in (("train", "t"), ("infer", "i")):
        write_set(set_uri(run.paths.bucket_root, kind, name), GraphSet(fingerprint=name, run=run.plan.run, graphs={}))
    for cast in ("none", "matmult", "matmult"):
        run.replan(graphs=GraphsPlan(train="t", infer="i", infer_compiler_flags=f"--auto-cast={cast}"))
        context = run.context(Stage.EMBED)
        forms.add(embed.open_worker(context, embed.embedding_model(context), [0]).form)
    assert len(forms) == 2
