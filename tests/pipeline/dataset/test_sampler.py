"""The batch schedule: every row once per epoch, one global order for any number of ranks, and seeking that changes nothing."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset.sampler import MASKED, Schedule, ScheduledBatch

BUCKETS = (8, 16, 32)
LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=120)


def schedule(lengths: list[int], batch_size: int, ranks: int, seed: int = 3) -> Schedule:
    return Schedule(lengths, BUCKETS, batch_size, ranks, seed)


def global_batches(made: Schedule, ranks: int, epochs: int = 1) -> list[tuple[int, list[int]]]:
    """Bucket and rows of each global batch, put together from the ranks' shares."""
    count = epochs * made.steps_per_epoch
    shares = [list(made.batches(rank, 0, count)) for rank in range(ranks)]
    assert all([batch.step for batch in share] == list(range(count)) for share in shares)
    joined = []
    for batches in zip(*shares, strict=True):
        assert len({batch.bucket for batch in batches}) == 1
        joined.append((batches[0].bucket, [int(row) for batch in batches for row in batch.rows]))
    return joined


@given(LENGTHS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))
@settings(deadline=None)
def test_every_row_comes_exactly_once_per_epoch(lengths: list[int], batch_size: int, ranks: int, seed: int) -> None:
    made = schedule(lengths, batch_size, ranks, seed)
    batches = global_batches(made, ranks, epochs=2)
    for epoch in (batches[: made.steps_per_epoch], batches[made.steps_per_epoch :]):
        rows = [row for _, batch in epoch for row in batch if row != MASKED]
        assert sorted(rows) == list(range(len(lengths)))
        # Only one batch has fillers, and never nothing else.
        partial = [batch for _, batch in epoch if MASKED in batch]
        assert len(partial) <= 1
        assert all(any(row != MASKED for row in batch) for _, batch in epoch)
        assert all(lengths[row] <= bucket for bucket, batch in epoch for row in batch if row != MASKED)
    assert sum(made.bucket_rows.values()) == len(lengths)
    assert made.steps_per_epoch == sum(-(-rows // (batch_size * ranks)) for rows in made.bucket_rows.values())


@given(LENGTHS, st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]))
@settings(deadline=None)
def test_the_global_order_does_not_depend_on_the_number_of_ranks(lengths: list[int], shape: tuple[int, int]) -> None:
    ranks, batch_size = shape
    assert global_batches(schedule(lengths, batch_size, ranks), ranks) == global_batches(schedule(lengths, 12, 1), 1)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 40))
@settings(deadline=None)
def test_starting_late_continues_the_same_order(lengths: list[int], batch_size: int, ranks: int, start: int) -> None:
    uninterrupted = list(islice(schedule(lengths, batch_size, ranks).batches(ranks - 1), start, start + 12))
    resumed = list(schedule(lengths, batch_size, ranks).batches(ranks - 1, start, start + 12))
    assert _comparable(resumed) == _comparable(uninterrupted)


def _comparable(batches: list[ScheduledBatch]) -> list[tuple[int, int, list[int]]]:
    return [(batch.step, batch.bucket, batch.rows.tolist()) for batch in batches]


def test_epochs_and_seeds_differ() -> None:
    lengths = [4] * 64
    made = schedule(lengths, 4, 2)
    batches = global_batches(made, 2, epochs=2)
    first, second = batches[: made.steps_per_epoch], batches[made.steps_per_epoch :]
    assert first != second
    assert first != global_batches(schedule(lengths, 4, 2, seed=4), 2)
    # Seed 3's second epoch is not seed 4's first.
    assert second != global_batches(schedule(lengths, 4, 2, seed=4), 2)


def test_remainders_move_to_the_next_bucket_in_use() -> None:
    made = schedule([8] * 6 + [9] * 3, batch_size=2, ranks=2)
    assert made.bucket_rows == {8: 4, 16: 5}
    assert made.steps_per_epoch == 3
    # The longest bucket stays out of it: it would be one more graph to compile, for padding.
    assert schedule([8] * 5, batch_size=2, ranks=2).bucket_rows == {8: 5}


def test_batches_of_different_buckets_are_mixed() -> None:
    buckets = [bucket for bucket, _ in global_batches(schedule([8] * 200 + [30] * 200, 4, 1), 1)]
    changes = sum(left != right for left, right in pairwise(buckets))
    assert changes > 20  # 100 batches; in runs of one bucket each there would be 1


def test_the_order_is_the_one_of_earlier_releases() -> None:
    # A run that is resumed under a newer NumPy must go on in the order it began with.
    rows = [batch.rows.tolist() for batch in Schedule([4] * 6, BUCKETS, 3, 1, 0).batches(0, 0, 2)]
    assert rows == [[1, 2, 4], [0, 3, 5]]


@pytest.mark.parametrize("lengths", [[], [33]])
def test_impossible_lengths_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no rows|33 tokens"):
        schedule(lengths, 1, 1)


def test_rows_are_numpy_indices() -> None:
    batch = next(schedule([4] * 3, 4, 1).batches(0))
    assert batch.rows.dtype == np.int64
    assert batch.rows.shape == (4,)
