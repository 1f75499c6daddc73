"""Plant mistakes in the product code and record which of them the tests find.

Mutation testing on a sample: `draw` picks places with a seeded generator, spread over all folders; `run` plants one mistake after
another in a clean checkout and runs the tests that name the module, until one fails. A mistake is known by its function and its
line, not by its file, so that the same mistakes can be planted again after code has moved:

    python -m tests.mutation.plant draw --seed 7 --count 40 > mistakes.json
    python -m tests.mutation.plant run mistakes.json found.json

A mistake that no test finds is either equivalent to the code (the record's reader decides) or shows a missing test.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PRODUCT = ("infra", "pipeline")
SECONDS_PER_MISTAKE = 600
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One changed expression.

    Attributes:
        function: name of the function around it, without its class.
        line: the source line on which it begins, stripped.
        right, wrong: the expression as it is and as it is planted.
        module: the file's stem when it was drawn, by which tests are chosen.
    """

    function: str
    line: str
    right: str
    wrong: str
    module: str


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(required=True, dest="command")
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=40)
    running = commands.add_parser("run")
    running.add_argument("mistakes", type=Path)
    running.add_argument("record", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        json.dump([asdict(mistake) for mistake in draw(options.seed, options.count)], sys.stdout, indent=1)
        return
    record: list[dict[str, str]] = json.loads(options.record.read_text()) if options.record.exists() else []
    for values in json.loads(options.mistakes.read_text())[len(record) :]:
        mistake = Mistake(**values)
        record.append({**values, "found": found_by(mistake)})
        print(
            len(record),
            mistake.module,
            mistake.function,
            mistake.right,
            "->",
            mistake.wrong,
            ":",
            record[-1]["found"],
            flush=True,
        )
        options.record.write_text(json.dumps(record, indent=1))


def draw(seed: int, count: int) -> list[Mistake]:
    """Draw mistakes folder by folder, so that every folder has some and large ones have more."""
    generator = random.Random(seed)
    folders: dict[Path, list[Mistake]] = {}
    for path in sources():
        folders.setdefault(path.parent, []).extend(possible(path))
    drawn: list[Mistake] = []
    filled = sorted(folders, key=lambda folder: (-len(folders[folder]), folder))
    while len(drawn) < count:
        for folder in filled[: count - len(drawn)]:
            drawn.append(generator.choice(folders[folder]))
    return drawn


def sources() -> list[Path]:
    return sorted(path for name in PRODUCT for path in Path(name).rglob("*.py"))


def possible(path: Path) -> Iterator[Mistake]:
    """Every mistake that can be planted in a file's functions."""
    text = path.read_text()
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            wrong = mutated(node)
            if wrong is not None and isinstance(node, ast.expr) and node.end_lineno == node.lineno:
                yield Mistake(
                    function=function.name,
                    line=lines[node.lineno - 1].strip(),
                    right=ast.get_source_segment(text, node) or "",
                    wrong=ast.unparse(wrong),
                    module=path.stem,
                )


def mutated(node: ast.AST) -> ast.expr | None:
    """The wrong form of an expression, or None where no operator applies."""
    wrong = copy.deepcopy(node)
    if isinstance(wrong, ast.Compare) and type(wrong.ops[0]) in COMPARISONS:
        wrong.ops[0] = COMPARISONS[type(wrong.ops[0])]()
    elif isinstance(wrong, ast.BoolOp):
        wrong.op = ast.And() if isinstance(wrong.op, ast.Or) else ast.Or()
    elif isinstance(wrong, ast.BinOp) and type(wrong.op) in ARITHMETIC and not _is_text(wrong):
        wrong.op = ARITHMETIC[type(wrong.op)]()
    elif isinstance(wrong, ast.UnaryOp) and isinstance(wrong.op, ast.Not):
        return wrong.operand
    elif isinstance(wrong, ast.Constant) and isinstance(wrong.value, bool):
        wrong.value = not wrong.value
    elif isinstance(wrong, ast.Constant) and isinstance(wrong.value, int):
        wrong.value = wrong.value + 1
    elif isinstance(wrong, ast.IfExp):
        wrong.body, wrong.orelse = wrong.orelse, wrong.body
    else:
        return None
    return wrong


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def found_by(mistake: Mistake) -> str:
    """The first test that fails with the mistake planted; "nothing"; or "gone", if the code no longer has the place."""
    for path in sources():
        text = path.read_text()
        planted = plant(text, mistake)
        if planted is not None:
            try:
                path.write_text(planted)
                return run_tests(path)
            finally:
                path.write_text(text)
    return "gone"


def plant(text: str, mistake: Mistake) -> str | None:
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or function.name != mistake.function:
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(function):
            if not isinstance(node, ast.expr) or lines[node.lineno - 1].strip() != mistake.line:
                continue
            if ast.get_source_segment(text, node) == mistake.right and mutated(node) is not None:
                row = lines[node.lineno - 1].encode()  # columns count bytes
                lines[node.lineno - 1] = (
                    row[: node.col_offset] + f"({mistake.wrong})".encode() + row[node.end_col_offset :]
                ).decode()
                return "".join(lines)
    return None


def run_tests(path: Path) -> str:
    tests = [str(test) for test in related(path)]
    command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_PER_MISTAKE, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing within {SECONDS_PER_MISTAKE} s"
    if done.returncode == 0:
        return "nothing"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest: exit code {done.returncode}"


def related(path: Path) -> list[Path]:
    """The tests named after the module, then those that name it in an import, the quickest kind first."""
    parts = path.parts[:-1] if path.stem == "__init__" else path.with_suffix("").parts
    names = re.compile(rf"{re.escape('.'.join(parts))}\b|from {re.escape('.'.join(parts[:-1]))} import [^\n]*\b{parts[-1]}\b")
    tests = sorted(Path("tests").rglob("test_*.py"))
    own = [test for test in tests if test.stem.startswith(f"test_{parts[-1]}")]
    return own + [test for test in tests if test not in own and names.search(test.read_text())] or [Path("tests") / path.parts[0]]


if __name__ == "__main__":
    main()
