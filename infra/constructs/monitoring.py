"""Notifications: the topic, notices of events that no state can report, alarms, and a dashboard.

An execution that ends by itself publishes its own outcome (infra/workflow/machine.py). One that is aborted or times out runs no
further state: EventBridge reports it, and blocked queues, with the reason that an alarm cannot give. Checks that must wait are in
infra/workflow/watches.py.
Metrics of the containers come from the catalogue in pipeline.contract; what alarms mean, from infra/runbook.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from aws_cdk import ArnFormat, Duration, RemovalPolicy, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.console import Console
from infra.runbook import GUIDE, advice, remedy
from infra.settings import Settings
from pipeline.contract import (
    DEPLOYMENT_DIMENSION,
    GATE_REFUSED,
    METRICS,
    METRICS_NAMESPACE,
    STAGE_DIMENSION,
    Metric,
    Queue,
    Stage,
)

CHECKPOINT_STALL_SECONDS = 60
"""Training waits for a copy in host memory, which takes seconds; a minute means that it waited for an upload."""

REFUSALS = "RunsRefused"
"""Counted in the state machine's log: Step Functions itself counts a refused run as failed."""

PANELS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("Training: pairs per second", (Metric.PAIRS_PER_SECOND,)),
    ("Training: loss", (Metric.LOSS,)),
    ("Training: seconds per step", (Metric.STEP_SECONDS,)),
    ("Training: share of time without data", (Metric.DATA_WAIT_SHARE,)),
    ("Training: utilization of NeuronCores", (Metric.CORE_UTILIZATION,)),
    ("Training: seconds stalled for a checkpoint", (Metric.CHECKPOINT_STALL_SECONDS,)),
    ("Graphs that were not compiled ahead", (Metric.NEW_GRAPHS,)),
    ("Seconds that jobs waited for their hosts", (Metric.QUEUE_WAIT_SECONDS,)),
    ("Attempts beyond the first", (Metric.RETRIES,)),
    ("Unhealthy hosts", (Metric.UNHEALTHY_HOSTS,)),
    ("Memory errors of devices", (Metric.ECC_CORRECTED, Metric.ECC_UNCORRECTED)),
    ("gate.metric on the hold-out", (Metric.QUALITY, Metric.BASELINE_QUALITY)),
    ("Drop that the gate judged", (Metric.GATE_DROP,)),
    ("Drift of the documents", (Metric.COSINE, Metric.NEIGHBOUR_OVERLAP)),
    ("Embedding: documents per second", (Metric.DOCUMENTS_PER_SECOND,)),
    ("Quarantined", (Metric.QUARANTINED_ROWS, Metric.QUARANTINED_DOCUMENTS)),
)
"""Panels of the dashboard, two in a row: title, metrics."""

field = events.EventField.from_path


