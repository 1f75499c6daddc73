"""The CDK app as a program: what it writes, what it refuses, what it does without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import app
from infra.cdk_context import CDK_JSON, read_context, read_settings
from infra.settings import Settings
from pipeline.errors import BadConfig, ExitCode
from tests.infra.conftest import Synth, deploy

ROOT = CDK_JSON.parent


def run_app(folder: Path, context: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """As the CDK CLI runs it, without Node.js, Docker or AWS credentials in reach."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "JSII_"))},
        "PATH": str(folder / "nothing"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_OUTDIR": str(folder / "out"),
        "CDK_CONTEXT_JSON": json.dumps(context),
    }
    program = [sys.executable, "-m", "infra.app"]
    return subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_it_synthesizes_with_nothing_around_and_loads_no_framework(alone: Any) -> None:
    assert not {"torch", "transformers", "pyarrow", "boto3"} & alone.modules.keys()
    # What a run may cost is for people: programs read stdout.
    assert "What a run costs in us-west-2, at most" in alone.told_people
    assert alone.told_programs == ""
    assert {"trnpipe.template.json", "trnpipe-data.template.json"} <= {path.name for path in alone.folder.iterdir()}
    # Nothing to build or upload: no Docker image, no bundled code.
    for path in alone.folder.glob("*.assets.json"):
        assert json.loads(path.read_text())["dockerImages"] == {}


def test_a_wrong_setting_ends_with_64_and_the_remedy(tmp_path: Path) -> None:
    context = read_context()
    context["trnpipe"]["ami"] = "ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id:1"
    done = run_app(tmp_path, context)
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "2.27" in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_cdk_cli_it_reads_cdk_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict[str, Any], str | None]] = []
    monkeypatch.delenv("CDK_OUTDIR", raising=False)
    monkeypatch.setattr(app, "synthesize", lambda context, outdir=None, tell=None: seen.append((dict(context), outdir)))
    assert app.main([]) == 0
    assert app.main(["-c", "env=example", "--context", "trnpipe.region=us-east-2", "-c", "trnpipe.notify=[]"]) == 0
    given = {"env": "example", "trnpipe.region": "us-east-2", "trnpipe.notify": "[]"}
    assert seen == [(read_context(), "cdk.out"), ({**read_context(), **given}, "cdk.out")]


@pytest.mark.parametrize("option", ["env", "=prod", ""])
def test_an_option_that_cannot_be_read_ends_with_64(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert app.main(["-c", option]) == ExitCode.BAD_CONFIG
    assert f"-c {option}" in capsys.readouterr().err


def test_an_environment_and_a_setting_of_the_command_line_are_the_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Settings] = []
    monkeypatch.delenv("CDK_OUTDIR", raising=False)
    monkeypatch.setattr(app, "synthesize", lambda context, outdir=None, tell=None: found.append(read_settings(context)))
    assert app.main(["-c", "env=example", "-c", "trnpipe.name=tried", "-c", "trnpipe.embed_market=on-demand"]) == 0
    assert (found[0].name, found[0].region, found[0].embed_market) == ("tried", "us-east-2", "on-demand")


def test_an_unknown_environment_ends_with_64_and_the_known_ones(tmp_path: Path) -> None:
    done = run_app(tmp_path, {**read_context(), "env": "../../etc/passwd"})
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "name one of: example" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_cdk_json_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "cdk.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadConfig):
        read_context(path)


def test_cdk_json_starts_this_app() -> None:
    assert json.loads(CDK_JSON.read_text())["app"] == "python -m infra.app"


def test_the_cdk_cli_of_the_guides_reads_what_is_synthesized(alone: Synth) -> None:
    """An older one refuses the cloud assembly; a newer one may read another."""
    manifest = json.loads((alone.folder / "manifest.json").read_text())
    assert f"npx aws-cdk@{manifest['minimumCliVersion']}" == app.CDK
    for name in ("README.md", "docs/deploy.md", "docs/runbook.md"):
        assert set(re.findall(r"npx aws-cdk\S*", (CDK_JSON.parent / name).read_text())) == {app.CDK}


def test_a_deployment_that_names_its_account_looks_nothing_up(other_deployment: Any, tmp_path: Path) -> None:
    """A lookup at synth would need credentials, and change with the account."""
    named = deploy(tmp_path, account="123456789012")
    for found in (other_deployment, named):
        assert "missing" not in json.loads((found.folder / "manifest.json").read_text())
