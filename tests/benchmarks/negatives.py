"""What negatives bring: a week in which no row has any, in which they are mined, and in which the batch is larger besides.

    PYTHONPATH=. python tests/benchmarks/negatives.py [--rows 4000] [--queries 1000] [--corpus 20000] [--seeds 3]

Real text, WordNet's nouns: a word is the query, the definition of its synset the document. Two weeks of all-MiniLM-L6-v2, by the
pipeline's own stages in this process, one rank. The first one trains in batches and publishes the model and the embeddings of the
corpus; every arm is the second week on the same rows from there. Needs the package wordnet-base.

Printed: nDCG@10 on words that no row has, against all definitions of the corpus, graded by WordNet's relations in the schema of
ESCI (Reddy et al. 2022, "Shopping Queries Dataset", arXiv:2206.06588), with its gains: exact 1, a synset of the word; substitute
0.1, its hypernym or a sibling; complement 0.01, a part of it, or of its domain; irrelevant 0, all others, among them those that
share a word with the query. Mean of the seeds; the largest difference of two seeds; the same with exact answers alone; mined
negatives of a row; and the seconds of training.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.local.demo import initial_folder
from pipeline import store
from pipeline.contract import Stage
from pipeline.dataset.row_files import read_table
from tests.benchmarks import incremental
from tests.chain.year_checks import Outsider
from tests.chain.year_inputs import WORDNET
from tests.pipeline.stages.planning import Bench

QUERY_LENGTH, LENGTH = 16, 64
GAINS = {"E": 1.0, "S": 0.1, "C": 0.01}
DEPTH = 10
TRAIN = incremental.TRAIN | {"batch_tokens": 4096, "query_length": QUERY_LENGTH, "length": LENGTH}
MINED = {"negatives": 4, "mine": {"count": 4}, "batch_tokens": 4 * 4096}
ARMS: dict[str, dict[str, Any]] = {
    "in-batch": {},
    "in-batch, batch of 128": {"batch_size": 128, "micro_batches": 4, "batch_tokens": 4 * 4096},
    "mined": MINED,
    "mined, batch of 128": {**MINED, "batch_size": 128, "micro_batches": 4, "batch_tokens": 16 * 4096},
}

Values = NDArray[np.float64]


class Synset(NamedTuple):
    """A noun's synset: its words, its definition, and the synsets that its pointers of each kind lead to."""

    words: tuple[str, ...]
    definition: str
    pointers: dict[str, tuple[str, ...]]


class Case(NamedTuple):
    """A word, and the grade of each synset that is not irrelevant to it."""

    word: str
    grades: dict[str, str]


def read_synsets() -> dict[str, Synset]:
    """All synsets of nouns by their offsets (wndb(5WN): words and pointers are counted, the former in hexadecimal)."""
    found = {}
    for line in (WORDNET / "data.noun").read_text(errors="replace").splitlines():
        if line.startswith(" "):
            continue
        fields, _, gloss = line.partition(" | ")
        offset, _, _, count, *rest = fields.split()
        words = tuple(word.replace("_", " ") for word in rest[: 2 * int(count, 16) : 2])
        pointers = defaultdict(list)
        after = rest[2 * int(count, 16) + 1 :]
        for symbol, target, part, _ in zip(*(after[place::4] for place in range(4)), strict=False):
            if part == "n":
                pointers[symbol[:2]].append(target)
        found[offset] = Synset(words, gloss.split('; "')[0].strip(), {kind: tuple(ends) for kind, ends in pointers.items()})
    return found


def cases(synsets: dict[str, Synset], count: int) -> list[Case]:
    """Words with synsets of every grade, by chance but always the same."""
    of_word = defaultdict(list)
    for offset, synset in synsets.items():
        for word in synset.words:
            of_word[word.casefold()].append(offset)
    found: list[Case] = []
    for word in random.Random(0).sample(sorted(of_word), len(of_word)):
        grades = dict.fromkeys(of_word[word], "E")
        for offset in of_word[word]:
            pointers = synsets[offset].pointers
            parents = pointers.get("@", ())
            siblings = [sibling for parent in parents for sibling in synsets[parent].pointers.get("~", ())]
            domains = [member for domain in pointers.get(";c", ()) for member in synsets[domain].pointers.get("-c", ())]
            parts = [end for kind in ("%p", "%m", "%s") for end in pointers.get(kind, ())]
            for grade, ends in (("S", [*parents, *siblings]), ("C", [*parts, *domains])):
                for end in ends:
                    grades.setdefault(end, grade)
        if {*grades.values()} == {*GAINS} and len(grades) < 60:
            found.append(Case(word, grades))
        if len(found) == count:
            break
    return found


