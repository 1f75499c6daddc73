"""The starts: for every schedule of the settings, one of EventBridge Scheduler or a rule on the events of a bucket."""

from __future__ import annotations

from aws_cdk import Duration, TimeZone
from aws_cdk import aws_events as events
from aws_cdk import aws_scheduler as scheduler
from aws_cdk import aws_scheduler_targets as targets
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.event_starts import MAX_EVENT_HOURS, RETRY_ATTEMPTS, start_on_event
from infra.setting_sections import Marker
from infra.settings import Settings


class Starts(Construct):
    """Starts the state machine by every schedule, with the schedule's input.

    Delivery is at least once. The lock makes a second start of the same week wait, and it then finds no new data.

    Attributes:
        dead_letters: starts that could not be delivered; failed runs do not land here.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: Settings, state_machine: sfn.IStateMachine) -> None:
        super().__init__(scope, construct_id)
        self.dead_letters = sqs.Queue(
            self,
            "DeadLetters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=Duration.days(14),
        )
        for name, schedule in settings.schedules.items():
            description = f"Starts {settings.name}: {name}"
            if isinstance(schedule.when, Marker):
                bucket, prefix = schedule.when.location
                start_on_event(
                    self,
                    name.capitalize(),
                    state_machine,
                    description=description,
                    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/ev-events.html
                    pattern=events.EventPattern(
                        source=["aws.s3"],
                        detail_type=["Object Created"],
                        detail={"bucket": {"name": [bucket]}, "object": {"key": [{"prefix": prefix}]}},
                    ),
                    given=schedule.given,
                    enabled=schedule.enabled,
                    dead_letters=self.dead_letters,
                )
                continue
            minutes, at_once = Duration.minutes(schedule.flexible_minutes), scheduler.TimeWindow.off()
            scheduler.Schedule(
                self,
                name.capitalize(),
                description=description,
                enabled=schedule.enabled,
                schedule=scheduler.ScheduleExpression.expression(schedule.when, TimeZone.of(schedule.time_zone)),
                time_window=scheduler.TimeWindow.flexible(minutes) if schedule.flexible_minutes else at_once,
                target=targets.StepFunctionsStartExecution(
                    state_machine,
                    input=scheduler.ScheduleTargetInput.from_object(schedule.given),
                    dead_letter_queue=self.dead_letters,
                    max_event_age=Duration.hours(MAX_EVENT_HOURS),
                    retry_attempts=RETRY_ATTEMPTS,
                ),
            )
