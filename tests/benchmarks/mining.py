"""The two searches of `mine` for the best published documents of every query: with FAISS, and on a device.

    PYTHONPATH=. python tests/benchmarks/mining.py [--documents 200000] [--queries 2000] [--rounds 3] [--kind cpu|xla|cuda]

All searches are exact and find as many documents of each query as mine looks at with the default ranks. Both take the published
embeddings batch by batch, as mine reads them from the parts; the device computes a product and a `topk` of 512 queries and 8,192
documents at a time. FAISS's own index (IndexFlatIP) has all embeddings in memory, and adding them counts. Embeddings are random
unit vectors of 384 dimensions, in fp32.

Printed: the best seconds of each over the rounds, which take turns, their ratio to FAISS's, and the share of all found documents
that are the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt

from pipeline.backends.device import open_device
from pipeline.config.train import MineConfig
from pipeline.dataset.parts import READ_ROWS
from pipeline.evaluation.device_search import DeviceSearch
from pipeline.run.world import World
from pipeline.stages.mine import RELEVANT, keep_best

DIMENSION = 384
DEPTH = MineConfig().last + RELEVANT
Vectors = npt.NDArray[np.float32]


def unit_vectors(count: int, seed: int) -> Vectors:
    found = np.random.default_rng(seed).standard_normal((count, DIMENSION), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def with_faiss(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
    return found_by(partial(keep_best, queries=queries), len(queries), documents)


def found_by(add: Callable[..., None], queries: int, documents: Vectors) -> npt.NDArray[np.int64]:
    best = faiss.ResultHeap(queries, DEPTH, keep_max=True)
    for start in range(0, len(documents), READ_ROWS):
        add(best, vectors=documents[start : start + READ_ROWS], first=start)
    best.finalize()
    return best.I


def with_an_index(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(documents)
    places: npt.NDArray[np.int64] = index.search(queries, DEPTH)[1]
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", default="cpu", choices=["cpu", "xla", "cuda"])
    options = parser.parse_args()
    queries, documents = unit_vectors(options.queries, 1), unit_vectors(options.documents, 2)
    on_device = DeviceSearch(open_device(options.kind, "fp32", World(), inference=True), DIMENSION, DEPTH, [], Path())

    def with_the_device(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
        return found_by(partial(on_device.add, queries=on_device.blocks(queries)), len(queries), documents)

    searches = {"FAISS": with_faiss, options.kind: with_the_device, "IndexFlatIP": with_an_index}
    best, found = dict.fromkeys(searches, float("inf")), {}
    for _ in range(options.rounds):
        for name, search in searches.items():
            begun = time.perf_counter()
            found[name] = search(queries, documents)
            best[name] = min(best[name], time.perf_counter() - begun)
    for name, seconds in best.items():
        same = np.mean([len({*a} & {*b}) / DEPTH for a, b in zip(found["FAISS"].tolist(), found[name].tolist(), strict=True)])
        print(f"{name:<20}{seconds:>8.2f} s{seconds / best['FAISS']:>8.2f} x{same:>10.5f} the same")


if __name__ == "__main__":
    main()
