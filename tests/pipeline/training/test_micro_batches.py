"""A batch in micro-batches against the same batch in one piece: loss, gradients, dropout, ranks; and what is computed at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.backends.device import Device, open_device
from pipeline.config import RunConfig, TrainConfig, build_config
from pipeline.errors import BadConfig
from pipeline.model.encoder import Encoder, checkpoint_activations, prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.model.loss import contrastive_loss
from pipeline.ports import free_port
from pipeline.run.world import World
from pipeline.training.micro_batches import TOWERS, cut, micro_batches
from pipeline.training.step import RecentLosses, both_towers, build_optimizer, train_step
from tests.tiny import make_model

ROWS, SIZE = 12, 4
Found = dict[str, Tensor]
"""The loss, and the gradient of every parameter by name."""


def rows_of(rank: int, ranks: int, *, places: bool = False) -> dict[str, Tensor]:
    """A rank's batch of ROWS pairs, of different lengths; each rank has rows of its own."""
    generator = torch.Generator().manual_seed(4 + rank)
    batch: dict[str, Tensor] = {}
    for tower, length in zip(TOWERS, (6, 10), strict=True):
        batch[f"{tower}_tokens"] = torch.randint(5, 100, (ROWS, length), generator=generator)
        ends = torch.randint(2, length + 1, (ROWS, 1), generator=generator)
        batch[f"{tower}_mask"] = (torch.arange(length)[None, :] < ends).to(torch.int64)
        if places:
            batch[f"{tower}_places"] = batch[f"{tower}_mask"].flatten().nonzero().flatten()
    roles = torch.zeros(ROWS, ROWS * ranks, dtype=torch.int32)
    roles[:, 1::5] = -1
    roles[torch.arange(ROWS), torch.arange(ROWS) + rank * ROWS] = 1
    # The last two rows are padding.
    weights = torch.tensor([1 / (ROWS - 2)] * (ROWS - 2) + [0.0, 0.0])
    return {**batch, "roles": roles, "weights": weights, "learning_rate": torch.tensor([0.0])}


def seed_of(part: int) -> int:
    return 70 + part


def encoder_in(folder: Path, device: Device, *, unpadded: bool, dropout: float, checkpointed: bool) -> Encoder:
    encoder = load_encoder(folder, build_config({}).model).train()
    prepare_for_training(encoder, fused_attention=False, unpadded_rows=unpadded, bit_dropout=True, dropout=dropout)
    if checkpointed:
        checkpoint_activations(encoder, device.checkpointed())
    return device.place(encoder)


def gradients(encoder: Encoder, loss: float) -> Found:
    named = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    return {"loss": torch.tensor(loss), **named}


def in_parts(encoder: Encoder, device: Device, batch: dict[str, Tensor], size: int, *, accumulation: int = 1) -> Found:
    """What one step leaves; the learning rate is 0, so that weights stay."""
    config = TrainConfig(clip_norm=None, temperature=0.1, batch_size=ROWS, accumulation=accumulation)
    optimizer, losses = build_optimizer(encoder, config, device, adds_up=True), RecentLosses(1, device)
    kept: list[Found] = []
    step = optimizer.step

    def stepping(*arguments: Any) -> Any:
        kept.append(gradients(encoder, 0.0))
        return step(*arguments)

    optimizer.step = stepping  # type: ignore[method-assign]
    for number in range(accumulation):
        last = number == accumulation - 1
        train_step(encoder, optimizer, device, cut(batch, size), config, losses, seed_of=seed_of, last=last)
    ((loss, _),) = losses.read()
    return {**kept[0], "loss": torch.tensor(loss)}


def in_one_piece(encoder: Encoder, device: Device, batch: dict[str, Tensor], size: int) -> Found:
    """The same by a single backward pass through all micro-batches, each with its own seed for dropout."""
    embeddings = []
    for number, part in enumerate(micro_batches(cut(batch, size))):
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


def compare(folder: Path, device: Device, size: int, *, unpadded: bool, **settings: Any) -> tuple[float, float]:
    """How far the step in micro-batches is from the single pass, and the largest gradient."""
    batch = rows_of(device.world.rank, device.world.size, places=unpadded)
    found, expected = (
        way(encoder_in(folder, device, unpadded=unpadded, **settings), device, batch, size) for way in (in_parts, in_one_piece)
    )
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
@pytest.mark.parametrize("unpadded", [False, True], ids=["padded", "unpadded"])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_loss_and_gradients_are_those_of_the_single_pass(
    folder: Path, device: Device, size: int, unpadded: bool, dropout: float, checkpointed: bool
) -> None:
    off, largest = compare(folder, device, size, unpadded=unpadded, dropout=dropout, checkpointed=checkpointed)
    assert off < 1e-6
    assert largest > 1e-3


def test_without_dropout_the_whole_batch_in_one_piece_is_the_same(folder: Path, device: Device) -> None:
    batch = rows_of(0, 1)
    cuts, whole = (
        way(encoder_in(folder, device, unpadded=False, dropout=0.0, checkpointed=False), device, batch, size)
        for way, size in ((in_parts, SIZE), (in_one_piece, ROWS))
    )
    assert difference(cuts, whole) < 1e-6


