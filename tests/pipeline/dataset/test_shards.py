"""Finding, hashing and scanning shards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import store
from pipeline.dataset import shards
from pipeline.dataset.ids import id_hash
from pipeline.dataset.records import BadRow
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.shards import (
    InputFile,
    distinct_documents,
    find_shards,
    hash_shards,
    locate_conflicts,
    scan_corpus,
    scan_training,
)
from pipeline.errors import BadConfig, MissingInput


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def files_of(*paths: Path) -> list[InputFile]:
    return hash_shards([store.ObjectInfo(str(path), path.stat().st_size) for path in paths], lambda done: None)


def test_files_and_folders_each_once_in_order(tmp_path: Path) -> None:
    late = write(tmp_path / "data" / "week-2" / "b.jsonl")
    early = write(tmp_path / "data" / "week-1" / "a.jsonl.gz")
    write(tmp_path / "data" / "README.md")
    write(tmp_path / "data" / "week-2" / "_temporary" / "c.jsonl")
    write(tmp_path / "data" / "week-2" / ".c.jsonl")
    found = find_shards([str(late), str(tmp_path / "data")], "data.train")
    assert [info.uri for info in found] == [str(early), str(late)]


def test_a_folder_may_be_named_like_a_shard(tmp_path: Path) -> None:
    part = write(tmp_path / "rows.parquet" / "part-0.parquet")
    assert [info.uri for info in find_shards([str(tmp_path / "rows.parquet")], "data.train")] == [str(part)]


def test_object_storage_is_listed_alike(tmp_path: Path, s3_root: str) -> None:
    for key in ("data/week-1/a.jsonl", "data/week-1/_SUCCESS", "data-of-others/b.jsonl"):
        store.write_bytes(store.join(s3_root, key), b"")
    for uri in ("data", "data/", "data/week-1/a.jsonl"):
        assert [info.uri for info in find_shards([f"{s3_root}/{uri}"], "x")] == [f"{s3_root}/data/week-1/a.jsonl"]
    for uri in (f"{s3_root}/nothing", "s3://no-such-bucket-here/data"):
        with pytest.raises(MissingInput):
            find_shards([uri], "data.train")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "absent.jsonl", "empty"):
        with pytest.raises(MissingInput, match=rf"data\.corpus: .*{name}"):
            find_shards([str(tmp_path / name)], "data.corpus")
    write(tmp_path / "rows.txt")
    with pytest.raises(BadConfig, match=r"rows\.txt"):
        find_shards([str(tmp_path / "rows.txt")], "data.train")


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.jsonl", {"id": 1}), write(tmp_path / "2.jsonl", {"id": 2}, {"id": 3})
    beats: list[int] = []
    files = hash_shards([store.ObjectInfo(str(path), 0) for path in (one, two)], beats.append)
    assert [file.sha256 for file in files] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, two)]
    assert [file.size for file in files] == [path.stat().st_size for path in (one, two)]
    assert beats[-1] == one.stat().st_size + two.stat().st_size


def test_a_scan_counts_and_hashes_the_good_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "1.jsonl",
        {"id": "a", "query": "q", "document": "One"},
        {"id": "b", "query": "q"},
        {"id": "c", "query": "q", "document": "two", "label": 0},
    )
    refused: list[BadRow] = []
    (scan,) = scan_training(files_of(path), {}, refused.append, lambda done: None)
    assert (scan.rows, scan.bad_rows) == (2, 1)
    assert scan.documents.tolist() == [normalized_hash("one"), normalized_hash("two")]
    assert scan.positive.tolist() == [True, False]
    assert [row.at for row in refused] == [f"{path}:2"]
    assert scan.ids.tolist() == [id_hash("a"), id_hash("c")]


def test_a_shard_without_rows(tmp_path: Path) -> None:
    (scan,) = scan_training(files_of(write(tmp_path / "1.jsonl")), {}, lambda row: None, lambda done: None)
    assert (scan.rows, scan.bad_rows) == (0, 0)


def test_repeated_documents_and_ids_with_two_documents_are_told_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", {"id": "a", "text": "t"}, {"id": "b", "text": "t"}, {"id": "c", "text": "t"})
    two = write(
        tmp_path / "2.jsonl",
        {"id": 5, "text": "T "},
        {"id": "a", "text": " T"},
        {"id": "5", "text": "t"},
        {"id": "b", "text": "u"},
    )
    files = files_of(one, two)
    scans = scan_corpus(files, {}, [].append, lambda done: None)
    distinct, conflicts = distinct_documents(scans)
    assert [rows.tolist() for rows in distinct] == [[True] * 3, [True, False, False, False]]
    assert [rows.tolist() for rows in conflicts] == [[False] * 3, [False, False, False, True]]
    hashes = np.array([id_hash("b")], np.uint64)
    (found,) = locate_conflicts(files, "corpus", {}, conflicts, hashes, lambda done: None)
    assert found == (1, 3, BadRow(f"{two}:4", f"id 'b' has another document at {one}:2", "b"))


def test_ids_that_share_a_hash_are_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "id_hash", lambda identifier: 7)
    files = files_of(write(tmp_path / "1.jsonl", {"id": "a", "text": "t"}, {"id": "b", "text": "u"}))
    scans = scan_corpus(files, {}, [].append, lambda done: None)
    distinct, conflicts = distinct_documents(scans)
    assert [conflicts[0].tolist(), distinct[0].tolist()] == [[False, True], [True, False]]
    assert list(locate_conflicts(files, "corpus", {}, conflicts, np.array([7], np.uint64), lambda done: None)) == [(0, 1, None)]


def test_shards_without_repeats_keep_every_row(tmp_path: Path) -> None:
    scans = scan_corpus(
        files_of(write(tmp_path / "1.jsonl", {"id": "a", "text": "t"}, {"id": "b", "text": "t"})), {}, [].append, print
    )
    distinct, conflicts = distinct_documents(scans)
    assert [distinct[0].tolist(), conflicts[0].tolist()] == [[True, True], [False, False]]
