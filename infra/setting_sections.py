"""The sections of a deployment's settings with their own rules, and the error for a value that cannot work."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, Any, Literal
from zoneinfo import available_timezones

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

IDENTIFIER = "([0-9a-f]{8}|[0-9a-f]{17})"
Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
DAYS_OF_WEEK = 7


class InvalidSetting(ValueError):
    """A setting that cannot work, with the remedy."""

    def __init__(self, what: str, *, remedy: str, rule: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy
        self.rule = rule


def refuse_if(wrong: object, what: str, *, remedy: str, rule: str = "") -> None:
    """Refuse a setting where `wrong` is true.

    Raises:
        InvalidSetting: as `what`, `remedy` and `rule` say.
    """
    if wrong:
        raise InvalidSetting(what, remedy=remedy, rule=rule)


class SettingsSection(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PrivateSubnet(SettingsSection):
    """A private subnet of an existing VPC."""

    subnet_id: str = Field(pattern=f"^subnet-{IDENTIFIER}$", description="Id of the subnet.")
    route_table_id: str = Field(pattern=f"^rtb-{IDENTIFIER}$", description="The subnet's route table.")


class Egress(SettingsSection):
    """A destination that hosts and tasks may connect to, over TCP."""

    cidr: IPv4Network = Field(description="Addresses, such as 10.1.2.0/24.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(description="TCP port.")


class ExistingVpc(SettingsSection):
    """An existing VPC. Its private subnets need routes or endpoints to the services that network.py names."""

    vpc_id: str = Field(pattern=f"^vpc-{IDENTIFIER}$", description="Id of the VPC.")
    subnets: dict[str, PrivateSubnet] = Field(
        description="Zone -> a private subnet there, for `zone` and all of `embed_zones` and `service_zones`."
    )
    default_security_group_id: str = Field(
        pattern=f"^sg-{IDENTIFIER}$",
        description="The VPC's default security group: a gang's containers get it on their own interface, because the compute "
        "environment may name no group in addition to the launch template's. It must allow itself, and 443 outwards.",
    )
    resolvers: tuple[IPv4Address, ...] = Field(
        (),
        description="DNS servers of the VPC's DHCP option set, unless that is AmazonProvidedDNS, which no security group "
        "filters: port 53 outwards, UDP and TCP.",
    )
    egress: tuple[Egress, ...] = Field(
        (),
        description="Destinations besides port 443 anywhere, such as a proxy, which jobs then find by "
        "`environment`: {cidr: 10.1.2.0/24, port: 3128}.",
    )


class CapacityReservation(SettingsSection):
    """Hosts that EC2 reserves for the gangs: a reservation or Capacity Block by id, or several reservations by group."""

    id: str | None = Field(
        None,
        pattern=f"^cr-{IDENTIFIER}$",
        description="Id of an On-Demand Capacity Reservation, or of a Capacity Block (`block: true`).",
    )
    group: str | None = Field(
        None,
        pattern=r"^arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:[0-9]{12}:group/.+$",
        description="ARN of a resource group of Capacity Reservations; where none of them has capacity, hosts start on demand.",
    )
    block: bool = Field(False, description="`id` is a Capacity Block for ML: EC2 places its hosts itself.")
    placement_group: str | None = Field(
        None,
        pattern=r"^[ -~]{1,255}$",
        description="Name of the cluster placement group in which the capacity was reserved. None: the stack creates one; "
        "hosts use only capacity that is reserved in their group.",
    )

    @model_validator(mode="after")
    def _one_target(self) -> CapacityReservation:
        refuse_if(
            (self.id is None) == (self.group is None),
            "names either `id` or `group`",
            remedy="name one of them, or leave capacity_reservation out",
        )
        refuse_if(
            self.block and (self.id is None or self.placement_group is not None),
            "a Capacity Block is named by its id alone: EC2 places its hosts together itself",
            remedy="name `id` and take `group` and `placement_group` out",
        )
        return self


class Images(SettingsSection):
    """Container images. Without a URI, the repository that the data stack creates, at `tag`."""

    tag: str = Field(
        "0.1.0",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$",
        description="Tag of both images in the deployment's repositories.",
    )
    neuron: str | None = Field(None, description="Full URI of the image for accelerator hosts.")
    cpu: str | None = Field(None, description="Full URI of the image for Fargate.")

    @field_validator("tag", "neuron", "cpu")
    @classmethod
    def _pinned(cls, image: str | None) -> str | None:
        if image is not None and (image == "latest" or image.endswith(":latest")):
            raise ValueError("an image is pinned by a version tag or digest; `latest` moves under a run that is being retried")
        return image


class WeeklySchedule(SettingsSection):
    """Start and input of the weekly run."""

    enabled: bool = Field(
        False,
        description="Switch it on here or in the environment's file, after the first successful run; the next deployment would "
        "not know a `-c` option.",
    )
    weekday: Weekday = Field("sunday", description="Day of the weekly start, in `time_zone`.")
    hour: Annotated[int, Field(ge=0, le=23)] = Field(3, description="Hour of the weekly start, in `time_zone`.")
    minute: Annotated[int, Field(ge=0, le=59)] = Field(0, description="Minute of the weekly start.")
    expression: str | None = Field(
        None,
        pattern=r"^(cron|rate)\(.+\)$",
        description="Replaces weekday, hour and minute: an EventBridge Scheduler expression, passed through unchanged, such as "
        "cron(0 3 ? * MON#1 *) or rate(3 days). Set `every_days`, too.",
    )
    every_days: Annotated[int, Field(ge=1, le=366)] = Field(
        DAYS_OF_WEEK,
        description="With `expression`: the most days between two starts. A watch reports when no run has succeeded for that "
        "long and the time that a run may take.",
    )
    time_zone: str = Field("Etc/UTC", description="A name of the IANA time zone database; summer time is kept.")
    flexible_minutes: Annotated[int, Field(ge=0, le=1440)] = Field(15, description="0: start on the minute.")
    share: str = Field("weekly", description="Fair-share identifier of the scheduled runs.")
    lock_wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        12 * 60, description="How long the weekly run waits for a run in progress."
    )
    refresh_enabled: bool = Field(False, description="Start refreshes of the embeddings, too.")
    refresh_expression: str = Field(
        "rate(1 day)", description="When: an EventBridge Scheduler expression, passed through unchanged, in `time_zone`."
    )

    @model_validator(mode="before")
    @classmethod
    def _no_cron(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "cron" in values:
            raise InvalidSetting(
                f"schedule.cron = {values['cron']!r}: there is no such key",
                rule="a weekly start is weekday, hour and minute; any other is `expression` with `every_days`",
                remedy="set schedule.weekday, schedule.hour and schedule.minute; or schedule.expression and schedule.every_days",
            )
        return values

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        known = available_timezones()
        # A machine without the database knows no zone.
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InvalidSetting(
                "is no time zone of the IANA database",
                remedy=f"name a zone such as {near[0] if near else 'Europe/Berlin'}: `timedatectl list-timezones`",
            )
        return name

    @model_validator(mode="after")
    def _period_is_known(self) -> WeeklySchedule:
        refuse_if(
            self.expression is not None and "every_days" not in self.model_fields_set,
            f"schedule.expression {self.expression} has no every_days",
            rule="a watch reports missing runs, and cannot interpret expressions",
            remedy="set schedule.every_days to the most days between two starts",
        )
        refuse_if(
            self.expression is None and self.every_days != DAYS_OF_WEEK,
            f"schedule.every_days {self.every_days} without an expression: weekday, hour and minute start a run every week",
            remedy="take schedule.every_days out, or set schedule.expression",
        )
        return self

    @property
    def schedule_expression(self) -> str:
        """The start as an expression of EventBridge Scheduler, in `time_zone`."""
        return self.expression or f"cron({self.minute} {self.hour} ? * {self.weekday[:3].upper()} *)"

    @property
    def described(self) -> str:
        """The start in words."""
        start = self.expression or f"{self.weekday.capitalize()} {self.hour:02}:{self.minute:02}"
        return f"{start} {self.time_zone}"


class RetentionPeriods(SettingsSection):
    """How long the deployment keeps the files of a run. Models, embeddings, records and reports never expire."""

    resume_days: Annotated[int, Field(ge=7, le=3650)] = Field(
        60, description="Training checkpoints, which only serve to resume a run; its finished model is stored elsewhere."
    )
    noncurrent_days: Annotated[int, Field(ge=1, le=3650)] = Field(30, description="Versions that were overwritten or deleted.")
    cold_days: Annotated[int, Field(ge=0, le=3650)] = Field(
        30,
        description="After this objects move to S3 Intelligent-Tiering, which charges less for objects that nothing reads and is "
        "as fast. 0: never. Nothing else expires: the registry may name any model and any embeddings.",
    )
    untagged_image_days: Annotated[int, Field(ge=1, le=3650)] = Field(
        30, description="Image manifests without a tag. Tagged ones stay: registered job definitions name them."
    )
    upload_days: Annotated[int, Field(ge=1, le=365)] = Field(3, description="Parts of incomplete uploads.")
    log_days: Literal[30, 90, 180, 365, 731] = Field(180, description="Logs of jobs and executions, access logs of the bucket.")
