"""The next time of a schedule."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from infra.doctor.cron import next_time

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
        ("cron(0 3 ? * XYZ *)", "Etc/UTC", None),
        ("rate(7 days)", "Etc/UTC", None),
    ],
)
def test_next_time(expression: str, zone: str, due: str | None) -> None:
    found = next_time(expression, zone, NOW)
    assert (found and found.isoformat()) == due
