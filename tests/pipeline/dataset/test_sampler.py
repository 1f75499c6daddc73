"""The order of batches: every row once per epoch, whatever the global batch, and the same with any partitions on disk."""

from __future__ import annotations

import itertools
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset import external_sort
from pipeline.dataset.sampler import MASKED, Layout, lay_out, write_order

BUCKETS = (8, 16, 32)
LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=120)


def pieces(lengths: list[int], size: int = 50) -> list[np.ndarray]:
    return np.split(np.array(lengths, np.int32), range(size, len(lengths), size))


def layout(lengths: list[int], global_batch: int) -> Layout:
    return lay_out(pieces(lengths), BUCKETS, global_batch)


def order(lengths: list[int], global_batch: int, seed: int = 3, epoch: int = 0, size: int = 50) -> list[tuple[int, list[int]]]:
    """Bucket and rows of each global batch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.npy"
        write_order(path, pieces(lengths, size), layout(lengths, global_batch), seed, epoch)
        assert [one.name for one in Path(folder).iterdir()] == ["order.npy"]
        found = np.load(path)
    assert found.dtype == np.int32
    return [(row[0], row[1:]) for row in found.tolist()]


@given(LENGTHS, st.integers(1, 20), st.integers(0, 4), st.integers(0, 2))
@settings(deadline=None)
def test_every_row_comes_exactly_once_per_epoch(lengths: list[int], global_batch: int, seed: int, epoch: int) -> None:
    batches = order(lengths, global_batch, seed, epoch)
    assert sorted(row for _, batch in batches for row in batch if row != MASKED) == list(range(len(lengths)))
    # Only one batch has fillers, at its end, and never nothing else.
    partial = [batch for _, batch in batches if MASKED in batch]
    assert len(partial) <= 1
    assert all(batch[0] != MASKED and batch[batch.index(MASKED) :] == [MASKED] * batch.count(MASKED) for batch in partial)
    assert all(lengths[row] <= bucket for bucket, batch in batches for row in batch if row != MASKED)
    made = layout(lengths, global_batch)
    assert sum(made.bucket_rows.values()) == len(lengths)
    assert len(batches) == made.steps == sum(-(-rows // global_batch) for rows in made.bucket_rows.values())
    for bucket, rows in made.bucket_rows.items():
        assert rows == sum(row != MASKED for found, batch in batches if found == bucket for row in batch)


def test_partitions_and_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 33, 5000).tolist()
    whole = order(lengths, 8)
    monkeypatch.setattr(external_sort, "PARTITION_ROWS", 100)
    assert order(lengths, 8) == order(lengths, 8, size=333) == whole


def test_epochs_and_seeds_differ() -> None:
    found = [order([4] * 64, 8, seed, epoch) for seed, epoch in itertools.product((3, 4), (0, 1))]
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_remainders_move_to_the_next_bucket_in_use() -> None:
    made = layout([8] * 6 + [9] * 3, 4)
    assert made.bucket_rows == {8: 4, 16: 5}
    assert made.steps == 3
    # A bucket without rows of its own, and the longest one, stay out of it: they would be more graphs to compile, for padding.
    assert layout([8] * 6 + [30] * 3, 4).bucket_rows == {8: 4, 32: 5}
    assert layout([8] * 5, 4).bucket_rows == {8: 5}
    # Which rows move is drawn anew in each epoch.
    epochs = [order([8] * 6 + [9] * 2, 4, epoch=epoch) for epoch in range(8)]
    assert len({tuple(sorted(row for bucket, batch in epoch for row in batch if bucket == 16)) for epoch in epochs}) > 2


def test_batches_of_different_buckets_are_mixed() -> None:
    buckets = [bucket for bucket, _ in order([8] * 200 + [30] * 200, 4)]
    changes = sum(left != right for left, right in pairwise(buckets))
    assert changes > 20  # 100 batches; in runs of one bucket each there would be 1


def test_the_order_is_the_one_of_earlier_releases() -> None:
    # Training that another run resumes is planned again, perhaps with a newer NumPy, and goes on in the order it began with.
    assert [batch for _, batch in order([4] * 6, 3, seed=0)] == [[5, 2, 0], [3, 1, 4]]


@pytest.mark.parametrize(("lengths", "words"), [([], "no rows"), ([33, 40, 8], "2 documents")])
def test_impossible_lengths_are_refused(lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout(lengths, 1)
