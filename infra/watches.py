"""State machines that watch the one that runs the stages; EventBridge starts them, with the execution that it speaks of.

    overdue   when an execution begins: waits one time budget and speaks up if it still runs.
    week      when one succeeds: waits until the next week's should have, and speaks up every week until one does.
    cleanup   when one ends other than by success: ends the jobs that it left behind.

An alarm cannot do what `week` does. CloudWatch looks back seven days at most, and two successes in a row are as far apart as the
later run took longer: a missing one shows after a week and a time budget.

`.sync` ends a job with its execution, at its best; a gang that is polled is nobody's any more. So whatever ended the execution,
`cleanup` looks through the queues for jobs that carry its ARN. Twice, because a submission may have been under way, and a job
between two attempts may be passed by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aws_cdk import Stack
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.console import Console
from infra.runbook import remedy
from infra.settings import Settings
from infra.states import CALL_SECONDS, DISCARD, States
from pipeline.contract import EXECUTION_TAG, Queue

WEEK_SECONDS = 7 * 24 * 3600
LOOK_AGAIN_SECONDS = 60
LOOKS = 2
ALIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
"""States of a job that has not ended, in their order: one that gets further meanwhile is met again."""
ENDED_BADLY = ("ABORTED", "TIMED_OUT", "FAILED")


def overdue(partition: str, topic: str, budget_seconds: int, console: Console) -> dict[str, Any]:
    """Waits one time budget and speaks up if the execution it was given still runs."""
    return {
        "Comment": "Speaks up when a run is overdue.",
        "StartAt": "Wait",
        "States": {
            "Wait": {"Type": "Wait", "Seconds": budget_seconds, "Next": "Look"},
            **_look(partition, then="StillRuns"),
            "StillRuns": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.seen.Status", "StringEquals": "RUNNING", "Next": "Notify"}],
                "Default": "Done",
            },
            "Notify": _notify(
                partition,
                topic,
                subject="States.Format('trnpipe: {} overdue', $.seen.Name)",
                message=f"States.Format('Run {{}} still runs after its time budget of {budget_seconds // 60} minutes. It goes "
                f"on; nothing was stopped. {remedy('Overdue')} Execution: {console.execution} Log: {console.log} "
                f"Dashboard: {console.overview}', $.seen.Name, $.execution, $.seen.Name)",
                then="Done",
            ),
            "Done": {"Type": "Succeed"},
        },
    }


def week(partition: str, topic: str, machine: str, patience_seconds: int, console: Console) -> dict[str, Any]:
    """Waits for the success after the one it was given.

    Args:
        machine: ARN of the state machine.
        patience_seconds: how long a success may take after the one before, beyond a week.
    """
    newest = "$.seen.succeeded[0]"
    newer = {
        "And": [{"Variable": newest, "IsPresent": True}, {"Not": {"Variable": newest, "StringEqualsPath": "$.execution"}}],
        "Next": "Done",
    }
    return {
        "Comment": "Speaks up when a week has passed without a run that succeeded.",
        "StartAt": "Wait",
        "States": {
            "Wait": {"Type": "Wait", "Seconds": WEEK_SECONDS + patience_seconds, "Next": "Look"},
            "Look": {
                **_call(partition, "aws-sdk:sfn:listExecutions"),
                # The newest stands first.
                "Parameters": {"StateMachineArn": machine, "StatusFilter": "SUCCEEDED", "MaxResults": 1},
                "ResultSelector": {"succeeded.$": "$.Executions[*].ExecutionArn"},
                "ResultPath": "$.seen",
                "Next": "Newer",
            },
            "Newer": {"Type": "Choice", "Choices": [newer], "Default": "Notify"},
            "Notify": _notify(
                partition,
                topic,
                subject="trnpipe: a week without a successful run",
                message="States.Format('No run has succeeded since the one of the execution below, a week and the time "
                f"that a run may take. {remedy('MissedWeek')} This is said again every week until one succeeds. Dashboard: "
                f"{console.overview} Last success: {console.execution}', $.execution)",
                then="WaitAgain",
            ),
            "WaitAgain": {"Type": "Wait", "Seconds": WEEK_SECONDS, "Next": "Look"},
            "Done": {"Type": "Succeed"},
        },
    }


def cleanup(partition: str, queues: Sequence[str]) -> dict[str, Any]:
    """Terminates the jobs of an execution that has ended.

    Args:
        queues: ARNs of the queues that it submits to.
    """
    looks = [{"queue": queue, "status": status} for queue in queues for status in ALIVE]
    return {
        "Comment": "Ends the jobs that an execution left behind.",
        "StartAt": "Begin",
        "States": {
            "Begin": {
                "Type": "Pass",
                "Parameters": {"execution.$": "$.execution", "looked": 0, "looks": looks},
                "Next": "Look",
            },
            **_look(partition, then="StillEnded"),
            # Redriven, it needs its jobs.
            "StillEnded": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.seen.Status", "StringEquals": "RUNNING", "Next": "Done"}],
                "Default": "EachQueue",
            },
            "EachQueue": {
                "Type": "Map",
                "ItemsPath": "$.looks",
                "ItemSelector": {
                    "execution.$": "$.execution",
                    "queue.$": "$$.Map.Item.Value.queue",
                    "status.$": "$$.Map.Item.Value.status",
                },
                # In their order.
                "MaxConcurrency": 1,
                "ItemProcessor": _inline("List", _queue_states(partition)),
                **DISCARD,
                "Next": "Looked",
            },
            "Looked": {
                "Type": "Pass",
                "Parameters": {
                    "execution.$": "$.execution",
                    "looked.$": "States.MathAdd($.looked, 1)",
                    "looks.$": "$.looks",
                },
                "Next": "Enough",
            },
            "Enough": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.looked", "NumericGreaterThanEquals": LOOKS, "Next": "Done"}],
                "Default": "Wait",
            },
            "Wait": {"Type": "Wait", "Seconds": LOOK_AGAIN_SECONDS, "Next": "Look"},
            "Done": {"Type": "Succeed"},
        },
    }


def _queue_states(partition: str) -> States:
    """All jobs of one queue in one state, page by page. A job's tags are not in the list."""
    page = {"JobQueue.$": "$.queue", "JobStatus.$": "$.status"}
    listing = {**_call(partition, "aws-sdk:batch:listJobs"), "ResultPath": "$.page", "Next": "EachJob"}
    return {
        "List": {**listing, "Parameters": page},
        "EachJob": {
            "Type": "Map",
            "ItemsPath": "$.page.JobSummaryList",
            "ItemSelector": {"execution.$": "$.execution", "job.$": "$$.Map.Item.Value.JobId"},
            "MaxConcurrency": 5,
            "ItemProcessor": _inline("Describe", _job_states(partition)),
            **DISCARD,
            "Next": "MorePages",
        },
        "MorePages": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.page.NextToken", "IsPresent": True, "Next": "ListMore"}],
            "Default": "LastPage",
        },
        "ListMore": {**listing, "Parameters": {**page, "NextToken.$": "$.page.NextToken"}},
        "LastPage": {"Type": "Succeed"},
    }


