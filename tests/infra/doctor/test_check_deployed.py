"""Checks of a deployment: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

import copy
import json
from datetime import datetime, timezone
from typing import Any

import pytest

from infra.doctor import check_deployed
from infra.doctor.asking import Refused
from infra.doctor.blueprint import Blueprint

WHEN = datetime(2026, 11, 22, 5, 0, tzinfo=timezone.utc)
MINUTE_MS = 60_000
NOW_MS = int(WHEN.timestamp() * 1000)


def resource(kind: str, physical: str) -> dict[str, Any]:
    return {
        "LogicalResourceId": "One",
        "ResourceType": kind,
        "PhysicalResourceId": physical,
        "ResourceStatus": "CREATE_COMPLETE",
        "LastUpdatedTimestamp": WHEN,
    }


def there(*resources: dict[str, Any]) -> dict[str, Any]:
    return {"cloudformation:ListStackResources": {"StackResourceSummaries": list(resources)}}


def stack_answers(blueprint: Blueprint, change: dict[str, Any] | None = None, templates: Any = None) -> dict[str, Any]:
    stack = {"StackName": "one", "CreationTime": WHEN, "StackStatus": "UPDATE_COMPLETE", **(change or {})}
    bodies = templates or blueprint.stacks.templates
    return {
        "cloudformation:DescribeStacks": {"Stacks": [stack]},
        "cloudformation:GetTemplate": lambda asked: {"TemplateBody": bodies[asked["StackName"]]},
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"StackStatus": "UPDATE_ROLLBACK_COMPLETE"}, "is not complete"),
        ({"StackStatus": "CREATE_FAILED"}, "is not complete"),
    ],
)
def test_stacks(blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: Any) -> None:
    findings = bad(look(check_deployed.stacks, blueprint, stack_answers(blueprint, change), after=True))
    assert len(findings) == (2 if expected else 0)
    assert all(expected in what for _, what in findings)


def test_a_stack_that_is_not_there(blueprint: Blueprint, look: Any, bad: Any) -> None:
    gone = {**stack_answers(blueprint), "cloudformation:DescribeStacks": Refused("ValidationError", "does not exist")}
    assert bad(look(check_deployed.stacks, blueprint, gone, after=True)) == [
        ("problem", "the stack trnpipe-data does not exist"),
        ("problem", "the stack trnpipe does not exist"),
    ]


def test_what_the_cdk_command_adds_is_no_difference(blueprint: Blueprint, look: Any, bad: Any) -> None:
    templates = copy.deepcopy(dict(blueprint.stacks.templates))
    for template in templates.values():
        template["Resources"]["CDKMetadata"] = {"Type": "AWS::CDK::Metadata", "Properties": {"Analytics": "v2"}}
        next(iter(template["Resources"].values()))["Metadata"] = {"aws:cdk:path": "a/b"}
    as_text = {name: json.dumps(template) for name, template in templates.items()}
    for bodies in (templates, as_text):
        assert bad(look(check_deployed.stacks, blueprint, stack_answers(blueprint, templates=bodies), after=True)) == []


def test_settings_that_were_not_deployed_are_named(blueprint: Blueprint, look: Any) -> None:
    templates = copy.deepcopy(dict(blueprint.stacks.templates))
    resources = templates["trnpipe"]["Resources"]
    [queue, *_] = [key for key, one in resources.items() if one["Type"] == "AWS::Batch::JobQueue"]
    [schedule, _] = [key for key, one in resources.items() if one["Type"] == "AWS::Scheduler::Schedule"]
    resources[queue]["Properties"]["Priority"] = 7
    del resources[schedule]
    resources["Old"] = {"Type": "AWS::SQS::Queue"}
    [finding] = [
        one for one in look(check_deployed.stacks, blueprint, stack_answers(blueprint, templates=templates)) if one.remedy
    ]
    assert finding.level == "warning"
    assert set(finding.value.split(", ")) == {f"~ {queue}", f"+ {schedule}", "- Old"}


ENVIRONMENT = "arn:aws:batch:us-west-2:123456789012:compute-environment/train"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        (
            {"status": "INVALID", "statusReason": "CLIENT_ERROR - no such image"},
            [("problem", "the compute environment train is INVALID")],
        ),
        ({"state": "DISABLED"}, [("problem", "the compute environment train is DISABLED")]),
    ],
)
def test_environments(blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: Any) -> None:
    environment = {
        "computeEnvironmentName": "train",
        "computeEnvironmentArn": ENVIRONMENT,
        "ecsClusterArn": "arn:aws:ecs:us-west-2:123456789012:cluster/one",
        "status": "VALID",
        "state": "ENABLED",
        **change,
    }
    answers = {
        **there(resource("AWS::Batch::ComputeEnvironment", ENVIRONMENT)),
        "batch:DescribeComputeEnvironments": {"computeEnvironments": [environment]},
    }
    findings = look(check_deployed.environments, blueprint, answers, after=True)
    assert bad(findings) == expected
    assert findings[0].value == change.get("statusReason", findings[0].value)


QUEUE = "arn:aws:batch:us-west-2:123456789012:job-queue/trnpipe-train"


def queue_answers(change: dict[str, Any], job: dict[str, Any] | None) -> dict[str, Any]:
    queue = {
        "jobQueueName": "trnpipe-train",
        "jobQueueArn": QUEUE,
        "state": "ENABLED",
        "status": "VALID",
        "priority": 1,
        "computeEnvironmentOrder": [],
        **change,
    }
    front = [{"jobArn": "arn:aws:batch:us-west-2:123456789012:job/j-1", "earliestTimeAtPosition": NOW_MS}] if job else []
    described = {
        "jobName": "train-week",
        "jobId": "j-1",
        "jobQueue": QUEUE,
        "status": "RUNNABLE",
        "startedAt": 0,
        "jobDefinition": "d",
        **(job or {}),
    }
    return {
        **there(resource("AWS::Batch::JobQueue", QUEUE)),
        "batch:DescribeJobQueues": {"jobQueues": [queue]},
        "batch:GetJobQueueSnapshot": {"frontOfQueue": {"jobs": front}},
        "batch:DescribeJobs": {"jobs": [described]},
    }


@pytest.mark.parametrize(
    ("change", "job", "expected"),
    [
        ({}, None, []),
        ({}, {}, []),
        ({"state": "DISABLED"}, None, [("problem", "the queue trnpipe-train is VALID, DISABLED")]),
        ({"status": "INVALID"}, None, [("problem", "the queue trnpipe-train is INVALID, ENABLED")]),
        (
            {},
            {"statusReason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfil the request"},
            [("problem", "the queue trnpipe-train is blocked: EC2 has no free hosts of this type in the zone now")],
        ),
        ({}, {"statusReason": "something else"}, [("warning", "the job at the front of trnpipe-train waits")]),
    ],
)
def test_queues(blueprint: Blueprint, look: Any, bad: Any, change: Any, job: Any, expected: Any) -> None:
    assert bad(look(check_deployed.queues, blueprint, queue_answers(change, job), after=True)) == expected


def test_every_reason_for_which_batch_holds_a_queue_has_its_remedy() -> None:
    from infra.constructs.compute import STUCK_REASONS

    assert set(check_deployed.REASONS) > set(STUCK_REASONS)
    for reason, (meaning, remedy) in check_deployed.REASONS.items():
        job = {"jobName": "train-week", "jobId": "j-1", "status": "RUNNABLE", "statusReason": f"{reason} - ..."}
        [finding] = check_deployed.judge_front("train", job, NOW_MS - 90 * MINUTE_MS, WHEN)
        assert (meaning in finding.what, finding.remedy, "for 90 min" in finding.value) == (True, remedy, True)


def test_job_definitions(blueprint: Blueprint, look: Any, bad: Any) -> None:
    arns = [f"arn:aws:batch:us-west-2:123456789012:job-definition/trnpipe-train-{number}:3" for number in range(150)]

    def answers(inactive: str) -> dict[str, Any]:
        def described(asked: dict[str, Any]) -> dict[str, Any]:
            wanted = asked["jobDefinitions"]
            assert len(wanted) <= 100
            fields = {"jobDefinitionName": "one", "revision": 3, "type": "multinode"}
            return {
                "jobDefinitions": [
                    {**fields, "jobDefinitionArn": arn, "status": "INACTIVE" if arn == inactive else "ACTIVE"} for arn in wanted
                ]
            }

        return {**there(*(resource("AWS::Batch::JobDefinition", arn) for arn in arns)), "batch:DescribeJobDefinitions": described}

    assert bad(look(check_deployed.job_definitions, blueprint, answers(""), after=True)) == []
    [finding] = look(check_deployed.job_definitions, blueprint, answers(arns[120]), after=True)
    assert (finding.level, finding.value) == ("problem", "trnpipe-train-120:3")


def schedule_answers(state: str, messages: int, refresh: str = "DISABLED", every: str = "rate(1 day)") -> dict[str, Any]:
    def schedule(given: dict[str, Any]) -> dict[str, Any]:
        weekly = given["Name"] == "weekly"
        return {
            "Name": given["Name"],
            "State": state if weekly else refresh,
            "ScheduleExpression": "cron(0 3 ? * SUN *)" if weekly else every,
            "ScheduleExpressionTimezone": "Etc/UTC",
            "Target": {
                "Arn": "arn",
                "RoleArn": "arn",
                "Input": json.dumps({"registry": "current", "mode": "train" if weekly else "refresh"}),
            },
        }

    return {
        **there(
            resource("AWS::Scheduler::Schedule", "weekly"),
            resource("AWS::Scheduler::Schedule", "refresh"),
            resource("AWS::SQS::Queue", "https://sqs/1/dead"),
        ),
        "scheduler:GetSchedule": schedule,
        "sqs:GetQueueAttributes": {"Attributes": {"ApproximateNumberOfMessages": str(messages)}},
    }


def test_schedule(blueprint: Blueprint, other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    findings = look(check_deployed.schedule, blueprint, schedule_answers("ENABLED", 0), after=True)
    assert bad(findings) == []
    assert findings[0].value == "cron(0 3 ? * SUN *) Etc/UTC"
    off = schedule_answers("DISABLED", 0)
    refreshed = schedule_answers("DISABLED", 0, "ENABLED", "rate(12 hours)")
    assert bad(look(check_deployed.schedule, other_blueprint, refreshed, after=True)) == []
    other = [("problem", "the schedule weekly is not what the settings say")]
    [finding, *_] = look(check_deployed.schedule, blueprint, off, after=True)
    assert finding.value == "weekly: State DISABLED, not ENABLED"
    by_hand = schedule_answers("ENABLED", 0, "ENABLED", "rate(12 hours)")
    # What was switched on by hand or by an option, the next deployment switches off.
    assert bad(look(check_deployed.schedule, other_blueprint, by_hand, after=True)) == other
    lost = look(check_deployed.schedule, blueprint, schedule_answers("ENABLED", 2), after=True)
    assert bad(lost) == [("problem", "a start could not be delivered")]
    [refresh] = bad(look(check_deployed.schedule, blueprint, schedule_answers("ENABLED", 0, "ENABLED"), after=True))
    assert refresh == ("problem", "the schedule refresh is not what the settings say")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"StateValue": "INSUFFICIENT_DATA"}, []),
        ({"StateValue": "ALARM", "StateReason": "it failed"}, [("warning", "the alarm trnpipe-Failed is on")]),
        ({"ActionsEnabled": False}, [("warning", "alarms are switched off")]),
    ],
)
def test_alarms(blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: Any) -> None:
    alarm = {
        "AlarmName": "trnpipe-Failed",
        "StateValue": "OK",
        "ActionsEnabled": True,
        "AlarmDescription": "A run failed.",
        **change,
    }
    answers = {
        **there(resource("AWS::CloudWatch::Alarm", "trnpipe-Failed")),
        "cloudwatch:DescribeAlarms": {"MetricAlarms": [alarm]},
    }
    assert bad(look(check_deployed.alarms, blueprint, answers, after=True)) == expected


def test_subscriptions(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    topic = "arn:aws:sns:us-east-2:123456789012:topic"

    def answers(*subscriptions: tuple[str, str]) -> dict[str, Any]:
        listed = [
            {"SubscriptionArn": arn, "Protocol": "sqs" if ":sqs:" in to else "email", "Endpoint": to, "TopicArn": topic}
            for to, arn in subscriptions
        ]
        return {**there(resource("AWS::SNS::Topic", topic)), "sns:ListSubscriptionsByTopic": {"Subscriptions": listed}}

    queue = "arn:aws:sqs:us-east-2:123456789012:runs", f"{topic}:2"
    good = answers(("team@example.com", f"{topic}:1"), queue)
    assert bad(look(check_deployed.subscriptions, other_blueprint, good, after=True)) == []
    waiting = answers(("team@example.com", "PendingConfirmation"), queue)
    [finding, _] = look(check_deployed.subscriptions, other_blueprint, waiting, after=True)
    assert (finding.level, finding.what) == ("warning", "a subscription is not confirmed")
    assert f"--topic-arn {topic} --protocol email --notification-endpoint team@example.com" in finding.remedy
    assert bad(look(check_deployed.subscriptions, other_blueprint, answers(), after=True)) == [
        ("problem", "addresses of the settings are not subscribed")
    ]


def test_without_a_stack_every_check_says_so(blueprint: Blueprint, look: Any, bad: Any) -> None:
    gone = {"cloudformation:ListStackResources": Refused("ValidationError", "Stack trnpipe does not exist")}
    for check in (
        check_deployed.environments,
        check_deployed.queues,
        check_deployed.job_definitions,
        check_deployed.schedule,
        check_deployed.alarms,
    ):
        assert bad(look(check, blueprint, gone, after=True)) == [("problem", "a call failed")]
