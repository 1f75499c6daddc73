"""Checkpoints: whole or not there, the newest whole one is found, corrupt ones are passed over loudly, none is ever unpickled."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from pipeline import store
from pipeline.backends.device import open_device
from pipeline.config import ModelConfig, TrainConfig
from pipeline.contract import RunPaths
from pipeline.errors import MissingInput, Transient
from pipeline.model.encoder import Encoder
from pipeline.model.folder import load_encoder
from pipeline.model.parent import resolve_parent
from pipeline.run.world import World
from pipeline.training.checkpoint import CheckpointRetention, CheckpointWriter, find_checkpoint
from pipeline.training.host_state import RANDOM_FILE, checkpoint_files, load_optimizer, restore_random_states
from pipeline.training.metrics import MetricsLog
from pipeline.training.state import MetricsWindow, Progress
from pipeline.training.step import build_optimizer
from tests.tiny import make_model

PLAN = "fingerprint"
THREE = CheckpointRetention(newest=3)
FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "progress.json", "metrics.jsonl", "manifest.json")
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

    def write(
        paths: RunPaths,
        *steps: int,
        retention: CheckpointRetention = THREE,
        scores: Mapping[int, float] = MappingProxyType({}),
        resumed: int | None = None,
    ) -> tuple[Encoder, torch.optim.Optimizer]:
        attempt = tmp_path / f"attempt-{resumed or 0}"
        encoder = make_model(attempt / "parent", head=16)
        optimizer = stepped(encoder)
        with (
            MetricsLog(attempt / "logs", None, 0) as metrics,
            CheckpointWriter(paths, attempt / "outgoing", PLAN, retention, resumed=resumed) as writer,
        ):
            for step in steps:
                metrics.training(step, {"loss": 1 / step})
                metrics.snapshot(writer.folder(step))
                files = checkpoint_files(encoder, optimizer, DEVICE, attempt / "parent")
                writer.save(Progress(step=step, window=MetricsWindow(losses=[0.1 + step])), files, score=scores.get(step))
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
    assert found.progress == Progress(step=7, window=MetricsWindow(losses=[7.1]))
    config = ModelConfig(head={"hidden": 16})
    resolved = resolve_parent(paths.checkpoint(7), config, tmp_path / "parent-of-another-run")
    assert not resolved.converted
    other = make_model(tmp_path / "other", seed=3, head=16)
    restored = build_optimizer(other, TrainConfig(), open_device("cpu", "fp32", World(), threads=1))
    load_optimizer(other, restored, found.folder / "optimizer.safetensors")
    named = dict(other.named_parameters())
    for name, parameter in encoder.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(restored.state[named[name]][kind], value), (name, kind)
    assert [json.loads(line)["step"] for line in found.metrics.read_text().splitlines()] == [7]
    assert store.read_bytes(paths.metrics) == found.metrics.read_bytes()
    assert len(store.list_objects(paths.tensorboard)) == 1
    assert not list((tmp_path / "attempt-0" / "outgoing").iterdir())


def kept(paths: RunPaths) -> list[int]:
    """Steps of which anything is left; each must be whole."""
    uris = [info.uri.removeprefix(paths.checkpoints) for info in store.list_objects(paths.checkpoints)]
    whole = {uri.split("/")[1] for uri in uris if uri.endswith("/manifest.json")}
    assert {uri.split("/")[1] for uri in uris} == whole
    return sorted(int(name.removeprefix("step-")) for name in whole)


def test_only_the_newest_are_kept(paths: RunPaths, write: Write) -> None:
    write(paths, 2, 4, 6, 8, retention=CheckpointRetention(newest=2))
    assert kept(paths) == [6, 8]


def test_every_nth_and_the_best_are_kept_too(paths: RunPaths, write: Write) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.7, 5: 0.1}
    write(paths, 1, 2, 3, 4, 5, 6, 7, 8, 9, retention=CheckpointRetention(newest=1, every=4, best=True), scores=scores)
    assert kept(paths) == [2, 4, 8, 9]


def test_a_later_attempt_knows_the_best_of_an_earlier_one(paths: RunPaths, write: Write) -> None:
    retention = CheckpointRetention(newest=1, best=True)
    write(paths, 1, 2, retention=retention, scores={1: 0.9, 2: 0.8})
    write(paths, 3, 4, retention=retention, scores={3: 0.7}, resumed=2)
    # 2 is what that attempt went on from.
    assert kept(paths) == [1, 2, 4]


def test_what_was_refused_when_resuming_never_counts_as_newest(tmp_path: Path, paths: RunPaths, write: Write) -> None:
    write(paths, 2, 4, 6)
    for step in (4, 6):
        (Path(paths.checkpoint(step)) / "model.safetensors").write_bytes(b"torn")
    found = find_checkpoint(paths, PLAN, tmp_path / "resumed")
    assert found is not None
    write(paths, 4, retention=CheckpointRetention(newest=1), resumed=found.progress.step)
    assert kept(paths) == [2, 4]
    again = find_checkpoint(paths, PLAN, tmp_path / "again")
    assert again is not None
    assert again.progress.step == 4


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, paths: RunPaths) -> None:
    encoder = make_model(tmp_path / "parent", head=16)
    optimizer = stepped(encoder)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    may_write = threading.Event()
    with (
        MetricsLog(tmp_path / "logs", None, 0) as metrics,
        CheckpointWriter(paths, tmp_path / "outgoing", PLAN, CheckpointRetention(newest=1)) as writer,
    ):
        metrics.snapshot(writer.folder(1))
        files = checkpoint_files(encoder, optimizer, DEVICE, tmp_path / "parent")

        def write(folder: Path) -> None:
            assert may_write.wait(60)
            files(folder)

        writer.save(Progress(step=1), write)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter += 1
        writer.check()
        assert find_checkpoint(paths, PLAN, tmp_path / "none") is None
        may_write.set()
        # One at a time: the next one waits for the last, and so bounds the copies in memory.
        writer.folder(2)
        found = find_checkpoint(paths, PLAN, tmp_path / "found")
    assert found is not None
    written = load_encoder(found.folder, ModelConfig(head={"hidden": 16}))
    for name, tensor in written.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_random_numbers_go_on_where_they_were(tmp_path: Path, paths: RunPaths, write: Write) -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    write(paths, 1)
    # Writing draws nothing that belongs to training.
    expected = [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.rand(3).tolist()]
    found = find_checkpoint(paths, PLAN, tmp_path / "resumed")
    assert found is not None
    restore_random_states(DEVICE, found.folder / RANDOM_FILE)
    assert [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.rand(3).tolist()] == expected


def test_none_yet(tmp_path: Path, paths: RunPaths) -> None:
    assert find_checkpoint(paths, PLAN, tmp_path / "resumed") is None


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.safetensors", "random.safetensors", "progress.json", "metrics.jsonl", "manifest.json"],
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
            raise Transient("the storage is gone")
        return upload(path, uri)

    monkeypatch.setattr(store, "upload", failing)
    with pytest.raises(Transient, match="storage is gone"):
        write(paths, 2)
    monkeypatch.undo()
    assert list(Path(paths.checkpoint(2)).glob("*"))
    assert find_checkpoint(paths, PLAN, tmp_path / "resumed") is None
