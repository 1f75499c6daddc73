"""Which changes of the code name other compiled sets, and which do not."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.graphs import sources
from pipeline.graphs.sources import ENCODING, PACKAGE, TRAINING, closure, digest, dump

GRAPHS = {
    *("model.loss", "model.embeddings", "model.encoder", "model.families", "model.inference", "model.unpadded"),
    *("backends.counts", "sdk.graph_variables", "backends.lazy", "backends.traced", "backends.xla_layers"),
    *("packing", "backends.buckets", "training.micro_batches", "training.optimizer", "training.step"),
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's sources, of those folders that the closure is in."""
    others = shutil.ignore_patterns("__pycache__", "commands", "dataset", "estimate", "health", "operate", "stages", "store")
    return Path(shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=others))


def names(roots: tuple[str, ...], package: Path = PACKAGE) -> set[str]:
    """The closure's modules without packages, whose `__init__` is empty."""
    found = closure(roots, package)
    return {name.removeprefix("pipeline.") for name, tree in found.items() if tree.body}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_closure_is_the_code_that_shapes_graphs() -> None:
    assert names(TRAINING) == GRAPHS
    assert names(ENCODING) == GRAPHS - {
        "backends.buckets",
        "model.loss",
        "training.micro_batches",
        "training.optimizer",
        "training.step",
    }


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("host/supervisor.py", "import", "import antigravity\nimport"),
        ("config/__init__.py", "class RunConfig(Section):", "class RunConfig(Section):\n    another: int = 1\n"),
        ("errors.py", "class BadData", "ANOTHER = 1\n\n\nclass BadData"),
        # A comment, a docstring, positions.
        ("training/step.py", "def train_step(", "\n# A comment.\n\n\ndef train_step("),
        ("training/step.py", '"""AdamW without decay', '"""Return AdamW without decay'),
        ("training/step.py", "    loss.backward()", "    loss.backward(\n    )"),
        # What is said of a constant, and of an attribute.
        ("model/encoder.py", '"""Added to the score', '"""Is added to the score'),
        # Types, and names for them.
        ("training/step.py", "parts: Sequence[Batch],", "parts: list[Batch],"),
        ("training/step.py", "cached: list[Tensor] = []", "cached = []"),
        ("training/step.py", ") -> tuple[Tensor, ...]:", ") -> Any:"),
        ("training/step.py", "from typing import TYPE_CHECKING", "from typing import TYPE_CHECKING, Any"),
        (
            "training/step.py",
            "    from pipeline.config import TrainConfig\n",
            "    from pipeline.config import GateConfig, TrainConfig\n",
        ),
        # The words of an error.
        ("training/step.py", "this rank's weights are not the leader's", "the weights of this rank differ"),
    ],
)
def test_what_computes_nothing_leaves_the_digest(package: Path, module: str, old: str, new: str) -> None:
    edit(package / module, old, new)
    assert digest(closure(TRAINING, package).values()) == sources.sources_digest(TRAINING)


@pytest.mark.parametrize(
    ("module", "old", "new", "encoding"),
    [
        ("training/step.py", "optimizer.zero_grad(", "optimizer.zero_grad(), optimizer.zero_grad(", False),
        ("training/step.py", "parameter.ndim >= 2", "parameter.ndim > 2", False),
        ("training/step.py", "optimizer.reduce()", "[]", False),
        ("training/optimizer.py", "(norm + 1e-6)", "(norm + 1e-7)", False),
        ("model/embeddings.py", "[:, None] == ", "[:, None] != ", True),
        ("backends/buckets.py", "> limit", ">= limit", False),
        ("training/micro_batches.py", 'partition("/")', 'partition(":")', False),
        ("model/loss.py", "/ temperature", "* temperature", False),
        ("model/encoder.py", "F.relu(", "F.gelu(", True),
        ("model/encoder.py", "-30_000.0", "-20_000.0", True),
        ("model/unpadded.py", "clamp_(min=0)", "clamp_(min=1)", True),
        ("backends/lazy.py", "pin_layout=False)", "pin_layout=True)", True),
        ("backends/traced.py", "torch.ones_like(zeros)", "zeros.clone()", True),
        ("backends/xla_layers.py", "ROWS = 4", "ROWS = 8", True),
        ("sdk/graph_variables.py", '"one node": 50', '"one node": 60', True),
    ],
)
def test_a_changed_operation_changes_the_digest(package: Path, module: str, old: str, new: str, encoding: bool) -> None:
    edit(package / module, old, new)
    changes = [digest(closure(roots, package).values()) != sources.sources_digest(roots) for roots in (TRAINING, ENCODING)]
    assert changes == [True, encoding]


