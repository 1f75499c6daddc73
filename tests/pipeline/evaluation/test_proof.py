"""publish's proof ranks as evaluate does (tests/pipeline/stages/test_publish.py has the proof of whole runs)."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.evaluation.proof import QualityProof
from pipeline.evaluation.retrieval import retrieve
from pipeline.evaluation.retrieval_metrics import Relevant


def test_documents_with_equal_vectors_keep_their_order() -> None:
    """Every document has a twin, and one of the two is relevant: any other order changes the metric."""
    random = np.random.default_rng(0)
    documents = random.standard_normal((5003, 384)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    twins = random.permutation(5002)
    documents[twins[::2]] = documents[twins[1::2]]
    own = random.choice(5003, 2000, replace=False)
    queries = documents[own] + 0.02 * random.standard_normal((2000, 384)).astype(np.float32)
    relevant, known = Relevant.of([{int(each): 1.0} for each in own]), Relevant.of([{} for _ in own])
    proof = QualityProof.__new__(QualityProof)
    proof._queries, proof._vectors = queries, documents
    proof._relevant, proof._known = relevant, known
    blocks = [(np.arange(5003), torch.from_numpy(documents))]
    proof._expected = retrieve(torch.from_numpy(queries), blocks, relevant, known)
    # A few documents at the end of a block may have other last digits on some processors.
    assert abs(proof.check("ndcg@10")) < 2e-4
