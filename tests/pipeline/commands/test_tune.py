"""The search for settings: real short runs of real stages, and what is made of their figures."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from pipeline import store
from pipeline.backends.device import resolve_precision
from pipeline.commands import tune_space, tune_trials
from pipeline.commands.tune import search
from pipeline.commands.tune_table import Row, Table, describe_basis, describe_best, grid
from pipeline.config import build_config, load_config_file, nested
from pipeline.contract import RunPaths
from pipeline.errors import BadConfig, BadData, MissingInput, TrnpipeError
from pipeline.estimate.variant import plan_world
from pipeline.graphs.fingerprint import training_flags
from pipeline.plan import RowFile, RunPlan
from pipeline.run import find_run
from pipeline.run.processes import tree_memory
from pipeline.run_inputs import PlannedWorld
from tests.pipeline.training.conftest import TrainingRun, training_run

__all__ = ["training_run"]

PlanTraining = Callable[..., TrainingRun]


def command(state: Path, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", "tune", *map(str, arguments), "--state", str(state)]


def trnpipe_tune(state: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(state, *arguments),
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | environment,
    )


def planned(training_run: PlanTraining, tmp_path: Path, **settings: Any) -> Path:
    """A state folder whose bucket has a planned run, `week-01`."""
    training_run(str(tmp_path / "state" / "bucket"), **settings)
    return tmp_path / "state"


DEFAULTS: dict[str, Any] = {
    "run": "week-01",
    "bucket": None,
    "steps": 8,
    "vary": (),
    "limit": None,
    "objective": "samples_per_second",
    "tolerance": 0.02,
    "gain": 0.02,
    "timeout_minutes": 120.0,
}


def options(state: Path, **more: Any) -> dict[str, Any]:
    return DEFAULTS | {"state": state} | more


def searched(given: dict[str, Any], **more: Any) -> tuple[Table, Row]:
    return search(console=Console(quiet=True), **given | more)


def table_of(given: dict[str, Any], rows: list[Row]) -> Table:
    """Leave a table as an earlier search would have."""
    paths, _ = find_run.find_run(given["run"], given["bucket"], given["state"])
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    config = tune_trials.base_config(plan.config)
    world = plan_world(config)
    window = tune_space.common_window(config, tune_space.parse_vary(given["vary"], config), world)
    table = Table.open(paths, describe_basis(plan, world, steps=given["steps"], window=window))
    for row in rows:
        table.put(row)
    return table


def row(name: str, settings: dict[str, Any], rate: float, loss: float, *, batch: int = 8, **more: Any) -> Row:
    batches = {"batch_size": batch, "accumulation": 1, "ranks": 1, "tokens": 64 * batch}
    figures = {"samples_per_second": rate, "loss": loss, "step_seconds": 0.1, "host_memory_bytes": 2**28}
    return Row(name=name, settings=settings, status="done", batches=batches, **{**figures, **more})


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_tries_keeps_resumes(training_run: PlanTraining, tmp_path: Path, s3_root: str) -> None:
    """A batch that is larger, a precision that this kind does not have, a kind that this machine does not have."""
    training_run(s3_root)
    state, out = tmp_path / "state", tmp_path / "tuned" / "tune.yaml"
    arguments = ["week-01", "--bucket", s3_root, "--steps", "8", "--gain", "0", "--json", "--out", out]
    vary = ["--vary", "train.batch_size=64", "--vary", "device.precision=compiler", "--vary", "device.kind=cuda"]
    first = trnpipe_tune(state, *arguments, *vary, CUDA_VISIBLE_DEVICES="")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    base, larger, compiler, cuda = found["rows"]
    assert [each["name"] for each in found["rows"]] == [f"week-01-tune-{number:03d}" for number in range(4)]
    assert (base["settings"], larger["settings"]) == ({}, {"train.batch_size": 64})
    for each in (base, larger):
        assert each["status"] == "done"
        assert each["samples_per_second"] > 0
        assert each["step_seconds"] > 0
        assert each["host_memory_bytes"] > 100 << 20
        assert 0 < each["loss"] < 10
        assert (each["compile_seconds"], each["graphs"]) == (None, None)
    assert (compiler["status"], compiler["exit_code"]) == ("refused", 64)
    assert "compiler" in compiler["what"]
    # Larger batches are faster, unless the machine has other work just then.
    winner = max(base, larger, key=lambda each: each["samples_per_second"])
    assert compiler["settings"] == {**winner["settings"], "device.precision": "compiler"}
    assert (cuda["status"], cuda["exit_code"]) == ("failed", 64)
    assert cuda["what"].startswith("train: ")
    assert found["best"]["name"] == winner["name"]
    assert found["config"] == nested(winner["settings"]) == load_config_file(out)
    assert ("loss not judged" in out.read_text()) == (winner is larger)
    assert found["basis"]["machine"]["kind"] == "cpu"
    assert found["table"].startswith(f"{s3_root}/runs/week-01/tune/steps-0008-")
    assert store.read_json(found["table"])["rows"] == found["rows"]

    # What ran was the real thing, on the run's own rows, and nothing large is left of it.
    paths = RunPaths(str(next((state / "tune").iterdir()) / "runs" / larger["name"]))
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    assert (plan.config.train.batch_size, plan.train.steps, plan.config.registry) == (64, 8, None)
    assert plan.train.rows == 150
    assert [line["step"] for line in map(json.loads, store.read_bytes(paths.metrics).splitlines()) if "loss" in line] == [
        *range(1, 9)
    ]
    assert "step 8 of 8" in (Path(paths.root) / "train.log").read_text()
    assert not Path(paths.model).exists()
    assert not list(Path(paths.root).rglob("*.safetensors"))

    # The next search measures only what is not in the table: with so high a gain the base stays, however much a busy machine
    # kept it from its few short steps, and one value is new.
    more = ["--vary", "device.sync_points=1", *vary[:2], "--gain", "1e9", "--tolerance", "0.001"]
    second = trnpipe_tune(state, "week-01", "--bucket", s3_root, "--steps", "8", *more)
    assert second.returncode == 0, second.stderr
    assert "the table has 4 variants already" in second.stdout
    rows = store.read_json(found["table"])["rows"]
    assert rows[:4] == found["rows"]
    assert (rows[4]["settings"], rows[4]["status"], len(rows)) == ({"device.sync_points": 1}, "done", 5)
    # The same batches in the same order, and nothing that counts on this kind is changed: the very same loss.
    assert rows[4]["loss"] == base["loss"]
    assert "loss +0.0%" in second.stdout
    assert second.stdout.endswith("{}\n")


@pytest.mark.long
def test_interrupted_leaves_no_process_and_goes_on(training_run: PlanTraining, tmp_path: Path) -> None:
    state = planned(training_run, tmp_path)
    process = subprocess.Popen(command(state, "week-01", "--steps", "4000", "--limit", "0"), stdout=subprocess.PIPE, text=True)
    log = tmp_path / "none"
    deadline = time.monotonic() + 120
    while not (log.is_file() and "is process" in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        log = next(state.glob("tune/*/runs/week-01-tune-000/train.log"), log)
        time.sleep(0.1)
    rank = int(log.read_text().split("is process ")[1].split()[0])
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "runs the missing variants" in output
    assert not Path(f"/proc/{rank}").exists()
    assert not list((state / "bucket/runs/week-01").glob("tune/*"))
    # Its lock went with it: a search with so little time that the base cannot end says just that.
    with pytest.raises(TrnpipeError) as caught:
        searched(options(state, steps=4000, timeout_minutes=0.01))
    assert caught.value.exit_code == 75
    assert "took longer than 0.01 minutes" in str(caught.value)


@pytest.mark.long
def test_kind_that_compiles(training_run: PlanTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant goes through compile and train; it reads losses only every few steps."""
    # The programs are as many and compute the same, only slower.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    run = training_run(str(tmp_path / "state" / "bucket"), length=32)
    small = {"device": {"kind": "xla"}, "embed": {"length": 32}, "compile": {"trial_steps": 2}}
    run.plan = run.plan.model_copy(update={"config": build_config(run.plan.config.model_dump(mode="json"), small)}).sealed()
    store.write_bytes(run.paths.plan, run.plan.to_json())
    given = options(tmp_path / "state", steps=16, vary=("device.loader.batches_per_execution=2",), limit=0)
    table, best = searched(given)
    assert [(each.status, each.exit_code) for each in table.rows] == [("done", 0)]
    assert best.compile_seconds is not None
    assert best.compile_seconds > 0
    assert best.graphs is not None
    assert best.graphs >= 2
    assert best.step_seconds is not None
    assert table.basis["machine"]["kind"] == "xla"
    folder = next((tmp_path / "state").glob("tune/*/runs/week-01-tune-000"))
    lines = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [4, 8, 12, 16]
    shown = Console(record=True, width=120, file=io.StringIO())
    shown.print(grid(table, given["tolerance"], best))
    assert "graphs" in shown.export_text()


