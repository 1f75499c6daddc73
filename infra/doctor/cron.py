"""The next time of an EventBridge Scheduler expression, so that people see what they have set.

Covers what weekly runs are scheduled with: numbers, names, `*`, `?`, lists, ranges and steps. `L`, `W` and `#` are left to AWS.
Source: EventBridge Scheduler User Guide, "Schedule types" (fields: minutes, hours, day of month, month, day of week, year).
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
FARTHEST_DAYS = 366 * 5
PART = re.compile(r"(?P<low>\*|\w+)(?:-(?P<high>\w+))?(?:/(?P<step>\d+))?")


def next_time(expression: str, time_zone: str, now: datetime) -> datetime | None:
    """When a `cron(...)` expression is due next, in its time zone; None where this module cannot tell.

    Args:
        now: with a time zone of its own.
    """
    fields = expression.removeprefix("cron(").removesuffix(")").split()
    if not expression.startswith("cron(") or len(fields) != 6:
        return None
    minute, hour, day, month, weekday, year = fields
    minutes, hours = _values(minute, 0, 59), _values(hour, 0, 23)
    days, months = _values(day, 1, 31), _values(month, 1, 12, MONTHS)
    weekdays, years = _values(weekday, 1, 7, WEEKDAYS), _values(year, 1970, 2199)
    if minutes is None or hours is None or days is None or months is None or weekdays is None or years is None:
        return None
    zone = ZoneInfo(time_zone)
    local = now.astimezone(zone)
    for offset in range(FARTHEST_DAYS):
        date = local.date() + timedelta(days=offset)
        # Monday is 0 in Python and 2 in a cron expression.
        if date.year not in years or date.month not in months or date.day not in days:
            continue
        if (date.weekday() + 1) % 7 + 1 not in weekdays:
            continue
        for one in sorted(hours):
            for other in sorted(minutes):
                due = datetime(date.year, date.month, date.day, one, other, tzinfo=zone)
                if due > local and _exists(due):
                    return due
    return None


def _exists(due: datetime) -> bool:
    """Whether clocks show this time at all: an hour is left out when summer time begins."""
    utc = due.astimezone(ZoneInfo("UTC"))
    return utc.astimezone(due.tzinfo).replace(tzinfo=None) == due.replace(tzinfo=None)


def _values(field: str, first: int, last: int, names: tuple[str, ...] = ()) -> frozenset[int] | None:
    """The numbers that a field stands for; None where it holds something else."""
    found: set[int] = set()
    for part in field.upper().replace("?", "*").split(","):
        match = PART.fullmatch(part)
        if match is None:
            return None
        try:
            low = first if match["low"] == "*" else _number(match["low"], first, names)
            open_end = match["low"] == "*" or match["step"] is not None
            high = _number(match["high"], first, names) if match["high"] else last if open_end else low
        except ValueError:
            return None
        found |= set(range(low, high + 1, int(match["step"] or 1)))
    return frozenset(found)


def _number(text: str, first: int, names: tuple[str, ...]) -> int:
    return names.index(text) + first if text in names else int(text)
