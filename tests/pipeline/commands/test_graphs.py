"""`trnpipe graphs`: the proof by real stages on torch-xla, the graphs of 64 ranks, and what is said of planted new ones."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline import store
from pipeline.backends.hlo import GraphDescription
from pipeline.commands.graphs import Findings, find
from pipeline.commands.graphs_display import show
from pipeline.commands.graphs_lowered import Graph, Lowered, rank_difference
from pipeline.commands.graphs_proof import proof_config
from pipeline.config import build_config
from pipeline.contract import RunPaths, Stage
from pipeline.dataset.ingested import DOCUMENTS
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, ExitCode, MissingInput
from pipeline.graphs.compiled import GraphSet, write_set
from pipeline.graphs.fingerprint import set_uri
from pipeline.plan import RunPlan
from tests.pipeline.ingesting import ingest, name_shard, plan_documents, tokenizer_plan
from tests.pipeline.training.planned import plan_training

UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiles in half the time, and the graphs are the same."""


def graphs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "graphs", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": UNOPTIMIZED, "COLUMNS": "200"},
    )


def plan_for_neuron(state: Path) -> RunPaths:
    """A run for 64 NeuronCores that was planned and never ran, with a corpus to embed."""
    paths = RunPaths(f"{state}/bucket/runs/week-01")
    plan = plan_training(
        paths,
        state / "made",
        kind="neuron",
        ranks=64,
        rows=700,
        batch_size=4,
        sections={
            "device": {"precision": "compiler", "threads_per_rank": None},
            "embed": {"length": 32, "tokens_per_batch": 256},
            "compile": {"trial_steps": 2},
        },
    )
    tokenizer = TextTokenizer(state / "made" / "parent")
    shard = name_shard("corpus.jsonl", DOCUMENTS, tokenizer=tokenizer_plan(tokenizer))
    rows = [{"id": f"d-{row}", "text": "bake limo " * (1 + row % 9), "line": row + 1} for row in range(30)]
    ingest(paths.bucket_root, shard, rows, tokenizer)
    embed = plan_documents(paths.bucket_root, [shard], tokenizer)
    store.write_bytes(paths.plan, plan.model_copy(update={"embed": embed}).sealed().to_json())
    return paths


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunPaths, dict[str, Any]]]:
    """The folder of a run that --prove made, and the whole answer."""
    root = tmp_path_factory.mktemp("graphs")
    before = plan_for_neuron(root / "state")
    files = sorted(info.uri for info in store.list_objects(before.root))
    done = graphs("week-01", "--state", root / "state", "--no-lower", "--prove", "--keep", root / "kept", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(info.uri for info in store.list_objects(before.root)) == files
    answer = json.loads(done.stdout)
    yield RunPaths(answer["proof"]["run"]), answer
    shutil.rmtree(root)


# ---- a real run ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_graph_of_a_short_real_run_was_met_by_the_trial(proved: tuple[RunPaths, dict[str, Any]]) -> None:
    paths, answer = proved
    proof = answer["proof"]
    assert answer["problems"] == []
    assert (answer["lowered"], [one["graphs"] for one in answer["sets"]]) == (None, [None, None])
    assert [stage["name"] for stage in proof["stages"]] == ["train", "train from step 4", "evaluate", "embed"]
    assert [stage["new"] for stage in proof["stages"]] == [[], [], [], []]
    assert all(stage["compiled"] > 0 for stage in proof["stages"])
    assert [stage["fallbacks"] for stage in proof["stages"]] == [{}, {}, {}, {}]
    assert (proof["steps"], proof["checkpoint"], proof["precision"]) == (8, 4, "fp32")

    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    assert (plan.world.kind, plan.world.ranks, plan.config.device.kind) == ("xla", 1, "xla")
    # What it promises to cover, from what the run left.
    lines = [json.loads(line) for line in store.read_bytes(paths.metrics).splitlines()]
    assert {line["step"] for line in lines} >= {0, 4, 8}
    assert plan.train.warmup_steps == 2 < plan.train.steps
    assert {path.name for path in Path(paths.checkpoints).iterdir()} == {"step-00000004", "step-00000008"}
    assert len(list(Path(paths.root, "embed").glob("part-*.parquet"))) == 1


@pytest.mark.long
def test_a_planted_new_graph_ends_with_69(proved: tuple[RunPaths, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    paths, _ = proved

    def reported(*, as_json: bool = True) -> int:
        console = Console(stderr=as_json)
        found = find(paths.root, console, state=Path(paths.bucket_root), lower=False)
        show(found, console, as_json=as_json)
        return found.exit_code

    assert reported() == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["graphs"] > 0 for one in found["sets"]] == [True, True]
    assert [stage["name"] for stage in found["stages"]] == ["train", "evaluate", "embed"]

    report = f"{paths.root}/train/graphs-00000.json"
    true = store.read_json(report)
    planted = {"key": "abc", "step": 3, "cause": "other constants: new f32 0.25, instead of f32 0.125"}
    store.write_json(report, {**true, "new": [planted]})
    try:
        assert reported(as_json=False) == ExitCode.DEFECT
        said = capsys.readouterr().out
        assert "train met 1 graph that compile did not" in said
        assert "step 3: abc: other constants: new f32 0.25" in said
        # Nor is a stage believed that says nothing of what it met.
        store.write_json(report, {**true, "keys": [*true["keys"], "unheard-of"]})
        assert reported() == ExitCode.DEFECT
        assert [graph["key"] for graph in json.loads(capsys.readouterr().out)["stages"][0]["new"]] == ["unheard-of"]
        store.write_json(report, {"keys": 3})
        with pytest.raises(BadData, match="report of its graphs"):
            reported()
    finally:
        store.write_json(report, true)


@pytest.mark.long
def test_the_graphs_of_64_ranks_are_shown_without_any(tmp_path: Path) -> None:
    """Also for a kind that has no graphs: those that Neuron would compile."""
    plan_training(RunPaths(f"{tmp_path}/bucket/runs/week-01"), tmp_path / "made", ranks=64, rows=700)
    done = graphs("week-01", "--state", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "`cpu` runs operations one by one" in done.stdout
    assert "as kind neuron would compile them, fp32, 64 ranks" in done.stdout
    assert done.stdout.count("all-gather x64, all-reduce x64 (2), reduce-scatter x64   yes") == 1
    assert "all ranks compile the same graphs" in done.stdout


# ---- what can be asked -----------------------------------------------------------------------------------------------


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no such run"):
        find("week-99", Console(quiet=True), state=tmp_path)
    paths = plan_for_neuron(tmp_path)
    asked: list[tuple[dict[str, Any], str]] = [
        ({"steps": 9}, "belong to the proof"),
        ({"keep": tmp_path / "kept"}, "belong to the proof"),
        ({"prove": True, "steps": 4}, "too few steps"),
        ({"prove": True, "keep": tmp_path}, "not empty"),
    ]
    for options, words in asked:
        with pytest.raises(BadConfig, match=words):
            find(paths.root, Console(quiet=True), state=tmp_path, lower=False, **options)
    store.write_bytes(paths.plan, b"{}")
    with pytest.raises(BadData, match="plan cannot be read"):
        find(paths.root, Console(quiet=True), state=tmp_path, lower=False)


def test_a_run_that_never_ran_has_nothing_new(tmp_path: Path) -> None:
    found = find(plan_for_neuron(tmp_path).root, Console(quiet=True), state=tmp_path, lower=False)
    assert [(one.name, one.graphs) for one in found.sets] == [("train", None), ("infer", None)]
    assert (found.stages, found.exit_code) == ((), ExitCode.DONE)
    console = Console(file=io.StringIO(), width=120)
    show(found, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "missing" in text
    assert "No stage has reported yet" in text


@pytest.mark.slow
def test_a_deployments_run_is_read_from_its_bucket(s3_root: str, tmp_path: Path) -> None:
    local = plan_for_neuron(tmp_path)
    plan = RunPlan.from_json(store.read_bytes(local.plan))
    assert plan.graphs is not None
    store.upload_folder(Path(plan.parent.folder), f"{s3_root}/parent")
    parent = plan.parent.model_copy(update={"folder": f"{s3_root}/parent"})
    store.write_bytes(local.plan, plan.model_copy(update={"parent": parent}).sealed().to_json())
    store.upload_folder(Path(local.bucket_root), s3_root)
    for name, fingerprint in (("train", plan.graphs.train), ("infer", plan.graphs.infer)):
        keys = {f"MODULE_{name}": None}
        write_set(set_uri(s3_root, name, fingerprint), GraphSet(fingerprint=fingerprint, run="week-01", graphs=keys))
    report = {"keys": ["MODULE_train", "MODULE_other"], "new": [], "compiled": 2, "last_compiled_step": 3, "fallbacks": {}}
    store.write_json(RunPaths(f"{s3_root}/runs/week-01").graphs(Stage.TRAIN), report)

    found = find("week-01", Console(quiet=True), bucket=s3_root, state=tmp_path)
    assert found.uri == f"{s3_root}/runs/week-01"
    assert [(one.name, one.graphs) for one in found.sets] == [("train", 1), ("infer", 1)]
    assert [[graph.key for graph in stage.new] for stage in found.stages] == [["MODULE_other"]]
    assert found.lowered is not None
    assert found.exit_code == ExitCode.DEFECT


def test_ranks_that_disagree_end_with_69() -> None:
    description = GraphDescription({"f32[2]": 1}, {"f32[2]": 1}, {"f32 1": 1}, {"add": 1}, {})
    first = Graph(fingerprint="a", description=description, times=1)
    last = Graph(fingerprint="b", description=replace(description, constants={"f32 64": 1}), times=1)
    assert rank_difference([first], [first]) == ""
    assert rank_difference([first], [first, first]) == "2 graphs instead of 1"
    words = rank_difference([first, first], [first, last])
    assert words == "other constants: new f32 64; instead of f32 1"
    lowered = Lowered(kind="neuron", precision="compiler", ranks=64, graphs=(first, first), difference=words)
    found = Findings(
        run="w", uri="u", kind="neuron", precision="compiler", ranks=64, sets=(), stages=(), lowered=lowered, proof=None
    )
    assert found.problems == ["rank 63 would compile other graphs than rank 0"]
    assert found.exit_code == ExitCode.DEFECT


def test_an_execution_of_several_steps_ends_at_the_checkpoint_and_another_follows(tmp_path: Path) -> None:
    plan = RunPlan.from_json(store.read_bytes(plan_for_neuron(tmp_path).plan))
    device = {"sync_points": 1, "loader": {"batches_per_execution": 8}}
    train = {"length": 32, "log_every": 8, "validate_every": 8, "checkpoint_every": 8}
    config = build_config(plan.config.model_dump(mode="json"), {"train": train, "device": device})
    found = proof_config(plan.model_copy(update={"config": config}), None)
    assert (found.train.checkpoint_every, found.train.steps) == (16, 17)
