"""The steps of a run: written as the order of its pairs, and counted for the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.dataset.sampler import Lengths, write_order

ORDER = "order.bin"
"""Among the row files: see pipeline/dataset/sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counts of a `TrainPlan`."""

    steps: int
    warmup_steps: int

    @classmethod
    def of(cls, config: RunConfig, steps: int) -> StepCounts:
        return cls(steps=steps, warmup_steps=round(steps * config.train.warmup_fraction))


def step_bins(config: RunConfig, ranks: int) -> int:
    """Return the bins of an optimizer step: of all ranks, and of all batches that it accumulates."""
    return config.train.bins * config.train.accumulation * ranks


def write_steps(folder: Path, lengths: Lengths, rows: int, config: RunConfig, ranks: int) -> StepCounts:
    """Write the order of a run's pairs, and count its steps.

    Args:
        folder: gets ORDER.
        lengths: see `pipeline.dataset.sampler`; no pair is longer than a bin of `train` has room for.
        rows: number of pairs.
    """
    train = config.train
    limit = ("steps", train.steps) if train.steps else ("epochs", train.epochs)
    steps = write_order(folder / ORDER, lengths, rows, train.bin_shape, step_bins(config, ranks), config.seed, limit=limit)
    return StepCounts.of(config, steps)
