"""A batch in micro-batches against the same batch in one piece: loss, gradients, dropout, ranks; and what is computed at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.backends.device import Device, open_device
from pipeline.config import RunConfig, TrainConfig, build_config
from pipeline.errors import BadConfig
from pipeline.model.encoder import Encoder, checkpoint_activations, prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.model.loss import contrastive_loss
from pipeline.packing import BinShape
from pipeline.run.world import World
from pipeline.training.batches import Padding, grouped_texts, packed_texts
from pipeline.training.micro_batches import micro_batches
from pipeline.training.step import RecentLosses, both_towers, build_optimizer, train_step
from tests.gangs import run_gang
from tests.tiny import make_model

SHAPE = BinShape(rows=4, length=24, pairs=5)
BINS = 3
FORMS = list(Padding)
Found = dict[str, Tensor]
"""The loss, and the gradient of every parameter by name."""


def rows_of(rank: int, ranks: int, form: Padding = Padding.PACKED, parts: int = BINS) -> dict[str, Tensor]:
    """A rank's batch of three bins with 4, 3 and 5 pairs of different lengths, in so many micro-batches; ranks have their own."""
    rng = np.random.default_rng(4 + rank)
    counts = (4, 3, 5)
    bins = [[tuple(rng.integers(5, 100, rng.integers(2, most)) for most in (7, 11)) for _ in range(count)] for count in counts]
    batch: dict[str, Tensor] = {}
    for number in range(parts):
        own = bins[number::parts] if parts == BINS else bins
        batch |= {f"{name}/{number}": tensor for name, tensor in texts_in(own, form).items()}
    valid = np.concatenate([np.arange(SHAPE.pairs) < count for count in counts])
    size = len(valid)
    roles = torch.zeros(size, size * ranks, dtype=torch.int32)
    roles[:, 1::5] = -1
    roles[:, ~np.tile(valid, ranks)] = -1
    roles[torch.arange(size), torch.arange(size) + rank * size] = 1
    weights = torch.from_numpy(np.where(valid, 1 / valid.sum(), 0.0).astype(np.float32))
    return {**batch, "roles": roles, "weights": weights, "learning_rate": torch.tensor([0.0])}


def texts_in(bins: list[list[tuple[Any, ...]]], form: Padding) -> dict[str, Tensor]:
    """The texts of a micro-batch in one of its forms."""
    if form is Padding.PACKED:
        return packed_texts(bins, SHAPE)
    lists = [tokens for tower in zip(*(pair for pairs in bins for pair in pairs), strict=True) for tokens in tower]
    texts = np.zeros((2, len(bins), SHAPE.pairs), np.int64)
    texts[:, np.arange(SHAPE.pairs) < np.array([len(pairs) for pairs in bins])[:, None]] = np.arange(len(lists)).reshape(2, -1)
    return grouped_texts(lists, texts.reshape(2, -1), places=form is Padding.NONE)


def seed_of(part: int) -> int:
    return 70 + part


def encoder_in(folder: Path, device: Device, form: Padding, *, dropout: float = 0.0, checkpointed: bool = False) -> Encoder:
    encoder = load_encoder(folder, build_config({}).model).train()
    unpads = form is Padding.NONE
    prepare_for_training(encoder, fused_attention=False, unpadded_rows=unpads, dropout=dropout)
    if checkpointed:
        checkpoint_activations(encoder, device.checkpointed())
    return device.place(encoder)


def gradients(encoder: Encoder, loss: float) -> Found:
    named = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    return {"loss": torch.tensor(loss), **named}


def in_parts(encoder: Encoder, device: Device, batch: dict[str, Tensor], *, accumulation: int = 1) -> Found:
    """What one step leaves; the learning rate is 0, so that weights stay."""
    size = len(batch["weights"])
    config = TrainConfig(clip_norm=None, temperature=0.1, batch_size=size, accumulation=accumulation)
    optimizer, losses = build_optimizer(encoder, config, device, adds_up=True), RecentLosses(1, device)
    kept: list[Found] = []
    step = optimizer.step

    def stepping(*arguments: Any) -> Any:
        kept.append(gradients(encoder, 0.0))
        return step(*arguments)

    optimizer.step = stepping  # type: ignore[method-assign]
    for number in range(accumulation):
        last = number == accumulation - 1
        train_step(encoder, optimizer, device, batch, config, losses, seed_of=seed_of, last=last)
    ((loss, _),) = losses.read()
    return {**kept[0], "loss": torch.tensor(loss)}


def in_one_piece(encoder: Encoder, device: Device, batch: dict[str, Tensor]) -> Found:
    """The same by a single backward pass through all micro-batches, each with its own seed for dropout."""
    embeddings = []
    for number, part in enumerate(micro_batches(batch)):
        device.seed(seed_of(number))
        with device.autocast():
            embeddings.append(both_towers(encoder, part))
    queries, documents = (torch.cat(tower) for tower in zip(*embeddings, strict=True))
    loss = contrastive_loss(queries, documents, batch["roles"], batch["weights"], temperature=0.1, gather=device.gather)
    loss.backward()  # type: ignore[no-untyped-call]
    device.reduce_gradients(encoder.parameters())
    mean = float(device.all_reduce(loss.detach()) / device.world.size)
    return gradients(encoder, mean)


def difference(one: Found, other: Found) -> float:
    """The largest difference of a value, in relation to the largest value of its kind: losses, gradients."""
    assert one.keys() == other.keys()
    largest = max(float(tensor.abs().max()) for name, tensor in other.items() if name != "loss")
    worst = max(float((one[name] - other[name]).abs().max()) for name in one if name != "loss")
    return max(worst / largest, abs(float(one["loss"] - other["loss"])) / abs(float(other["loss"])))


