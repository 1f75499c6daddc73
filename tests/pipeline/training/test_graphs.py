"""The proof that training compiles nothing: with real torch-xla, every graph of whole runs was met by compile's trial before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline import store
from pipeline.backends.device import open_device
from pipeline.contract import RunPaths
from pipeline.graphs.compiled import read_set
from pipeline.graphs.fingerprint import missing_sets, set_uri
from pipeline.model.folder import load_encoder, save_folder
from pipeline.plan import RunPlan
from pipeline.run.world import World
from pipeline.training.host_state import OPTIMIZER_FILE, host_state, load_optimizer
from pipeline.training.step import build_optimizer
from tests.gangs import on_xla
from tests.pipeline.training.planned import plan_training
from tests.pipeline.training.xla_scenarios import SCENARIO
from tests.tiny import Head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = {
    "embed": {"length": 32, "tokens_per_batch": 256},
    "compile": {"trial_steps": 2},
    "gate": {"undecided": "accept"},
}
Run = tuple[RunPaths, RunPlan]


scenario = partial(on_xla, SCENARIO)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A function that plans a run on kind xla in the module's bucket."""
    root = tmp_path_factory.mktemp("xla")

    def planned(name: str, *, seed: int = 5, head: Head = 16, **settings: Any) -> Run:
        # The models of a bucket have one form.
        paths = RunPaths(str(root / ("bucket" if head == 16 else "another-bucket") / "runs" / name))
        sections = {**SMALL, "seed": seed, **settings.pop("sections", {})}
        return paths, plan_training(paths, root / name, kind="xla", head=head, sections=sections, **settings)

    return planned


@pytest.fixture(scope="module")
def compiled(planned: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose graphs compile has recorded."""
    paths, plan = planned("compiled", steps=30)
    metrics = scenario("stage", paths.root, "compile", str(tmp_path_factory.mktemp("scratch") / "compile"))
    assert metrics["compiles"]
    assert metrics["trial_steps"] == 2
    return paths, plan


@pytest.mark.long
def test_a_run_meets_only_what_the_trial_met(planned: Callable[..., Run], tmp_path: Path) -> None:
    """Bins of different pairs, warm-up and decay, validation, checkpoints, a death and what follows it."""
    paths, plan = planned("many-steps", steps=24, temperature=0.07)
    compiled = scenario("stage", paths.root, "compile", str(tmp_path / "compile"))
    assert plan.graphs is not None
    recorded = read_set(set_uri(paths.bucket_root, "train", plan.graphs.train)).graphs
    assert len(recorded) == compiled["graphs"] >= 5
    assert missing_sets(paths.bucket_root, plan.graphs) == []

    scenario("interrupted", paths.root, str(tmp_path / "first"), "15")
    trained = scenario("stage", paths.root, "train", str(tmp_path / "second"))
    assert trained["resumed_from"] == 12
    graphs = trained["graphs"]
    assert graphs["new"] == 0
    assert graphs["fallbacks"] == {}
    met = store.read_json(f"{paths.root}/train/graphs-00000.json")
    assert met["new"] == []
    assert set(met["keys"]) <= set(recorded)
    # Flat from the first validation on, which comes four steps after the checkpoint.
    assert graphs["last_compiled_step"] == 16

    evaluated = scenario("stage", paths.root, "evaluate", str(tmp_path / "evaluate"))
    assert evaluated["graphs"]["new"] == 0
    assert evaluated["graphs"]["compiled"] > 0
    lines = [json.loads(line) for line in store.read_bytes(paths.metrics).decode().splitlines()]
    counted = [line for line in lines if "loss" in line]
    assert {line["new_graphs"] for line in counted} == {0}
    assert {line["fallbacks"] for line in counted} == {0}


def test_batches_reach_the_device_in_their_order() -> None:
    """torch-xla's loader gives them out as its threads get ready, and takes an error in the data for its end."""
    found = scenario("loader")
    assert found["order"] == list(range(40))
    assert (found["said"], found["seen"]) == ("the shard has changed", 7)
    assert found["threads"] == 0


@pytest.mark.long
def test_next_week_needs_no_compilation(compiled: Run, planned: Callable[..., Run], tmp_path: Path) -> None:
    """Another parent, other rows, other counts, another seed: the same graphs."""
    _, earlier = compiled
    paths, plan = planned("next-week", seed=6, steps=9, rows=131)
    assert plan.graphs == earlier.graphs
    assert missing_sets(paths.bucket_root, plan.graphs) == []
    assert not scenario("stage", paths.root, "compile", str(tmp_path / "compile"))["compiles"]
    trained = scenario("stage", paths.root, "train", str(tmp_path / "train"))
    assert trained["graphs"]["new"] == 0
    # What this kind saved, another one goes on with, down to the step count of its optimizer.
    cpu = open_device("cpu", "fp32", World(), threads=1)
    checkpoint = Path(paths.checkpoint(9))
    encoder = load_encoder(checkpoint, plan.config.model)
    optimizer = build_optimizer(encoder, plan.config.train, cpu)
    load_optimizer(encoder, optimizer, checkpoint / OPTIMIZER_FILE)
    assert {float(state["step"]) for state in optimizer.state.values()} == {9.0}
    before = [parameter.clone() for parameter in encoder.parameters()]
    for parameter in encoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups[0]["lr"].fill_(1e-3)
    optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, encoder.parameters(), strict=True))
    # And the other way round, with nothing but the one graph that makes room for the optimizer's state.
    save_folder(encoder, tmp_path / "cpu", checkpoint)
    save_file(host_state(encoder, optimizer, cpu)[1], tmp_path / "cpu" / OPTIMIZER_FILE)
    reloaded = scenario("reload", str(tmp_path / "cpu"))
    assert reloaded["tensors"] > 100
    assert reloaded["changed"] == []
    assert reloaded["compiled"] == 1


