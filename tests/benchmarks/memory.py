"""Peak memory of embed as the corpus grows: it must not.

    PYTHONPATH=. python tests/benchmarks/memory.py [--rows 10000 100000 1000000] [--rounds 1]

A BERT of two layers, 32 wide, embeds short made-up texts in the embed stage, one rank, default settings. Printed is the largest
resident set of the stage's rank, and its growth against the first number of rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pipeline.contract import Stage
from tests.benchmarks.peers import ours
from tests.tiny import WORDS, make_model, write_pairs

PEAK = """
import json, resource, sys
from pipeline.contract import RunPaths, Stage
from pipeline.stages.rank import run_stage
from pipeline.run.world import World
run_stage(Stage.EMBED, RunPaths(sys.argv[1]), World())
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    first = 0.0
    print(f"{'rows':>10}{'peak MiB':>10}{'growth':>9}{'documents/s':>13}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        pairs = write_pairs(folder / "pairs.jsonl", 400)
        for rows in options.rows:
            corpus = write_corpus(folder / "corpus.jsonl", rows)
            found = [measure(folder, corpus, pairs) for _ in range(options.rounds)]
            middle = statistics.median(peak for peak, _ in found)
            first = first or middle
            rate = statistics.median(rate for _, rate in found)
            print(f"{rows:>10,}{middle / 1024:>10.0f}{middle / first - 1:>9.1%}{rate:>13,.0f}", flush=True)


def write_corpus(path: Path, rows: int) -> Path:
    """Rows {id, text} of 3 to 30 words, written as they are made."""
    rng = np.random.default_rng(0)
    words = np.array(WORDS)
    with open(path, "w", encoding="utf-8") as stream:
        for row in range(rows):
            text = " ".join(words[rng.integers(len(words), size=rng.integers(3, 31))])
            stream.write(json.dumps({"id": f"row-{row:08d}", "text": text}) + "\n")
    return path


def measure(folder: Path, corpus: Path, pairs: Path) -> tuple[float, float]:
    """Peak (KiB) and documents per second of one run."""
    config = {
        "device": {"threads_per_rank": 1},
        "train": {"query_length": 12, "length": 32},
        "evaluate": {"candidates": 10},
        "embed": {"children": 1, "length": 32},
    }
    paths = ours.plan(folder / "bucket", model=folder / "model", pairs=pairs, corpus=corpus, config=config)
    ours.place_model(paths, folder / "model")
    done = subprocess.run([sys.executable, "-c", PEAK, paths.root], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    metrics = json.loads(Path(paths.result(Stage.EMBED)).read_text())["metrics"]
    return float(done.stdout.splitlines()[-1]), metrics["documents_per_second"]


if __name__ == "__main__":
    main()
