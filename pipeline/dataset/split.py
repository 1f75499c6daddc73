"""Choose the rows that a run trains on: new shards since its parent, and a share of the earlier rows again, less the hold-out.

A row's side depends on its document's text alone, so it is the same in every week. The replayed rows depend on the seed and on
the new shards: the same run chooses the same rows again, another week chooses others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shards import InputFile, ShardScan

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The use of each training shard's good rows; all lists are parallel to `scans`.

    Attributes:
        scans: new shards, then earlier ones.
        new: whether the shard is new.
        holdout: rows on the hold-out side.
        train: rows trained on.
        distractors: rows on the training side whose document is an additional candidate of the evaluation.
    """

    scans: list[ShardScan]
    new: list[bool]
    holdout: list[Mask]
    train: list[Mask]
    distractors: list[Mask]

    def train_rows(self, *, new: bool) -> int:
        """Return the number of rows to train on, of new or of earlier shards."""
        return sum(int(mask.sum()) for mask, is_new in zip(self.train, self.new, strict=True) if is_new == new)


def split_new(files: Iterable[InputFile], seen: Iterable[str]) -> tuple[list[InputFile], list[InputFile]]:
    """Return the shards that the parent was not trained on, and the others; a shard's identity is its content, not its name."""
    known = set(seen)
    new: list[InputFile] = []
    earlier: list[InputFile] = []
    for file in files:
        (earlier if file.sha256 in known else new).append(file)
    return new, earlier


def holdout_limit(fraction: float) -> int:
    """Return the limit below which a document's normalized hash means that it is held out."""
    return int(fraction * 2**64)


def select(
    new: Sequence[ShardScan],
    earlier: Sequence[ShardScan],
    *,
    holdout_fraction: float,
    replay_fraction: float,
    distractors: int,
    seed: int,
) -> Selection:
    """Decide for every good row whether it is trained on, held out, or a distractor of the evaluation.

    The run replays `replay_fraction` x as many earlier rows as there are new ones; without any new shard, `replay_fraction` of
    the earlier rows. Rows with a label of 0 or less are not pairs to train on.

    Args:
        distractors: distinct documents of the training side to choose, those with the smallest hashes: the same ones
            week after week, but for those of new documents.
    """
    scans = [*new, *earlier]
    limit = np.uint64(holdout_limit(holdout_fraction))
    holdout = [(scan.documents < limit) & scan.usable for scan in scans]
    trainable = [scan.positive & scan.usable & ~held for scan, held in zip(scans, holdout, strict=True)]
    new_masks, earlier_masks = trainable[: len(new)], trainable[len(new) :]
    new_rows = sum(int(mask.sum()) for mask in new_masks)
    earlier_rows = sum(int(mask.sum()) for mask in earlier_masks)
    replay_rows = min(earlier_rows, math.ceil(replay_fraction * (new_rows if new else earlier_rows)))
    salt = _salt(seed, [scan.file.sha256 for scan in new])
    return Selection(
        scans=scans,
        new=[True] * len(new) + [False] * len(earlier),
        holdout=holdout,
        train=new_masks + _replayed(earlier, earlier_masks, replay_rows, salt),
        distractors=_distractors(scans, holdout, distractors),
    )


def _replayed(scans: Sequence[ShardScan], eligible: Sequence[Mask], count: int, salt: np.uint64) -> list[Mask]:
    """Return exactly `count` of the eligible rows: those with the smallest salted hashes."""
    if count == 0:
        return [np.zeros(scan.rows, np.bool_) for scan in scans]
    keys = np.concatenate([_mixed(scan.ids[mask] ^ salt) for scan, mask in zip(scans, eligible, strict=True)])
    chosen = np.zeros(len(keys), np.bool_)
    chosen[np.argpartition(keys, count - 1)[:count]] = True
    masks, start = [], 0
    for mask in eligible:
        stop = start + int(mask.sum())
        taken = np.zeros(len(mask), np.bool_)
        taken[mask] = chosen[start:stop]
        masks.append(taken)
        start = stop
    return masks


def _distractors(scans: Sequence[ShardScan], holdout: Sequence[Mask], count: int) -> list[Mask]:
    smallest = np.empty(0, np.uint64)
    for scan, held in zip(scans, holdout, strict=True):
        smallest = np.unique(np.concatenate([smallest, scan.documents[scan.usable & ~held]]))[:count]
    if not len(smallest):
        return [np.zeros(scan.rows, np.bool_) for scan in scans]
    # The training side is everything above the hold-out limit, so its smallest hashes are one interval.
    return [(scan.documents <= smallest[-1]) & scan.usable & ~held for scan, held in zip(scans, holdout, strict=True)]


def _salt(seed: int, new: Sequence[str]) -> np.uint64:
    digest = hashlib.sha256(":".join([str(seed), *sorted(new)]).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "big"))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: a bijection whose every output bit depends on every input bit, wrapping as meant."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
