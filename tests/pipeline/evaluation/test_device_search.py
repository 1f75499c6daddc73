"""The search on a device: in one graph it finds what FAISS finds, whatever the numbers of queries and documents."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from pipeline.backends.device import open_device
from pipeline.evaluation.device_search import DeviceSearch
from pipeline.evaluation.retrieval import CANDIDATES_AT_ONCE, QUERIES_AT_ONCE
from pipeline.run.world import World
from tests.gangs import on_xla
from tests.trainium import STANDINS

DIMENSION, DEPTH = 24, 40
SIZES = (
    (3, [60]),
    (QUERIES_AT_ONCE, [CANDIDATES_AT_ONCE]),
    (QUERIES_AT_ONCE + 5, [CANDIDATES_AT_ONCE + 7, 1]),
    # Fewer than there is room for.
    (5, [DEPTH - 10, 3]),
)
"""Queries, and documents of each batch."""

PROGRAM = """
import json, sys
from pathlib import Path
sys.path += sys.argv[5:]
from tests.pipeline.evaluation import test_device_search as tests
print(json.dumps(tests.compare(sys.argv[3], Path(sys.argv[4]))))
"""


def vectors(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((count, DIMENSION), np.float32)


def compare(kind: str, folder: Path) -> list[int]:
    """Compare the search with FAISS for all sizes; return how many graphs were compiled in all, after each of them."""
    device = open_device(kind, "fp32", World(), inference=True)
    search = DeviceSearch(device, DIMENSION, DEPTH, ["--target=trn1"], folder / "search.pt")
    compiled = []
    for count, sizes in SIZES:
        # Every score is less than that of a row of zeros.
        queries, documents = -vectors(count, count), vectors(sum(sizes), 1)
        best = faiss.ResultHeap(count, DEPTH, keep_max=True)
        blocks, first = search.blocks(queries), 0
        for batch in np.split(documents, np.cumsum(sizes)[:-1]):
            search.add(best, blocks, batch, first)
            first += len(batch)
        best.finalize()
        scores, places = faiss.knn(queries, documents, min(DEPTH, len(documents)), faiss.METRIC_INNER_PRODUCT)
        there = best.I >= 0
        assert (there.sum(axis=1) == places.shape[1]).all()
        np.testing.assert_array_equal(best.I[there].reshape(places.shape), places)
        np.testing.assert_allclose(best.D[there].reshape(places.shape), scores, rtol=1e-5)
        compiled.append(device.graph_counts().compiled)
    device.close()
    return compiled


def test_on_xla_with_one_graph(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla", reason="torch-xla exists for Linux on x86-64 only")
    first, *others = on_xla(PROGRAM, "xla", tmp_path)
    assert others == [first] * 3
    assert first > 0


def test_where_operations_run_at_once(tmp_path: Path) -> None:
    assert compare("cpu", tmp_path) == [0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    assert compare("cuda", tmp_path) == [0] * 4


def test_in_a_traced_form_that_takes_one_shape(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla", reason="torch-xla exists for Linux on x86-64 only")
    assert on_xla(PROGRAM, "neuron", tmp_path, STANDINS) == [0] * 4
    assert (tmp_path / "search.pt").exists()
