"""The weekly start."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from infra.setting_sections import WeeklySchedule
from pipeline.config import build_config


def schedule_of(deployment: Any, mode: str | None = None) -> Any:
    """The schedule of the weekly runs, or that of another mode."""
    [found] = [
        schedule
        for schedule in deployment.resources("AWS::Scheduler::Schedule")
        if json.loads(schedule["Target"]["Input"]).get("mode") == mode
    ]
    return found


def test_it_starts_weekly_with_its_share_and_waits_for_a_run_that_is_going_on(deployment: Any) -> None:
    schedule = schedule_of(deployment)
    assert schedule["ScheduleExpression"] == "cron(0 3 ? * SUN *)"
    assert schedule["ScheduleExpressionTimezone"] == "Etc/UTC"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 15}
    assert schedule["State"] == "ENABLED"
    given = json.loads(schedule["Target"]["Input"])
    config = build_config(given)
    assert (config.share, config.lock.wait_minutes) == ("weekly", 720)


def test_a_start_that_cannot_be_delivered_is_kept(deployment: Any) -> None:
    target = schedule_of(deployment)["Target"]
    assert "DeadLetterConfig" in target
    assert target["RetryPolicy"]["MaximumRetryAttempts"] == 20
    assert deployment.only("AWS::SQS::Queue")["SqsManagedSseEnabled"] is True


def test_it_can_be_switched_off_and_be_punctual(other_deployment: Any) -> None:
    schedule = schedule_of(other_deployment)
    assert schedule["State"] == "DISABLED"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "OFF"}


def test_refreshes_are_off_until_they_are_switched_on(deployment: Any, other_deployment: Any) -> None:
    refresh = schedule_of(deployment, "refresh")
    assert (refresh["State"], refresh["ScheduleExpression"]) == ("DISABLED", "rate(1 day)")
    assert refresh["Target"]["DeadLetterConfig"] == schedule_of(deployment)["Target"]["DeadLetterConfig"]
    config = build_config(json.loads(refresh["Target"]["Input"]))
    assert (config.mode, config.share, config.lock.wait_minutes) == ("refresh", "weekly", 0)
    daily = schedule_of(other_deployment, "refresh")
    assert (daily["State"], daily["ScheduleExpression"]) == ("ENABLED", "rate(12 hours)")


def test_another_expression_is_passed_through(small_deployment: Any) -> None:
    schedule = schedule_of(small_deployment)
    assert schedule["ScheduleExpression"] == "cron(15 4 ? * MON#1 *)"
    assert schedule["ScheduleExpressionTimezone"] == "Europe/Berlin"


@pytest.mark.parametrize(
    ("given", "expression", "words"),
    [
        ({}, "cron(0 3 ? * SUN *)", "Sunday 03:00 Etc/UTC"),
        ({"weekday": "wednesday", "hour": 17, "minute": 5}, "cron(5 17 ? * WED *)", "Wednesday 17:05 Etc/UTC"),
        ({"expression": "rate(3 days)", "every_days": 3, "weekday": "monday"}, "rate(3 days)", "rate(3 days) Etc/UTC"),
    ],
)
def test_the_start_as_the_scheduler_and_as_people_read_it(given: dict[str, Any], expression: str, words: str) -> None:
    schedule = WeeklySchedule.model_validate(given)
    assert (schedule.schedule_expression, schedule.described) == (expression, words)


@pytest.mark.parametrize(
    "given",
    [{"weekday": "SUN"}, {"hour": 24}, {"minute": 60}, {"expression": "0 3 * * SUN", "every_days": 7}, {"every_days": 0}],
)
def test_a_start_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WeeklySchedule.model_validate(given)
