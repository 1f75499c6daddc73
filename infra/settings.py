"""The settings of a deployment: one frozen `Settings`, checked before CDK creates a construct. infra/cdk_context.py reads it."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from infra.setting_sections import (
    IDENTIFIER,
    CapacityReservation,
    ExistingVpc,
    Images,
    InvalidSetting,
    RetentionPeriods,
    Schedule,
    SettingsSection,
    Subscriber,
    TrainHost,
    refuse_if,
)
from pipeline.allowed_uris import is_s3, objection
from pipeline.config import RunConfig, build_config, merge
from pipeline.contract import ATTEMPT_VARIABLE, FARGATE_VCPUS, STAGES, Queue, Stage
from pipeline.cost import HARDWARE, Hardware

SHARE = re.compile(r"[A-Za-z0-9]{1,254}\*?")
"""A share identifier; with `*` at its end, all identifiers with that prefix (AWS Batch, ShareAttributes)."""
MOST_SHARES = 500
COST_TAG = "trnpipe"
"""Tag of everything that a deployment creates or starts; its value is the deployment's name."""
OWN_TAGS = ("Name", COST_TAG)
MOST_TAGS = 40
"""A resource takes 50."""

ZONE_LETTERS = "abcdefghijklmnop"
"""The last letter of a zone's name; each has its own part of a VPC's addresses."""
LONGEST_MINUTES = 7200
"""The longest time for which Batch leaves jobs running while it replaces hosts (API reference, UpdatePolicy)."""
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

KEY_ARN = re.compile(r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):[0-9]{12}:key/[A-Za-z0-9-]+")
AMI_ID = re.compile(f"ami-{IDENTIFIER}")
AMI_PARAMETER = re.compile(r"ssm:(?P<name>/[A-Za-z0-9_.\-/]+):(?P<version>[1-9][0-9]*)")
DEFAULT_AMI_PARAMETER = "/trnpipe/ami/neuron-driver-2.27"
"""Parameter of the AMI in cdk.json and in docs/deploy.md."""
DRIVER_RULE = (
    "the image is pinned to a release whose Neuron driver is 2.27.x: Neuron SDK 2.29.1 (the last with PyTorch/XLA training "
    "on trn1) does not start on driver 2.29 or newer, and `recommended` moves without notice"
)


BLOCK_TYPE = "trn1.32xlarge"
"""The one type here with Capacity Blocks (EC2 User Guide, "Capacity Blocks for ML", supported instance types)."""

STANDARD = HARDWARE["trn1.32xlarge"]
"""The host that the defaults of the run configuration describe."""


