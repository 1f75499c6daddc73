"""The train stage as a whole: learning, exact resumption, two ranks like one, and how it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline import store
from pipeline.backends.device import Batch
from pipeline.config import RunConfig
from pipeline.dataset.seen import read_record
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.model.encoder import Encoder
from pipeline.model.folder import load_encoder
from pipeline.plan import ResumedRun
from pipeline.run.context import StageOutput
from pipeline.stages import train as stage
from pipeline.training import loop, step
from pipeline.training.checkpoint import MANIFEST_FILE
from pipeline.training.host_state import OPTIMIZER_FILE
from pipeline.training.metrics import WATCHED
from pipeline.training.resumption import resumed_run
from pipeline.training.setup import gang_device, load_state
from tests.gangs import gang, run_gang
from tests.pipeline.training.conftest import TrainingRun, training_run
from tests.tiny import sentence_transformer

__all__ = ["training_run"]

PlanTraining = Callable[..., TrainingRun]
NOT_REPEATED = {
    "time",
    "pairs_per_second",
    "step_seconds",
    "data_wait_share",
    "checkpoint_stall_seconds",
    "checkpoint_stall_share",
}
"""What clocks say."""


def metrics_of(run: TrainingRun) -> list[dict[str, Any]]:
    lines = store.read_bytes(run.paths.metrics).decode().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in NOT_REPEATED} for line in lines]


def weights_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return load_file(Path(run.paths.model) / "model.safetensors")


def train(run: TrainingRun) -> StageOutput:
    output = stage.run(run.context())
    assert output is not None
    return output


class Interrupted(Exception):
    """Stands for the process's death."""


