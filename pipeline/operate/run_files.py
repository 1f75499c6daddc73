"""A run folder as the operator commands read it: from S3 or, of a local run, as the plain files that mirror its bucket.

Standard library only: the local run, which loads nothing of the pipeline's runtime, shows its progress from the same files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.contract import RunPaths, Stage, StageFailure, StageResult
from pipeline.errors import BadData

IN_FOLDER = RunPaths("")
"""The contract's names inside any run folder, each after a slash: `read` and `listed` take them so, too."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file of a run folder.

    Attributes:
        name: relative to the folder.
        modified: when it was written last, seconds since 1970.
        version: changes with the content where times are coarse (S3: ETag).
    """

    name: str
    modified: float
    version: str = ""


class RunFiles(Protocol):
    """The files of one run. Names are relative to its folder, as in `train/result.json` (`IN_FOLDER`)."""

    @property
    def root(self) -> str:
        """The folder as people may use it, a path or an s3:// URI."""

    def read(self, name: str, last: int | None = None) -> bytes | None:
        """A file's content, or only its last bytes; None when there is no such file."""

    def listed(self, prefix: str) -> list[Listed]:
        """The files whose names begin so, in the order of their names."""

    def has(self, prefix: str) -> bool:
        """Whether there is any file whose name begins so."""


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
            try:
                found.append(Listed(path.relative_to(self.folder).as_posix(), path.stat().st_mtime))
            except FileNotFoundError:
                # Replaced or removed between the two looks.
                continue
        return found

    def has(self, prefix: str) -> bool:
        return bool(self.listed(prefix))


def json_object(data: bytes | str | None) -> dict[str, Any]:
    """Return a JSON object, empty when there is none that can be read: what people watch must not stop them watching."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_result(files: RunFiles, stage: Stage) -> StageResult | None:
    """A stage's result, None when there is none that can be read."""
    data = files.read(IN_FOLDER.result(stage))
    try:
        return StageResult.from_json(data) if data is not None else None
    except BadData:
        return None


def read_metrics(files: RunFiles, stage: Stage) -> dict[str, Any]:
    """The metrics of a stage's result, empty without one."""
    result = read_result(files, stage)
    return result.metrics if result is not None else {}


def read_failure(files: RunFiles, stage: Stage) -> StageFailure | None:
    """Why a stage's newest attempt failed, None when nothing says so."""
    data = files.read(IN_FOLDER.failure(stage))
    try:
        return StageFailure.from_json(data) if data is not None else None
    except BadData:
        return None
