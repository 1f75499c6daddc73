"""Two weeks on torch-xla: the first run compiles ahead of time, the second finds everything compiled and skips the stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chain.recorded import read_calls
from tests.chain.runs import LocalState, embeddings, kill_descendant, load, started
from tests.infra.calls import Roles
from tests.tiny import make_model, write_pairs

pytest.importorskip("torch_xla", reason="torch-xla exists for Linux on x86-64 only")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SETTINGS: dict[str, Any] = {
    # Each shape costs seconds of XLA's compiler in every process that meets it.
    "train__epochs": 1,
    "train__length": "16",
    "embed__length": "16",
    "compile__trial_steps": 2,
    "health_check__matmul_size": 32,
    # What quality a few steps bring is not the question here.
    "gate__max_drop": 1,
}


@pytest.fixture(scope="module")
def two_weeks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalState]:
    """A first run, whose compile stage is killed once, and next week's from what it published."""
    folder = tmp_path_factory.mktemp("weeks")
    make_model(folder / "parent")
    state = LocalState(folder / "state", folder / "parent", device="xla", calls=folder / "calls.jsonl")
    first = state.command(write_pairs(folder / "week-1.jsonl", 200), arguments=("--parent", str(state.parent)), **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        # XLA compiles in half the time, and the graphs are the same.
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
        with started(first, folder / "first.txt") as process:
            while not kill_descendant(process.pid, lambda command: "rank compile" in command):
                assert process.poll() is None, (folder / "first.txt").read_text()
                time.sleep(0.1)
            assert process.wait(timeout=900) == 0, (folder / "first.txt").read_text()
        second = state.run(write_pairs(folder / "week-2.jsonl", 100, seed=1, prefix="new"), **SETTINGS)
        assert second.returncode == 0, second.stdout + second.stderr
        (folder / "second.txt").write_text(second.stdout)
        yield state


def output_of(state: LocalState, week: str) -> list[str]:
    return [" ".join(line.split()[1:]) for line in (state.folder.parent / f"{week}.txt").read_text().splitlines()]


def test_the_first_run_compiles_and_the_second_has_no_compile_stage(two_weeks: LocalState) -> None:
    first, second = two_weeks.runs
    # plan comes again, when everything is compiled.
    assert [(run / "compile/result.json").exists() for run in (first, second)] == [True, False]
    assert [load(run / "plan/result.json")["metrics"]["compile"] for run in (first, second)] == [False, False]
    compiled = load(first / "compile/result.json")["metrics"]
    assert compiled["compiles"] is True
    assert 0 < compiled["infer_graphs"] < compiled["graphs"]
    assert not (second / "compile").exists()
    jobs = [path.name for path in (two_weeks.folder / "logs").iterdir()]
    assert [name.startswith(f"compile-{first.name}") for name in jobs if name.startswith("compile")] == [True]
    assert any(line.startswith("compile done") for line in output_of(two_weeks, "first"))
    assert "compile skipped: nothing to compile" in output_of(two_weeks, "second")
    # Weights are inputs of the graphs: another week's model needs the same ones.
    plans = [load(run / "plan.json")["graphs"] for run in (first, second)]
    assert plans[0] == plans[1]
    assert len(list((two_weeks.bucket / "graphs").rglob("*.json"))) == 2


def test_a_killed_compile_stage_is_tried_again(two_weeks: LocalState) -> None:
    [folder] = (two_weeks.folder / "logs").glob("compile-*")
    assert sorted(path.name for path in folder.rglob("*.log")) == ["attempt-1-node-00000.log", "attempt-2-node-00000.log"]


def test_no_stage_met_a_graph_that_was_not_compiled_ahead_of_time(two_weeks: LocalState) -> None:
    for run in two_weeks.runs:
        for stage in ("train", "evaluate"):
            graphs = load(run / stage / "result.json")["metrics"]["graphs"]
            assert graphs["compiled"] > 0, stage
            assert (graphs["new"], graphs["fallbacks"]) == (0, {}), stage
        children = [load(path) for path in sorted((run / "embed").glob("graphs-*.json"))]
        assert len(children) == 2
        assert all(child["compiled"] > 0 and child["new"] == [] and child["fallbacks"] == {} for child in children)


def test_both_weeks_are_published(two_weeks: LocalState) -> None:
    assert two_weeks.published()["run"] == two_weeks.runs[-1].name
    assert [len(embeddings(run)) for run in two_weeks.runs] == [200, 300]
    assert "skipped" in (two_weeks.runs[-1] / "report/index.html").read_text()


def test_roles_allow_every_call_of_those_who_compile_and_load(two_weeks: LocalState) -> None:
    assert two_weeks.calls is not None
    calls = read_calls(two_weeks.calls)
    compiled = {call.resource.partition("/graphs/")[2] for call in calls if call.caller == "compile" and call.writes}
    assert any(key for key in compiled)
    assert Roles(two_weeks.folder / "cdk.out").refused(calls) == []
