"""Which corpus files count, in each mode."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipeline import store
from pipeline.dataset.generations import list_corpus
from pipeline.errors import MissingInput


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "corpus") if request.param == "local" else f"{request.getfixturevalue('s3_root')}/corpus"


def fill(root: str, *names: str) -> None:
    for name in names:
        store.write_bytes(f"{root}/{name}", b"{}\n")


def listed(root: str, mode: str) -> list[tuple[str, int]]:
    return [(shard.uri.removeprefix(f"{root}/"), generation) for shard, generation in list_corpus([f"{root}/"], mode)]


def test_files_are_one_generation(root: str) -> None:
    fill(root, "b.jsonl", "a/c.jsonl")
    assert listed(root, "files") == [("a/c.jsonl", 0), ("b.jsonl", 0)]


def test_the_newest_complete_snapshot_counts(root: str, caplog: pytest.LogCaptureFixture) -> None:
    fill(root, "2026-01/a.jsonl", "2026-01/_SUCCESS", "2026-02/a.jsonl", "2026-02/b.jsonl", "2026-02/_SUCCESS")
    assert listed(root, "snapshots") == [("2026-02/a.jsonl", 0), ("2026-02/b.jsonl", 0)]
    fill(root, "2026-03/a.jsonl")
    with caplog.at_level(logging.WARNING):
        assert [name for name, _ in listed(root, "snapshots")] == ["2026-02/a.jsonl", "2026-02/b.jsonl"]
    assert "using snapshot 2026-02; 2026-03 has no _SUCCESS yet" in caplog.text


def test_no_snapshot_is_complete(root: str) -> None:
    fill(root, "2026-01/a.jsonl")
    with pytest.raises(MissingInput, match="no snapshot of the corpus is complete") as caught:
        listed(root, "snapshots")
    assert "2026-01" in caught.value.value


def test_deltas_are_generations_in_the_order_of_their_names(root: str) -> None:
    fill(root, "2026-02/b.jsonl", "2026-01/x.jsonl", "2026-01/a.jsonl", "2026-03.jsonl")
    assert listed(root, "deltas") == [
        ("2026-01/a.jsonl", 0),
        ("2026-01/x.jsonl", 0),
        ("2026-02/b.jsonl", 1),
        ("2026-03.jsonl", 2),
    ]


def test_files_that_are_named_one_by_one(tmp_path: Path) -> None:
    fill(str(tmp_path), "base.jsonl", "update.jsonl")
    found = list_corpus([str(tmp_path / "update.jsonl"), str(tmp_path / "base.jsonl")], "deltas")
    assert [generation for _, generation in found] == [0, 1]
