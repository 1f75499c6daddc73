"""Counting documents: parts, repeated ids, ids with two documents, and what is read for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.dataset import selection
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.corpus_plan import count_documents
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.ingested import DOCUMENTS, IngestedShard
from pipeline.dataset.records import BadRow
from pipeline.dataset.tokens import TextTokenizer
from tests.pipeline.ingesting import ingest, name_shard, tokenizer_plan
from tests.tiny import make_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder / "model")
    return TextTokenizer(folder / "model")


def shards_of(root: Path | str, tokenizer: TextTokenizer, *texts: dict[str, str], **more: Any) -> list[IngestedShard]:
    """A shard of two files for each dict of id -> text; `more`: generations."""
    shards = []
    for number, found in enumerate(texts):
        generation = more.get("generations", [0] * len(texts))[number]
        shard = name_shard(f"shard-{number}", DOCUMENTS, tokenizer=tokenizer_plan(tokenizer), generation=generation)
        rows = [{"id": key.strip(), "text": text, "line": line} for line, (key, text) in enumerate(found.items(), 1)]
        ingest(str(root), shard, rows, tokenizer, files=2)
        shards.append(IngestedShard(str(root), shard))
    return shards


def test_repeated_ids_count_once(tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {f"doc-{number}": f"text {number}" for number in range(200)}
    second = {f"doc-{number}": f"text {number if number % 10 else -1}" for number in range(150, 300)}
    shards = shards_of(tmp_path, tokenizer, first, second)
    refused: list[BadRow] = []
    found = count_documents(shards, 50, 1, tmp_path / "cache", refused.append, print)
    assert (len(found.parts), found.digest.count) == (8, 300)
    reader = CorpusReader(str(tmp_path), [shard.shard for shard in shards])
    for index, part in enumerate(found.parts):
        keys = reader.read_part(index, 8)["key"].to_numpy()
        assert (part.rows, part.ids) == (len(keys), str(IdDigest.of(keys)))
    assert found.conflicts == {1: 5}
    assert {row.reason for row in refused} == {
        f"id 'doc-{number}' has another document at shard-0:{number + 1}" for number in range(150, 200, 10)
    }
    assert {row.at for row in refused} == {f"shard-1:{number - 149}" for number in range(150, 200, 10)}
    # In groups of a few rows all is the same.
    monkeypatch.setattr(selection, "GROUP_ROWS", 20)
    again: list[BadRow] = []
    assert count_documents(shards, 50, 1, tmp_path / "cache", again.append, print) == found
    assert sorted(again) == sorted(refused)


def test_a_part_may_be_less_than_a_slice(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    shards = shards_of(tmp_path, tokenizer, {f"doc-{number}": f"text {number}" for number in range(3000)})
    found = count_documents(shards, 1, 1, tmp_path / "cache", pytest.fail, print)
    assert len(found.parts) == 4096
    assert sum(part.rows for part in found.parts) == 3000


def test_a_later_generation_replaces_without_a_refusal(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    texts = [{"a": "one", "b": "one"}, {"a": "two"}, {"a": "three", "c": "one"}]
    shards = shards_of(tmp_path, tokenizer, *texts, generations=[0, 1, 1])
    refused: list[BadRow] = []
    found = count_documents(shards, 50, 1, tmp_path / "cache", refused.append, print)
    assert found.digest.count == 3
    assert [(row.at, row.reason) for row in refused] == [("shard-2:1", "id 'a' has another document at shard-1:1")]


def test_a_tombstone_removes_the_document_of_earlier_generations(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    texts = [{"a": "one", "b": "one", "c": "one"}, {"a": "", "b": ""}, {"b": "again", "d": "new"}, {"e": "", "d ": ""}]
    shards = shards_of(tmp_path, tokenizer, *texts, generations=[0, 1, 2, 2])
    refused: list[BadRow] = []
    found = count_documents(shards, 50, 1, tmp_path / "cache", refused.append, print)
    assert (found.digest.count, found.removed) == (3, 2)
    assert [row.at for row in refused] == ["shard-3:2"]  # one generation both has and removes d
    documents = CorpusReader(str(tmp_path), [shard.shard for shard in shards]).read_part(0, 1, lambda tokens: tokens)
    assert sorted(documents["id"].to_pylist()) == ["b", "c", "d"]
    assert str(IdDigest.of(documents["key"].to_numpy())) == str(found.digest)
    assert all(documents["document_tokens"].to_pylist())


def test_equal_documents_take_their_hashes_alone(s3_root: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {f"doc-{number}": f"text {number}" for number in range(400)}
    shards = [IngestedShard(s3_root, one.shard) for one in shards_of(s3_root, tokenizer, same, same, {"doc-0": "another"})]
    ranges: list[str] = []
    read = store.read_range
    monkeypatch.setattr(store, "read_range", lambda uri, *limits: ranges.append(uri) or read(uri, *limits))
    downloads: list[str] = []
    fetch = store.download
    monkeypatch.setattr(store, "download", lambda uri, path, **size: downloads.append(uri) or fetch(uri, path, **size))
    monkeypatch.setattr(selection, "GROUP_ROWS", 50)
    with tempfile.TemporaryDirectory() as cache:
        found = count_documents(shards, 50, 1, Path(cache), lambda _: None, print)
    assert (found.digest.count, found.conflicts) == (400, {2: 1})
    # Facts: of the row that contradicts another one, and of that one.
    assert len([uri for uri in ranges if "/facts-" in uri]) == 2
    # Two files of each shard; the last one's first file has no row.
    assert len(downloads) == len(set(downloads)) == 5