@pytest.mark.long
def test_deliberate_breaks_are_caught(compiled: Run, planned: Callable[..., Run], tmp_path: Path) -> None:
    """A changing number in the graph, an unpadded last batch, a value read in the middle of a step."""
    stop = {"compile": {**SMALL["compile"], "new_graphs": "stop"}}
    changing, _ = planned("changing-scalar", steps=4)
    unpadded, _ = planned("unpadded-batch", steps=8, sections=stop)
    read, _ = planned("read-in-the-loop", steps=4, sections=stop)
    found = scenario(
        "broken",
        str(tmp_path),
        f"changing_scalar={changing.root}",
        f"unpadded_batch={unpadded.root}",
        f"read_in_the_loop={read.root}",
    )
    for how, words in (("unpadded_batch", "inputs of other shapes or types"), ("read_in_the_loop", "other")):
        assert found[how]["code"] == 69
        assert "graphs that were not compiled ahead of time" in found[how]["what"]
        assert any(words in value for value in found[how]["value"]), found[how]["value"]

    # Where it does not end the run, every new graph is counted in its line of metrics, and says what is new about it.
    assert found["changing_scalar"]["metrics"]["graphs"]["new"] >= 4
    met = store.read_json(f"{changing.root}/train/graphs-00000.json")
    assert {graph["step"] for graph in met["new"]} >= {1, 2, 3}
    # Between two of them, only the row differs.
    assert all("other constants: new slice [" in graph["cause"] for graph in met["new"][1:]), met["new"]
    lines = [json.loads(line) for line in store.read_bytes(changing.metrics).decode().splitlines()]
    counts = [line["new_graphs"] for line in lines if "loss" in line]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"accumulation": 2}, id="accumulation", marks=pytest.mark.long),
        pytest.param({"micro_batches": 4, "dropout": 0.1}, id="micro-batches"),
        pytest.param({"head": [{"out": 48, "activation": "gelu"}, {"out": 24, "activation": "tanh"}]}, id="layers as head"),
        pytest.param(
            {"micro_batches": 2, "accumulation": 2, "activation_checkpointing": True},
            id="micro-batches added up",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"sections": {**SMALL, "device": {"sync_points": 1, "loader": {"batches_per_execution": 2}}}},
            id="joined steps",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"activation_checkpointing": True, "dropout": 0.1, "sections": {**SMALL, "device": {"precision": "bf16"}}},
            id="checkpointed bf16",
        ),
    ],
)
def test_other_forms_of_a_step(settings: dict[str, Any], planned: Callable[..., Run], tmp_path: Path) -> None:
    """Each has graphs of its own, and the trial meets them all."""
    paths, _ = planned("-".join(map(str, settings)).replace("_", "-"), steps=7, **settings)
    found = scenario("compiled_and_trained", paths.root, str(tmp_path))
    assert found["train"]["graphs"]["new"] == 0
    assert found["train"]["graphs"]["compiled"] <= found["compile"]["graphs"]
    assert found["train"]["steps"] == 7