# ---- which row wins --------------------------------------------------------------------------------------------------


def test_faster_but_worse_does_not_win(training_run: PlanTraining, tmp_path: Path) -> None:
    given = options(planned(training_run, tmp_path), vary=("device.precision=bf16", "device.threads_per_rank=2,4"))
    rows = [
        row("base", {}, 100.0, 1.0),
        row("cast", {"device.precision": "bf16"}, 180.0, 1.05),
        row("two", {"device.threads_per_rank": 2}, 101.0, 1.0),
        row("four", {"device.threads_per_rank": 4}, 130.0, 1.01),
    ]
    expected = table_of(given, rows)
    table, best = searched(given)
    assert table.rows == rows
    assert best.name == "four"
    assert table.verdict(rows[1], given["tolerance"]) == "loss +5.0% WORSE"
    assert 'Not chosen, loss worse: device.precision="bf16" (180.0 samples/s)' in describe_best(
        table, best, given["objective"], given["tolerance"]
    )
    # With a tolerance for it the same rows choose otherwise; the next factor is then varied on top, which is not in the table.
    _, best = searched(given, tolerance=0.1, limit=1)
    assert best.name == "cast"
    assert expected.uri == table.uri


def test_difference_within_the_noise_does_not_win(training_run: PlanTraining, tmp_path: Path) -> None:
    given = options(planned(training_run, tmp_path), vary=("device.threads_per_rank=2",), gain=0.05)
    table_of(given, [row("base", {}, 100.0, 1.0), row("two", {"device.threads_per_rank": 2}, 104.0, 1.0)])
    assert searched(given)[1].name == "base"
    assert searched(given, gain=0.03)[1].name == "two"


