"""Metrics against trec_eval's own code, and rankings with equal scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch
import torch.utils._python_dispatch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import dot_score

from pipeline.errors import BadData
from pipeline.evaluation import retrieval
from pipeline.evaluation.retrieval import Block, rank, retrieve
from pipeline.evaluation.retrieval_metrics import DEPTH, METRICS, Relevant, measure_rankings

NAMES = {"ndcg@10": "ndcg_cut_10", "recall@1": "recall_1", "recall@10": "recall_10", "recall@100": "recall_100"}


def whole(candidates: torch.Tensor) -> list[Block]:
    return [(np.arange(len(candidates)), candidates)]


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
    result = retrieve(queries, whole(candidates), Relevant.of(relevant))
    expected = trec_eval(rank(queries, whole(candidates), 100), relevant)
    assert set(result) == set(METRICS)
    for metric in METRICS:
        np.testing.assert_allclose(result[metric], expected[metric], atol=1e-9, err_msg=metric)


def test_equals_sentence_transformers() -> None:
    """InformationRetrievalEvaluator knows relevant and irrelevant documents alone, and gives means."""
    rng = np.random.default_rng(0)
    queries, candidates = (torch.from_numpy(rng.normal(size=(count, 8)).astype(np.float32)) for count in (40, 300))
    chosen = [rng.choice(300, size=size, replace=False).tolist() for size in rng.integers(1, 30, 40)]
    result = retrieve(queries, whole(candidates), Relevant.of([dict.fromkeys(one, 1.0) for one in chosen]))
    evaluator = InformationRetrievalEvaluator(
        {str(number): "" for number in range(40)},
        {str(number): "" for number in range(300)},
        {str(number): set(map(str, one)) for number, one in enumerate(chosen)},
        precision_recall_at_k=[1, 10, 100],
        score_functions={"dot": dot_score},
    )
    evaluator.embed_inputs = lambda *_, encode_fn_name, **__: queries if encode_fn_name == "query" else candidates
    found: Any = evaluator.compute_all_metrics(None)["dot"]
    expected = {metric: found[f"{metric.split('@')[0]}@k"][int(metric.split("@")[1])] for metric in METRICS}
    assert {metric: values.mean() for metric, values in result.items()} == pytest.approx(expected, abs=1e-9)


@given(seed=st.integers(0, 10_000), k=st.integers(1, 40))
def test_ranking_equals_stable_sort(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    queries = torch.from_numpy(rng.integers(-1, 2, (5, 3)).astype(np.float32))
    candidates = torch.from_numpy(rng.integers(-1, 2, (30, 3)).astype(np.float32))
    scores = queries.numpy() @ candidates.numpy().T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, 30)]
    np.testing.assert_array_equal(rank(queries, whole(candidates), k), expected)


def test_negative_zero_ties_with_zero() -> None:
    queries = torch.tensor([[1.0]])
    assert rank(queries, whole(torch.tensor([[-0.0], [0.0], [1e-30], [-1e-30]])), 4).tolist() == [[2, 0, 1, 3]]


@given(
    seed=st.integers(0, 10_000),
    levels=st.sampled_from([1, 3, 1000]),
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 200), st.integers(1, 20)),
    k=st.integers(1, 40),
)
def test_neither_blocks_nor_their_order_matter(seed: int, levels: int, sizes: tuple[int, int, int], k: int) -> None:
    """Whole numbers, so that many scores are equal and all are exact."""
    rng = np.random.default_rng(seed)
    queries, candidates = (torch.from_numpy(rng.integers(-levels, levels, (count, 3)).astype(np.float32)) for count in (23, 150))
    scores = queries.numpy() @ candidates.numpy().T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    blocks = [(rows, candidates[rows]) for rows in np.array_split(rng.permutation(150), rng.integers(1, 5))]
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("QUERIES_AT_ONCE", "CANDIDATES_AT_ONCE", "GROUP"), sizes, strict=True):
            patch.setattr(retrieval, name, size)
        np.testing.assert_array_equal(rank(queries, [*blocks, (np.empty(0, np.int64), torch.empty(0, 0))], k), expected)


def test_no_block_of_scores_is_larger_than_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "QUERIES_AT_ONCE", 8)
    monkeypatch.setattr(retrieval, "CANDIDATES_AT_ONCE", 64)
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(20, 4, generator=generator), torch.randn(3000, 4, generator=generator)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in (found if isinstance(found, tuple) else [found]) if isinstance(one, torch.Tensor))
            return found

    with Watch():
        rank(queries, whole(candidates), 10)
    # Whole are only the candidates themselves.
    assert max(size for size in sizes if size not in (candidates.numel(), len(candidates))) <= 2 * 8 * 64


def test_fewer_candidates_than_ranks() -> None:
    result = retrieve(torch.tensor([[1.0, 0.0]]), whole(torch.tensor([[0.0, 1.0], [1.0, 0.0]])), Relevant.of([{0: 1.0}]))
    assert {name: values.tolist() for name, values in result.items()} == {
        "ndcg@10": [1 / np.log2(3)],
        "mrr@10": [0.5],
        "recall@1": [0.0],
        "recall@10": [1.0],
        "recall@100": [1.0],
    }


def test_refuses_what_is_not_finite() -> None:
    with pytest.raises(BadData, match="not finite"):
        retrieve(torch.tensor([[float("nan")]]), whole(torch.ones(2, 1)), Relevant.of([{0: 1.0}]))


def test_refuses_a_query_without_relevant_documents() -> None:
    for relevant in ([{0: 0.0}], [{0: 1.0}, {1: 0.0}], [{0: 1.0}, {0: 1.0}, {0: 1.0}]):
        with pytest.raises(ValueError, match="2 queries"):
            retrieve(torch.ones(2, 1), whole(torch.ones(2, 1)), Relevant.of(relevant))


def test_a_share_of_the_queries_has_its_own_relevant_candidates() -> None:
    relevant = Relevant.of([{3: 1.0}, {5: 2.0, 1: 0.5}, {2: 0.0, 7: 1.0}])
    assert [column.tolist() for column in relevant.of_queries(range(1, 3))] == [[0, 0, 1], [1, 5, 7], [0.5, 2.0, 1.0]]
    assert [len(column) for column in relevant.of_queries(range(2, 2))] == [0, 0, 0]
    assert retrieve(torch.empty(0, 0), whole(torch.ones(9, 1)), relevant.of_queries(range(0)))["mrr@10"].shape == (0,)


def test_known_candidates_count_neither_as_found_nor_as_wrong() -> None:
    """Judgements as in ESCI: 20 relevant products of each query, three of which are held out; the others were trained on."""
    rng = np.random.default_rng(0)
    vectors = torch.from_numpy(np.linalg.qr(rng.normal(size=(400, 400)))[0].astype(np.float32))
    products = rng.permutation(400).reshape(20, 20)
    # A perfect ranker: a query is the sum of its products.
    queries = torch.stack([vectors[own].sum(dim=0) for own in products])
    held = Relevant.of([dict.fromkeys(own[-3:].tolist(), 1.0) for own in products])
    known = Relevant.of([dict.fromkeys(own[:-3].tolist(), 1.0) for own in products])
    found = retrieve(queries, whole(vectors), held, known)
    assert {metric: values.tolist() for metric, values in found.items() if metric != "recall@1"} == {
        metric: pytest.approx([1.0] * 20) for metric in ("ndcg@10", "mrr@10", "recall@10", "recall@100")
    }
    assert retrieve(queries, whole(vectors), held)["ndcg@10"].mean() < 0.7
    # What is left is the ranking without them.
    some = torch.from_numpy(rng.normal(size=(20, 400)).astype(np.float32))
    rankings = rank(some, whole(vectors), 400).tolist()
    rest = [[one for one in row if one not in own[:-3]][:DEPTH] for row, own in zip(rankings, products.tolist(), strict=True)]
    assert (
        retrieve(some, whole(vectors), held, known)["ndcg@10"].tolist()
        == measure_rankings(np.array(rest), held)["ndcg@10"].tolist()
    )
