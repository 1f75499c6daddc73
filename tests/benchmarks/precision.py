"""What bf16 costs in quality: the demo's hold-out evaluated with the same model in fp32 and in bf16.

    PYTHONPATH=. python tests/benchmarks/precision.py [--rows 20000]

all-MiniLM-L6-v2 ranks the candidates of the evaluate stage, with the demo's settings and all its weeks at once. Printed are the
metrics in both precisions, their difference, and for nDCG@10 a 95 % interval from resampling the queries.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from infra.local.demo import CONFIG, initial_folder, weekly_shards
from pipeline.contract import Stage
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.statistics import bootstrap
from tests.benchmarks.peers import ours, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="of the demo, at most; default: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = [str(shard) for shard in weekly_shards(folder / "weeks", rows=options.rows)]
        corpus = texts.write_corpus(folder / "corpus.jsonl", "short", 10)
        found = {}
        for precision in ("fp32", "bf16"):
            config = {
                **CONFIG,
                "device": {"precision": precision},
                "data": {**CONFIG["data"], "train": shards, "corpus": [str(corpus)]},
                "embed": {**CONFIG["embed"], "children": 1},
            }
            paths = ours.plan(folder / precision, model=initial_folder(), pairs=Path(shards[0]), corpus=corpus, config=config)
            ours.place_model(paths, initial_folder())
            ours.run_stage(Stage.EVALUATE, paths)
            found[precision] = QueryValues.read(Path(paths.query_values))
            shutil.rmtree(folder / precision / "scratch", ignore_errors=True)
    exact, rounded = found["fp32"], found["bf16"]
    assert exact.queries == rounded.queries
    print(f"{len(exact.queries)} queries")
    print(f"{'':<12}{'fp32':>10}{'bf16':>10}{'difference':>14}{'relative':>12}")
    for metric, value in exact.means().items():
        change = rounded.means()[metric] - value
        print(f"{metric:<12}{value:>10.5f}{rounded.means()[metric]:>10.5f}{change:>14.6f}{change / value:>12.4%}")
    low, high = bootstrap((rounded.values["ndcg@10"] - exact.values["ndcg@10"])[:, None], samples=2000, seed=0)
    print(f"ndcg@10, 95 % interval of the difference: {float(low[0]):.6f} to {float(high[0]):.6f}")


if __name__ == "__main__":
    main()