def test_other_objective(training_run: PlanTraining, tmp_path: Path) -> None:
    given = options(planned(training_run, tmp_path), vary=("train.batch_size=4",), objective="host_memory_bytes")
    rows = [row("base", {}, 100.0, 1.0), row("less", {"train.batch_size": 4}, 60.0, 0.7, batch=4, host_memory_bytes=2**27)]
    table_of(given, rows)
    table, best = searched(given)
    assert best.name == "less"
    assert table.verdict(best, 0.0) == "loss not judged: other batches than the base's"
    text = describe_best(table, best, given["objective"], given["tolerance"])
    assert "Other batches than the base's" in text
    assert yaml.safe_load(text + yaml.safe_dump(tune_space.nested(best.settings))) == {"train": {"batch_size": 4}}


def test_table_of_another_machine_or_format(training_run: PlanTraining, tmp_path: Path) -> None:
    given = options(planned(training_run, tmp_path))
    table = table_of(given, [row("base", {}, 100.0, 1.0)])
    paths = find_run.find_run(given["run"], given["bucket"], given["state"])[0]
    other = {**table.basis, "machine": {**table.basis["machine"], "cores": 4096}}
    assert Table.open(paths, table.basis).rows == table.rows
    assert Table.open(paths, other).rows == []
    store.write_json(table.uri, {"rows": [{"name": "x", "color": "red"}]})
    with pytest.raises(BadData, match="cannot be read"):
        Table.open(paths, table.basis)


