"""`data.tasks`: files that belong to tasks, with columns of their own."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.local import demo
from infra.local.run import LocalRequest
from pipeline.commands.first_rows import check_first_rows
from pipeline.config import build_config, merge
from pipeline.contract import Stage
from pipeline.dataset.rows import normalized_hash
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.evaluation.holdout import read_holdout
from tests.pipeline.stages.planning import Bench, refusal, rows

REVIEWS = {"query": "{title}: {content}", "document": "{stars}", "label": "="}
STARS = ("1", "2")


def reviews(start: int, stop: int) -> list[dict[str, Any]]:
    """With a column `label` that does not mean ours: 0 would be no pair to train on."""
    return [
        {"title": f"title {number}", "content": f"content {number}", "stars": 1 + number % 2, "label": number % 2}
        for number in range(start, stop)
    ]


@pytest.fixture
def tasks(bench: Bench) -> Bench:
    """Rows of no task, and reviews, of which each is a row of two tasks."""
    bench.shard("pairs.jsonl", rows(0, 120))
    uri = bench.shard("reviews.jsonl", reviews(0, 120))
    bench.shard("corpus.jsonl", [{"id": str(number), "text": f"content {number}"} for number in range(40)], folder="corpus")
    bench.config["data"] |= {
        "corpus": [f"{bench.root}/corpus"],
        "holdout_by": "query",
        "tasks": {
            "stars": {"train": [uri], "columns": REVIEWS},
            "title": {"train": [uri], "columns": {"query": "title", "document": "content", "label": "=", "locale": "=en"}},
        },
    }
    bench.config["train"] |= {"batch_by": "task", "tasks": {"stars": {"classes": list(STARS)}}}
    return bench


def test_each_row_of_a_file_is_one_of_its_tasks_with_its_columns(tasks: Bench) -> None:
    tasks.start("one")
    found = tasks.rows("one")
    counts = Counter((row["task"], row["locale"]) for row in found)
    assert counts.keys() == {(None, None), ("stars", None), ("title", "en")}
    # Nothing is left out for its label, and `data.train`, whose folder has the file as well, does not read it again.
    held = [*tasks.rows("one", "holdout.arrow"), *tasks.rows("one", "classes.arrow")]
    assert Counter(row["task"] for row in [*found, *held]) == {None: 120, "stars": 120, "title": 120}
    queries = {normalized_hash(f"title {number}: content {number}"): STARS[number % 2] for number in range(120)}
    for row in found:
        if row["task"] == "stars":
            assert STARS[row["class"]] == queries.pop(row["query_hash"])
    titles = {row["query_hash"] for row in found if row["task"] == "title"}
    assert titles <= {normalized_hash(f"title {number}") for number in range(120)}
    assert [shard.setting for shard in tasks.inputs("one").shards] == [
        "data.train",
        "data.train",
        "data.tasks.stars.train",
        "data.tasks.title.train",
    ]


def test_a_text_that_two_tasks_ask_is_held_out_and_measured_in_both(tasks: Bench) -> None:
    [uri] = tasks.config["data"]["tasks"]["title"]["train"]
    maker = {"train": [uri], "columns": {"query": "title", "document": "made by {stars}", "label": "=", "locale": "=en"}}
    tasks.config["data"]["tasks"]["maker"] = maker
    tasks.start("one")
    lines = [row for row in tasks.rows("one", "holdout.arrow") if row["task"]]
    titles = {row["query_hash"] for row in lines}
    holdout = read_holdout(Path(tasks.paths("one").rows))
    assert Counter(filter(None, holdout.tasks)) == {"title": len(titles), "maker": len(titles)}
    assert tasks.plan("one").holdout.queries == len(holdout.queries)
    # Each has one document, and that of the other task is no wrong answer.
    for task in ("title", "maker"):
        own = np.flatnonzero(np.array(holdout.tasks) == task)
        assert np.isin(holdout.relevant.query, own).sum() == np.isin(holdout.known.query, own).sum() == len(own)


def test_a_task_comes_later_and_its_columns_are_part_of_what_its_rows_are(tasks: Bench) -> None:
    stars = tasks.config["data"]["tasks"].pop("stars")
    tasks.config["train"]["tasks"] = {}
    tasks.week("one")
    tasks.config["data"]["tasks"]["stars"] = stars
    tasks.config["train"]["tasks"] = {"stars": {"classes": list(STARS)}}
    tasks.week("two")
    assert {row["task"] for row in tasks.rows("two") if row["new"]} == {"stars"}
    tasks.shard("reviews.jsonl", reviews(0, 121))
    changed = {"data": {"tasks": {"stars": {"columns": {"query": "content"}}}}}
    refusal(BadConfig, lambda: tasks.prepare("three", changed), "run two", "data.tasks.stars.train", "'query': 'content'")


def test_what_a_task_names_is_checked_like_other_files(tasks: Bench) -> None:
    nothing = {"data": {"tasks": {"stars": {"train": [f"{tasks.root}/nothing/"]}}}}
    refusal(MissingInput, lambda: tasks.prepare("one", nothing), "data.tasks.stars.train", "nothing/")
    unknown = {"data": {"tasks": {"stars": {"columns": {"brand": "x"}}}}}
    refusal(BadConfig, lambda: tasks.prepare("two", unknown), "data.tasks.stars.columns.brand")
    elsewhere = {"data": {"tasks": {"stars": {"train": ["s3://elsewhere/reviews/"]}}}}
    assert ("data.tasks.stars.train", "s3://elsewhere/reviews/") in build_config(tasks.config, elsewhere).uris()
    first = [f"{tasks.root}/data/pairs.jsonl"]
    check_first_rows(build_config(tasks.config), first, [])
    wrong = build_config(tasks.config, {"data": {"tasks": {"stars": {"columns": {"document": "rating"}}}}})
    refusal(BadData, lambda: check_first_rows(wrong, first, []), "reviews.jsonl", "'rating'")
    refusal(BadConfig, lambda: build_config(tasks.config, {"data": {"tasks": {"a b": {"train": ["x"]}}}}), "a b")
    refusal(BadConfig, lambda: build_config(tasks.config, {"data": {"tasks": {"a": {"train": []}}}}), "data.tasks.a.train")


def test_bad_rows_of_a_task_are_counted_once_where_another_task_has_the_file(bench: Bench) -> None:
    lines = [{"id": f"row{number}", "query": "query", "one": f"one {number}", "two": f"one {number}"} for number in range(100)]
    # An id with two documents, in the columns of one task alone.
    uri = bench.shard("both.jsonl", [*lines, {**lines[0], "one": "another"}])
    bench.config["data"] |= {
        "train": [],
        "max_bad_fraction": 0,
        "tasks": {name: {"train": [uri], "columns": {"document": name}} for name in ("one", "two")},
    }
    bench.prepare("one")
    bench.ingest("one")
    refusal(BadData, lambda: bench.stage(Stage.PLAN, "one"), "are bad: 1 of 202", "id 'row0' has another document")


def test_the_demo_trains_both_tasks_on_the_same_rows(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("builtins", *demo.PACKAGES)
    names = [f"{packages[number % len(packages)]}.name{number}" for number in range(700)]
    monkeypatch.setattr(demo, "read_pairs", lambda: [demo.Pair(name, f"query {name}", f"document {name}") for name in names])
    for week in demo.weekly_shards(tmp_path / "demo"):
        lines = gzip.decompress(week.read_bytes()).splitlines()
        bench.shard(week.name, lines, folder="docstrings")
        bench.shard(week.name, gzip.decompress((tmp_path / "demo/corpus" / week.name).read_bytes()).splitlines(), folder="corpus")
    del bench.config["data"]["train"]
    bench.config = merge(bench.config, demo.two_tasks(f"{bench.root}/docstrings/", f"{bench.root}/corpus/"))
    bench.start("one")
    found = bench.rows("one")
    held = Counter(row["task"] for name in ("holdout.arrow", "classes.arrow") for row in bench.rows("one", name))
    labelled = sum(demo._row(pair)["labelled"] for pair in demo.read_pairs())
    assert Counter(row["task"] for row in found) + held == {"search": 700, "package": labelled}
    assert {row["class"] for row in found if row["task"] == "package"} == {*range(len(packages))}
    # A fraction of the steps, which cost a fraction of the tokens: the demo is about the search.
    steps = bench.plan("one").train.strata
    assert 0 < steps["package"] < steps["search"] / 3


def test_a_local_run_finds_files_of_tasks_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: Bench
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks.shard("reviews.jsonl", reviews(0, 10), folder="here")
    (tmp_path / "reviews.jsonl").write_bytes((Path(tasks.root) / "here" / "reviews.jsonl").read_bytes())
    settings = ['data.tasks={stars: {train: [reviews.jsonl], columns: {query: content, document: "{stars}"}}}']
    request = LocalRequest.of(tmp_path / "state", settings=settings, initial=str(tasks.model))
    assert request.config.data.training["data.tasks.stars.train"] == (
        (str(tmp_path / "reviews.jsonl"),),
        {"query": "content", "document": "{stars}", "task": "=stars"},
    )
    assert not request.demo
