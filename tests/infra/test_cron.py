"""Schedule expressions of EventBridge Scheduler."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from infra.cron import next_time, objection


@pytest.mark.parametrize(
    "expression",
    [
        "cron(0 3 ? * SUN *)",
        "cron(15 10 L * ? *)",
        "cron(0 18 ? * MON-FRI *)",
        "cron(0/15 8-17 ? * 2,4,6 2026-2030)",
        "cron(0 4 ? JAN,JUL 6L *)",
        "cron(0 4 ? * MON#1 *)",
        "cron(0 4 3W 1-6/2 ? *)",
        "cron(0 4 LW * ? *)",
        "cron(*/10 * * * ? *)",
        "rate(7 days)",
        "rate(1 hour)",
    ],
)
def test_what_the_scheduler_takes(expression: str) -> None:
    assert objection(expression) is None


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("0 3 ? * SUN *", "neither cron(...) nor rate(...)"),
        ("cron(0 3 ? * SUN *", "neither"),
        ("at(2026-01-01T00:00:00)", "neither"),
        ("cron(0 3 * * SUN)", "5 fields instead of six"),
        ("cron(0 3 ? * SUN * *)", "7 fields"),
        ("cron(60 3 ? * SUN *)", "minutes: '60' is no number from 0 to 59"),
        ("cron(0 24 ? * SUN *)", "hours: '24'"),
        ("cron(0 3 32 * ? *)", "day of month: '32'"),
        ("cron(0 3 0 * ? *)", "day of month: '0'"),
        ("cron(0 3 ? 13 SUN *)", "month: '13' is no number from 1 to 12 or JAN-DEC"),
        ("cron(0 3 ? * 0 *)", "day of week: '0' is no number from 1 to 7 or SUN-SAT"),
        ("cron(0 3 ? * SUNDAY *)", "day of week: 'SUNDAY'"),
        ("cron(0 3 ? * SUN#6 *)", "day of week: 'SUN#6'"),
        ("cron(0 3 ? * SUN 1969)", "year: '1969'"),
        ("cron(0 ? ? * SUN *)", "hours: '?'"),
        ("cron(0/0 3 ? * SUN *)", "minutes: '0/0' has no step"),
        ("cron(0/ 3 ? * SUN *)", "minutes: '0/' has no step"),
        ("cron(1-2-3 3 ? * SUN *)", "minutes: '1-2-3'"),
        ("cron(,5 3 ? * SUN *)", "minutes: ''"),
        ("cron(0 3 * * SUN *)", "exactly one of the two is `?`"),
        ("cron(0 3 ? * ? *)", "exactly one of the two is `?`"),
        ("rate(7 day)", "no rate"),
        ("rate(1 days)", "no rate"),
        ("rate(0 days)", "no rate"),
        ("rate(1 week)", "no rate"),
    ],
)
def test_what_it_refuses(expression: str, words: str) -> None:
    assert words in str(objection(expression))


NOW = datetime(2026, 11, 22, 5, 0, tzinfo=timezone.utc)  # a Sunday


@pytest.mark.parametrize(
    ("expression", "zone", "due"),
    [
        ("cron(0 3 ? * SUN *)", "Etc/UTC", "2026-11-29T03:00:00+00:00"),
        ("cron(0 3 ? * SUN *)", "America/Los_Angeles", "2026-11-22T03:00:00-08:00"),
        ("cron(30 6 ? * 1 *)", "Etc/UTC", "2026-11-22T06:30:00+00:00"),
        ("cron(0 3 ? * MON-FRI *)", "Etc/UTC", "2026-11-23T03:00:00+00:00"),
        ("cron(0/20 5 * * ? *)", "Etc/UTC", "2026-11-22T05:20:00+00:00"),
        ("cron(15 10 1 JAN,JUL ? *)", "Europe/Berlin", "2027-01-01T10:15:00+01:00"),
        ("cron(0 0 29 2 ? *)", "Etc/UTC", "2028-02-29T00:00:00+00:00"),
        # Clocks in Berlin leave out 02:30 on that day.
        ("cron(30 2 28 3 ? 2027-2028)", "Europe/Berlin", "2028-03-28T02:30:00+02:00"),
        ("cron(0 3 ? * SUN 2020)", "Etc/UTC", None),
        ("cron(0 3 L * ? *)", "Etc/UTC", None),
        ("cron(0 3 ? * SUN#1 *)", "Etc/UTC", None),
        ("rate(7 days)", "Etc/UTC", None),
    ],
)
def test_next_time(expression: str, zone: str, due: str | None) -> None:
    found = next_time(expression, zone, NOW)
    assert (found and found.isoformat()) == due
