"""Proof of what is published: the gate's metric, measured with the vectors that stand in the parts.

evaluate judges with vectors that it computes itself. Readers get those that embed wrote: by another host, in other batches, next
to ids. So publish measures some queries of the hold-out again, with the documents as the parts have them. Documents that are not
embedded, as those of training rows beside a corpus of its own, keep evaluate's vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline import store
from pipeline.contract import RunPaths
from pipeline.dataset.row_files import HOLDOUT_FILES, KNOWN, read_table
from pipeline.errors import Defect, MissingInput
from pipeline.evaluation.holdout import join_holdout
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.retrieval_metrics import measure_others, ranked_depth
from pipeline.evaluation.statistics import Integers
from pipeline.evaluation.vectors import Vectors, kept_vectors

PROOF_QUERIES = 2000
"""The first ones in the order of their hashes."""

QUERIES_AT_ONCE = 100

MAX_DIFFERENCE = 0.001
"""Other batches change the mean of nDCG by about 1e-5 in bf16 (2,700 queries of all-MiniLM-L6-v2)."""


class QualityProof:
    """Takes the vectors of the hold-out's documents from the parts, and measures with them.

    Args:
        paths: of the run.
        scratch: local folder for downloads.

    Raises:
        MissingInput: a file of the hold-out or of evaluate is gone, or lacks a text.
    """

    def __init__(self, paths: RunPaths, scratch: Path) -> None:
        uris = [store.join(paths.rows, name) for name in (*HOLDOUT_FILES, KNOWN)]
        held, candidates, known = (read_table(store.local_file(uri, scratch)) for uri in uris)
        holdout = join_holdout(held, candidates, known)
        queries = range(len(holdout.queries[:PROOF_QUERIES]))
        place, vectors = kept_vectors(
            store.local_file(paths.vectors, scratch), [*holdout.candidates, *holdout.queries[: len(queries)]]
        )
        if (place < 0).any():
            raise MissingInput("a text of the hold-out has no vector", value=paths.vectors, remedy="let evaluate run again")
        self._vectors, self._queries = np.split(np.array(vectors[place], np.float32), [len(holdout.candidates)])
        self._relevant, self._known = holdout.relevant.of_queries(queries), holdout.known.of_queries(queries)
        self._expected = QueryValues.read(store.local_file(paths.query_values, scratch)).of(holdout.keys[: len(queries)])
        self._hashes = candidates["document_hash"].to_numpy()
        pairs = list(zip(candidates["id"].to_pylist(), self._hashes.tolist(), strict=True))
        self._places = {pair: number for number, pair in enumerate(pairs)}
        self._taken = np.zeros(len(pairs), np.bool_)

    @property
    def documents(self) -> int:
        """Documents of the hold-out with a vector from a part."""
        return int(np.count_nonzero(self._taken))

    def take(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Take the vectors of documents that the hold-out has; may be called by several threads, with different documents.

        Args:
            batches: with `id`, `embedding` and `document_hash`.
        """
        for batch in batches:
            batch = batch.filter(pa.array(np.isin(batch["document_hash"].to_numpy(zero_copy_only=False), self._hashes)))
            pairs = zip(batch["id"].to_pylist(), batch["document_hash"].to_pylist(), strict=True)
            place = np.array([self._places.get(pair, -1) for pair in pairs], np.int64)
            vectors = batch["embedding"].flatten().to_numpy().reshape(len(batch), self._vectors.shape[1])
            self._vectors[place[place >= 0]] = vectors[place >= 0]
            self._taken[place[place >= 0]] = True

    def check(self, metric: str) -> float:
        """Return how far the metric's mean is from evaluate's.

        Raises:
            Defect: too far: the parts do not hold what evaluate judged.
        """
        ranked = np.concatenate(list(self._rankings(min(ranked_depth(self._known), len(self._vectors)))))
        values = measure_others(ranked, self._relevant, self._known)[metric]
        difference = float((values - self._expected[metric]).mean())
        if abs(difference) > MAX_DIFFERENCE:
            raise Defect(
                "the embeddings are not those that evaluate judged",
                value=f"{metric} of {len(values)} queries with the vectors in the parts: {values.mean():.5f}, "
                f"evaluate measured {self._expected[metric].mean():.5f}",
                rule=f"they differ by at most {MAX_DIFFERENCE:g}",
                remedy="report it with the run's folder; nothing was published",
            )
        return difference

    def _rankings(self, depth: int) -> Iterator[Integers]:
        for start in range(0, len(self._queries), QUERIES_AT_ONCE):
            # Not by FAISS, whose blocks give equal vectors unequal scores.
            scores: Vectors = self._queries[start : start + QUERIES_AT_ONCE] @ self._vectors.T
            best = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
            # In the order of candidates first, so that equal scores stay in it.
            best.sort(axis=1)
            order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
            yield np.take_along_axis(best, order, axis=1)