def _job_states(partition: str) -> States:
    owner = f"$.seen.Jobs[0].Tags['{EXECUTION_TAG}']"
    return {
        "Describe": {
            **_call(partition, "aws-sdk:batch:describeJobs"),
            "Parameters": {"Jobs.$": "States.Array($.job)"},
            "ResultPath": "$.seen",
            "Next": "Whose",
        },
        "Whose": {
            "Type": "Choice",
            "Choices": [
                {
                    "And": [
                        {"Variable": owner, "IsPresent": True},
                        {"Variable": owner, "StringEqualsPath": "$.execution"},
                    ],
                    "Next": "Terminate",
                }
            ],
            "Default": "LeaveAlone",
        },
        "Terminate": {
            **_call(partition, "aws-sdk:batch:terminateJob"),
            "Parameters": {"JobId.$": "$.job", "Reason": "the execution that submitted this job has ended"},
            "End": True,
        },
        "LeaveAlone": {"Type": "Succeed"},
    }


def _inline(start: str, states: States) -> dict[str, Any]:
    return {"ProcessorConfig": {"Mode": "INLINE"}, "StartAt": start, "States": states}


def _look(partition: str, *, then: str) -> States:
    return {
        "Look": {
            **_call(partition, "aws-sdk:sfn:describeExecution"),
            # Without input and output, which could exceed what a state may hold.
            "Parameters": {"ExecutionArn.$": "$.execution", "IncludedData": "METADATA_ONLY"},
            "ResultSelector": {"Name.$": "$.Name", "Status.$": "$.Status"},
            "ResultPath": "$.seen",
            "Next": then,
        }
    }


