"""Losses, with Matryoshka sizes and without, against those of sentence-transformers: on random embeddings and on real batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.backends.device import Device, open_device
from pipeline.config import ModelConfig, TrainConfig
from pipeline.model.encoder import prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.model.inventory import load_tokenizer
from pipeline.run.world import World
from pipeline.training.batches import grouped_texts, roles
from pipeline.training.micro_batches import micro_batches
from pipeline.training.step import RecentLosses, batch_loss, both_towers, cached_backward
from tests.gangs import run_gang
from tests.tiny import WORDS, make_model, sentence_transformer

PAIRS, WIDTH = 8, 32
SIZES = (20, 7)
BOUNDS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-6, 1e-5)}
"""Of the loss, relative; of the gradient, by its norm."""

Found = tuple[Tensor, Tensor]
"""The loss, and the gradient of everything as one vector."""


@contextmanager
def computing_in(kind: torch.dtype) -> Iterator[None]:
    """Embeddings and the loss are fp32 otherwise."""
    plain = torch.Tensor.float
    if kind is torch.float64:
        torch.Tensor.float = lambda tensor: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = plain  # type: ignore[method-assign]


def train_config(symmetric: bool, negatives: int, sizes: tuple[int, ...] = SIZES) -> TrainConfig:
    return TrainConfig(symmetric=symmetric, negatives=negatives, dimensions=sizes)


def batch_of(negatives: int, rank: int, ranks: int, kind: torch.dtype) -> dict[str, Tensor]:
    """Roles and weights of one rank's pairs; all texts differ."""
    count = PAIRS // ranks
    hashes = np.arange(1, 1 + (2 + negatives) * PAIRS, dtype=np.uint64).reshape(2 + negatives, PAIRS)
    query, documents, there = hashes[0], hashes[1:].T, np.ones((PAIRS, 1 + negatives), np.bool_)
    return {
        "roles": torch.from_numpy(roles(query, documents, there, rank * count, count)),
        "query_roles": torch.from_numpy(roles(documents[:, 0], query[:, None], there[:, :1], rank * count, count)),
        "weights": torch.full((count,), ranks / PAIRS, dtype=kind),
    }


def their_loss(model: nn.Module, *, symmetric: bool, sizes: tuple[int, ...] = SIZES, mini_batch: int | None = None) -> nn.Module:
    from sentence_transformers.sentence_transformer import losses

    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    settings: dict[str, Any] = {"scale": 20.0, "directions": directions, "partition_mode": "per_direction"}
    loss: nn.Module
    if mini_batch:
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch, **settings)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, **settings)
    return losses.MatryoshkaLoss(model, loss, [WIDTH, *sizes]) if sizes else loss


def require_equal(found: Found, expected: Found, kind: torch.dtype) -> None:
    for name, one, other, bound in zip(("loss", "gradient"), found, expected, BOUNDS[kind], strict=True):
        assert float((one - other).norm() / other.norm()) < bound, name
    assert float(expected[1].norm()) > 1e-3


# ---- random embeddings -----------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Stands for a model whose embeddings are given."""

    def get_embedding_dimension(self) -> int:
        return WIDTH

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["embedding"]}


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu", "fp32", World(), threads=1)


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("sizes", [(), SIZES])
@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_on_random_embeddings(device: Device, symmetric: bool, negatives: int, sizes: tuple[int, ...], kind: torch.dtype) -> None:
    drawn = torch.randn(2 + negatives, PAIRS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=kind).requires_grad_()
    texts = F.normalize(drawn, dim=-1)  # theirs normalizes once more, so gradients agree before the normalization only
    theirs = their_loss(Given(), symmetric=symmetric, sizes=sizes)([{"embedding": one} for one in texts], torch.empty(0))
    with computing_in(kind):
        config, batch = train_config(symmetric, negatives, sizes), batch_of(negatives, 0, 1, kind)
        ours = batch_loss(texts[0], texts[1:].transpose(0, 1).flatten(0, 1), batch, config, device, normalize=True)
    found, expected = ((loss.detach(), *torch.autograd.grad(loss, drawn, retain_graph=True)) for loss in (ours, theirs))
    require_equal(found, expected, kind)


def test_prefixes_of_a_model_that_does_not_normalize_stay_as_they_are(device: Device) -> None:
    queries, documents = torch.randn(2, PAIRS, WIDTH, generator=torch.Generator().manual_seed(5)) / 4
    batch = batch_of(0, 0, 1, torch.float32)
    found = batch_loss(queries, documents, batch, train_config(False, 0), device, normalize=False)
    scores = [queries[:, :size] @ documents[:, :size].T * 20 for size in (WIDTH, *SIZES)]
    torch.testing.assert_close(found, torch.stack([F.cross_entropy(one, torch.arange(PAIRS)) for one in scores]).sum())


