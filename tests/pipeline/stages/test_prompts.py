"""Prompts of queries, documents and tasks: configured once, obeyed by every stage, and part of the model's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import store
from pipeline.contract import Stage
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig
from pipeline.model.inventory import PROMPTS, read_prompts
from tests.pipeline.stages.planning import Bench, refusal, rows
from tests.tiny import sentence_transformer

FIND, PAGE, BUY = "find ", "page ", "buy "


@pytest.fixture
def mixed(bench: Bench) -> Bench:
    bench.shard("a.jsonl", [*rows(0, 60, task="search"), *rows(60, 120, task="shop"), *rows(120, 140)])
    return bench


def tokens_of(bench: Bench, run: str, name: str, column: str) -> dict[str, list[int]]:
    """The tokens of texts that are in a row file, by the texts."""
    texts = {normalized_hash(row[column]): row[column] for row in rows(0, 140)}
    return {texts[row[f"{column}_hash"]]: row[f"{column}_tokens"] for row in bench.rows(run, name)}


def expected(bench: Bench, prompt: str, text: str, length: int) -> list[int]:
    [tokens] = TextTokenizer(bench.model).encode([prompt + text], length)
    return tokens.tolist()


@pytest.mark.slow
def test_prompts_are_before_the_texts_and_in_the_models_folder(mixed: Bench) -> None:
    mixed.config["nodes"], mixed.config["device"]["ranks_per_node"] = 1, 1
    mixed.config["model"]["prompts"] = {"query": FIND, "document": PAGE, "shop": BUY}
    mixed.start("one", {"train": {"steps": 2}})
    for name in ("train.arrow", "holdout.arrow"):
        found = tokens_of(mixed, "one", name, "query")
        assert len(found) > 20
        for text, tokens in found.items():
            prompt = BUY if 60 <= int(text.split()[1]) < 120 else FIND
            assert tokens == expected(mixed, prompt, text, 12), (name, text)
    for text, tokens in tokens_of(mixed, "one", "train.arrow", "document").items():
        assert tokens == expected(mixed, PAGE, text, 32)

    mixed.stage(Stage.TRAIN, "one")
    model = sentence_transformer(Path(mixed.paths("one").model))
    assert model.prompts == {"query": FIND, "document": PAGE, "shop": BUY}
    plan = mixed.plan("one")
    for child in range(plan.embed.children):
        mixed.stage(Stage.EMBED, "one", child)
    parts = [mixed.paths("one").part(index, len(plan.embed.parts)) for index in range(len(plan.embed.parts))]
    embedded = {row["id"]: row["embedding"] for part in parts for row in pq.read_table(part).to_pylist()}
    documents = {row["id"]: row["document"] for row in rows(0, 140)}
    theirs = model.encode_document([documents[name] for name in embedded])
    np.testing.assert_allclose(np.array([*embedded.values()], np.float32), theirs, atol=2e-3)  # parts are fp16


def test_a_task_may_have_no_prompt_where_queries_have_one(mixed: Bench, tmp_path: Path) -> None:
    mixed.config["model"]["prompts"] = {"query": FIND, "shop": ""}
    mixed.start("one")
    folder = Path(mixed.inputs("one").parent.folder)
    assert read_prompts(folder) == {"query": FIND, "document": "", "shop": ""}
    for text, tokens in tokens_of(mixed, "one", "train.arrow", "query").items():
        assert tokens == expected(mixed, "" if 60 <= int(text.split()[1]) < 120 else FIND, text, 12)
    # As every later model has it.
    again = shutil.copytree(folder, tmp_path / "again")
    mixed.config["model"] = {"parent": str(again), "prompts": {"shop": ""}}
    mixed.prepare("two")
    assert mixed.inputs("two").parent.folder == str(again)


def test_a_prompt_that_is_new_leaves_the_published_model_its_own(mixed: Bench) -> None:
    mixed.week("one")
    mixed.shard("b.jsonl", [{"query": "query 200", "document": "document 200", "task": "shop"}])
    mixed.start("two", {"model": {"prompts": {"shop": BUY}}})
    inputs = mixed.inputs("two")
    assert inputs.parent.folder.endswith("runs/two/prepare/parent")
    assert inputs.published is not None
    assert (inputs.published.folder, inputs.published.own_tokens) == (str(mixed.model), True)
    new, published = (tokens_of(mixed, "two", name, "query") for name in ("holdout.arrow", "published/holdout.arrow"))
    assert new.keys() == published.keys()
    # Of a file that was ingested without the prompt.
    for text in new:
        assert new[text] == expected(mixed, BUY if 60 <= int(text.split()[1]) < 120 else "", text, 12)
        assert published[text] == expected(mixed, "", text, 12)
    assert any(new[text] != published[text] for text in new)


def test_a_task_with_the_name_of_a_side_has_the_prompt_of_queries(model: Path) -> None:
    tokenizer = TextTokenizer(model, {"query": FIND, "document": PAGE, "shop": BUY})
    tasks = pa.chunked_array([["document", "query", "shop", None, "other"]], pa.string())
    found = tokenizer.with_prompts(pa.chunked_array([["shoes"] * 5]), tasks)
    assert found.to_pylist() == [f"{prompt}shoes" for prompt in (FIND, FIND, BUY, FIND, FIND)]


def test_prompts_that_contradict_the_folder_are_refused(mixed: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "prompted"
    shutil.copytree(mixed.model, folder)
    store.write_json(f"{folder}/{PROMPTS}", {"prompts": {"query": FIND}})
    mixed.config["model"] = {"parent": str(folder), "prompts": {"query": "seek ", "document": PAGE}}
    refusal(BadConfig, lambda: mixed.prepare("one"), "other prompts", "query: 'find '", "model.prompts: 'seek '", str(folder))
    mixed.config["model"]["prompts"]["query"] = FIND
    mixed.prepare("two")
    assert mixed.inputs("two").parent.folder.endswith("prepare/parent")
    del mixed.config["model"]["prompts"]["document"]
    mixed.prepare("three")
    assert mixed.inputs("three").parent.folder == str(folder)