@pytest.mark.parametrize(
    ("status", "exit_code", "seconds", "again"),
    [
        ("failed", 75, 60, True),
        ("failed", -9, 60, True),
        ("failed", 64, 60, False),
        ("slow", 75, 60, False),
        ("slow", 75, 61, True),
    ],
)
def test_which_rows_are_tried_again(status: str, exit_code: int, seconds: float, again: bool) -> None:
    table = Table(uri="", basis={}, rows=[Row(name="x", settings={}, status=status, exit_code=exit_code, timeout_seconds=60)])
    assert (table.find({}, seconds) is None) == again


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_device_memory_is_the_monitors_largest(training_run: PlanTraining) -> None:
    paths = training_run().paths
    assert tune_trials.device_memory(paths) is None
    lines = [{"device_memory_bytes": size} for size in (5 << 30, 7 << 30, None)]
    store.write_bytes(paths.host_monitor(0), "".join(json.dumps(line) + "\n" for line in lines).encode())
    assert tune_trials.device_memory(paths) == 7 << 30


def test_memory_counts_children() -> None:
    script = "import subprocess, sys, time; b = bytearray(80 << 20); print(1, flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        process.stdout.readline()
        assert tree_memory(process.pid) > 90 << 20
        os.killpg(process.pid, signal.SIGKILL)


# ---- the space -------------------------------------------------------------------------------------------------------


def keys(space: list[Any]) -> list[str]:
    return [next(iter(factor[0])) for factor in space if factor]


