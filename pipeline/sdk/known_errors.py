"""Matches lines of a log with the table of known errors, known_errors.yaml, and turns them into failures of this node."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import BadConfig, BadData, Defect, ExitCode, Transient, TrnpipeError, UnhealthyHost
from pipeline.run import failure
from pipeline.run.world import NodeWorld

LINE_CHARACTERS = 500
"""Characters of a line in a failure; an input dump's line has thousands."""

SEARCHED_CHARACTERS = 4096
"""Characters searched: known errors stand near the beginning, and some patterns take the square of a line's length."""

BENIGN = re.compile(
    r"DEREG_MR \(opcode 8\) comp_status 7"  # a process that ends deregisters what the driver has deregistered
    r"|OpKernel \('op: \"T[Pp][Uu]"
    r"|\(NON-FATAL, Ignoring\)"
)
"""Lines that look like errors and are harmless (nrt-troubleshoot.rst, training-troubleshooting.rst)."""

ERRORS = {error.exit_code: error for error in (BadConfig, BadData, Defect, Transient, UnhealthyHost)}


class Action(Enum):
    """The consequence of a line for the attempt that printed it.

    RETRY: again, on any host. REPLACE: again, without this host. STOP: not again without a change. FOLLOW:
    another rank is gone, which has its own line somewhere. WAIT: nothing by itself; the reason why a stalled rank waits.
    """

    RETRY = "retry here"
    REPLACE = "replace host"
    STOP = "stop"
    FOLLOW = "follow-up"
    WAIT = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """A row of the table, which explains its columns; `place` is its number, and `pattern` all that matches it."""

    place: int
    name: str
    pattern: re.Pattern[str]
    meaning: str
    action: Action
    exit_code: ExitCode
    remedy: str
    source: str
    gang_only: bool = False
    alone_only: bool = False


def _known_error(place: int, row: dict[str, Any]) -> KnownError:
    status = row.pop("status", {})
    numbers = (number for number in status.values() if number is not None)
    patterns = [
        *row.pop("patterns", []),
        *(rf"\b{name}\b" for name in status),
        *(rf"(?:completed with err:|\bstatus ?[=:]) ?{number}\b" for number in numbers),
    ]
    action, exit_code = Action(row.pop("action")), ExitCode(row.pop("exit_code"))
    return KnownError(place=place, pattern=re.compile("|".join(patterns)), action=action, exit_code=exit_code, **row)


TABLE = tuple(
    _known_error(place, row) for place, row in enumerate(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")))
)
_ANY = re.compile("|".join(f"(?:{row.pattern.pattern})" for row in TABLE))
"""One search per line; nearly all lines match nothing."""


@dataclass(frozen=True, slots=True)
class LogFinding:
    """A line of the log that explains something, and its row of the table."""

    row: KnownError
    line: str

    @property
    def is_cause(self) -> bool:
        return self.row.action not in (Action.FOLLOW, Action.WAIT)

    def error(self, node: NodeWorld) -> TrnpipeError:
        """The finding as the failure of the node in whose log the line stands."""
        if not self.is_cause:
            return failure.lost_peer(self.line)
        return ERRORS[self.row.exit_code](
            f"node {node.index} ({node.host}): {self.row.meaning}",
            value=self.line,
            rule=f"{self.row.action.value} ({self.row.name}: {self.row.source})",
            remedy=self.row.remedy,
        )


def match(line: str, *, nodes: int = 1) -> LogFinding | None:
    """Return the first row of the table that matches a line of a gang of `nodes` nodes, or None."""
    line = line[:SEARCHED_CHARACTERS]
    if not _ANY.search(line) or BENIGN.search(line):
        return None
    rows = (row for row in TABLE if row.pattern.search(line) and not (row.gang_only if nodes == 1 else row.alone_only))
    return next((LogFinding(row, line.strip()[:LINE_CHARACTERS]) for row in rows), None)


def clearest(findings: Iterable[LogFinding | None]) -> LogFinding | None:
    """Return the finding that explains the others; the first one of equals."""
    return min(filter(None, findings), key=lambda finding: finding.row.place, default=None)


def classify(lines: Iterable[str], *, nodes: int = 1) -> LogFinding | None:
    """Return the line that explains the others, or None where no line is known."""
    return clearest(match(line, nodes=nodes) for line in lines)
