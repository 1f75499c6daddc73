"""The way of a failure: from an exception in a rank, over `failure-RANK.json` in the node folder, to the run folder.

Also decides which of several failures is the cause: the first one, except that losing a peer is a consequence as long as another
failure explains more. The record's kind alone decides; no code compares messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.contract import Stage, StageFailure, now
from pipeline.errors import Defect, ExitCode, FailureKind, Transient, TrnpipeError, shown
from pipeline.files import write_atomically
from pipeline.run.world import NodeWorld

VALUES_KEPT = 20


def lost_peer(detail: str) -> Transient:
    """Return the failure of a rank that knows only that another one is gone."""
    return Transient(
        "another rank went away during a collective",
        value=detail,
        remedy="see the log of the node that failed first; the run is retried",
        kind=FailureKind.LOST_PEER,
    )


def unexpected(error: BaseException) -> TrnpipeError:
    """Return the failure of a process that ended with an exception that trnpipe does not know."""
    return Defect(
        f"{type(error).__name__}: {error}",
        rule="this is a mistake in trnpipe",
        remedy="report it with the log above",
        kind=FailureKind.UNEXPECTED,
    )


def describe(error: TrnpipeError, *, stage: Stage, run: str, node: NodeWorld, rank: int) -> StageFailure:
    """Return the record of an exception that happened just now on this rank."""
    values = error.value if isinstance(error.value, (list, tuple)) else [] if error.value is None else [error.value]
    return StageFailure(
        stage=stage.value,
        run=run,
        exit_code=int(error.exit_code),
        kind=error.kind,
        what=shown(error.what),
        value=[shown(value) for value in values[:VALUES_KEPT]],
        rule=shown(error.rule),
        remedy=shown(error.remedy),
        node=node.index,
        rank=rank,
        attempt=node.attempt,
        host=node.host,
        time=now(),
    )


def error_of(failure: StageFailure) -> TrnpipeError:
    """Return the exception that a record was made from, to raise in place of the rank that failed."""
    return TrnpipeError(
        failure.what,
        value=failure.value or None,
        rule=failure.rule,
        remedy=failure.remedy,
        exit_code=ExitCode.of(failure.exit_code),
        kind=failure.kind,
    )


def cause(failures: Iterable[StageFailure]) -> StageFailure | None:
    """Return the failure that explains the others: the earliest that is not merely a lost peer, else the earliest."""
    return min(failures, key=lambda failure: (failure.kind is FailureKind.LOST_PEER, failure.time), default=None)


def write_failure(folder: Path, failure: StageFailure) -> None:
    """Leave a rank's failure for its supervisor, whole or not at all."""
    write_atomically(_path(folder, failure.rank), failure.to_json())


def read_failure(folder: Path, rank: int) -> StageFailure | None:
    """Return the failure that a rank left, None if it left none."""
    path = _path(folder, rank)
    return StageFailure.from_json(path.read_bytes()) if path.exists() else None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"
