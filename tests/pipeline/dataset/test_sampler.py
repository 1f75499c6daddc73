"""The order of pairs: each once an epoch, in bins that its texts fit into, the same for any ranks and partitions on disk."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset import external_sort
from pipeline.dataset.sampler import MASKED, Bin, read_order, write_order
from pipeline.errors import BadData
from pipeline.packing import BinShape, texts_per_row

LENGTHS = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 32)), min_size=1, max_size=120)
Lengths = Sequence[tuple[int, ...]]
SHAPE = BinShape(rows=2, length=32, pairs=5)


def order(
    lengths: Lengths,
    shape: BinShape = SHAPE,
    *,
    bins: int = 2,
    seed: int = 3,
    size: int = 50,
    limit: tuple[str, int] = ("epochs", 1),
) -> list[list[list[int]]]:
    """The rows of each bin of each step."""
    pieces = np.split(np.array(lengths, np.int32), range(size, len(lengths), size))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.bin"
        [steps] = write_order(path, pieces, len(lengths), shape, bins, seed, limit=limit)
        assert [one.name for one in Path(folder).iterdir()] == ["order.bin"]
        found = np.array(read_order(path, bins, shape.pairs))
    assert found.shape == (steps, bins * shape.pairs)
    return found.reshape(steps, bins, shape.pairs).tolist()


def rows_in(steps: list[list[list[int]]]) -> list[int]:
    return [row for step in steps for bin_ in step for row in bin_ if row != MASKED]


def mixed_lengths(count: int, shortest: int, longest: int, spread: float) -> Lengths:
    rng = np.random.default_rng(0)
    documents = np.clip(rng.lognormal(np.log(longest / 3), spread, count), shortest, longest).astype(int)
    return list(zip(np.clip(rng.lognormal(2.3, 0.4, count), 4, 32).astype(int).tolist(), documents.tolist(), strict=True))


@given(LENGTHS, st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
@settings(deadline=None)
def test_every_pair_comes_once_an_epoch_and_has_a_place_of_its_own(lengths: Lengths, bins: int, pairs: int, epochs: int) -> None:
    shape = BinShape(rows=2, length=32, pairs=pairs)
    steps = order(lengths, shape, bins=bins, limit=("epochs", epochs))
    assert sorted(rows_in(steps)) == sorted(list(range(len(lengths))) * epochs)
    for bin_ in itertools.chain(*steps):
        chosen = [row for row in bin_ if row != MASKED]
        assert bin_ == chosen + [MASKED] * (pairs - len(chosen))
        packed, taken = Bin(shape), np.zeros((shape.rows, shape.length), int)
        for row in chosen:
            places = packed.add(*lengths[row])
            assert places is not None
            for (there, start, text), length in zip(places, lengths[row], strict=True):
                assert text < texts_per_row(shape.length)
                assert not taken[there, start : start + length].any()
                taken[there, start : start + length] = 1
        assert taken.sum() == sum(sum(lengths[row]) for row in chosen)
    # Only the last step may lack bins.
    assert all(any(row != MASKED for row in bin_) for step in steps[:-1] for bin_ in step)


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 32), st.integers(0, 32), st.integers(0, 20)), min_size=1),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_negatives_are_in_the_bin_of_their_pair(lengths: list[tuple[int, ...]], pairs: int) -> None:
    shape = BinShape(rows=4, length=32, pairs=pairs, documents=3)
    steps = order(lengths, shape)
    assert sorted(rows_in(steps)) == list(range(len(lengths)))
    for bin_ in itertools.chain(*steps):
        packed, tokens = Bin(shape), 0
        for row in (row for row in bin_ if row != MASKED):
            present = [length for length in lengths[row] if length]
            places = packed.add(*present)
            assert places is not None
            assert len(places) == len(present)
            tokens += sum(present)
        assert tokens <= shape.tokens


def test_texts_without_room_leave_nothing_behind() -> None:
    packed = Bin(BinShape(rows=2, length=16, pairs=4, documents=2))
    assert packed.add(4, 12, 10) == [(0, 12, 1), (0, 0, 0), (1, 0, 0)]
    assert packed.add(4, 6, 6) is None
    assert packed.add(1, 5) is None
    assert packed.add(6) == [(1, 10, 1)]


def test_any_number_of_ranks_sees_the_same_bins() -> None:
    lengths = mixed_lengths(500, 2, 32, 0.5)
    four, one = order(lengths, bins=4), order(lengths, bins=1)
    assert [bin_ for step in four for bin_ in step if bin_[0] != MASKED] == [bin_ for step in one for bin_ in step]


@pytest.mark.parametrize(("shortest", "longest", "spread"), [(8, 256, 0.8), (12, 256, 0.4), (5, 80, 0.5)])
def test_rows_of_mixed_texts_are_nearly_full(shortest: int, longest: int, spread: float) -> None:
    lengths = mixed_lengths(4000, shortest, longest, spread)
    shape = BinShape(rows=8, length=256, pairs=64)
    bins = [bin_ for step in order(lengths, shape, bins=1) for bin_ in step]
    tokens = sum(sum(lengths[row]) for bin_ in bins for row in bin_ if row != MASKED)
    assert tokens / (len(bins) * shape.tokens) > 0.97


def test_a_pair_that_does_not_fit_waits_for_the_next_bin() -> None:
    rows = rows_in(order([(1, 32)] * 3 + [(4, 4)] * 30, BinShape(rows=2, length=32, pairs=50), bins=1))
    long = [place for place, row in enumerate(rows) if row < 3]
    # One fits into an empty bin with its query; the order is that of the shuffle, but for what waited.
    assert len(long) == 3
    steps = order([(1, 32)] * 3, BinShape(rows=2, length=32, pairs=50), bins=1)
    assert [len(rows_in([step])) for step in steps] == [1, 1, 1]


def test_pairs_too_many_for_a_bin_wait_as_well() -> None:
    steps = order([(1, 1)] * 20, BinShape(rows=2, length=64, pairs=3), bins=1)
    assert [len(rows_in([step])) for step in steps] == [3] * 6 + [2]


def test_steps_go_on_into_further_epochs() -> None:
    lengths = [(2, 6)] * 30
    steps = order(lengths, limit=("steps", 11))
    assert len(steps) == 11
    counts = np.bincount(rows_in(steps), minlength=30)
    # Eight pairs a step, as rows have room for four texts: all pairs in each of two epochs, and most a third time.
    assert (counts.min(), counts.max(), counts.sum()) == (2, 3, 88)
    assert order(lengths, limit=("steps", 2)) == steps[:2]


def test_partitions_and_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = mixed_lengths(5000, 1, 32, 0.5)
    whole = order(lengths)
    monkeypatch.setattr(external_sort, "PARTITION_ROWS", 100)
    assert order(lengths) == order(lengths, size=333) == whole


def test_epochs_and_seeds_differ() -> None:
    lengths = [(4, 4)] * 64
    found = [rows_in(order(lengths, seed=seed)) for seed in (3, 4)]
    twice = rows_in(order(lengths, limit=("epochs", 2)))
    assert found[0] == twice[:64]
    assert len({*map(tuple, found), tuple(twice[64:])}) == 3


def test_the_order_is_the_one_of_earlier_releases() -> None:
    # Training that another run resumes is planned again, perhaps with a newer NumPy, and continues in the order it began with.
    assert rows_in(order([(4, 4)] * 6, seed=0)) == [2, 0, 3, 5, 4, 1]


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(8, 33\) tokens does not fit"):
        order([(4, 4), (8, 33)])
    with pytest.raises(BadData, match="no row to train on"):
        order([])