def base_repository(name: str) -> str:
    """Name of the repository with a deployment's copies of the Neuron image's base."""
    return f"{name}/neuron-base"


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
        description="The zones of the hosts that evaluate and embed, each alone: more zones, more capacity. Empty: `zone`.",
    )
    service_zones: tuple[str, ...] = Field(
        (),
        description="The zones of the Fargate tasks and of the endpoints: not every zone that has trn1 has both. Empty: every "
        "zone above.",
    )
    vpc: ExistingVpc | None = Field(None, description="None: the stack creates a VPC without a route to the internet.")
    instance_type: TrainHost = Field(
        "trn1.32xlarge",
        description="Type of the gangs' hosts. trn1.2xlarge: one chip without EFA, for development on a single node. c7i: CPUs "
        "only, to try a deployment for little money. g6e, p4d and p5: GPUs, on a single node.",
    )
    embed_instance_type: str = Field("trn1.32xlarge", description="Type of the hosts that evaluate and embed, also inf2.")
    embed_market: Literal["on-demand", "spot"] = Field(
        "on-demand",
        description="spot: cheaper; when EC2 reclaims a host, Batch retries its child, which skips finished parts.",
    )
    train_market: Literal["on-demand"] = Field("on-demand", description="AWS Batch runs gangs on On-Demand hosts only.")
    allowed_nodes: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = Field(
        (1, 2, 4), description="Numbers of nodes that a run may ask for; each has its own job definitions."
    )
    max_vcpus: Annotated[int, Field(ge=8)] | None = Field(
        None,
        description="Limit of the vCPUs of all training hosts; a trn1.32xlarge has 128. None: one host more than the widest gang "
        "has nodes, because a host that fails its health check counts until it is gone, and the retry needs another one.",
    )
    embed_max_vcpus: Annotated[int, Field(ge=4)] = Field(
        512, description="Limit of the vCPUs of all hosts that evaluate and embed."
    )
    cpu_max_vcpus: Annotated[int, Field(ge=FARGATE_VCPUS)] = Field(64, description="Limit of the vCPUs of all Fargate tasks.")
    keep_hosts_minutes: Annotated[int, Field(ge=20, le=10_080)] = Field(
        20, description="How long an idle, paid host waits for its next job: health_check, compile and train follow each other."
    )
    timeouts: dict[Stage, Annotated[int, Field(ge=10, le=LONGEST_MINUTES)]] = Field(
        default_factory=dict,
        description="Minutes after which Batch ends an attempt of a stage, over those of pipeline/contract.py. ingest, train and "
        "embed end themselves shortly before, and the next attempt resumes, up to twice this time; other stages fail. "
        "Where gangs may take days, the state machine polls them less often than every five minutes.",
    )
    update_minutes: Annotated[int, Field(ge=1, le=LONGEST_MINUTES)] = Field(
        default_factory=lambda known: max({**DEFAULT_MINUTES, **known.get("timeouts", {})}.values()),
        description="How long a deployment that replaces hosts lets jobs run on. By default as long as any attempt may take.",
    )
    environment: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(
        default_factory=dict,
        description="Environment variables of all jobs, over the deployment's own: FI_*, NEURON_RT_*, and the deadlines of "
        "pipeline/host/deadlines.py such as TRNPIPE_PEER_START_SECONDS.",
    )
    ami: str | None = Field(
        None,
        description="AMI of Trainium and Inferentia hosts: `ami-0123456789abcdef0`, or `ssm:/parameter/name:VERSION`. None: the "
        "one that AWS Batch chooses, which has no Neuron driver. Other hosts always boot Batch's choice.",
    )
    capacity_reservation: CapacityReservation | None = Field(None, description="Hosts that EC2 reserves for the gangs.")
    images: Images = Images()
    shares: dict[str, Annotated[float, Field(ge=0.0001, le=999.9999)]] = Field(
        {"weekly": 0.5, "manual": 1.0, "experiments": 4.0}, description="Fair-share weight factors; a lower weight gets more."
    )
    share_decay_seconds: Annotated[int, Field(ge=0, le=604_800)] = Field(
        3600, description="How long past use counts against a share. A gang's hours weigh heavily: keep it short."
    )
    compute_reservation: Annotated[int, Field(ge=0, le=99)] = Field(
        0, description="Percentage of the vCPUs that a single active share must leave to others; two leave that percentage of it."
    )
    schedules: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,23}$")], Schedule] = Field(
        default_factory=dict, description="Name -> runs that the clock or an object starts; two models have one each."
    )
    config: dict[str, Any] = Field(default_factory=dict, description="Partial run configuration under every execution's input.")
    read: tuple[str, ...] = Field(
        (), description="s3://BUCKET/PREFIX folders that runs may read in addition to the deployment's bucket."
    )
    kms_keys: tuple[str, ...] = Field(
        (),
        description="ARNs of the customer managed KMS keys of the inputs: of the objects that `read` and `config` name in S3. "
        "The policy of a key of another account must admit this account, too.",
    )
    customer_key: str | None = Field(
        None,
        description="ARN of a customer managed KMS key for all stored data: bucket, lock table, images, logs, disks of "
        "hosts. docs/deploy.md has the statements that its policy needs. Without it, keys of AWS.",
    )
    local_paths: bool = Field(
        False, description="Whether runs may name local paths: only where all stages share one machine, as `trnpipe local` does."
    )
    capacity_wait_hours: Annotated[int, Field(ge=1, le=24)] = Field(
        6, description="After this Batch cancels a job that waits for hosts."
    )
    notify: tuple[Subscriber, ...] = Field((), description="Who gets notifications: e-mail addresses, or {protocol, endpoint}.")
    prices: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="USD for an hour of one host, where that is not the on-demand price of pipeline/cost.py (Savings Plans, "
        "Capacity Blocks, another region): by instance type, or by queue (train, embed, cpu), which takes precedence and so can "
        "price the Spot hosts of one queue. cpu: one Fargate task.",
    )
    budget: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="USD a month. AWS Budgets notifies `notify` when 80 % of it is spent, and when the forecast exceeds it. It "
        "counts costs with the deployment's tag, once that is activated for cost allocation: see the output CostAllocationTag.",
    )
    retention: RetentionPeriods = RetentionPeriods()
    tags: dict[str, str] = Field(
        default_factory=dict,
        description="Tags of all resources, hosts and volumes, over the deployment's own. Compute environments and the placement "
        "group, whose tags can never change, get none; their hosts do.",
    )
    permissions_boundary: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_+=,.@/-]{1,512}$",
        description="Name (with its path) of a managed policy of the account, the permissions boundary of all roles.",
    )
    bootstrap_qualifier: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{1,10}$",
        description="Qualifier of the account's CDK bootstrap, unless it is the CDK's default.",
    )

    @field_validator("ami")
    @classmethod
    def _pinned_ami(cls, ami: str | None) -> str | None:
        if ami is None:
            return None
        remedy = "pin an image with driver 2.27, by id or by SSM parameter and version"
        refuse_if("recommended" in ami or "latest" in ami, "moves without notice", rule=DRIVER_RULE, remedy=remedy)
        refuse_if(
            not AMI_ID.fullmatch(ami) and not AMI_PARAMETER.fullmatch(ami),
            "must be an image id (ami-...) or an SSM parameter with its version (ssm:/name:3)",
            rule=DRIVER_RULE,
            remedy=remedy,
        )
        return ami

    @field_validator("zone", mode="before")
    @classmethod
    def _one_zone(cls, zone: object) -> object:
        refuse_if(
            isinstance(zone, (list, tuple)) or (isinstance(zone, str) and "," in zone),
            "names several zones, but EFA and a cluster placement group do not cross zones",
            remedy="name the one zone of the gangs here, and further ones under embed_zones",
        )
        return zone

    @field_validator("train_market", mode="before")
    @classmethod
    def _never_spot(cls, market: object) -> object:
        refuse_if(
            market == "spot",
            "AWS Batch starts no multi-node job on Spot hosts: it would stay RUNNABLE",
            remedy="leave training on-demand (capacity_reservation holds hosts for it) and set embed_market: spot",
        )
        return market

    @field_validator("allowed_nodes")
    @classmethod
    def _ascending(cls, nodes: tuple[int, ...]) -> tuple[int, ...]:
        refuse_if(
            not nodes or list(nodes) != sorted(set(nodes)),
            "node counts ascend without repeats",
            remedy="list them as in [1, 2, 4]",
        )
        return nodes

    @field_validator("shares")
    @classmethod
    def _share_names(cls, shares: dict[str, float]) -> dict[str, float]:
        for share in shares:
            refuse_if(
                not SHARE.fullmatch(share),
                f"share {share!r}: AWS Batch share identifiers are alphanumeric",
                remedy="use letters and digits only; a `*` at the end means all shares with that prefix",
            )
        for prefix in (share.removesuffix("*") for share in shares if share.endswith("*")):
            if covered := sorted(share for share in shares if share != f"{prefix}*" and share.startswith(prefix)):
                raise InvalidSetting(
                    f"shares {prefix}* and {covered[0]} overlap, and AWS Batch takes one weight for each",
                    remedy=f"remove {covered[0]}, or choose a prefix that does not cover it",
                )
        refuse_if(
            len(shares) > MOST_SHARES,
            f"{len(shares)} shares, and a queue has at most {MOST_SHARES}",
            remedy="join shares of one weight under a prefix, such as team*",
        )
        return shares

    @field_validator("tags")
    @classmethod
    def _tags_of_aws(cls, tags: dict[str, str]) -> dict[str, str]:
        """Reserved keys and limits: https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html."""
        for key, value in tags.items():
            allowed = re.fullmatch(r"[\w .:/=+@-]{1,128}", key) and re.fullmatch(r"[\w .:/=+@-]{0,256}", value)
            refuse_if(
                not allowed or key.lower().startswith("aws:") or key in OWN_TAGS,
                f"tag {key}={value}: letters, digits, spaces and . : / = + @ _ -, up to 128 and 256 characters; not aws:*, "
                f"not {' or '.join(OWN_TAGS)}",
                remedy="choose another key or value",
            )
        refuse_if(
            len(tags) > MOST_TAGS,
            f"{len(tags)} tags, and a resource takes {MOST_TAGS} in addition to the deployment's own",
            remedy="take some out",
        )
        return tags

    @field_validator("environment")
    @classmethod
    def _free_variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            refuse_if(
                not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name),
                f"{name!r}: invalid name of an environment variable",
                remedy="use letters, digits and underscores",
            )
            for pattern, reason in RESERVED_VARIABLES.items():
                refuse_if(re.fullmatch(pattern, name), f"{name} is reserved: {reason}", remedy=f"leave {name} out")
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
            refuse_if(
                not KEY_ARN.fullmatch(key),
                f"{key!r} is not the ARN of a key, and a policy of IAM takes no alias",
                remedy="aws kms describe-key --key-id alias/NAME --query KeyMetadata.Arn prints it",
            )
        return keys

    @model_validator(mode="after")
    def _zones_exist_for_all(self) -> Settings:
        for key, zones in (("embed_zones", self.embed_zones), ("service_zones", self.service_zones)):
            refuse_if(len(set(zones)) != len(zones), f"{key} {list(zones)} names a zone twice", remedy="name each zone once")
        for zone in self.zones:
            refuse_if(
                not re.fullmatch(f"{re.escape(self.region)}[{ZONE_LETTERS}]", zone),
                f"zone {zone} is not in region {self.region}",
                remedy=f"name zones of {self.region}, such as {self.region}a, or change the region",
            )
        if self.vpc is not None and (absent := sorted(set(self.zones) - self.vpc.subnets.keys())):
            raise InvalidSetting(
                f"vpc.subnets has none in {', '.join(absent)}",
                remedy=f"add vpc.subnets.{absent[0]} with the subnet_id and route_table_id of a private subnet there",
            )
        return self

    @model_validator(mode="after")
    def _hosts_suffice(self) -> Settings:
        refuse_if(
            self.embed_instance_type not in HARDWARE,
            f"embed_instance_type {self.embed_instance_type!r} is none of {sorted(HARDWARE)}",
            remedy="name one of them",
        )
        if self.ami is None and (hosts := [kind for kind in self.instance_types if HARDWARE[kind].neuron_devices]):
            raise InvalidSetting(
                f"ami: {', '.join(hosts)} would boot an image without a Neuron driver",
                rule=DRIVER_RULE,
                remedy="name an image with driver 2.27, by id or by SSM parameter and version",
            )
        refuse_if(
            self.train_hardware.kind != "cpu" and not self.train_hardware.efa_interfaces and self.allowed_nodes != (1,),
            f"allowed_nodes {list(self.allowed_nodes)}: a {self.instance_type} trains alone",
            rule="gangs of accelerators communicate by EFA, which trn1.32xlarge and trn1n.32xlarge have here",
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
                raise InvalidSetting(f"{key} {limit} is below {least}, {what}", remedy=f"set {key} to {least} or more{spare}")
            # Batch holds back (reservation / 100) ^ (active shares) of the vCPUs: most while one share is active.
            refuse_if(
                limit * (100 - self.compute_reservation) < least * 100,
                f"compute_reservation {self.compute_reservation} leaves a single share "
                f"{limit * (100 - self.compute_reservation) // 100} of {key} {limit}, and {what} is {least}",
                remedy=f"set {key} to {-(-least * 100 // (100 - self.compute_reservation))} or more, "
                f"or compute_reservation to at most {(limit - least) * 100 // limit}",
            )
        return self

    @model_validator(mode="after")
    def _reservation_fits(self) -> Settings:
        if (reserved := self.capacity_reservation) is None:
            return self
        refuse_if(
            reserved.block and self.instance_type != BLOCK_TYPE,
            f"capacity_reservation.block: hosts of {self.instance_type} start in none",
            remedy=f"take {BLOCK_TYPE} instead",
        )
        refuse_if(
            reserved.placement_group is not None and self.train_hardware.efa_interfaces == 0,
            f"capacity_reservation.placement_group: a {self.instance_type} trains alone, outside any placement group",
            remedy="take capacity_reservation.placement_group out",
        )
        refuse_if(
            reserved.group is not None and f":{self.region}:" not in reserved.group,
            f"capacity_reservation.group {reserved.group} is not in region {self.region}",
            remedy=f"name a resource group of {self.region}",
        )
        return self

    @model_validator(mode="after")
    def _costs_have_prices_and_addresses(self) -> Settings:
        if strange := sorted(self.prices.keys() - HARDWARE.keys() - {queue.value for queue in Queue}):
            raise InvalidSetting(
                f"prices for {strange}: a key is one of {sorted(HARDWARE)}, or a queue: train, embed, cpu",
                remedy="name an instance type or a queue",
            )
        if self.budget is not None and not self.notify:
            raise InvalidSetting(f"budget {self.budget:g} has no address to notify", remedy="put an e-mail address into `notify`")
        return self

    @model_validator(mode="after")
    def _models_are_apart(self) -> Settings:
        for (name, one), (other_name, other) in combinations(self.schedules.items(), 2):
            same = one.registry == other.registry
            refuse_if(
                same and one.mode == other.mode,
                f"schedules {name} and {other_name} both {one.mode} registry {one.registry}",
                rule="one run, and one refresh, per registry name at a time",
                remedy=f"give schedules.{other_name}.registry another name",
            )
            refuse_if(
                not same and one.share == other.share,
                f"schedules {name} and {other_name} have the share {one.share}, but not the same registry",
                rule="Batch divides hosts between shares, and the bill tells their jobs apart by them",
                remedy=f"set schedules.{other_name}.share to another one, which `shares` gives a weight",
            )
        return self

    @model_validator(mode="after")
    def _runs_fit(self) -> Settings:
        for where, config in self.run_configs().items():
            self._run_fits(where, config)
        return self

    def _run_fits(self, where: str, config: RunConfig) -> None:
        refuse_if(
            not any(config.share == known or (known[-1] == "*" and config.share.startswith(known[:-1])) for known in self.shares),
            f"share {config.share!r} is none of the declared shares {sorted(self.shares)}",
            remedy=f"add {config.share} to shares, with a weight, or name one of them",
        )
        refuse_if(
            config.nodes not in self.allowed_nodes,
            f"{where}.nodes {config.nodes} is none of allowed_nodes {list(self.allowed_nodes)}",
            remedy="add it to allowed_nodes, which makes job definitions for it, or set nodes to one of them",
        )
        refuse_if(
            config.run is not None,
            f"{where}.run would send every execution into one run folder",
            remedy="give `run` per execution, in its input",
        )
        refuse_if(
            config.model.parent is not None,
            f"{where}.model.parent {config.model.parent}: every run would continue from it, none from what was published",
            remedy=f"set {where}.model.initial, the model of the first run; give model.parent in the input of one execution",
        )
        local = [f"{where}.{key} = {uri}" for key, uri in config.uris() if not is_s3(uri)]
        refuse_if(
            local and not self.local_paths,
            f"{', '.join(local)}: a local path, which the hosts do not have",
            remedy="put it on S3",
        )
        wanted = config.device.kind
        for instance_type, hardware in ((one, HARDWARE[one]) for one in self.instance_types):
            refuse_if(
                not self.local_paths and wanted != hardware.kind and (wanted in ("neuron", "cuda") or hardware.gpus),
                f"{where}.device.kind {wanted}: a {instance_type} is of kind {hardware.kind}",
                rule="hosts have the devices that runs compute on; a run without them would leave paid GPUs idle",
                remedy=f"set {where}.device.kind: {hardware.kind}, or take other hosts",
            )
        if wanted == "neuron":
            least = -(-FARGATE_VCPUS * STAGES[Stage.PRECOMPILE].size * 100 // (100 - self.compute_reservation))
            refuse_if(
                config.compile.where == "cpu" and self.cpu_max_vcpus < least,
                f"{where}.compile.where cpu: a single share has too few of cpu_max_vcpus {self.cpu_max_vcpus} for precompile",
                remedy=f"set cpu_max_vcpus to {least} or more, or {where}.compile.where: gang",
            )
        for key, ranks, host, kind in (
            ("device.ranks_per_node", config.device.ranks_per_node, self.train_hardware, self.instance_type),
            ("embed.ranks_per_child", config.embed.ranks_per_child, self.embed_hardware, self.embed_instance_type),
        ):
            refuse_if(
                wanted in ("neuron", "cuda") and not self.local_paths and ranks is not None and ranks > host.ranks,
                f"{where}.{key} {ranks}: a {kind} has {host.ranks} {'GPUs' if host.gpus else 'NeuronCores'}, one for each rank",
                remedy=f"set {where}.{key} to {host.ranks} or less, or leave it out",
            )

    @property
    def zones(self) -> tuple[str, ...]:
        """All zones of hosts, tasks and endpoints, that of the gangs first."""
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
    def image_kinds(self) -> tuple[str, ...]:
        """Container images that jobs run, that of the gangs first."""
        return tuple(dict.fromkeys([self.train_hardware.kind, self.embed_hardware.kind, "cpu"]))

    def minutes(self, stage: Stage) -> int:
        """Minutes after which Batch ends an attempt of a stage."""
        return self.timeouts.get(stage, DEFAULT_MINUTES[stage])

    def deployed_config(self) -> dict[str, Any]:
        """The partial run configuration under every execution's input: `config`, over values of the instance types.

        The configuration's own defaults describe a trn1.32xlarge.
        """
        train, embed = self.train_hardware, self.embed_hardware
        under: dict[str, Any] = {}
        if train.kind != "neuron":
            under["device"] = {"host_memory_gib": train.job_memory_mib / 1024}
        if train.gpus:
            # Fargate, where runs are planned, has no GPU to ask; all of these compute bf16.
            under["device"] |= {"ranks_per_node": train.ranks, "memory_gib": train.gpu_memory_gib, "precision": "bf16"}
        elif train.neuron_devices and build_config(self.config).device.kind == "neuron" and train != STANDARD:
            under["device"] = {"ranks_per_node": train.ranks, "host_memory_gib": train.job_memory_mib / 1024}
            under["health_check"] = {"neuron_devices": train.neuron_devices, "efa_devices": train.efa_interfaces}
        if embed.ranks not in (0, train.ranks) and build_config(self.config).device.kind == embed.kind:
            under["embed"] = {"ranks_per_child": embed.ranks}
        return merge(under, self.config)

    def run_config(self) -> RunConfig:
        """The configuration of an execution whose input is empty.

        Raises:
            BadConfig: `config` is not a valid partial configuration.
        """
        return build_config(self.deployed_config())

    def run_configs(self) -> dict[str, RunConfig]:
        """The configuration of every kind of execution, by its setting: `config`, for an empty input, and those of schedules.

        Raises:
            BadConfig: one is not a valid partial configuration.
        """
        given = {f"schedules.{name}.config": schedule.given for name, schedule in self.schedules.items()}
        return {where: build_config(self.deployed_config(), layer) for where, layer in {"config": {}, **given}.items()}

    def readable(self) -> tuple[str, ...]:
        """Locations outside the deployment's bucket that runs may name: `read`, and the URIs in the settings' configurations."""
        named = (uri for config in self.run_configs().values() for _, uri in config.uris() if is_s3(uri))
        return tuple(dict.fromkeys([*self.read, *named]))

    def readable_objects(self, *, shards: bool, model: bool) -> tuple[str, ...]:
        """Patterns `BUCKET/KEY` of objects that runs read outside the deployment's bucket: `read`, and the URIs in the
        settings' configurations.

        Args:
            shards: training data, corpus, lists of what is deleted and golden sets too.
            model: the initial model too.
        """
        named = list(self.read)
        for config in self.run_configs().values():
            golden = [uri for each in config.evaluate.sets for uri in each.uris]
            named += [*config.data.training_uris, *config.data.corpus, *config.data.delete, *golden] if shards else []
            named += [uri for uri in (config.model.initial, config.model.base) if uri] if model else []
        found = []
        for path in [uri.removeprefix("s3://") for uri in named if is_s3(uri)]:
            if not path.endswith("/") and "/" in path:
                # It may be a file.
                found.append(path)
            found.append(f"{path.rstrip('/')}/*")
        for initial in [config.model.initial or "" for config in self.run_configs().values()]:
            folder, _, name = initial.removeprefix("s3://").rpartition("/")
            if model and is_s3(initial) and "." in name and folder:
                # A model that is a bare weight file takes its configuration and tokenizer from its folder.
                found.append(f"{folder}/*")
        return tuple(dict.fromkeys(found))
