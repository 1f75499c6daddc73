"""Instance types, their prices, and what a run costs: the node-hours of its stages times the price of an hour.

Prices are those that AWS publishes: USD an hour, Linux, shared tenancy, on demand. Only regions and types
that could be confirmed are listed: an unknown one has no price, never a guessed one. A deployment says what it really pays
(Savings Plans, Capacity Blocks, Spot) in its setting `prices`, which also stands in for what is missing here. Sources, read in
November 2026:

- EC2: the AWS Price List as SkyPilot's catalog holds it (skypilot-org/skypilot-catalog, catalogs/v8/aws/vms.csv at 00148f2): the
  same figures in the three regions. trn1 is offered on demand in no other.
- GPU types: the AWS Price List of us-east-1, editions of July and September 2026; not confirmed for the other two regions.
- Fargate: the AWS Price List's `Fargate-vCPU-Hours:perCPU`, `Fargate-GB-Hours` and `Fargate-EphemeralStorage-GB-Hours`
  (aws.amazon.com/fargate/pricing): Linux on x86.

Every node's supervisor leaves a record of each attempt (`STAGE/attempts/`): when it began, on which host, its last sign of life,
how it ended. The report adds them up, failed attempts included. A node is paid for as long as its supervisor lives; not counted
are hosts while they boot, pull an image or wait for the next job, and what is no compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec

from pipeline.contract import STAGES, Queue, Record, Shape, Stage

CURRENCY = "USD"

REGIONS = ("us-east-1", "us-east-2", "us-west-2")
"""Regions of the prices below, which do not differ between them."""

IMAGE_KINDS = ("cpu", "cuda", "neuron")
"""Container images, by the kind of device on which their jobs compute."""

CORES_PER_DEVICE = 2
"""NeuronCores of a Trainium chip, and of an Inferentia2 chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One instance type as Batch and the kernel show it.

    Attributes:
        vcpus, memory_mib: of the whole host.
        neuron_devices: chips, /dev/neuron0 and so on.
        efa_interfaces: network cards with EFA that a gang uses; without any, accelerators of two hosts cannot form one.
        gpus: GPUs; without these and chips the host computes on its processor.
        gpu_memory_gib: memory of a GPU.
    """

    vcpus: int
    memory_mib: int
    neuron_devices: int = 0
    efa_interfaces: int = 0
    gpus: int = 0
    gpu_memory_gib: int = 0

    @property
    def kind(self) -> str:
        """Kind of device on which its jobs compute, and name of their image."""
        return "neuron" if self.neuron_devices else "cuda" if self.gpus else "cpu"

    @property
    def ranks(self) -> int:
        """NeuronCores or GPUs, one rank each; 0 on processors."""
        return self.neuron_devices * CORES_PER_DEVICE + self.gpus

    @property
    def job_vcpus(self) -> int:
        """More than half of the vCPUs: chips are not a Batch resource, and two jobs on one host would compete for them."""
        return self.vcpus * 3 // 4

    @property
    def job_memory_mib(self) -> int:
        """Memory besides the operating system's and the ECS agent's; a request above it never leaves RUNNABLE."""
        return self.memory_mib * 15 // 16 - 1024


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "trn1.2xlarge": Hardware(vcpus=8, memory_mib=32 * 1024, neuron_devices=1),
        "trn1.32xlarge": Hardware(vcpus=128, memory_mib=512 * 1024, neuron_devices=16, efa_interfaces=8),
        "trn1n.32xlarge": Hardware(vcpus=128, memory_mib=512 * 1024, neuron_devices=16, efa_interfaces=16),
        "inf2.xlarge": Hardware(vcpus=4, memory_mib=16 * 1024, neuron_devices=1),
        "inf2.8xlarge": Hardware(vcpus=32, memory_mib=128 * 1024, neuron_devices=1),
        "inf2.24xlarge": Hardware(vcpus=96, memory_mib=384 * 1024, neuron_devices=6),
        "inf2.48xlarge": Hardware(vcpus=192, memory_mib=768 * 1024, neuron_devices=12),
        "c7i.2xlarge": Hardware(vcpus=8, memory_mib=16 * 1024),
        "c7i.4xlarge": Hardware(vcpus=16, memory_mib=32 * 1024),
        "g6e.12xlarge": Hardware(vcpus=48, memory_mib=384 * 1024, gpus=4, gpu_memory_gib=44),
        "g6e.48xlarge": Hardware(vcpus=192, memory_mib=1536 * 1024, gpus=8, gpu_memory_gib=44),
        "p4d.24xlarge": Hardware(vcpus=96, memory_mib=1152 * 1024, gpus=8, gpu_memory_gib=39),
        "p5.48xlarge": Hardware(vcpus=192, memory_mib=2048 * 1024, gpus=8, gpu_memory_gib=79),
    }
)
"""The one table of instance types: a deployment names its hosts from it, and `trnpipe plan` compares them. Sources: trn1-arch.rst
and inf2-arch.rst of the Neuron SDK's documentation; EC2's pages on C7i, G6e (L40S), P4 (A100 of 40 GB) and P5 (H100 of 80 GB). Of
a GPU's memory its driver leaves about a gigabyte less than its name says, of an L40S with ECC four."""

