"""Checkpoints: whole or not there, the newest whole one is found, corrupt ones are passed over loudly, none is ever unpickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config import ModelConfig, TrainConfig
from pipeline.contract import RunPaths
from pipeline.errors import BadData, MissingInput
from pipeline.model.encoder import Encoder
from pipeline.model.parent import resolve_parent
from pipeline.runtime import store
from pipeline.runtime.device import open_device
from pipeline.runtime.world import World
from pipeline.training.checkpoint import CheckpointWriter, find_checkpoint, load_optimizer
from pipeline.training.metrics import MetricsLog
from pipeline.training.state import Progress, Window
from pipeline.training.step import build_optimizer
from tests.tiny import make_model

PLAN = "fingerprint"
DEVICE = open_device("cpu", "fp32", World(), threads=1)


def stepped(encoder: Encoder) -> torch.optim.Optimizer:
    optimizer = build_optimizer(encoder, TrainConfig(), DEVICE)
    tokens = torch.arange(5, 25).view(2, 10)
    for _ in range(2):
        encoder(tokens, torch.ones_like(tokens))[:, 0].sum().backward()
        optimizer.step()
    return optimizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[Encoder, torch.optim.Optimizer]]:
    """A function that writes checkpoints of some steps into a run folder."""

    def write(paths: RunPaths, *steps: int, keep: int = 3) -> tuple[Encoder, torch.optim.Optimizer]:
        encoder = make_model(tmp_path / "parent", head=16)
        optimizer = stepped(encoder)
        with (
            MetricsLog(tmp_path / "logs", None, 0) as metrics,
            CheckpointWriter(paths, tmp_path / "outgoing", tmp_path / "parent", PLAN, keep) as writer,
        ):
            for step in steps:
                metrics.training(step, {"loss": 1 / step})
                writer.save(encoder, optimizer, DEVICE, Progress(step=step, window=Window(losses=[0.1 + step])), metrics)
        return encoder, optimizer

    return write


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(str(tmp_path / "bucket" / "runs" / "week-01"))


Write = Callable[..., tuple[Encoder, torch.optim.Optimizer]]


def test_everything_comes_back_bit_for_bit(tmp_path: Path, s3_root: str, write: Write) -> None:
    paths = RunPaths(f"{s3_root}/runs/week-01")
    encoder, optimizer = write(paths, 7)
    found = find_checkpoint(paths, PLAN, tmp_path / "resumed")
    assert found is not None
    assert found.progress == Progress(step=7, window=Window(losses=[7.1]))
    config = ModelConfig(head={"hidden": 16})
    resolved = resolve_parent(paths.checkpoint(7), config, tmp_path / "parent-of-another-run")
    assert not resolved.converted
    other = make_model(tmp_path / "other", seed=3, head=16)
    restored = build_optimizer(other, TrainConfig(), open_device("cpu", "fp32", World(), threads=1))
    load_optimizer(other, restored, DEVICE, found.folder / "optimizer.safetensors")
    named = dict(other.named_parameters())
    for name, parameter in encoder.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(restored.state[named[name]][kind], value), (name, kind)
    assert [json.loads(line)["step"] for line in found.metrics.read_text().splitlines()] == [7]
    assert store.read_bytes(paths.metrics) == found.metrics.read_bytes()
    assert len(store.list_objects(paths.tensorboard)) == 1
    assert not list((tmp_path / "outgoing").iterdir())


def test_only_the_newest_are_kept(paths: RunPaths, write: Write) -> None:
    write(paths, 2, 4, 6, 8, keep=2)
    kept = {info.uri.split("/")[-2] for info in store.list_objects(paths.checkpoints) if info.uri.endswith("/manifest.json")}
    assert kept == {"step-00000006", "step-00000008"}
    assert {info.uri.removeprefix(paths.checkpoints)[1:14] for info in store.list_objects(paths.checkpoints)} == kept


def test_none_yet(tmp_path: Path, paths: RunPaths) -> None:
    assert find_checkpoint(paths, PLAN, tmp_path / "resumed") is None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "progress.json", "metrics.jsonl", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damaged_ones_are_passed_over_loudly(
    tmp_path: Path, paths: RunPaths, write: Write, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    write(paths, 2, 4)
    path = Path(paths.checkpoint(4)) / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x11
        path.write_bytes(data)
    with caplog.at_level(logging.INFO, logger="trnpipe"):
        found = find_checkpoint(paths, PLAN, tmp_path / "resumed")
    assert found is not None
    assert found.progress.step == 2
    assert "step 4" in caplog.text
    if not (name == "manifest.json" and damage == "missing"):
        assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_all_damaged(tmp_path: Path, paths: RunPaths, write: Write) -> None:
    write(paths, 2, 4)
    for step in (2, 4):
        (Path(paths.checkpoint(step)) / "model.safetensors").write_bytes(b"")
    with pytest.raises(MissingInput, match="none of the run's checkpoints") as caught:
        find_checkpoint(paths, PLAN, tmp_path / "resumed")
    assert len(caught.value.value) == 2


def test_another_plans_checkpoint_is_not_used(tmp_path: Path, paths: RunPaths, write: Write) -> None:
    write(paths, 2)
    with pytest.raises(MissingInput) as caught:
        find_checkpoint(paths, "another", tmp_path / "resumed")
    assert "another plan" in str(caught.value)


def test_an_interrupted_upload_leaves_no_checkpoint_and_is_reported(
    tmp_path: Path, paths: RunPaths, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = store.upload

    def failing(path: Path, uri: str) -> object:
        if path.name == "optimizer.safetensors":
            raise BadData("the disk is gone")
        return upload(path, uri)

    monkeypatch.setattr(store, "upload", failing)
    with pytest.raises(BadData, match="disk is gone"):
        write(paths, 2)
    monkeypatch.undo()
    assert list(Path(paths.checkpoint(2)).glob("*"))
    assert find_checkpoint(paths, PLAN, tmp_path / "resumed") is None
