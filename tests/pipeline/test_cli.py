"""The command as people type it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.demo import SIZES

COMMANDS = (
    [],
    ["local"],
    ["init"],
    ["start"],
    ["watch"],
    ["stop"],
    ["runs"],
    ["stage"],
    ["search"],
    ["plan"],
    ["parity"],
    ["tune"],
    ["doctor"],
    ["images"],
    ["ami"],
    ["config"],
    ["config", "schema"],
    ["config", "check"],
)


def trnpipe(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_explains_every_option(command: list[str]) -> None:
    result = trnpipe(*command, "--help")
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    assert "Traceback" not in result.stderr


def test_schema_is_json_schema() -> None:
    schema = json.loads(trnpipe("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert {"train", "embed", "gate", "share", "registry", "time_budget", "nodes"} <= schema["properties"].keys()


def test_check_prints_the_resolved_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {steps: 12}")
    result = trnpipe("config", "check", tmp_path / "run.yaml", "--set", "nodes=2")
    resolved = json.loads(result.stdout)
    assert (resolved["train"]["steps"], resolved["nodes"]) == (12, 2)


def test_misspelt_key_ends_with_64_and_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {stepz: 12}")
    result = trnpipe("config", "check", tmp_path / "run.yaml")
    assert result.returncode == 64
    assert "did you mean train.steps?" in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_file_ends_with_66(tmp_path: Path) -> None:
    assert trnpipe("config", "check", tmp_path / "absent.yaml").returncode == 66


def test_local_refuses_a_misspelt_setting_before_anything_starts(tmp_path: Path) -> None:
    result = trnpipe("local", "--set", "trian.steps=3", "--state", tmp_path / "state")
    assert result.returncode == 64
    assert "did you mean train" in result.stderr
    assert not (tmp_path / "state" / "bucket").exists()


def test_the_demo_has_the_sizes_that_the_option_takes(tmp_path: Path) -> None:
    choices = ", ".join(repr(size.lower()) for size in SIZES)
    assert f"is not one of {choices}" in trnpipe("local", "--demo", "XL", "--state", tmp_path / "state").stderr
    result = trnpipe("local", "--demo", "l", "--set", "data.train=['a']", "--state", tmp_path / "state")
    assert result.returncode == 64
    assert "value:  --demo L and data.train" in result.stderr


def test_search_before_the_first_run_says_what_to_do(tmp_path: Path) -> None:
    result = trnpipe("search", "read a csv file", "--state", tmp_path)
    assert result.returncode == 66
    assert "make local" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["stage", "no-such-stage", "--run", "x"], ["local", "--no-such-option"], ["no-such-command"]]
)
def test_a_command_line_that_cannot_be_read_ends_with_64(arguments: list[str]) -> None:
    result = trnpipe(*arguments)
    assert result.returncode == 64
    assert "Usage:" in result.stderr


def test_check_says_what_a_configurations_uris_need(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {train: ['s3://lake/clicks/week-1']}\nmodel: {parent: /models/bert}\n")
    noted = trnpipe("config", "check", str(file))
    assert noted.returncode == 0
    assert "note: data.train: s3://lake/clicks/week-1 needs the deployment's bucket, or its setting `read`" in noted.stderr
    assert "note: model.parent: /models/bert needs a local run" in noted.stderr
    refused = trnpipe("config", "check", str(file), "--bucket", "s3://ours", "--readable", "s3://lake/clicks")
    assert refused.returncode == 64
    assert "model.parent" in refused.stderr
    assert "data.train" not in refused.stderr
    allowed = trnpipe(
        "config",
        "check",
        str(file),
        "--set",
        "model.parent=s3://ours/runs/x/model",
        "--bucket",
        "s3://ours",
        "--readable",
        "s3://lake",
    )
    assert (allowed.returncode, allowed.stderr) == (0, "")
    # No job's role may read it.
    elsewhere = trnpipe("config", "check", str(file), "--set", "model.parent=s3://ours/x", "--bucket", "s3://ours")
    assert "'s3://ours/x' is outside of these folders" in elsewhere.stderr


@pytest.mark.parametrize("name", ["../x", "run\n"], ids=ascii)
def test_names_that_lead_elsewhere_end_with_64(name: str, tmp_path: Path) -> None:
    for arguments in (
        ["local", f"--run={name}", "--state", tmp_path],
        ["stage", "report", f"--run=s3://bucket/runs/{name}"],
        ["search", "words", f"--registry={name}", "--state", tmp_path],
    ):
        result = trnpipe(*arguments)
        assert result.returncode == 64, (arguments, result.stderr)
        assert "matches" in result.stderr
        assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_leads_elsewhere_ends_with_64() -> None:
    uri = "s3://bucket/runs/../run"
    for arguments in (["stage", "report", f"--run={uri}"], ["plan", f"--run={uri}"]):
        result = trnpipe(*arguments)
        assert result.returncode == 64, (arguments, result.stderr)
        assert "RUN_ID" in result.stderr


def test_what_is_typed_does_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    result = trnpipe("config", "check", tmp_path / "\x1b]0;owned\x07\x1b[2Jfile\nremedy: run this")
    assert result.returncode == 66
    assert "\x1b" not in result.stderr
    assert "\\x1b]0;owned" in result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("remedy")] == ["remedy: check the path"]