INSTANCE_HOUR: Mapping[str, float] = MappingProxyType(
    {
        "trn1.2xlarge": 1.34375,
        "trn1.32xlarge": 21.50,
        "trn1n.32xlarge": 24.78,
        "inf2.xlarge": 0.7582,
        "inf2.8xlarge": 1.96786,
        "inf2.24xlarge": 6.49063,
        "inf2.48xlarge": 12.98127,
        "c7i.2xlarge": 0.357,
        "c7i.4xlarge": 0.714,
        "g6e.12xlarge": 10.49264,
        "g6e.48xlarge": 30.13118,
        "p4d.24xlarge": 21.957642,
        "p5.48xlarge": 55.04,
    }
)


FARGATE_VCPU_HOUR, FARGATE_GIB_HOUR, FARGATE_DISK_GIB_HOUR = 0.04048, 0.004445, 0.000111
FARGATE_FREE_DISK_GIB = 20
"""Ephemeral storage that every Fargate task has for free."""


def instance_hour(region: str, instance_type: str) -> float | None:
    """Return the USD for an hour of an instance; None if unknown."""
    return INSTANCE_HOUR.get(instance_type) if region in REGIONS else None


def fargate_hour(region: str, *, vcpus: float, memory_gib: float, disk_gib: float) -> float | None:
    """Return the USD for an hour of a Fargate task of this size; None if unknown."""
    if region not in REGIONS:
        return None
    return (
        vcpus * FARGATE_VCPU_HOUR
        + memory_gib * FARGATE_GIB_HOUR
        + max(0.0, disk_gib - FARGATE_FREE_DISK_GIB) * FARGATE_DISK_GIB_HOUR
    )


# ---- what a run has used and costs ----

NOTE_SECONDS = 60.0
"""Longest time between two signs of life in a node's record, and so the uncertainty about a killed node."""

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""With a time zone."""

HourlyPrices = Mapping[Queue, float]
"""USD for an hour of one node, by queue; queues with an unknown price are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAttempt(Record):
    """`STAGE/attempts/JOB/attempt-A-node-N.json`: one attempt on one node. Written when it begins, twice in
    NOTE_SECONDS, and at its end.

    Attributes:
        node: index within the gang, or of the array child.
        started, seen: its supervisor's start, and its last sign of life.
        exit_code: None while it runs, and if it was killed.
    """

    if_unreadable: ClassVar[str] = "delete the record: the attempt is then not counted"

    node: int
    attempt: int
    job: str
    host: str
    started: Moment
    seen: Moment
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """The node-hours of a stage, over all its attempts.

    Attributes:
        nodes: different nodes of its gang, or children of its array; a job of several nodes' size counts as so many.
        attempts: of the node that had most of them, in all executions of the run.
        at_most: an attempt's end is unknown, and it counts up to the latest possible one.
    """

    stage: Stage
    nodes: int
    attempts: int
    node_hours: float
    at_most: bool


