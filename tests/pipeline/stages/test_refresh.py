"""Refreshes: what has changed in the corpus is embedded with the published model, beside runs that train."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline import store
from pipeline.commands.search import open_search
from pipeline.contract import Stage, StageFailure, now
from pipeline.errors import BadConfig, MissingInput, Superseded
from pipeline.operate.outcome import judge as ended
from pipeline.operate.run_files import LocalFiles
from pipeline.run.registry import change_pointer, publications, read_pointer
from pipeline.stages import publish
from pipeline.stages.report import read_run
from tests.pipeline.stages.planning import Bench, refusal, rows

REFRESH = {"mode": "refresh"}
Vectors = dict[str, np.ndarray]


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Bench:
    (tmp_path / "scratch").mkdir()
    bench = Bench(str(tmp_path / "bucket"), tmp_path / "scratch", model)
    bench.config["data"]["corpus"] = [store.join(bench.root, "corpus")]
    bench.config["embed"] |= {"children": 1, "rows_per_part": 30, "tokens_per_batch": 512}
    bench.config["device"] = {"kind": "cpu", "precision": "fp32", "threads_per_rank": 1}
    bench.shard("week-1.jsonl", rows(0, 100))
    documents(bench, "base", range(100))
    return bench


def documents(bench: Bench, name: str, numbers: Any, *, words: str = "") -> None:
    lines = [{"id": f"doc{number}", "text": f"document {number} {words}"} for number in numbers]
    bench.shard(f"{name}.jsonl", lines, folder="corpus")


def judge(bench: Bench, run: str, execution: dict[str, Any] | None = None) -> None:
    """A run up to the end of evaluate; its model is the bench's."""
    bench.start(run, execution)
    bench.train(run)
    store.upload_folder(bench.model, bench.paths(run).model)
    bench.stage(Stage.EVALUATE, run)


def embed(bench: Bench, run: str) -> dict[str, Any]:
    """From the second prepare of a run, or the first of a refresh, to the end of embed; embed's metrics."""
    for stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.EMBED):
        if stage is Stage.INGEST:
            bench.ingest(run)
        else:
            bench.stage(stage, run)
    return dict(store.read_json(bench.paths(run).result(Stage.EMBED))["metrics"])


def end(bench: Bench, run: str) -> dict[str, Any]:
    """publish's metrics."""
    output = bench.stage(Stage.PUBLISH, run)
    assert output is not None
    return output.metrics


def week(bench: Bench, run: str, execution: dict[str, Any] | None = None) -> None:
    judge(bench, run, execution)
    embed(bench, run)
    assert end(bench, run)["published"] is True
    bench.config["model"] = {}


def refresh(bench: Bench, run: str, **more: Any) -> dict[str, Any]:
    """A whole refresh; embed's metrics."""
    bench.request(run, {**REFRESH, **more})
    found = embed(bench, run)
    assert end(bench, run)["published"] is True
    return found


def refuse_next(bench: Bench, run: str) -> None:
    """Make evaluate's verdict about a run a refusal."""
    result = store.read_json(bench.paths(run).result(Stage.EVALUATE))
    result["metrics"]["gate"] |= {"verdict": "refused", "reason": "worse"}
    store.write_json(bench.paths(run).result(Stage.EVALUATE), result)


def published(bench: Bench) -> Vectors:
    """What a reader of the registry finds: id -> vector."""
    pointer = read_pointer(bench.root, "current")
    assert pointer is not None
    found: Vectors = {}
    manifest = store.read_json(pointer.embeddings)
    for part in manifest["parts"]:
        assert store.sha256(part["uri"]) == part["sha256"]
        table = pq.read_table(part["uri"])
        found |= dict(zip(table["id"].to_pylist(), np.stack(table["embedding"].to_numpy()), strict=True))
    assert len(found) == manifest["rows"]
    return found