def interrupt(run: TrainingRun, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the process dies at the beginning of a step."""
    step_seed = loop.step_seed

    def dying(seed: int, at: int, rank: int, part: int) -> int:
        if at == step:
            raise Interrupted
        return step_seed(seed, at, rank, part)

    monkeypatch.setattr(loop, "step_seed", dying)
    with pytest.raises(Interrupted):
        stage.run(run.context())
    monkeypatch.setattr(loop, "step_seed", step_seed)


def test_learns_and_leaves_what_the_contract_names(training_run: PlanTraining, cloudwatch: Any) -> None:
    run = training_run(steps=40, head=16)
    output = train(run)
    metrics = output.metrics
    told = cloudwatch()
    lines = [line for line in map(json.loads, store.read_bytes(run.paths.metrics).splitlines()) if "loss" in line]
    assert [record["Step"] for record in told] == [line["step"] for line in lines]
    for name, metric in WATCHED.items():
        assert [record[metric.value] for record in told] == [line[name] for line in lines]
    assert all(0 <= line["data_wait_share"] <= 1 and line["step_seconds"] > 0 for line in lines)
    assert metrics["steps"] == 40
    assert metrics["pairs"] == 40 * 8  # two epochs of 150 pairs, and some of the third
    assert metrics["last_validation"]["ndcg@10"] > metrics["first_validation"]["ndcg@10"] + 0.08
    assert (metrics["device"], metrics["ranks"], metrics["resumed_from"], metrics["checkpoints"]) == ("cpu", 1, None, 7)
    assert metrics["pairs_per_second"] == pytest.approx(metrics["pairs"] / metrics["seconds"])
    assert metrics["padding_share"] == 0
    lines = metrics_of(run)
    losses = [line["loss"] for line in lines if "loss" in line]
    # Which rows are in a line's steps moves its loss by a third, so three lines are looked at together.
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert metrics["final_loss"] == losses[-1]
    assert [line["step"] for line in lines if "loss" in line] == list(range(4, 41, 4))
    assert [line["step"] for line in lines if "validation" in line] == [0, 8, 16, 24, 32, 40]
    assert len(store.list_objects(run.paths.tensorboard)) == 1
    kept = {info.uri.removeprefix(run.paths.checkpoints)[1:14] for info in store.list_objects(run.paths.checkpoints)}
    # The newest three, and the best of those with a validation.
    scores = {line["step"]: line["validation"]["ndcg@10"] for line in lines if "validation" in line}
    assert kept == {f"step-{step:08d}" for step in (30, 36, 40, max((24, 40), key=scores.__getitem__))}
    assert output.outputs["model"].sha256 == store.sha256(f"{run.paths.model}/model.safetensors")
    assert sentence_transformer(run.paths.model).encode(["bake limo"]).shape == (1, 32)
    seen = read_record(run.paths.bucket_root, run.plan.run)
    assert (seen.rows, seen.steps, seen.lineage) == (150, 40, (run.plan.run,))


def test_the_layers_of_a_head_learn(training_run: PlanTraining) -> None:
    layers = [{"out": 48, "activation": "gelu"}, {"out": 24}]
    run = training_run(steps=2, head=layers)
    before = load_encoder(Path(run.plan.parent.folder), run.plan.config.model).head_layers
    train(run)
    after = load_encoder(Path(run.paths.model), run.plan.config.model).head_layers
    for name, layer in before.items():
        assert not torch.equal(layer.weight, after[name].weight)
        assert not torch.equal(layer.bias, after[name].bias)
    assert sentence_transformer(run.paths.model).encode(["bake limo"]).shape == (1, 24)


def test_processors_compute_no_padding_and_drop_by_bits(training_run: PlanTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[loop.Training] = []
    monkeypatch.setattr(stage, "train", lambda run, progress: (seen.append(run), loop.train(run, progress)))
    metrics = train(training_run(steps=4)).metrics
    (run,) = seen
    assert run.encoder.unpads
    # Lengths differ by a factor of eight.
    assert metrics["padding_share"] == 0


@pytest.mark.parametrize("died_at", [3, 13, 15])
def test_interrupted_equals_uninterrupted_bit_for_bit(
    training_run: PlanTraining, monkeypatch: pytest.MonkeyPatch, died_at: int
) -> None:
    """Dropout is active, checkpoints fall between lines of metrics, and the schedule goes into a second epoch."""
    whole, broken = training_run(run="whole", steps=24), training_run(run="broken", steps=24)
    train(whole)
    interrupt(broken, died_at, monkeypatch)
    output = train(broken)
    assert output.metrics["resumed_from"] == {3: None, 13: 12, 15: 12}[died_at]
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(broken).items())
    assert metrics_of(broken) == metrics_of(whole)
    assert output.metrics["pairs"] == 24 * 8


def test_resumes_from_an_older_checkpoint_when_the_newest_is_corrupt(
    training_run: PlanTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training_run(steps=15)
    interrupt(run, 13, monkeypatch)
    (Path(run.paths.checkpoint(12)) / "model.safetensors").write_bytes(b"\0" * 100)
    assert train(run).metrics["resumed_from"] == 6
    assert [line["step"] for line in metrics_of(run) if "loss" in line] == [4, 8, 12, 15]


def test_finished_run_only_writes_its_model_again(training_run: PlanTraining) -> None:
    run = training_run(steps=8)
    first = train(run)
    shutil.rmtree(run.paths.model)
    # Everything comes from the checkpoint.
    shutil.rmtree(run.plan.parent.folder)
    second = train(run)
    assert second.outputs["model"] == first.outputs["model"]
    assert second.metrics["resumed_from"] == 8
    changed = {key for key, value in first.metrics.items() if second.metrics[key] != value}
    assert changed <= {"resumed_from", *NOT_REPEATED}


def test_micro_batches_change_neither_losses_nor_evaluations(training_run: PlanTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    both_towers = step.both_towers

    def counting(encoder: Encoder, texts: Batch) -> tuple[Tensor, ...]:
        rows.append(len(texts["query_texts"]))
        return both_towers(encoder, texts)

    monkeypatch.setattr(step, "both_towers", counting)
    lines = []
    for name, cuts, computed in (("whole", False, [8] * 8), ("cut", True, [2] * 64)):
        monkeypatch.setattr(RunConfig, "cuts_batches", lambda *_, cuts=cuts: cuts)
        run = training_run(run=name, steps=8, dropout=0.0, micro_batches=4)
        output = train(run)
        assert rows == computed
        rows.clear()
        assert output.metrics["pairs"] > 60
        lines.append(metrics_of(run))
    for one, other in zip(*lines, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() & {"loss", "grad_norm", "padding_share", "validation"}:
            assert other[key] == pytest.approx(one[key], rel=1e-3), key


def test_on_s3(training_run: PlanTraining, s3_root: str) -> None:
    run = training_run(s3_root, steps=8)
    train(run)
    names = {info.uri.removeprefix(run.paths.model + "/") for info in store.list_objects(run.paths.model)}
    assert {"config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "tokenizer.json"} <= names
    assert train(run).metrics["resumed_from"] == 8


PROGRAM = """
import sys
from pathlib import Path
from pipeline.config import RunConfig
from pipeline.contract import RunPaths, Stage
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
from pipeline.stages.train import run
rank, port, uri, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
world = World(rank=rank, size=2, local_rank=rank, local_size=2, port=port)
context = StageContext(stage=Stage.TRAIN, paths=RunPaths(uri), world=world, scratch=scratch, heartbeat=Heartbeat(None, rank))
output = run(context)
assert (output is None) == (rank == 1)
"""

DIVERGING = PROGRAM.replace(
    "output = run(context)",
    """
import torch
from pipeline.errors import Defect
from pipeline.training import loop
train_step, steps = loop.train_step, iter(range(100))
def drifting(encoder, *arguments, **settings):
    train_step(encoder, *arguments, **settings)
    if next(steps) == 3 and rank == 1:
        with torch.no_grad():
            next(encoder.parameters())[0, 0] += 1e-3
loop.train_step = drifting
try:
    run(context)
except Defect as error:
    sys.stdout.write(str(error))
    sys.exit(3 + rank)
""",
).replace("assert (output is None) == (rank == 1)", "")
"""One weight of rank 1 changes a little in the fourth step."""


def trained_by_two(run: TrainingRun, folder: Path) -> dict[str, torch.Tensor]:
    """Train with two ranks; return the weights of the model."""
    number = len([*folder.glob("shared-*")])
    scratch = folder / f"shared-{number}"
    scratch.mkdir()
    run_gang(PROGRAM, 2, run.paths.root, scratch)
    found: dict[str, torch.Tensor] = load_file(
        store.download_folder(run.paths.model, folder / f"model-{number}") / "model.safetensors"
    )
    return found


def test_with_weights_in_bf16_those_in_fp32_are_trained_and_kept(
    training_run: PlanTraining, s3_root: str, tmp_path: Path
) -> None:
    bf16 = {"bf16_weights": True, "sections": {"device": {"precision": "bf16"}}}
    usual, run = (
        training_run(s3_root, run=name, steps=10, ranks=2, batch_size=4, shard_optimizer=True, **settings)
        for name, settings in (("usual", {}), ("bf16", bf16))
    )
    before = load_file(store.download_folder(run.plan.parent.folder, tmp_path / "parent") / "model.safetensors")
    found, expected = trained_by_two(run, tmp_path), trained_by_two(usual, tmp_path)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    # Steps that bf16 would round away.
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in found.values())
    moved = [torch.cat([(after[name] - before[name]).flatten() for name in before]) for after in (found, expected)]
    assert torch.cosine_similarity(*moved, dim=0) > 0.9
    # From the checkpoint of the last step, nothing is lost.
    again = trained_by_two(run, tmp_path)
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_train_as_one_does(training_run: PlanTraining, s3_root: str, tmp_path: Path, sharded: bool) -> None:
    """Same global batches, same mean gradient: without dropout only the order of sums differs."""
    single = training_run(run="single", steps=10)
    double = training_run(s3_root, run="double", steps=10, ranks=2, batch_size=4, shard_optimizer=sharded)
    for run in (single, double):
        config = store.join(run.plan.parent.folder, "config.json")
        store.write_json(config, {**store.read_json(config), "hidden_dropout_prob": 0.0})
    train(single)
    for _ in range(2):  # the second one only looks for the checkpoint and writes the model again
        expected = weights_of(single)
        for name, tensor in trained_by_two(double, tmp_path).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-4, msg=name)
    for one, other in zip(metrics_of(single), metrics_of(double), strict=True):
        assert one["step"] == other["step"]
        if "loss" in one:
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)


def test_ranks_that_drift_apart_are_noticed_at_the_next_checkpoint(
    training_run: PlanTraining, s3_root: str, tmp_path: Path
) -> None:
    run = training_run(s3_root, run="drift", steps=10, ranks=2, batch_size=4)
    scratch = tmp_path / "shared"
    scratch.mkdir()
    with gang(DIVERGING, 2, run.paths.root, scratch) as ranks:
        assert ranks[1].wait() == 4, ranks[1].complaint
        assert "this rank's weights are not the leader's" in ranks[1].said
        assert "rank 1: 2 sums differ" in ranks[1].said


def test_loss_that_is_not_finite_is_named_by_step_and_rows(training_run: PlanTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    run = training_run(steps=20)
    contrastive_loss = stage.train.__globals__["train_step"].__globals__["contrastive_loss"]
    calls = iter(range(100))

    def poisoned(*arguments: Any, **named: Any) -> torch.Tensor:
        loss = contrastive_loss(*arguments, **named)
        return loss * float("nan") if next(calls) == 9 else loss

    monkeypatch.setattr("pipeline.training.step.contrastive_loss", poisoned)
    with pytest.raises(BadData, match="not finite") as caught:
        train(run)
    assert "step 10: loss nan" in caught.value.value[0]
    assert len(caught.value.value) == 1 + 8
    assert all(row.startswith(f"row {run.plan.train.new[0].uri}:") for row in caught.value.value[1:])
    assert [path.name for path in Path(run.paths.checkpoints).iterdir()] == ["step-00000006"]


def test_other_ranks_than_planned(training_run: PlanTraining) -> None:
    run = training_run(ranks=2)
    with pytest.raises(BadConfig, match="number of ranks"):
        stage.run(run.context())


def test_rows_longer_than_the_encoder(training_run: PlanTraining) -> None:
    run = training_run(length=65)
    with pytest.raises(BadConfig, match="longer than the encoder allows") as caught:
        stage.run(run.context())
    assert "train.length: 65" in str(caught.value)


def test_rows_or_parent_missing(training_run: PlanTraining) -> None:
    for place in ("rows", "parent"):
        run = training_run(run=f"without-{place}")
        shutil.rmtree(run.paths.rows if place == "rows" else run.plan.parent.folder)
        with pytest.raises(MissingInput):
            stage.run(run.context())


def test_another_world_goes_on_where_a_run_was_left(training_run: PlanTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks planned, one to be had: the same examples in the same order, so each once per epoch."""
    whole = training_run(run="whole", steps=24, micro_batches=2)
    left = training_run(run="left", steps=24, micro_batches=2)
    train(whole)
    interrupt(left, 15, monkeypatch)
    # As if two ranks had written the checkpoints, whose content knows nothing of ranks.
    world = left.plan.world.model_copy(update={"ranks_per_node": 2})
    halved = left.plan.config.train.model_copy(update={"batch_size": 4, "micro_batches": 1})
    left.plan = left.plan.model_copy(update={"world": world, "config": left.plan.config.model_copy(update={"train": halved})})
    on = training_run(run="on", steps=24, micro_batches=2)
    asked = on.plan.config.model_copy(update={"train": on.plan.config.train.model_copy(update={"resume": "left"})})
    store.write_bytes(left.paths.plan, left.plan.to_json())
    on.plan = on.plan.model_copy(update={"config": asked})
    resumed = resumed_run(on.plan, on.paths)
    assert resumed == ResumedRun(run="left", fingerprint=left.plan.fingerprint)
    on.plan = on.plan.model_copy(update={"train": on.plan.train.model_copy(update={"resumed": resumed})}).sealed()
    store.write_bytes(on.paths.plan, on.plan.to_json())
    assert train(on).metrics["resumed_from"] == 12
    assert metrics_of(on) == metrics_of(whole)
    # Its own checkpoints come first from then on.
    assert train(on).metrics["resumed_from"] == 24


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 16, "micro_batches": 2}, "bins of a step: 1 there, 2 here"),
        ({"batch_size": 4}, "rows, tokens and pairs of a bin: (16, 32, 8) there, (8, 32, 4) here"),
        ({"learning_rate": 1e-3}, "train.learning_rate: 0.002 there, 0.001 here"),
        ({"rows": 151}, "training rows (sha256)"),
    ],
)
def test_a_training_that_is_another_one_is_not_gone_on_with(
    training_run: PlanTraining, settings: dict[str, Any], said: str
) -> None:
    training_run(run="left", steps=24)
    on = training_run(run="on", steps=24, resume="left", **settings)
    with pytest.raises(BadConfig, match="trained something else") as caught:
        resumed_run(on.plan, on.paths)
    assert said in str(caught.value)


