"""Training with negatives: what batches hold of them, and loss and gradients in every form against a plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional as F

from pipeline.backends.device import open_device
from pipeline.config import RunConfig, build_config
from pipeline.dataset.row_files import read_table
from pipeline.dataset.steps import write_steps
from pipeline.model.encoder import Encoder, prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.run.world import World
from pipeline.training.batches import Padding, TrainingBatches
from pipeline.training.step import RecentLosses, build_optimizer, train_step
from tests.pipeline.training.planned import write_rows
from tests.tiny import make_model

NEGATIVES, ROWS = 3, 60
TRAIN: dict[str, Any] = {
    "negatives": NEGATIVES,
    "batch_size": 8,
    "micro_batches": 2,
    "length": 32,
    "query_length": 8,
    "dropout": 0.0,
    "clip_norm": None,
    "learning_rate": 1e-9,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("negatives")
    make_model(folder / "model")
    write_rows(folder / "rows", folder / "model", 8, 32, rows=ROWS, held=5, negatives=NEGATIVES)
    write_steps(folder / "rows", ROWS, config(), 1)
    return folder


def config(**train: Any) -> RunConfig:
    return build_config({"seed": 3, "train": {**TRAIN, **train}})


def batches_of(folder: Path, padding: Padding, *, apart: bool, rank: int = 0, **settings: Any) -> TrainingBatches:
    train = config(**settings).train
    return TrainingBatches(folder / "rows", World(rank=rank), train, padding=padding, apart=apart, learning_rate=lambda _: 1e-9)


def plain_gradients(encoder: Encoder, folder: Path, rows: list[int], *, symmetric: bool) -> tuple[float, list[torch.Tensor]]:
    """The mean cross entropy of each row's document among all documents and negatives of the batch, text by text; and, if
    symmetric, its mean with that of each row's query among all queries."""
    table = read_table(folder / "rows" / "train.arrow").to_pylist()
    towers = ["document", *(f"negative_{number}" for number in range(NEGATIVES))]

    def embedded(tokens: list[int]) -> torch.Tensor:
        return encoder(torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.int64))[0]

    documents = [
        (row, tower == "document", table[row][f"{tower}_hash"], embedded(table[row][f"{tower}_tokens"]))
        for row in rows
        for tower in towers
        if table[row][f"{tower}_tokens"]
    ]
    losses = []
    for row in rows:
        relevant = {table[one]["document_hash"] for one in rows if table[one]["query_hash"] == table[row]["query_hash"]}
        kept = [
            (other == row and own, vector)
            for other, own, text, vector in documents
            if (other == row and own) or text not in relevant
        ]
        query = embedded(table[row]["query_tokens"])
        scores = torch.stack([query @ vector for _, vector in kept]) / 0.05
        losses.append(F.cross_entropy(scores[None], torch.tensor([[own for own, _ in kept].index(True)])))
    if symmetric:
        queries = [embedded(table[row]["query_tokens"]) for row in rows]
        vectors = {row: vector for row, own, _, vector in documents if own}
        for place, row in enumerate(rows):
            asked = {table[one]["query_hash"] for one in rows if table[one]["document_hash"] == table[row]["document_hash"]}
            kept = [one for one, other in enumerate(rows) if one == place or table[other]["query_hash"] not in asked]
            scores = torch.stack([vectors[row] @ queries[one] for one in kept]) / 0.05
            losses.append(F.cross_entropy(scores[None], torch.tensor([kept.index(place)])))
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in encoder.parameters() if parameter.grad is not None]


def encoder_for(folder: Path, padding: Padding) -> Encoder:
    encoder = load_encoder(folder / "model", build_config({}).model).train()
    prepare_for_training(encoder, fused_attention=False, unpadded_rows=padding is Padding.NONE, dropout=0.0)
    return encoder.double()


@pytest.mark.parametrize("symmetric", [False, True], ids=["", "symmetric"])
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("padding", list(Padding))
def test_loss_and_gradients_are_those_of_a_plain_computation(
    folder: Path, padding: Padding, apart: bool, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    device = open_device("cpu", "fp32", World(), threads=1)
    train = config(symmetric=symmetric).train
    batches = batches_of(folder, padding, apart=apart, symmetric=symmetric)
    batch = next(batches.iterate(0, 1))
    rows = [int(name.partition(":")[2]) - 1 for name in batches.row_ids(0)]
    expected, gradients = plain_gradients(encoder_for(folder, Padding.LONGEST), folder, rows, symmetric=symmetric)

    encoder = encoder_for(folder, padding)
    optimizer, losses = build_optimizer(encoder, train, device, adds_up=True), RecentLosses(1, device)
    kept: list[torch.Tensor] = []

    def keep() -> None:
        kept.extend(parameter.grad.clone() for parameter in encoder.parameters() if parameter.grad is not None)

    monkeypatch.setattr(optimizer, "step", keep)
    batch["weights"] = torch.where(batch["weights"] > 0, 1.0 / len(rows), 0.0).double()
    losses._values, losses._started = losses._values.double(), losses._started.double()
    train_step(encoder, optimizer, device, batch, train, losses, seed_of=lambda _: 1)
    ((loss, _),) = losses.read()
    assert loss == pytest.approx(expected, rel=1e-10)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    assert max(float((one - two).abs().max()) for one, two in zip(kept, gradients, strict=True)) < 1e-10 * largest


def test_a_step_holds_the_negatives_of_its_pairs_and_counts_their_tokens(folder: Path) -> None:
    table = read_table(folder / "rows" / "train.arrow").to_pylist()
    found = {padding: batches_of(folder, padding, apart=False) for padding in Padding}
    steps = {padding: list(batches.iterate(0, batches.steps)) for padding, batches in found.items()}
    taken: list[int] = []
    for step in range(found[Padding.PACKED].steps):
        rows = [int(name.partition(":")[2]) - 1 for name in found[Padding.PACKED].row_ids(step)]
        taken += rows
        texts = [tokens for row in rows for name, tokens in table[row].items() if name.endswith("_tokens")]
        facts = {padding: batches.take_facts(step) for padding, batches in found.items()}
        assert {one.tokens for one in facts.values()} == {sum(map(len, texts))}
        assert len({one.digest for one in facts.values()}) == 1
        assert len({tuple(steps[padding][step]["roles"].flatten().tolist()) for padding in Padding}) == 1
        assert steps[Padding.PACKED][step]["roles"].shape == (8, 8 * (1 + NEGATIVES))
    assert sorted(taken) == list(range(ROWS))


def test_digest_sees_another_negative(folder: Path, tmp_path: Path) -> None:
    def digests(rows: Path) -> list[str]:
        batches = TrainingBatches(rows, World(), config().train, learning_rate=lambda _: 0.0)
        for _ in batches.iterate(0, batches.steps):
            pass
        return [batches.take_facts(step).digest for step in range(batches.steps)]

    table = read_table(folder / "rows" / "train.arrow")
    hashes = table["negative_0_hash"].to_numpy().copy()
    hashes[np.flatnonzero(hashes)[7]] ^= np.uint64(1)
    table = table.set_column(table.schema.get_field_index("negative_0_hash"), "negative_0_hash", pa.array(hashes))
    with pa.ipc.new_file(str(tmp_path / "train.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "order.bin").symlink_to(folder / "rows" / "order.bin")
    assert sum(one != other for one, other in zip(digests(folder / "rows"), digests(tmp_path), strict=True)) == 1