def pointer(bench: Bench) -> Any:
    return read_pointer(bench.root, "current")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_refresh_embeds_what_changed_and_equals_a_whole_embedding(bench: Bench, precision: str) -> None:
    bench.config["device"]["precision"] = precision
    week(bench, "one")
    before, whole = published(bench), store.read_json(bench.paths("one").result(Stage.EMBED))["metrics"]
    assert (whole["copied"], whole["unchanged_parts"]) == (0, 0)
    assert len(before) == 100
    # An addition, a change of a text and one of a locale; and what is gone.
    lines = [{"id": f"doc{number}", "text": f"document {number} "} for number in range(90)]
    lines[7]["text"] = "another text"
    lines[8]["text"] = "DOCUMENT 8 "  # the same by normalized hash, and to a model without case
    lines[9]["locale"] = "de"
    lines.append({"id": "new", "text": "a new one"})
    bench.shard("base.jsonl", lines, folder="corpus")
    found = refresh(bench, "daily")
    after = published(bench)
    assert set(after) == {*(f"doc{number}" for number in range(90)), "new"}
    changed = {name for name in after if name not in before or not np.array_equal(before[name], after[name])}
    assert {"doc7", "new"} <= changed <= {"doc7", "doc8", "new"}
    # doc8's letters are others to the tokenizer unless it folds them; no more than these three are computed.
    assert found["copied"] + len(changed) == 91 - sum_of_unchanged(bench, "daily")
    assert found["copied_bytes"] == found["copied"] * 32 * 4
    assert 0 < found["tokens"] < whole["tokens"] * 0.06
    assert (pointer(bench).run, pointer(bench).embeddings_run) == ("one", "daily")
    if precision == "fp32":
        # What is searched is the refresh's: its documents, and their texts.
        hits = {hit.id: hit.text for hit in open_search(state=Path(bench.root).parent)("a new one", 91)}
        assert (hits.keys(), hits["new"], hits["doc7"]) == (after.keys(), "a new one", "another text")
    # The same corpus embedded as a whole: nothing to copy from.
    full = embedded_whole(bench, "whole")
    # bf16 lets two batches differ, whatever is in them; by one rounding at least.
    bench.config["embed"]["tokens_per_batch"] = 40
    batched = embedded_whole(bench, "batched")
    rounding = 1e-6 if precision == "fp32" else max(2**-9, *(np.abs(full[name] - batched[name]).max() for name in full))
    assert max(np.abs(full[name] - after[name]).max() for name in full) <= rounding


def test_what_a_run_takes_from_another_is_no_contradiction(bench: Bench) -> None:
    """prepare comes again after the gate, in every retry, and where a run resumes."""
    week(bench, "one")
    bench.request("daily", {**REFRESH, "train": {"epochs": 7}, "embed": {"length": 31}, "model": {"pooling": "cls"}})
    for _ in range(2):
        bench.stage(Stage.PREPARE, "daily")
    bench.shard("week-2.jsonl", rows(100, 160))
    # As the configuration is printed.
    bench.request("two", {"train": {"shard_optimizer": "auto"}})
    for _ in range(2):
        bench.stage(Stage.PREPARE, "two")
    bench.request("two", {"train": {"shard_optimizer": "auto", "epochs": 7}})
    refusal(BadConfig, lambda: bench.stage(Stage.PREPARE, "two"), "train.epochs: the plan has 1, the input 7")


def test_a_failure_of_the_second_round_is_the_runs_end(bench: Bench) -> None:
    judge(bench, "one")
    embed(bench, "one")
    documents(bench, "late", range(200, 210))
    assert end(bench, "one")["again"] is True
    paths = bench.paths("one")
    failure = StageFailure(stage="ingest", run="one", exit_code=65, what="an input file is damaged", time=now())
    store.write_bytes(paths.failure(Stage.INGEST), failure.to_json())
    verdict = read_run(paths).verdict
    assert (verdict.kind, verdict.stage, verdict.reason) == ("failed", Stage.INGEST, "an input file is damaged")
    ending = ended(LocalFiles(Path(paths.root)), datetime(2020, 1, 1, tzinfo=timezone.utc))
    assert (ending.status, ending.stage) == ("FAILED", Stage.INGEST)


def embedded_whole(bench: Bench, run: str) -> dict[str, Any]:
    """Refresh with nothing to copy from."""
    for uri in (bench.paths("one").embed_manifest, pointer(bench).embeddings):
        store.write_json(uri, {**store.read_json(uri), "form": "another"})
    assert refresh(bench, run)["copied"] == 0
    return published(bench)


def sum_of_unchanged(bench: Bench, run: str) -> int:
    """Documents in parts that are another run's."""
    own = f"{bench.root}/runs/{run}/"
    parts = store.read_json(bench.paths(run).embed_manifest)["parts"]
    return sum(part["rows"] for part in parts if not part["uri"].startswith(own))


