"""Steps of a run, from the lengths of its pairs and a configuration; and the bins that a configuration has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import TrainConfig, build_config
from pipeline.dataset.sampler import MASKED, read_order
from pipeline.dataset.steps import ORDER, StepCounts, step_bins, write_steps
from pipeline.packing import MICRO_BATCH_TOKENS, BinShape

LENGTHS = [np.array([[4, 10]] * 50 + [[4, 30]] * 14, np.int32)]
TRAIN = {"batch_size": 4, "length": 32, "query_length": 8, "warmup_fraction": 0.25}


def steps(folder: Path, ranks: int = 2, **train: object) -> StepCounts:
    return write_steps(folder, LENGTHS, 64, build_config({"train": {**TRAIN, **train}}), ranks)


def test_epochs_or_steps(tmp_path: Path) -> None:
    # Eight pairs a step, three times sixty-four.
    assert steps(tmp_path, epochs=3) == StepCounts(steps=24, warmup_steps=6)
    assert [path.name for path in tmp_path.iterdir()] == [ORDER]
    assert steps(tmp_path, epochs=3, steps=5) == StepCounts(steps=5, warmup_steps=1)


def test_accumulation_makes_steps_of_several_batches(tmp_path: Path) -> None:
    assert steps(tmp_path, accumulation=2).steps == 4
    order = read_order(tmp_path / ORDER, 4, 4)
    assert order.shape == (4, 16)
    assert sorted(order[order != MASKED].tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("train", "bins", "shape"),
    [
        # 64 tokens a pair, and at most 2,048 at a time.
        ({}, 4, BinShape(8, 256, 32)),
        ({"batch_size": 8}, 1, BinShape(2, 256, 8)),
        ({"batch_size": 100}, 4, BinShape(7, 256, 25)),
        ({"batch_size": 61}, 61, BinShape(2, 256, 1)),
        ({"batch_tokens": 4096}, 2, BinShape(8, 256, 64)),
        ({"batch_tokens": 4097}, 4, BinShape(5, 256, 32)),
        ({"length": 8192}, 1, BinShape(2, 8192, 128)),
        ({"micro_batches": 1}, 1, BinShape(32, 256, 128)),
        ({"micro_batches": 64}, 64, BinShape(2, 256, 2)),
    ],
)
def test_bins(train: dict[str, int], bins: int, shape: BinShape) -> None:
    config = TrainConfig(**train)
    assert (config.bins, config.bin_shape) == (bins, shape)
    # The longest query and document have room.
    assert shape.tokens >= config.length + config.query_length
    assert bins * shape.pairs == config.batch_size
    assert step_bins(build_config({"train": {**train, "accumulation": 3}}), 5) == 15 * bins
    assert MICRO_BATCH_TOKENS == 2048
