"""Steps of a run, from document lengths and a configuration."""

from __future__ import annotations

from pipeline.config import build_config
from pipeline.dataset.steps import count_steps, plan_schedule

LENGTHS = [10] * 50 + [30] * 14
TRAIN = {"batch_size": 4, "buckets": [16, 32], "query_length": 8, "epochs": 3, "warmup_fraction": 0.25}


def test_epochs_or_steps() -> None:
    counts = count_steps(LENGTHS, build_config({"train": TRAIN}), 2)
    # Eight rows a step: six full ones of the short bucket, whose two left over make the long one sixteen.
    assert counts.bucket_rows == {"16": 48, "32": 16}
    assert (counts.steps_per_epoch, counts.steps, counts.warmup_steps) == (8, 24, 6)
    assert count_steps(LENGTHS, build_config({"train": {**TRAIN, "steps": 5}}), 2).steps == 5


def test_accumulation_makes_steps_of_several_batches() -> None:
    config = build_config({"train": {**TRAIN, "accumulation": 2}})
    counts = count_steps(LENGTHS, config, 2)
    assert counts.steps_per_epoch == 4
    assert counts == count_steps(LENGTHS, build_config({"train": {**TRAIN, "batch_size": 8}}), 2)
    assert [len(step.rows) for step in plan_schedule(LENGTHS, config, 2).batches(0, 0, 4)] == [8] * 4
