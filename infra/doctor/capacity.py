"""Whether the account can have the hosts: zones that offer them, service quotas, a capacity reservation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from infra.doctor.asking import Findings, Refused, Subject, check, ok, problem, warning
from infra.doctor.blueprint import Fleet
from infra.settings import HARDWARE

QUOTAS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("EC2", "Trn"): ("ec2", "L-2C3B7624", "Running On-Demand Trn instances"),
    ("EC2", "Inf"): ("ec2", "L-1945791B", "Running On-Demand Inf instances"),
    ("SPOT", "Trn"): ("ec2", "L-6B0D517C", "All Trn Spot Instance Requests"),
    ("SPOT", "Inf"): ("ec2", "L-B5D1601B", "All Inf Spot Instance Requests"),
    ("FARGATE", ""): ("fargate", "L-3032A538", "Fargate On-Demand vCPU resource count"),
}
"""(market, family) -> service code, quota code and name in Service Quotas. All count vCPUs."""

OPEN_REQUESTS = ("PENDING", "CASE_OPENED")
RESERVATION_STATES = ("active",)
SOON = timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one quota has to allow.

    Attributes:
        least: vCPUs without which nothing ever starts: the widest gang, or one host.
        most: vCPUs that the settings allow to run at once.
    """

    least: int
    most: int


def needs(fleets: list[Fleet], gang_nodes: int) -> dict[tuple[str, str], Need]:
    """(market, family) -> what its quota has to allow. Fleets of one family share their quota.

    Args:
        gang_nodes: nodes of the widest gang; it runs where hosts have several interfaces.
    """
    summed: defaultdict[tuple[str, str], Need] = defaultdict(lambda: Need(least=0, most=0))
    for fleet in fleets:
        if fleet.instance_type is None:
            key, least = (fleet.market, ""), 1
        else:
            key = (fleet.market, fleet.family)
            least = HARDWARE[fleet.instance_type].vcpus * (gang_nodes if fleet.interfaces > 1 else 1)
        before = summed[key]
        summed[key] = Need(least=max(before.least, least), most=before.most + fleet.max_vcpus)
    return dict(summed)


@check("Capacity", "service-quotas:GetServiceQuota", "service-quotas:ListRequestedServiceQuotaChangeHistoryByQuota")
def quotas(subject: Subject) -> Findings:
    settings = subject.settings
    for key, need in needs(subject.blueprint.fleets(), max(settings.allowed_nodes)).items():
        service, code, name = QUOTAS[key]
        quota = subject.ask("service-quotas", "GetServiceQuota", ServiceCode=service, QuotaCode=code)["Quota"]
        value = int(quota["Value"])
        if value >= need.most:
            yield ok(f"quota {name}", f"{value} vCPUs, asked for {need.most}")
            continue
        requested = subject.ask(
            "service-quotas", "ListRequestedServiceQuotaChangeHistoryByQuota", ServiceCode=service, QuotaCode=code
        )["RequestedQuotas"]
        pending = [f"{request['DesiredValue']:g}" for request in requested if request["Status"] in OPEN_REQUESTS]
        remedy = (
            f"aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code} "
            f"--desired-value {need.most} --region {settings.region}"
        )
        tell = problem if value < need.least else warning
        yield tell(
            f"the quota {name!r} ({code}) is too low",
            value=f"{value} vCPUs" + (f"; an increase to {', '.join(pending)} is being looked at" if pending else ""),
            rule=f"the settings let {need.most} vCPUs run at once; below {need.least} a run waits for ever",
            remedy=f"wait for the request; or {remedy}" if pending else f"{remedy}; or lower the vCPU limits in the settings",
        )


@check("Capacity", "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeSubnets")
def zones(subject: Subject) -> Findings:
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for fleet in subject.blueprint.fleets():
        if fleet.instance_type is not None:
            wanted[fleet.instance_type] |= set(fleet.zones) | _zones_of(subject, fleet)
    for instance_type, asked in wanted.items():
        offered = {
            offering["Location"]
            for offering in subject.ask(
                "ec2",
                "DescribeInstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=[{"Name": "instance-type", "Values": [instance_type]}],
            )["InstanceTypeOfferings"]
        }
        if missing := sorted(asked - offered):
            yield problem(
                f"{', '.join(missing)} does not offer {instance_type}",
                value=f"offered in: {', '.join(sorted(offered)) or 'no zone of ' + subject.settings.region}",
                rule="hosts start in the zones of the settings only",
                remedy="set trnpipe.zone to one of them (names of zones differ from account to account)"
                if offered
                else "choose another region: aws ec2 describe-instance-type-offerings --region REGION "
                f"--location-type availability-zone --filters Name=instance-type,Values={instance_type}",
            )
        else:
            yield ok(f"{instance_type} is offered in", ", ".join(sorted(asked)))


def _zones_of(subject: Subject, fleet: Fleet) -> set[str]:
    if not fleet.subnet_ids:
        return set()
    try:
        subnets = subject.ask("ec2", "DescribeSubnets", SubnetIds=sorted(fleet.subnet_ids))["Subnets"]
    except Refused:  # the check of the VPC names it
        return {subject.settings.zone}
    return {subnet["AvailabilityZone"] for subnet in subnets}


@check("Capacity", "ec2:DescribeCapacityReservations")
def reservation(subject: Subject) -> Findings:
    settings = subject.settings
    if settings.capacity_reservation_id is None:
        return
    try:
        [found] = subject.ask("ec2", "DescribeCapacityReservations", CapacityReservationIds=[settings.capacity_reservation_id])[
            "CapacityReservations"
        ]
    except Refused as refused:
        yield problem(
            "the capacity reservation is not there",
            value=refused,
            rule=f"trnpipe.capacity_reservation_id = {settings.capacity_reservation_id}, owned by or shared with this account",
            remedy=f"aws ec2 describe-capacity-reservations --region {settings.region}",
        )
        return
    wrong = _wrong_reservation(found, settings.instance_type, settings.zone, max(settings.allowed_nodes))
    for what, value, rule in wrong:
        yield problem(
            what, value=value, rule=rule, remedy="reserve what the settings name, or name another trnpipe.capacity_reservation_id"
        )
    end = found.get("EndDate")
    if end is not None and end - datetime.now(timezone.utc) < SOON:
        yield warning(
            "the capacity reservation ends soon",
            value=f"{end:%Y-%m-%d %H:%M} UTC",
            rule="after that gangs wait for hosts that nothing holds for them",
            remedy="extend it, or take trnpipe.capacity_reservation_id out and deploy",
        )
    if not wrong:
        yield ok("capacity reservation", f"{found['AvailableInstanceCount']} of {found['TotalInstanceCount']} hosts free")


def _wrong_reservation(found: Mapping[str, Any], instance_type: str, zone: str, nodes: int) -> list[tuple[str, str, str]]:
    """(what, value, rule) of everything in which a reservation is not the one that a gang can use."""
    state, kind, where, count = (found[key] for key in ("State", "InstanceType", "AvailabilityZone", "TotalInstanceCount"))
    wrong = []
    if state not in RESERVATION_STATES:
        wrong.append(("the capacity reservation is not active", state, "hosts start in an active reservation only"))
    if kind != instance_type:
        wrong.append(("the capacity reservation is of another instance type", kind, f"trnpipe.instance_type is {instance_type}"))
    if where != zone:
        wrong.append(("the capacity reservation is in another zone", where, f"trnpipe.zone is {zone}"))
    if count < nodes:
        wrong.append(
            ("the capacity reservation holds too few hosts", str(count), f"the widest gang of allowed_nodes has {nodes} nodes")
        )
    return wrong
