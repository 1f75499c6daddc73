"""Finding shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.dataset.shards import find_shards
from pipeline.errors import BadConfig, MissingInput


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


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


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_another_content_is_another_version(tmp_path: Path, s3_root: str, kind: str) -> None:
    for root in (str(tmp_path), s3_root):
        uri = store.join(root, "data", "a.jsonl")
        store.write_bytes(uri, b"one")
        asked = [store.join(root, "data") if kind == "folder" else uri]
        [first], [again] = find_shards(asked, "data.train"), find_shards(asked, "data.train")
        assert first.version == again.version
        assert first.modified == again.modified > 0
        store.write_bytes(uri, b"two")
        if root != s3_root:
            os.utime(uri, (first.modified + 1, first.modified + 1))
        [second] = find_shards(asked, "data.train")
        assert second.version != first.version
