"""What negatives bring: a week in which no row has any, in which they are mined, and in which the batch is larger besides.

    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/benchmarks/negatives.py [--rows 2000] [--queries 400] [--corpus 8000] [--seeds 3]
        [--processes 2]

Real text, WordNet's nouns: a word is the query, the definition of its synset the document. Two weeks of all-MiniLM-L6-v2, by the
pipeline's own stages in one process, one rank. The first one trains in batches and publishes the model and the embeddings of the
corpus; every arm is the second week on the same rows from there. Needs the package wordnet-base.

Printed: nDCG@10 on words that no row has, against all definitions of the corpus, graded by WordNet's relations in the schema of
ESCI (Reddy et al. 2022, "Shopping Queries Dataset", arXiv:2206.06588), with its gains: exact 1, a synset of the word; substitute
0.1, its hypernym or a sibling; complement 0.01, a part of it, or of its domain; irrelevant 0, all others, among them those that
share a word with the query. Mean of the seeds; the largest difference of two seeds; the mean difference of words from `in-batch`
with its 95 % interval; nDCG@10 with exact answers alone; mined negatives of a row; and the seconds of training.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
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


class Texts(NamedTuple):
    """What every arm has: words to ask for, and the documents that they are asked of."""

    cases: list[Case]
    offsets: list[str]
    definitions: list[str]


class Measured(NamedTuple):
    """Of an arm with one seed.

    Attributes:
        graded, exact: nDCG@10 of each word, with all gains and with those of exact answers.
        negatives: mined ones of a row.
        seconds: of training.
    """

    graded: Values
    exact: Values
    negatives: float = 0.0
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rows", 2000), ("--queries", 400), ("--corpus", 8000), ("--seeds", 3), ("--processes", 2)):
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
    texts = Texts(chosen, offsets, [synsets[offset].definition for offset in offsets])
    print(f"{len(chosen)} words, {len(offsets)} definitions", flush=True)
    found: dict[str, dict[int, Measured]] = defaultdict(dict)
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        seeds = range(options.seeds)
        benches = list(
            pool.map(published, [Path(name) / str(seed) for seed in seeds], [both] * len(seeds), [texts] * len(seeds), seeds)
        )
        running = {pool.submit(second_week, bench, texts, arm): (arm, seed) for seed, bench in enumerate(benches) for arm in ARMS}
        running |= {
            pool.submit(measured, Path(bench.paths("one").model), texts): ("first week", seed)
            for seed, bench in enumerate(benches)
        }
        running[pool.submit(measured, initial_folder(), texts)] = "initial model", 0
        for one in as_completed(running):
            arm, seed = running[one]
            found[arm][seed] = one.result()
            print(f"seed {seed}, {arm}: {found[arm][seed].graded.mean():.4f}", flush=True)
    show({arm: list(found[arm].values()) for arm in ("initial model", "first week", *ARMS)})


def show(found: dict[str, list[Measured]]) -> None:
    first = np.mean([one.graded for one in found[next(iter(ARMS))]], axis=0)
    draws = np.random.default_rng(0).integers(0, len(first), (10_000, len(first)))
    print(f"{'':<26}{'graded':>8}{'seeds':>8}{'against in-batch':>29}{'exact':>8}{'mined':>8}{'seconds':>9}")
    for arm, of_seeds in found.items():
        graded = np.array([one.graded for one in of_seeds])
        apart = graded.mean(axis=0) - first
        low, high = np.quantile(apart[draws].mean(axis=1), [0.025, 0.975])
        exact, negatives, seconds = np.array([(one.exact.mean(), one.negatives, one.seconds) for one in of_seeds]).mean(axis=0)
        print(
            f"{arm:<26}{graded.mean():>8.4f}{np.ptp(graded.mean(axis=1)):>8.4f}"
            f"{f'{apart.mean():+.4f} ({low:+.4f} to {high:+.4f})':>29}{exact:>8.4f}{negatives:>8.1f}{seconds:>9.0f}"
        )


def measured(folder: Path, texts: Texts, negatives: float = 0.0, seconds: float = 0.0) -> Measured:
    model = Outsider(folder, QUERY_LENGTH, LENGTH)
    scores = model.queries([case.word for case in texts.cases]) @ model.documents(texts.definitions).T
    graded, exact = (ndcg(scores, texts.cases, texts.offsets, gains) for gains in (GAINS, {"E": 1.0}))
    return Measured(graded, exact, negatives, seconds)


def published(folder: Path, weeks: list[list[dict[str, Any]]], texts: Texts, seed: int) -> Bench:
    """A bucket in which the first week is published with the embeddings of the corpus, and the second one is there."""
    (folder / "scratch").mkdir(parents=True)
    bench = Bench(str(folder / "bucket"), folder / "scratch", initial_folder())
    bench.shard("one.jsonl", weeks[0])
    corpus = [{"id": offset, "text": text} for offset, text in zip(texts.offsets, texts.definitions, strict=True)]
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
    bench.shard("two.jsonl", weeks[1])
    bench.prepare("ingest")
    bench.ingest("ingest")
    return bench


def second_week(bench: Bench, texts: Texts, arm: str) -> Measured:
    """Train the second week as an arm says."""
    run = f"two-{list(ARMS).index(arm)}"
    bench.prepare(run, {"train": ARMS[arm]})
    if bench.missing(run).mine_children:
        bench.stage(Stage.MINE, run)
    bench.stage(Stage.PLAN, run)
    table = read_table(Path(bench.paths(run).rows) / "train.arrow")
    names = [name for name in table.column_names if name.startswith("negative_") and name.endswith("_hash")]
    mined = sum(float((table[name].to_numpy() != 0).mean()) for name in names)
    begun = time.monotonic()
    bench.stage(Stage.TRAIN, run)
    return measured(Path(bench.paths(run).model), texts, mined, time.monotonic() - begun)


if __name__ == "__main__":
    main()