def _notify(partition: str, topic: str, *, subject: str, message: str, then: str) -> dict[str, Any]:
    key = "Subject.$" if subject.startswith("States.") else "Subject"
    return {
        **_call(partition, "sns:publish"),
        "Parameters": {"TopicArn": topic, key: subject, "Message.$": message},
        **DISCARD,
        "Next": then,
    }


def _call(partition: str, action: str) -> dict[str, Any]:
    """Retried for hours: nobody watches the watch but its alarm."""
    retry = {
        "ErrorEquals": ["States.ALL"],
        "IntervalSeconds": 5,
        "BackoffRate": 2,
        "MaxAttempts": 10,
        "MaxDelaySeconds": 1800,
        "JitterStrategy": "FULL",
    }
    return {
        "Type": "Task",
        "Resource": f"arn:{partition}:states:::{action}",
        "TimeoutSeconds": CALL_SECONDS,
        "Retry": [retry],
    }


class Watches(Construct):
    """The deployed watches.

    Attributes:
        machines: their state machines, by name.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        state_machine: sfn.StateMachine,
        topic: sns.ITopic,
        topic_key: kms.IKey,
        queue_arns: Mapping[Queue, str],
        console: Console,
        log_group: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        self._name = settings.name
        self._watched = state_machine
        self._log_group = log_group
        self.machines: dict[str, sfn.StateMachine] = {}
        stack = Stack.of(self)
        watched = state_machine.state_machine_arn
        executions = [f"arn:{stack.partition}:states:{stack.region}:{stack.account}:execution:{settings.name}:*"]
        jobs = stack.format_arn(service="batch", resource="job", resource_name="*")
        budget = int(settings.run_config().time_budget.total_seconds())
        notify = [
            (["sns:Publish"], [topic.topic_arn]),
            (["kms:GenerateDataKey", "kms:Decrypt"], [topic_key.key_arn]),
        ]
        describe = (["states:DescribeExecution"], executions)
        self._watch(
            "Overdue", ("RUNNING",), overdue(stack.partition, topic.topic_arn, budget, console), grants=[describe, *notify]
        )
        self._watch(
            "Cleanup",
            ENDED_BADLY,
            cleanup(stack.partition, list(queue_arns.values())),
            grants=[describe, (["batch:ListJobs", "batch:DescribeJobs"], ["*"]), (["batch:TerminateJob"], [jobs])],
        )
        if settings.schedule.enabled:
            # Without a schedule nobody waits for a weekly success.
            patience = budget + 60 * (settings.schedule.lock_wait_minutes + settings.schedule.flexible_minutes)
            self._watch(
                "Week",
                ("SUCCEEDED",),
                week(stack.partition, topic.topic_arn, watched, patience, console),
                grants=[(["states:ListExecutions"], [watched]), *notify],
            )

    def _watch(
        self,
        name: str,
        statuses: Sequence[str],
        definition: Mapping[str, Any],
        *,
        grants: Sequence[tuple[list[str], list[str]]],
    ) -> None:
        """Deploy a watch that is started by every execution whose status becomes one of these."""
        machine = sfn.StateMachine(
            self,
            name,
            state_machine_name=f"{self._name}-{name.lower()}",
            definition_body=sfn.DefinitionBody.from_string(json.dumps(definition)),
            tracing_enabled=True,
            logs=sfn.LogOptions(destination=self._log_group, level=sfn.LogLevel.ALL),
        )
        for actions, resources in grants:
            machine.add_to_role_policy(iam.PolicyStatement(actions=actions, resources=resources))
        events.Rule(
            self,
            f"{name}Rule",
            description=f"Starts {self._name}-{name.lower()}",
            event_pattern=events.EventPattern(
                source=["aws.states"],
                detail_type=["Step Functions Execution Status Change"],
                detail={"stateMachineArn": [self._watched.state_machine_arn], "status": list(statuses)},
            ),
            targets=[
                targets.SfnStateMachine(
                    machine,
                    input=events.RuleTargetInput.from_object({"execution": events.EventField.from_path("$.detail.executionArn")}),
                )
            ],
        )
        self.machines[name] = machine
