"""The corpus: one document for each id, whatever the shards repeat."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.dataset.corpus import winners


@pytest.mark.parametrize(
    ("keys", "documents", "first", "conflicts"),
    [
        ([], [], [], []),
        ([3, 1, 2], [7, 7, 7], [1, 1, 1], [0, 0, 0]),
        ([3, 1, 3, 1, 3], [7, 8, 7, 9, 6], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]),
        # The last one repeats the document of a conflict, and not the first one's.
        ([0, 0, 0, 2**64 - 1], [5, 6, 6, 5], [1, 0, 0, 1], [0, 1, 1, 0]),
    ],
)
def test_the_first_of_a_key_wins(keys: list[int], documents: list[int], first: list[int], conflicts: list[int]) -> None:
    found = winners(np.array(keys, np.uint64), np.array(documents, np.uint64))
    assert [mask.astype(int).tolist() for mask in found] == [first, conflicts]


def test_winners_are_those_of_a_dictionary() -> None:
    rng = np.random.default_rng(0)
    keys, documents = rng.integers(0, 2000, 5000).astype(np.uint64), rng.integers(0, 2, 5000).astype(np.uint64)
    known: dict[int, int] = {}
    expected = [(key not in known, known.setdefault(key, text) != text) for key, text in zip(keys, documents, strict=True)]
    first, conflicts = winners(keys, documents)
    assert list(zip(first.tolist(), conflicts.tolist(), strict=True)) == expected
