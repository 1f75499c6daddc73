"""Training that is killed or told to end, as real processes: what comes of it equals the uninterrupted run bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline import store
from pipeline.contract import Stage
from tests.gangs import gang
from tests.pipeline.nodes import Node, supervise
from tests.pipeline.stages.test_train import PlanTraining, metrics_of, train
from tests.pipeline.training.conftest import TrainingRun, training_run

__all__ = ["supervise", "training_run"]

pytestmark = pytest.mark.slow

KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.contract import RunPaths, Stage
from pipeline import store
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
from pipeline.stages import train
from pipeline.training import checkpoint

uri, scratch, module, function, words = sys.argv[3], Path(sys.argv[4]), *sys.argv[5:]
place = {"store": store, "writer": checkpoint.CheckpointWriter}[module]
real = getattr(place, function)
def killed(*arguments, **named):
    if any(words in argument if isinstance(argument, str) else words == str(argument) for argument in arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)
setattr(place, function, killed)
train.run(StageContext(stage=Stage.TRAIN, paths=RunPaths(uri), world=World(), scratch=scratch, heartbeat=Heartbeat(None, 0)))
"""


@pytest.mark.parametrize(
    ("moment", "resumed_from"),
    [
        (("writer", "folder", "12"), 6),
        (("store", "upload", "checkpoints/step-00000012/model.safetensors"), 6),
        (("store", "write_json", "checkpoints/step-00000012/manifest.json"), 6),
        (("store", "delete_folder", "checkpoints/step-00000006"), 24),
    ],
    ids=["before", "in the middle", "before the manifest", "while an old one is removed"],
)
def test_killed_around_a_checkpoint_equals_uninterrupted_bit_for_bit(
    training_run: PlanTraining, tmp_path: Path, moment: tuple[str, str, str], resumed_from: int
) -> None:
    whole, broken = training_run(run="whole", steps=26), training_run(run="broken", steps=26)
    train(whole)
    (tmp_path / "scratch").mkdir()
    with gang(KILLED, 1, broken.paths.root, tmp_path / "scratch", *moment) as [rank]:
        assert rank.wait() == -signal.SIGKILL, rank.complaint
    output = train(broken)
    assert output.metrics["resumed_from"] == resumed_from
    require_equal(whole, broken, tmp_path)


def require_equal(whole: TrainingRun, broken: TrainingRun, folder: Path) -> None:
    """Both runs trained the same weights from the same data and measured the same."""
    one, other = (
        load_file(store.download_folder(run.paths.model, folder / "models" / run.paths.run_id) / "model.safetensors")
        for run in (whole, broken)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert metrics_of(broken) == metrics_of(whole)


def step_of(run: TrainingRun) -> int:
    """How far the leader's supervisor says that training is."""
    uri = run.paths.progress(Stage.TRAIN, 0)
    return int(store.read_json(uri).get("done") or 0) if store.exists(uri) else 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "ranks", "told", "sharded"),
    [(2, 2, 1, False), (2, 2, 0, True)],
)
def test_sigterm_leaves_a_checkpoint_of_the_step_and_is_75(
    training_run: PlanTraining, supervise: Any, s3_root: str, tmp_path: Path, nodes: int, ranks: int, told: int, sharded: bool
) -> None:
    """Of a sharded optimizer, the checkpoint of the next step that has one anyway."""
    every = 30 if sharded else 390
    sizes = {"batch_size": 8 // ranks, "ranks": ranks, "nodes": nodes, "shard_optimizer": sharded, "checkpoint_every": every}
    whole, broken = (training_run(s3_root, run=run, steps=400, **sizes) for run in ("whole", "broken"))

    def gang(run: TrainingRun, job: str) -> list[Node]:
        return [supervise(Stage.TRAIN, run.paths.root, node=node, nodes=nodes, job=job) for node in range(nodes)]

    first = gang(broken, "job-1")
    first[0].wait_until(lambda: step_of(broken) >= 10)
    first[told].process.send_signal(signal.SIGTERM)
    assert first[0].wait() == 75
    assert "the node was terminated by SIGTERM" in first[0].log
    manifests = [info.uri for info in store.list_objects(broken.paths.checkpoints) if info.uri.endswith("manifest.json")]
    assert sharded or len(manifests) == 1
    stopped_at = max(store.read_json(manifest)["step"] for manifest in manifests)
    assert 10 <= stopped_at < 390
    assert not sharded or stopped_at % every == 0
    for node in first:
        node.wait()

    for number, run in enumerate((broken, whole), start=2):
        for node in gang(run, f"job-{number}"):
            assert node.wait(200) == 0, node.log
    assert store.read_json(broken.paths.result(Stage.TRAIN))["metrics"]["resumed_from"] == stopped_at
    require_equal(whole, broken, tmp_path)
