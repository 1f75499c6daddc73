"""Parity of runs: judged on real small trainings whose evaluations, settings and data are equal or are not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pipeline import store
from pipeline.commands.parity import FREE_SETTINGS, Comparison, Evaluation, ParityVerdict, compare_runs, judge
from pipeline.config import RunConfig, build_config, parse_settings
from pipeline.contract import RunPaths, Stage
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.evaluation.query_values import QueryValues
from pipeline.plan import RunPlan
from pipeline.stages import train as stage
from pipeline.training import loop
from tests.pipeline.training.conftest import TrainingRun
from tests.pipeline.training.planned import plan_training

EVALUATED = [0, 4, 8, 12]


@dataclass
class Trained:
    """A state folder with finished trainings."""

    state: Path

    def paths(self, run: str) -> RunPaths:
        return RunPaths(str(self.state / "bucket" / "runs" / run))

    def replan(self, run: str, **changes: Any) -> None:
        """Write another plan into a run folder."""
        plan = RunPlan.from_json(store.read_bytes(self.paths(run).plan))
        store.write_bytes(self.paths(run).plan, plan.model_copy(update=changes).sealed().to_json())

    def plan(self, run: str) -> RunPlan:
        return RunPlan.from_json(store.read_bytes(self.paths(run).plan))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`base`; `same`, which was interrupted; `cast`, computed in bf16; `rate` and `seed`, which are other trainings."""
    folder = tmp_path_factory.mktemp("parity")
    trained = Trained(folder)

    def run(name: str, *, dies_at: int | None = None, precision: str = "fp32", seed: int = 5, **train: Any) -> None:
        paths = trained.paths(name)
        settings = {"validate_every": 4, "dropout": 0.0, **train}
        planned = plan_training(paths, folder / name, steps=12, **settings)
        deployment = {"hosts": {"train": "trn1.32xlarge"}, "prices": {"train": 21.5}}
        store.write_json(paths.input, {"deployment": deployment})
        world = planned.world.model_copy(update={"precision": precision})
        config = planned.config.model_copy(update={"seed": seed})
        trained.replan(name, world=world, config=config)
        training = TrainingRun(paths, trained.plan(name), folder / name / "scratch")
        if dies_at is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "step_seed", _dying(loop.step_seed, dies_at))
                with pytest.raises(InterruptedError):
                    stage.run(training.context())
        stage.run(training.context())

    run("base")
    run("same", dies_at=9)
    run("cast", precision="bf16")
    run("rate", learning_rate=1e-3)
    run("seed", seed=6)
    return trained


def _dying(step_seed: Callable[..., int], at: int) -> Callable[..., int]:
    def dying(seed: int, step: int, rank: int, part: int) -> int:
        if step == at:
            raise InterruptedError
        return step_seed(seed, step, rank, part)

    return dying


@pytest.fixture
def trained(finished: Trained, tmp_path: Path) -> Trained:
    """A copy that a test may change."""
    shutil.copytree(finished.state / "bucket", tmp_path / "state" / "bucket")
    return Trained(tmp_path / "state")


def test_same_training_is_within_also_after_an_interruption(finished: Trained) -> None:
    found = compare_runs("base", "same", state=finished.state)
    assert (found.verdict, found.exit_code) == (ParityVerdict.WITHIN, 0)
    assert [evaluation.step for evaluation in found.evaluations] == EVALUATED
    assert {value for _, value in found.largest().values()} == {0.0}
    assert "20 queries cannot show 0.1 %" in found.reason
    assert "batches are equal bit for bit up to step 12" in found.notes
    # The curve that is compared is the one that training wrote down.
    lines = [json.loads(line) for line in store.read_bytes(finished.paths("base").metrics).splitlines()]
    curve = {line["step"]: line["validation"] for line in lines if "validation" in line}
    assert {
        evaluation.step: {name: item.a for name, item in evaluation.metrics.items()} for evaluation in found.evaluations
    } == curve


