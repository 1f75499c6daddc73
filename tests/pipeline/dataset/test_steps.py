"""Steps of a run, from the lengths of its pairs and a configuration; and the bins that a configuration has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config import TrainConfig, build_config
from pipeline.dataset.row_files import SCHEMAS, RowWriter
from pipeline.dataset.sampler import MASKED, read_order
from pipeline.dataset.steps import ORDER, StepCounts, step_bins, write_steps
from pipeline.errors import BadConfig, BadData
from pipeline.packing import MICRO_BATCH_TOKENS, BinShape

DOCUMENTS = [10] * 50 + [30] * 14
"""Tokens of the documents; queries have 4."""

TRAIN = {"batch_size": 4, "length": 32, "query_length": 8, "warmup_fraction": 0.25}


def write_rows(folder: Path, documents: Sequence[int], tasks: Sequence[str | None], locales: Sequence[str | None]) -> None:
    """Write `train.arrow`."""
    columns = dict.fromkeys(SCHEMAS["train.arrow"].names, [0] * len(documents)) | {
        "query_tokens": [[1] * 4] * len(documents),
        "document_tokens": [[1] * tokens for tokens in documents],
        "new": [True] * len(documents),
        "task": tasks,
        "locale": locales,
    }
    with RowWriter(folder, 100, ["train.arrow"]) as writer:
        # In pieces, as plan writes them.
        for start in range(0, len(documents), 40):
            writer.add("train.arrow", pa.table({name: values[start : start + 40] for name, values in columns.items()}))


def steps(folder: Path, ranks: int = 2, **train: object) -> StepCounts:
    write_rows(folder, DOCUMENTS, [None] * 64, [None] * 64)
    return write_steps(folder, 64, build_config({"train": {**TRAIN, **train}}), ranks)


def test_epochs_or_steps(tmp_path: Path) -> None:
    # Eight pairs a step, three times sixty-four.
    assert steps(tmp_path, epochs=3) == StepCounts(steps=24, warmup_steps=6, strata={})
    assert {path.name for path in tmp_path.iterdir()} == {ORDER, "train.arrow"}
    assert steps(tmp_path, epochs=3, steps=5) == StepCounts(steps=5, warmup_steps=1, strata={})


def test_accumulation_makes_steps_of_several_batches(tmp_path: Path) -> None:
    assert steps(tmp_path, accumulation=2).steps == 4
    order = read_order(tmp_path / ORDER, 4, 4)
    assert order.shape == (4, 16)
    assert sorted(order[order != MASKED].tolist()) == list(range(64))


def test_a_locale_may_have_a_slash(tmp_path: Path) -> None:
    write_rows(tmp_path, DOCUMENTS, ["search"] * 64, ["zh/tw", "de"] * 32)
    settings = {**TRAIN, "batch_by": "locale", "tasks": {"search": {"weight": 2}}}
    counts = write_steps(tmp_path, 64, build_config({"train": settings}), 1)
    assert counts.strata == {"search/de": 8, "search/zh/tw": 8}


TASKS = ["search"] * 96 + ["browse"] * 24 + [None] * 8
LOCALES = (["de"] * 2 + ["en"] * 4 + ["fr"] * 2) * 16


def strata_of(folder: Path, ranks: int = 2, **train: object) -> tuple[StepCounts, list[list[int]]]:
    """The counts of 128 rows in three tasks and three locales, and the rows of each step of four pairs a rank."""
    if not (folder / "train.arrow").exists():
        write_rows(folder, [4] * 128, TASKS, LOCALES)
    bins = {"batch_size": 8 // ranks, "micro_batches": 2 // ranks, "length": 32, "batch_tokens": 128 // ranks}
    counts = write_steps(folder, 128, build_config({"train": {**TRAIN, **bins, **train}}), ranks)
    return counts, [step[step != MASKED].tolist() for step in read_order(folder / ORDER, 2, 4)]


@pytest.mark.parametrize(
    ("batch_by", "expected"),
    [
        ("task", {"": 1, "browse": 3, "search": 12}),
        (
            "locale",
            {"/de": 1, "/en": 1, "/fr": 1, "browse/de": 1, "browse/en": 2, "browse/fr": 1}
            | {"search/de": 3, "search/en": 6, "search/fr": 3},
        ),
    ],
)
def test_a_step_is_of_one_task_or_locale(batch_by: str, expected: dict[str, int], tmp_path: Path) -> None:
    counts, found = strata_of(tmp_path, batch_by=batch_by)
    assert counts.strata == expected
    assert (counts.steps, len(found)) == (sum(expected.values()), sum(expected.values()))
    assert sorted(row for step in found for row in step) == list(range(128))
    for step in found:
        names = {(TASKS[row], LOCALES[row] if batch_by == "locale" else None) for row in step}
        assert len(names) == 1
    # Spread over the run: any half of it has half of each.
    half = Counter(TASKS[step[0]] for step in found[: len(found) // 2])
    assert half["search"] == pytest.approx(6, abs=1)
    # The same for any number of ranks that share a step's bins.
    assert strata_of(tmp_path, ranks=1, batch_by=batch_by)[1] == found


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        # In the ratio of the rows, of their roots, of nearly equal numbers, and with factors.
        ({"steps": 16}, {"": 1, "browse": 3, "search": 12}),
        ({"sampling_temperature": 2}, {"": 3, "browse": 4, "search": 9}),
        ({"sampling_temperature": 1e9}, {"": 5, "browse": 5, "search": 6}),
        ({"tasks": {"browse": {"weight": 4}, "search": {"weight": 0.5}}}, {"": 1, "browse": 10, "search": 5}),
        ({"steps": 40, "tasks": {"search": {"weight": 0.125}}}, {"": 7, "browse": 22, "search": 11}),
    ],
)
def test_steps_are_shared_between_tasks(train: dict[str, object], expected: dict[str, int], tmp_path: Path) -> None:
    counts, found = strata_of(tmp_path, batch_by="task", **train)
    assert counts.strata == expected
    assert Counter(TASKS[step[0]] or "" for step in found) == expected
    for task in ("search", "browse"):
        times = Counter(row for step in found for row in step if TASKS[row] == task)
        # Epochs of its own: no row comes twice more often than another.
        assert max(times.values()) - min(times.get(row, 0) for row in range(128) if TASKS[row] == task) <= 1


def test_a_task_that_gets_next_to_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        strata_of(tmp_path, batch_by="task", tasks={"search": {"weight": 0.01}})
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "search: 0 of 16 steps (0.0 %) for 75.0 % of the rows"


def test_a_weight_of_a_task_without_rows(tmp_path: Path) -> None:
    with pytest.raises(BadData) as error:
        strata_of(tmp_path, batch_by="task", tasks={"serach": {"weight": 2}})
    assert error.value.value == ["serach"]
    assert "browse, search" in error.value.rule


def test_weights_need_batches_of_one_task() -> None:
    for train in ({"sampling_temperature": 2}, {"tasks": {"search": {"weight": 2}}}):
        with pytest.raises(BadConfig, match="batch_by to task or locale"):
            build_config({"train": train})


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
