"""Rules of EventBridge that start a state machine, each under a role that may do nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aws_cdk import Duration, Stack
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

MAX_EVENT_HOURS = 6
RETRY_ATTEMPTS = 20


def start_on_event(
    scope: Construct,
    name: str,
    machine: sfn.IStateMachine,
    *,
    description: str,
    pattern: events.EventPattern,
    given: Mapping[str, Any],
    enabled: bool = True,
    dead_letters: sqs.IQueue | None = None,
) -> None:
    """Start a state machine on every event that matches.

    Args:
        name: prefix of the constructs' ids.
        given: the execution's input.
        dead_letters: takes events that could not be delivered.
    """
    stack = Stack.of(scope)
    # EventBridge starts it under this role, for rules of this stack alone
    # (https://docs.aws.amazon.com/eventbridge/latest/userguide/cross-service-confused-deputy-prevention.html).
    # A rule without a name of its own begins with its stack's; its ARN itself would need the rule, which needs the role.
    rules = stack.format_arn(service="events", resource="rule", resource_name=f"{stack.stack_name}-*")
    role = iam.Role(
        scope,
        f"{name}Events",
        assumed_by=iam.ServicePrincipal(
            "events.amazonaws.com",
            conditions={"StringEquals": {"aws:SourceAccount": stack.account}, "ArnLike": {"aws:SourceArn": rules}},
        ),
        description=description,
    )
    events.Rule(
        scope,
        f"{name}Rule",
        description=description,
        event_pattern=pattern,
        enabled=enabled,
        targets=[
            targets.SfnStateMachine(
                machine,
                role=role,
                input=events.RuleTargetInput.from_object(given),
                dead_letter_queue=dead_letters,
                max_event_age=Duration.hours(MAX_EVENT_HOURS) if dead_letters else None,
                retry_attempts=RETRY_ATTEMPTS if dead_letters else None,
            )
        ],
    )
