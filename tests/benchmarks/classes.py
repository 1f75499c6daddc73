"""A task with classes on real text, beside a search of the same texts.

    PYTHONPATH=. python tests/benchmarks/classes.py [--texts glosses|docstrings] [--rows 10000] [--epochs 2]
        [--length 64] [--alone [--unnormalized]]

Texts: WordNet's glosses, the class of each the lexicographer file that it comes from (45), and pairs of a word and its gloss
(package wordnet-base); or docstrings, the class of each its package, and pairs of their first lines and the rest.
all-MiniLM-L6-v2 is trained by the pipeline's own prepare, ingest, plan and train stages in this process, one rank, on pairs and
on texts with their classes in turn (with --alone, on the classes only), and evaluated by evaluate. With --unnormalized the model
does not normalize its embeddings, so the classifier reads what is otherwise normalized. Its peer is a logistic
regression on TF-IDF of words and pairs of words (scikit-learn), fitted on the same texts and measured on the same held-out ones:
once on the part of each that the encoder reads, its first --length tokens, and once on the whole.

Printed: accuracy and macro F1 of both on the held-out texts, the share of the most frequent class, nDCG@10 of the pairs before
and after, and the seconds of training.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoTokenizer

from infra.local.demo import _row, initial_folder
from pipeline import store
from pipeline.contract import Stage
from pipeline.dataset.ingested import SLICES
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.selection import holdout_slices
from tests.benchmarks.peers.texts import pairs
from tests.chain.year_inputs import PARTS_OF_SPEECH, WORDNET
from tests.pipeline.stages.planning import Bench

FRACTION, TASK = 0.1, "class"


class Text(NamedTuple):
    """A text, a query that it answers, and its class."""

    query: str
    text: str
    name: str


def docstrings(count: int) -> list[Text]:
    """So many docstrings with their packages."""
    return [Text(pair.query, pair.document, str(_row(pair)["package"])) for pair in pairs()[:count]]


def glosses(count: int) -> list[Text]:
    """So many glosses of all parts of speech, by chance but always the same; of equal ones one."""
    found: dict[str, Text] = {}
    for part in PARTS_OF_SPEECH:
        for line in (WORDNET / f"data.{part}").read_text(errors="replace").splitlines():
            if line.startswith(" "):
                continue
            synset, _, text = line.partition(" | ")
            _, file, _, _, word, *_ = synset.split()
            found.setdefault(text.strip().casefold(), Text(re.sub(r"\(.*\)$", "", word.replace("_", " ")), text.strip(), file))
    return random.Random(0).sample(sorted(found.values()), min(count, len(found)))


def is_held_out(text: str) -> bool:
    return normalized_hash(text) * SLICES >> 64 < holdout_slices(FRACTION)


def as_read(rows: list[Text], length: int) -> list[Text]:
    """The part of each text that the encoder reads."""
    tokens = AutoTokenizer.from_pretrained(initial_folder())(
        [one.text for one in rows], truncation=True, max_length=length, return_offsets_mapping=True
    )
    ends = (max(end for _, end in offsets) for offsets in tokens["offset_mapping"])
    return [one._replace(text=one.text[:end]) for one, end in zip(rows, ends, strict=True)]


def of_peer(train: list[Text], held: list[Text]) -> np.ndarray[Any, Any]:
    """The classes that TF-IDF with a logistic regression gives held-out texts."""
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    model = LogisticRegression(C=10.0, max_iter=1000)
    model.fit(words.fit_transform([one.text for one in train]), [one.name for one in train])
    return model.predict(words.transform([one.text for one in held]))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--texts", choices=("glosses", "docstrings"), default="glosses")
    arguments.add_argument("--rows", type=int, default=10_000)
    arguments.add_argument("--epochs", type=int, default=2)
    arguments.add_argument("--length", type=int, default=64, help="tokens of a text that the encoder reads")
    arguments.add_argument("--alone", action="store_true", help="without the pairs")
    arguments.add_argument("--unnormalized", action="store_true", help="embeddings as they are pooled")
    chosen = arguments.parse_args()
    if chosen.unnormalized and not chosen.alone:
        arguments.error("--unnormalized is for classes alone: the pairs' temperature is for embeddings of length 1")
    rows = (glosses if chosen.texts == "glosses" else docstrings)(chosen.rows)
    classes = sorted({one.name for one in rows})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scratch").mkdir()
        model = initial_folder()
        if chosen.unnormalized:
            model = Path(shutil.copytree(model, folder / "model"))
            modules = [one for one in store.read_json(str(model / "modules.json")) if not one["type"].endswith("Normalize")]
            store.write_json(str(model / "modules.json"), modules)
        bench = Bench(str(folder / "bucket"), folder / "scratch", model)
        bench.config["model"]["normalize"] = not chosen.unnormalized
        if chosen.alone:
            bench.config["gate"] = {"metric": "accuracy", "undecided": "accept"}
        else:
            bench.shard("pairs.jsonl", [{"query": one.query, "document": one.text, "task": "search"} for one in rows])
        bench.shard("classes.jsonl", [{"query": one.text, "document": one.name, "task": TASK} for one in rows])
        corpus = bench.shard("corpus.jsonl", [{"id": "one", "text": "one"}], folder="corpus")
        bench.config |= {
            "nodes": 1,
            "device": {"kind": "cpu", "ranks_per_node": 1, "precision": "fp32"},
            "data": {**bench.config["data"], "corpus": [corpus], "holdout_by": "query", "holdout_fraction": FRACTION},
            "train": {
                "tasks": {TASK: {"classes": classes}},
                "batch_by": "task",
                "epochs": chosen.epochs,
                "batch_size": 64,
                "query_length": chosen.length,
                "length": chosen.length,
                "learning_rate": 1e-4,
                "dropout": 0.1,
                "validate_every": 10**6,
                "validation_queries": 1,
                "checkpoint_every": 10**6,
                "keep_checkpoints": 1,
            },
            "evaluate": {"candidates": 2000},
            "embed": {**bench.config["embed"], "length": chosen.length},
        }
        bench.start("one")
        begun = time.monotonic()
        bench.stage(Stage.TRAIN, "one")
        seconds = time.monotonic() - begun
        bench.stage(Stage.EVALUATE, "one")
        scores = store.read_json(bench.paths("one").scorecard)
    found = scores["slices"][f"task:{TASK}"]
    train, held = ([one for one in rows if is_held_out(one.text) == side] for side in (False, True))
    assert len(held) == found["queries"], "the peer is measured on other texts"
    true = [one.name for one in held]
    frequent = Counter(one.name for one in train).most_common(1)[0][0]
    print(f"{len(train):,} {chosen.texts} of {len(classes)} classes, {len(held):,} held out; training took {seconds:.0f} s")
    print(f"most frequent class: accuracy {np.mean([one == frequent for one in true]):.3f}")
    for part, texts in (
        ("the same tokens", [as_read(train, chosen.length), as_read(held, chosen.length)]),
        ("whole texts", [train, held]),
    ):
        predicted = of_peer(*texts)
        print(
            f"TF-IDF and logistic regression, {part}: accuracy {accuracy_score(true, predicted):.3f}, "
            f"macro F1 {f1_score(true, predicted, labels=sorted({*true}), average='macro', zero_division=0):.3f}"
        )
    print(f"MiniLM: accuracy {found['new']['accuracy']:.3f}, macro F1 {found['new']['macro-f1']:.3f}")
    if not chosen.alone:
        print(f"nDCG@10 of the pairs: {scores['baseline']['ndcg@10']:.3f} before, {scores['new']['ndcg@10']:.3f} after")


if __name__ == "__main__":
    main()
