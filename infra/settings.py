"""What a deployment can choose: one frozen `Settings`, checked before anything is built.

The only reader of CDK context, of what stands there under `trnpipe`. `cdk.json` holds the values, and
`cdk deploy -c trnpipe.region=us-east-2` lays one over them (the value is YAML). Errors are `BadConfig`: what was wrong, the
value, the rule, the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.config import RunConfig, build_config, merge, parse_settings
from pipeline.contract import SHARE_PATTERN, Queue
from pipeline.errors import BadConfig
from pipeline.places import is_s3, objection

CONTEXT_KEY = "trnpipe"

AMI_ID = re.compile(r"ami-[0-9a-f]{8,17}")
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
        efa_interfaces: network cards with EFA, 0 where the type has none and so cannot be a gang's node.
    """

    vcpus: int
    memory_mib: int
    neuron_devices: int
    efa_interfaces: int = 0

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


class SettingsSection(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ExistingVpc(SettingsSection):
    """A VPC of the company's own. Its private subnet in `zone` needs routes or endpoints to the services named in network.py."""

    vpc_id: str = Field(pattern=r"^vpc-[0-9a-f]+$")
    subnet_id: str = Field(pattern=r"^subnet-[0-9a-f]+$", description="A private subnet in the setting `zone`.")
    route_table_id: str = Field(pattern=r"^rtb-[0-9a-f]+$", description="That subnet's route table.")
    default_security_group_id: str = Field(
        pattern=r"^sg-[0-9a-f]+$",
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
    cron: str = Field("cron(0 3 ? * SUN *)", pattern=r"^(cron|rate)\(.+\)$", description="An EventBridge Scheduler expression.")
    time_zone: str = Field("Etc/UTC", pattern=r"^[A-Za-z]+(/[A-Za-z0-9_+\-]+)*$")
    flexible_minutes: Annotated[int, Field(ge=0, le=1440)] = Field(15, description="0: start on the minute.")
    share: str = "weekly"
    lock_wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        12 * 60, description="Wait for a run that is going on."
    )


class Settings(SettingsSection):
    """One deployment."""

    name: str = Field("trnpipe", pattern=r"^[a-z][a-z0-9-]{0,23}$", description="Prefix of everything that has a name.")
    account: str | None = Field(None, pattern=r"^[0-9]{12}$", description="None: the account of the credentials at deploy time.")
    region: str = Field("us-west-2", pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$")
    zone: str = Field(
        "us-west-2d",
        description="The availability zone of all hosts: gangs share one placement group. Only some zones have trn1: "
        "`aws ec2 describe-instance-type-offerings --location-type availability-zone --filters "
        "Name=instance-type,Values=trn1.32xlarge`.",
    )
    vpc: ExistingVpc | None = Field(None, description="None: a VPC of our own without any way to the internet.")
    instance_type: Literal["trn1.32xlarge", "trn1n.32xlarge"] = "trn1.32xlarge"
    embed_instance_type: str = "trn1.32xlarge"
    allowed_nodes: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = (1, 2, 4)
    max_vcpus: Annotated[int, Field(ge=128)] = Field(512, description="Of the training hosts together; a trn1.32xlarge has 128.")
    embed_max_vcpus: Annotated[int, Field(ge=4)] = 512
    cpu_max_vcpus: Annotated[int, Field(ge=4)] = 64
    ami: str = Field(description="AMI of all accelerator hosts: `ami-0123456789abcdef0`, or `ssm:/parameter/name:VERSION`.")
    capacity_reservation_id: str | None = Field(None, pattern=r"^cr-[0-9a-f]+$")
    images: Images = Images()
    shares: dict[str, Annotated[float, Field(ge=0.0001, le=999.9999)]] = Field(
        {"weekly": 0.5, "manual": 1.0, "experiments": 4.0}, description="Fair-share weight factors; a lower weight gets more."
    )
    share_decay_seconds: Annotated[int, Field(ge=0, le=604_800)] = Field(
        3600, description="How long use counts against a share. A gang's hours weigh heavily: keep it short."
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
    log_retention_days: Literal[30, 90, 180, 365, 731] = 180

    @field_validator("ami")
    @classmethod
    def _pinned_ami(cls, ami: str) -> str:
        if "recommended" in ami or "latest" in ami:
            raise ValueError(DRIVER_RULE)
        if not AMI_ID.fullmatch(ami) and not AMI_PARAMETER.fullmatch(ami):
            raise ValueError("must be an image id (ami-...) or an SSM parameter with its version (ssm:/name:3); " + DRIVER_RULE)
        return ami

    @field_validator("allowed_nodes")
    @classmethod
    def _ascending(cls, nodes: tuple[int, ...]) -> tuple[int, ...]:
        if not nodes or list(nodes) != sorted(set(nodes)):
            raise ValueError("node counts ascend without repeats, e.g. [1, 2, 4]")
        return nodes

    @field_validator("shares")
    @classmethod
    def _share_names(cls, shares: dict[str, float]) -> dict[str, float]:
        for share in shares:
            if not SHARE_PATTERN.fullmatch(share):
                raise ValueError(f"share {share!r}: AWS Batch share identifiers are alphanumeric")
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
    def _fits_together(self) -> Settings:
        if not self.zone.startswith(self.region):
            raise ValueError(f"zone {self.zone} is not in region {self.region}")
        if self.embed_instance_type not in HARDWARE:
            raise ValueError(f"embed_instance_type {self.embed_instance_type!r} is none of {sorted(HARDWARE)}")
        needed = self.train_hardware.vcpus * max(self.allowed_nodes)
        if self.max_vcpus < needed:
            raise ValueError(f"max_vcpus {self.max_vcpus} is below {needed}, what {max(self.allowed_nodes)} nodes need")
        if strange := sorted(self.prices.keys() - HARDWARE.keys() - {queue.value for queue in Queue}):
            raise ValueError(f"prices for {strange}: a key is one of {sorted(HARDWARE)}, or a queue: train, embed, cpu")
        if self.budget is not None and not self.notify:
            raise ValueError(f"budget {self.budget:g} would be watched for nobody: put an e-mail address into `notify`")
        if self.embed_max_vcpus < self.embed_hardware.vcpus:
            raise ValueError(f"embed_max_vcpus {self.embed_max_vcpus} is below one {self.embed_instance_type}")
        config = self.run_config()
        for share in (self.schedule.share, config.share):
            if share not in self.shares:
                raise ValueError(f"share {share!r} is none of the declared shares {sorted(self.shares)}")
        if config.nodes not in self.allowed_nodes:
            raise ValueError(f"config.nodes {config.nodes} is none of allowed_nodes {list(self.allowed_nodes)}")
        if config.run is not None:
            raise ValueError("config.run would send every execution into one run folder: give it per execution")
        local = [f"config.{key} = {uri}" for key, uri in config.uris() if not is_s3(uri)]
        if local and not self.local_paths:
            raise ValueError(f"{', '.join(local)}: a local path, which the hosts do not have: put it on S3")
        return self

    @property
    def train_hardware(self) -> Hardware:
        return HARDWARE[self.instance_type]

    @property
    def embed_hardware(self) -> Hardware:
        return HARDWARE[self.embed_instance_type]

    def run_config(self) -> RunConfig:
        """The configuration of an execution whose input is empty.

        Raises:
            BadConfig: `config` is not a valid partial configuration.
        """
        return build_config(self.config)

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


def read_settings(context: Mapping[str, Any]) -> Settings:
    """Settings from CDK context: the object under `trnpipe`, then every `trnpipe.KEY` over it.

    Raises:
        BadConfig: a missing, unknown or wrong value.
    """
    values = context.get(CONTEXT_KEY)
    if not isinstance(values, Mapping):
        raise BadConfig(
            "the settings are missing",
            value=values,
            rule=f"the CDK context has an object under {CONTEXT_KEY!r}",
            remedy="run in the folder of cdk.json, or pass the context yourself",
        )
    prefix = f"{CONTEXT_KEY}."
    given = [f"{key.removeprefix(prefix)}={value}" for key, value in context.items() if key.startswith(prefix)]
    try:
        return Settings.model_validate(merge(values, parse_settings(given)))
    except ValidationError as error:
        raise _bad_settings(error) from error


def _bad_settings(error: ValidationError) -> BadConfig:
    found = []
    rule = ""
    for item in error.errors():
        where = ".".join((CONTEXT_KEY, *map(str, item["loc"])))
        message = item["msg"].removeprefix("Value error, ")
        rule = DRIVER_RULE if DRIVER_RULE in message else rule
        found.append(
            f"{where}: {message}" if item["type"] == "missing" or not item["loc"] else f"{where} = {item['input']!r}: {message}"
        )
    return BadConfig(
        "the settings of this deployment are not valid",
        value=found,
        rule=rule or "infra/settings.py describes every setting",
        remedy="pin an image with driver 2.27, by id or by SSM parameter and version"
        if rule
        else "correct cdk.json, or the -c option",
    )
