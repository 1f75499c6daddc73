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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import available_timezones

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from infra import cron
from pipeline.config import RunConfig, build_config, load_config_file, merge, parse_settings
from pipeline.contract import FARGATE_VCPUS, STAGES, Queue
from pipeline.errors import BadConfig
from pipeline.places import is_s3, objection

CONTEXT_KEY = "trnpipe"
ENVIRONMENT_KEY = "env"
ENVIRONMENTS = Path(__file__).parent / "environments"

SHARE = re.compile(r"[A-Za-z0-9]{1,254}\*?")
"""A share identifier, or with `*` all that begin so (AWS Batch, ShareAttributes)."""
MOST_SHARES = 500
CORES_PER_DEVICE = 2
"""NeuronCores of a Trainium chip, and of an Inferentia2 chip."""

IDENTIFIER = "([0-9a-f]{8}|[0-9a-f]{17})"
AMI_ID = re.compile(f"ami-{IDENTIFIER}")
AMI_PARAMETER = re.compile(r"ssm:(?P<name>/[A-Za-z0-9_.\-/]+):(?P<version>[1-9][0-9]*)")
DRIVER_RULE = (
    "the image is pinned to a release whose Neuron driver is 2.27.x: Neuron SDK 2.29.1 (the last with PyTorch/XLA training "
    "on trn1) does not start on driver 2.29 or newer, and `recommended` moves without notice"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One instance type as Batch and the kernel show it.

    Attributes:
        vcpus, memory_mib: of the whole host.
        neuron_devices: chips, /dev/neuron0 and so on.
        efa_interfaces: network cards with EFA, 0 where the type has none and so can only be a gang of its own.
    """

    vcpus: int
    memory_mib: int
    neuron_devices: int
    efa_interfaces: int = 0

    @property
    def cores(self) -> int:
        """NeuronCores, one rank each."""
        return self.neuron_devices * CORES_PER_DEVICE

    @property
    def job_vcpus(self) -> int:
        """More than half: chips are no Batch resource, and two jobs on one host would fight over them."""
        return self.vcpus * 3 // 4

    @property
    def job_memory_mib(self) -> int:
        """What is left after the operating system and the ECS agent; a request above it never leaves RUNNABLE."""
        return self.memory_mib * 15 // 16 - 1024


HARDWARE: dict[str, Hardware] = {
    "trn1.2xlarge": Hardware(vcpus=8, memory_mib=32 * 1024, neuron_devices=1),
    "trn1.32xlarge": Hardware(vcpus=128, memory_mib=512 * 1024, neuron_devices=16, efa_interfaces=8),
    "trn1n.32xlarge": Hardware(vcpus=128, memory_mib=512 * 1024, neuron_devices=16, efa_interfaces=16),
    "inf2.xlarge": Hardware(vcpus=4, memory_mib=16 * 1024, neuron_devices=1),
    "inf2.8xlarge": Hardware(vcpus=32, memory_mib=128 * 1024, neuron_devices=1),
    "inf2.24xlarge": Hardware(vcpus=96, memory_mib=384 * 1024, neuron_devices=6),
    "inf2.48xlarge": Hardware(vcpus=192, memory_mib=768 * 1024, neuron_devices=12),
}


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

    subnet_id: str = Field(pattern=f"^subnet-{IDENTIFIER}$")
    route_table_id: str = Field(pattern=f"^rtb-{IDENTIFIER}$", description="The subnet's route table.")


class ExistingVpc(SettingsSection):
    """A VPC of the company's own. Its private subnets need routes or endpoints to the services named in network.py."""

    vpc_id: str = Field(pattern=f"^vpc-{IDENTIFIER}$")
    subnets: dict[str, PrivateSubnet] = Field(description="Zone -> a private subnet there, for `zone` and all of `embed_zones`.")
    default_security_group_id: str = Field(
        pattern=f"^sg-{IDENTIFIER}$",
        description="The VPC's default security group: a gang's containers get it on their own interface, because the compute "
        "environment may name no group beside the launch template's. It must allow itself, and 443 outwards.",
    )


class Images(SettingsSection):
    """Container images. Without a URI, the repository that the data stack creates, at `tag`."""

    tag: str = Field("0.1.0", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")
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

    enabled: bool = True
    cron: str = Field("cron(0 3 ? * SUN *)", description="An EventBridge Scheduler expression.")
    time_zone: str = Field("Etc/UTC", description="A name of the IANA time zone database; summer time is kept.")
    flexible_minutes: Annotated[int, Field(ge=0, le=1440)] = Field(15, description="0: start on the minute.")
    share: str = "weekly"
    lock_wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        12 * 60, description="Wait for a run that is going on."
    )

    @field_validator("cron")
    @classmethod
    def _schedulable(cls, expression: str) -> str:
        if wrong := cron.objection(expression):
            raise Refused(wrong, remedy="write the schedule as in cron(0 3 ? * SUN *): every Sunday at 03:00")
        return expression

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


class Retention(SettingsSection):
    """How long what a run leaves behind is kept. Models, embeddings, records and reports stay."""

    resume_days: Annotated[int, Field(ge=7, le=3650)] = Field(
        60, description="Training checkpoints, which only serve to take up a run; its finished model stands elsewhere."
    )
    noncurrent_days: Annotated[int, Field(ge=1, le=3650)] = Field(30, description="Versions that were overwritten or deleted.")
    upload_days: Annotated[int, Field(ge=1, le=365)] = Field(3, description="Parts of uploads that were never completed.")
    log_days: Literal[30, 90, 180, 365, 731] = Field(180, description="Logs of jobs and executions, access logs of the bucket.")


class Settings(SettingsSection):
    """One deployment."""

    name: str = Field("trnpipe", pattern=r"^[a-z][a-z0-9-]{0,23}$", description="Prefix of everything that has a name.")
    account: str | None = Field(None, pattern=r"^[0-9]{12}$", description="None: the account of the credentials at deploy time.")
    region: str = Field("us-west-2", pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$")
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
    vpc: ExistingVpc | None = Field(None, description="None: a VPC of our own without any way to the internet.")
    instance_type: Literal["trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge"] = Field(
        "trn1.32xlarge", description="Of the gangs' hosts. trn1.2xlarge: one chip without EFA, for development on a single node."
    )
    embed_instance_type: str = Field("trn1.32xlarge", description="Of the hosts that evaluate and embed: trn1 or inf2.")
    embed_market: Literal["on-demand", "spot"] = Field(
        "on-demand",
        description="spot: cheaper; a child whose host is taken away is tried again and skips the parts that are done.",
    )
    train_market: Literal["on-demand"] = Field("on-demand", description="AWS Batch runs gangs on On-Demand hosts only.")
    allowed_nodes: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = (1, 2, 4)
    max_vcpus: Annotated[int, Field(ge=8)] = Field(512, description="Of the training hosts together; a trn1.32xlarge has 128.")
    embed_max_vcpus: Annotated[int, Field(ge=4)] = 512
    cpu_max_vcpus: Annotated[int, Field(ge=FARGATE_VCPUS)] = 64
    keep_hosts_minutes: Annotated[int, Field(ge=20, le=10_080)] = Field(
        20, description="How long a host waits, and is paid, for its next job: health_check, compile and train follow each other."
    )
    update_minutes: Annotated[int, Field(ge=1, le=7200)] = Field(
        max(spec.timeout_minutes for spec in STAGES.values()),
        description="How long a deployment that replaces hosts leaves running jobs. By default as long as any job may take.",
    )
    ami: str = Field(description="AMI of all accelerator hosts: `ami-0123456789abcdef0`, or `ssm:/parameter/name:VERSION`.")
    capacity_reservation_id: str | None = Field(None, pattern=f"^cr-{IDENTIFIER}$")
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
    local_paths: bool = Field(
        False, description="Whether runs may name local paths: only where all stages share one machine, as `trnpipe local` does."
    )
    gang_submit: Literal["sync", "poll"] = Field(
        "sync",
        description="How gangs are submitted: `trnpipe doctor` says which works. `poll` leaves a gang running when its execution "
        "is stopped from outside: terminate that job as well.",
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

    @field_validator("ami")
    @classmethod
    def _pinned_ami(cls, ami: str) -> str:
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
                remedy="leave training on-demand (capacity_reservation_id holds hosts for it) and set embed_market: spot",
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

    @field_validator("read")
    @classmethod
    def _s3_uris(cls, uris: tuple[str, ...]) -> tuple[str, ...]:
        for uri in uris:
            if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9](/.*)?", uri):
                raise ValueError(f"{uri!r}: must be s3://BUCKET/PREFIX")
            if wrong := objection(uri):
                raise ValueError(f"{uri!r} {wrong}")
        return uris

    @model_validator(mode="after")
    def _zones_exist_for_all(self) -> Settings:
        if len(set(self.embed_zones)) != len(self.embed_zones):
            raise Refused(f"embed_zones {list(self.embed_zones)} names a zone twice", remedy="name each zone once")
        for zone in self.zones:
            if not re.fullmatch(f"{re.escape(self.region)}[a-z]", zone):
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
        if self.train_hardware.efa_interfaces == 0 and self.allowed_nodes != (1,):
            raise Refused(
                f"allowed_nodes {list(self.allowed_nodes)}: a {self.instance_type} has no EFA and trains alone",
                remedy="set allowed_nodes: [1], or take instance_type trn1.32xlarge",
            )
        widest = max(self.allowed_nodes)
        for key, limit, least, what in (
            ("max_vcpus", self.max_vcpus, self.train_hardware.vcpus * widest, f"what {widest} nodes need"),
            ("embed_max_vcpus", self.embed_max_vcpus, self.embed_hardware.vcpus, f"one {self.embed_instance_type}"),
            ("cpu_max_vcpus", self.cpu_max_vcpus, FARGATE_VCPUS, "one job on Fargate"),
        ):
            if limit < least:
                raise Refused(f"{key} {limit} is below {least}, {what}", remedy=f"set {key} to {least} or more")
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
        local = [f"config.{key} = {uri}" for key, uri in config.uris() if not is_s3(uri)]
        if local and not self.local_paths:
            raise Refused(f"{', '.join(local)}: a local path, which the hosts do not have", remedy="put it on S3")
        if config.device.kind == "neuron":
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
        return tuple(dict.fromkeys([self.zone, *self.embed_zones]))

    @property
    def train_hardware(self) -> Hardware:
        return HARDWARE[self.instance_type]

    @property
    def embed_hardware(self) -> Hardware:
        return HARDWARE[self.embed_instance_type]

    def deployed_config(self) -> dict[str, Any]:
        """The partial run configuration under every execution's input: `config`, over what the instance types determine.

        The configuration's own defaults describe a trn1.32xlarge.
        """
        train, embed = self.train_hardware, self.embed_hardware
        under: dict[str, Any] = {}
        if build_config(self.config).device.kind == "neuron":
            if train != STANDARD:
                under["device"] = {"ranks_per_node": train.cores, "host_memory_gib": train.job_memory_mib / 1024}
                under["health_check"] = {"neuron_devices": train.neuron_devices, "efa_devices": train.efa_interfaces}
            if embed.cores != train.cores:
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

    def readable_objects(self, *, shards: bool, parent: bool) -> tuple[str, ...]:
        """Patterns `BUCKET/KEY` of what runs read outside our bucket: under `read`, and what the deployment's config names.

        Args:
            shards: training data and corpus too.
            parent: the model to continue from too.
        """
        config = self.run_config()
        named = [*self.read]
        named += [*config.data.train, *config.data.corpus] if shards else []
        named += [uri for uri in (config.model.parent, config.model.base) if uri] if parent else []
        found = [pattern for uri in named if uri.startswith("s3://") for pattern in _file_or_folder(uri)]
        if parent and config.model.parent and config.model.parent.startswith("s3://"):
            found += _beside(config.model.parent)
        return tuple(dict.fromkeys(found))


def _file_or_folder(uri: str) -> list[str]:
    path = uri.removeprefix("s3://")
    folder = f"{path.rstrip('/')}/*"
    return [folder] if path.endswith("/") or "/" not in path else [path, folder]


def _beside(parent: str) -> list[str]:
    """A parent that is a bare weight file takes its configuration and tokenizer from the folder it stands in."""
    folder, _, name = parent.removeprefix("s3://").rpartition("/")
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
