"""What training says about itself: `metrics.jsonl`, one JSON object per line, and the same numbers as TensorBoard events.

A line is `{step, time, loss, lr, grad_norm, pairs_per_second, padding_share}` (means since the line before) or
`{step, time, validation: {metric: value}}`.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("trnpipe")

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"


class MetricsLog:
    """Both files of one attempt; use as a context manager.

    Args:
        folder: gets METRICS_FILE and EVENTS_FOLDER.
        resumed: the checkpoint's copy of METRICS_FILE, which this attempt goes on with; None: from the beginning.
        step: steps already done; events that a lost attempt wrote beyond it are taken back.
    """

    def __init__(self, folder: Path, resumed: Path | None, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        if resumed is not None:
            shutil.copyfile(resumed, folder / METRICS_FILE)
        self._lines = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 - open as long as this object
        self._events = SummaryWriter(str(folder / EVENTS_FOLDER), purge_step=step + 1 if resumed else 0)  # type: ignore[no-untyped-call]

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._events.close()  # type: ignore[no-untyped-call]

    def training(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of the steps since the last line."""
        self._write({"step": step, "time": time.time(), **values})
        self._scalars("train", step, values)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Retrieval metrics after `step` steps."""
        self._write({"step": step, "time": time.time(), "validation": dict(values)})
        self._scalars("validation", step, values)

    def snapshot(self, folder: Path) -> None:
        """Copy both as they are now into `folder`."""
        self._lines.flush()
        self._events.flush()  # type: ignore[no-untyped-call]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._folder / METRICS_FILE, folder / METRICS_FILE)
        shutil.copytree(self._folder / EVENTS_FOLDER, folder / EVENTS_FOLDER, dirs_exist_ok=True)

    def _write(self, record: Mapping[str, object]) -> None:
        self._lines.write(json.dumps(record) + "\n")

    def _scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(f"{group}/{name}", value, step)  # type: ignore[no-untyped-call]
