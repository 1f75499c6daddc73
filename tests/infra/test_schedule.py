"""The weekly start."""

from __future__ import annotations

import json
from typing import Any

from pipeline.config import build_config


def test_it_starts_weekly_with_its_share_and_waits_for_a_run_that_is_going_on(deployment: Any) -> None:
    schedule = deployment.only("AWS::Scheduler::Schedule")
    assert schedule["ScheduleExpression"] == "cron(0 3 ? * SUN *)"
    assert schedule["ScheduleExpressionTimezone"] == "Etc/UTC"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 15}
    assert schedule["State"] == "ENABLED"
    given = json.loads(schedule["Target"]["Input"])
    config = build_config(given)
    assert (config.share, config.lock.wait_minutes) == ("weekly", 720)


def test_a_start_that_cannot_be_delivered_is_kept(deployment: Any) -> None:
    target = deployment.only("AWS::Scheduler::Schedule")["Target"]
    assert "DeadLetterConfig" in target
    assert target["RetryPolicy"]["MaximumRetryAttempts"] == 20
    assert deployment.only("AWS::SQS::Queue")["SqsManagedSseEnabled"] is True


def test_it_can_be_switched_off_and_be_punctual(other_deployment: Any) -> None:
    schedule = other_deployment.only("AWS::Scheduler::Schedule")
    assert schedule["State"] == "DISABLED"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "OFF"}
