"""Whole executions of the synthesized state machine by `trnpipe local`: real processes, a real gang, a tiny real encoder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import ModernBertConfig

from pipeline.contract import EMBEDDING, Stage
from pipeline.dataset.row_files import read_table
from tests.chain.recorded import read_calls
from tests.chain.runs import LocalState, embeddings, kill_descendant, load, started
from tests.infra.calls import Roles
from tests.tiny import make_model, sentence_transformer, write_pairs

COMPILING = (Stage.COLLECT, Stage.PRECOMPILE, Stage.COMPILE)
"""Stages that a run on a processor skips."""

# A guard against what hangs: on two slow cores, beside other tests, two runs took longer than the default.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def tiny_parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "parent"
    make_model(folder)
    return folder


@pytest.fixture
def state(tmp_path: Path, tiny_parent: Path) -> LocalState:
    return LocalState(tmp_path / "state", tiny_parent)


@pytest.fixture(scope="module")
def first_week(tmp_path_factory: pytest.TempPathFactory, tiny_parent: Path) -> LocalState:
    """A run from a parent."""
    folder = tmp_path_factory.mktemp("weeks")
    state = LocalState(folder / "state", tiny_parent, calls=folder / "calls.jsonl")
    # Six epochs: after three, what a random encoder has learned is not yet more than chance.
    first = state.run(write_pairs(folder / "week-1.jsonl", 600), arguments=("--parent", str(tiny_parent)), train__epochs=6)
    assert first.returncode == 0, first.stdout + first.stderr
    return state


@pytest.fixture(scope="module")
def two_weeks(first_week: LocalState, tmp_path_factory: pytest.TempPathFactory) -> LocalState:
    """And next week's from what the first published."""
    # What 200 more rows bring a model of two layers is chance, and not the question here.
    rows = write_pairs(tmp_path_factory.mktemp("rows") / "week-2.jsonl", 200, seed=1, prefix="new")
    second = first_week.run(rows, gate__max_drop=0.05, train__negatives=2, train__mine__count=2)
    assert second.returncode == 0, second.stdout + second.stderr
    return first_week


# The first of these waits for one run, the next for the other: each within a test's time on a slow machine.
def test_the_new_model_beats_its_parent(first_week: LocalState) -> None:
    metrics = load(first_week.runs[0] / "evaluate" / "result.json")["metrics"]
    assert metrics["new"]["ndcg@10"] > metrics["baseline"]["ndcg@10"]
    assert metrics["gate"]["verdict"] == "accepted"


def test_every_stage_leaves_its_result(two_weeks: LocalState) -> None:
    for run in two_weeks.runs:
        fingerprint = load(run / "plan.json")["fingerprint"]
        for stage in Stage:
            # The first week has nothing to mine with.
            if stage in (*COMPILING, Stage.REPORT) or (stage is Stage.MINE and run == two_weeks.runs[0]):
                continue
            result = load(run / stage.value / "result.json")
            # prepare comes again after the plan.
            planned = fingerprint if stage not in (Stage.INGEST, Stage.MINE) else ""
            if stage in EMBEDDING:
                planned = load(run / "embed" / "plan.json")["fingerprint"]
            assert (result["status"], result["fingerprint"]) == ("done", planned)
        assert (run / "report" / "index.html").stat().st_size > 1000
        # Nothing is compiled for a processor, and no gang was started to find that.
        assert not (run / "compile").exists()


def test_model_and_embeddings_are_published_together(two_weeks: LocalState) -> None:
    published = two_weeks.published()
    last = two_weeks.runs[-1]
    assert published["run"] == last.name
    assert published["model"].endswith(f"runs/{last.name}/model")
    assert published["embeddings"].endswith(f"runs/{last.name}/embed/manifest.json")


def test_every_document_is_embedded_exactly_once(two_weeks: LocalState) -> None:
    expected = {f"row-{index:05d}" for index in range(600)} | {f"new-{index:05d}" for index in range(200)}
    assert embeddings(two_weeks.runs[-1]).keys() == expected


def test_the_second_run_is_incremental(two_weeks: LocalState) -> None:
    first, second = (load(run / "plan.json") for run in two_weeks.runs)
    assert second["parent"]["run"] == first["run"]
    (new,) = second["train"]["new"]
    assert new["uri"].endswith("-week-2.jsonl")
    assert {shard["sha256"] for shard in second["train"]["replay"]} <= {shard["sha256"] for shard in first["train"]["new"]}
    assert 0 < second["train"]["replay_rows"] <= second["train"]["new_rows"]


