"""The sections of a deployment's settings with their own rules, and the error for a value that cannot work."""

from __future__ import annotations

import difflib
import re
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, Any, Literal
from zoneinfo import available_timezones

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

IDENTIFIER = "([0-9a-f]{8}|[0-9a-f]{17})"
ARN = r"arn:aws[a-z-]*:[a-z0-9-]+:[a-z0-9-]*:[0-9]{12}:\S+"
ENDPOINTS: dict[str, tuple[str, str]] = {
    "email": (r"[^@\s]+@[^@\s]+", "team@example.com"),
    "email-json": (r"[^@\s]+@[^@\s]+", "team@example.com"),
    "http": (r"http://\S+", "http://example.com/notify"),
    "https": (r"https://\S+", "https://example.com/notify"),
    "sms": (r"\+[1-9][0-9]{1,14}", "+12065550100"),
    "sqs": (ARN, "arn:aws:sqs:us-west-2:123456789012:runs"),
    "lambda": (ARN, "arn:aws:lambda:us-west-2:123456789012:function:runs"),
    "application": (ARN, "arn:aws:sns:us-west-2:123456789012:endpoint/GCM/app/id"),
    "firehose": (ARN, "arn:aws:firehose:us-west-2:123456789012:deliverystream/runs"),
}
"""Protocol of SNS -> form and example of its endpoints (https://docs.aws.amazon.com/sns/latest/api/API_Subscribe.html)."""

TrainHost = Literal[
    "trn1.2xlarge",
    "trn1.32xlarge",
    "trn1n.32xlarge",
    "c7i.2xlarge",
    "c7i.4xlarge",
    "g6e.12xlarge",
    "g6e.48xlarge",
    "p4d.24xlarge",
    "p5.48xlarge",
]
"""Instance types of gangs."""


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

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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
        description="Tag of the images in the deployment's repositories.",
    )
    neuron: str | None = Field(None, description="Full URI of the image for Trainium and Inferentia hosts.")
    cpu: str | None = Field(None, description="Full URI of the image for Fargate, and for hosts without accelerators.")
    cuda: str | None = Field(None, description="Full URI of the image for hosts with GPUs.")

    @field_validator("tag", "neuron", "cpu", "cuda")
    @classmethod
    def _pinned(cls, image: str | None) -> str | None:
        if image is not None and (image == "latest" or image.endswith(":latest")):
            raise ValueError("an image is pinned by a version tag or digest; `latest` moves under a run that is being retried")
        return image


class Subscriber(SettingsSection):
    """An endpoint that the notification topic delivers to. A plain e-mail address stands for the protocol `email`."""

    protocol: Literal["email", "email-json", "http", "https", "sms", "sqs", "lambda", "application", "firehose"] = Field(
        description="A protocol of Amazon SNS."
    )
    endpoint: str = Field(description="An address, URL or phone number, or the ARN of a queue, function, app or stream.")
    role: str | None = Field(None, pattern=f"^{ARN}$", description="With firehose: ARN of the role that writes to the stream.")

    @model_validator(mode="before")
    @classmethod
    def _plain_address(cls, values: Any) -> Any:
        return {"protocol": "email", "endpoint": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _reachable(self) -> Subscriber:
        form, example = ENDPOINTS[self.protocol]
        refuse_if(
            not re.fullmatch(form, self.endpoint),
            f"{self.endpoint!r} is no endpoint of the protocol {self.protocol}",
            remedy=f"name one such as {example}, or the protocol that it belongs to",
        )
        refuse_if(
            (self.protocol == "firehose") != (self.role is not None),
            "the protocol firehose has a `role`, and no other has one",
            remedy="name the role that may write to the stream, or take `role` out",
        )
        return self


class Marker(SettingsSection):
    """Objects of S3 whose arrival starts a run."""

    object: str = Field(
        pattern=r"^s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]/.+$",
        description="s3://BUCKET/PREFIX: every object that is written under the prefix starts a run. The deployment's own bucket "
        "sends its events to EventBridge then; another one must be set to do so.",
    )

    @property
    def location(self) -> tuple[str, str]:
        """Bucket and prefix."""
        bucket, _, prefix = self.object.removeprefix("s3://").partition("/")
        return bucket, prefix


class Schedule(SettingsSection):
    """One kind of runs, which the clock or an object starts. A model has one that trains, and perhaps one that refreshes."""

    enabled: bool = Field(
        False,
        description="Switch it on here or in the environment's file, after the first successful run; the next deployment would "
        "not know a `-c` option.",
    )
    when: Annotated[str, Field(pattern=r"^(cron|rate)\(.+\)$")] | Marker = Field(
        description="An EventBridge Scheduler expression, passed through unchanged, such as cron(0 3 ? * SUN *) or rate(3 days); "
        "or {object: s3://BUCKET/PREFIX}."
    )
    time_zone: str = Field("Etc/UTC", description="Of an expression: a name of the IANA time zone database; summer time is kept.")
    flexible_minutes: Annotated[int, Field(ge=0, le=1440)] = Field(15, description="Of an expression. 0: start on the minute.")
    every_days: Annotated[int, Field(ge=1, le=366)] | None = Field(
        None,
        description="The most days between two starts. A watch reports when no run of this registry and mode has succeeded for "
        "that long and the time that a run may take. None: nothing reports it.",
    )
    mode: Literal["train", "refresh"] = Field("train", description="As in the run configuration.")
    registry: str = Field("current", description="Name under which its runs publish: one model's.")
    share: str = Field("weekly", description="Fair-share identifier of its jobs, and the value of their tag `trnpipe:share`.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="Partial run configuration of its runs, over the deployment's `config`."
    )
    lock_wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        default_factory=lambda known: 0 if known.get("mode") == "refresh" else 12 * 60,
        description="How long a run waits for one in progress. By default half a day; a refresh does not wait.",
    )

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        known = available_timezones()
        # Without the database no zone is known.
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InvalidSetting(
                "is no time zone of the IANA database",
                remedy=f"name a zone such as {near[0] if near else 'Europe/Berlin'}: `timedatectl list-timezones`",
            )
        return name

    @field_validator("config")
    @classmethod
    def _said_once(cls, config: dict[str, Any]) -> dict[str, Any]:
        refuse_if(
            {"mode", "registry", "share", "lock", "run"} & config.keys(),
            f"config has {', '.join(sorted(config))}, of which the schedule itself says mode, registry, share, lock and run",
            rule="mode, registry, share and lock_wait_minutes are keys of the schedule; every run has its own id",
            remedy="move them from config to the schedule",
        )
        return config

    @model_validator(mode="after")
    def _period_is_known(self) -> Schedule:
        refuse_if(
            self.mode == "train" and isinstance(self.when, str) and self.every_days is None,
            f"when {self.when} has no every_days",
            rule="a watch reports missing runs, and cannot interpret expressions",
            remedy="set every_days to the most days between two starts",
        )
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The input of its executions."""
        return {
            **self.config,
            "mode": self.mode,
            "registry": self.registry,
            "share": self.share,
            "lock": {"wait_minutes": self.lock_wait_minutes},
        }


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
