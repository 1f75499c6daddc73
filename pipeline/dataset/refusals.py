"""Count refused rows by reason, so that a message names each reason once, with its first places."""

from __future__ import annotations

import re
from collections import Counter

from pipeline.dataset.records import BadRow

LISTED_REASONS = 20
LISTED_PLACES = 3


class Refusals:
    """The reasons of refused rows, each with its count and first places."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """The refused rows."""
        return self._counts.total()

    def add(self, row: BadRow) -> None:
        # JSON errors and ids differ in every row; what comes before them is the reason.
        reason = row.reason if row.reason.startswith("lacks") else row.reason.partition(":")[0]
        kind = re.sub(r"'[^']*' has another document at .*", "has another document in an earlier row", reason)
        self._counts[kind] += 1
        places = self._places.setdefault(kind, [])
        if len(places) < LISTED_PLACES:
            places.append(row.at if kind == row.reason else f"{row.at}: {row.reason}")

    def reasons(self) -> list[str]:
        """Return each reason with its count and first places, the most frequent first."""
        return [
            f"{count:,} rows: {kind} (first: {'; '.join(self._places[kind])})"
            for kind, count in self._counts.most_common(LISTED_REASONS)
        ]