def compare(folder: Path, device: Device, form: Padding, **settings: Any) -> tuple[float, float]:
    """How far the step in micro-batches is from the single pass, and the largest gradient."""
    batch = rows_of(device.world.rank, device.world.size, form)
    found, expected = (way(encoder_in(folder, device, form, **settings), device, batch) for way in (in_parts, in_one_piece))
    return difference(found, expected), max(float(tensor.abs().max()) for name, tensor in found.items() if name != "loss")


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu", "fp32", World(), threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("micro") / "model"
    make_model(folder)
    return folder


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_the_single_pass(
    folder: Path, device: Device, form: Padding, dropout: float, checkpointed: bool
) -> None:
    off, largest = compare(folder, device, form, dropout=dropout, checkpointed=checkpointed)
    assert off < 1e-6
    assert largest > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_without_dropout_the_whole_batch_at_once_is_the_same(folder: Path, device: Device, form: Padding) -> None:
    cuts, whole = (in_parts(encoder_in(folder, device, form), device, rows_of(0, 1, form, parts)) for parts in (BINS, 1))
    assert difference(cuts, whole) < 1e-6


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("parts", [1, BINS])
def test_packed_rows_train_as_padded_ones_do(
    folder: Path, device: Device, parts: int, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where embeddings and the loss are fp32 otherwise."""
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    found = []
    for form in (Padding.PACKED, Padding.LONGEST):
        encoder = encoder_in(folder, device, form).double()
        encoder.pooling = pooling
        found.append(in_one_piece(encoder, device, {**rows_of(0, 1, form, parts), "weights": rows_of(0, 1)["weights"].double()}))
    packed, padded = found
    assert difference(packed, padded) < 1e-10


def test_batches_of_a_step_add_up(folder: Path, device: Device) -> None:
    batch = rows_of(0, 1)
    once, twice = (
        in_parts(encoder_in(folder, device, Padding.PACKED, dropout=0.1), device, batch, accumulation=times) for times in (1, 2)
    )
    assert difference(twice, {name: 2 * tensor for name, tensor in once.items()}) < 1e-6


def test_autocast_meets_the_same_embeddings_twice(folder: Path) -> None:
    bf16 = open_device("cpu", "bf16", World(), threads=1)
    off, _ = compare(folder, bf16, Padding.PACKED, dropout=0.1)
    assert off < 1e-2


PROGRAM = """
import json, sys
from pathlib import Path
from pipeline.backends.device import open_device
from pipeline.run.world import World
from tests.pipeline.training.test_micro_batches import FORMS, compare
rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
device = open_device("cpu", "fp32", World(rank=rank, size=2, local_rank=rank, local_size=2, port=port), threads=1)
found = [compare(folder, device, form, dropout=0.1, checkpointed=on) for form in FORMS for on in (False, True)]
device.close()
print(json.dumps(found))
"""


def test_on_two_ranks_too(folder: Path) -> None:
    """Documents of both ranks compete, and each rank's gradient is the mean of both."""
    for out in run_gang(PROGRAM, 2, folder):
        for off, largest in json.loads(out.splitlines()[-1]):
            assert off < 1e-6
            assert largest > 1e-3


def test_no_more_than_a_micro_batch_is_computed_at_once(folder: Path, device: Device) -> None:
    """Twice each: without activations, then with them. One call has queries and documents."""
    encoder = encoder_in(folder, device, Padding.PACKED, dropout=0.1)
    calls: list[tuple[int, bool]] = []

    def called(_: Any, __: Any, given: dict[str, Tensor]) -> None:
        calls.append((given["input_ids"].numel(), torch.is_grad_enabled()))

    encoder.backbone.register_forward_pre_hook(called, with_kwargs=True)
    in_parts(encoder, device, rows_of(0, 1))
    assert calls == [(SHAPE.tokens, False)] * BINS + [(SHAPE.tokens, True)] * BINS
    calls.clear()
    in_parts(encoder, device, rows_of(0, 1, parts=1))
    assert calls == [(BINS * SHAPE.tokens, True)]


# ---- settings --------------------------------------------------------------------------------------------------------


def settings(**train: Any) -> RunConfig:
    return build_config({"train": train})


@pytest.mark.parametrize(
    ("train", "compiled", "eager"),
    [
        ({}, True, False),
        ({"batch_size": 8}, False, False),
        ({"micro_batches": 1}, False, False),
        ({"micro_batches": 16}, True, True),
    ],
)
def test_when_micro_batches_are_computed_one_at_a_time(train: dict[str, Any], compiled: bool, eager: bool) -> None:
    config = settings(**train)
    assert {config.cuts_batches(kind) for kind in ("xla", "neuron")} == {compiled}
    assert {config.cuts_batches(kind) for kind in ("cpu", "cuda")} == {eager}


def test_micro_batches_divide_the_batch() -> None:
    with pytest.raises(BadConfig, match="not valid") as caught:
        settings(batch_size=64, micro_batches=24)
    assert "micro_batches = 24 does not divide batch_size = 64" in caught.value.value[0]
    assert "set micro_batches = 16" in caught.value.value[0]
    with pytest.raises(BadConfig):
        settings(batch_size=8, micro_batches=16)


def test_joined_steps_are_not_cut() -> None:
    joined = {"device": {"sync_points": 1, "loader": {"batches_per_execution": 2}}}
    assert not build_config(joined).cuts_batches("xla")
    with pytest.raises(BadConfig) as caught:
        build_config(joined, {"train": {"micro_batches": 8}})
    assert "train.micro_batches = 8 cuts" in caught.value.value[0]
