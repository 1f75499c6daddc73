"""The search of `mine`: the best published documents of every query, beside FAISS.

    PYTHONPATH=. python tests/benchmarks/mining.py [--documents 200000] [--queries 2000] [--rounds 3]

Both searches are exact and find as many documents of each query as mine looks at with the default ranks. mine's takes the
published embeddings batch by batch, as it reads them from the parts; FAISS (IndexFlatIP, of package faiss-cpu, which is none of
trnpipe's) has them all in memory, and adding them counts. Embeddings are random unit vectors of 384 dimensions, in fp32.

Printed: the best seconds of each over the rounds, which alternate, and the share of all found documents that are the same.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from pipeline.config.train import MineConfig
from pipeline.dataset.parts import READ_ROWS
from pipeline.stages.mine import RELEVANT, keep_best

DIMENSION = 384
DEPTH = MineConfig().last + RELEVANT
Vectors = npt.NDArray[np.float32]


def unit_vectors(count: int, seed: int) -> Vectors:
    found = np.random.default_rng(seed).standard_normal((count, DIMENSION), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def ours(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
    scores, places = torch.full((len(queries), DEPTH), -torch.inf), torch.zeros((len(queries), DEPTH), dtype=torch.int64)
    for start in range(0, len(documents), READ_ROWS):
        vectors = torch.from_numpy(documents[start : start + READ_ROWS])
        keep_best(torch.from_numpy(queries), vectors, start, scores, places)
    return places.numpy()


def theirs(queries: Vectors, documents: Vectors) -> npt.NDArray[np.int64]:
    import faiss  # type: ignore[import-not-found]

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
    searches = {"mine": ours} | ({"faiss IndexFlatIP": theirs} if find_spec("faiss") else {})
    best, found = dict.fromkeys(searches, float("inf")), {}
    for _ in range(options.rounds):
        for name, search in searches.items():
            begun = time.perf_counter()
            found[name] = search(queries, documents)
            best[name] = min(best[name], time.perf_counter() - begun)
    for name, seconds in best.items():
        same = np.mean([len({*a} & {*b}) / DEPTH for a, b in zip(found["mine"].tolist(), found[name].tolist(), strict=True)])
        print(f"{name:<20}{seconds:>8.2f} s{best['mine'] / seconds:>8.2f} x{same:>10.5f} the same")


if __name__ == "__main__":
    main()
