"""Search over what a run published: in a local run's state folder, which mirrors its bucket, and in a bucket."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline import store
from pipeline.cli import app
from pipeline.commands import search as searching
from pipeline.commands.search import Hit, best_rows, open_search
from pipeline.contract import Stage, registry_uri
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.stages import embed, evaluate, publish

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def search(query: str, *, count: int = 5, **options: Any) -> list[Hit]:
    return open_search(**options)(query, count)


def published(plan_run: Any, root: str, **options: Any) -> Any:
    return finish(plan_run(root, children=1, **options))


def finish(run: Any) -> Any:
    """Evaluate, embed and publish a planned run."""
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


def test_queries_are_as_long_as_the_published_embeddings(plan_run: Any, tmp_path: Path) -> None:
    run = published(plan_run, str(tmp_path / "bucket"), settings={"embed": {"dimensions": 12}})
    assert store.read_json(run.paths.embed_manifest)["dimension"] == 12
    for identifier, text in [run.texts[3], run.texts[77]]:
        hits = search(text, state=tmp_path, count=100)
        assert hits[0].id == identifier
        assert hits[0].score == pytest.approx(1.0, abs=1e-5)
        assert len(hits) == 100


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


def test_text_is_empty_when_the_ingested_shards_are_gone(plan_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    published(plan_run, str(tmp_path / "bucket"))
    shutil.rmtree(tmp_path / "bucket" / "ingested")
    hits = search("bake limo", state=tmp_path, count=2)
    assert [hit.text for hit in hits] == ["", ""]
    [warning] = caplog.messages
    assert warning.startswith("the texts of the documents cannot be read: ")


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


@pytest.mark.parametrize(("arguments", "lines"), [([""], ""), (["   "], ""), (["-"], ""), (["-"], " \n\n")])
def test_empty_query(arguments: list[str], lines: str, plan_run: Any, tmp_path: Path) -> None:
    if arguments == ["-"]:
        published(plan_run, str(tmp_path / "bucket"))
    result = CliRunner().invoke(app, ["search", *arguments, "--state", str(tmp_path)], input=lines)
    assert isinstance(result.exception, BadConfig)
    assert result.exception.what == "the query is empty"


def test_queries_from_standard_input_share_one_model(plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = published(plan_run, str(tmp_path / "bucket"), locales=["de", None])
    loaded = []
    load = searching.query_encoder
    monkeypatch.setattr(searching, "query_encoder", lambda *arguments: loaded.append(1) or load(*arguments))
    queries = [run.texts[3][1], run.texts[77][1]]
    lines = "".join(f"{query}\n\n" for query in queries)
    result = CliRunner().invoke(app, ["search", "-", "-n", "2", "--json", "--state", str(tmp_path)], input=lines)
    assert result.exit_code == 0
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [hit["query"] for hit in found] == [query for query in queries for _ in range(2)]
    assert set(found[0]) == {"query", "id", "score", "locale", "text"}
    places = {identifier: place for place, (identifier, _) in enumerate(run.texts)}
    for hit in found:
        assert hit["text"] == dict(run.texts)[hit["id"]]
        assert hit["locale"] == ("de" if places[hit["id"]] % 40 % 2 == 0 else None)  # in turns in each shard of 40 rows
    assert loaded == [1]
    shown = CliRunner().invoke(app, ["search", "-", "-n", "2", "--state", str(tmp_path)], input=lines).stdout
    assert all(query in shown for query in queries)


def test_an_answer_is_there_before_the_next_query(plan_run: Any, tmp_path: Path) -> None:
    run = published(plan_run, str(tmp_path / "bucket"))
    command = [sys.executable, "-m", "pipeline.cli", "search", "-", "-n", "1", "--json", "--state", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _, text in run.texts[:2]:
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["query"] == text
        process.stdin.close()
        assert process.wait() == 0


def test_only_documents_of_a_locale(plan_run: Any, tmp_path: Path) -> None:
    run = published(plan_run, str(tmp_path / "bucket"), locales=["de", "en", None], shard_rows=30)
    hits = search("baba keke", state=tmp_path, locale="en", count=1000)
    assert [hit.locale for hit in hits] == ["en"] * 33
    every = search("baba keke", state=tmp_path, count=1000)
    assert [hit.id for hit in hits] == [hit.id for hit in every if hit.locale == "en"]
    assert len(every) == len(run.texts)


def test_options_are_checked_before_torch_is_loaded(plan_run: Any, tmp_path: Path) -> None:
    published(plan_run, str(tmp_path / "bucket"), locales=["de", None, "en"])
    script = f"""
