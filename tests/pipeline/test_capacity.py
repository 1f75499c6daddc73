"""`trnpipe plan`: what it prints, as people see it and as programs read it, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.capacity import ask
from pipeline.config import parse_settings
from pipeline.contract import RunPaths
from pipeline.errors import BadConfig, MissingInput
from tests.pipeline.training.planned import plan_training
from tests.tiny import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "model"
    make_model(folder)
    # Only the configuration is read.
    (folder / "model.safetensors").unlink()
    return folder


SETTINGS = ("train.query_length=16", "train.buckets=[32, 60]", "embed.buckets=[32, 60]")


def trnpipe(*arguments: str | Path, columns: int = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_table_names_every_place_and_the_verdict(model: Path) -> None:
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    result = trnpipe("plan", "--parent", model, "--nodes", "2", "--set", "device.kind=neuron", *options)
    assert result.returncode == 0, result.stderr
    for words in (
        "on neuron (compiler), 2 x 32 ranks",
        f"{64 * 64} pairs, at most {64 * 64 * 76} tokens per step",
        "train, a rank's device, in a training step",
        "of 16.00 GiB",
        "train, a node's host",
        "of 479.00 GiB",
        "embed, a rank's device, in a batch",
        "activations of documents",
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
    found = ask(parent=None, run=paths.root, layers=[])
    assert (found.world.kind, found.world.precision, found.world.ranks) == ("cpu", "fp32", 2)
    assert found.global_batch == 16
    assert found.tokens_per_step == 16 * (8 + 32)
    assert "on cpu (fp32), 1 x 2 ranks" in str(found.table().title)
    # On processors the host is the device.
    assert {budget.place for budget in found.shown} == {"host"}
    larger = ask(
        parent=None, run=paths.root, layers=[parse_settings(["train.batch_size=80", "train.accumulation=2"]), {"nodes": 3}]
    )
    assert larger.global_batch == 80 * 2 * 6
    assert larger.budgets[0].total > found.budgets[0].total
    with pytest.raises(MissingInput):
        ask(parent=None, run=f"{tmp_path}/bucket/runs/week-02", layers=[])


def test_a_run_in_a_bucket_may_be_on_any_host(tmp_path: Path, s3_root: str) -> None:
    paths = RunPaths(f"{s3_root}/runs/week-01")
    plan_training(paths, tmp_path / "local")
    found = ask(parent=None, run=paths.root, layers=[])
    assert [budget.limit for budget in found.shown] == [None, None]
    assert found.verdict() == "Not judged by the memory of the host, which is not known here; set device.host_memory_gib."
    known = ask(parent=None, run=paths.root, layers=[{"device": {"host_memory_gib": 4}}])
    assert known.verdict() == "It fits."


@pytest.mark.parametrize("both", [False, True])
def test_it_must_be_clear_which_model_is_meant(both: bool) -> None:
    with pytest.raises(BadConfig, match="which model"):
        ask(parent="model" if both else None, run="runs/week" if both else None, layers=[])
