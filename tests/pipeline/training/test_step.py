"""One optimizer step against plain torch, decay groups, and losses that are read late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.backends.device import Device, open_device
from pipeline.config import TrainConfig
from pipeline.model.encoder import checkpoint_activations, prepare_for_training
from pipeline.run.world import World
from pipeline.training.host_state import host_state
from pipeline.training.optimizer import FlatAdamW
from pipeline.training.step import RecentLosses, build_optimizer, prepare_encoder, step_seed, train_step
from tests.tiny import make_model


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu", "fp32", World(), threads=1)


def some_batch(learning_rate: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(5, 100, (4, 10), generator=generator)
    roles = torch.zeros(4, 4, dtype=torch.int32).fill_diagonal_(1)
    ones = torch.ones_like(tokens)
    return {
        "tokens:0/0": tokens,
        "mask:0/0": ones,
        "tokens:1/0": tokens[:, :6],
        "mask:1/0": ones[:, :6],
        "query_texts/0": torch.arange(4, 8),
        "document_texts/0": torch.arange(4),
        "roles": roles,
        "weights": torch.full((4,), 0.25),
        "learning_rate": torch.tensor([learning_rate]),
    }


def test_equals_plain_torch(tmp_path: Path, device: Device) -> None:
    # A large epsilon: Adam makes full steps out of gradients that are nothing but rounding.
    config = TrainConfig(weight_decay=0.1, clip_norm=0.5, temperature=0.1, epsilon=1e-3)
    ours = make_model(tmp_path / "ours").eval()
    plain = make_model(tmp_path / "plain").eval()
    optimizer, losses = build_optimizer(ours, config, device), RecentLosses(4, device)
    decayed = [parameter for name, parameter in plain.named_parameters() if "bias" not in name and "LayerNorm" not in name]
    rest = [parameter for name, parameter in plain.named_parameters() if "bias" in name or "LayerNorm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, eps=1e-3, foreach=False)
    expected = []
    for rate in (1e-3, 2e-3, 5e-4):
        batch = some_batch(rate)
        train_step(ours, optimizer, device, batch, config, losses, seed_of=int)
        for group in reference.param_groups:
            group["lr"] = rate
        queries = plain(batch["tokens:1/0"], batch["mask:1/0"])
        documents = plain(batch["tokens:0/0"], batch["mask:0/0"])
        loss = torch.nn.functional.cross_entropy(queries @ documents.T / 0.1, torch.arange(4))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        expected.append((float(loss.detach()), float(norm)))
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)
    assert [pytest.approx(pair, rel=1e-4) for pair in losses.read()] == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_words_have_no_gradient_and_no_state(ranks: int, tmp_path: Path, device: Device) -> None:
    """In torch's AdamW and, as a gang that shares its state would have it, in ours."""
    config = TrainConfig(freeze_word_embeddings=True, shard_optimizer=True)
    encoder = make_model(tmp_path / "model").train()
    prepare_encoder(encoder, config, device)
    words, others = encoder.word_embeddings, [one for one in encoder.parameters() if one.requires_grad]
    assert len(others) == len(list(encoder.parameters())) - 1
    before = [words.clone(), *(one.detach().clone() for one in others)]
    optimizer = build_optimizer(encoder, config, device)
    if ranks > 1:
        optimizer = FlatAdamW(optimizer.param_groups, config, device)
    train_step(encoder, optimizer, device, some_batch(1e-3), config, RecentLosses(1, device), seed_of=int)
    moved = [not torch.equal(one, other) for one, other in zip(before, [words, *others], strict=True)]
    assert (moved[0], sum(moved)) == (False, len(others))
    assert {f"{name}/exp_avg" for name, one in encoder.named_parameters() if one is not words} == {
        name for name in host_state(encoder, optimizer, device)[1] if name.endswith("/exp_avg")
    }


@pytest.mark.parametrize("checkpointed", [False, True])
def test_several_batches_add_up_to_one_step(tmp_path: Path, device: Device, checkpointed: bool) -> None:
    """The documents of a batch compete; the step's loss is the sum over its batches, and nothing moves before the last."""
    config = TrainConfig(clip_norm=None, temperature=0.1, epsilon=1e-3, weight_decay=0.0, accumulation=2)
    ours = make_model(tmp_path / "ours").train()
    plain = make_model(tmp_path / "plain").train()
    for encoder in (ours, plain):
        prepare_for_training(encoder, fused_attention=False, dropout=0.0)
    if checkpointed:
        checkpoint_activations(ours, device.checkpointed())
    optimizer, losses = build_optimizer(ours, config, device, adds_up=True), RecentLosses(4, device)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    expected = []
    for _ in range(2):
        halves = [
            {name: tensor[part, part] if name == "roles" else tensor[part] for name, tensor in some_batch(1e-3).items()}
            | {"learning_rate": torch.tensor([1e-3]), "query_texts/0": torch.arange(2, 4), "document_texts/0": torch.arange(2)}
            for part in (slice(0, 2), slice(2, 4))
        ]
        before = [parameter.clone() for parameter in ours.parameters()]
        train_step(ours, optimizer, device, halves[0], config, losses, seed_of=int, last=False)
        assert all(torch.equal(one, other) for one, other in zip(before, ours.parameters(), strict=True))
        train_step(ours, optimizer, device, halves[1], config, losses, seed_of=int, last=True)
        total = torch.zeros(())
        for half in halves:
            queries = plain(half["tokens:1/0"], half["mask:1/0"])
            scores = queries @ plain(half["tokens:0/0"], half["mask:0/0"]).T
            total = total + torch.nn.functional.cross_entropy(scores / 0.1, torch.arange(2)) / 2
        total.backward()
        reference.step()
        reference.zero_grad()
        expected.append(float(total.detach()))
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)
    assert [loss for loss, _ in losses.read()] == pytest.approx(expected, rel=1e-4)


def test_losses_are_read_once(device: Device) -> None:
    losses = RecentLosses(3, device)
    assert losses.read() == []
    for value in (1.0, 2.0):
        losses.add(torch.tensor(value))
        losses.push(torch.tensor(-value))
    assert losses.read() == [(1.0, -1.0), (2.0, -2.0)]
    assert losses.read() == []
    for value in (3.0, 4.0, 5.0):
        # In two parts, as where gradients of several batches are added up.
        losses.add(torch.tensor(value / 4))
        losses.add(torch.tensor(value * 3 / 4))
        losses.push(torch.tensor(0.0))
    assert losses.read() == [(3.0, 0.0), (4.0, 0.0), (5.0, 0.0)]


def test_dropout_depends_on_seed_step_and_rank() -> None:
    def draw(*key: int) -> float:
        torch.manual_seed(step_seed(*key))
        return float(torch.rand(()))

    assert draw(0, 1, 2) == draw(0, 1, 2)
    assert len({draw(0, 0, 0), draw(1, 0, 0), draw(0, 1, 0), draw(0, 0, 1), draw(0, 1, 1)}) == 5
    # Neuron has no integers of 64 bits.
    assert all(0 <= step_seed(0, step, rank) < 1 << 31 for step in range(50) for rank in range(4))
