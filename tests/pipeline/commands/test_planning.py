"""`trnpipe plan`: what it prints for people and for programs, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline import store
from pipeline.cli import app
from pipeline.commands.planning import Estimate, parse_hours, report
from pipeline.config import parse_settings
from pipeline.contract import RunPaths, Stage, StageResult, now
from pipeline.errors import BadConfig, MissingInput
from pipeline.estimate.throughput import EMBED_HOSTS
from tests.pipeline.training.planned import plan_training
from tests.tiny import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "model"
    make_model(folder)
    # Only the configuration is read.
    (folder / "model.safetensors").unlink()
    return folder


SETTINGS = ("train.query_length=16", "train.length=60", "embed.length=60")


def trnpipe(*arguments: str | Path, columns: int = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_table_names_every_place_and_the_verdict(model: Path) -> None:
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    result = trnpipe("plan", "--parent", model, "--nodes", "2", "--set", "device.kind=neuron", *options)
    assert result.returncode == 0, result.stderr
    for words in (
        "on neuron (bf16), 2 x 32 ranks",
        # Eight micro-batches of 18 rows of 60 tokens.
        f"at most {64 * 128} pairs, {64 * 8 * 18 * 60} tokens per step",
        "train, a rank's device, in a training step",
        "of 16.00 GiB",
        "train, a node's host",
        "of 479.00 GiB",
        "embed, a rank's device, in a batch",
        "embeddings and scores",
    ):
        assert words in result.stdout, words
    assert result.stdout.splitlines()[-1] == "It fits."
    assert "…" not in result.stdout


def test_what_cannot_fit_ends_with_64_and_a_remedy_in_both_forms(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("device: {kind: cuda, memory_gib: 1, ranks_per_node: 2}\ntrain: {batch_size: 5000}\n")
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    result = trnpipe("plan", "--parent", model, "--config", tmp_path / "run.yaml", *options, "--json")
    assert result.returncode == 64
    record = json.loads(result.stdout)
    assert record["fits"] is False
    assert any(remedy.startswith("train.batch_size=") for remedy in record["remedies"])
    assert "train.batch_size=" in result.stderr
    refused = [budget for budget in record["budgets"] if not budget["fits"]]
    assert [(budget["stage"], budget["place"], budget["limit"]) for budget in refused] == [("train", "device", 1 << 30)]
    assert refused[0]["total"] == sum(refused[0]["items"].values()) > 1 << 30


def test_a_planned_run_is_asked_about_with_other_settings(tmp_path: Path) -> None:
    paths = RunPaths(f"{tmp_path}/bucket/runs/week-01")
    plan_training(paths, tmp_path / "local", ranks=2)
    found = report(parent=None, run=paths.root, layers=[])
    assert (found.world.kind, found.world.precision, found.world.ranks) == ("cpu", "fp32", 2)
    assert found.global_batch == 16
    # Sixteen rows of 32 tokens for each rank.
    assert found.tokens_per_step == 2 * 16 * 32
    assert "on cpu (fp32), 1 x 2 ranks" in str(found.table().title)
    # On processors the host is the device.
    assert {budget.place for budget in found.shown} == {"host"}
    larger = report(
        parent=None, run=paths.root, layers=[parse_settings(["train.batch_size=80", "train.accumulation=2"]), {"nodes": 3}]
    )
    assert larger.global_batch == 80 * 2 * 6
    assert larger.budgets[0].total > found.budgets[0].total
    with pytest.raises(MissingInput):
        report(parent=None, run=f"{tmp_path}/bucket/runs/week-02", layers=[])


def test_a_run_in_a_bucket_may_be_on_any_host(tmp_path: Path, s3_root: str) -> None:
    paths = RunPaths(f"{s3_root}/runs/week-01")
    plan_training(paths, tmp_path / "local")
    found = report(parent=None, run=paths.root, layers=[])
    assert [budget.limit for budget in found.shown] == [None, None]
    assert found.verdict() == "Not judged by the memory of the host, which is not known here; set device.host_memory_gib."
    known = report(parent=None, run=paths.root, layers=[{"device": {"host_memory_gib": 4}}])
    assert known.verdict() == "It fits."


@pytest.mark.parametrize("both", [False, True])
def test_it_must_be_clear_which_model_is_meant(both: bool) -> None:
    with pytest.raises(BadConfig, match="which model"):
        report(parent="model" if both else None, run="runs/week" if both else None, layers=[])


# ---- a workload ------------------------------------------------------------------------------------------------------


def plan(*arguments: str) -> Any:
    options = [option for setting in ("device.kind=neuron", *SETTINGS) for option in ("--set", setting)]
    return CliRunner().invoke(app, ["plan", *options, "--nodes", "2", *arguments])


def test_hosts_hours_and_dollars_are_printed_with_all_that_is_assumed(model: Path) -> None:
    asked = ("--parent", str(model), "--train-rows", "5000000", "--corpus-rows", "8000000", "--deadline", "12h")
    shown = plan(*asked)
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    for expected in (
        "5,000,000 pairs to train on, 8,000,000 documents to embed",
        "16 x trn1.32xlarge",
        "x inf2.48xlarge",
        "Cheapest within 12 h: ",
        "train and embed, of the run's time budget",
        "Nothing that is known of breaks at this size.",
        "a document has 96 tokens on average; or name --document-tokens",
        "embed cuts every document at 60 tokens",
        "3,827 sequences/s",
        "as narrow as 32",
        "an attempt ends at the default limit of its stage",
        "It fits.",
    ):
        assert expected in words, expected
    result = plan(*asked, "--json")
    record = json.loads(result.stdout)["scale"]
    assert {option["host"] for option in record["embed"]} == set(EMBED_HOSTS)
    assert [option["count"] for option in record["train"]] == [1, 2, 4, 8, 16]
    assert sum(option["cheapest"] for option in (*record["train"], *record["embed"])) == 2
    assert record["findings"] == []
    assert all(line in " ".join(record["assumptions"]) for line in ("published", "on demand", "not counted"))
    usd = record["unit_costs"]["documents embedded, inf2.xlarge"]
    [alone] = [option for option in record["embed"] if (option["host"], option["count"]) == ("inf2.xlarge", 1)]
    assert usd["million_rows"] == pytest.approx(alone["usd"] / 8, rel=0.01)
    assert usd["billion_tokens"] == pytest.approx(1000 * usd["million_rows"] / 60)


def test_a_workload_that_no_stage_can_hold_ends_with_64(model: Path) -> None:
    asked = plan("--parent", str(model), "--train-rows", "400000000", "--set", "data.holdout_queries=10000000")
    assert isinstance(asked.exception, BadConfig)
    assert "evaluate, memory of a host" in str(asked.exception)
    assert "Breaks: evaluate, memory of a host" in " ".join(asked.output.split())


def test_no_more_queries_are_estimated_than_evaluate_uses(model: Path) -> None:
    said = [" ".join(plan("--parent", str(model), "--train-rows", rows).output.split()) for rows in ("5000", "200000000")]
    assert "100 pairs are held out" in said[0]
    assert "50,000 pairs are held out" in said[1]


def test_a_deadline_that_no_option_meets_is_said(model: Path) -> None:
    asked = plan("--parent", str(model), "--train-rows", "1000000", "--deadline", "0.000001m")
    assert asked.exit_code == 0, asked.output
    assert "No option finishes within" in asked.output


def test_no_rows_are_no_workload(model: Path) -> None:
    with pytest.raises(BadConfig, match="the options name no rows"):
        report(parent=str(model), run=None, layers=[{"device": {"kind": "cpu"}}], deadline_hours=1.0)


@pytest.mark.parametrize(("text", "hours"), [("90m", 1.5), ("12h", 12), ("1.5d", 36)])
def test_a_deadline_is_a_number_and_a_unit(text: str, hours: float) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["12", "h", "-1h", "0h", "1e3h", "12 hours", "9" * 400 + "d"])
def test_other_deadlines_are_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="deadline"):
        parse_hours(text)


# ---- what a run measured ---------------------------------------------------------------------------------------------


def measured_run(tmp_path: Path, kind: str) -> str:
    """A run of 2 nodes whose results say how fast it was."""
    paths = RunPaths(f"{tmp_path}/bucket/runs/week-01")
    made = plan_training(paths, tmp_path / "local", ranks=64, nodes=2, rows=1500)
    world = made.world.model_copy(update={"kind": kind})
    embed = made.embed.model_copy(update={"rows": 9000, "children": 2})
    store.write_bytes(paths.plan, made.model_copy(update={"world": world, "embed": embed}).sealed().to_json())
    metrics: dict[Stage, dict[str, Any]] = {
        Stage.TRAIN: {"pairs_per_second": 4000.0, "pairs": 1536, "steps": 3, "checkpoints": 4, "checkpoint_stall_seconds": 6.0},
        Stage.EMBED: {"documents_per_second": 900.0, "documents": 9000, "tokens": 180_000, "padding": 0.2},
    }
    for stage, values in metrics.items():
        times = {"started": now(), "finished": now()}
        result = StageResult(stage=stage.value, run="week-01", status="done", fingerprint="", metrics=values, **times)
        store.write_bytes(paths.result(stage), result.to_json())
    deployment = {
        "allowed_nodes": [2, 6],
        "hosts": {"train": "trn1.32xlarge"},
        "prices": {"train": 10.0},
        "timeouts": {"train": 120},
    }
    store.write_json(paths.input, {"deployment": deployment, "execution": {}, "execution_arn": "arn"})
    return paths.root


def estimated(run: str, **workload: Any) -> Estimate:
    found = report(parent=None, run=run, layers=[], **workload).estimate
    assert found is not None
    return found


def test_a_run_on_neuron_is_as_fast_again_as_it_was(tmp_path: Path) -> None:
    found = estimated(measured_run(tmp_path, "neuron"), train_rows=51_200_000, corpus_rows=6_400_000)
    assert [option.count for option in found.trains] == [2, 6]
    again = found.trains[0]
    # 512 pairs a step on 64 ranks: as many per second as measured, and a stop of 1.5 s after every sixth step.
    stalls = -(-100_000 // 6) * 1.5
    assert again.hours * 3600 - stalls == pytest.approx(51_200_000 / 4000, rel=0.01)
    assert again.usd == pytest.approx(again.hours * 2 * 10.0)
    # The deployment's own limit, of two hours.
    assert again.limit_hours == 2
    assert not again.within_limit
    # 64 ranks embedded 900 documents of 25 tokens with padding per second: on 32 it takes twice as long.
    embeds = {(option.host, option.count): option for option in found.embeds}
    assert embeds["trn1.32xlarge", 1].hours * 3600 == pytest.approx(6_400_000 / 450, rel=0.01)
    words = " ".join(found.assumptions)
    for expected in ("measured: run week-01, 4,000 pairs/s on 2 nodes", "900 documents/s on 64 cores", "1.50 s", "`timeouts`"):
        assert expected in words, expected
    assert "embedding on inf2: 31.0% of the peak (published" in words


def test_a_run_on_another_kind_says_nothing_of_neuron(tmp_path: Path) -> None:
    found = estimated(measured_run(tmp_path, "cpu"), deadline_hours=12.0)
    words = " ".join(found.assumptions)
    assert "the run was on cpu" in words
    assert "measured: run" not in words
    # Its rows and lengths count all the same.
    assert (found.work.train_rows, found.work.corpus_rows) == (1500, 9000)
    assert found.work.document_tokens == 20
    # 20 tokens a document and a fifth of padding, in the run's rows of 32.
    assert found.work.embed_rows == pytest.approx(25 / 32)
