"""The weekly start: one EventBridge schedule that passes its share and how long it waits for a run in progress."""

from __future__ import annotations

from aws_cdk import Duration, TimeZone
from aws_cdk import aws_scheduler as scheduler
from aws_cdk import aws_scheduler_targets as targets
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.settings import Settings


class WeeklyStart(Construct):
    """Starts the state machine every week.

    Attributes:
        dead_letters: starts that could not be delivered; failed runs do not land here.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings, state_machine: sfn.IStateMachine) -> None:
        super().__init__(scope, construct_id)
        weekly = settings.schedule
        self.dead_letters = sqs.Queue(
            self,
            "DeadLetters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=Duration.days(14),
        )
        scheduler.Schedule(
            self,
            "Weekly",
            description=f"The weekly run of {settings.name}",
            enabled=weekly.enabled,
            schedule=scheduler.ScheduleExpression.expression(weekly.schedule_expression, TimeZone.of(weekly.time_zone)),
            time_window=scheduler.TimeWindow.flexible(Duration.minutes(weekly.flexible_minutes))
            if weekly.flexible_minutes
            else scheduler.TimeWindow.off(),
            target=targets.StepFunctionsStartExecution(
                state_machine,
                # Delivery is at least once; the lock makes a second start of the same week wait, and it then finds no new data.
                input=scheduler.ScheduleTargetInput.from_object(
                    {"share": weekly.share, "lock": {"wait_minutes": weekly.lock_wait_minutes}}
                ),
                dead_letter_queue=self.dead_letters,
                max_event_age=Duration.hours(6),
                retry_attempts=20,
            ),
        )
