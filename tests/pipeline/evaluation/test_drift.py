"""Drift between two models' vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.evaluation import drift
from pipeline.evaluation.drift import cosines, measure_drift, overlaps
from pipeline.evaluation.retrieval import Block


def vectors(rows: int, dimension: int = 16, seed: int = 0) -> Tensor:
    drawn = torch.randn(rows, dimension, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn)


def blocks(values: Tensor) -> list[Block]:
    """As ranks have them: every third document each."""
    return [(np.arange(rank, len(values), 3), values[rank::3]) for rank in (2, 0, 1)]


def test_the_same_vectors_have_not_drifted() -> None:
    same = measure_drift(blocks(vectors(50)), blocks(vectors(50)))
    assert same["documents"] == 50
    assert (same["cosine"], same["cosine_p1"], same["overlap@10"]) == pytest.approx((1, 1, 1))
    assert same["difference"]["overlap@10"] == {"value": 0.0, "error": 0.0, "at_most": 0.0}


def test_a_rotation_keeps_the_neighbours_but_not_the_vectors() -> None:
    old = vectors(200)
    turn, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    found = measure_drift(blocks(old), blocks(old @ turn))
    assert found["overlap@10"] == pytest.approx(1, abs=0.01)
    expected = np.sum(old.numpy() * (old @ turn).numpy(), axis=1)
    assert found["cosine"] == pytest.approx(expected.mean(), abs=1e-6)
    assert found["cosine_p1"] == pytest.approx(np.quantile(expected, 0.01), abs=1e-6)
    difference = found["difference"]["cosine"]
    assert difference["value"] == pytest.approx(expected.mean() - 1, abs=1e-6)
    assert difference["error"] == pytest.approx(expected.std() / 200**0.5, abs=1e-6)
    assert difference["at_most"] > difference["value"]


def test_neighbours_are_those_of_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = vectors(90), vectors(90) + 0.3 * vectors(90, seed=2)

    def nearest(values: Tensor) -> list[set[int]]:
        scores = values.numpy() @ values.numpy().T
        np.fill_diagonal(scores, -np.inf)
        return [set(row[:10].tolist()) for row in np.argsort(-scores, axis=1)]

    expected = [len(a & b) / 10 for a, b in zip(nearest(old), nearest(new), strict=True)]
    assert 0.2 < np.mean(expected) < 0.9
    assert overlaps(old, new).tolist() == expected
    # A bound on the work, not on what is measured of it.
    monkeypatch.setattr(drift, "MOST_DOCUMENTS", 40)
    assert measure_drift(blocks(old), blocks(new))["overlap@10"] == overlaps(old[:40], new[:40]).mean()


def test_few_documents_and_other_dimensions() -> None:
    assert overlaps(vectors(3), vectors(3)).tolist() == [1, 1, 1]
    other = measure_drift(blocks(vectors(30)), blocks(vectors(30, 8)))
    assert "cosine" not in other
    assert set(other["difference"]) == {"overlap@10"}
    assert cosines(2 * vectors(5), vectors(5)) == pytest.approx(1)
