"""The import arrows of the blueprint, held by import-linter's contracts in pyproject.toml and by what a process really loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OWNERS = {
    "torch_xla": {"pipeline/backends"},
    "torch_neuronx": {"pipeline/backends"},
    "boto3": {
        "pipeline/store",
        "pipeline/host/own_job.py",
        "pipeline/commands/search.py",
        "pipeline/operate",
        "infra/local",
        "infra/doctor",
    },
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
        ("pipeline.commands.parity", {"torch", "transformers"}),
        ("pipeline.commands.search", {"torch", "transformers", "pyarrow"}),
        ("pipeline.operate.progress", {"torch", "boto3", "moto"}),
        ("pipeline.operate.outcome", {"torch", "boto3", "moto"}),
        ("pipeline.operate.endpoint", {"torch", "boto3", "moto", "pydantic"}),
        ("pipeline.operate.start", {"torch", "transformers", "pyarrow", "moto", "aws_cdk"}),
        ("pipeline.operate.runs", {"torch", "transformers", "pyarrow", "moto", "aws_cdk"}),
        ("pipeline.host.supervisor", {"torch", "transformers", "pyarrow"}),
        ("pipeline.stages.ingest", {"torch", "transformers"}),
        ("pipeline.stages.prepare", {"torch", "transformers"}),
        ("infra.workflow.machine", {"torch", "boto3", "transformers", "pyarrow"}),
    ],
)
def test_module_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    script = f"import {module}, sys; print(*sorted({absent!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


RUNS_CODE = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load"),
    *("dill.load", "cloudpickle.load", "pandas.read_pickle", "numpy.load", "np.load", "torch.hub.load"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "eval", "exec", "compile", "os.system", "os.popen"),
}
"""Calls that run what they read, or read what runs."""


def test_nothing_that_is_read_is_run() -> None:
    assert [found for path in _modules() for found in _code_runners(path.read_text(encoding="utf-8"), path.name)] == []


@pytest.mark.parametrize(
    "text",
    [
        "pickle.loads(data)",
        "from pickle import loads\nloads(data)",
        "import numpy\nnumpy.load(path)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(folder, local_files_only=True)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True, local_files_only=True)",
        "AutoModel.from_pretrained(folder, trust_remote_code=False)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_what_would_run_is_found(text: str) -> None:
    assert _code_runners(text, "module.py")


def _modules() -> list[Path]:
    return [path for folder in ("infra", "pipeline") for path in (ROOT / folder).rglob("*.py")]


def _code_runners(text: str, name: str) -> list[str]:
    """Calls in a module's text that may run what they read."""
    tree = ast.parse(text)
    origins = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        called = origins.get(called, called)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        loads = called == "torch.load" and given.get("weights_only") != "True"
        trusts = called.endswith(".from_pretrained") and (
            given.get("trust_remote_code") != "False" or given.get("local_files_only") != "True"
        )
        if called in RUNS_CODE or loads or trusts or given.get("shell") == "True":
            found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_the_product_does_not_grow_by_accident() -> None:
    """Both limits are raised on purpose, in a commit that says why."""
    limits = dict(re.findall(r"^(max_\w+) = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    files = [path for folder in ("infra", "pipeline") for path in (ROOT / folder).rglob("*.py")]
    assert sum(map(_statements, files)) <= int(limits["max_statements"])
    assert max(path.read_text().count("\n") for path in files) <= int(limits["max_lines_of_a_file"])


def _statements(path: Path) -> int:
    """Statements that are neither imports nor documentation."""
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for node in ast.walk(ast.parse(path.read_text()))
    )


NEWER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack", "assert_never", "override"},
}
"""Names that Python 3.10 does not have ("What's New In Python 3.11" and 3.12)."""


def test_the_oldest_python_has_all_that_is_imported_from_its_library() -> None:
    found = [
        f"{path}: {node.module}.{alias.name}"
        for folder in ("infra", "pipeline")
        for path in (Path(__file__).parents[1] / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in NEWER.get(node.module or "", ())
    ]
    assert found == []
