"""Read a run folder for the operator commands: from S3 or, for a local run, from the plain files that mirror its bucket.

Standard library only: the local run shows its progress from the same files without loading the pipeline's runtime.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from pipeline.contract import R, RunPaths, Stage, StageFailure, StageResult
from pipeline.errors import BadData

IN_FOLDER = RunPaths("")
"""The contract's names inside any run folder, each after a slash, which `read` and `listed` accept."""

TYPED_PATHS = "inputs.json"
"""File of a local run's state folder: URI of an input file's copy in the bucket -> its path as it was typed."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file of a run folder.

    Attributes:
        name: relative to the folder.
        modified: time of the last write, seconds since 1970.
        version: changes with the content where times are coarse (S3: ETag).
    """

    name: str
    modified: float
    version: str = ""


class RunFiles(Protocol):
    """The files of one run. Names are relative to its folder, as in `train/result.json` (`IN_FOLDER`)."""

    @property
    def root(self) -> str:
        """The folder's path or s3:// URI."""

    def read(self, name: str, last: int | None = None) -> bytes | None:
        """Return a file's content, or only its last bytes; None if there is no such file."""

    def listed(self, prefix: str) -> list[Listed]:
        """Return the files whose names have the prefix, sorted by name."""

    def as_typed(self, text: str) -> str:
        """Return a message with the paths that the user typed in place of the URIs of their copies."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The run folder of a local run.

    Args:
        folder: `STATE/bucket/runs/RUN_ID`.
    """

    folder: Path

    @property
    def root(self) -> str:
        return str(self.folder)

    def read(self, name: str, last: int | None = None) -> bytes | None:
        try:
            with open(self.folder / name.lstrip("/"), "rb") as stream:
                if last is not None:
                    stream.seek(max(0, stream.seek(0, 2) - last))
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def listed(self, prefix: str) -> list[Listed]:
        folder, _, start = prefix.lstrip("/").rpartition("/")
        found = []
        for path in sorted((self.folder / folder).glob(f"{start}*")):
            with suppress(FileNotFoundError):  # it was removed since the folder was listed
                found.append(Listed(path.relative_to(self.folder).as_posix(), path.stat().st_mtime))
        return found

    def as_typed(self, text: str) -> str:
        typed = self.folder.parents[2] / TYPED_PATHS
        for uri, path in json_object(typed.read_bytes() if typed.is_file() else None).items():
            text = text.replace(uri, path)
        return text


def json_object(data: bytes | str | None) -> dict[str, Any]:
    """Return a JSON object, empty if none can be read: a broken file must not end `trnpipe watch`."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """Return the number under these keys, one object inside the other; None where there is none."""
    found: Any = record
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, (int, float)) else None


def read_result(files: RunFiles, stage: Stage) -> StageResult | None:
    """Return a stage's result, None if none can be read."""
    return _record(files, IN_FOLDER.result(stage), StageResult)


def read_metrics(files: RunFiles, stage: Stage) -> dict[str, Any]:
    """Return the metrics of a stage's result, empty without one."""
    result = read_result(files, stage)
    return result.metrics if result is not None else {}


def read_failure(files: RunFiles, stage: Stage, since: datetime | None = None) -> StageFailure | None:
    """Return why a stage's newest attempt failed, None if no record says so, or if it is of an execution before `since`."""
    failure = _record(files, IN_FOLDER.failure(stage), StageFailure)
    return None if failure and since and failure.time and datetime.fromisoformat(failure.time) < since else failure


def _record(files: RunFiles, name: str, kind: type[R]) -> R | None:
    data = files.read(name)
    try:
        return kind.from_json(data) if data is not None else None
    except BadData:
        return None
