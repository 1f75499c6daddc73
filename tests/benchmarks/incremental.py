"""Does incremental training work? Twelve weeks of it against one training on all of them, by cohort of weeks.

    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/benchmarks/incremental.py [--weeks 12] [--rows 200] [--seeds 3] [--processes 2]
        [--weeks-by module|hash] [--arms NAME ...] [--results FILE]

Real text: docstrings of the installed packages as pairs; all-MiniLM-L6-v2. Weeks are in the order of the modules, so that each
brings text that no week before had, or, by hash, samples of the same text. Every week runs the
pipeline's own prepare, ingest, plan and train stages in one process, one rank, from the model of the week before; `retrain` runs
them once, from the initial model, on the rows of all weeks. All arms see every row that is not held out once, and replayed ones
besides. AdamW starts afresh every week, or continues (`train.continue_optimizer`).

Printed: nDCG@10 of the last model on held-out queries of all weeks, and of the first, the middle and the last third of them, each
query's value the mean of the seeds; the largest difference of two seeds; the queries' mean difference from `retrain`, with its
95 % interval; and the pairs trained. A held-out query is ranked against the held-out documents of all weeks. Results are kept in
a file, where given, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.local.demo import initial_folder
from pipeline.contract import Stage
from tests.benchmarks.peers.texts import pairs
from tests.chain.year_checks import Outsider
from tests.pipeline.stages.planning import Bench, held_out

FRACTION = 0.4
QUERY_LENGTH, LENGTH = 16, 64
TRAIN: dict[str, Any] = {
    "batch_size": 16,
    "batch_tokens": 1280,
    "query_length": QUERY_LENGTH,
    "length": LENGTH,
    "learning_rate": 5e-5,
    "dropout": 0.0,
    "validate_every": 10**6,
    "validation_queries": 1,
    "checkpoint_every": 10**6,
    "keep_checkpoints": 1,
}
CONSTANT = {"schedule": "constant", "warmup_fraction": 0.0}
CONTINUED = {"continue_optimizer": True}


class Arm(NamedTuple):
    """A way to train all weeks: `weekly` with a run for each, not one for all of them."""

    weekly: bool = True
    replay: float = 0.0
    train: Mapping[str, Any] = MappingProxyType({})


ARMS = {
    "initial model": Arm(weekly=False, train={"steps": 0}),
    "retrain": Arm(weekly=False),
    "incremental, no replay": Arm(),
    "incremental, replay 0.1": Arm(replay=0.1),
    "incremental, replay 0.5": Arm(replay=0.5),
    "replay 0.1, constant rate": Arm(replay=0.1, train=CONSTANT),
    "replay 0.1, continued AdamW": Arm(replay=0.1, train=CONTINUED),
    "replay 0.1, constant rate, continued AdamW": Arm(replay=0.1, train=CONSTANT | CONTINUED),
}

Rows = list[dict[str, Any]]
Values = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=200, help="pairs of a week, held-out ones included")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="arms that run at the same time")
    parser.add_argument("--weeks-by", choices=("module", "hash"), default="module")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="which to run; `retrain` is always one")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    arms = [name for name in ARMS if name in {"retrain", *options.arms}]
    chosen = list(pairs()[: options.weeks * options.rows])
    if options.weeks_by == "module":
        chosen.sort(key=lambda pair: pair.id)
    rows = [{"id": pair.id, "query": pair.query, "document": pair.document} for pair in chosen]
    weeks = [rows[start : start + options.rows] for start in range(0, len(rows), options.rows)]
    held = [(week, row) for week, of_week in enumerate(weeks) for row in of_week if held_out(row, FRACTION)]
    print(f"{len(weeks)} weeks of {options.rows} pairs; {len(held)} held-out queries", flush=True)
    found: dict[str, list[Any]] = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        to_run = [(name, seed) for seed, name in itertools.product(range(options.seeds), arms) if f"{name}/{seed}" not in found]
        running = [pool.submit(measure, weeks, [row for _, row in held], *one) for one in to_run]
        for one in as_completed(running):
            key, values, trained, seconds = one.result()
            found[key] = [values.tolist(), trained]
            print(f"{key}: {values.mean():.4f}, {seconds:.0f} s", flush=True)
            if options.results:
                options.results.write_text(json.dumps(found))
    show(
        {name: [found[f"{name}/{seed}"] for seed in range(options.seeds)] for name in arms}, np.array([week for week, _ in held])
    )


def measure(weeks: list[Rows], held: Rows, name: str, seed: int) -> tuple[str, Values, int, float]:
    """Train an arm; return its key, the value of each held-out query, the pairs trained and the seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model, trained = last_model(Path(folder), weeks, ARMS[name], seed)
        return f"{name}/{seed}", values_of(model, held), trained, time.monotonic() - begun


def last_model(folder: Path, weeks: list[Rows], arm: Arm, seed: int) -> tuple[Path, int]:
    """Train all weeks; return the last model's folder, and the pairs trained."""
    if arm.train.get("steps") == 0:
        return initial_folder(), 0
    (folder / "scratch").mkdir()
    bench = Bench(str(folder / "bucket"), folder / "scratch", initial_folder())
    data = {**bench.config["data"], "holdout_fraction": FRACTION, "replay_fraction": arm.replay}
    bench.config |= {
        "nodes": 1,
        "seed": seed,
        "device": {"kind": "cpu", "ranks_per_node": 1, "precision": "fp32"},
        "data": data,
        "train": {**TRAIN, **arm.train},
    }
    trained = 0
    for number, run_weeks in enumerate([[week] for week in weeks] if arm.weekly else [weeks]):
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


def show(found: dict[str, list[Any]], week_of: NDArray[np.int64]) -> None:
    """Print the table; `found` has values and pairs trained by arm and seed."""
    thirds = [week_of * 3 // (week_of.max() + 1) == third for third in range(3)]
    of_arms = {name: np.array([values for values, _ in of_seeds]) for name, of_seeds in found.items()}
    retrained = of_arms["retrain"].mean(axis=0)
    draws = np.random.default_rng(0).integers(0, len(retrained), (10_000, len(retrained)))
    print(f"{'':<44}{'all':>8}{'first':>8}{'middle':>8}{'last':>8}{'seeds':>8}{'against retrain':>29}{'pairs':>9}")
    for name, of_seeds in of_arms.items():
        means = of_seeds.mean(axis=0)
        figures = [means.mean(), *(means[third].mean() for third in thirds), np.ptp(of_seeds.mean(axis=1))]
        low, high = np.quantile((means - retrained)[draws].mean(axis=1), [0.025, 0.975])
        difference = f"{(means - retrained).mean():+.4f} ({low:+.4f} to {high:+.4f})"
        print(f"{name:<44}{''.join(f'{figure:>8.4f}' for figure in figures)}{difference:>29}{found[name][0][1]:>9,}")


if __name__ == "__main__":
    main()
