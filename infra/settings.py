"""What a deployment can choose: one frozen `Settings`, checked before anything is built.

The only reader of CDK context. Values come from three places, later ones over earlier ones: the object under `trnpipe` in
`cdk.json`; with `-c env=prod` the file `infra/environments/prod.yaml`; and every `-c trnpipe.region=us-east-2` (the value is
YAML). Sections are laid over each other key by key, lists and plain values are replaced. Errors are `BadConfig`: what was wrong,
the value, the rule, the remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import available_timezones

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.allowed_uris import is_s3, objection
from pipeline.config import RunConfig, build_config, load_config_file, merge, parse_settings
from pipeline.contract import ATTEMPT_VARIABLE, FARGATE_VCPUS, STAGES, Queue, Stage
from pipeline.errors import BadConfig

# Exported again: the rest of infra takes the hosts from here, with the settings that name them.
from pipeline.prices import HARDWARE as HARDWARE
from pipeline.prices import Hardware as Hardware

CONTEXT_KEY = "trnpipe"
ENVIRONMENT_KEY = "env"
ENVIRONMENTS = Path(__file__).parent / "environments"

SHARE = re.compile(r"[A-Za-z0-9]{1,254}\*?")
"""A share identifier, or with `*` all that begin so (AWS Batch, ShareAttributes)."""
MOST_SHARES = 500
COST_TAG = "trnpipe"
"""Tag of everything that a deployment has or starts; its value is the deployment's name."""
OWN_TAGS = ("Name", COST_TAG)
MOST_TAGS = 40
"""A resource takes 50."""

Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
DAYS_OF_WEEK = 7
ZONE_LETTERS = "abcdefghijklmnop"
"""The last letter of a zone's name; each has its own part of a VPC's addresses."""
LONGEST_MINUTES = 7200
"""As long as Batch leaves jobs running while it replaces hosts (API reference, UpdatePolicy)."""
DEFAULT_MINUTES = {stage: spec.timeout_minutes for stage, spec in STAGES.items()}

RESERVED_VARIABLES: dict[str, str] = {
    # https://docs.aws.amazon.com/batch/latest/APIReference/API_ContainerProperties.html
    r"AWS_BATCH.*": "AWS Batch sets these, and refuses a job definition that does",
    r"(ECS|AWS_CONTAINER|AWS_EXECUTION)_.*": "the ECS agent sets these",
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|PROFILE|ROLE_ARN|.*_FILE)": "a job acts under its stage's role",
    r"AWS_(DEFAULT_)?REGION": "the deployment sets it: trnpipe.region",
    ATTEMPT_VARIABLE: "the deployment sets it: trnpipe.timeouts",
    r"TRNPIPE_(?!LOG_LEVEL$|LAUNCHER$|\w+_SECONDS$).*": "the deployment, or the supervisor, sets these",
    r"PJRT_DEVICE|NEURON_CC_FLAGS|NEURON_COMPILE_CACHE_URL": "they follow from the run's configuration: device and compile",
    r"NEURON_RT_(ROOT_COMM_ID|VISIBLE_CORES|NUM_CORES)|RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*": "every rank gets its own",
}
"""Pattern of a variable that `environment` cannot set -> reason."""

IDENTIFIER = "([0-9a-f]{8}|[0-9a-f]{17})"
KEY_ARN = re.compile(r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):[0-9]{12}:key/[A-Za-z0-9-]+")
AMI_ID = re.compile(f"ami-{IDENTIFIER}")
AMI_PARAMETER = re.compile(r"ssm:(?P<name>/[A-Za-z0-9_.\-/]+):(?P<version>[1-9][0-9]*)")
DRIVER_RULE = (
    "the image is pinned to a release whose Neuron driver is 2.27.x: Neuron SDK 2.29.1 (the last with PyTorch/XLA training "
    "on trn1) does not start on driver 2.29 or newer, and `recommended` moves without notice"
)


BLOCK_TYPE = "trn1.32xlarge"
"""The one type here with Capacity Blocks (EC2 User Guide, "Capacity Blocks for ML", supported instance types)."""

STANDARD = HARDWARE["trn1.32xlarge"]
"""The host that the run configuration's own defaults are those of."""