def losses(paths: RunPaths) -> list[float]:
    lines = [json.loads(line) for line in store.read_bytes(paths.metrics).splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_other_precision_is_judged(finished: Trained) -> None:
    found = compare_runs("base", "cast", state=finished.state)
    assert losses(finished.paths("base")) != losses(finished.paths("cast"))
    assert (found.runs[0]["precision"], found.runs[1]["precision"]) == ("fp32", "bf16")
    # A rounding of the third digit moves at most a few of twenty queries by a rank.
    assert found.verdict in (ParityVerdict.WITHIN, ParityVerdict.NOISE)
    assert max(value for _, value in found.largest().values()) < 0.1


def test_other_curves_are_seen(trained: Trained) -> None:
    """Half the learning rate behind a plan that denies it: what a device that computes something else would look like."""
    trained.replan("rate", config=trained.plan("base").config)
    found = compare_runs("base", "rate", state=trained.state)
    assert found.verdict in (ParityVerdict.NOISE, ParityVerdict.DIFFERS)
    first, last = found.evaluations[0].metrics["ndcg@10"], found.evaluations[-1].metrics["ndcg@10"]
    assert first.difference == 0.0
    assert abs(last.difference) > 0.001
    assert last.b - last.a == pytest.approx(last.difference)
    assert last.low < last.difference < last.high


@pytest.mark.parametrize(("run", "named"), [("rate", "train.learning_rate: 0.002 | 0.001"), ("seed", "seed: 5 | 6")])
def test_other_settings_are_refused_by_name(finished: Trained, run: str, named: str) -> None:
    with pytest.raises(BadConfig, match="not the same training") as refusal:
        compare_runs("base", run, state=finished.state)
    assert refusal.value.value == [named]


def test_every_free_setting_exists() -> None:
    names = set(RunConfig.model_fields)
    for section, field in RunConfig.model_fields.items():
        names |= {f"{section}.{name}" for name in getattr(field.annotation, "model_fields", ())}
    assert set(FREE_SETTINGS) <= names


def test_ranks_and_device_may_differ_as_long_as_the_global_batch_is_equal(trained: Trained) -> None:
    plan = trained.plan("same")
    world = plan.world.model_copy(update={"kind": "neuron", "precision": "compiler", "ranks_per_node": 4})
    train = plan.config.train.model_copy(update={"batch_size": 2, "log_every": 3})
    device = plan.config.device.model_copy(update={"kind": "neuron"})
    trained.replan("same", world=world, config=plan.config.model_copy(update={"train": train, "device": device}))
    assert compare_runs("base", "same", state=trained.state).verdict is ParityVerdict.WITHIN

    trained.replan("same", world=world.model_copy(update={"ranks_per_node": 8}))
    with pytest.raises(BadConfig) as refusal:
        compare_runs("base", "same", state=trained.state)
    assert refusal.value.value == ["train.batch_size x ranks: 8 | 16"]


def test_another_gate_is_no_other_training(trained: Trained) -> None:
    plan = trained.plan("same")
    gate = plan.config.gate.model_copy(update={"max_drop": 0.5, "undecided": "accept"})
    holdout = plan.holdout.model_copy(update={"decides": "64 distinct queries decide about a drop of 50 %"})
    trained.replan("same", config=plan.config.model_copy(update={"gate": gate}), holdout=holdout)
    assert compare_runs("base", "same", state=trained.state).verdict is ParityVerdict.WITHIN


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("parent", {"sha256": "0" * 64}, "parent: "),
        ("train", {"steps": 13}, "plan.train.steps: 12 | 13"),
        ("holdout", {"queries": 39}, "plan.holdout.queries: 40 | 39"),
    ],
)
def test_other_parent_steps_or_holdout_are_refused(trained: Trained, section: str, changes: dict[str, Any], named: str) -> None:
    trained.replan("same", **{section: getattr(trained.plan("same"), section).model_copy(update=changes)})
    with pytest.raises(BadConfig) as refusal:
        compare_runs("base", "same", state=trained.state)
    [value] = refusal.value.value
    assert value.startswith(named)


def change(path: str, edit: Callable[[np.ndarray], np.ndarray], metric: str = "ndcg@10") -> None:
    found = QueryValues.read(Path(path))
    QueryValues(found.queries, {**found.values, metric: edit(found.values[metric].copy())}).write(Path(path))


def test_worse_run_differs_and_the_reason_says_where(trained: Trained) -> None:
    change(trained.paths("same").validation(8), lambda values: values - 0.01)
    found = compare_runs("base", "same", state=trained.state)
    assert (found.verdict, found.exit_code) == (ParityVerdict.DIFFERS, 67)
    assert "ndcg@10 differs by 0.01000 at step 8" in found.reason
    assert "1 of 4 evaluations" in found.reason
    assert compare_runs("base", "same", state=trained.state, metric="mrr@10").verdict is ParityVerdict.WITHIN
    assert compare_runs("base", "same", state=trained.state, tolerance=0.0101).verdict is ParityVerdict.WITHIN


def test_few_queries_that_moved_are_noise(trained: Trained) -> None:
    def move_one(values: np.ndarray) -> np.ndarray:
        values[0] -= 0.4
        return values

    change(trained.paths("same").validation(12), move_one)
    found = compare_runs("base", "same", state=trained.state)
    assert (found.verdict, found.exit_code) == (ParityVerdict.NOISE, 0)
    item = found.evaluations[-1].metrics["ndcg@10"]
    assert item.difference == pytest.approx(-0.02)
    assert item.low < -0.02 < item.high == 0.0


