"""Count the steps of a run and its rows by bucket, from document lengths and a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.typing import ArrayLike

from pipeline.config import RunConfig
from pipeline.dataset.sampler import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counts of a `TrainPlan`."""

    bucket_rows: dict[str, int]
    steps_per_epoch: int
    steps: int
    warmup_steps: int


def plan_schedule(lengths: ArrayLike, config: RunConfig, ranks: int) -> Schedule:
    """Return the order of a run's steps: each takes one global batch, of all ranks and all batches that it accumulates.

    Args:
        lengths: (rows,) document lengths in tokens, none above the longest bucket.
    """
    settings = config.train
    return Schedule(lengths, settings.buckets, settings.batch_size * settings.accumulation, ranks, config.seed)


def count_steps(lengths: ArrayLike, config: RunConfig, ranks: int) -> StepCounts:
    """Return the optimizer steps of a run, and its rows by bucket; arguments as in `plan_schedule`."""
    schedule = plan_schedule(lengths, config, ranks)
    steps = config.train.steps or config.train.epochs * schedule.steps_per_epoch
    return StepCounts(
        bucket_rows={str(bucket): rows for bucket, rows in schedule.bucket_rows.items()},
        steps_per_epoch=schedule.steps_per_epoch,
        steps=steps,
        warmup_steps=round(steps * config.train.warmup_fraction),
    )
