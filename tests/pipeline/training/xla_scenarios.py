"""Scenarios for tests of torch-xla, which takes over the process that loads it: on_xla(SCENARIO, NAME, ...).

Each prints one JSON object as its last line.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pipeline.backends.device import open_device
from pipeline.config import HeadConfig, LoaderConfig, ModelConfig, TrainConfig
from pipeline.contract import RunPaths, Stage
from pipeline.errors import BadData, TrnpipeError
from pipeline.model.folder import load_encoder
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
from pipeline.stages import stage_function
from pipeline.training import loop, step
from pipeline.training.batches import TrainingBatches
from pipeline.training.host_state import OPTIMIZER_FILE, host_state, load_optimizer
from pipeline.training.step import build_optimizer

SCENARIO = f"from {__name__} import main; main()"


def context(root: str, stage: Stage, scratch: Path) -> StageContext:
    scratch.mkdir(parents=True)
    return StageContext(stage=stage, paths=RunPaths(root), world=World(), scratch=scratch, heartbeat=Heartbeat(None, 0))


def stage(root: str, name: str, scratch: str) -> dict[str, Any]:
    """A whole stage."""
    output = stage_function(Stage(name))(context(root, Stage(name), Path(scratch)))
    assert isinstance(output, StageOutput)
    return output.metrics


def reload(folder: str) -> dict[str, Any]:
    """A checkpoint onto the device and back: names of tensors that came back other than they are in the files."""
    checkpoint = Path(folder)
    device = open_device("xla", "fp32", World())
    encoder = load_encoder(checkpoint, ModelConfig(head=HeadConfig(hidden=16)))
    weights = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    optimizer = build_optimizer(device.place(encoder), TrainConfig(), device)
    load_optimizer(encoder, optimizer, checkpoint / OPTIMIZER_FILE)
    weights, moments = host_state(encoder, optimizer, device)
    expected = {**{f"w:{name}": tensor for name, tensor in weights.items()}, **load_file(checkpoint / OPTIMIZER_FILE)}
    found = {**{f"w:{name}": tensor for name, tensor in weights.items()}, **moments}
    assert expected.keys() == found.keys()
    changed = [name for name in expected if not torch.equal(expected[name], found[name])]
    return {"tensors": len(found), "changed": changed, "compiled": device.graph_counts().compiled}


def loader() -> dict[str, Any]:
    """Batches through torch-xla's loader: with several threads, with an error in the middle, left early."""
    settings = LoaderConfig(host_prefetch=4, device_prefetch=2, transfer_threads=3)
    device = open_device("xla", "fp32", World(), loader=settings)

    def batches(stop: int, error: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(stop):
            # The first of every three takes longest to be sent.
            yield {"number": torch.full((200_000 if number % 3 == 0 else 1,), float(number))}
        if error:
            raise BadData("the shard has changed", value="a.jsonl")

    threads = threading.active_count()
    order = [device.read(batch["number"][:1])[0] for batch in device.batches(batches(40))]
    said, seen = "", 0
    try:
        for _ in device.batches(batches(7, error=True)):
            seen += 1
    except BadData as error:
        said = error.what
    for batch in device.batches(batches(1000)):
        if device.read(batch["number"][:1])[0] == 3.0:
            break
    gc.collect()
    return {"order": order, "said": said, "seen": seen, "threads": threading.active_count() - threads}


def interrupted(root: str, scratch: str, at: str) -> dict[str, Any]:
    """Training that dies at the beginning of a step."""
    step_seed = loop.step_seed

    def dying(seed: int, number: int, rank: int, part: int) -> int:
        if number == int(at):
            raise KeyboardInterrupt
        return step_seed(seed, number, rank, part)

    loop.step_seed = dying  # type: ignore[assignment]
    try:
        stage(root, "train", scratch)
    except KeyboardInterrupt:
        return {"died": int(at)}
    raise AssertionError("it did not die")


def compiled_and_trained(root: str, scratch: str) -> dict[str, Any]:
    """Both stages in one process, which compiles each graph once only; the metrics of both."""
    return {name: stage(root, name, f"{scratch}/{name}") for name in ("compile", "train")}


def broken(scratch: str, *runs: str) -> dict[str, Any]:
    """Training with mistakes planted in it, one after another, as `HOW=RUN`: what ended each run, or its metrics."""
    found = {}
    for run in runs:
        how, root = run.split("=", 1)
        undo = BREAKS[how]()
        try:
            found[how] = {"code": 0, "metrics": stage(root, "train", f"{scratch}/{how}")}
        except TrnpipeError as error:
            found[how] = {"code": int(error.exit_code), "what": error.what, "value": error.value}
        finally:
            undo()
    return found


Undo = Callable[[], None]


def changing_scalar() -> Undo:
    """A Python number that grows from step to step says which row counts once more: it is part of the graph."""
    contrastive_loss = step.contrastive_loss
    calls = iter(range(1000))

    def favouring(queries: Any, *arguments: Any, **settings: Any) -> Any:
        return contrastive_loss(queries, *arguments, **settings) + queries[next(calls) % 8].sum() / 1000

    step.contrastive_loss = favouring  # type: ignore[assignment]
    return lambda: setattr(step, "contrastive_loss", contrastive_loss)


def unpadded_batch() -> Undo:
    """The sixth batch has only as many pairs and packed rows as are left."""
    iterate = TrainingBatches.iterate

    def short(self: TrainingBatches, start: int, stop: int) -> Iterator[Any]:
        for number, batch in enumerate(iterate(self, start, stop)):
            if number == 5:
                yield {
                    name: tensor[:3, :3] if name == "roles" else tensor[:3] if name != "learning_rate" else tensor
                    for name, tensor in batch.items()
                }
            else:
                yield batch

    TrainingBatches.iterate = short  # type: ignore[method-assign]
    return lambda: setattr(TrainingBatches, "iterate", iterate)


def read_in_the_loop() -> Undo:
    """Every step's loss is read in the middle of the step."""
    contrastive_loss = step.contrastive_loss

    def read(*arguments: Any, **settings: Any) -> Any:
        loss = contrastive_loss(*arguments, **settings)
        assert loss.item() == loss.item()
        return loss

    step.contrastive_loss = read  # type: ignore[assignment]
    return lambda: setattr(step, "contrastive_loss", contrastive_loss)


BREAKS: dict[str, Callable[[], Undo]] = {
    "changing_scalar": changing_scalar,
    "unpadded_batch": unpadded_batch,
    "read_in_the_loop": read_in_the_loop,
}

SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "stage": stage,
    "reload": reload,
    "loader": loader,
    "interrupted": interrupted,
    "compiled_and_trained": compiled_and_trained,
    "broken": broken,
}


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    found = SCENARIOS[sys.argv[3]](*sys.argv[4:])
    print(json.dumps(found), flush=True)
    # torch-xla's threads have nothing more to say.
    os._exit(0)
