"""`data.holdout`: files that are held out as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import build_config
from pipeline.contract import Stage
from pipeline.dataset.rows import normalized_hash
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.reference import write_reference
from tests.pipeline.stages.planning import Bench, held_out, refusal, rows

FRACTION = 0.01


def hashes(lines: list[dict[str, Any]], column: str = "document") -> set[int]:
    return {normalized_hash(line[column]) for line in lines}


@pytest.fixture
def own(bench: Bench) -> Bench:
    """Training rows, and 30 rows in a file of their own, of which the first ten are training rows, too."""
    bench.shard("train.jsonl", rows(0, 120))
    test = bench.shard("test.jsonl", rows(110, 140), folder="test")
    bench.config["data"] |= {"holdout": [test], "holdout_fraction": FRACTION}
    return bench


@pytest.mark.parametrize("by", ["document", "query", "group"])
def test_all_rows_of_the_files_are_held_out_and_their_texts_are_not_trained_on(own: Bench, by: str) -> None:
    own.config["data"]["holdout_by"] = by
    own.start("one")
    found, held = ({row["document_hash"] for row in own.rows("one", name)} for name in ("train.arrow", "holdout.arrow"))
    assert hashes(rows(110, 140)) <= held
    assert not found & hashes(rows(110, 140))
    by_hash = [row for row in rows(0, 110) if held_out({"document": row["query" if by == "query" else "document"]}, FRACTION)]
    assert held == hashes(rows(110, 140)) | hashes(by_hash)
    assert found == hashes(rows(0, 110)) - hashes(by_hash)
    plan = own.plan("one")
    assert plan.train.rows == len(found)
    assert {shard.uri.rpartition("/")[2]: shard.holdout_rows for shard in plan.train.new}["test.jsonl"] == 30


def test_a_row_of_the_files_that_comes_again_for_training_is_left_out_every_week(own: Bench) -> None:
    own.week("one")
    own.shard("second.jsonl", [*rows(120, 125), *rows(200, 260)])
    own.config["data"]["replay_fraction"] = 50
    own.week("two")
    found = {row["document_hash"] for row in own.rows("two")}
    assert not found & hashes(rows(110, 140))
    assert found & hashes(rows(200, 260))
    assert found & hashes(rows(0, 110))
    assert hashes(rows(110, 140)) <= {row["document_hash"] for row in own.rows("two", "holdout.arrow")}


@pytest.mark.parametrize("by", ["document", "query"])
def test_their_documents_are_negatives_only_where_documents_are_not_held_out(own: Bench, by: str) -> None:
    """What a model was trained on is held out no more."""
    test = rows(110, 140)
    own.config["data"]["holdout_by"] = by
    own.config["train"] = {**own.config["train"], "negatives": 1}
    lines = [{**row, "negatives": [test[number % 30]["document"]]} for number, row in enumerate(rows(200, 300))]
    own.shard("with-negatives.jsonl", lines)
    own.week("one")
    taken = {row["negative_0_hash"] for row in own.rows("one")}
    assert (taken & hashes(test) == set()) == (by == "document")
    own.shard("second.jsonl", rows(300, 340))
    own.start("two")
    assert hashes(test) <= {row["document_hash"] for row in own.rows("two", "holdout.arrow")}


def test_no_row_is_left_to_train_on(own: Bench) -> None:
    own.config["data"]["holdout"] = [own.shard("train.jsonl", rows(0, 120), folder="test")]
    own.prepare("one")
    own.ingest("one")
    refusal(BadData, lambda: own.stage(Stage.PLAN, "one"), "no row to train on", "data.holdout", "add rows")


def test_what_the_published_model_was_trained_on_does_not_count(own: Bench) -> None:
    test = own.config["data"].pop("holdout")
    own.week("one")
    trained = {row["document_hash"] for row in own.rows("one")}
    assert trained & hashes(rows(110, 120))
    own.config["data"] |= {"holdout": test, "require_new": False}
    own.shard("second.jsonl", rows(200, 220))
    own.start("two")
    held = {row["document_hash"] for row in own.rows("two", "holdout.arrow")}
    assert not held & trained
    assert held >= hashes(rows(120, 140))
    assert not {row["document_hash"] for row in own.rows("two")} & hashes(rows(110, 140))


def test_the_reference_does_not_outlast_its_files(own: Bench, caplog: pytest.LogCaptureFixture) -> None:
    own.week("one")
    write_reference(own.root, "current", "one")
    keys = tuple((row["query_hash"], row["locale"]) for row in own.rows("one", "holdout.arrow"))
    QueryValues(keys, {"ndcg@10": np.full(len(keys), 0.5)}).write(Path(own.paths("one").query_values))
    own.config["data"]["holdout"] += [own.shard("more.jsonl", rows(300, 310), folder="more")]
    own.shard("second.jsonl", rows(200, 220))
    assert own.week("two").reference == "one"
    # Then rows of the first test file are trained on.
    del own.config["data"]["holdout"][0]
    own.shard("third.jsonl", rows(130, 140))
    assert own.week("three").reference is None
    assert "test files (data.holdout) that are not listed any more; no budget is kept" in caplog.text
    assert {row["document_hash"] for row in own.rows("three")} & hashes(rows(130, 140))


def test_other_documents_of_a_held_out_query_are_known_to_be_relevant(own: Bench) -> None:
    [query] = {row["query"] for row in rows(130, 131)}
    lines = [{"id": "other", "query": query, "document": "another answer"}]
    assert not held_out(lines[0], FRACTION)
    own.shard("more.jsonl", lines)
    # A few of many documents are distractors, and so only a few slices of the rows would be read.
    corpus = [{"id": str(number), "text": f"text {number}"} for number in range(400)]
    own.config["data"]["corpus"] = [own.shard("corpus.jsonl", corpus, folder="corpus")]
    own.start("one")
    known = {(row["query_hash"], row["document_hash"]) for row in own.rows("one", "known.arrow")}
    assert (normalized_hash(query), normalized_hash("another answer")) in known


def test_a_task_with_classes_has_files_of_its_own(bench: Bench) -> None:
    def reviews(start: int, stop: int) -> list[dict[str, Any]]:
        return [{"content": f"content {number}", "stars": 1 + number % 2} for number in range(start, stop)]

    bench.shard("pairs.jsonl", rows(0, 60))
    train, test = (
        bench.shard(f"{part}.jsonl", lines, folder=part) for part, lines in (("train", reviews(0, 50)), ("test", reviews(50, 80)))
    )
    bench.config["data"] |= {
        "corpus": [bench.shard("corpus.jsonl", [{"id": "1", "text": "content"}], folder="corpus")],
        "holdout": [bench.shard("pairs.jsonl", rows(60, 80), folder="test")],
        "holdout_by": "query",
        "holdout_fraction": FRACTION,
        "tasks": {"stars": {"train": [train], "holdout": [test], "columns": {"query": "content", "document": "{stars}"}}},
    }
    bench.config["train"] |= {"batch_by": "task", "tasks": {"stars": {"classes": ["1", "2"]}}}
    bench.start("one")
    held = {row["query_hash"]: row["class"] for row in bench.rows("one", "classes.arrow")}
    for number in range(50, 80):
        assert held[normalized_hash(f"content {number}")] == number % 2
    trained = {row["query_hash"] for row in bench.rows("one") if row["task"] == "stars"}
    assert trained == {normalized_hash(f"content {number}") for number in range(50)} - held.keys()


def test_the_files_are_checked_like_others(own: Bench) -> None:
    config = build_config(own.config, {"data": {"holdout": ["s3://elsewhere/test/"]}})
    assert ("data.holdout", "s3://elsewhere/test/") in config.uris()
    nothing = {"data": {"holdout": [f"{own.root}/nothing/"]}}
    refusal(MissingInput, lambda: own.prepare("one", nothing), "data.holdout", "nothing/")
    task = {"train": own.config["data"]["train"], "holdout": own.config["data"]["holdout"], "columns": {"brand": "x"}}
    refusal(BadConfig, lambda: own.prepare("two", {"data": {"tasks": {"a": task}}}), "data.tasks.a.columns.brand")
