"""One version everywhere, what CI does in a fork, and what a change does to the templates."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_a_version_is_the_same_in_the_package_the_images_and_the_changelog() -> None:
    [package] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert json.loads((ROOT / "cdk.json").read_text())["context"]["trnpipe"]["images"]["tag"] == newest == package


def test_the_workflow_runs_what_contributors_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["target"] == re.findall(r"make (?:-j2 )?([a-z-]+)", (ROOT / ".ci/run").read_text())
    lines = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    lines = lines.replace("${{ matrix.target }}", " ".join(jobs["test"]["strategy"]["matrix"]["target"]))
    calls = re.findall(r"\bmake (.*?)(?:>|$)", lines, re.MULTILINE)
    assert len(calls) == 3
    for call in calls:
        targets = [word for word in call.split() if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")]
        assert targets
        assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets), call
        for variable in re.findall(r"([A-Z_]+)=", call):
            assert re.search(rf"^{variable} \?=", MAKEFILE, re.MULTILINE), variable
    for variable in workflow["env"]:
        assert re.search(rf"^{variable} \?=", MAKEFILE, re.MULTILINE), variable


@pytest.mark.long
def test_the_diff_shows_what_a_setting_changes_in_the_templates(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    shutil.copy(ROOT / "Makefile", clone / "Makefile")
    (clone / ".venv").symlink_to(Path(sys.prefix))

    def diff() -> str:
        # The environment of these tests is ready, whatever the clone's newer lock says.
        command = ["make", "--silent", "--old-file=.venv/ready", "diff", "AGAINST=HEAD"]
        return subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True).stdout

    assert diff() == ""
    settings = clone / "cdk.json"
    settings.write_text(settings.read_text().replace('"weekly": 0.5', '"weekly": 0.25'))
    changed = [line for line in diff().splitlines() if re.match(r"[+-] ", line)]
    assert changed == ['-       "WeightFactor": 0.5', '+       "WeightFactor": 0.25']
