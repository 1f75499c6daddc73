"""The code that decides what is in a graph, and a digest of it that nothing else changes.

That code is the import closure of a few modules inside this package, held small by import-linter (pyproject.toml). Every import
that Python can execute counts, also inside a function; imports under `if TYPE_CHECKING` only name types and do not count.
`import_module` cannot be seen: what a device loads by name is listed here. Values that graphs depend on (settings, versions,
variables) are in a set's fingerprint by themselves. The watch over graphs (pipeline/graphs/graph_watch) reports what this misses.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent

ENCODING = ("pipeline.model.inference", "pipeline.backends.lazy", "pipeline.backends.traced", "pipeline.backends.xla_layers")
"""Modules of the function that evaluate and embed encode with, and of what the devices that compile add to a graph."""

TRAINING = (*ENCODING, "pipeline.training.step")
"""ENCODING with the modules of a training step, its loss and its optimizer; training encodes, too."""

NO_GRAPHS = frozenset({"pipeline.errors"})
"""Modules that the closure may use without having them in it: where an error is raised, nothing is computed."""

TYPING = ("__future__", "typing", "collections.abc")
"""Modules whose names stand in annotations."""


@lru_cache
def sources_digest(roots: tuple[str, ...]) -> str:
    """Return the SHA-256 of the closure of ENCODING or TRAINING."""
    return digest(closure(roots, PACKAGE).values())


def closure(roots: Iterable[str], package: Path) -> dict[str, ast.Module]:
    """Parse the roots and all modules that they import, directly or through each other.

    Args:
        roots: names of modules, e.g. `pipeline.training.step`.
        package: the package's folder; names in it begin with the folder's name.

    Returns:
        Name -> syntax tree without type-only imports; of a package, its `__init__`.
    """
    found: dict[str, ast.Module] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        path = package.parent.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        # The last part of an imported name may stand for something inside a module.
        if name in found or name in NO_GRAPHS or name.split(".")[0] != package.name or not file.is_file():
            continue
        found[name] = _WithoutTypeImports().visit(ast.parse(file.read_bytes()))
        waiting += [name.rpartition(".")[0], *_imported(found[name])]
    return found


class _WithoutTypeImports(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports inside the package are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def digest(trees: Iterable[ast.Module]) -> str:
    """Return the SHA-256 of modules, wherever they are: the same under Python 3.10 to 3.12."""
    dumps = sorted(text for tree in trees if (text := dump(tree)) != "Module()")
    return hashlib.sha256("\n".join(dumps).encode()).hexdigest()


def dump(value: Any) -> str:
    """Return a syntax tree as text, without what computes nothing: positions, docstrings, annotations, names of modules of this
    package, names for annotations, and what errors say.

    Empty fields are left out: the versions of Python differ in which there are (`type_params` since 3.12).
    """
    if isinstance(value, list):
        return f"[{','.join(text for item in value if (text := dump(item)))}]"
    if not isinstance(value, ast.AST):
        # Unlike repr(), it escapes the same characters in every version of Unicode.
        return ascii(value)
    if isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant):
        return ""
    if isinstance(value, ast.ImportFrom) and value.module in TYPING:
        return ""
    skipped = {"annotation", "returns", "ctx", "kind"}
    if isinstance(value, ast.Raise):
        skipped |= {"exc", "cause"}
    elif isinstance(value, ast.ImportFrom) and f"{value.module}.".startswith(f"{PACKAGE.name}."):
        skipped.add("module")
    elif isinstance(value, ast.AnnAssign) and value.value:
        value = ast.Assign(targets=[value.target], value=value.value)
    elif isinstance(value, ast.JoinedStr):
        # Python 3.12 ends some format specifications with an empty text.
        value = ast.JoinedStr(values=[part for part in value.values if getattr(part, "value", None) != ""])
    fields = {name: getattr(value, name, None) for name in value._fields if name not in skipped}
    texts = {name: dump(field) for name, field in fields.items() if field is not None}
    return f"{type(value).__name__}({','.join(f'{name}={text}' for name, text in texts.items() if text != '[]')})"
