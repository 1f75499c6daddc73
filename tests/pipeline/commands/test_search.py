"""Search over what a run published: in a local run's state folder, which mirrors its bucket, and in a bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.commands.search import search
from pipeline.contract import Stage, registry_uri
from pipeline.errors import BadConfig, MissingInput
from pipeline.stages import embed, evaluate, publish


def published(plan_run: Any, root: str) -> Any:
    run = plan_run(root, children=1)
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    run.finish(Stage.EMBED, embed.run(run.context(Stage.EMBED)))
    publish.run(run.context(Stage.PUBLISH))
    return run


def test_finds_a_document_by_its_own_text_in_a_bucket(plan_run: Any, s3_root: str) -> None:
    run = published(plan_run, s3_root)
    for identifier, text in [run.texts[3], run.texts[77]]:
        words = " ".join(text.split()[:8])
        hits = search(words, bucket=s3_root, count=5)
        assert len(hits) == 5
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert identifier in [hit.id for hit in hits]
        assert all(dict(run.texts)[hit.id] == hit.text for hit in hits)


def test_mirror_of_the_bucket(plan_run: Any, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = published(plan_run, s3_root)
    text = next(text for _, text in run.texts if len(text.split()) <= 9)
    expected = search(text, bucket=s3_root, count=3)
    store.download_folder(s3_root, tmp_path / "state" / "bucket")
    # The mirror alone must do: its bucket is gone when the local run has ended.
    for module in (store, store.s3):
        monkeypatch.setattr(module, "s3_client", lambda: pytest.fail("asked S3"))
    assert search(text, state=tmp_path / "state", count=3) == expected
    assert expected[0].text == text
    assert expected[0].score == pytest.approx(1.0, abs=1e-4)


def test_same_hits_however_the_parts_are_cut(plan_run: Any, tmp_path: Path) -> None:
    run = published(plan_run, str(tmp_path / "a" / "bucket"))
    text = run.texts[50][1]
    few = search(text, state=tmp_path / "a", count=3)
    many = search(text, state=tmp_path / "a", count=100)
    assert many[:3] == few
    assert sorted(hit.id for hit in many) == sorted(identifier for identifier, _ in run.texts)
    assert len(search(text, state=tmp_path / "a", count=1000)) == 100


def test_text_is_empty_when_its_shard_is_gone(plan_run: Any, tmp_path: Path) -> None:
    published(plan_run, str(tmp_path / "bucket"))
    shutil.rmtree(tmp_path / "bucket" / "corpus")
    hits = search("bake limo", state=tmp_path, count=2)
    assert [hit.text for hit in hits] == ["", ""]


def test_nothing_published(tmp_path: Path) -> None:
    with pytest.raises(MissingInput) as refusal:
        search("anything", state=tmp_path)
    assert refusal.value.exit_code == 66
    assert "make local" in refusal.value.remedy
    assert refusal.value.value == registry_uri(str(tmp_path / "bucket"), "current")


def test_other_registry_name(plan_run: Any, tmp_path: Path) -> None:
    published(plan_run, str(tmp_path / "bucket"))
    with pytest.raises(MissingInput):
        search("bake", state=tmp_path, registry="other")


@pytest.mark.parametrize("query", ["", "   "])
def test_empty_query(query: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig):
        search(query, state=tmp_path)
