"""Instance types and their prices, as AWS publishes them: USD an hour, Linux, shared tenancy, on demand. Standard library only.

Regions and types that could be confirmed, and no others: an unknown one has no price, never a guessed one. A deployment says what
it really pays (Savings Plans, Capacity Blocks, Spot) in its setting `prices`, which also stands in for what is missing here.

Sources, read in November 2026:
- EC2: the AWS Price List as SkyPilot's catalog holds it (skypilot-org/skypilot-catalog, catalogs/v8/aws/vms.csv at 00148f2): the
  same figures in the three regions. trn1 is offered on demand in no other.
- Fargate: the AWS Price List's `Fargate-vCPU-Hours:perCPU`, `Fargate-GB-Hours` and `Fargate-EphemeralStorage-GB-Hours`
  (aws.amazon.com/fargate/pricing): Linux on x86.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CURRENCY = "USD"

REGIONS = ("us-east-1", "us-east-2", "us-west-2")
"""Where the prices below hold: they do not differ between these."""

CORES_PER_DEVICE = 2
"""NeuronCores of a Trainium chip, and of an Inferentia2 chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One instance type as Batch and the kernel show it.

    Attributes:
        vcpus, memory_mib: of the whole host.
        neuron_devices: chips, /dev/neuron0 and so on; 0: the host computes on its processor.
        efa_interfaces: network cards with EFA, 0 where the type has none. Neuron hosts without EFA cannot form a gang.
    """

    vcpus: int
    memory_mib: int
    neuron_devices: int = 0
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
    }
)
"""The one table of instance types: a deployment names its hosts from it, and `trnpipe plan` compares them. Sources: trn1-arch.rst
and inf2-arch.rst of the Neuron SDK's documentation; EC2's page on C7i."""

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
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FargateHour:
    """An hour of one Fargate task, in its parts.

    Attributes:
        vcpu, gib, disk_gib: USD for one of each.
        free_disk_gib: ephemeral storage that every task has without paying for it.
    """

    vcpu: float
    gib: float
    disk_gib: float
    free_disk_gib: int

    def of(self, *, vcpus: float, memory_gib: float, disk_gib: float) -> float:
        return vcpus * self.vcpu + memory_gib * self.gib + max(0.0, disk_gib - self.free_disk_gib) * self.disk_gib


FARGATE_HOUR = FargateHour(vcpu=0.04048, gib=0.004445, disk_gib=0.000111, free_disk_gib=20)


def instance_hour(region: str, instance_type: str) -> float | None:
    """USD for an hour of an instance; None where it is not known."""
    return INSTANCE_HOUR.get(instance_type) if region in REGIONS else None


def fargate_hour(region: str, *, vcpus: float, memory_gib: float, disk_gib: float) -> float | None:
    """USD for an hour of a Fargate task of this size; None where it is not known."""
    return FARGATE_HOUR.of(vcpus=vcpus, memory_gib=memory_gib, disk_gib=disk_gib) if region in REGIONS else None
