"""The Python part of both images, installed from their lock files as the Dockerfiles do it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
UV = Path(sys.executable).with_name("uv")
ENTRY = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^\s;\\]+)(?:[^\n]*\\\n)?(?:    --hash[^\n]*\n?)*", re.MULTILINE)


def installed_here(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize(("index", "option"), [("cpu", "--torch-backend"), ("http://127.0.0.1:9/simple", "--index-url")])
def test_set_up_with_torchs_cpu_build_keeps_every_other_package_and_its_hashes(tmp_path: Path, index: str, option: str) -> None:
    make = ["make", "--dry-run", "setup", f"TORCH_INDEX={index}", f"VENV={tmp_path}"]
    commands = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    [cut] = [command for command in commands if command.startswith("awk")]
    subprocess.run(cut, shell=True, cwd=ROOT, check=True)
    locked, kept = ((folder / "requirements.lock").read_text() for folder in (ROOT, tmp_path))
    entries, left = ([found[0].strip() for found in ENTRY.finditer(text)] for text in (locked, kept))
    gone = {entry.partition("==")[0] for entry in entries if entry not in left}
    assert [entry for entry in entries if entry in left] == left
    assert {"torch", "triton"} < gone
    assert all(name.startswith("nvidia-") for name in gone - {"torch", "triton"})
    [torch] = [command for command in commands if f"{option} {index}" in command]
    assert any(entry.split()[0] == torch.split()[-1] for entry in entries)
    assert any("--require-hashes" in command and f"{tmp_path}/requirements.lock" in command for command in commands)


@pytest.mark.parametrize("kind", ["cpu", "neuron"])
def test_the_locked_packages_install_by_hash_and_the_program_starts_with_them(tmp_path: Path, kind: str) -> None:
    entries = {found["name"]: found for found in ENTRY.finditer((CONTAINERS / kind / "requirements.lock").read_text())}
    # Left out: what is there for the images' Python only, and torch's CPU build, which stands in an index of its own.
    wanted = {name: found["version"] for name, found in entries.items() if installed_here(name) == found["version"]}
    assert len(wanted) > 0.9 * len(entries), sorted(entries.keys() - wanted.keys())
    lock, home = tmp_path / "requirements.lock", tmp_path / "image"
    lock.write_text("".join(entries[name][0].rstrip() + "\n" for name in wanted))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, home], env=environment, check=True)
    python = home / "bin" / "python"
    # Most of it stands in uv's cache since the set-up, which installed the same files.
    install = [UV, "pip", "install", "--quiet", "--python", python, "--require-hashes", "--no-deps", "-r", lock]
    subprocess.run(install, env=environment, check=True)
    listed = subprocess.run([UV, "pip", "list", "--python", python, "--format", "json"], capture_output=True, check=True)
    assert {package["name"]: package["version"] for package in json.loads(listed.stdout)} == wanted
    environment["PYTHONPATH"] = str(CONTAINERS.parent)
    for arguments in (["stage", "--help"], ["config", "schema"]):
        command = [python, "-m", "pipeline.cli", *arguments]
        started = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stderr
