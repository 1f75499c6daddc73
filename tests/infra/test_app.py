"""The CDK app as a program: what it writes, what it refuses, what it does without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra import app
from infra.app import CDK_JSON, read_context
from pipeline.errors import BadConfig, ExitCode

ROOT = CDK_JSON.parent


def run_app(folder: Path, context: dict[str, Any], *, code: str = "") -> subprocess.CompletedProcess[str]:
    """As the CDK CLI runs it, without Node.js, Docker or AWS credentials in reach."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "JSII_"))},
        "PATH": str(folder / "nothing"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_OUTDIR": str(folder / "out"),
        "CDK_CONTEXT_JSON": json.dumps(context),
    }
    program = ["-c", code] if code else ["-m", "infra.app"]
    return subprocess.run([sys.executable, *program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_it_synthesizes_with_nothing_around_and_loads_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from infra.app import main; code = main(); "
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'boto3') if name in sys.modules]); sys.exit(code)"
    )
    done = run_app(tmp_path, read_context(), code=code)
    assert done.returncode == 0, done.stderr
    # What a run may cost is for people: programs read stdout.
    assert done.stdout.strip() == "[]"
    assert "What a run costs in us-west-2, at most" in done.stderr
    assert {"trnpipe.template.json", "trnpipe-data.template.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    # Nothing to build or upload: no Docker image, no bundled code.
    for path in (tmp_path / "out").glob("*.assets.json"):
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
    monkeypatch.setattr(app, "synthesize", lambda context, outdir=None: seen.append((dict(context), outdir)))
    assert app.main() == 0
    assert seen == [(read_context(), "cdk.out")]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_cdk_json_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "cdk.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadConfig):
        read_context(path)


def test_cdk_json_starts_this_app() -> None:
    assert json.loads(CDK_JSON.read_text())["app"] == "python -m infra.app"
