"""The search of `mine`: the best published documents of every query, beside the same products and ranking in torch.

    PYTHONPATH=. python tests/benchmarks/mining.py [--documents 200000] [--queries 2000] [--rounds 3]

All searches are exact and find as many documents of each query as mine looks at with the default ranks. mine's takes the
published embeddings batch by batch, as it reads them from the parts; so does torch's (a product and a `topk` for 512 queries at a
time). FAISS's own index (IndexFlatIP) has them all in memory, and adding them counts. Embeddings are random unit vectors of 384
dimensions, in fp32.

Printed: the best seconds of each over the rounds, which take turns, their ratio to mine's, and the share of all found documents
that are the same.
"""

from __future__ import annotations

import argparse
import time

import faiss
import numpy as np
import numpy.typing as npt
import torch

from pipeline.config.train import MineConfig
from pipeline.dataset.parts import READ_ROWS
from pipeline.stages.mine import RELEVANT, keep_best

DIMENSION = 384
QUERIES_AT_ONCE = 512
DEPTH = MineConfig().last + RELEVANT
Vectors = npt.NDArray[np.float32]


def unit_vectors(count: int, seed: int) -> Vectors:
    found = np.random.default_rng(seed).standard_normal((count, DIMENSION), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def ours(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
    best = faiss.ResultHeap(len(queries), DEPTH, keep_max=True)
    for start in range(0, len(documents), READ_ROWS):
        keep_best(best, queries, documents[start : start + READ_ROWS], start)
    best.finalize()
    return best.I


def in_torch(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
    scores, places = torch.full((len(queries), DEPTH), -torch.inf), torch.zeros((len(queries), DEPTH), dtype=torch.int64)
    for first in range(0, len(documents), READ_ROWS):
        vectors = torch.from_numpy(documents[first : first + READ_ROWS])
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(start, start + QUERIES_AT_ONCE)
            best, order = (torch.from_numpy(queries[rows]) @ vectors.T).topk(min(DEPTH, len(vectors)))
            scores[rows], kept = torch.cat([scores[rows], best], dim=1).topk(DEPTH)
            places[rows] = torch.cat([places[rows], order + first], dim=1).gather(1, kept)
    return places.numpy()


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
    options = parser.parse_args()
    queries, documents = unit_vectors(options.queries, 1), unit_vectors(options.documents, 2)
    searches = {"mine": ours, "torch": in_torch, "IndexFlatIP": with_an_index}
    best, found = dict.fromkeys(searches, float("inf")), {}
    for _ in range(options.rounds):
        for name, search in searches.items():
            begun = time.perf_counter()
            found[name] = search(queries, documents)
            best[name] = min(best[name], time.perf_counter() - begun)
    for name, seconds in best.items():
        same = np.mean([len({*a} & {*b}) / DEPTH for a, b in zip(found["mine"].tolist(), found[name].tolist(), strict=True)])
        print(f"{name:<20}{seconds:>8.2f} s{seconds / best['mine']:>8.2f} x{same:>10.5f} the same")


if __name__ == "__main__":
    main()
