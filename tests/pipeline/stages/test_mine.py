"""Mined negatives: against a search written out in numpy, row by row, with the published model and its published embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import store
from pipeline.contract import Stage, StageResult
from pipeline.dataset.ingested import IngestedShard
from pipeline.dataset.parts import read_part
from pipeline.dataset.rows import normalized_hash
from pipeline.errors import BadConfig
from pipeline.stages import mine
from tests.chain.year_checks import Outsider
from tests.pipeline.stages.planning import Bench, held_out, refusal
from tests.tiny import WORDS, make_model

MINE = {"count": 3, "first": 2, "last": 9, "margin": 0.02}
QUERY_LENGTH, LENGTH = 12, 40


def items(start: int, stop: int, words: int = 2) -> list[dict[str, Any]]:
    """Rows of few words, so that many documents are close to each query; every third query has a second relevant document."""
    random = np.random.default_rng(start)
    texts = [
        " ".join([*random.choice(WORDS[:12], 4), WORDS[number % 100], WORDS[number // 100]]) for number in range(start, stop)
    ]
    return [
        {"id": f"row{number}", "query": " ".join(text.split()[:words]), "document": text}
        for number, text in enumerate(texts, start)
    ]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return two_weeks(tmp_path)


def two_weeks(tmp_path: Path, holdout_by: str = "document", copies: int = 0) -> Bench:
    """Two weeks: the first is published with its embeddings, the second has its rows.

    Args:
        copies: of each document in a corpus; 0: there is none but the documents of rows.
    """
    make_model(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    bench = Bench(str(tmp_path / "bucket"), tmp_path / "scratch", tmp_path / "model")
    bench.config["nodes"] = 1
    bench.config["data"]["holdout_by"] = holdout_by
    bench.config["device"]["ranks_per_node"] = 1
    bench.config["train"] |= {"negatives": 3, "mine": MINE, "steps": 2, "validation_queries": 1}
    bench.shard("one.jsonl", items(0, 90))
    if copies:
        lines = [{"id": f"{row['id']}-{n}", "text": row["document"]} for row in items(0, 90) for n in range(copies)]
        bench.config["data"]["corpus"] = [bench.shard("corpus.jsonl", lines, folder="corpus")]
    first(bench)
    bench.shard("two.jsonl", items(90, 130))
    return bench


def first(bench: Bench) -> None:
    """The first week, from the initial model: nothing is published, so nothing can be mined with."""
    bench.start("one")
    assert bench.missing("one").mine_children == 0
    for stage in (Stage.TRAIN, Stage.EVALUATE):
        bench.stage(stage, "one")
    bench.stage(Stage.PREPARE, "one")
    bench.stage(Stage.PLAN, "one")
    for child in range(3):
        bench.stage(Stage.EMBED, "one", child)
    bench.stage(Stage.PUBLISH, "one")
    bench.config["model"] = {}


def mined(bench: Bench, run: str = "two") -> dict[str, list[int]]:
    """Id of each row of the new shards -> the hashes of its mined negatives."""
    found = {}
    for shard in bench.missing(run).to_mine:
        ingested = IngestedShard(bench.root, shard)
        for number, file in enumerate(ingested.profile.files):
            both = zip(ingested.facts(number, 0, file.rows), ingested.mined(number, 0, file.rows), strict=True)
            for facts, negatives in both:
                found |= dict(zip(facts["id"].to_pylist(), negatives["negative_hashes"].to_pylist(), strict=True))
    return found


def wanted(bench: Bench, words: int = 2, query_length: int = QUERY_LENGTH, mine: dict[str, Any] = MINE) -> dict[str, list[int]]:
    """The same, found one row at a time with sentence-transformers and the published parts."""
    week = items(90, 130, words)
    model = Outsider(Path(bench.paths("one").model), query_length, LENGTH)
    queries, own = model.queries([row["query"] for row in week]), model.documents([row["document"] for row in week])
    ids, vectors = [], []
    for part in store.read_json(bench.paths("one").embed_manifest)["parts"]:
        for names, embeddings, _ in read_part(Path(part["uri"])):
            ids += names
            vectors.append(embeddings.astype(np.float32))
    published = np.concatenate(vectors)
    known = {row["id"]: row for row in items(0, 90)}
    relevant = {(row["query"], row["document"]) for row in items(0, 130)}
    found = {}
    for row, query, document in zip(week, queries, own, strict=True):
        scores = published @ query
        ranked = [known[ids[place].partition("-")[0]] for place in np.argsort(-scores, kind="stable")]
        ranked = [other for place, other in enumerate(ranked) if other not in ranked[:place]]
        best = dict(zip((name.partition("-")[0] for name in ids), scores.tolist(), strict=True))
        others = [other for other in ranked if (row["query"], other["document"]) not in relevant]
        limit = float(query @ document) * (1 - mine["margin"])
        chosen = [
            other for other in others[mine["first"] - 1 : mine["last"]] if best[other["id"]] <= limit and not held_out(other)
        ]
        found[row["id"]] = [normalized_hash(other["document"]) for other in chosen[: mine["count"]]]
    return found


def test_mined_negatives_are_those_of_a_search_written_out(bench: Bench) -> None:
    assert bench.prepare("two").metrics["mine_children"] == 1
    bench.ingest("two")
    output = bench.stage(Stage.MINE, "two")
    assert output is not None
    assert output.metrics["shards"] == 1
    found, expected = mined(bench), wanted(bench)
    assert found == expected
    # The case has rows of every kind: with all, with some and, because of the margin, with fewer than there are in the ranks.
    assert {len(each) for each in expected.values()} >= {1, 3}
    assert StageResult.from_json(store.read_bytes(bench.paths("two").result(Stage.MINE))).fingerprint == ""


def test_there_may_be_fewer_documents_than_ranks(bench: Bench) -> None:
    bench.config["train"]["mine"] = mine = {"count": 80, "first": 30, "last": 1000, "margin": 0.02}
    bench.prepare("two")
    bench.ingest("two")
    bench.stage(Stage.MINE, "two")
    assert mined(bench) == wanted(bench, mine=mine)


@pytest.mark.parametrize("size", [16, 32])
def test_a_head_that_is_new_is_not_what_is_mined_with(bench: Bench, size: int) -> None:
    """The published vectors have none. Their size is 32."""
    bench.config["model"] = {"head": [{"out": size}]}
    assert bench.prepare("two").metrics["mine_children"] == 1
    bench.ingest("two")
    bench.stage(Stage.MINE, "two")
    assert mined(bench) == wanted(bench)


def test_queries_are_cut_as_their_task_says(bench: Bench) -> None:
    bench.shard("two.jsonl", [{**row, "task": "search"} for row in items(90, 130, 4)])
    bench.config["train"] |= {"batch_by": "task", "tasks": {"search": {"query_length": 5}, "other": {"query_length": 4}}}
    assert bench.prepare("two").metrics["mine_children"] == 1
    bench.ingest("two")
    bench.stage(Stage.MINE, "two")
    assert mined(bench) == wanted(bench, 4, 5)
    assert wanted(bench, 4, 5) != wanted(bench, 4)


def test_training_rows_have_them_behind_their_own(bench: Bench) -> None:
    own = items(90, 130)
    own[3]["negatives"] = ["a lamp of its own"]
    bench.shard("two.jsonl", own)
    bench.prepare("two")
    bench.ingest("two")
    bench.stage(Stage.MINE, "two")
    bench.stage(Stage.PLAN, "two")
    negatives, texts = mined(bench), {normalized_hash(row["document"]): row["document"] for row in items(0, 90)}
    of_line = {row["line"]: row for row in bench.rows("two") if row["shard"] == 0}
    assert of_line
    for number, row in enumerate(own, 1):
        if number not in of_line:
            continue
        planned = [of_line[number][f"negative_{place}_hash"] for place in range(3)]
        expected = [normalized_hash(text) for text in row.get("negatives", [])] + negatives[row["id"]]
        assert planned == (expected + [0] * 3)[:3]
        for place, value in enumerate(planned):
            assert bool(of_line[number][f"negative_{place}_tokens"]) == (value != 0)
            assert value == 0 or value in texts or place == 0
    # What came with the first week was mined for nobody.
    assert not any(row["negative_0_hash"] for row in bench.rows("two") if row["shard"])
    bench.stage(Stage.TRAIN, "two")
    assert store.exists(bench.paths("two").result(Stage.TRAIN))


def test_nothing_is_mined_for_rows_that_are_classified_or_not_relevant(tmp_path: Path) -> None:
    bench, week = two_weeks(tmp_path, "query"), items(90, 130)
    for row in week[:10]:
        row["label"] = 0
    for row in week[10:20]:
        row["task"] = "shade"
    bench.shard("two.jsonl", week)
    corpus = [{"id": row["id"], "text": row["document"]} for row in items(0, 90)]
    bench.config["data"]["corpus"] = [bench.shard("corpus.jsonl", corpus, folder="corpus")]
    bench.config["train"] |= {"batch_by": "task", "tasks": {"shade": {"classes": [row["document"] for row in week[10:20]]}}}
    bench.prepare("two")
    bench.ingest("two")
    bench.stage(Stage.MINE, "two")
    found = mined(bench)
    assert len(found) == len(week)
    assert {row["id"] for row in week[:20]} & {name for name, negatives in found.items() if negatives} == set()
    assert any(found[row["id"]] for row in week[20:])


def test_small_shards_are_mined_in_one_search(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    week = items(90, 130)
    bench.shard("two.jsonl", week[:25])
    bench.shard("three.jsonl", week[25:])
    bench.config["embed"] = bench.config.get("embed", {}) | {"children": 1}
    assert bench.prepare("two").metrics["mine_children"] == 1
    bench.ingest("two")
    read, reads = mine.read_batches, list[Path]()
    monkeypatch.setattr(mine, "read_batches", lambda path, columns: reads.append(path) or read(path, columns))
    bench.stage(Stage.MINE, "two")
    assert mined(bench) == wanted(bench)
    assert len(reads) == len(set(reads)) == len(store.read_json(bench.paths("one").embed_manifest)["parts"])


def test_a_text_under_several_ids_is_mined_once(tmp_path: Path) -> None:
    bench = two_weeks(tmp_path, copies=3)
    bench.prepare("two")
    bench.ingest("two")
    bench.stage(Stage.MINE, "two")
    found = mined(bench)
    assert found == wanted(bench)
    assert any(len(each) > 1 for each in found.values())
    assert all(len({*each}) == len(each) for each in found.values())


def test_a_shard_is_mined_once_and_for_runs_to_come(bench: Bench) -> None:
    bench.shard("three.jsonl", items(130, 150))
    assert bench.prepare("two").metrics["mine_children"] == 2
    bench.ingest("two")
    assert bench.stage(Stage.MINE, "two", 0) is None
    assert bench.prepare("again").metrics["mine_children"] == 1
    assert bench.stage(Stage.MINE, "two", 1) is not None
    assert bench.stage(Stage.MINE, "two", 0) is not None
    assert bench.prepare("again").metrics["mine_children"] == 0
    bench.stage(Stage.PLAN, "again")
    assert any(row["negative_0_hash"] for row in bench.rows("again"))
    # With other ranks they are others.
    assert bench.prepare("other", {"train": {"mine": {**MINE, "last": 5}}}).metrics["mine_children"] == 2


def test_a_deletion_removes_what_is_mined(bench: Bench) -> None:
    bench.start("two")
    bench.stage(Stage.MINE, "two")
    [shard] = bench.missing("two").to_mine
    assert IngestedShard(bench.root, shard).mined_profile
    store.write_bytes(store.join(bench.root, "delete", "ids.txt"), b"row7\n")
    execution = {"data": {"delete": [store.join(bench.root, "delete")]}}
    bench.prepare("three", execution)
    bench.ingest("three")
    assert IngestedShard(bench.root, shard).mined_profile is None
    assert not [info.uri for info in store.list_objects(store.join(bench.root, "mined"))]
    bench.prepare("three", execution)
    bench.stage(Stage.MINE, "three")
    assert normalized_hash(items(0, 90)[7]["document"]) not in {
        value for each in mined(bench, "three").values() for value in each
    }


def test_without_a_model_to_mine_with_the_run_goes_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    # With a prompt of its own the run has other tokens than the published model.
    assert bench.prepare("two", {"model": {"prompts": {"query": "ba "}}}).metrics["mine_children"] == 0
    assert "no negatives are mined" in caplog.text
    bench.ingest("two")
    bench.stage(Stage.PLAN, "two")
    assert not any(row["negative_0_hash"] for row in bench.rows("two"))


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"negatives": 0, "mine": MINE}, "negatives = 0"),
        ({"negatives": 1, "mine": {"first": 5, "last": 4}}, "first = 5 is behind last = 4"),
        ({"negatives": 1, "mine": {"margin": 1.5}}, "margin"),
    ],
)
def test_settings_that_contradict_themselves(bench: Bench, train: dict[str, Any], words: str) -> None:
    refusal(BadConfig, lambda: bench.prepare("bad", {"train": train}), words)