def test_whole_holdout_counts_where_both_runs_have_it(trained: Trained) -> None:
    for run in ("base", "same"):
        shutil.copy(trained.paths(run).validation(12), tmp := trained.state / f"{run}.parquet")
        store.upload(tmp, trained.paths(run).query_values)
    assert compare_runs("base", "same", state=trained.state).evaluations[-1].name == "whole hold-out"
    change(trained.paths("same").query_values, lambda values: values + 0.5)
    found = compare_runs("base", "same", state=trained.state)
    assert found.verdict is ParityVerdict.DIFFERS
    assert "at whole hold-out" in found.reason
    Path(trained.paths("base").query_values).unlink()
    assert compare_runs("base", "same", state=trained.state).verdict is ParityVerdict.WITHIN


def with_digests(paths: RunPaths, digests: dict[int, str]) -> None:
    lines = [json.loads(line) for line in store.read_bytes(paths.metrics).splitlines()]
    for line in lines:
        line.pop("data_digest", None)
        if "loss" in line and line["step"] in digests:
            line["data_digest"] = digests[line["step"]]
    store.write_bytes(paths.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())


def test_other_data_differs_whatever_the_curves_say(trained: Trained) -> None:
    with_digests(trained.paths("base"), {4: "a", 8: "b", 12: "c"})
    with_digests(trained.paths("same"), {4: "a", 8: "b", 12: "c"})
    found = compare_runs("base", "same", state=trained.state)
    assert found.verdict is ParityVerdict.WITHIN
    assert "batches are equal bit for bit up to step 12" in found.notes
    with_digests(trained.paths("same"), {4: "a", 8: "x", 12: "y"})
    found = compare_runs("base", "same", state=trained.state)
    assert (found.verdict, found.reason) == (ParityVerdict.DIFFERS, "other data between step 5 and step 8")
    with_digests(trained.paths("same"), {})
    found = compare_runs("base", "same", state=trained.state)
    assert found.verdict is ParityVerdict.WITHIN
    assert "batches were not compared" in found.notes[0]


def test_other_queries_are_refused(trained: Trained) -> None:
    path = Path(trained.paths("same").validation(4))
    found = QueryValues.read(path)
    QueryValues(((1, None), *found.queries[1:]), found.values).write(path)
    with pytest.raises(BadConfig, match="different queries") as refusal:
        compare_runs("base", "same", state=trained.state)
    assert refusal.value.value == "step 4: 1 only in A, 1 only in B, 19 in both"


def test_what_is_missing_is_named(trained: Trained) -> None:
    with pytest.raises(MissingInput, match="no such run"):
        compare_runs("base", "absent", state=trained.state)
    with pytest.raises(BadConfig, match="no such metric") as refusal:
        compare_runs("base", "same", state=trained.state, metric="map")
    assert "ndcg@10" in refusal.value.rule
    Path(trained.paths("same").validation(8)).unlink()
    with pytest.raises(MissingInput, match="same steps") as missing:
        compare_runs("base", "same", state=trained.state)
    assert missing.value.value == ["only in A: [8]", "only in B: []"]
    for run in ("base", "same"):
        shutil.rmtree(trained.paths(run).validations)
    with pytest.raises(MissingInput, match="no evaluations"):
        compare_runs("base", "same", state=trained.state)


def test_runs_that_have_not_ended_are_compared_as_far_as_they_are(trained: Trained) -> None:
    for run in ("base", "same"):
        Path(trained.paths(run).validation(12)).unlink()
    found = compare_runs("base", "same", state=trained.state)
    assert any("after step 8 of 12" in note for note in found.notes)


@pytest.mark.parametrize(("name", "match"), [("metrics", "metrics cannot be read"), ("plan", "plan cannot be read")])
def test_files_that_cannot_be_read(trained: Trained, name: str, match: str) -> None:
    Path(getattr(trained.paths("same"), name)).write_text("{")
    with pytest.raises(BadData, match=match):
        compare_runs("base", "same", state=trained.state)


def test_in_buckets_and_by_uri(finished: Trained, s3_root: str) -> None:
    for run in ("base", "same"):
        store.upload_folder(Path(finished.paths(run).root), f"{s3_root}/runs/{run}")
    expected = compare_runs("base", "same", state=finished.state).evaluations
    assert compare_runs("base", "same", bucket=s3_root).evaluations == expected
    assert compare_runs(f"{s3_root}/runs/base/", finished.paths("same").root).evaluations == expected


