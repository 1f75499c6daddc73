"""The steps of a run: written as the order of its pairs, and counted for the learning rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig, TrainConfig
from pipeline.dataset.row_files import PairLengths, PairStrata
from pipeline.dataset.sampler import Strata, write_order
from pipeline.errors import BadData
from pipeline.log import log

ORDER = "order.bin"
"""Among the row files: see pipeline/dataset/sampler."""

STRATUM_COLUMNS: Mapping[str, tuple[str, ...]] = {"any": (), "task": ("task",), "locale": ("task", "locale")}
"""`train.batch_by` -> columns whose values a step's pairs share."""

STARVED = 0.1
"""A stratum with less than this part of the steps that its rows would bring is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counts of a `TrainPlan`."""

    steps: int
    warmup_steps: int
    strata: dict[str, int]

    @classmethod
    def of(cls, config: RunConfig, steps: int, strata: Mapping[str, int] = {}) -> StepCounts:
        return cls(steps=steps, warmup_steps=round(steps * config.train.warmup_fraction), strata=dict(strata))


def step_bins(config: RunConfig, ranks: int) -> int:
    """Return the bins of an optimizer step: of all ranks, and of all batches that it accumulates."""
    return config.train.bins * config.train.accumulation * ranks


def write_steps(folder: Path, rows: int, config: RunConfig, ranks: int) -> StepCounts:
    """Write the order of a run's pairs, and count its steps.

    Args:
        folder: has `train.arrow`, and gets ORDER; no pair is longer than a bin of `train` has room for.
        rows: number of pairs.

    Raises:
        BadData: `train.tasks` names a task that has no rows.
    """
    train, path = config.train, folder / "train.arrow"
    limit = ("steps", train.steps) if train.steps else ("epochs", train.epochs)
    columns = STRATUM_COLUMNS[train.batch_by]
    found = PairStrata(path, columns) if columns else None
    rows_of = found.rows if found else {}
    strata = Strata(found, list(rows_of.values()), _weights(rows_of, train)) if found else None
    counts = write_order(
        folder / ORDER,
        PairLengths(path),
        rows,
        train.bin_shape,
        step_bins(config, ranks),
        config.seed,
        limit=limit,
        strata=strata,
    )
    named = dict(zip(rows_of, counts, strict=False))
    for name, steps in named.items():
        share, proportional = steps / sum(counts), rows_of[name] / rows
        level = logging.WARNING if share < STARVED * proportional else logging.INFO
        log.log(
            level,
            "%s: %d of %d steps (%.1f %%) for %.1f %% of the rows",
            name or "no task",
            steps,
            sum(counts),
            100 * share,
            100 * proportional,
        )
    return StepCounts.of(config, sum(counts), named)


def _weights(rows: Mapping[str, int], train: TrainConfig) -> list[float] | None:
    """Return the weight of each stratum: (rows ** (1 / sampling_temperature)) times its task's; None: proportional to rows.

    Temperature: Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation in the Wild", arXiv:1907.05019.
    """
    tasks = [name.partition("/")[0] if train.batch_by == "locale" else name for name in rows]
    if unknown := sorted(train.tasks.keys() - set(tasks)):
        raise BadData(
            "a task has no rows to train on",
            value=unknown,
            rule=f"train.tasks names tasks of the rows: {', '.join(filter(None, sorted(set(tasks))))}",
            remedy="correct the name; add rows; or let seen ones come again with data.replay_fraction",
        )
    if train.sampling_temperature == 1 and all(task.weight == 1 for task in train.tasks.values()):
        return None
    return [
        count ** (1 / train.sampling_temperature) * (train.tasks[task].weight if task in train.tasks else 1.0)
        for task, count in zip(tasks, rows.values(), strict=True)
    ]
