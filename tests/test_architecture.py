"""The import arrows of the blueprint, held by import-linter's contracts in pyproject.toml and by what a process really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OWNERS = {
    "torch_xla": {"pipeline/runtime"},
    "torch_neuronx": {"pipeline/runtime"},
    "boto3": {"pipeline/runtime/store", "pipeline/runtime/batch.py", "pipeline/search.py", "infra/local"},
}
"""Package -> the only places that may import it."""


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", sorted(OWNERS))
def test_package_is_imported_only_by_its_owner(package: str) -> None:
    strangers = [
        path.relative_to(ROOT).as_posix()
        for folder in ("infra", "pipeline")
        for path in (ROOT / folder).rglob("*.py")
        if package in _imported(path)
        and not any(path.relative_to(ROOT).as_posix().startswith(owner) for owner in OWNERS[package])
    ]
    assert not strangers


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pipeline.contract", {"torch", "pydantic", "boto3", "yaml"}),
        ("pipeline.config", {"torch", "boto3", "transformers", "pyarrow"}),
        ("pipeline.cli", {"torch", "boto3", "transformers", "aws_cdk", "moto", "pyarrow"}),
        ("pipeline.parity", {"torch", "transformers"}),
        ("pipeline.runtime.supervisor", {"torch", "transformers", "pyarrow"}),
        ("infra.workflow", {"torch", "boto3", "transformers", "pyarrow"}),
    ],
)
def test_module_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    script = f"import {module}, sys; print(*sorted({absent!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names
