"""Does incremental training work? Twelve weeks of it against one training on all of them, by cohort of weeks.

    PYTHONPATH=. python tests/benchmarks/incremental.py [--weeks 12] [--rows 400] [--seeds 3] [--results FILE]

Real text: docstrings of the installed packages as pairs, in weeks by their hashes; all-MiniLM-L6-v2. Every week runs the
pipeline's own prepare, ingest, plan and train stages in this process, one rank, from the model of the week before; `retrain` runs
them once, from the initial model, on the rows of all weeks. All arms see every row that is not held out once, and replayed ones
besides.

Printed: nDCG@10 of the last model on held-out queries of all weeks, and of the first, the middle and the last third of them, each
query's value the mean of the seeds; the largest difference of two seeds; and the pairs trained. A held-out query is ranked
against the held-out documents of all weeks. Results are kept in a file, where given, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.local.demo import initial_folder
from pipeline.contract import Stage
from tests.benchmarks.peers.texts import pairs
from tests.chain.year_checks import Outsider
from tests.pipeline.stages.planning import Bench, held_out

FRACTION = 0.2
QUERY_LENGTH, LENGTH = 24, 96
TRAIN: dict[str, Any] = {
    "batch_size": 32,
    "batch_tokens": 3072,
    "query_length": QUERY_LENGTH,
    "length": LENGTH,
    "learning_rate": 5e-5,
    "dropout": 0.0,
    "validate_every": 10**6,
    "validation_queries": 1,
    "checkpoint_every": 10**6,
    "keep_checkpoints": 1,
}
ARMS: dict[str, tuple[bool, float, dict[str, Any]]] = {
    # name: week by week, replay, settings of train
    "initial model": (False, 0.0, {"steps": 0}),
    "retrain": (False, 0.0, {}),
    "incremental, no replay": (True, 0.0, {}),
    "incremental, replay 0.1": (True, 0.1, {}),
    "incremental, replay 0.5": (True, 0.5, {}),
    "incremental, replay 0.1, constant rate": (True, 0.1, {"schedule": "constant", "warmup_fraction": 0.0}),
}

Rows = list[dict[str, Any]]
Values = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=400, help="pairs of a week, held-out ones included")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    chosen = pairs()[: options.weeks * options.rows]
    rows = [{"id": pair.id, "query": pair.query, "document": pair.document} for pair in chosen]
    weeks = [rows[start : start + options.rows] for start in range(0, len(rows), options.rows)]
    held = [(week, row) for week, of_week in enumerate(weeks) for row in of_week if held_out(row, FRACTION)]
    print(f"{len(weeks)} weeks of {options.rows} pairs; {len(held)} held-out queries", flush=True)
    found: dict[str, list[Any]] = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    for seed in range(options.seeds):
        for name, arm in ARMS.items():
            if (key := f"{name}/{seed}") in found:
                continue
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                model, trained = last_model(Path(folder), weeks, arm, seed)
                found[key] = [values_of(model, [row for _, row in held]).tolist(), trained]
            print(f"{key}: {np.mean(found[key][0]):.4f}, {time.monotonic() - begun:.0f} s", flush=True)
            if options.results:
                options.results.write_text(json.dumps(found))
    show(found, np.array([week for week, _ in held]), options.seeds, len(weeks))


def last_model(folder: Path, weeks: list[Rows], arm: tuple[bool, float, dict[str, Any]], seed: int) -> tuple[Path, int]:
    """Train all weeks; return the last model's folder, and the pairs trained."""
    weekly, replay, train = arm
    if train.get("steps") == 0:
        return initial_folder(), 0
    (folder / "scratch").mkdir()
    bench = Bench(str(folder / "bucket"), folder / "scratch", initial_folder())
    data = {**bench.config["data"], "holdout_fraction": FRACTION, "replay_fraction": replay}
    bench.config |= {
        "nodes": 1,
        "seed": seed,
        "device": {"kind": "cpu", "ranks_per_node": 1, "precision": "fp32"},
        "data": data,
        "train": {**TRAIN, **train},
    }
    trained = 0
    for number, run_weeks in enumerate([[week] for week in weeks] if weekly else [weeks]):
        for part, week in enumerate(run_weeks):
            bench.shard(f"week-{number:02d}-{part:02d}.jsonl", week)
        run = f"week-{number:02d}"
        bench.start(run)
        bench.stage(Stage.TRAIN, run)
        trained += bench.plan(run).train.rows
        bench.publish(run, bench.paths(run).model)
        bench.config["model"] = {}
    return Path(bench.paths(run).model), trained


def values_of(model: Path, held: Rows) -> Values:
    """nDCG@10 of each held-out query, whose one relevant document is its row's."""
    outsider = Outsider(model, QUERY_LENGTH, LENGTH)
    queries, documents = outsider.queries([row["query"] for row in held]), outsider.documents([row["document"] for row in held])
    scores = queries @ documents.T
    ranks = (scores > np.diagonal(scores)[:, None]).sum(axis=1) + 1
    return np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)


def show(found: dict[str, list[Any]], week_of: NDArray[np.int64], seeds: int, weeks: int) -> None:
    thirds = [week_of * 3 // weeks == third for third in range(3)]
    print(f"{'':<42}{'all':>8}{'first':>8}{'middle':>8}{'last':>8}{'seeds':>8}{'pairs':>9}")
    for name in ARMS:
        of_seeds = np.array([found[f"{name}/{seed}"][0] for seed in range(seeds)])
        means = of_seeds.mean(axis=0)
        figures = [means.mean(), *(means[third].mean() for third in thirds), np.ptp(of_seeds.mean(axis=1))]
        print(f"{name:<42}{''.join(f'{figure:>8.4f}' for figure in figures)}{found[f'{name}/0'][1]:>9,}")


if __name__ == "__main__":
    main()
