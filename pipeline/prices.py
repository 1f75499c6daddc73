"""What an hour of a host costs, as AWS publishes it: USD, Linux, shared tenancy, on demand. Standard library only.

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

INSTANCE_HOUR: Mapping[str, float] = MappingProxyType(
    {
        "trn1.2xlarge": 1.34375,
        "trn1.32xlarge": 21.50,
        "trn1n.32xlarge": 24.78,
        "inf2.xlarge": 0.7582,
        "inf2.8xlarge": 1.96786,
        "inf2.24xlarge": 6.49063,
        "inf2.48xlarge": 12.98127,
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