def test_default_space_by_kind() -> None:
    config = build_config({"train": {"batch_size": 8}})

    def of(kind: str, precision: str) -> list[Any]:
        return tune_space.default_space(config, PlannedWorld(kind=kind, precision=precision, nodes=1, ranks_per_node=1))

    assert keys(of("cpu", "fp32")) == ["train.batch_size", "device.precision", "device.threads_per_rank"]
    assert keys(of("cuda", "bf16")) == ["train.batch_size", "device.precision"]
    neuron = of("neuron", "bf16")
    # Eight pairs are one micro-batch.
    assert [each for factor in neuron for each in factor if "train.micro_batches" in each] == [{"train.micro_batches": 2}]
    assert {"device.sync_points", "device.loader.transfer_threads", "compile.optlevel"} <= set(keys(neuron))
    assert [{"device.precision": "fp32"}] in neuron
    casts = [{"compile.auto_cast": cast, "device.precision": "compiler"} for cast in ("matmult", "all")]
    assert casts in neuron
    xla = [each for factor in of("xla", "fp32") for each in factor]
    assert {"device.loader.batches_per_execution": 4, "device.sync_points": 1} in xla
    assert not any(key.startswith("compile") or value == "compiler" for each in xla for key, value in each.items())
    assert (
        tune_space.common_window(config, of("xla", "fp32"), PlannedWorld(kind="xla", precision="fp32", nodes=1, ranks_per_node=1))
        == 4
    )
    cpu = PlannedWorld(kind="cpu", precision="fp32", nodes=1, ranks_per_node=1)
    assert tune_space.common_window(config, of("cpu", "fp32"), cpu) == 1
    assert tune_space.common_window(config, tune_space.parse_vary(["device.kind=xla"], config), cpu) == 4
    assert tune_space.common_window(config, tune_space.parse_vary(["device.loader.batches_per_execution=2,3"], config), cpu) == 6
    # Whatever is tried is a configuration, alone on a base that allows it.
    single = {
        "train": {"length": 128, "log_every": 4, "validate_every": 20, "checkpoint_every": 20},
        "device": {"kind": "neuron"},
    }
    for each in (each for factor in neuron for each in factor):
        build_config(single, tune_space.nested(each))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("train.batch_sice=3", "did you mean train.batch_size?"),
        ("train.learning_rate=0.1", "tune does not vary this setting"),
        ("data.holdout_fraction=0.1", "tune does not vary this setting"),
        ("device.loader={host_prefetch: 2}", "tune does not vary this setting"),
        ("train.batch_size=", "cannot read what to vary"),
        ("train.batch_size", "cannot read what to vary"),
        ("train.batch_size=[1", "cannot be read"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(training_run: PlanTraining, tmp_path: Path, item: str, words: str) -> None:
    state = planned(training_run, tmp_path)
    with pytest.raises(BadConfig) as caught:
        searched(options(state, vary=(item,)))
    assert words in str(caught.value)
    assert not (state / "tune").exists()


def test_values_are_yaml() -> None:
    config = build_config({})
    [sizes, cast] = tune_space.parse_vary(["train.micro_batches=null,16", "compile.auto_cast=null,all"], config)
    assert sizes == [{"train.micro_batches": None}, {"train.micro_batches": 16}]
    assert cast == [{"compile.auto_cast": None}, {"compile.auto_cast": "all", "device.precision": "compiler"}]
    with pytest.raises(BadConfig, match="varied twice"):
        tune_space.parse_vary(["train.batch_size=1", "train.batch_size=2"], config)


def test_the_four_casts_of_training_are_one_search() -> None:
    """`--vary device.precision=fp32 --vary compile.auto_cast=matmult,all`, from the default on."""
    base = {"device": {"kind": "neuron"}}
    factors = tune_space.parse_vary(["device.precision=fp32", "compile.auto_cast=matmult,all"], build_config(base))
    variants: list[dict[str, Any]] = [{}, *(change for factor in factors for change in factor)]
    found = []
    for variant in variants:
        config = build_config(base, tune_space.nested(variant))
        precision = resolve_precision("neuron", config.device.precision)
        found.append((precision, training_flags(config.compile, precision)[3:]))
    assert found == [
        ("bf16", ["--auto-cast=none"]),
        ("fp32", ["--auto-cast=none"]),
        ("compiler", ["--auto-cast=matmult", "--auto-cast-type=bf16"]),
        ("compiler", ["--auto-cast=all", "--auto-cast-type=bf16"]),
    ]


def test_contradiction_is_a_row(training_run: PlanTraining, tmp_path: Path) -> None:
    """Micro-batches divide a batch."""
    given = options(planned(training_run, tmp_path), vary=("train.micro_batches=3", "train.batch_size=x"))
    table_of(given, [row("base", {}, 100.0, 1.0)])
    table, best = searched(given)
    assert best.name == "base"
    assert [(each.status, each.exit_code) for each in table.rows[1:]] == [("refused", 64)] * 2
    assert "does not divide" in table.rows[1].what
    assert "train.batch_size" in table.rows[2].what
    rendered = Console(record=True, width=200, file=io.StringIO())
    rendered.print(grid(table, given["tolerance"], best))
    assert "refused, 64" in rendered.export_text()


# ---- what it starts from ---------------------------------------------------------------------------------------------


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no such run") as caught:
        searched(options(tmp_path, run="week-99"))
    assert caught.value.value == f"{tmp_path}/bucket/runs/week-99/plan.json"


def test_rows_are_gone(training_run: PlanTraining, tmp_path: Path) -> None:
    state = planned(training_run, tmp_path)
    plan_path = state / "bucket/runs/week-01/plan.json"
    plan = RunPlan.from_json(plan_path.read_bytes())
    plan = plan.model_copy(update={"row_files": {"train.arrow": RowFile(sha256="0", size=1, rows=1)}}).sealed()
    plan_path.write_bytes(plan.to_json())
    with pytest.raises(MissingInput, match="gone or have changed"):
        searched(options(state))


def test_one_search_at_a_time(training_run: PlanTraining, tmp_path: Path) -> None:
    given = options(planned(training_run, tmp_path))
    table_of(given, [row("base", {}, 100.0, 1.0)])
    searched(given, limit=0)
    with open(next((given["state"] / "tune").glob("*/lock")), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadConfig, match="another search"):
            searched(given, limit=0)


def test_places_of_a_local_run(tmp_path: Path) -> None:
    (tmp_path / "models" / "parent").mkdir(parents=True)
    assert find_run.mirrored("s3://local/models/parent", str(tmp_path)) == f"{tmp_path}/models/parent"
    assert find_run.mirrored("s3://elsewhere/models/other", str(tmp_path)) == "s3://elsewhere/models/other"
    assert find_run.mirrored("s3://bucket/models/parent", None) == "s3://bucket/models/parent"