def test_parts_without_a_change_stay_where_they_are(bench: Bench) -> None:
    week(bench, "one")
    documents(bench, "more", [100])
    found = refresh(bench, "daily")
    count = len(store.read_json(pointer(bench).embeddings)["parts"])
    assert (found["unchanged_parts"], found["parts"]) == (count - 1, count)
    before = published(bench)
    # The next one finds them through the last one's manifest.
    documents(bench, "more", [100, 101])
    found = refresh(bench, "next")
    assert (found["unchanged_parts"], found["copied"]) == (count - 1, 101 - sum_of_unchanged(bench, "next"))
    after = published(bench)
    assert all(np.array_equal(after[name], vector) for name, vector in before.items())
    assert set(after) - set(before) == {"doc101"}


def test_nothing_new_computes_nothing(bench: Bench) -> None:
    week(bench, "one")
    found = refresh(bench, "daily")
    assert (found["tokens"], found["copied"], found["unchanged_parts"]) == (0, 0, found["parts"])
    assert len(published(bench)) == 100
    assert [record["embeddings_run"] for record in publications(bench.root, "current")] == ["daily", "one"]


@pytest.mark.parametrize("change", ["damaged", "gone", "other form"])
def test_what_cannot_be_copied_is_computed(bench: Bench, change: str) -> None:
    week(bench, "one")
    before = published(bench)
    manifest = store.read_json(pointer(bench).embeddings)
    uri = manifest["parts"][0]["uri"]
    if change == "damaged":
        data = bytearray(store.read_bytes(uri))
        data[len(data) // 2] ^= 1
        store.write_bytes(uri, bytes(data))
    elif change == "gone":
        store.delete(f"{uri.removesuffix('.parquet')}.json")
    else:
        store.write_json(pointer(bench).embeddings, {**manifest, "form": "another"})
    found = refresh(bench, "daily")
    assert found["unchanged_parts"] == (0 if change == "other form" else found["parts"] - 1)
    after = published(bench)
    assert max(np.abs(after[name] - vector).max() for name, vector in before.items()) <= 1e-6


def test_a_refresh_lands_in_the_middle_of_a_week(bench: Bench) -> None:
    """The week lists the corpus before it embeds; what a refresh has published since it began stays right."""
    week(bench, "one")
    bench.shard("week-2.jsonl", rows(100, 150))
    judge(bench, "two")
    documents(bench, "base", range(1, 100))  # doc0 is gone
    documents(bench, "more", [200])
    bench.shard("change.jsonl", [{"id": "doc300", "text": "before"}], folder="corpus")
    refresh(bench, "daily-1")
    embed(bench, "two")
    # Another one, while the week embeds: one more document, a change and a deletion.
    documents(bench, "base", range(2, 100))
    documents(bench, "more", [200, 201])
    bench.shard("change.jsonl", [{"id": "doc300", "text": "after"}], folder="corpus")
    refresh(bench, "daily-2")
    third = published(bench)
    found = end(bench, "two")
    assert (found["again"], found["published"]) == (True, False)
    assert pointer(bench).run == "one"
    metrics = embed(bench, "two")
    # Only what changed since the first round is computed again.
    assert 0 < metrics["tokens"] < 40
    assert end(bench, "two")["published"] is True
    last = published(bench)
    assert set(last) == set(third) == {*(f"doc{number}" for number in range(2, 100)), "doc200", "doc201", "doc300"}
    # The bench's model does not learn, so equal texts have equal vectors.
    assert np.abs(last["doc300"] - third["doc300"]).max() <= 1e-6
    assert (pointer(bench).run, pointer(bench).embeddings_run) == ("two", "two")


def test_a_week_whose_files_are_gone_embeds_what_it_began_with(bench: Bench) -> None:
    judge(bench, "one")
    store.delete_folder(f"{bench.root}/corpus")
    embed(bench, "one")
    found = end(bench, "one")
    assert (found["published"], found["documents"]) == (True, 100)
    assert set(published(bench)) == {f"doc{number}" for number in range(100)}


def test_documents_that_keep_coming_do_not_keep_a_run_from_publishing(bench: Bench) -> None:
    judge(bench, "one")
    for number in range(publish.MOST_ROUNDS):
        embed(bench, "one")
        documents(bench, "more", range(200, 201 + number))
        found = end(bench, "one")
        assert found["again"] is (number < publish.MOST_ROUNDS - 1)
    assert found["published"] is True
    # A finished run stays as it is.
    embed(bench, "one")
    assert "doc202" not in published(bench)


def test_a_refused_week_ends_with_a_refresh(bench: Bench) -> None:
    week(bench, "one")
    bench.shard("week-2.jsonl", rows(100, 150))
    documents(bench, "more", [100])
    judge(bench, "two")
    refuse_next(bench, "two")
    found = embed(bench, "two")
    assert 0 < found["tokens"] < 20
    metrics = end(bench, "two")
    assert (metrics["refused"], metrics["model"], metrics["published"]) == ("worse", "one", True)
    assert (pointer(bench).run, pointer(bench).embeddings_run) == ("one", "two")
    assert "doc100" in published(bench)
    # What it trained on is new again to the next one.
    bench.start("three")
    assert bench.inputs("three").lineage == ("one",)
    assert bench.plan("three").train.new_rows == bench.plan("two").train.new_rows


def test_a_model_is_published_only_over_the_one_that_it_was_judged_against(bench: Bench) -> None:
    week(bench, "one")
    bench.shard("week-2.jsonl", rows(100, 150))
    for run in ("two", "three"):
        judge(bench, run)
        embed(bench, run)
    refresh(bench, "daily")
    embed(bench, "three")
    assert end(bench, "three")["published"] is True
    # The refreshes of its model are over, too.
    bench.request("late", REFRESH)
    embed(bench, "late")
    store.write_json(f"{bench.root}/registry/current.json", {**pointer(bench).content, "run": "four"})
    refusal(Superseded, lambda: end(bench, "late"), "run four published first", "a new run")
    store.write_json(f"{bench.root}/registry/current.json", {**pointer(bench).content, "run": "three", "corpus": ""})
    error = refusal(Superseded, lambda: end(bench, "two"), "run three published first")
    assert error.exit_code == 68


def test_a_rollback_publishes_an_earlier_model_and_holds_models(bench: Bench) -> None:
    week(bench, "one")
    bench.shard("week-2.jsonl", rows(100, 150))
    week(bench, "two")
    bench.shard("week-3.jsonl", rows(150, 200))
    documents(bench, "more", [100])
    judge(bench, "three")
    found = refresh(bench, "back", rollback="one")
    # The first run's own embeddings serve as far as they go.
    assert found["tokens"] < 20
    now = pointer(bench)
    assert (now.run, now.embeddings_run, now.epoch, bool(now.held)) == ("one", "back", 1, True)
    assert len(published(bench)) == 101
    embed(bench, "three")
    refusal(Superseded, lambda: end(bench, "three"), "models are held since")
    refusal(Superseded, lambda: bench.prepare("four"), "held since", "trnpipe registry release")
    refresh(bench, "daily")
    assert pointer(bench).held
    change_pointer(bench.root, "current", lambda found: {**found.content, "held": ""} if found else None)
    bench.start("four")
    assert bench.inputs("four").lineage == ("one",)
    # Rows that only the second run has trained on are new.
    assert bench.plan("four").train.new_rows > bench.plan("three").train.new_rows


def test_what_cannot_be_refreshed_is_refused(bench: Bench) -> None:
    model = bench.config.pop("model")
    refusal(MissingInput, lambda: bench.prepare("daily", REFRESH), "nothing to refresh", "publish a model first")
    bench.config["model"] = model
    week(bench, "one")
    refusal(MissingInput, lambda: bench.prepare("back", {**REFRESH, "rollback": "gone"}), "runs/gone/model")


def test_a_corpus_that_lost_most_of_its_documents_is_not_published(bench: Bench) -> None:
    week(bench, "one")
    documents(bench, "base", range(20))
    bench.request("daily", {**REFRESH, "data": {"limits": {"documents_gone": 0.5}}})
    bench.stage(Stage.PREPARE, "daily")
    bench.ingest("daily")
    with pytest.raises(Exception, match="documents gone: 80 of 100"):
        bench.stage(Stage.PLAN, "daily")


def test_a_refresh_embeds_as_the_model_was_judged(bench: Bench) -> None:
    week(bench, "one")
    before = published(bench)
    bench.config["embed"] |= {"length": 16, "dtype": "float16"}
    found = refresh(bench, "daily")
    assert found["unchanged_parts"] == found["parts"]
    assert published(bench)["doc1"].dtype == before["doc1"].dtype


def test_writers_of_the_pointer_take_turns(bench: Bench) -> None:
    uri = f"{bench.root}/registry/current.json"
    store.write_json(uri, {"run": "one", "model": "m", "embeddings": "e"})
    calls = []

    def change(found: Any) -> dict[str, Any]:
        if not calls:
            store.write_json(uri, {**found.content, "embeddings": "another"})
        calls.append(found.embeddings)
        return {**found.content, "held": "now"}

    content = change_pointer(bench.root, "current", change)
    assert calls == ["e", "another"]
    assert content == json.loads(store.read_bytes(uri)) == {"run": "one", "model": "m", "embeddings": "another", "held": "now"}
