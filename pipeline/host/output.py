"""The output of a node's ranks: forwarded to the node's log line by line, and searched for lines that explain a failure.

Ranks write into files of the node folder, one per rank and stream: 32 processes on one pipe would cut each other's lines in
two, and a file still holds what a killed launcher's ranks said last. A day's lines are megabytes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from pipeline.run.cloudwatch import is_record
from pipeline.run.growing_file import GrowingFile
from pipeline.sdk import known_errors
from pipeline.sdk.known_errors import LogFinding

KEPT_LINES = 20
"""Last lines of a rank, for an unexplained failure."""


class Output:
    """The output of a node's ranks so far.

    Args:
        ranks: their numbers.
        find: the (stdout, stderr) files of a rank, which need not be there yet; None while it is unknown where they will be.
        nodes: nodes of the gang.
    """

    def __init__(self, ranks: Sequence[int], find: Callable[[int], tuple[Path, Path] | None], *, nodes: int) -> None:
        self._find = find
        self._nodes = nodes
        self._streams: dict[int, list[tuple[GrowingFile, IO[str]]]] = {rank: [] for rank in ranks}
        self._findings: dict[int, LogFinding | None] = dict.fromkeys(ranks)
        self._last: dict[int, deque[str]] = {rank: deque(maxlen=KEPT_LINES) for rank in ranks}

    def pump(self, *, end: bool = False) -> None:
        """Forward and search the new lines.

        Args:
            end: the ranks have ended: a last line without an end counts, too.
        """
        for rank, streams in self._streams.items():
            if not streams:
                paths = self._find(rank)
                if paths is None or not all(path.exists() for path in paths):
                    continue
                streams += zip(map(GrowingFile, paths), (sys.stdout, sys.stderr), strict=True)
            for file, target in streams:
                if lines := file.read(end=end):
                    target.flush()
                    target.buffer.write(b"\n".join(lines) + b"\n")  # type: ignore[attr-defined]
                    target.flush()
                for raw in lines:
                    line = raw.decode("utf-8", "replace")
                    if not is_record(line):  # metrics have names that resemble errors
                        self._last[rank].append(line[: known_errors.LINE_CHARACTERS])
                        found = known_errors.match(line, nodes=self._nodes)
                        self._findings[rank] = known_errors.clearest((self._findings[rank], found))

    def finding(self, rank: int) -> tuple[int, LogFinding] | None:
        """Return the line that explains this rank's failure, and its rank: its own if that is a cause, else the node's best."""
        own = self._findings.get(rank)
        if own is not None and own.is_cause:
            return rank, own
        found = [(finding.row.place, number, finding) for number, finding in self._findings.items() if finding is not None]
        return min(found, key=lambda item: item[:2])[1:] if found else None

    def last_lines(self, rank: int) -> list[str]:
        return list(self._last.get(rank, ()))
