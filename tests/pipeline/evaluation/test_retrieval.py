"""Metrics against trec_eval's own code, and rankings with equal scores."""

from __future__ import annotations

import numpy as np
import pytest
import pytrec_eval
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadData
from pipeline.evaluation import retrieval
from pipeline.evaluation.retrieval import METRICS, rank, retrieve

NAMES = {"ndcg@10": "ndcg_cut_10", "recall@1": "recall_1", "recall@10": "recall_10", "recall@100": "recall_100"}


def trec_eval(ranked: np.ndarray, relevant: list[dict[int, float]]) -> dict[str, np.ndarray]:
    judged = {str(query): {str(document): int(gain) for document, gain in gains.items()} for query, gains in enumerate(relevant)}
    # trec_eval orders equal scores by name, so it is given the ranks as scores: what is compared are the metrics.
    runs = {str(query): {str(d): float(-place) for place, d in enumerate(row.tolist())} for query, row in enumerate(ranked)}
    found = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recall.1,10,100"}).evaluate(runs)
    cut = {query: dict(list(run.items())[:10]) for query, run in runs.items()}
    first = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank"}).evaluate(cut)
    order = [str(query) for query in range(len(relevant))]
    result = {ours: np.array([found[query][theirs] for query in order]) for ours, theirs in NAMES.items()}
    return {**result, "mrr@10": np.array([first[query]["recip_rank"] for query in order])}


@given(seed=st.integers(0, 10_000), documents=st.integers(3, 250), levels=st.sampled_from([2, 5, 1000]))
def test_equals_trec_eval(seed: int, documents: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    queries = torch.from_numpy(rng.integers(0, levels, (7, 4)).astype(np.float32))
    candidates = torch.from_numpy(rng.integers(-levels, levels, (documents, 4)).astype(np.float32))
    relevant = []
    for _ in range(7):
        chosen = rng.choice(documents, size=rng.integers(1, min(documents, 30) + 1), replace=False)
        relevant.append({int(document): float(rng.integers(0, 4)) for document in chosen} | {int(chosen[0]): 1.0})
    result = retrieve(queries, candidates, relevant)
    expected = trec_eval(rank(queries, candidates, 100), relevant)
    assert set(result) == set(METRICS)
    for metric in METRICS:
        np.testing.assert_allclose(result[metric], expected[metric], atol=1e-9, err_msg=metric)


@given(seed=st.integers(0, 10_000), k=st.integers(1, 40))
def test_ranking_equals_stable_sort(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    queries = torch.from_numpy(rng.integers(-1, 2, (5, 3)).astype(np.float32))
    candidates = torch.from_numpy(rng.integers(-1, 2, (30, 3)).astype(np.float32))
    scores = queries.numpy() @ candidates.numpy().T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, 30)]
    np.testing.assert_array_equal(rank(queries, candidates, k), expected)


def test_negative_zero_ties_with_zero() -> None:
    queries = torch.tensor([[1.0]])
    assert rank(queries, torch.tensor([[-0.0], [0.0], [1e-30], [-1e-30]]), 4).tolist() == [[2, 0, 1, 3]]


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(23, 8, generator=generator), torch.randn(150, 8, generator=generator)
    whole = rank(queries, candidates, 100)
    monkeypatch.setattr(retrieval, "SCORES_PER_CHUNK", 500)
    np.testing.assert_array_equal(rank(queries, candidates, 100), whole)


def test_fewer_candidates_than_ranks() -> None:
    result = retrieve(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [{0: 1.0}])
    assert {name: values.tolist() for name, values in result.items()} == {
        "ndcg@10": [1 / np.log2(3)],
        "mrr@10": [0.5],
        "recall@1": [0.0],
        "recall@10": [1.0],
        "recall@100": [1.0],
    }


def test_refuses_what_is_not_finite() -> None:
    with pytest.raises(BadData, match="not finite"):
        retrieve(torch.tensor([[float("nan")]]), torch.ones(2, 1), [{0: 1.0}])


def test_refuses_a_query_without_relevant_documents() -> None:
    with pytest.raises(ValueError, match="query 0"):
        retrieve(torch.ones(1, 1), torch.ones(2, 1), [{0: 0.0}])
