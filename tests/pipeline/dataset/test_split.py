"""What a run trains on: new rows, replayed rows, the hold-out, and that weeks agree with each other."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dataset.shards import InputFile, ShardScan
from pipeline.dataset.split import Selection, holdout_limit, select, split_new


def scan(name: str, rows: int, *, positive: bool = True) -> ShardScan:
    random = np.random.default_rng(int.from_bytes(name.encode(), "big"))
    return ShardScan(
        file=InputFile(uri=f"{name}.jsonl", sha256=hashlib.sha256(name.encode()).hexdigest(), size=1),
        bad_rows=0,
        ids=random.integers(0, 2**64, rows, np.uint64),
        documents=random.integers(0, 2**64, rows, np.uint64),
        positive=np.full(rows, positive),
    )


def chosen(new: list[ShardScan], earlier: list[ShardScan], **changed: float) -> Selection:
    settings = {"holdout_fraction": 0.1, "replay_fraction": 0.5, "distractors": 10, "seed": 1, **changed}
    return select(new, earlier, **settings)


def documents(selection: Selection, masks: list[np.ndarray]) -> set[int]:
    return {int(value) for each, mask in zip(selection.scans, masks, strict=True) for value in each.documents[mask]}


def test_shards_are_known_by_content() -> None:
    files = [scan(name, 0).file for name in ("a", "b", "c")]
    renamed = InputFile(uri="elsewhere.jsonl", sha256=files[1].sha256, size=1)
    new, earlier = split_new([files[0], renamed, files[2]], {files[0].sha256, files[1].sha256, "long gone"})
    assert [file.uri for file in new] == ["c.jsonl"]
    assert [file.uri for file in earlier] == ["a.jsonl", "elsewhere.jsonl"]


def test_new_rows_all_and_replayed_rows_exactly_the_fraction() -> None:
    selection = chosen([scan("n", 400)], [scan("a", 900), scan("b", 100)])
    new_rows = selection.train_rows(new=True)
    assert new_rows == 400 - int(selection.holdout[0].sum())
    assert selection.train_rows(new=False) == -(-new_rows // 2)
    assert all(mask.any() for mask in selection.train[1:])


def test_replay_takes_no_more_than_there_is_and_may_be_off() -> None:
    earlier = scan("a", 50)
    everything = chosen([scan("n", 400)], [earlier], replay_fraction=1.0)
    assert everything.train_rows(new=False) == 50 - int(everything.holdout[1].sum())
    assert chosen([scan("n", 400)], [earlier], replay_fraction=0.0).train_rows(new=False) == 0


def test_without_new_shards_the_fraction_is_of_the_earlier_rows() -> None:
    selection = chosen([], [scan("a", 1000)], replay_fraction=0.25)
    eligible = 1000 - int(selection.holdout[0].sum())
    assert selection.train_rows(new=False) == -(-eligible // 4)


def test_the_choice_is_stable_but_another_week_chooses_others() -> None:
    earlier = [scan("a", 1000)]

    def replayed(new: str, seed: int = 1) -> set[int]:
        selection = chosen([scan(new, 200)], earlier, seed=seed)
        return documents(selection, [np.zeros(200, bool), selection.train[1]])

    assert replayed("n") == replayed("n")
    assert replayed("n") != replayed("n", seed=2)
    assert replayed("n") != replayed("m")


def test_pairs_with_a_label_of_zero_are_not_trained_on() -> None:
    selection = chosen([scan("n", 100), scan("z", 100, positive=False)], [scan("y", 100, positive=False)])
    assert not selection.train[1].any()
    assert not selection.train[2].any()
    assert selection.holdout[1].any()


@given(st.floats(0.01, 0.9), st.integers(0, 60), st.floats(0, 2, allow_subnormal=False))
def test_the_sides_never_mix(fraction: float, distractors: int, replay: float) -> None:
    selection = chosen(
        [scan("n", 80)], [scan("a", 150)], holdout_fraction=fraction, distractors=distractors, replay_fraction=replay
    )
    held = documents(selection, selection.holdout)
    assert all(value < holdout_limit(fraction) for value in held)
    assert not held & documents(selection, selection.train)
    found = documents(selection, selection.distractors)
    training_side = sorted({int(value) for each in selection.scans for value in each.documents} - held)
    assert found == set(training_side[:distractors])


def test_a_document_keeps_its_side_in_every_week() -> None:
    first = chosen([scan("a", 500)], [])
    second = chosen([scan("b", 500)], [scan("a", 500)])
    assert np.array_equal(first.holdout[0], second.holdout[1])


@pytest.mark.parametrize("fraction", [0.02, 0.5])
def test_the_hold_out_is_about_its_fraction(fraction: float) -> None:
    held = int(chosen([scan("n", 20_000)], [], holdout_fraction=fraction).holdout[0].sum())
    assert held == pytest.approx(20_000 * fraction, rel=0.15)


def test_rows_with_one_document_share_a_side() -> None:
    one = scan("n", 300)
    doubled = ShardScan(
        file=one.file,
        bad_rows=0,
        ids=np.arange(600, dtype=np.uint64),
        documents=np.concatenate([one.documents, one.documents]),
        positive=np.ones(600, bool),
    )
    held = chosen([doubled], []).holdout[0]
    assert np.array_equal(held[:300], held[300:])
