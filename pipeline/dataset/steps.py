"""Count the steps of a run and its rows by bucket, and write the order of its batches, from document lengths and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.dataset.sampler import Layout, Lengths, lay_out, write_order


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counts of a `TrainPlan`."""

    bucket_rows: dict[str, int]
    steps_per_epoch: int
    steps: int
    warmup_steps: int


def order_file(epoch: int) -> str:
    """Return the name of an epoch's order among the row files."""
    return f"order-{epoch:05d}.npy"


def count_steps(lengths: Lengths, config: RunConfig, ranks: int) -> StepCounts:
    """Return the optimizer steps of a run, and its rows by bucket.

    Args:
        lengths: of the documents, none above the longest bucket.
    """
    return _counts(_layout(lengths, config, ranks), config)


def write_orders(folder: Path, lengths: Lengths, config: RunConfig, ranks: int) -> StepCounts:
    """Write the order of every epoch that the run's steps need; arguments as of `count_steps`."""
    layout = _layout(lengths, config, ranks)
    counts = _counts(layout, config)
    for epoch in range(-(-counts.steps // layout.steps)):
        write_order(folder / order_file(epoch), lengths, layout, config.seed, epoch)
    return counts


def _layout(lengths: Lengths, config: RunConfig, ranks: int) -> Layout:
    """Each step takes one global batch, of all ranks and all batches that it accumulates."""
    settings = config.train
    return lay_out(lengths, settings.buckets, settings.batch_size * settings.accumulation * ranks)


def _counts(layout: Layout, config: RunConfig) -> StepCounts:
    steps = config.train.steps or config.train.epochs * layout.steps
    return StepCounts(
        bucket_rows={str(bucket): rows for bucket, rows in layout.bucket_rows.items()},
        steps_per_epoch=layout.steps,
        steps=steps,
        warmup_steps=round(steps * config.train.warmup_fraction),
    )