def ndcg(scores: NDArray[np.float32], chosen: list[Case], offsets: list[str], gains: dict[str, float]) -> Values:
    """nDCG@10 of each case, with these gains."""
    place = {offset: number for number, offset in enumerate(offsets)}
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    found = []
    for row, case in zip(scores, chosen, strict=True):
        gain = np.zeros(len(offsets))
        for offset, grade in case.grades.items():
            gain[place[offset]] = gains.get(grade, 0.0)
        best = np.argsort(-row, kind="stable")[:DEPTH]
        ideal = np.sort(gain)[::-1][:DEPTH]
        found.append((gain[best] * discounts).sum() / (ideal * discounts).sum())
    return np.array(found)


def weeks(synsets: dict[str, Synset], held: set[str], rows: int) -> Iterator[list[dict[str, Any]]]:
    """Two weeks of rows: words and definitions of synsets that no case asks for."""
    chosen = random.Random(1).sample(sorted(offset for offset in synsets if offset not in held), 2 * rows)
    for week in (chosen[:rows], chosen[rows:]):
        yield [{"id": one, "query": synsets[one].words[0], "document": synsets[one].definition} for one in week]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rows", 4000), ("--queries", 1000), ("--corpus", 20_000), ("--seeds", 3)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    synsets = read_synsets()
    chosen = cases(synsets, options.queries)
    held = {offset for case in chosen for offset, grade in case.grades.items() if grade == "E"}
    both = list(weeks(synsets, held, options.rows))
    asked = {offset for case in chosen for offset in case.grades}
    trained = {row["id"] for week in both for row in week}
    others = random.Random(2).sample(sorted({*synsets} - asked - trained), max(0, options.corpus - len(asked | trained)))
    offsets = sorted({*asked, *trained, *others})
    print(f"{len(chosen)} words, {len(offsets)} definitions", flush=True)
    results: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            bench = published(Path(name), both[0], offsets, synsets, seed)
            bench.shard("two.jsonl", both[1])
            models = {"initial model": (initial_folder(), 0.0, 0.0), "first week": (Path(bench.paths("one").model), 0.0, 0.0)}
            models |= {arm: second_week(bench, f"two-{number}", train) for number, (arm, train) in enumerate(ARMS.items())}
            for arm, (folder, negatives, seconds) in models.items():
                model = Outsider(folder, QUERY_LENGTH, LENGTH)
                documents = model.documents([synsets[offset].definition for offset in offsets])
                scores = model.queries([case.word for case in chosen]) @ documents.T
                values = [ndcg(scores, chosen, offsets, gains).mean() for gains in (GAINS, {"E": 1.0})]
                results[arm].append((values[0], values[1], negatives, seconds))
                print(f"seed {seed}, {arm}: {values[0]:.4f}", flush=True)
    print(f"{'':<26}{'graded':>8}{'seeds':>8}{'exact':>8}{'mined':>8}{'seconds':>9}")
    for arm, found in results.items():
        graded, exact, negatives, seconds = np.array(found).T
        print(
            f"{arm:<26}{graded.mean():>8.4f}{np.ptp(graded):>8.4f}{exact.mean():>8.4f}{negatives.mean():>8.1f}{seconds.mean():>9.0f}"
        )


def published(folder: Path, rows: list[dict[str, Any]], offsets: list[str], synsets: dict[str, Synset], seed: int) -> Bench:
    """A bucket in which the first week is published with the embeddings of the corpus."""
    (folder / "scratch").mkdir()
    bench = Bench(str(folder / "bucket"), folder / "scratch", initial_folder())
    bench.shard("one.jsonl", rows)
    corpus = [{"id": offset, "text": synsets[offset].definition} for offset in offsets]
    bench.config |= {
        "nodes": 1,
        "seed": seed,
        "device": {"kind": "cpu", "ranks_per_node": 1, "precision": "fp32"},
        "data": {
            "train": [store.join(bench.root, "data")],
            "corpus": [bench.shard("corpus.jsonl", corpus, folder="corpus")],
            "holdout_fraction": 0.02,
            "replay_fraction": 0.0,
        },
        "train": TRAIN,
        "embed": {"children": 1, "length": LENGTH},
    }
    bench.start("one")
    for stage in (Stage.TRAIN, Stage.EVALUATE, Stage.PREPARE, Stage.PLAN, Stage.EMBED, Stage.PUBLISH):
        bench.stage(stage, "one")
    bench.config["model"] = {}
    return bench


def second_week(bench: Bench, run: str, train: dict[str, Any]) -> tuple[Path, float, float]:
    """Train the second week; return the model's folder, the mean of mined negatives of a row, and the seconds of training."""
    bench.prepare(run, {"train": train})
    bench.ingest(run)
    if bench.missing(run).mine_children:
        bench.stage(Stage.MINE, run)
    bench.stage(Stage.PLAN, run)
    table = read_table(Path(bench.paths(run).rows) / "train.arrow")
    names = [name for name in table.column_names if name.startswith("negative_") and name.endswith("_hash")]
    mined = sum(float((table[name].to_numpy() != 0).mean()) for name in names)
    begun = time.monotonic()
    bench.stage(Stage.TRAIN, run)
    return Path(bench.paths(run).model), mined, time.monotonic() - begun


if __name__ == "__main__":
    main()
