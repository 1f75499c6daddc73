"""Digests of batches: equal for equal data, different for the smallest change."""

from __future__ import annotations

import numpy as np

from pipeline.training.digest import chain, digest_batch

BATCH = {
    "shape": np.array([8, 24, 64]),
    "valid": np.array([True, True, False]),
    "tokens": np.array([101, 7, 102], dtype=np.int32),
}


def test_any_change_is_seen() -> None:
    changed = [
        {**BATCH, "shape": np.array([8, 24, 65])},
        {**BATCH, "valid": np.array([True, False, True])},
        {**BATCH, "tokens": np.array([101, 8, 102], dtype=np.int32)},
        {**BATCH, "tokens": np.array([7, 101, 102], dtype=np.int32)},
        {**BATCH, "tokens": np.array([101, 7, 102], dtype=np.int64)},
        {**BATCH, "tokens": np.array([[101, 7, 102]], dtype=np.int32)},
        {"shape": BATCH["shape"], "valid": BATCH["valid"], "words": BATCH["tokens"]},
        {"shape": BATCH["shape"], "valid": BATCH["valid"]},
    ]
    digests = [digest_batch(BATCH), *(digest_batch(batch) for batch in changed)]
    assert len(set(digests)) == len(digests)


def test_neither_layout_nor_byte_order_matters() -> None:
    same = {
        "shape": BATCH["shape"].astype(BATCH["shape"].dtype.newbyteorder(">")),
        "valid": np.repeat(BATCH["valid"], 2)[::2],
        "tokens": BATCH["tokens"].copy(),
    }
    assert digest_batch(same) == digest_batch(BATCH)
    # Written down: the digest of a run must mean the same to every version that compares it.
    assert digest_batch({"tokens": BATCH["tokens"]}) == "aedb007e3e20750c953dc94290e697435c03b1d88326281050d935f1e16751bf"


def test_chain_stands_for_all_batches_in_their_order() -> None:
    one, two = digest_batch(BATCH), digest_batch({"tokens": BATCH["tokens"]})
    assert chain(chain("", one), two) == chain(chain("", one), two)
    assert len({chain("", one), one, chain(chain("", one), two), chain(chain("", two), one), chain(chain("", two), two)}) == 5
