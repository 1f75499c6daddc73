"""Schedule expressions as EventBridge Scheduler takes them: checked before anything is deployed, and when they are due next.

`cron(minutes hours day-of-month month day-of-week year)` and `rate(value unit)`: EventBridge Scheduler User Guide, "Schedule
types". CloudFormation finds a mistake only while it deploys, and cron's own five-field form is the usual one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")

FARTHEST_DAYS = 366 * 8
"""A 29 February may be eight years away."""

RATE = re.compile(r"(?P<value>[1-9][0-9]*) (?P<unit>minute|hour|day)(?P<plural>s?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One of cron's six fields.

    Attributes:
        low, high: its numbers.
        names: words that stand for the numbers from `low` on.
        special: pattern of what else an item may be.
    """

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    special: str = r"(?!)"

    def objection(self, text: str) -> str | None:
        """What is wrong with the field's text, None where nothing is."""
        for item in text.split(","):
            if re.fullmatch(self.special, item):
                continue
            span, slash, step = item.partition("/")
            if slash and not (step.isdigit() and 0 < int(step) <= self.high):
                return f"{self.name}: {item!r} has no step from 1 to {self.high} behind the slash"
            ends = [] if span == "*" else span.split("-")
            numbers = [self._number(end) for end in ends]
            if len(numbers) > 2 or None in numbers:
                return (
                    f"{self.name}: {item!r} is no number from {self.low} to {self.high}{self._or_names()}, range or list of them"
                )
        return None

    def numbers(self, text: str) -> frozenset[int] | None:
        """What the field's text stands for; None where that depends on the month (`L`, `W`, `#`)."""
        found: set[int] = set()
        for item in text.replace("?", "*").split(","):
            span, slash, step = item.partition("/")
            ends = [self.low, self.high] if span == "*" else [self._number(end) for end in span.split("-")]
            first, last = ends[0], self.high if slash and len(ends) == 1 else ends[-1]
            if first is None or last is None:
                return None
            found |= set(range(first, last + 1, int(step or 1)))
        return frozenset(found)

    def _number(self, text: str) -> int | None:
        if text in self.names:
            return self.low + self.names.index(text)
        return int(text) if text.isdigit() and self.low <= int(text) <= self.high else None

    def _or_names(self) -> str:
        return f" or {self.names[0]}-{self.names[-1]}" if self.names else ""


FIELDS = (
    Field(name="minutes", low=0, high=59),
    Field(name="hours", low=0, high=23),
    # The last day, n days before it, the last weekday, the weekday nearest to a day.
    Field(name="day of month", low=1, high=31, special=r"\?|L(-[1-9][0-9]?)?|LW|([1-9]|[12][0-9]|3[01])W"),
    Field(name="month", low=1, high=12, names=MONTHS),
    # The last one of a month, the n-th one.
    Field(
        name="day of week", low=1, high=7, names=DAYS, special=rf"\?|([1-7]|{'|'.join(DAYS)})?L|([1-7]|{'|'.join(DAYS)})#[1-5]"
    ),
    Field(name="year", low=1970, high=2199),
)


def objection(expression: str) -> str | None:
    """Why EventBridge Scheduler would refuse a recurring schedule, None where it would not."""
    kind, bracket, rest = expression.partition("(")
    if not bracket or not rest.endswith(")") or kind not in ("cron", "rate"):
        return "is neither cron(...) nor rate(...)"
    inside = rest[:-1]
    if kind == "rate":
        found = RATE.fullmatch(inside)
        if found is None or (found["value"] == "1") == bool(found["plural"]):
            return "is no rate like rate(7 days) or rate(1 day)"
        return None
    values = inside.split()
    if len(values) != len(FIELDS):
        return f"has {len(values)} fields instead of six: {', '.join(field.name for field in FIELDS)}"
    for field, text in zip(FIELDS, values, strict=True):
        if wrong := field.objection(text):
            return wrong
    if (values[2] == "?") == (values[4] == "?"):
        return "has a value in both day of month and day of week, or in neither: exactly one of the two is `?`"
    return None


def next_time(expression: str, time_zone: str, now: datetime) -> datetime | None:
    """When a `cron(...)` expression is due next, in its time zone; None where it never is, or where it is a rate or has one of
    `L`, `W` and `#`.

    Args:
        expression: one that nothing is wrong with.
        now: with a time zone of its own.
    """
    kind, _, rest = expression.partition("(")
    if kind != "cron":
        return None
    sets = [field.numbers(text) for field, text in zip(FIELDS, rest[:-1].split(), strict=True)]
    minutes, hours, days, months, weekdays, years = sets
    if minutes is None or hours is None or days is None or months is None or weekdays is None or years is None:
        return None
    zone = ZoneInfo(time_zone)
    local = now.astimezone(zone)
    for offset in range(FARTHEST_DAYS):
        date = local.date() + timedelta(days=offset)
        # Monday is 0 in Python and 2 in a cron expression.
        if not (date.year in years and date.month in months and date.day in days and (date.weekday() + 1) % 7 + 1 in weekdays):
            continue
        for hour in sorted(hours):
            for minute in sorted(minutes):
                due = datetime(date.year, date.month, date.day, hour, minute, tzinfo=zone)
                if due > local and _exists(due):
                    return due
    return None


def _exists(due: datetime) -> bool:
    """Whether clocks show this time at all: an hour is left out when summer time begins."""
    utc = due.astimezone(ZoneInfo("UTC"))
    return utc.astimezone(due.tzinfo).replace(tzinfo=None) == due.replace(tzinfo=None)
