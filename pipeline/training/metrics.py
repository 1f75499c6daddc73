"""What training says about itself: `metrics.jsonl`, one JSON object per line, the same numbers as TensorBoard events, and those
that operators watch as CloudWatch's (pipeline/run/cloudwatch).

A line is `{step, time, loss, lr, grad_norm, pairs_per_second, step_seconds, data_wait_share, padding_share,
checkpoint_stall_seconds, data_digest}` (means since the line before, the stall their sum; pipeline/training/digest) or `{step,
time, validation: {metric: value}}`. What each query got at an evaluation stands in `validation/step-00000100.parquet`
(pipeline/evaluation/query_values).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract import Metric
from pipeline.run.cloudwatch import EmbeddedMetrics

if TYPE_CHECKING:
    from pipeline.evaluation.query_values import QueryValues

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"
VALIDATION_FOLDER = "validation"

WATCHED = {
    "loss": Metric.LOSS,
    "pairs_per_second": Metric.PAIRS_PER_SECOND,
    "step_seconds": Metric.STEP_SECONDS,
    "data_wait_share": Metric.DATA_WAIT_SHARE,
    "checkpoint_stall_seconds": Metric.CHECKPOINT_STALL_SECONDS,
}


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """The files of one attempt; use as a context manager.

    Args:
        folder: gets METRICS_FILE, EVENTS_FOLDER and VALIDATION_FOLDER.
        resumed: the checkpoint's copy of METRICS_FILE, which this attempt continues; None: from the beginning.
        step: steps already done; events that a lost attempt wrote beyond it are taken back.
        cloudwatch: gets the WATCHED ones; None: no CloudWatch.
    """

    def __init__(self, folder: Path, resumed: Path | None, step: int, cloudwatch: EmbeddedMetrics | None = None) -> None:
        # Here, because it loads torch, which those who only want the names of the files do without.
        from torch.utils.tensorboard import SummaryWriter

        (folder / VALIDATION_FOLDER).mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._cloudwatch = cloudwatch
        if resumed is not None:
            shutil.copyfile(resumed, folder / METRICS_FILE)
        self._lines = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 - open as long as this object
        self._events = SummaryWriter(str(folder / EVENTS_FOLDER), purge_step=step + 1 if resumed else 0)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._events.close()  # type: ignore[no-untyped-call]

    def training(self, step: int, values: Mapping[str, float], data_digest: str | None = None) -> None:
        """Numbers of the steps since the last line, and the digest of all data so far."""
        self._write({"step": step, "time": time.time(), **values, **({"data_digest": data_digest} if data_digest else {})})
        self._scalars("train", step, values)
        if self._cloudwatch:
            self._cloudwatch.write({metric: values[name] for name, metric in WATCHED.items() if name in values}, Step=step)

    def validation(self, step: int, found: QueryValues) -> None:
        """What every query got after `step` steps."""
        means = found.means()
        self._write({"step": step, "time": time.time(), "validation": means})
        self._scalars("validation", step, means)
        found.write(self._folder / VALIDATION_FOLDER / f"step-{step:08d}.parquet")

    def snapshot(self, folder: Path) -> None:
        """Copy lines and events as they are now into `folder`; evaluations since the last snapshot move there."""
        self._lines.flush()
        self._events.flush()  # type: ignore[no-untyped-call]
        (folder / VALIDATION_FOLDER).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._folder / METRICS_FILE, folder / METRICS_FILE)
        shutil.copytree(self._folder / EVENTS_FOLDER, folder / EVENTS_FOLDER, dirs_exist_ok=True)
        for path in sorted((self._folder / VALIDATION_FOLDER).iterdir()):
            # Moved, not copied: these files never change, so each is uploaded once.
            shutil.move(path, folder / VALIDATION_FOLDER / path.name)

    def _write(self, record: Mapping[str, object]) -> None:
        self._lines.write(json.dumps(record) + "\n")

    def _scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(f"{group}/{name}", value, step)  # type: ignore[no-untyped-call]