def test_batches_of_a_step_add_up(folder: Path, device: Device) -> None:
    batch = rows_of(0, 1)
    once, twice = (
        in_parts(
            encoder_in(folder, device, unpadded=False, dropout=0.1, checkpointed=False), device, batch, SIZE, accumulation=times
        )
        for times in (1, 2)
    )
    assert difference(twice, {name: 2 * tensor for name, tensor in once.items()}) < 1e-6


def test_autocast_meets_the_same_embeddings_twice(folder: Path) -> None:
    bf16 = open_device("cpu", "bf16", World(), threads=1)
    off, _ = compare(folder, bf16, SIZE, unpadded=False, dropout=0.1, checkpointed=False)
    assert off < 1e-2


PROGRAM = """
import json, sys
from pathlib import Path
from pipeline.backends.device import open_device
from pipeline.run.world import World
from tests.pipeline.training.test_micro_batches import SIZE, compare
rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
device = open_device("cpu", "fp32", World(rank=rank, size=2, local_rank=rank, local_size=2, port=port), threads=1)
cases = [(dropout, checkpointed) for dropout in (0.0, 0.1) for checkpointed in (False, True)]
found = [compare(folder, device, SIZE, unpadded=True, dropout=dropout, checkpointed=on) for dropout, on in cases]
device.close()
print(json.dumps(found))
"""


def test_on_two_ranks_too(folder: Path) -> None:
    """Documents of both ranks compete, and each rank's gradient is the mean of both."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=180) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    for out, _ in answers:
        for off, largest in json.loads(out.splitlines()[-1]):
            assert off < 1e-6
            assert largest > 1e-3


def test_no_more_than_a_micro_batch_is_computed_at_once(folder: Path, device: Device) -> None:
    """Twice each: without activations, then with them."""
    encoder = encoder_in(folder, device, unpadded=False, dropout=0.1, checkpointed=False)
    calls: list[tuple[int, bool]] = []
    encoder.register_forward_pre_hook(lambda _, given: calls.append((len(given[0]), torch.is_grad_enabled())))
    in_parts(encoder, device, rows_of(0, 1), SIZE)
    each = ROWS // SIZE * len(TOWERS)
    assert calls == [(SIZE, False)] * each + [(SIZE, True)] * each
    calls.clear()
    in_parts(encoder, device, rows_of(0, 1), ROWS)
    assert calls == [(ROWS, True)] * len(TOWERS)


def test_a_batch_is_cut_on_the_host() -> None:
    batch = rows_of(0, 1, places=True)
    assert cut(batch, ROWS) is batch
    pieces = cut(batch, SIZE)
    assert {name for name in pieces if "/" not in name} == {"roles", "weights", "learning_rate"}
    parts = micro_batches(pieces)
    assert len(parts) == ROWS // SIZE
    for name in ("query_tokens", "document_mask"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    for part in parts:
        assert torch.equal(part["query_places"], part["query_mask"].flatten().nonzero().flatten())


# ---- settings --------------------------------------------------------------------------------------------------------


def settings(**train: Any) -> RunConfig:
    return build_config({"train": train})


@pytest.mark.parametrize(
    ("train", "pairs"),
    [
        # 288 tokens a pair.
        ({}, 8),
        ({"batch_size": 8}, 8),
        ({"batch_size": 60}, 12),
        ({"batch_size": 61}, 1),
        ({"buckets": [64]}, 32),
        ({"buckets": [8192]}, 1),
        ({"micro_batch": 16}, 16),
        ({"micro_batch": 64}, 64),
    ],
)
def test_micro_batches_of_a_compiled_graph_follow_from_tokens(train: dict[str, Any], pairs: int) -> None:
    config = settings(**train)
    for kind in ("xla", "neuron"):
        assert config.micro_batch_on(kind) == pairs
        assert config.cuts_batches(kind) == (pairs < config.train.batch_size)
    for kind in ("cpu", "cuda"):
        assert config.micro_batch_on(kind) == (config.train.micro_batch or config.train.batch_size)


def test_a_micro_batch_divides_the_batch() -> None:
    with pytest.raises(BadConfig, match="not valid") as caught:
        settings(batch_size=64, micro_batch=24)
    assert "micro_batch = 24 does not divide batch_size = 64" in caught.value.value[0]
    assert "set micro_batch = 16" in caught.value.value[0]
    with pytest.raises(BadConfig):
        settings(batch_size=8, micro_batch=16)


def test_joined_steps_are_not_cut() -> None:
    joined = {"device": {"sync_points": 1, "loader": {"batches_per_execution": 2}}}
    assert build_config(joined, {"train": {"buckets": [256]}}).micro_batch_on("xla") == 64
    with pytest.raises(BadConfig) as caught:
        build_config(joined, {"train": {"buckets": [256], "micro_batch": 8}})
    assert "train.micro_batch = 8 cuts" in caught.value.value[0]