# ---- real batches ----------------------------------------------------------------------------------------------------


def some_texts(negatives: int) -> list[list[str]]:
    """Queries, documents and negatives, a text for each pair."""
    rng = np.random.default_rng(2)
    return [[" ".join(rng.choice(WORDS, rng.integers(2, 12))) for _ in range(PAIRS)] for _ in range(2 + negatives)]


def our_gradient(folder: Path, device: Device, kind: torch.dtype, *, symmetric: bool, negatives: int, parts: int) -> Found:
    """This rank's loss and the mean of all ranks' gradients, in so many micro-batches."""
    encoder = load_encoder(folder, ModelConfig()).to(kind)
    prepare_for_training(encoder, fused_attention=False, dropout=0.0)
    config, world = train_config(symmetric, negatives), device.world
    batch = batch_of(negatives, world.rank, world.size, kind)
    tokenizer, own = load_tokenizer(folder), PAIRS // world.size
    columns = [tokenizer.encode(column[world.rank * own :][:own], 32) for column in some_texts(negatives)]
    for number in range(parts):
        lists = [tokens for column in columns for tokens in column[own // parts * number :][: own // parts]]
        texts = grouped_texts(lists, np.arange(len(lists)).reshape(len(columns), -1), places=False)
        batch |= {f"{name}/{number}": tensor for name, tensor in texts.items()}
    losses, cut = RecentLosses(1, device), micro_batches(batch)
    with computing_in(kind):
        if parts > 1:
            cached_backward(encoder, device, batch, cut, config, losses, seed_of=int)
        else:
            loss = batch_loss(*both_towers(encoder, cut[0]), batch, config, device, normalize=encoder.normalize)
            loss.backward()
            losses.add(loss)
    device.reduce_gradients(encoder.parameters())
    return losses.tensors[1], torch.cat([one.grad.flatten() for one in encoder.parameters()])


def their_gradient(folder: Path, kind: torch.dtype, *, symmetric: bool, negatives: int, parts: int) -> Found:
    """The same of the whole batch, by sentence-transformers."""
    model = sentence_transformer(folder).to(kind).eval()
    columns = [model.preprocess(column) for column in some_texts(negatives)]
    loss = their_loss(model, symmetric=symmetric, mini_batch=PAIRS // parts if parts > 1 else None)(columns, torch.empty(0))
    loss.backward()
    weights = dict(model[0].auto_model.named_parameters())
    named = load_encoder(folder, ModelConfig()).backbone.named_parameters()
    return loss.detach(), torch.cat([weights[name].grad.flatten() for name, _ in named])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matryoshka") / "model"
    make_model(folder)
    return folder


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("parts", [1, 2], ids=["", "cached"])
@pytest.mark.parametrize(("symmetric", "negatives"), [(False, 1), (True, 0)])
def test_on_real_batches(folder: Path, device: Device, symmetric: bool, negatives: int, parts: int, kind: torch.dtype) -> None:
    case: dict[str, Any] = {"symmetric": symmetric, "negatives": negatives, "parts": parts}
    require_equal(our_gradient(folder, device, kind, **case), their_gradient(folder, kind, **case), kind)


CASES: list[dict[str, Any]] = [
    {"symmetric": symmetric, "negatives": negatives, "parts": parts}
    for symmetric, negatives in ((False, 1), (True, 0))
    for parts in (1, 2)
]

PROGRAM = """
import sys
from pathlib import Path
import torch
from pipeline.backends.device import open_device
from pipeline.run.world import World
from tests.pipeline.training.test_matryoshka import BOUNDS, CASES, our_gradient
rank, port, folder, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
device = open_device("cpu", "fp32", World(rank=rank, size=2, local_rank=rank, local_size=2, port=port), threads=1)
torch.save([our_gradient(folder, device, kind, **case) for kind in BOUNDS for case in CASES], f"{out}/{rank}.pt")
device.close()
"""


def test_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    """Each with half of the pairs; theirs is one process with all of them."""
    run_gang(PROGRAM, 2, folder, tmp_path)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    expected = [(kind, their_gradient(folder, kind, **case)) for kind in BOUNDS for case in CASES]
    for (kind, theirs), first, second in zip(expected, *results, strict=True):
        require_equal(((first[0] + second[0]) / 2, first[1]), theirs, kind)
        assert torch.equal(first[1], second[1])
