"""`trnpipe graphs`: the graphs of 64 ranks, and what is said of planted new ones."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import store
from pipeline.backends.hlo import GraphDescription
from pipeline.commands.graphs import Findings, find
from pipeline.commands.graphs_display import show
from pipeline.commands.graphs_lowered import BucketGraphs, Graph, Lowered, rank_difference
from pipeline.contract import RunPaths, Stage
from pipeline.dataset.ingested import DOCUMENTS
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData, ExitCode, MissingInput
from pipeline.graphs.compiled import GraphSet, set_uri, write_set
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
        timeout=500,
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
            "embed": {"buckets": [32], "tokens_per_batch": 256},
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


# ---- a run with reports ------------------------------------------------------------------------------------------------


def test_a_planted_new_graph_ends_with_69(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = plan_for_neuron(tmp_path)
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    assert plan.graphs is not None
    for name, fingerprint in (("train", plan.graphs.train), ("infer", plan.graphs.infer)):
        keys = {f"MODULE_{name}": None}
        write_set(set_uri(paths.bucket_root, name, fingerprint), GraphSet(fingerprint=fingerprint, run="week-01", graphs=keys))
    true = {"keys": ["MODULE_train", "MODULE_infer"], "new": [], "compiled": 2, "last_compiled_step": 3, "fallbacks": {}}
    for stage in (Stage.TRAIN, Stage.EVALUATE, Stage.EMBED):
        store.write_json(paths.graphs(stage), true)

    def reported(*, as_json: bool = True) -> int:
        console = Console(stderr=as_json)
        found = find(paths.root, console, state=tmp_path, lower=False)
        show(found, console, as_json=as_json)
        return found.exit_code

    assert reported() == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["graphs"] > 0 for one in found["sets"]] == [True, True]
    assert [stage["name"] for stage in found["stages"]] == ["train", "evaluate", "embed"]
    assert [stage["new"] for stage in found["stages"]] == [[], [], []]

    report = paths.graphs(Stage.TRAIN)
    planted = {"key": "abc", "step": 3, "cause": "other constants: new f32 0.25, instead of f32 0.125"}
    store.write_json(report, {**true, "new": [planted]})
    assert reported(as_json=False) == ExitCode.DEFECT
    said = capsys.readouterr().out
    assert "train met 1 graph that compile did not" in said
    assert "step 3: abc: other constants: new f32 0.25" in said
    # Nor is a stage believed that says nothing of what it met.
    store.write_json(report, {**true, "keys": [*true["keys"], "unheard-of"]})  # type: ignore[misc]
    assert reported() == ExitCode.DEFECT
    assert [graph["key"] for graph in json.loads(capsys.readouterr().out)["stages"][0]["new"]] == ["unheard-of"]
    store.write_json(report, {"keys": 3})
    with pytest.raises(BadData, match="report of its graphs"):
        reported()


@pytest.mark.long
def test_the_graphs_of_64_ranks_are_shown_without_any(tmp_path: Path) -> None:
    """Also for a kind that has no graphs: those that Neuron would compile."""
    plan_training(RunPaths(f"{tmp_path}/bucket/runs/week-01"), tmp_path / "made", ranks=64, rows=700)
    done = graphs("week-01", "--state", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "`cpu` runs operations one by one" in done.stdout
    assert "as kind neuron would compile them, fp32, 64 ranks" in done.stdout
    assert done.stdout.count("all-gather x64, all-reduce x64 (2), reduce-scatter x64   yes") == 2
    assert "all ranks compile the same graphs" in done.stdout


# ---- what can be asked -----------------------------------------------------------------------------------------------


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no such run"):
        find("week-99", Console(quiet=True), state=tmp_path)
    paths = plan_for_neuron(tmp_path)
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
    bucket = BucketGraphs(bucket=32, graphs=(first, first), difference=words)
    lowered = Lowered(kind="neuron", precision="compiler", ranks=64, buckets=(bucket,))
    found = Findings(run="w", uri="u", kind="neuron", precision="compiler", ranks=64, sets=(), stages=(), lowered=lowered)
    assert found.problems == ["rank 63 would compile other graphs than rank 0"]
    assert found.exit_code == ExitCode.DEFECT
