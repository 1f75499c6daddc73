"""What tells people: the topic, notices of executions that ended without running their last states, a watch on the time
budget, alarms, and a dashboard.

An execution that ends by itself publishes its own outcome (infra/workflow.py). One that is aborted or times out runs no
further state; EventBridge speaks for it.
"""

from __future__ import annotations

import json

from aws_cdk import Duration, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.settings import Settings


class Topic(Construct):
    """Where outcomes, notices and alarms are published.

    Attributes:
        topic, key: the topic and the key that encrypts it (the AWS-managed one would shut out EventBridge and CloudWatch).
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        self.key = kms.Key(self, "Key", description=f"Notifications of {settings.name}", enable_key_rotation=True)
        self.topic = sns.Topic(self, "Topic", master_key=self.key, enforce_ssl=True)
        for service in ("events.amazonaws.com", "cloudwatch.amazonaws.com"):
            principal = iam.ServicePrincipal(service)
            self.key.grant_encrypt_decrypt(principal)
            self.topic.grant_publish(principal)
        for address in settings.notify:
            self.topic.add_subscription(subscriptions.EmailSubscription(address))


class Monitoring(Construct):
    """Notices, alarms and the dashboard of one deployment."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        state_machine: sfn.StateMachine,
        topic: sns.ITopic,
        topic_key: kms.IKey,
        dead_letters: sqs.IQueue,
        watch_logs: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        self._name = settings.name
        self._topic = topic
        budget = settings.run_config().time_budget
        self._notice_unfinished(state_machine)
        self._watch_budget(state_machine, topic_key, int(budget.total_seconds()), watch_logs)
        hours = Duration.hours(1)
        failed = state_machine.metric_failed(period=hours, statistic="Sum")
        lost = dead_letters.metric_approximate_number_of_messages_visible(period=hours, statistic="Maximum")
        took = state_machine.metric("ExecutionTime", period=hours, statistic="Maximum")
        succeeded = state_machine.metric_succeeded(period=Duration.days(1), statistic="Sum")
        self._alarm("Failed", failed, 1, "A run failed, or its model was refused: the notification says why.")
        self._alarm("Aborted", state_machine.metric_aborted(period=hours, statistic="Sum"), 1, "A run was stopped by hand.")
        self._alarm("TimedOut", state_machine.metric_timed_out(period=hours, statistic="Sum"), 1, "A run timed out.")
        self._alarm("Overdue", took, budget.total_seconds() * 1000, "A run took longer than its time budget.")
        self._alarm("NotStarted", lost, 1, "The weekly start could not be delivered: see the dead-letter queue.")
        if settings.schedule.enabled:
            self._alarm(
                "NoSuccess",
                succeeded,
                1,
                "No run has succeeded for seven days.",
                periods=7,
                comparison=cloudwatch.ComparisonOperator.LESS_THAN_THRESHOLD,
                missing=cloudwatch.TreatMissingData.BREACHING,
            )
        self._dashboard(state_machine, took, lost)

    def _notice_unfinished(self, state_machine: sfn.StateMachine) -> None:
        field = events.EventField.from_path
        events.Rule(
            self,
            "Unfinished",
            description="Executions that ended without running their last states",
            event_pattern=events.EventPattern(
                source=["aws.states"],
                detail_type=["Step Functions Execution Status Change"],
                detail={"stateMachineArn": [state_machine.state_machine_arn], "status": ["ABORTED", "TIMED_OUT"]},
            ),
            targets=[
                targets.SnsTopic(
                    self._topic,
                    message=events.RuleTargetInput.from_text(
                        f"Run {field('$.detail.name')} ended {field('$.detail.status')} and wrote no report. Its lock counts as "
                        f"free; started again with its run id it goes on where it stopped. Execution: "
                        f"{field('$.detail.executionArn')}"
                    ),
                )
            ],
        )

    def _watch_budget(
        self, state_machine: sfn.StateMachine, topic_key: kms.IKey, budget_seconds: int, log_group: logs.ILogGroup
    ) -> None:
        """Every execution has a watch that looks at it once, when its time budget is spent."""
        stack = Stack.of(self)
        watch = sfn.StateMachine(
            self,
            "Watch",
            state_machine_name=f"{self._name}-watch",
            definition_body=sfn.DefinitionBody.from_string(
                json.dumps(watch_definition(stack.partition, self._topic.topic_arn, budget_seconds))
            ),
            tracing_enabled=True,
            logs=sfn.LogOptions(destination=log_group, level=sfn.LogLevel.ALL),
        )
        executions = f"arn:{stack.partition}:states:{stack.region}:{stack.account}:execution:{self._name}:*"
        for action, resource in (
            ("states:DescribeExecution", executions),
            ("sns:Publish", self._topic.topic_arn),
            ("kms:GenerateDataKey", topic_key.key_arn),
            ("kms:Decrypt", topic_key.key_arn),
        ):
            watch.add_to_role_policy(iam.PolicyStatement(actions=[action], resources=[resource]))
        events.Rule(
            self,
            "Started",
            description="Executions that begin",
            event_pattern=events.EventPattern(
                source=["aws.states"],
                detail_type=["Step Functions Execution Status Change"],
                detail={"stateMachineArn": [state_machine.state_machine_arn], "status": ["RUNNING"]},
            ),
            targets=[
                targets.SfnStateMachine(
                    watch,
                    input=events.RuleTargetInput.from_object({"execution": events.EventField.from_path("$.detail.executionArn")}),
                )
            ],
        )

    def _alarm(
        self,
        construct_id: str,
        metric: cloudwatch.IMetric,
        threshold: float,
        description: str,
        *,
        periods: int = 1,
        comparison: cloudwatch.ComparisonOperator = cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
        missing: cloudwatch.TreatMissingData = cloudwatch.TreatMissingData.NOT_BREACHING,
    ) -> None:
        alarm = cloudwatch.Alarm(
            self,
            construct_id,
            alarm_name=f"{self._name}-{construct_id}",
            alarm_description=description,
            metric=metric,
            threshold=threshold,
            evaluation_periods=periods,
            comparison_operator=comparison,
            treat_missing_data=missing,
        )
        alarm.add_alarm_action(actions.SnsAction(self._topic))

    def _dashboard(self, state_machine: sfn.StateMachine, took: cloudwatch.IMetric, lost: cloudwatch.IMetric) -> None:
        day = Duration.days(1)
        cloudwatch.Dashboard(
            self,
            "Dashboard",
            dashboard_name=self._name,
            default_interval=Duration.days(90),
            widgets=[
                [
                    cloudwatch.GraphWidget(
                        title="Runs",
                        width=12,
                        left=[
                            state_machine.metric_started(period=day),
                            state_machine.metric_succeeded(period=day),
                            state_machine.metric_failed(period=day),
                            state_machine.metric_aborted(period=day),
                            state_machine.metric_timed_out(period=day),
                        ],
                    ),
                    cloudwatch.GraphWidget(title="Duration of runs", width=12, left=[took]),
                ],
                [cloudwatch.GraphWidget(title="Starts that could not be delivered", width=12, left=[lost])],
            ],
        )