def test_a_run_without_a_checkpoint_hands_on_the_one_that_it_resumed(training_run: PlanTraining) -> None:
    left = training_run(run="left", steps=24)
    on = training_run(run="on", steps=24, resume="left")
    with pytest.raises(MissingInput, match="has no checkpoint") as caught:
        resumed_run(on.plan, on.paths)
    assert "leave train.resume out" in str(caught.value)
    first = ResumedRun(run="first", fingerprint="of its plan")
    left.plan = left.plan.model_copy(update={"train": left.plan.train.model_copy(update={"resumed": first})})
    store.write_bytes(left.paths.plan, left.plan.to_json())
    assert resumed_run(on.plan, on.paths) == first


def test_a_run_that_is_not_there_cannot_be_gone_on_with(training_run: PlanTraining) -> None:
    on = training_run(run="on", steps=24, resume="left")
    with pytest.raises(MissingInput, match="left/plan"):
        resumed_run(on.plan, on.paths)


def next_week(training_run: PlanTraining, first: TrainingRun, **settings: Any) -> TrainingRun:
    """A run whose parent is the model of another one, with `train.continue_optimizer`."""
    run: TrainingRun = training_run(run="week-02", steps=4, **settings)
    parent = run.plan.parent.model_copy(update={"run": first.paths.run_id, "folder": first.paths.model})
    changed = run.plan.config.train.model_copy(update={"continue_optimizer": True})
    run.plan = run.plan.model_copy(
        update={"parent": parent, "config": run.plan.config.model_copy(update={"train": changed})}
    ).sealed()
    store.write_bytes(run.paths.plan, run.plan.to_json())
    return run


