"""How a failure travels: from an exception in a rank, over `failure-RANK.json` in the node folder, to the run folder.

Also decides which of several failures is the cause: the first one, except that losing a peer is a consequence as long as
anybody has something better to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.contract import Stage, StageFailure, now
from pipeline.errors import ExitCode, Transient, TrnpipeError, shown
from pipeline.files import write_atomically
from pipeline.run.world import NodeWorld

LOST_PEER = "another rank went away during a collective"
"""What a rank says that noticed only that another one is gone."""

TOLD_TO_END = "the node was told to end"
"""How the failure of a terminated node begins: by Batch, an operator, or a host that is taken away."""

UNEXPECTED_RULE = "this is a mistake in trnpipe"
"""The rule of a failure that is an unexpected exception, which may have a better explanation in the log."""

VALUES_KEPT = 20


def lost_peer(detail: str) -> Transient:
    return Transient(LOST_PEER, value=detail, remedy="see the log of the node that failed first; the run is retried")


def describe(error: TrnpipeError, *, stage: Stage, run: str, node: NodeWorld, rank: int) -> StageFailure:
    """The record of an exception that happened just now on this rank."""
    values = error.value if isinstance(error.value, (list, tuple)) else [] if error.value is None else [error.value]
    return StageFailure(
        stage=stage.value,
        run=run,
        exit_code=int(error.exit_code),
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
    """The exception that a record was made of, to be raised in place of the rank that failed."""
    error = TrnpipeError(failure.what, value=failure.value or None, rule=failure.rule, remedy=failure.remedy)
    error.exit_code = ExitCode(failure.exit_code)
    return error


def lines(failure: StageFailure) -> list[str]:
    """The four parts as they end a log."""
    return TrnpipeError(failure.what, value=failure.value or None, rule=failure.rule, remedy=failure.remedy).lines()


def cause(failures: Iterable[StageFailure]) -> StageFailure | None:
    """The failure that explains the others: the earliest that is not merely a lost peer, else the earliest."""
    return min(failures, key=lambda failure: (failure.what == LOST_PEER, failure.time), default=None)


def is_lost_peer(failure: StageFailure) -> bool:
    return failure.what == LOST_PEER


def is_interruption(failure: StageFailure) -> bool:
    return failure.what.startswith(TOLD_TO_END)


def is_unexpected(failure: StageFailure) -> bool:
    return failure.rule == UNEXPECTED_RULE


def write_failure(folder: Path, failure: StageFailure) -> None:
    """Leave a rank's failure for its supervisor; whole or not at all."""
    write_atomically(_path(folder, failure.rank), failure.to_json())


def read_failure(folder: Path, rank: int) -> StageFailure | None:
    try:
        return StageFailure.from_json(_path(folder, rank).read_bytes())
    except FileNotFoundError:
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"
