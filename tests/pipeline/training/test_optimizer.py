"""AdamW in flat vectors against torch's, and shares of its state in real gangs of several sizes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.backends.device import Device, open_device
from pipeline.config import TrainConfig
from pipeline.run.world import World
from pipeline.training import optimizer as module
from pipeline.training.host_state import OPTIMIZER_FILE
from pipeline.training.optimizer import FlatAdamW
from tests.gangs import run_gang
from tests.tiny import make_model

SHAPES = ((3, 4), (7,), (2, 3, 5), (1,), (11, 2), (6,))
CONFIG = TrainConfig(weight_decay=0.1)


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu", "fp32", World(), threads=1)


def some_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def grouped(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    decayed, others = ([one for one in parameters if (one.ndim >= 2) == decays] for decays in (True, False))
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def flat_adamw(parameters: list[nn.Parameter], device: Device) -> FlatAdamW:
    optimizer = FlatAdamW(grouped(parameters), CONFIG, device)
    rate = torch.zeros((), dtype=parameters[0].dtype)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("elements", [1, 20, 1000])
def test_equals_torch(dtype: torch.dtype, within: float, elements: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a vector for each parameter, for some of them, for all with the same decay; with clipping and changing rates."""
    monkeypatch.setattr(module, "BUCKET_ELEMENTS", elements)
    ours, theirs = some_parameters(dtype), some_parameters(dtype)
    optimizer, reference = flat_adamw(ours, device), torch.optim.AdamW(grouped(theirs), foreach=False)
    generator = torch.Generator().manual_seed(2)
    for step in range(20):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(dtype)
            other.grad = one.grad.clone()
        optimizer.param_groups[0]["lr"].fill_(1e-2 * (step + 1))
        for group in reference.param_groups:
            group["lr"] = float(optimizer.param_groups[0]["lr"])
        optimizer.reduce()
        norm = optimizer.clip(4.0)
        expected = nn.utils.clip_grad_norm_(theirs, 4.0)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(norm, expected, rtol=within, atol=0)
    state = optimizer.host_state()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)
        for kind, value in reference.state[other].items():
            torch.testing.assert_close(state[one][kind].to(value.dtype), value, rtol=within, atol=within)


def test_without_a_limit_gradients_stay(device: Device) -> None:
    ours, theirs = some_parameters(torch.float64), some_parameters(torch.float64)
    optimizer, reference = flat_adamw(ours, device), torch.optim.AdamW(grouped(theirs), lr=1e-2, foreach=False)
    optimizer.param_groups[0]["lr"].fill_(1e-2)
    for one, other in zip(ours, theirs, strict=True):
        one.grad, other.grad = torch.full_like(one, 1e3), torch.full_like(other, 1e3)
    optimizer.reduce()
    assert float(optimizer.clip(None)) == pytest.approx(1e3 * sum(map(torch.numel, ours)) ** 0.5)
    optimizer.step()
    reference.step()
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(ours, theirs, strict=True))


def test_a_gradient_is_needed_no_longer_once_it_is_joined(device: Device) -> None:
    """Where backward passes add up gradients, they stay allocated: another allocation would be another graph."""
    for adds_up in (False, True):
        parameters = some_parameters(torch.float32)
        optimizer = FlatAdamW(grouped(parameters), CONFIG, device, adds_up=adds_up)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        assert [vector.numel() for vector in optimizer.reduce()] == [64, 14]
        assert [parameter.grad is not None for parameter in parameters] == [adds_up] * len(parameters)


RANK_PROGRAM = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from pipeline.backends.device import open_device
from pipeline.config import TrainConfig
from pipeline.run.world import World
from pipeline.model.folder import load_encoder
from pipeline.config import ModelConfig
from pipeline.training import optimizer as module
from pipeline.training.host_state import OPTIMIZER_FILE, host_state, load_optimizer
from pipeline.training.step import RecentLosses, build_optimizer, prepare_encoder, require_equal_weights, train_step

rank, port, what, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
model, saved, out = map(Path, sys.argv[5:8])
module.BUCKET_ELEMENTS = 3000  # several buckets, some with padding
world = World(rank=rank, size=size, local_rank=rank, local_size=size, port=port)
device = open_device("cpu", "fp32", world, threads=1, timeout_seconds=60)
config = TrainConfig(dropout=0.0, temperature=0.1, shard_optimizer=what != "whole", weight_decay=0.1, epsilon=1e-3)
encoder = load_encoder(model, ModelConfig(head={"hidden": 24})).train()
prepare_encoder(encoder, config, device)
optimizer = build_optimizer(encoder, config, device)
assert optimizer.sharded == (what != "whole" and size > 1)
if what == "load":
    load_optimizer(encoder, optimizer, saved)
else:
    losses = RecentLosses(4, device)
    for step in range(3):
        tokens = torch.randint(5, 100, (4, 10), generator=torch.Generator().manual_seed(10 * step + rank))
        batch = {
            "tokens:0/0": tokens, "mask:0/0": torch.ones_like(tokens),
            "tokens:1/0": tokens[:, :6], "mask:1/0": torch.ones_like(tokens[:, :6]),
            "document_texts/0": torch.arange(4), "query_texts/0": torch.arange(4, 8),
            "roles": torch.zeros(4, 4 * size, dtype=torch.int32), "weights": torch.full((4,), 0.25),
            "learning_rate": torch.tensor([1e-3 * (step + 1)]),
        }
        batch["roles"][torch.arange(4), torch.arange(4) + 4 * rank] = 1
        train_step(encoder, optimizer, device, batch, config, losses, seed_of=int)
    require_equal_weights(encoder, device)
if rank == 0 or optimizer.sharded:
    weights, moments = host_state(encoder, optimizer, device)
    assert rank == 0 or {name.rpartition("/")[2] for name in moments} == {"step"}
if rank == 0:
    out.mkdir()
    save_file(moments, out / OPTIMIZER_FILE)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out / "weights.safetensors")
device.close()
"""


def gang(what: str, size: int, *paths: Path) -> Path:
    """Run the program on ranks of their own; the folder that the leader wrote."""
    run_gang(RANK_PROGRAM, size, what, size, *paths)
    return paths[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares") / "model"
    make_model(folder, head=24)
    return folder


@pytest.fixture(scope="module")
def saved(model: Path) -> Path:
    """Three steps of two ranks that share the optimizer's state."""
    return gang("share", 2, model, Path("-"), model.parent / "saved")


@pytest.mark.slow
def test_shares_take_the_steps_of_the_whole(model: Path, saved: Path) -> None:
    whole = gang("whole", 2, model, Path("-"), model.parent / "whole")
    for name in (OPTIMIZER_FILE, "weights.safetensors"):
        found, expected = load_file(saved / name), load_file(whole / name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].shape == tensor.shape
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6, msg=key)
    before = load_file(model / "model.safetensors")
    assert any(not torch.equal(tensor, found[f"backbone.{key}"]) for key, tensor in before.items())
    moments = load_file(saved / OPTIMIZER_FILE)
    names = {key.rpartition("/")[0] for key in moments}
    assert moments.keys() == {f"{name}/{kind}" for name, kind in product(names, ("step", *module.MOMENTS))}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_resumes_from_shares(ranks: int, model: Path, saved: Path, tmp_path: Path) -> None:
    loaded = gang("load", ranks, model, saved / OPTIMIZER_FILE, tmp_path / "loaded")
    found, expected = load_file(loaded / OPTIMIZER_FILE), load_file(saved / OPTIMIZER_FILE)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