def moments_at_the_start(run: TrainingRun) -> dict[str, Tensor]:
    """AdamW's state before the first step, by the names that checkpoints have; those of parameters without any are missing."""
    context = run.context()
    with gang_device(context, run.plan) as device:
        state = load_state(context, device)
        names = {parameter: name for name, parameter in state.encoder.named_parameters()}
        return {
            f"{names[parameter]}/{kind}": tensor.clone()
            for parameter, values in state.optimizer.state.items()
            for kind, tensor in values.items()
        }


def test_adamw_goes_on_with_the_state_of_the_week_before(training_run: PlanTraining, caplog: pytest.LogCaptureFixture) -> None:
    first = training_run(steps=8)
    train(first)
    run = next_week(training_run, first)
    expected = load_file(Path(first.paths.checkpoint(8)) / OPTIMIZER_FILE)
    found = moments_at_the_start(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    output = train(run)
    assert output.metrics["resumed_from"] is None
    steps = {
        float(tensor) for name, tensor in load_file(Path(run.paths.checkpoint(4)) / OPTIMIZER_FILE).items() if "/step" in name
    }
    assert steps == {12.0}
    assert "afresh" not in caplog.text
    # A retry resumes from its own checkpoint, and not from that of the week before.
    assert train(run).metrics["resumed_from"] == 4
    # Without the setting, nothing of it is read.
    asked = run.plan.config.train.model_copy(update={"continue_optimizer": False})
    run.plan = run.plan.model_copy(update={"config": run.plan.config.model_copy(update={"train": asked})}).sealed()
    store.write_bytes(run.paths.plan, run.plan.to_json())
    shutil.rmtree(run.paths.checkpoints)
    assert all(not tensor.any() for tensor in moments_at_the_start(run).values())


@pytest.mark.parametrize("gone", [True, False])
def test_adamw_starts_afresh_where_the_week_before_left_nothing_of_use(
    training_run: PlanTraining, gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = training_run(steps=4)
    train(first)
    run = next_week(training_run, first)
    if gone:
        shutil.rmtree(first.paths.checkpoints)
    else:
        path = Path(first.paths.checkpoint(4)) / OPTIMIZER_FILE
        save_file(dict(list(load_file(path).items())[3:]), path)
        manifest = path.with_name(MANIFEST_FILE)
        record = json.loads(manifest.read_bytes())
        record["files"][OPTIMIZER_FILE] = {"size": path.stat().st_size, "sha256": store.sha256(str(path))}
        manifest.write_text(json.dumps(record))
    assert all(not tensor.any() for tensor in moments_at_the_start(run).values())
    assert "run week-01 left no state of AdamW for these parameters and classes: it starts afresh" in caplog.text
    assert train(run).metrics["pairs"] == 4 * 8