class Refused(ValueError):
    """A setting that cannot work, and what to do about it."""

    def __init__(self, what: str, *, remedy: str, rule: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy
        self.rule = rule


class SettingsSection(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PrivateSubnet(SettingsSection):
    """A private subnet of the company's own."""

    subnet_id: str = Field(pattern=f"^subnet-{IDENTIFIER}$", description="Id of the subnet.")
    route_table_id: str = Field(pattern=f"^rtb-{IDENTIFIER}$", description="The subnet's route table.")


class Egress(SettingsSection):
    """Where hosts and tasks may connect to, over TCP."""

    cidr: IPv4Network = Field(description="Addresses, such as 10.1.2.0/24.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(description="TCP port.")


class ExistingVpc(SettingsSection):
    """A VPC of the company's own. Its private subnets need routes or endpoints to the services named in network.py."""

    vpc_id: str = Field(pattern=f"^vpc-{IDENTIFIER}$", description="Id of the VPC.")
    subnets: dict[str, PrivateSubnet] = Field(
        description="Zone -> a private subnet there, for `zone` and all of `embed_zones` and `service_zones`."
    )
    default_security_group_id: str = Field(
        pattern=f"^sg-{IDENTIFIER}$",
        description="The VPC's default security group: a gang's containers get it on their own interface, because the compute "
        "environment may name no group beside the launch template's. It must allow itself, and 443 outwards.",
    )
    resolvers: tuple[IPv4Address, ...] = Field(
        (),
        description="DNS servers of the VPC's DHCP option set, unless that is AmazonProvidedDNS, which no security group "
        "filters: port 53 outwards, UDP and TCP.",
    )
    egress: tuple[Egress, ...] = Field(
        (),
        description="What hosts and tasks connect to besides 443 anywhere, such as a proxy, which jobs then find by "
        "`environment`: {cidr: 10.1.2.0/24, port: 3128}.",
    )


class CapacityReservation(SettingsSection):
    """Hosts that EC2 holds for the gangs: one reservation or Capacity Block by its id, or several reservations by their group."""

    id: str | None = Field(
        None,
        pattern=f"^cr-{IDENTIFIER}$",
        description="Id of an On-Demand Capacity Reservation, or of a Capacity Block (`block: true`).",
    )
    group: str | None = Field(
        None,
        pattern=r"^arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:[0-9]{12}:group/.+$",
        description="ARN of a resource group of Capacity Reservations; where none of them has room, hosts start on demand.",
    )
    block: bool = Field(False, description="`id` is a Capacity Block for ML: EC2 places its hosts itself.")
    placement_group: str | None = Field(
        None,
        pattern=r"^[ -~]{1,255}$",
        description="Name of the cluster placement group in which the capacity was reserved. None: the one that the stack makes, "
        "and hosts use only what is reserved in theirs.",
    )

    @model_validator(mode="after")
    def _one_target(self) -> CapacityReservation:
        if (self.id is None) == (self.group is None):
            raise Refused("names either `id` or `group`", remedy="name one of them, or leave capacity_reservation out")
        if self.block and (self.id is None or self.placement_group is not None):
            raise Refused(
                "a Capacity Block is named by its id alone: EC2 places its hosts together itself",
                remedy="name `id` and take `group` and `placement_group` out",
            )
        return self


def base_repository(name: str) -> str:
    """Name of the repository with a deployment's copies of the Neuron image's base."""
    return f"{name}/neuron-base"


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
    """When the weekly run starts and what it passes."""

    enabled: bool = Field(
        False,
        description="Switch it on here or in the environment's file, after the first run that succeeded; a `-c` option would be "
        "forgotten by the next deployment.",
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
        12 * 60, description="Wait for a run that is going on."
    )

    @model_validator(mode="before")
    @classmethod
    def _no_cron(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "cron" in values:
            raise Refused(
                f"schedule.cron = {values['cron']!r}: there is no such key",
                rule="a weekly start is weekday, hour and minute; any other is `expression` with `every_days`",
                remedy="set schedule.weekday, schedule.hour and schedule.minute; or schedule.expression and schedule.every_days",
            )
        return values

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        known = available_timezones()
        # A machine without the database cannot judge.
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise Refused(
                "is no time zone of the IANA database",
                remedy=f"name a zone such as {near[0] if near else 'Europe/Berlin'}: `timedatectl list-timezones`",
            )
        return name

    @model_validator(mode="after")
    def _period_is_known(self) -> WeeklySchedule:
        if self.expression is not None and "every_days" not in self.model_fields_set:
            raise Refused(
                f"schedule.expression {self.expression} has no every_days",
                rule="a watch reports runs that are missing, and does not read expressions",
                remedy="set schedule.every_days to the most days between two starts",
            )
        if self.expression is None and self.every_days != DAYS_OF_WEEK:
            raise Refused(
                f"schedule.every_days {self.every_days} without an expression: weekday, hour and minute start a run every week",
                remedy="take schedule.every_days out, or set schedule.expression",
            )
        return self

    @property
    def schedule_expression(self) -> str:
        """The start as EventBridge Scheduler takes it, in `time_zone`."""
        return self.expression or f"cron({self.minute} {self.hour} ? * {self.weekday[:3].upper()} *)"

    @property
    def described(self) -> str:
        """The start as people read it."""
        start = self.expression or f"{self.weekday.capitalize()} {self.hour:02}:{self.minute:02}"
        return f"{start} {self.time_zone}"


class Retention(SettingsSection):
    """How long what a run leaves behind is kept. Models, embeddings, records and reports stay."""

    resume_days: Annotated[int, Field(ge=7, le=3650)] = Field(
        60, description="Training checkpoints, which only serve to take up a run; its finished model stands elsewhere."
    )
    noncurrent_days: Annotated[int, Field(ge=1, le=3650)] = Field(30, description="Versions that were overwritten or deleted.")
    cold_days: Annotated[int, Field(ge=0, le=3650)] = Field(
        30,
        description="After this objects move to S3 Intelligent-Tiering, which charges less for what is not read and answers as "
        "fast. 0: they stay. Nothing else expires: the registry may name any model and any embeddings.",
    )
    untagged_image_days: Annotated[int, Field(ge=1, le=3650)] = Field(
        30, description="Image manifests without a tag. Those with one stay: job definitions that are registered name them."
    )
    upload_days: Annotated[int, Field(ge=1, le=365)] = Field(3, description="Parts of uploads that were never completed.")
    log_days: Literal[30, 90, 180, 365, 731] = Field(180, description="Logs of jobs and executions, access logs of the bucket.")


class Settings(SettingsSection):
    """One deployment."""

    name: str = Field("trnpipe", pattern=r"^[a-z][a-z0-9-]{0,23}$", description="Prefix of everything that has a name.")
    account: str | None = Field(None, pattern=r"^[0-9]{12}$", description="None: the account of the credentials at deploy time.")
    region: str = Field("us-west-2", pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", description="AWS region of the deployment.")
    zone: str = Field(
        "us-west-2d",
        description="The availability zone of the gangs' hosts, which share one placement group. Only some zones have trn1: "
        "`aws ec2 describe-instance-type-offerings --location-type availability-zone --filters "
        "Name=instance-type,Values=trn1.32xlarge`.",
    )
    embed_zones: tuple[str, ...] = Field(
        (),
        description="The zones of the hosts that evaluate and embed, each on its own: more zones, more capacity. Empty: `zone`.",
    )
    service_zones: tuple[str, ...] = Field(
        (),
        description="The zones of the Fargate tasks and of the endpoints: not every zone that has trn1 has both. Empty: every "
        "zone above.",
    )
    vpc: ExistingVpc | None = Field(None, description="None: a VPC of our own without any way to the internet.")
    instance_type: Literal["trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge", "c7i.2xlarge", "c7i.4xlarge"] = Field(
        "trn1.32xlarge",
        description="Of the gangs' hosts. trn1.2xlarge: one chip without EFA, for development on a single node. c7i: processors "
        "alone, which try a deployment for little money.",
    )
    embed_instance_type: str = Field("trn1.32xlarge", description="Of the hosts that evaluate and embed: trn1, inf2 or c7i.")
    embed_market: Literal["on-demand", "spot"] = Field(
        "on-demand",
        description="spot: cheaper; a child whose host is taken away is tried again and skips the parts that are done.",
    )
    train_market: Literal["on-demand"] = Field("on-demand", description="AWS Batch runs gangs on On-Demand hosts only.")
    allowed_nodes: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = Field(
        (1, 2, 4), description="Numbers of nodes that a run may ask for; each has its own job definitions."
    )
    max_vcpus: Annotated[int, Field(ge=8)] | None = Field(
        None,
        description="Of the training hosts together; a trn1.32xlarge has 128. None: room for one host more than the widest gang "
        "has nodes, because a host that fails its health check counts until it is gone, and the retry needs another one.",
    )
    embed_max_vcpus: Annotated[int, Field(ge=4)] = Field(
        512, description="Limit of the vCPUs of all hosts that evaluate and embed."
    )
    cpu_max_vcpus: Annotated[int, Field(ge=FARGATE_VCPUS)] = Field(64, description="Limit of the vCPUs of all Fargate tasks.")
    keep_hosts_minutes: Annotated[int, Field(ge=20, le=10_080)] = Field(
        20, description="How long a host waits, and is paid, for its next job: health_check, compile and train follow each other."
    )
    timeouts: dict[Stage, Annotated[int, Field(ge=10, le=LONGEST_MINUTES)]] = Field(
        default_factory=dict,
        description="Minutes after which Batch ends an attempt of a stage, over those of pipeline/contract.py. train and embed "
        "end themselves shortly before, and the next attempt resumes, up to twice this time; other stages fail. "
        "Where gangs may take days, the state machine looks at them less often than every five minutes.",
    )
    update_minutes: Annotated[int, Field(ge=1, le=LONGEST_MINUTES)] = Field(
        default_factory=lambda known: max({**DEFAULT_MINUTES, **known.get("timeouts", {})}.values()),
        description="How long a deployment that replaces hosts leaves running jobs. By default as long as any attempt may take.",
    )
    environment: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(
        default_factory=dict,
        description="Environment variables of all jobs, over our own: FI_*, NEURON_RT_*, and the deadlines of "
        "pipeline/host/deadlines.py such as TRNPIPE_PEER_START_SECONDS.",
    )
    ami: str | None = Field(
        None,
        description="AMI of all accelerator hosts: `ami-0123456789abcdef0`, or `ssm:/parameter/name:VERSION`. None: the one that "
        "AWS Batch chooses, which has no Neuron driver.",
    )
    capacity_reservation: CapacityReservation | None = Field(None, description="Hosts that EC2 holds for the gangs.")
    images: Images = Images()
    shares: dict[str, Annotated[float, Field(ge=0.0001, le=999.9999)]] = Field(
        {"weekly": 0.5, "manual": 1.0, "experiments": 4.0}, description="Fair-share weight factors; a lower weight gets more."
    )
    share_decay_seconds: Annotated[int, Field(ge=0, le=604_800)] = Field(
        3600, description="How long use counts against a share. A gang's hours weigh heavily: keep it short."
    )
    compute_reservation: Annotated[int, Field(ge=0, le=99)] = Field(
        0, description="Percentage of the vCPUs that a single active share must leave to others; two leave that percentage of it."
    )
    schedule: WeeklySchedule = WeeklySchedule()
    config: dict[str, Any] = Field(default_factory=dict, description="Partial run configuration under every execution's input.")
    read: tuple[str, ...] = Field((), description="s3://BUCKET/PREFIX folders that runs may read beside our own bucket.")
    kms_keys: tuple[str, ...] = Field(
        (),
        description="ARNs of the customer managed KMS keys of the inputs: of what `read` and `config` name in S3. The policy of "
        "a key of another account has to admit ours, too.",
    )
    customer_key: str | None = Field(
        None,
        description="ARN of a customer managed KMS key for everything that is stored: bucket, lock table, images, logs, disks of "
        "hosts. docs/deploy.md has the statements that its policy needs. Without it, keys of AWS.",
    )
    local_paths: bool = Field(
        False, description="Whether runs may name local paths: only where all stages share one machine, as `trnpipe local` does."
    )
    capacity_wait_hours: Annotated[int, Field(ge=1, le=24)] = Field(
        6, description="After this a job waiting for hosts is cancelled."
    )
    notify: tuple[Annotated[str, Field(pattern=r"^[^@\s]+@[^@\s]+$")], ...] = Field((), description="E-mail addresses.")
    prices: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="USD for an hour of one host, where that is not the on-demand price of pipeline/prices.py (Savings Plans, "
        "Capacity Blocks, another region): by instance type, or by queue (train, embed, cpu), which goes first and so can price "
        "the Spot hosts of one queue. cpu: one Fargate task.",
    )
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="USD a month. AWS Budgets tells `notify` when 80 % of it are spent, and when the forecast is above it. What "
        "counts is the deployment's tag, once it is activated for cost allocation: the output CostAllocationTag says how.",
    )
    retention: Retention = Retention()
    tags: dict[str, str] = Field(
        default_factory=dict,
        description="Tags of everything that is deployed and of all hosts and volumes, over the deployment's own. Compute "
        "environments and the placement group, whose tags can never change, go without; their hosts do not.",
    )
    permissions_boundary: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_+=,.@/-]{1,512}$",
        description="Name (with its path) of a managed policy of the account, for all roles.",
    )
    bootstrap_qualifier: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_-]{1,10}$", description="Of the account's CDK bootstrap, where it is not the CDK's own."
    )

    @field_validator("ami")
    @classmethod
    def _pinned_ami(cls, ami: str | None) -> str | None:
        if ami is None:
            return None
        remedy = "pin an image with driver 2.27, by id or by SSM parameter and version"
        if "recommended" in ami or "latest" in ami:
            raise Refused("moves without notice", rule=DRIVER_RULE, remedy=remedy)
        if not AMI_ID.fullmatch(ami) and not AMI_PARAMETER.fullmatch(ami):
            raise Refused(
                "must be an image id (ami-...) or an SSM parameter with its version (ssm:/name:3)",
                rule=DRIVER_RULE,
                remedy=remedy,
            )
        return ami

    @field_validator("zone", mode="before")
    @classmethod
    def _one_zone(cls, zone: object) -> object:
        if isinstance(zone, (list, tuple)) or (isinstance(zone, str) and "," in zone):
            raise Refused(
                "names several zones, and EFA and a cluster placement group end at a zone's border",
                remedy="name the one zone of the gangs here, and further ones under embed_zones",
            )
        return zone

    @field_validator("train_market", mode="before")
    @classmethod
    def _never_spot(cls, market: object) -> object:
        if market == "spot":
            raise Refused(
                "AWS Batch starts no multi-node job on Spot hosts: it would stay RUNNABLE",
                remedy="leave training on-demand (capacity_reservation holds hosts for it) and set embed_market: spot",
            )
        return market

    @field_validator("allowed_nodes")
    @classmethod
    def _ascending(cls, nodes: tuple[int, ...]) -> tuple[int, ...]:
        if not nodes or list(nodes) != sorted(set(nodes)):
            raise Refused("node counts ascend without repeats", remedy="list them as in [1, 2, 4]")
        return nodes

    @field_validator("shares")
    @classmethod
    def _share_names(cls, shares: dict[str, float]) -> dict[str, float]:
        for share in shares:
            if not SHARE.fullmatch(share):
                raise Refused(
                    f"share {share!r}: AWS Batch share identifiers are alphanumeric",
                    remedy="use letters and digits only; a `*` at the end stands for all shares that begin so",
                )
        for prefix in (share.removesuffix("*") for share in shares if share.endswith("*")):
            if beside := sorted(share for share in shares if share != f"{prefix}*" and share.startswith(prefix)):
                raise Refused(
                    f"shares {prefix}* and {beside[0]} overlap, and AWS Batch wants one weight for each",
                    remedy=f"remove {beside[0]}, or choose a prefix that it does not begin with",
                )
        if len(shares) > MOST_SHARES:
            raise Refused(
                f"{len(shares)} shares, and a queue knows {MOST_SHARES}",
                remedy="join shares of one weight under a prefix, such as team*",
            )
        return shares

    @field_validator("tags")
    @classmethod
    def _tags_of_aws(cls, tags: dict[str, str]) -> dict[str, str]:
        """Reserved keys and limits: https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html."""
        for key, value in tags.items():
            allowed = re.fullmatch(r"[\w .:/=+@-]{1,128}", key) and re.fullmatch(r"[\w .:/=+@-]{0,256}", value)
            if not allowed or key.lower().startswith("aws:") or key in OWN_TAGS:
                raise Refused(
                    f"tag {key}={value}: letters, digits, spaces and . : / = + @ _ -, up to 128 and 256 characters; not aws:*, "
                    f"not {' or '.join(OWN_TAGS)}",
                    remedy="choose another key or value",
                )
        if len(tags) > MOST_TAGS:
            raise Refused(f"{len(tags)} tags, and a resource takes {MOST_TAGS} beside ours", remedy="take some out")
        return tags

    @field_validator("environment")
    @classmethod
    def _free_variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise Refused(f"{name!r}: invalid name of an environment variable", remedy="use letters, digits and underscores")
            for pattern, reason in RESERVED_VARIABLES.items():
                if re.fullmatch(pattern, name):
                    raise Refused(f"{name} is reserved: {reason}", remedy=f"leave {name} out")
        return environment

    @field_validator("read")
    @classmethod
    def _s3_uris(cls, uris: tuple[str, ...]) -> tuple[str, ...]:
        for uri in uris:
            if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9](/.*)?", uri):
                raise ValueError(f"{uri!r}: must be s3://BUCKET/PREFIX")
            if wrong := objection(uri):
                raise ValueError(f"{uri!r} {wrong}")
        return uris

    @field_validator("kms_keys", "customer_key")
    @classmethod
    def _key_arns(cls, keys: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for key in (keys,) if isinstance(keys, str) else keys or ():
            if not KEY_ARN.fullmatch(key):
                raise Refused(
                    f"{key!r} is not the ARN of a key, and a policy of IAM takes no alias",
                    remedy="aws kms describe-key --key-id alias/NAME --query KeyMetadata.Arn prints it",
                )
        return keys

    @model_validator(mode="after")
    def _zones_exist_for_all(self) -> Settings:
        for key, zones in (("embed_zones", self.embed_zones), ("service_zones", self.service_zones)):
            if len(set(zones)) != len(zones):
                raise Refused(f"{key} {list(zones)} names a zone twice", remedy="name each zone once")
        for zone in self.zones:
            if not re.fullmatch(f"{re.escape(self.region)}[{ZONE_LETTERS}]", zone):
                raise Refused(
                    f"zone {zone} is not in region {self.region}",
                    remedy=f"name zones of {self.region}, such as {self.region}a, or change the region",
                )
        if self.vpc is not None and (absent := sorted(set(self.zones) - self.vpc.subnets.keys())):
            raise Refused(
                f"vpc.subnets has none in {', '.join(absent)}",
                remedy=f"add vpc.subnets.{absent[0]} with the subnet_id and route_table_id of a private subnet there",
            )
        return self

    @model_validator(mode="after")
    def _hosts_suffice(self) -> Settings:
        if self.embed_instance_type not in HARDWARE:
            raise Refused(
                f"embed_instance_type {self.embed_instance_type!r} is none of {sorted(HARDWARE)}", remedy="name one of them"
            )
        if self.ami is None and (hosts := [kind for kind in self.instance_types if HARDWARE[kind].neuron_devices]):
            raise Refused(
                f"ami: {', '.join(hosts)} would boot an image without a Neuron driver",
                rule=DRIVER_RULE,
                remedy="name an image with driver 2.27, by id or by SSM parameter and version",
            )
        if not self.gang_meets and self.allowed_nodes != (1,):
            raise Refused(
                f"allowed_nodes {list(self.allowed_nodes)}: a {self.instance_type} has no EFA and trains alone",
                remedy="set allowed_nodes: [1], or take instance_type trn1.32xlarge",
            )
        widest = max(self.allowed_nodes)
        for key, limit, least, what in (
            ("max_vcpus", self.train_max_vcpus, self.train_hardware.vcpus * widest, f"what {widest} nodes need"),
            ("embed_max_vcpus", self.embed_max_vcpus, self.embed_hardware.vcpus, f"one {self.embed_instance_type}"),
            ("cpu_max_vcpus", self.cpu_max_vcpus, FARGATE_VCPUS, "one job on Fargate"),
        ):
            if limit < least:
                spare = f", or leave it out for {self.default_max_vcpus}: one host more" if key == "max_vcpus" else ""
                raise Refused(f"{key} {limit} is below {least}, {what}", remedy=f"set {key} to {least} or more{spare}")
            # Batch holds back (reservation / 100) ^ (active shares) of the vCPUs: most while one share is active.
            if limit * (100 - self.compute_reservation) < least * 100:
                raise Refused(
                    f"compute_reservation {self.compute_reservation} leaves a single share "
                    f"{limit * (100 - self.compute_reservation) // 100} of {key} {limit}, and {what} is {least}",
                    remedy=f"set {key} to {-(-least * 100 // (100 - self.compute_reservation))} or more, "
                    f"or compute_reservation to at most {(limit - least) * 100 // limit}",
                )
        return self

    @model_validator(mode="after")
    def _reservation_fits(self) -> Settings:
        reserved = self.capacity_reservation
        if reserved is None:
            return self
        if reserved.block and self.instance_type != BLOCK_TYPE:
            raise Refused(
                f"capacity_reservation.block: no Capacity Blocks of {self.instance_type}", remedy=f"take {BLOCK_TYPE} instead"
            )
        if reserved.placement_group is not None and self.train_hardware.efa_interfaces == 0:
            raise Refused(
                f"capacity_reservation.placement_group: a {self.instance_type} trains alone, outside any placement group",
                remedy="take capacity_reservation.placement_group out",
            )
        if reserved.group is not None and f":{self.region}:" not in reserved.group:
            raise Refused(
                f"capacity_reservation.group {reserved.group} is not in region {self.region}",
                remedy=f"name a resource group of {self.region}",
            )
        return self

    @model_validator(mode="after")
    def _costs_are_told(self) -> Settings:
        if strange := sorted(self.prices.keys() - HARDWARE.keys() - {queue.value for queue in Queue}):
            raise Refused(
                f"prices for {strange}: a key is one of {sorted(HARDWARE)}, or a queue: train, embed, cpu",
                remedy="name an instance type or a queue",
            )
        if self.budget is not None and not self.notify:
            raise Refused(f"budget {self.budget:g} would be watched for nobody", remedy="put an e-mail address into `notify`")
        return self

    @model_validator(mode="after")
    def _runs_fit(self) -> Settings:
        config = self.run_config()
        for share in (self.schedule.share, config.share):
            if not any(share == known or (known.endswith("*") and share.startswith(known[:-1])) for known in self.shares):
                raise Refused(
                    f"share {share!r} is none of the declared shares {sorted(self.shares)}",
                    remedy=f"add {share} to shares, with a weight, or name one of them",
                )
        if config.nodes not in self.allowed_nodes:
            raise Refused(
                f"config.nodes {config.nodes} is none of allowed_nodes {list(self.allowed_nodes)}",
                remedy="add it to allowed_nodes, which makes job definitions for it, or set config.nodes to one of them",
            )
        if config.run is not None:
            raise Refused(
                "config.run would send every execution into one run folder", remedy="give `run` per execution, in its input"
            )
        if config.model.parent is not None:
            raise Refused(
                f"config.model.parent {config.model.parent}: every run would continue from it, none from what was published",
                remedy="set config.model.initial, the model of the first run; give model.parent in the input of one execution",
            )
        local = [f"config.{key} = {uri}" for key, uri in config.uris() if not is_s3(uri)]
        if local and not self.local_paths:
            raise Refused(f"{', '.join(local)}: a local path, which the hosts do not have", remedy="put it on S3")
        if config.device.kind == "neuron":
            if hosts := [kind for kind in self.instance_types if not HARDWARE[kind].neuron_devices]:
                raise Refused(
                    f"config.device.kind neuron: {', '.join(hosts)} has no NeuronCores",
                    remedy="set config.device.kind: cpu, or take trn1 and inf2 hosts",
                )
            for key, ranks, host, kind in (
                ("device.ranks_per_node", config.device.ranks_per_node, self.train_hardware, self.instance_type),
                ("embed.ranks_per_child", config.embed.ranks_per_child, self.embed_hardware, self.embed_instance_type),
            ):
                if ranks is not None and ranks > host.cores:
                    raise Refused(
                        f"config.{key} {ranks}: a {kind} has {host.cores} NeuronCores, and a rank takes one",
                        remedy=f"set config.{key} to {host.cores} or less, or leave it out",
                    )
        return self

    @property
    def zones(self) -> tuple[str, ...]:
        """Every zone in which something runs, that of the gangs first."""
        return tuple(dict.fromkeys([self.zone, *self.embed_zones, *self.service_zones]))

    @property
    def zones_of_services(self) -> tuple[str, ...]:
        """The zones of Fargate tasks and of endpoints."""
        return self.service_zones or self.zones

    @property
    def default_max_vcpus(self) -> int:
        """vCPUs of the widest gang and one host more."""
        return self.train_hardware.vcpus * (max(self.allowed_nodes) + 1)

    @property
    def train_max_vcpus(self) -> int:
        return self.max_vcpus or self.default_max_vcpus

    @property
    def train_hardware(self) -> Hardware:
        return HARDWARE[self.instance_type]

    @property
    def embed_hardware(self) -> Hardware:
        return HARDWARE[self.embed_instance_type]

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Types of the hosts that Batch starts, that of the gangs first."""
        return tuple(dict.fromkeys([self.instance_type, self.embed_instance_type]))

    @property
    def gang_meets(self) -> bool:
        """Whether nodes of the gangs' type can reach each other: by EFA, or on processors by TCP."""
        return bool(self.train_hardware.efa_interfaces) or not self.train_hardware.neuron_devices

    def minutes(self, stage: Stage) -> int:
        """After how many minutes Batch ends an attempt of a stage."""
        return self.timeouts.get(stage, DEFAULT_MINUTES[stage])

    def deployed_config(self) -> dict[str, Any]:
        """The partial run configuration under every execution's input: `config`, over what the instance types determine.

        The configuration's own defaults describe a trn1.32xlarge.
        """
        train, embed = self.train_hardware, self.embed_hardware
        under: dict[str, Any] = {}
        if not train.neuron_devices:
            under["device"] = {"host_memory_gib": train.job_memory_mib / 1024}
        elif build_config(self.config).device.kind == "neuron":
            if train != STANDARD:
                under["device"] = {"ranks_per_node": train.cores, "host_memory_gib": train.job_memory_mib / 1024}
                under["health_check"] = {"neuron_devices": train.neuron_devices, "efa_devices": train.efa_interfaces}
            if embed.cores not in (0, train.cores):
                under["embed"] = {"ranks_per_child": embed.cores}
        return merge(under, self.config)

    def run_config(self) -> RunConfig:
        """The configuration of an execution whose input is empty.

        Raises:
            BadConfig: `config` is not a valid partial configuration.
        """
        return build_config(self.deployed_config())

    def readable(self) -> tuple[str, ...]:
        """What runs may name beside our own bucket: `read`, and what the deployment's config names itself."""
        return tuple(dict.fromkeys([*self.read, *(uri for _, uri in self.run_config().uris() if is_s3(uri))]))

    def readable_objects(self, *, shards: bool, model: bool) -> tuple[str, ...]:
        """Patterns `BUCKET/KEY` of what runs read outside our bucket: under `read`, and what the deployment's config names.

        Args:
            shards: training data and corpus too.
            model: the initial model too.
        """
        config = self.run_config()
        named = [*self.read]
        named += [*config.data.train, *config.data.corpus] if shards else []
        named += [uri for uri in (config.model.initial, config.model.base) if uri] if model else []
        found = [pattern for uri in named if uri.startswith("s3://") for pattern in _file_or_folder(uri)]
        if model and config.model.initial and config.model.initial.startswith("s3://"):
            found += _beside(config.model.initial)
        return tuple(dict.fromkeys(found))


def _file_or_folder(uri: str) -> list[str]:
    path = uri.removeprefix("s3://")
    folder = f"{path.rstrip('/')}/*"
    return [folder] if path.endswith("/") or "/" not in path else [path, folder]


def _beside(model: str) -> list[str]:
    """A model that is a bare weight file takes its configuration and tokenizer from the folder it stands in."""
    folder, _, name = model.removeprefix("s3://").rpartition("/")
    return [f"{folder}/*"] if "." in name and folder else []


def read_settings(context: Mapping[str, Any], environments: Path = ENVIRONMENTS) -> Settings:
    """Settings from CDK context: the object under `trnpipe`, the file of the environment under `env`, every `trnpipe.KEY`.

    Args:
        environments: folder of the environments' files.

    Raises:
        BadConfig: a missing, unknown or wrong value, or an environment that there is not.
    """
    values = context.get(CONTEXT_KEY)
    if not isinstance(values, Mapping):
        raise BadConfig(
            "the settings are missing",
            value=values,
            rule=f"the CDK context has an object under {CONTEXT_KEY!r}",
            remedy="run in the folder of cdk.json, or pass the context yourself",
        )
    name = context.get(ENVIRONMENT_KEY)
    if name is not None:
        values = merge(values, read_environment(name, environments))
    prefix = f"{CONTEXT_KEY}."
    given = [f"{key.removeprefix(prefix)}={value}" for key, value in context.items() if key.startswith(prefix)]
    try:
        return Settings.model_validate(merge(values, parse_settings(given)))
    except ValidationError as error:
        raise _bad_settings(error) from error


def read_environment(name: object, folder: Path = ENVIRONMENTS) -> dict[str, Any]:
    """The settings that one environment lays over those of cdk.json.

    Raises:
        BadConfig: there is no such environment, or its file is no YAML object.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    # A name is one of those that were found, so none leads elsewhere.
    if name not in known:
        raise BadConfig(
            "there is no such environment",
            value=f"-c {ENVIRONMENT_KEY}={name}",
            rule="an environment is a file of its name, NAME.yaml, in infra/environments",
            remedy=f"name one of: {', '.join(known)}; or write infra/environments/NAME.yaml (example.yaml explains it)",
        )
    return load_config_file(folder / f"{name}.yaml")


def _bad_settings(error: ValidationError) -> BadConfig:
    found, rules, remedies = [], [], []
    for item in error.errors():
        where = ".".join((CONTEXT_KEY, *map(str, item["loc"])))
        message = item["msg"].removeprefix("Value error, ")
        refused = item.get("ctx", {}).get("error")
        if isinstance(refused, Refused):
            rules.append(refused.rule)
            remedies.append(refused.remedy)
        elif item["type"] == "missing":
            described = _description(tuple(map(str, item["loc"])))
            remedies.append(f"set {where}" + (f": {described.rstrip('.')}" if described else ""))
        shown = item["type"] != "missing" and bool(item["loc"])
        found.append(f"{where} = {item['input']!r}: {message}" if shown else f"{where}: {message}")
    return BadConfig(
        "the settings of this deployment are not valid",
        value=found,
        rule="; ".join(filter(None, dict.fromkeys(rules))) or "infra/settings.py describes every setting",
        remedy="; ".join(dict.fromkeys(remedies)) or "correct cdk.json, the environment's file, or the -c option",
    )


def _description(names: tuple[str, ...]) -> str | None:
    """What a setting is for, as its section describes it."""
    section: Any = Settings
    described = None
    for name in names:
        # Optional sections are `Section | None`; keys of a mapping are no fields.
        candidates = [section, *getattr(section, "__args__", ())]
        section = next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)
        field = section.model_fields.get(name) if section is not None else None
        if field is not None:
            section, described = field.annotation, field.description
    return described
