"""The corpus: one document for each id, whatever the shards repeat, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import store
from pipeline.dataset.corpus import CorpusReader, leaders
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import DOCUMENTS, SLICES, part_range
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData, MissingInput
from pipeline.run_inputs import InputShard
from tests.pipeline import ingesting
from tests.pipeline.conftest import make_texts
from tests.pipeline.ingesting import ingest, name_shard, tokenizer_plan
from tests.tiny import make_model


@pytest.mark.parametrize(
    ("keys", "first"),
    [([], []), ([3, 1, 2], [0, 1, 2]), ([3, 1, 3, 1, 3], [0, 1, 0, 1, 0]), ([0, 0, 2**64 - 1, 0], [0, 0, 2, 0])],
)
def test_the_first_row_of_a_key_leads(keys: list[int], first: list[int]) -> None:
    assert leaders(np.array(keys, np.uint64)).tolist() == first


def test_leaders_are_those_of_a_dictionary() -> None:
    keys = np.random.default_rng(0).integers(0, 2000, 5000).astype(np.uint64)
    known: dict[int, int] = {}
    assert leaders(keys).tolist() == [known.setdefault(key, place) for place, key in enumerate(keys.tolist())]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder)
    return TextTokenizer(folder)


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "bucket") if request.param == "local" else request.getfixturevalue("s3_root")


Row = tuple[str, str, str | None]
"""Id, text, locale."""


def ingest_documents(
    root: str, uri: str, rows: list[Row], tokenizer: TextTokenizer, generation: int = 0, **options: Any
) -> InputShard:
    shard = name_shard(uri, DOCUMENTS, tokenizer=tokenizer_plan(tokenizer), generation=generation)
    names = ("id", "text", "locale", "line")
    ingest(root, shard, [dict(zip(names, (*row, line), strict=True)) for line, row in enumerate(rows, 1)], tokenizer, **options)
    return shard


def rows(count: int, seed: int = 0, locale: str | None = None) -> list[Row]:
    return [(identifier, text, locale) for identifier, text in make_texts(count, seed)]


def read(reader: CorpusReader, count: int, **options: Any) -> list[dict[str, Any]]:
    """The documents of all parts."""
    return [row for index in range(count) for row in reader.read_part(index, count, **options).to_pylist()]


def test_parts_hold_each_winner_once_in_the_order_of_keys(root: str, tokenizer: TextTokenizer) -> None:
    """Repeats and conflicts inside a file, across files and across shards."""
    first = rows(500, locale="de")
    repeated = [*first[:100], ("doc-0003", "another text", "fr"), *rows(600, locale="en")[400:]]
    shards = [
        ingest_documents(root, f"{number}.jsonl", content, tokenizer, files=4)
        for number, content in enumerate([first[:300], repeated, first[200:]])
    ]
    reader = CorpusReader(root, shards)
    # The second shard comes before the third.
    expected = {identifier: (text, "de") for identifier, text, _ in first[:400]}
    expected |= {identifier: (text, "en") for identifier, text, _ in rows(600)[400:]}
    for count in (1, 4):
        found = read(reader, count, cut=lambda tokens: tokens)
        assert [row["key"] for row in found] == sorted(map(id_hash, expected))
        for row in found:
            text, locale = expected[row["id"]]
            assert (row["key"], row["document_hash"]) == (id_hash(row["id"]), normalized_hash(text))
            assert row["locale"] == locale
            assert row["document_tokens"] == tokenizer.encode([text], 64)[0].tolist()
    for index in range(4):
        low, high = part_range(index, 4)
        assert all(low <= key <= high for key in reader.read_part(index, 4)["key"].to_pylist())
    assert reader.text("doc-0003") == expected["doc-0003"][0]
    assert reader.text("doc-0599") == expected["doc-0599"][0]


def test_more_parts_than_slices(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    root, count = str(tmp_path / "bucket"), 4 * SLICES
    shard = ingest_documents(root, "corpus.jsonl", rows(3000), tokenizer)
    reader = CorpusReader(root, [shard])
    found = read(reader, count)
    assert [row["id"] for row in found] == [row["id"] for row in read(reader, 1)]
    assert len(found) == 3000
    longest = max(range(0, count, 4), key=lambda index: reader.read_part(index, count).num_rows)
    slice_rows = reader.read_part(longest // 4, SLICES)
    parts = [reader.read_part(longest + offset, count, cut=lambda tokens: tokens) for offset in range(4)]
    assert [key for part in parts for key in part["key"].to_pylist()] == slice_rows["key"].to_pylist()
    texts = dict(make_texts(3000))
    for row in (row for part in parts for row in part.to_pylist()):
        assert row["document_tokens"] == tokenizer.encode([texts[row["id"]]], 64)[0].tolist()


def test_a_later_generation_counts(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")
    old = ingest_documents(root, "a.jsonl", [("x", "old", None), ("y", "kept", None)], tokenizer, generation=1)
    new = ingest_documents(root, "b.jsonl", [("x", "new", None)], tokenizer, generation=2)
    reader = CorpusReader(root, [old, new])
    assert {row["id"]: row["document_hash"] for row in read(reader, 2)} == {
        "x": normalized_hash("new"),
        "y": normalized_hash("kept"),
    }
    assert [reader.text("x"), reader.text("y")] == ["new", "kept"]


def test_rows_without_tokens_keep_their_place(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")
    lost = {"doc-0001", "doc-0005"}
    shard = ingest_documents(root, "a.jsonl", rows(10), tokenizer, without_tokens=lost)
    found = read(CorpusReader(root, [shard]), 1, cut=lambda tokens: tokens)
    assert {row["id"] for row in found if row["document_tokens"] is None} == lost


def test_a_part_without_documents(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")
    reader = CorpusReader(root, [ingest_documents(root, "a.jsonl", [("x", "bake", None)], tokenizer)])
    sizes = [reader.read_part(index, 8, lambda tokens: tokens).num_rows for index in range(8)]
    assert sorted(sizes) == [0] * 7 + [1]


def test_what_is_not_there_is_refused(root: str, tokenizer: TextTokenizer) -> None:
    shard = ingest_documents(root, "a.jsonl", [("x", "bake", None)], tokenizer)
    with pytest.raises(BadData, match="no ingested shard"):
        CorpusReader(root, [shard]).text("y")
    store.delete_folder(store.join(root, "ingested"))
    with pytest.raises(MissingInput):
        CorpusReader(root, [shard]).read_part(0, 1)


def test_two_ids_with_one_hash_are_refused(tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingesting, "id_hash", len)
    root = str(tmp_path / "bucket")
    shards = [ingest_documents(root, "a.jsonl", [("aa", "same", None)], tokenizer)]
    shards += [ingest_documents(root, "b.jsonl", [("b", "other", None), ("bb", "same", None)], tokenizer, generation=1)]
    with pytest.raises(BadData, match="two ids have the same hash") as caught:
        CorpusReader(root, shards).read_part(0, 1)
    assert caught.value.value == ["aa", "bb"]
