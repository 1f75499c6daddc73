"""State machines that watch the one that runs the stages; EventBridge starts them with the ARN of that execution.

    overdue   when an execution begins: waits one time budget, and notifies if the execution still runs.
    week      when one of a schedule's runs succeeds: waits until the next success is due, then notifies repeatedly until one
              succeeds. Every schedule with a period has its own.
    cleanup   when one ends without success: terminates the jobs that it left behind, and notifies.

An alarm cannot do what `week` does. CloudWatch looks back seven days at most, and two successes in a row are as far apart as the
later run took longer: a missing one shows after the schedule's `every_days` and a time budget.

Step Functions ends the job of a `.sync` state with its execution as best effort, and knows nothing of a gang's. So whatever
ended the execution, `cleanup` looks for jobs by the names that it gives to them, and terminates those that carry its ARN: another
execution that resumes the same run has jobs of the same names. It does so twice, because a submission may have been in flight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aws_cdk import Stack
from aws_cdk import aws_events as events
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.console import Console
from infra.event_starts import start_on_event
from infra.runbook import remedy
from infra.setting_sections import Schedule
from infra.settings import Settings
from infra.workflow.states import CALL_SECONDS, DISCARD, States
from pipeline.contract import EXECUTION_TAG, JOB_ENDED, STAGES, Queue

DAY_SECONDS = 24 * 3600
LOOK_AGAIN_SECONDS = 30
LOOKS = 2
ENDED_BADLY = ("ABORTED", "TIMED_OUT", "FAILED")
METADATA_ONLY = {"IncludedData": "METADATA_ONLY"}
"""Without input and output, which could exceed what a state may hold. An execution whose input does has started no job: its first
state holds the input three times."""


def overdue(partition: str, topic: str, budget_seconds: int, console: Console) -> dict[str, Any]:
    """Wait one time budget, and notify if the execution still runs."""
    return {
        "Comment": "Notifies when a run is overdue.",
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
                message=f"States.Format('Run {{}} still runs after its time budget of {budget_seconds // 60} minutes. It "
                f"continues; nothing was stopped. {remedy('Overdue')} Execution: {console.execution} Log: {console.log} "
                f"Dashboard: {console.overview}', $.seen.Name, $.execution, $.seen.Name)",
                then="Done",
            ),
            "Done": {"Type": "Succeed"},
        },
    }


def week(
    partition: str, topic: str, machine: str, name: str, schedule: Schedule, patience_seconds: int, console: Console
) -> dict[str, Any]:
    """Wait for the success after the given one, if that is one of the schedule's registry and mode.

    Args:
        machine: ARN of the state machine.
        name: the schedule's.
        schedule: has a period.
        patience_seconds: how long a success may take after the one before, beyond the period.
    """
    days = schedule.every_days or 0
    period = {1: "a day", 7: "a week"}.get(days, f"{days} days")
    # Where the newest execution of the schedule is, once all have been looked at.
    newest = "$.runs.mine[0]"
    newer = {
        "And": [{"Variable": newest, "IsPresent": True}, {"Not": {"Variable": newest, "StringEqualsPath": "$.execution"}}],
        "Next": "Done",
    }
    # What an execution ends with names its registry, whether its input did or the deployment's `config`.
    look = _look(partition, then="Mine", more={"output.$": "States.StringToJson($.Output)"})
    mine = [
        {"Variable": "$.seen.output.registry", "StringEquals": schedule.registry},
        {"Variable": "$.seen.output.mode", "StringEquals": schedule.mode},
    ]
    each = {
        **look,
        "Mine": {"Type": "Choice", "Choices": [{"And": mine, "Next": "Keep"}], "Default": "Leave"},
        "Keep": {"Type": "Pass", "Parameters": {"mine.$": "$.execution"}, "End": True},
        "Leave": {"Type": "Pass", "Result": {}, "End": True},
    }
    return {
        "Comment": f"Notifies when no run of {name} has succeeded for {period} and the time that a run may take.",
        "StartAt": "Look",
        "States": {
            **look,
            "Mine": {"Type": "Choice", "Choices": [{"And": mine, "Next": "Wait"}], "Default": "Done"},
            "Wait": {"Type": "Wait", "Seconds": days * DAY_SECONDS + patience_seconds, "Next": "List"},
            "List": {
                **_call(partition, "aws-sdk:sfn:listExecutions"),
                # The newest is first. Runs of other schedules are among them.
                "Parameters": {"StateMachineArn": machine, "StatusFilter": "SUCCEEDED", "MaxResults": 100},
                "ResultSelector": {"succeeded.$": "$.Executions[*].ExecutionArn"},
                "ResultPath": "$.listed",
                "Next": "EachRun",
            },
            "EachRun": {
                "Type": "Map",
                "ItemsPath": "$.listed.succeeded",
                "ItemSelector": {"execution.$": "$$.Map.Item.Value"},
                "ItemProcessor": _inline("Look", each),
                "MaxConcurrency": 10,
                "ResultSelector": {"mine.$": "$[*].mine"},
                "ResultPath": "$.runs",
                "Next": "Newer",
            },
            "Newer": {"Type": "Choice", "Choices": [newer], "Default": "Notify"},
            "Notify": _notify(
                partition,
                topic,
                subject=f"trnpipe: {name}: {period} without a successful run",
                message=f"States.Format('No run of {name} has succeeded since the one of the execution below, {period} and the "
                f"time that a run may take. {remedy('MissedWeek')} This notification repeats until one succeeds. Dashboard: "
                f"{console.overview} Last success: {console.execution}', $.execution)",
                then="WaitAgain",
            ),
            "WaitAgain": {"Type": "Wait", "Seconds": days * DAY_SECONDS, "Next": "List"},
            "Done": {"Type": "Succeed"},
        },
    }


def cleanup(partition: str, topic: str, queues: Mapping[Queue, str], console: Console) -> dict[str, Any]:
    """Terminate the jobs of an execution that has ended.

    Args:
        queues: ARN of each queue that it submits to.
    """
    run = "$.seen.input.run"
    return {
        "Comment": "Ends the jobs that an execution left behind.",
        "StartAt": "Begin",
        "States": {
            "Begin": {
                "Type": "Pass",
                "Result": [{"stage": stage.value, "queue": queues[spec.queue]} for stage, spec in STAGES.items()],
                "ResultPath": "$.looks",
                "Assign": {"looked": 0},
                "Next": "Look",
            },
            **_look(partition, then="StillEnded", more={"input.$": "States.StringToJson($.Input)"}),
            "StillEnded": {
                "Type": "Choice",
                "Choices": [
                    # Redriven, it needs its jobs.
                    {"Variable": "$.seen.Status", "StringEquals": "RUNNING", "Next": "Done"},
                    {"And": [{"Variable": run, "IsPresent": True}, {"Variable": run, "IsString": True}], "Next": "RunOfInput"},
                ],
                "Default": "RunOfName",
            },
            # As the workflow names it.
            "RunOfInput": {"Type": "Pass", "Assign": {"run.$": run}, "Next": "EachStage"},
            "RunOfName": {"Type": "Pass", "Assign": {"run.$": "$.seen.Name"}, "Next": "EachStage"},
            "EachStage": {
                "Type": "Map",
                "ItemsPath": "$.looks",
                "ItemSelector": {
                    "execution.$": "$.execution",
                    "name.$": "States.Format('{}-{}', $$.Map.Item.Value.stage, $run)",
                    "queue.$": "$$.Map.Item.Value.queue",
                },
                "ItemProcessor": _inline("List", _listing(partition, topic, console)),
                **DISCARD,
                "Assign": {"looked.$": "States.MathAdd($looked, 1)"},
                "Next": "Enough",
            },
            "Enough": {
                "Type": "Choice",
                "Choices": [{"Variable": "$looked", "NumericGreaterThanEquals": LOOKS, "Next": "Done"}],
                "Default": "Wait",
            },
            "Wait": {"Type": "Wait", "Seconds": LOOK_AGAIN_SECONDS, "Next": "Look"},
            "Done": {"Type": "Succeed"},
        },
    }


def _listing(partition: str, topic: str, console: Console) -> States:
    """All jobs of one name in one queue, page by page. A job's tags are not in the list."""
    # With a filter, ListJobs gives jobs in any state; names match in either case.
    page = {"JobQueue.$": "$.queue", "Filters": [{"Name": "JOB_NAME", "Values.$": "States.Array($.name)"}]}
    listing = {**_call(partition, "aws-sdk:batch:listJobs"), "ResultPath": "$.page", "Next": "AnyJob"}
    return {
        "List": {**listing, "Parameters": page},
        "AnyJob": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.page.JobSummaryList[0]", "IsPresent": True, "Next": "Describe"}],
            "Default": "MorePages",
        },
        # As many as a page has with a filter: 100.
        "Describe": {
            **_call(partition, "aws-sdk:batch:describeJobs"),
            "Parameters": {"Jobs.$": "$.page.JobSummaryList[*].JobId"},
            "ResultPath": "$.seen",
            "Next": "EachJob",
        },
        "EachJob": {
            "Type": "Map",
            "ItemsPath": "$.seen.Jobs",
            "ItemSelector": {"execution.$": "$.execution", "job.$": "$$.Map.Item.Value"},
            "ItemProcessor": _inline("LeftBehind", _job_states(partition, topic, console)),
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


def _job_states(partition: str, topic: str, console: Console) -> States:
    owner, terminated = f"$.job.Tags['{EXECUTION_TAG}']", "$.job.IsTerminated"
    return {
        "LeftBehind": {
            "Type": "Choice",
            "Choices": [
                {
                    "And": [
                        {"Variable": owner, "IsPresent": True},
                        {"Variable": owner, "StringEqualsPath": "$.execution"},
                        *({"Not": {"Variable": "$.job.Status", "StringEquals": status}} for status in JOB_ENDED),
                        # The second look meets the jobs that the first one has terminated.
                        {
                            "Or": [
                                {"Variable": terminated, "IsPresent": False},
                                {"Variable": terminated, "BooleanEquals": False},
                            ]
                        },
                    ],
                    "Next": "Terminate",
                }
            ],
            "Default": "LeaveAlone",
        },
        "Terminate": {
            **_call(partition, "aws-sdk:batch:terminateJob"),
            "Parameters": {"JobId.$": "$.job.JobId", "Reason": "the execution that submitted this job has ended"},
            **DISCARD,
            "Next": "Notify",
        },
        "Notify": _notify(
            partition,
            topic,
            subject="trnpipe: a job of an ended run was terminated",
            message=f"States.Format('Job {{}} ({{}}) was {{}} when its execution had ended, and has been terminated. Execution: "
            f"{console.execution} Dashboard: {console.overview}', $.job.JobName, $.job.JobId, $.job.Status, $.execution)",
            then="Terminated",
            # An alarm reports a failing topic; the second look, and other jobs, must not wait for it.
            catch=True,
        ),
        "Terminated": {"Type": "Succeed"},
        "LeaveAlone": {"Type": "Succeed"},
    }


def _inline(start: str, states: States) -> dict[str, Any]:
    return {"ProcessorConfig": {"Mode": "INLINE"}, "StartAt": start, "States": states}


def _look(partition: str, *, then: str, more: Mapping[str, str] | None = None) -> States:
    """Describe the execution.

    Args:
        more: further fields to keep, in addition to name and status.
    """
    return {
        "Look": {
            **_call(partition, "aws-sdk:sfn:describeExecution"),
            "Parameters": {"ExecutionArn.$": "$.execution", **({} if more else METADATA_ONLY)},
            "ResultSelector": {"Name.$": "$.Name", "Status.$": "$.Status", **(more or {})},
            "ResultPath": "$.seen",
            "Next": then,
        }
    }


def _notify(partition: str, topic: str, *, subject: str, message: str, then: str, catch: bool = False) -> dict[str, Any]:
    """Publish a message.

    Args:
        catch: whether to continue when publishing fails.
    """
    key = "Subject.$" if subject.startswith("States.") else "Subject"
    return {
        **_call(partition, "sns:publish"),
        "Parameters": {"TopicArn": topic, key: subject, "Message.$": message},
        **DISCARD,
        **({"Catch": [{"ErrorEquals": ["States.ALL"], **DISCARD, "Next": then}]} if catch else {}),
        "Next": then,
    }


def _call(partition: str, action: str) -> dict[str, Any]:
    """A call that is retried for hours: only an alarm watches this state machine."""
    return {
        "Type": "Task",
        "Resource": f"arn:{partition}:states:::{action}",
        "TimeoutSeconds": CALL_SECONDS,
        "Retry": [
            {
                "ErrorEquals": ["States.ALL"],
                "IntervalSeconds": 5,
                "BackoffRate": 2,
                "MaxAttempts": 10,
                "MaxDelaySeconds": 1800,
                "JitterStrategy": "FULL",
            }
        ],
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
        self._watched = state_machine.state_machine_arn
        self._log_group = log_group
        self.machines: dict[str, sfn.StateMachine] = {}
        stack = Stack.of(self)
        executions = f"arn:{stack.partition}:states:{stack.region}:{stack.account}:execution:{settings.name}:*"
        jobs = stack.format_arn(service="batch", resource="job", resource_name="*")
        configs = settings.run_configs()
        budget = int(max(config.time_budget for config in configs.values()).total_seconds())
        notify = [
            (["sns:Publish"], [topic.topic_arn]),
            (["kms:GenerateDataKey", "kms:Decrypt"], [topic_key.key_arn]),
        ]
        describe = (["states:DescribeExecution"], [executions])
        self._watch(
            "overdue", ("RUNNING",), overdue(stack.partition, topic.topic_arn, budget, console), grants=[describe, *notify]
        )
        self._watch(
            "cleanup",
            ENDED_BADLY,
            cleanup(stack.partition, topic.topic_arn, queue_arns, console),
            grants=[describe, (["batch:ListJobs", "batch:DescribeJobs"], ["*"]), (["batch:TerminateJob"], [jobs]), *notify],
        )
        for name, schedule in settings.schedules.items():
            # Without a start no success is due.
            if schedule.enabled and schedule.every_days is not None:
                seconds = configs[f"schedules.{name}.config"].time_budget.total_seconds()
                patience = int(seconds) + 60 * (schedule.lock_wait_minutes + schedule.flexible_minutes)
                self._watch(
                    f"week-{name}",
                    ("SUCCEEDED",),
                    week(stack.partition, topic.topic_arn, self._watched, name, schedule, patience, console),
                    grants=[describe, (["states:ListExecutions"], [self._watched]), *notify],
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
        construct_id = name.title().replace("-", "")
        machine = sfn.StateMachine(
            self,
            construct_id,
            state_machine_name=f"{self._name}-{name}",
            definition_body=sfn.DefinitionBody.from_string(json.dumps(definition)),
            tracing_enabled=True,
            logs=sfn.LogOptions(destination=self._log_group, level=sfn.LogLevel.ALL),
        )
        for actions, resources in grants:
            machine.add_to_role_policy(iam.PolicyStatement(actions=actions, resources=resources))
        start_on_event(
            self,
            construct_id,
            machine,
            description=f"Starts {self._name}-{name}",
            pattern=events.EventPattern(
                source=["aws.states"],
                detail_type=["Step Functions Execution Status Change"],
                detail={"stateMachineArn": [self._watched], "status": list(statuses)},
            ),
            given={"execution": events.EventField.from_path("$.detail.executionArn")},
        )
        self.machines[name] = machine