import sys
from pathlib import Path
from pipeline.commands.search import open_search
from pipeline.errors import BadConfig
for options in ({{"locale": "fr"}}, {{"registry": "a/b"}}):
    try:
        open_search(state=Path({str(tmp_path)!r}), **options)
    except BadConfig as error:
        print(error.rule, "torch" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first, second = told.splitlines()
    assert first == "locales of the documents: de, en False"
    assert second.endswith("False")


def test_the_copy_is_made_once_for_each_run(plan_run: Any, s3_root: str, user_cache: Path, tmp_path: Path) -> None:
    local, bucket = published(plan_run, str(tmp_path / "bucket")), published(plan_run, s3_root, run="week-02")
    for run, root, options in (
        (local, tmp_path / "search", {"state": tmp_path}),
        (bucket, user_cache / "trnpipe" / "search", {"bucket": s3_root}),
    ):
        expected = search("baba keke", **options)
        [matrix] = root.rglob("embeddings.npy")
        assert np.lib.format.open_memmap(matrix, mode="r").shape == (100, 32)
        for index in range(len(run.plan.embed.parts)):
            store.delete(run.paths.part(index, len(run.plan.embed.parts)))
        assert search("baba keke", **options) == expected
        # Another manifest is another copy, and replaces the one of this registry name only.
        other = matrix.parents[2] / "other" / ("0" * 64)
        other.mkdir(parents=True)
        manifest = store.read_json(run.paths.embed_manifest)
        store.write_json(run.paths.embed_manifest, manifest | {"parts": []})
        with contextlib.suppress(BadConfig):  # nothing is left to search in
            open_search(**options, locale="de")
        assert not matrix.exists()
        assert other.exists()
        assert len(list(root.rglob("embeddings.npy"))) == 1


def test_parts_that_do_not_match_the_manifest_are_refused(plan_run: Any, tmp_path: Path) -> None:
    run = published(plan_run, str(tmp_path / "bucket"))
    manifest = store.read_json(run.paths.embed_manifest)
    for change in ({"rows": 29}, {"rows": 31}, {"rows": 29, "quarantined": 1}):
        parts = [manifest["parts"][0] | change, *manifest["parts"][1:]]
        store.write_json(run.paths.embed_manifest, manifest | {"parts": parts})
        with pytest.raises((BadData, MissingInput)):
            search("baba", state=tmp_path)
        assert not list((tmp_path / "search").rglob("*.npy"))


def test_a_cache_folder_that_cannot_be_written(
    plan_run: Any, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(plan_run, s3_root)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BadConfig) as refusal:
        search("baba", bucket=s3_root)
    assert "XDG_CACHE_HOME" in refusal.value.remedy


@pytest.mark.parametrize("count", [1, 7, 40, 300])
def test_the_best_rows_are_those_of_the_full_product(count: int) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.integers(-2, 3, size=(200, 4)).astype(np.float32)  # many equal products
    vector = np.array([1, 2, -1, 1], np.float32)
    for chosen in (np.ones(200, np.bool_), rng.random(200) < 0.3):
        places, scores = best_rows(matrix, vector, count, chosen)
        expected = sorted(np.flatnonzero(chosen).tolist(), key=lambda row: (-(matrix[row] @ vector), row))[:count]
        assert places.tolist() == expected
        assert scores.tolist() == (matrix[expected] @ vector).tolist()