def evaluations(*found: tuple[float, float, float], queries: int = 2000) -> list[Evaluation]:
    """(difference, low, high) of each."""
    items = [Comparison(a=0.5, b=0.5 + value, difference=value, low=low, high=high) for value, low, high in found]
    return [Evaluation(step=number, queries=queries, metrics={"m": item}) for number, item in enumerate(items)]


@pytest.mark.parametrize(
    ("found", "verdict", "at"),
    [
        ([(0.0, 0.0, 0.0)], ParityVerdict.WITHIN, "step 0"),
        ([(0.0005, 0.0004, 0.0006), (-0.001, -0.0011, -0.0009)], ParityVerdict.WITHIN, "step 1"),  # proven, but small
        ([(0.3 - 0.299, 0.0009, 0.0011)], ParityVerdict.WITHIN, "step 0"),  # a little above 0.001 in binary
        ([(0.0011, -0.0001, 0.002), (0.0, 0.0, 0.0)], ParityVerdict.NOISE, "step 0"),
        ([(0.0011, 0.0, 0.002)], ParityVerdict.NOISE, "step 0"),
        ([(0.005, -0.001, 0.01), (-0.002, -0.003, -0.001)], ParityVerdict.DIFFERS, "step 1"),  # the larger one may be chance
    ],
)
def test_verdicts(found: list[tuple[float, float, float]], verdict: ParityVerdict, at: str) -> None:
    judged, reason = judge(evaluations(*found), "m", 0.001)
    assert judged is verdict
    assert at in reason
    assert "cannot show" not in reason
    assert "1999 queries cannot show 0.1 %" in judge(evaluations(*found, queries=1999), "m", 0.001)[1]


def test_table_names_runs_evaluations_and_verdict(finished: Trained) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    compare_runs("base", "cast", state=finished.state).print(console)
    text = console.export_text()
    assert "A  base: cpu, fp32, 1 ranks" in text
    assert "B  cast: cpu, bf16, 1 ranks" in text
    for step in EVALUATED:
        assert f"step {step} " in text
    assert text.count("recall@100") == len(EVALUATED) + 1
    assert text.splitlines()[-1].split(":")[0] in {verdict.value for verdict in ParityVerdict}


def test_price_and_performance_of_both_trainings(trained: Trained) -> None:
    """As in a comparison of instance types: what a host costs an hour, steps a second, and what the training cost."""
    for run, seconds in (("base", 6.0), ("same", 3.0)):
        paths = trained.paths(run)
        cost = {"stages": {"train": {"node_hours": 2 * seconds, "usd": 43.0 * seconds}, "plan": {"node_hours": 1, "usd": 1}}}
        store.write_json(paths.result(Stage.TRAIN), {"metrics": {"steps": 12, "seconds": seconds}})
        store.write_json(paths.result(Stage.REPORT), {"metrics": {"cost": cost}})
    found = compare_runs("base", "same", state=trained.state)
    known = {"hosts": "trn1.32xlarge", "usd_per_hour": 21.5, "ndcg@10": found.evaluations[-1].metrics["ndcg@10"].a}
    assert found.runs[0].items() >= {**known, "steps_per_second": 2.0, "node_hours": 12.0, "usd": 258.0}.items()
    assert found.runs[1].items() >= {**known, "steps_per_second": 4.0, "node_hours": 6.0, "usd": 129.0}.items()
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    found.print(console)
    [line] = [line for line in console.export_text().splitlines() if line.split()[:2] == ["B", "trn1.32xlarge"]]
    assert line.split()[2:6] == ["21.5", "4", "6", "129"]


def trnpipe(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", "parity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_command(trained: Trained) -> None:
    result = trnpipe("base", "same", "--state", trained.state)
    assert result.returncode == 0
    assert "within: ndcg@10 differs by at most 0.00000 (step 0)" in result.stdout
    change(trained.paths("same").validation(8), lambda values: values - 0.01)
    result = trnpipe("base", trained.paths("same").root, "--state", trained.state, "--json")
    assert result.returncode == 67
    found = json.loads(result.stdout)
    assert (found["verdict"], found["metric"], found["tolerance"]) == ("differs", "ndcg@10", 0.001)
    assert found["largest"]["ndcg@10"] == {"at": "step 8", "difference": pytest.approx(0.01)}
    assert found["evaluations"][2]["metrics"]["ndcg@10"]["low"] == pytest.approx(-0.01)
    result = trnpipe("base", "rate", "--state", trained.state)
    assert result.returncode == 64
    assert "value:  train.learning_rate: 0.002 | 0.001" in result.stderr


def test_make_parity_gives_settings_that_there_are() -> None:
    text = Path("Makefile").read_text().replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if line.startswith("PARITY_SETTINGS =")]
    settings = line.partition("= ")[2].split()
    assert build_config(parse_settings(settings)).embed.length == 64
