"""The loss and its gradients against a plain computation over the whole batch, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.model.loss import DocumentRole, contrastive_loss
from pipeline.training.batches import roles
from tests.gangs import run_gang

TEMPERATURE = 0.05
QUERY_HASH = np.array([1, 2, 3, 1, 5, 6, 7, 8], np.uint64)
DOCUMENT_HASH = np.array([11, 12, 13, 14, 12, 16, 17, 18], np.uint64)
VALID = np.array([True] * 6 + [False] * 2)
"""Rows 0 and 3 share a query, 1 and 4 a document; the second of two ranks has only two valid rows of four."""

PROGRAM = """
import sys
import torch
from pipeline.backends.device import open_device
from pipeline.run.world import World
from tests.pipeline.model.test_loss import rank_loss, some_embeddings
rank, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = open_device("cpu", "fp32", World(rank=rank, size=2, local_rank=rank, local_size=2, port=port), threads=1)
queries, documents = (part[4 * rank : 4 * rank + 4].clone().requires_grad_() for part in some_embeddings())
loss = rank_loss(queries, documents, rank, 2, device.gather)
loss.backward()
torch.save({"loss": loss.detach(), "queries": queries.grad, "documents": documents.grad}, f"{out}/{rank}.pt")
device.close()
"""


def some_embeddings() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return F.normalize(torch.randn(8, 6, generator=generator), dim=1), F.normalize(torch.randn(8, 6, generator=generator), dim=1)


def rank_loss(queries: Tensor, documents: Tensor, rank: int, size: int, gather: object) -> Tensor:
    count = 8 // size
    own = slice(rank * count, (rank + 1) * count)
    found = roles(QUERY_HASH, DOCUMENT_HASH[:, None], VALID[:, None], own.start, count)
    weights = np.where(VALID[own], size / VALID.sum(), 0.0).astype(np.float32)
    return contrastive_loss(
        queries, documents, torch.from_numpy(found), torch.from_numpy(weights), temperature=TEMPERATURE, gather=gather
    )


def plain_loss(queries: Tensor, documents: Tensor) -> Tensor:
    """One query at a time, over the documents it may be compared with."""
    losses = []
    for query in np.flatnonzero(VALID):
        others = [
            row
            for row in np.flatnonzero(VALID)
            if row == query or (QUERY_HASH[row] != QUERY_HASH[query] and DOCUMENT_HASH[row] != DOCUMENT_HASH[query])
        ]
        scores = torch.stack([queries[query] @ documents[row] for row in others]) / TEMPERATURE
        losses.append(F.cross_entropy(scores[None], torch.tensor([others.index(query)])))
    return torch.stack(losses).mean()


def reference() -> tuple[Tensor, Tensor, Tensor]:
    queries, documents = (part.double().requires_grad_() for part in some_embeddings())
    loss = plain_loss(queries, documents)
    loss.backward()
    return loss.detach(), queries.grad, documents.grad


def test_roles() -> None:
    found = roles(QUERY_HASH, DOCUMENT_HASH[:, None], VALID[:, None], 0, 8)
    assert [int(value) for value in np.diag(found)] == [DocumentRole.POSITIVE] * 8
    assert found[0, 3] == found[3, 0] == DocumentRole.IGNORED  # same query
    assert found[1, 4] == found[4, 1] == DocumentRole.IGNORED  # same document
    assert (found[:6, 6:] == DocumentRole.IGNORED).all()  # padding
    assert found[0, 1] == found[2, 5] == DocumentRole.NEGATIVE
    np.testing.assert_array_equal(roles(QUERY_HASH, DOCUMENT_HASH[:, None], VALID[:, None], 4, 4), found[4:])


def test_roles_of_negatives() -> None:
    queries = np.array([1, 2, 1, 4], np.uint64)
    # Of row 0 a negative that row 2 gives as relevant to the same query, of row 1 another row's document, of row 2 its own.
    documents = np.array([[11, 13, 51], [12, 11, 52], [13, 13, 0], [14, 0, 0]], np.uint64)
    there = documents > 0
    there[3] = False
    found = roles(queries, documents, there, 0, 4).reshape(4, 4, 3)
    ignored, negative, positive = DocumentRole.IGNORED, DocumentRole.NEGATIVE, DocumentRole.POSITIVE
    assert found[0].tolist() == [[positive, ignored, negative], [negative, ignored, negative], [ignored] * 3, [ignored] * 3]
    assert found[1].tolist() == [
        [negative, negative, negative],
        [positive, negative, negative],
        [negative, negative, ignored],
        [ignored] * 3,
    ]
    assert found[2].tolist() == [
        [ignored, ignored, negative],
        [negative, ignored, negative],
        [positive, ignored, ignored],
        [ignored] * 3,
    ]
    np.testing.assert_array_equal(roles(queries, documents, there, 2, 2), found.reshape(4, 12)[2:])


def test_one_rank_equals_plain_computation() -> None:
    queries, documents = (part.requires_grad_() for part in some_embeddings())
    loss = rank_loss(queries, documents, 0, 1, lambda rows: rows)
    loss.backward()
    expected, query_gradient, document_gradient = reference()
    torch.testing.assert_close(loss.detach(), expected.float())
    torch.testing.assert_close(queries.grad, query_gradient.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(documents.grad, document_gradient.float(), rtol=1e-4, atol=1e-6)
    assert bool((documents.grad[6:] == 0).all())


def test_two_ranks_equal_plain_computation(tmp_path: Path) -> None:
    run_gang(PROGRAM, 2, tmp_path)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    expected, query_gradient, document_gradient = reference()
    torch.testing.assert_close((results[0]["loss"] + results[1]["loss"]) / 2, expected.float())
    # What an encoder's weights get is the mean of both ranks' gradients, hence the halves.
    for name, gradient in (("queries", query_gradient), ("documents", document_gradient)):
        found = torch.cat([result[name] for result in results]) / 2
        torch.testing.assert_close(found, gradient.float(), rtol=1e-4, atol=1e-6)