def test_the_second_run_mined_negatives_for_its_new_rows(two_weeks: LocalState) -> None:
    first, second = two_weeks.runs
    assert not (first / "mine").exists()
    assert load(second / "mine" / "result.json")["metrics"]["shards"] == 1
    found = read_table(second / "plan" / "rows" / "train.arrow").select(["new", "negative_0_hash", "negative_1_hash"]).to_pylist()
    new = [row for row in found if row["new"]]
    # Of some rows, every document is as near to the query as the row's own.
    assert sum(bool(row["negative_0_hash"]) for row in new) > len(new) / 2
    assert any(row["negative_1_hash"] for row in new)
    assert not any(row["negative_0_hash"] for row in found if not row["new"])


def test_sentence_transformers_gives_the_published_vectors(two_weeks: LocalState) -> None:
    run = two_weeks.runs[-1]
    vectors = embeddings(run)
    rows = [json.loads(line) for path in two_weeks.bucket.rglob("*-week-*.jsonl") for line in path.read_text().splitlines()][:50]
    theirs = sentence_transformer(run / "model").encode([row["document"] for row in rows])
    ours = np.stack([vectors[row["id"]] for row in rows])
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosine.min() > 0.9999


def test_search_finds_a_document_by_its_words(two_weeks: LocalState) -> None:
    command = [sys.executable, "-m", "pipeline.cli", "search", "bake limo", "--state", str(two_weeks.folder), "--json", "-n", "7"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    hits = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stderr
    assert len(hits) == 7
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
    assert all(hit["text"] for hit in hits)


def test_roles_allow_every_call_of_the_real_stages(two_weeks: LocalState) -> None:
    assert two_weeks.calls is not None
    calls = read_calls(two_weeks.calls)
    assert {call.caller for call in calls} == {*map(str, Stage)} - {*map(str, COMPILING)}
    assert Roles(two_weeks.folder / "cdk.out").refused(calls) == []


def test_bad_rows_over_the_limit_end_with_65_and_a_quarantine(state: LocalState, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", 100)
    # Bad rows that only prepare can find: an id's second document. The others end the command before there is a run.
    rows = [{"id": "x", "query": "one", "document": text} for text in ("first", "second", "third")]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    result = state.run(path, arguments=("--parent", str(state.parent)))
    assert result.returncode == 65, result.stdout + result.stderr
    (run,) = state.runs
    quarantined = [json.loads(line)["at"] for line in (run / "plan" / "quarantine.jsonl").read_text().splitlines()]
    assert [place.rsplit(":", 1)[-1] for place in quarantined] == ["102", "103"]
    assert load(run / "plan" / "failure.json")["exit_code"] == 65
    assert (run / "report" / "index.html").exists()


@pytest.mark.long
def test_a_run_is_stopped_and_resumed_and_every_stage_is_killed_once(state: LocalState, tmp_path: Path) -> None:
    parent = tmp_path / "modernbert"  # other tests' models are BERT's
    make_model(parent, family=partial(ModernBertConfig, local_attention=8))
    rows = write_pairs(tmp_path / "a.jsonl", 300)
    command = state.command(rows, arguments=("--parent", str(parent), "--nodes", "1"), train__epochs=1, embed__children=1)
    # Those that run on a processor: compile is killed in test_xla_run.
    waiting = [stage.value for stage in Stage if stage not in (*COMPILING, Stage.MINE)]

    def kill(process: subprocess.Popen[bytes]) -> None:
        for stage in waiting:
            if kill_descendant(process.pid, lambda command, stage=stage: f"cli stage {stage}" in command):  # type: ignore[misc]
                waiting.remove(stage)
                break
        time.sleep(0.2)

    with started(command, tmp_path / "first.txt") as process:
        while not list(state.folder.rglob("train/result.json")):
            assert process.poll() is None, (tmp_path / "first.txt").read_text()
            kill(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=600) == 130
    assert "train" not in waiting
    (run,) = state.runs
    assert not (run / "publish" / "result.json").exists()
    trained = (run / "train" / "result.json").read_bytes()
    command = [sys.executable, "-m", "pipeline.cli", "local", "--state", str(state.folder), "--run", run.name, "--device", "cpu"]
    with started(command, tmp_path / "second.txt") as process:
        while process.poll() is None:
            kill(process)
    assert process.returncode == 0, (tmp_path / "second.txt").read_text()
    assert waiting == []
    assert (run / "train" / "result.json").read_bytes() == trained
    assert state.published()["run"] == run.name
    assert len(embeddings(run)) == 300
