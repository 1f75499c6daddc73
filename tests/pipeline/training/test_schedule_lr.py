"""The learning rate's shape: rise, peak, fall."""

from __future__ import annotations

import math

import pytest

from pipeline.config import TrainConfig
from pipeline.training.learning_rate import learning_rate


def rates(schedule: str, steps: int = 100, warmup: int = 10, final: float = 0.1) -> list[float]:
    config = TrainConfig(schedule=schedule, learning_rate=2.0, final_lr_fraction=final)
    return [learning_rate(config, step, steps, warmup) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_rise_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    assert rates(schedule)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates(schedule)[10] == pytest.approx(2.0)


def test_fall() -> None:
    assert rates("constant")[10:] == [2.0] * 90
    linear, cosine = rates("linear"), rates("cosine")
    assert linear[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert cosine[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert cosine[32] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 22 / 90))))
    for falling in (linear[10:], cosine[10:]):
        assert falling == sorted(falling, reverse=True)
        assert 0.2 < falling[-1] < 0.23


def test_runs_of_nothing_but_warmup() -> None:
    assert rates("cosine", steps=3, warmup=3) == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert rates("cosine", steps=1, warmup=0) == [2.0]
