"""The same measurements of this project: its own stages, as a job runs them, on a run folder that its first ones have made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.contract import RunPaths, Stage


def plan(folder: Path, *, model: Path, pairs: Path, corpus: Path, config: Mapping[str, Any]) -> RunPaths:
    """Prepare a run.

    Args:
        folder: the bucket; replaced.
        model: folder of the parent.
        pairs, corpus: JSON Lines.
        config: partial run configuration.
    """
    shutil.rmtree(folder, ignore_errors=True)
    paths = RunPaths(str(folder / "runs" / "bench"))
    data = {"train": [str(pairs)], "corpus": [str(corpus)], "holdout_fraction": 0.02, "ingest_children": 1}
    places = {"data": data, "model": {"parent": str(model)}}
    given = {"nodes": 1, "registry": None, "gate": {"undecided": "accept"}, **places, **config}
    Path(paths.root).mkdir(parents=True)
    deployment = {"config": given, "allowed_nodes": [1], "local_paths": True}
    Path(paths.input).write_text(json.dumps({"deployment": deployment, "execution": {}, "execution_arn": "arn:benchmark"}))
    for stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN):
        run_stage(stage, paths)
    return paths


def run_stage(stage: Stage, paths: RunPaths, **environment: str) -> dict[str, Any]:
    """Run a stage to its end; its metrics.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    command = [sys.executable, "-m", "pipeline.cli", "stage", stage.value, "--run", paths.root]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{stage} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    metrics: dict[str, Any] = json.loads(Path(paths.result(stage)).read_text())["metrics"]
    return metrics


def embed(paths: RunPaths, model: Path) -> dict[str, Any]:
    """Embed the whole corpus with a model as it is, with one child; the metrics of the stage."""
    shutil.rmtree(paths.stage(Stage.EMBED), ignore_errors=True)
    place_model(paths, model)
    return run_stage(Stage.EMBED, paths)


def place_model(paths: RunPaths, model: Path) -> None:
    """Put a model where train would have left it."""
    if not Path(paths.model).exists():
        shutil.copytree(model, paths.model)


def train(paths: RunPaths) -> dict[str, Any]:
    """Train as planned; the metrics of the stage."""
    shutil.rmtree(paths.stage(Stage.TRAIN), ignore_errors=True)
    return run_stage(Stage.TRAIN, paths)


def read(corpus: Path, model: Path, length: int) -> dict[str, Any]:
    """What comes before the device: read, tokenize, cut into batches, pad; in this process."""
    import time
    from itertools import islice

    import numpy as np

    from pipeline.dataset.ingested import DOCUMENTS
    from pipeline.dataset.rows import read_blocks
    from pipeline.dataset.tokens import TextTokenizer
    from pipeline.model.inference import pad, plan_batches
    from pipeline.stages.embed import WINDOW_ROWS

    tokenizer = TextTokenizer(model)
    begun = time.perf_counter()
    texts = (text for block in read_blocks(str(corpus), DOCUMENTS, {}) for text in block.rows["document"].to_pylist())
    rows = tokens = 0
    while window := list(islice(texts, WINDOW_ROWS)):
        lists = tokenizer.encode(window, length)
        lengths = np.array([len(one) for one in lists])
        for batch in plan_batches(lengths, (length,), 16_384, static=False):
            pad([lists[row] for row in batch.rows.tolist()], batch.slots, batch.length)
        rows += len(window)
        tokens += int(lengths.sum())
    seconds = time.perf_counter() - begun
    return {"rows": rows, "tokens": tokens, "seconds": seconds, "rate": rows / seconds}


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
