"""The starts: EventBridge schedules of the weekly run, which waits for a run in progress, and of refreshes."""

from __future__ import annotations

from typing import Any

from aws_cdk import Duration, TimeZone
from aws_cdk import aws_scheduler as scheduler
from aws_cdk import aws_scheduler_targets as targets
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.settings import Settings


class WeeklyStart(Construct):
    """Starts the state machine every week, and refreshes in between.

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
        self._start(
            "Weekly",
            f"The weekly run of {settings.name}",
            state_machine,
            enabled=weekly.enabled,
            schedule=scheduler.ScheduleExpression.expression(weekly.schedule_expression, TimeZone.of(weekly.time_zone)),
            flexible_minutes=weekly.flexible_minutes,
            # Delivery is at least once; the lock makes a second start of the same week wait, and it then finds no new data.
            given={"share": weekly.share, "lock": {"wait_minutes": weekly.lock_wait_minutes}},
        )
        self._start(
            "Refresh",
            f"Refreshes of the embeddings of {settings.name}",
            state_machine,
            enabled=weekly.refresh_enabled,
            schedule=scheduler.ScheduleExpression.expression(weekly.refresh_expression, TimeZone.of(weekly.time_zone)),
            flexible_minutes=weekly.flexible_minutes,
            # One that finds another in progress ends: the next one does its work.
            given={"share": weekly.share, "mode": "refresh"},
        )

    def _start(
        self,
        name: str,
        description: str,
        state_machine: sfn.IStateMachine,
        *,
        enabled: bool,
        schedule: scheduler.ScheduleExpression,
        flexible_minutes: int,
        given: dict[str, Any],
    ) -> None:
        minutes = Duration.minutes(flexible_minutes)
        scheduler.Schedule(
            self,
            name,
            description=description,
            enabled=enabled,
            schedule=schedule,
            time_window=scheduler.TimeWindow.flexible(minutes) if flexible_minutes else scheduler.TimeWindow.off(),
            target=targets.StepFunctionsStartExecution(
                state_machine,
                input=scheduler.ScheduleTargetInput.from_object(given),
                dead_letter_queue=self.dead_letters,
                max_event_age=Duration.hours(6),
                retry_attempts=20,
            ),
        )