def test_a_module_that_moves_stays_the_same_code(package: Path) -> None:
    shutil.move(package / "model" / "families.py", package / "backends" / "kinds.py")
    edit(package / "model" / "encoder.py", "from pipeline.model.families import", "from pipeline.backends.kinds import")
    assert "backends.kinds" in names(TRAINING, package)
    assert digest(closure(TRAINING, package).values()) == sources.sources_digest(TRAINING)


def test_an_import_inside_a_function_counts_and_one_of_types_does_not(package: Path) -> None:
    edit(package / "training" / "step.py", "    parts = ", "    from pipeline.run.tether import tied\n\n    parts = ")
    edit(
        package / "training" / "step.py",
        "if TYPE_CHECKING:\n",
        "if TYPE_CHECKING:\n    from pipeline.host.gang import same_attempt\n",
    )
    assert names(TRAINING, package) - GRAPHS == {"run.tether"}


SYNTAX = """
def function(first: int, /, *, key: str = "\\U0001fae8", **others) -> None:
    "What it does."
    value: float = f"{first!r:>{key}} {key=}" if key else -1.5e-7
    match {**others, 1: None}:
        case {"a": [1, *_]} | None:
            raise ValueError("no") from value
"""
"""Where the versions differ: in the fields of functions, in how f-strings are parsed, and in which characters repr() escapes."""

DUMPED = (
    "Module(body=[FunctionDef(name='function',args=arguments("
    "posonlyargs=[arg(arg='first')],kwonlyargs=[arg(arg='key')],kw_defaults=[Constant(value='\\U0001fae8')],kwarg=arg(arg='others')),"
    "body=[Assign(targets=[Name(id='value')],value=IfExp(test=Name(id='key'),"
    "body=JoinedStr(values=[FormattedValue(value=Name(id='first'),conversion=114,"
    "format_spec=JoinedStr(values=[Constant(value='>'),FormattedValue(value=Name(id='key'),conversion=-1)])),"
    "Constant(value=' key='),FormattedValue(value=Name(id='key'),conversion=114)]),"
    "orelse=UnaryOp(op=USub(),operand=Constant(value=1.5e-07)))),"
    "Match(subject=Dict(keys=[None,Constant(value=1)],values=[Name(id='others'),Constant()]),"
    "cases=[match_case(pattern=MatchOr(patterns=[MatchMapping(keys=[Constant(value='a')],"
    "patterns=[MatchSequence(patterns=[MatchValue(value=Constant(value=1)),MatchStar()])]),MatchSingleton()]),body=[Raise()])])])])"
)


def test_every_version_of_python_dumps_the_same() -> None:
    assert dump(ast.parse(SYNTAX)) == DUMPED


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12"])
def test_every_version_of_python_names_the_same_sets(version: str) -> None:
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-V"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {version} here")
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('sources', sys.argv[1])\n"
        "sources = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(sources)\n"
        "print(sources.sources_digest(sources.TRAINING))\n"
    )
    ended = subprocess.run([python, "-I", "-c", program, sources.__file__], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == sources.sources_digest(TRAINING)