def watch_definition(partition: str, topic_arn: str, budget_seconds: int) -> dict[str, object]:
    """A state machine that waits one time budget and speaks up if the execution it was given still runs."""
    retry = [{"ErrorEquals": ["States.ALL"], "IntervalSeconds": 5, "BackoffRate": 2, "MaxAttempts": 6, "JitterStrategy": "FULL"}]
    call = {"Type": "Task", "TimeoutSeconds": 60, "Retry": retry}
    return {
        "Comment": "Speaks up when a run is overdue.",
        "StartAt": "Wait",
        "States": {
            "Wait": {"Type": "Wait", "Seconds": budget_seconds, "Next": "Look"},
            "Look": {
                **call,
                "Resource": f"arn:{partition}:states:::aws-sdk:sfn:describeExecution",
                # Without input and output, which could exceed what a state may hold.
                "Parameters": {"ExecutionArn.$": "$.execution", "IncludedData": "METADATA_ONLY"},
                "ResultSelector": {"Name.$": "$.Name", "Status.$": "$.Status", "ExecutionArn.$": "$.ExecutionArn"},
                "Next": "StillRuns",
            },
            "StillRuns": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.Status", "StringEquals": "RUNNING", "Next": "Notify"}],
                "Default": "Done",
            },
            "Notify": {
                **call,
                "Resource": f"arn:{partition}:states:::sns:publish",
                "Parameters": {
                    "TopicArn": topic_arn,
                    "Subject.$": "States.Format('trnpipe: {} overdue', $.Name)",
                    "Message.$": f"States.Format('Run {{}} still runs after its time budget of {budget_seconds // 60} minutes. "
                    "It goes on; nothing was stopped. Execution: {}', $.Name, $.ExecutionArn)",
                },
                "Next": "Done",
            },
            "Done": {"Type": "Succeed"},
        },
    }
