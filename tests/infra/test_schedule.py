"""What starts runs: the clock, and objects that arrive in a bucket."""

from __future__ import annotations

import json
from typing import Any

from infra.settings import Settings
from pipeline.config import build_config
from tests.infra.calls import Roles


def schedule_of(deployment: Any, mode: str = "train") -> Any:
    """The schedule of the runs that train, or that of another mode."""
    [found] = [
        schedule
        for schedule in deployment.resources("AWS::Scheduler::Schedule")
        if json.loads(schedule["Target"]["Input"])["mode"] == mode
    ]
    return found


def rule_on_objects(deployment: Any) -> Any:
    [rule] = [rule for rule in deployment.resources("AWS::Events::Rule") if rule["EventPattern"]["source"] == ["aws.s3"]]
    return rule


def test_it_starts_weekly_with_its_share_and_waits_for_a_run_that_is_going_on(deployment: Any) -> None:
    schedule = schedule_of(deployment)
    assert schedule["ScheduleExpression"] == "cron(0 3 ? * SUN *)"
    assert schedule["ScheduleExpressionTimezone"] == "Etc/UTC"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 15}
    assert schedule["State"] == "ENABLED"
    config = build_config(json.loads(schedule["Target"]["Input"]))
    assert (config.mode, config.registry, config.share, config.lock.wait_minutes) == ("train", "current", "weekly", 720)


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
    assert (config.mode, config.registry, config.share, config.lock.wait_minutes) == ("refresh", "current", "weekly", 0)
    daily = schedule_of(other_deployment, "refresh")
    assert (daily["State"], daily["ScheduleExpression"]) == ("ENABLED", "rate(12 hours)")


def test_another_expression_is_passed_through(small_deployment: Any) -> None:
    schedule = schedule_of(small_deployment)
    assert schedule["ScheduleExpression"] == "cron(15 4 ? * MON#1 *)"
    assert schedule["ScheduleExpressionTimezone"] == "Europe/Berlin"


def test_an_object_starts_a_run_of_its_own_configuration(other_deployment: Any) -> None:
    rule = rule_on_objects(other_deployment)
    assert rule["State"] == "ENABLED"
    assert rule["EventPattern"] == {
        "source": ["aws.s3"],
        "detail-type": ["Object Created"],
        "detail": {"bucket": {"name": ["their-catalog"]}, "object": {"key": [{"prefix": "ready/"}]}},
    }
    [target] = rule["Targets"]
    config = build_config(json.loads(target["Input"]))
    assert (config.mode, config.registry, config.share, config.lock.wait_minutes) == ("train", "products", "experiments", 720)
    assert config.data.train == ("s3://their-catalog/pairs/",)
    assert target["RetryPolicy"] == {"MaximumRetryAttempts": 20, "MaximumEventAgeInSeconds": 6 * 3600}


def test_the_scheduler_may_start_the_state_machine_and_keep_what_it_cannot_deliver(deployment: Any) -> None:
    """EventBridge Scheduler User Guide, "Set up the execution role"."""
    roles = Roles(deployment.folder)
    targets = [schedule.properties["Target"] for schedule in roles.stacks.of_type("AWS::Scheduler::Schedule")]
    assert [target["Arn"] for target in targets] == [roles.machine_arn] * 2
    for target in targets:
        role = roles.by_arn(target["RoleArn"])
        assert role.service == "scheduler.amazonaws.com"
        assert role.may("states:StartExecution", roles.machine_arn)
        assert role.may("sqs:SendMessage", target["DeadLetterConfig"]["Arn"])
        assert role.actions() == {"states:StartExecution", "sqs:SendMessage"}


def test_an_event_may_start_the_state_machine_and_no_more(other_deployment: Any) -> None:
    roles = Roles(other_deployment.folder)
    [rule] = [
        rule.properties
        for rule in roles.stacks.of_type("AWS::Events::Rule")
        if rule.properties["EventPattern"]["source"] == ["aws.s3"]
    ]
    [target] = rule["Targets"]
    role = roles.by_arn(target["RoleArn"])
    assert target["Arn"] == roles.machine_arn
    assert (role.service, role.actions()) == ("events.amazonaws.com", {"states:StartExecution"})
    assert role.may("states:StartExecution", roles.machine_arn)
    assert not role.may("states:StartExecution", f"{roles.machine_arn}-week-weekly")


def test_undelivered_events_reach_the_dead_letter_queue(other_deployment: Any) -> None:
    """EventBridge puts them there itself: the queue's policy admits the rule, no role
    (https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-rule-dlq.html)."""
    [target] = rule_on_objects(other_deployment)["Targets"]
    [(_, queue, _)] = other_deployment.stacks.unresolved("AWS::SQS::Queue")
    assert target["DeadLetterConfig"] == {"Arn": {"Fn::GetAtt": [queue, "Arn"]}}
    admitted = [
        statement
        for policy in other_deployment.resources("AWS::SQS::QueuePolicy")
        for statement in policy["PolicyDocument"]["Statement"]
        if statement["Effect"] == "Allow" and statement["Principal"] == {"Service": "events.amazonaws.com"}
    ]
    assert [(one["Action"], list(one["Condition"])) for one in admitted] == [("sqs:SendMessage", ["ArnEquals"])]


def test_the_own_bucket_sends_events_where_a_schedule_waits_for_objects(deployment: Any, other_deployment: Any) -> None:
    def senders(one: Any) -> list[Any]:
        buckets = one.resources("AWS::S3::Bucket")
        return [bucket["NotificationConfiguration"] for bucket in buckets if "NotificationConfiguration" in bucket]

    assert senders(deployment) == []
    assert senders(other_deployment) == [{"EventBridgeConfiguration": {"EventBridgeEnabled": True}}]
    # No function that would set it.
    assert other_deployment.resources("AWS::Lambda::Function") == []


def test_runs_may_read_what_any_schedule_names() -> None:
    other = {
        "when": {"object": "s3://theirs/ready"},
        "registry": "b",
        "share": "manual",
        "config": {"data": {"train": ["s3://theirs/x/"]}},
    }
    settings = Settings.model_validate(
        {"ami": "ami-01234567", "config": {"data": {"train": ["s3://ours/x/"]}}, "schedules": {"b": other}}
    )
    assert settings.readable() == ("s3://ours/x/", "s3://theirs/x/")
    assert settings.readable_objects(shards=True, model=False) == ("ours/x/*", "theirs/x/*")