class Topic(Construct):
    """The topic of outcomes, notices and alarms.

    Attributes:
        topic, key: the topic and the key that encrypts it (the AWS-managed one would shut out EventBridge and CloudWatch).
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings) -> None:
        super().__init__(scope, construct_id)
        self.key = kms.Key(
            self,
            "Key",
            description=f"Notifications of {settings.name}",
            enable_key_rotation=True,
            # Nothing is stored under it: it goes with the topic, and while its deletion waits it costs nothing.
            removal_policy=RemovalPolicy.DESTROY,
            pending_window=Duration.days(7),
        )
        self.topic = sns.Topic(self, "Topic", master_key=self.key, enforce_ssl=True)
        stack = Stack.of(self)
        alarms = {
            "StringEquals": {"aws:SourceAccount": stack.account},
            "ArnLike": {
                "aws:SourceArn": stack.format_arn(
                    service="cloudwatch", resource="alarm", resource_name="*", arn_format=ArnFormat.COLON_RESOURCE_NAME
                )
            },
        }
        for principal in (
            # EventBridge publishes to no topic whose policy has conditions, nor with a key whose policy names its account or ARN
            # (https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-use-resource-based.html#eb-sns-permissions,
            # https://docs.aws.amazon.com/sns/latest/dg/sns-key-management.html#compatibility-with-aws-services).
            iam.ServicePrincipal("events.amazonaws.com"),
            iam.ServicePrincipal("cloudwatch.amazonaws.com", conditions=alarms),
        ):
            # What both guides name, and neither kms:Encrypt nor kms:ReEncrypt.
            self.key.grant(principal, "kms:GenerateDataKey*", "kms:Decrypt")
            self.topic.grant_publish(principal)
        for one in settings.notify:
            sns.Subscription(
                self.topic,
                one.endpoint,
                topic=self.topic,
                protocol=sns.SubscriptionProtocol[one.protocol.replace("-", "_").upper()],
                endpoint=one.endpoint,
                subscription_role_arn=one.role,
            )


class Monitoring(Construct):
    """Notices, alarms and the dashboard of one deployment."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        state_machine: sfn.StateMachine,
        watches: Mapping[str, sfn.StateMachine],
        machine_logs: logs.ILogGroup,
        queue_arns: Mapping[Queue, str],
        topic: sns.ITopic,
        dead_letters: sqs.IQueue,
        default_group_id: str | None,
        console: Console,
    ) -> None:
        """
        Args:
            default_group_id: the VPC's default security group, where gangs' containers depend on its rules.
        """
        super().__init__(scope, construct_id)
        self._name = settings.name
        self._topic = topic
        self._console = console
        self._machine = state_machine
        self._notice_unfinished()
        if default_group_id is not None:
            # Rules that empty default groups (Security Hub EC2.2 and its remedies) would cut a gang's nodes off from each other.
            self._notice(
                "DefaultGroupNotice",
                description="Rules removed from the VPC's default security group, which gangs' containers have",
                # Delivered where the account has a trail that logs management events.
                pattern=events.EventPattern(
                    source=["aws.ec2"],
                    detail_type=["AWS API Call via CloudTrail"],
                    detail={
                        "eventName": ["RevokeSecurityGroupIngress", "RevokeSecurityGroupEgress"],
                        "requestParameters": {"groupId": [default_group_id]},
                    },
                ),
                message=f"{field('$.detail.eventName')} on {default_group_id} by {field('$.detail.userIdentity.arn')}: the nodes "
                f"of a gang connect over the interfaces that have this group. {remedy('DefaultGroup')}",
            )
        blocked = self._notice(
            "QueueBlockedNotice",
            description="Queues whose first job cannot be placed",
            pattern=events.EventPattern(
                source=["aws.batch"],
                detail_type=["Batch Job Queue Blocked"],
                detail={"jobQueue": list(queue_arns.values())},
            ),
            message=f"Job {field('$.detail.jobName')} at the head of queue {field('$.detail.jobQueue')} cannot be placed: "
            f"{field('$.detail.statusReason')}. Everything behind it waits. {remedy('QueueBlocked')} "
            f"Dashboard: {self._console.overview}",
        )
        # Executions that the gate ended: Step Functions counts them as failed.
        refused = logs.MetricFilter(
            self,
            "Refusals",
            log_group=machine_logs,
            filter_pattern=logs.FilterPattern.all_terms("ExecutionFailed", GATE_REFUSED),
            # The metric of a filter has no dimensions that we could choose.
            metric_namespace=f"{METRICS_NAMESPACE}/{self._name}",
            metric_name=REFUSALS,
            metric_value="1",
            default_value=0,
        ).metric(period=Duration.hours(1), statistic="Sum")
        self._dashboard(self._alarms(settings, refused, watches, dead_letters, blocked), refused, dead_letters)

    def _notice_unfinished(self) -> None:
        run, execution = field("$.detail.name"), field("$.detail.executionArn")
        for status, name in (("ABORTED", "Aborted"), ("TIMED_OUT", "TimedOut")):
            self._notice(
                f"{name}Notice",
                description=f"Executions that ended {status}, without running their last states",
                pattern=events.EventPattern(
                    source=["aws.states"],
                    detail_type=["Step Functions Execution Status Change"],
                    detail={"stateMachineArn": [self._machine.state_machine_arn], "status": [status]},
                ),
                message=f"Run {run} ended {status} and wrote no report. Its jobs are terminated, and its lock counts as free; "
                f"started again with its run id, it resumes. {remedy(name)} "
                f"Execution: {self._console.execution.format(execution)} Log: {self._console.log.format(run)}",
            )

    def _notice(self, construct_id: str, *, description: str, pattern: events.EventPattern, message: str) -> events.Rule:
        return events.Rule(
            self,
            construct_id,
            description=description,
            event_pattern=pattern,
            targets=[targets.SnsTopic(self._topic, message=events.RuleTargetInput.from_text(message))],
        )

    def _alarms(
        self,
        settings: Settings,
        refused: cloudwatch.Metric,
        watches: Mapping[str, sfn.StateMachine],
        dead_letters: sqs.IQueue,
        blocked: events.Rule,
    ) -> list[cloudwatch.IAlarm]:
        """
        Args:
            blocked: the rule for blocked queues; Batch has no other count of them.
        """
        machine, hours, soon = self._machine, Duration.hours(1), Duration.minutes(5)
        failed = cloudwatch.MathExpression(
            # Where the log did not arrive, a refused run is called failed: nothing goes unnoticed.
            expression="failed - FILL(refused, 0)",
            using_metrics={"failed": machine.metric_failed(period=hours, statistic="Sum"), "refused": refused},
            period=hours,
            label="Runs that failed",
        )
        broken = cloudwatch.MathExpression(
            expression="SUM(METRICS())",
            using_metrics={
                f"watch{number}": watch.metric_failed(period=hours, statistic="Sum")
                for number, watch in enumerate(watches.values())
            },
            period=hours,
            label="Watches that failed",
        )
        notices = cloudwatch.Metric(
            namespace="AWS/Events",
            metric_name="Invocations",
            dimensions_map={"RuleName": blocked.rule_name},
            statistic="Sum",
            period=soon,
            label="Queues that are blocked",
        )
        thresholds: dict[str, tuple[cloudwatch.IMetric, float]] = {
            "Failed": (failed, 1),
            "Refused": (refused, 1),
            "Aborted": (machine.metric_aborted(period=hours, statistic="Sum"), 1),
            "TimedOut": (machine.metric_timed_out(period=hours, statistic="Sum"), 1),
            # After its end; a watch notifies while it still runs.
            "Overdue": (
                machine.metric("ExecutionTime", period=hours, statistic="Maximum"),
                settings.run_config().time_budget.total_seconds() * 1000,
            ),
            "NotStarted": (_waiting_messages(dead_letters), 1),
            "WatchFailed": (broken, 1),
            "QueueBlocked": (notices, 1),
            "UnhealthyHost": (self._metric(Metric.UNHEALTHY_HOSTS, soon), 1),
            "MemoryErrors": (self._metric(Metric.ECC_UNCORRECTED, soon), 1),
            "NewGraphs": (self._metric(Metric.NEW_GRAPHS, soon, stage=Stage.TRAIN), 1),
            "CheckpointStall": (self._metric(Metric.CHECKPOINT_STALL_SECONDS, soon), CHECKPOINT_STALL_SECONDS),
        }
        return [self._alarm(name, metric, threshold) for name, (metric, threshold) in thresholds.items()]

    def _metric(self, metric: Metric, period: Duration, *, stage: Stage | None = None) -> cloudwatch.Metric:
        """One metric of the catalogue, of all stages together or of one."""
        return cloudwatch.Metric(
            namespace=METRICS_NAMESPACE,
            metric_name=metric.value,
            dimensions_map={DEPLOYMENT_DIMENSION: self._name, **({STAGE_DIMENSION: stage.value} if stage else {})},
            statistic=METRICS[metric].statistic,
            period=period,
            label=stage.value if stage else metric.value,
        )

    def _alarm(self, name: str, metric: cloudwatch.IMetric, threshold: float) -> cloudwatch.IAlarm:
        alarm = cloudwatch.Alarm(
            self,
            name,
            alarm_name=f"{self._name}-{name}",
            alarm_description=advice(name),
            metric=metric,
            threshold=threshold,
            evaluation_periods=1,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )
        alarm.add_alarm_action(actions.SnsAction(self._topic))
        return alarm

    def _dashboard(self, alarms: list[cloudwatch.IAlarm], refused: cloudwatch.Metric, dead_letters: sqs.IQueue) -> None:
        day, often, machine = Duration.days(1), Duration.minutes(5), self._machine
        runs = [
            machine.metric_started(period=day, statistic="Sum"),
            machine.metric_succeeded(period=day, statistic="Sum"),
            machine.metric_failed(period=day, statistic="Sum"),
            refused.with_(period=day),
            machine.metric_aborted(period=day, statistic="Sum"),
            machine.metric_timed_out(period=day, statistic="Sum"),
        ]
        took = machine.metric("ExecutionTime", period=day, statistic="Maximum")
        panels = [
            *(
                cloudwatch.GraphWidget(
                    title=title, width=12, left=[line for metric in metrics for line in self._lines(metric, often)]
                )
                for title, metrics in PANELS
            ),
            cloudwatch.GraphWidget(title="Starts that could not be delivered", width=12, left=[_waiting_messages(dead_letters)]),
        ]
        links = {
            "Executions": self._console.machine(machine.state_machine_arn),
            "Log of all jobs": self._console.job_log_group,
            "Runs and registry": self._console.bucket_objects,
        }
        shown = " | ".join(f"[{title}]({link})" for title, link in links.items())
        text = f"# {self._name}\n{shown}\n\nWhat alarms mean, and what to do first: {GUIDE} of the repository."
        cloudwatch.Dashboard(
            self,
            "Dashboard",
            dashboard_name=self._name,
            default_interval=Duration.days(90),
            widgets=[
                [cloudwatch.TextWidget(markdown=text, width=24, height=3)],
                [cloudwatch.AlarmStatusWidget(title="Alarms", width=24, height=3, alarms=alarms)],
                [
                    cloudwatch.GraphWidget(title="Runs", width=12, left=runs),
                    cloudwatch.GraphWidget(title="Duration of runs", width=12, left=[took]),
                ],
                *(panels[start : start + 2] for start in range(0, len(panels), 2)),
            ],
        )

    def _lines(self, metric: Metric, period: Duration) -> list[cloudwatch.IMetric]:
        """A line per stage where there are several."""
        stages = METRICS[metric].stages
        return [self._metric(metric, period, stage=stage) for stage in (stages if len(stages) > 1 else (None,))]


def _waiting_messages(queue: sqs.IQueue) -> cloudwatch.Metric:
    return queue.metric_approximate_number_of_messages_visible(period=Duration.hours(1), statistic="Maximum")