def stage_use(stage: Stage, records: Sequence[NodeAttempt], moment: datetime) -> StageUse | None:
    """Add up a stage's attempts. Two that overlap on a host count once.

    Args:
        moment: now, for attempts that are still running.
    """
    if not records:
        return None
    intervals: dict[str, list[tuple[datetime, datetime]]] = {}
    at_most = False
    for record in records:
        ended, known = _end(record, records, moment)
        intervals.setdefault(record.host, []).append((record.started, ended))
        at_most |= not known
    used = sum((_covered(spans) for spans in intervals.values()), timedelta())
    by_node = [record.node for record in records]
    return StageUse(
        stage=stage,
        nodes=len(set(by_node)) * STAGES[stage].size,
        attempts=max(by_node.count(node) for node in set(by_node)),
        node_hours=used.total_seconds() / 3600 * STAGES[stage].size,
        at_most=at_most,
    )


def _end(record: NodeAttempt, records: Iterable[NodeAttempt], moment: datetime) -> tuple[datetime, bool]:
    """Return when an attempt ended, and whether that is known or only the latest possible moment."""
    if record.exit_code is not None:
        return record.seen, True
    after = [other.started for other in records if other.node == record.node and other.started > record.started]
    silence = timedelta(seconds=NOTE_SECONDS)
    alive = record.seen > moment - silence
    if alive and not after:
        return moment, True  # still running, as the report itself is
    return min([moment if alive else record.seen + silence, *after]), False


def _covered(spans: list[tuple[datetime, datetime]]) -> timedelta:
    """Return the length of the intervals' union."""
    total = timedelta()
    reached = min(spans)[0]
    for start, stop in sorted(spans):
        total += max(stop - max(start, reached), timedelta())
        reached = max(stop, reached)
    return total


def cost_of(node_hours: Mapping[Stage, float], prices: HourlyPrices) -> float | None:
    """Return the USD for these node-hours; None if a price is unknown."""
    queues = {stage: STAGES[stage].queue for stage in node_hours}
    if any(queue not in prices for queue in queues.values()):
        return None
    return sum(hours * prices[queues[stage]] for stage, hours in node_hours.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The node-hours of a run, stage by stage, and their cost at some prices."""

    uses: tuple[StageUse, ...]
    prices: HourlyPrices

    @property
    def node_hours(self) -> float:
        return sum(use.node_hours for use in self.uses)

    @property
    def usd(self) -> float | None:
        """The cost of the run; None if a price is unknown."""
        return cost_of({use.stage: use.node_hours for use in self.uses}, self.prices)

    @property
    def at_most(self) -> bool:
        return any(use.at_most for use in self.uses)

    def price(self, use: StageUse) -> float | None:
        return self.prices.get(STAGES[use.stage].queue)

    def metrics(self) -> dict[str, Any]:
        """Return the bill as metrics of a stage's result."""
        return {
            "currency": CURRENCY,
            "usd": _rounded(self.usd, 2),
            "node_hours": _rounded(self.node_hours, 4),
            "at_most": self.at_most,
            "stages": {
                use.stage.value: {
                    "nodes": use.nodes,
                    "attempts": use.attempts,
                    "node_hours": _rounded(use.node_hours, 4),
                    "usd": _rounded(cost_of({use.stage: use.node_hours}, self.prices), 2),
                }
                for use in self.uses
            },
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def nodes_of(stage: Stage, *, nodes: int, children: Mapping[Stage, int]) -> int:
    """Return how many nodes a stage has at once.

    Args:
        nodes: of the run's gangs.
        children: of its array jobs, by stage, and of other stages that do not have the usual number.
    """
    return children.get(stage, nodes if STAGES[stage].shape is Shape.GANG else 1)


def most(prices: HourlyPrices, *, nodes: int, children: Mapping[Stage, int], time_budget: timedelta) -> float | None:
    """Return the most USD that a run costs if it keeps its time budget: one stage follows the other, so it is the most expensive
    stage's nodes for all that time, whatever Batch retries. None if a price is unknown."""
    hourly = [cost_of({stage: float(nodes_of(stage, nodes=nodes, children=children))}, prices) for stage in STAGES]
    known = [usd for usd in hourly if usd is not None]
    return max(known) * time_budget.total_seconds() / 3600 if len(known) == len(hourly) else None
