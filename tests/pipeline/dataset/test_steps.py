"""Steps of a run, from document lengths and a configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.config import build_config
from pipeline.dataset.steps import count_steps, write_orders

LENGTHS = [np.array([10] * 50 + [30] * 14, np.int32)]
TRAIN = {"batch_size": 4, "buckets": [16, 32], "query_length": 8, "epochs": 3, "warmup_fraction": 0.25}


def test_epochs_or_steps(tmp_path: Path) -> None:
    config = build_config({"train": TRAIN})
    counts = count_steps(LENGTHS, config, 2)
    # Eight rows a step: six full ones of the short bucket, whose two left over make the long one sixteen.
    assert counts.bucket_rows == {"16": 48, "32": 16}
    assert (counts.steps_per_epoch, counts.steps, counts.warmup_steps) == (8, 24, 6)
    assert write_orders(tmp_path, LENGTHS, config, 2) == counts
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"order-0000{epoch}.npy" for epoch in range(3)]
    assert count_steps(LENGTHS, build_config({"train": {**TRAIN, "steps": 5}}), 2).steps == 5


def test_there_are_as_many_orders_as_the_steps_need(tmp_path: Path) -> None:
    write_orders(tmp_path, LENGTHS, build_config({"train": {**TRAIN, "steps": 9}}), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order-00000.npy", "order-00001.npy"]


def test_accumulation_makes_steps_of_several_batches(tmp_path: Path) -> None:
    config = build_config({"train": {**TRAIN, "accumulation": 2}})
    counts = write_orders(tmp_path, LENGTHS, config, 2)
    assert counts.steps_per_epoch == 4
    assert counts == count_steps(LENGTHS, build_config({"train": {**TRAIN, "batch_size": 8}}), 2)
    assert np.load(tmp_path / "order-00000.npy").shape == (4, 1 + 16)
