"""Capacity of the account for the hosts: zones that offer them, service quotas, a capacity reservation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from infra.doctor.asking import DoctorFinding, Findings, Refused, Subject, check, ok, problem, warning
from infra.doctor.blueprint import Fleet
from infra.setting_sections import CapacityReservation
from infra.settings import Settings
from pipeline.cost import HARDWARE

QUOTAS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("EC2", "trn"): ("ec2", "L-2C3B7624", "Running On-Demand Trn instances"),
    ("EC2", "inf"): ("ec2", "L-1945791B", "Running On-Demand Inf instances"),
    ("EC2", "c"): ("ec2", "L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
    ("EC2", "g"): ("ec2", "L-DB2E81BA", "Running On-Demand G and VT instances"),
    ("EC2", "p"): ("ec2", "L-417A185B", "Running On-Demand P instances"),
    ("SPOT", "trn"): ("ec2", "L-6B0D517C", "All Trn Spot Instance Requests"),
    ("SPOT", "inf"): ("ec2", "L-B5D1601B", "All Inf Spot Instance Requests"),
    ("SPOT", "c"): ("ec2", "L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
    ("SPOT", "g"): ("ec2", "L-3819A6DF", "All G and VT Spot Instance Requests"),
    ("SPOT", "p"): ("ec2", "L-7212CCBC", "All P Spot Instance Requests"),
    ("FARGATE", ""): ("fargate", "L-3032A538", "Fargate On-Demand vCPU resource count"),
}
"""(market, family) -> service code, quota code and name in Service Quotas. All count vCPUs."""

SOON = timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """vCPUs that one quota has to allow.

    Attributes:
        least: vCPUs without which nothing ever starts: the widest gang, or one host.
        most: vCPUs that the settings allow to run at once.
    """

    least: int
    most: int


def needs(fleets: list[Fleet], gang_nodes: int) -> dict[tuple[str, str], Need]:
    """Return (market, family) -> the vCPUs that its quota has to allow. Fleets of one family share their quota.

    Args:
        gang_nodes: nodes of the widest gang.
    """
    summed: defaultdict[tuple[str, str], Need] = defaultdict(lambda: Need(least=0, most=0))
    for fleet in fleets:
        if fleet.instance_type is None:
            key, least = (fleet.market, ""), 1
        else:
            # The letters before the generation have the quota.
            key = (fleet.market, fleet.instance_type.split(next(filter(str.isdigit, fleet.instance_type)))[0])
            least = HARDWARE[fleet.instance_type].vcpus * (gang_nodes if fleet.forms_gangs else 1)
        before = summed[key]
        summed[key] = Need(least=max(before.least, least), most=before.most + fleet.max_vcpus)
    return dict(summed)


@check("Capacity", "service-quotas:GetServiceQuota", "service-quotas:ListRequestedServiceQuotaChangeHistoryByQuota")
def quotas(subject: Subject) -> Findings:
    for key, need in needs(subject.blueprint.fleets(), max(subject.settings.allowed_nodes)).items():
        service, code, name = QUOTAS[key]
        value = int(subject.ask("service-quotas", "GetServiceQuota", ServiceCode=service, QuotaCode=code)["Quota"]["Value"])
        if value >= need.most:
            yield ok(f"quota {name}", f"{value} vCPUs, asked for {need.most}")
            continue
        requested = subject.ask(
            "service-quotas", "ListRequestedServiceQuotaChangeHistoryByQuota", ServiceCode=service, QuotaCode=code
        )["RequestedQuotas"]
        pending = [f"{request['DesiredValue']:g}" for request in requested if request["Status"] in ("PENDING", "CASE_OPENED")]
        remedy = (
            f"aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code} "
            f"--desired-value {need.most} --region {subject.settings.region}"
        )
        tell = problem if value < need.least else warning
        yield tell(
            f"the quota {name!r} ({code}) is too low",
            value=f"{value} vCPUs" + (f"; an increase to {', '.join(pending)} is pending" if pending else ""),
            rule=f"the settings let {need.most} vCPUs run at once; below {need.least} a run never starts",
            remedy=f"wait for the request; or {remedy}" if pending else f"{remedy}; or lower the vCPU limits in the settings",
        )


@check("Capacity", "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeSubnets")
def zones(subject: Subject) -> Findings:
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for fleet in subject.blueprint.fleets():
        if fleet.instance_type is None:
            continue
        wanted[fleet.instance_type] |= set(fleet.zones)
        if fleet.subnet_ids:
            # The check of the subnets reports one that does not exist.
            answer = subject.seek(("InvalidSubnetID.NotFound",), "ec2", "DescribeSubnets", SubnetIds=sorted(fleet.subnet_ids))
            found = answer["Subnets"] if answer else [{"AvailabilityZone": subject.settings.zone}]
            wanted[fleet.instance_type] |= {subnet["AvailabilityZone"] for subnet in found}
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
        missing = sorted(asked - offered)
        yield (
            problem(
                f"{', '.join(missing)} does not offer {instance_type}",
                value=f"offered in: {', '.join(sorted(offered)) or 'no zone of ' + subject.settings.region}",
                rule="hosts start in the zones of the settings only",
                remedy="set trnpipe.zone to one of them (names of zones differ from account to account)"
                if offered
                else "choose another region: aws ec2 describe-instance-type-offerings --region REGION "
                f"--location-type availability-zone --filters Name=instance-type,Values={instance_type}",
            )
            if missing
            else ok(f"{instance_type} is offered in", ", ".join(sorted(asked)))
        )


@check("Capacity", "ec2:DescribeCapacityReservations", "resource-groups:ListGroupResources", "cloudformation:ListStackResources")
def reservation(subject: Subject) -> Findings:
    settings = subject.settings
    if (wanted := settings.capacity_reservation) is None:
        return
    try:
        reserved = _reserved(subject, wanted)
    except Refused as refused:
        yield problem(
            "the capacity reservation does not exist",
            value=refused,
            rule=f"trnpipe.capacity_reservation = {wanted.id or wanted.group}, owned by or shared with this account",
            remedy=f"aws ec2 describe-capacity-reservations --region {settings.region}",
        )
        return
    # A group may hold reservations of other types, which hosts pass over.
    fitting = [one for one in reserved if not _unfit(one, wanted, settings)]
    wrong = [] if fitting and wanted.group else [finding for one in reserved for finding in _unfit(one, wanted, settings)]
    nodes, total = max(settings.allowed_nodes), sum(one["TotalInstanceCount"] for one in fitting)
    if not wrong and total < nodes:
        wrong = [_wrong("holds too few hosts", total, f"the widest gang of allowed_nodes has {nodes} nodes")]
    yield from wrong
    for one in fitting:
        yield from _judge_placement(subject, one)
        end = one.get("EndDate")
        if end is not None and end - datetime.now(timezone.utc) < SOON:
            yield warning(
                "the capacity reservation ends soon",
                value=f"{one['CapacityReservationId']}: {end:%Y-%m-%d %H:%M} UTC",
                rule="after that nothing holds hosts for gangs; those of a Capacity Block end half an hour before",
                remedy="extend it, or take trnpipe.capacity_reservation out and deploy",
            )
    if not wrong:
        yield ok("capacity reservation", f"{sum(one['AvailableInstanceCount'] for one in fitting)} of {total} hosts free")


def _reserved(subject: Subject, wanted: CapacityReservation) -> list[dict[str, Any]]:
    """The reservations that the settings name, as EC2 describes them.

    Raises:
        Refused: one of them does not exist, or the group has none.
    """
    ids = [wanted.id]
    if wanted.group is not None:
        members = subject.ask("resource-groups", "ListGroupResources", Group=wanted.group)["Resources"]
        arns = [member["Identifier"]["ResourceArn"] for member in members]
        if not (ids := [arn.rpartition("/")[2] for arn in arns if ":capacity-reservation/" in arn]):
            raise Refused("EmptyGroup", f"no Capacity Reservation among {len(arns)} resources")
    return list(subject.ask("ec2", "DescribeCapacityReservations", CapacityReservationIds=ids)["CapacityReservations"])


def _unfit(found: Mapping[str, Any], wanted: CapacityReservation, settings: Settings) -> list[DoctorFinding]:
    """Everything in which a reservation is not one that a gang can use."""
    kind = found.get("ReservationType", "default")
    expected = (
        (found["State"] == "active", "is not active", found["State"], "hosts start in an active reservation only"),
        (
            found["InstanceType"] == settings.instance_type,
            "is of another instance type",
            found["InstanceType"],
            f"trnpipe.instance_type is {settings.instance_type}",
        ),
        (
            found["AvailabilityZone"] == settings.zone,
            "is in another zone",
            found["AvailabilityZone"],
            f"trnpipe.zone is {settings.zone}",
        ),
        (
            (kind == "capacity-block") == wanted.block,
            "is of another kind",
            kind,
            "hosts start in a Capacity Block with trnpipe.capacity_reservation.block: true, and only there",
        ),
    )
    return [_wrong(what, value, rule) for fits, what, value, rule in expected if not fits]


def _wrong(what: str, value: object, rule: str) -> DoctorFinding:
    remedy = "reserve what the settings name, or name another trnpipe.capacity_reservation"
    return problem(f"the capacity reservation {what}", value=value, rule=rule, remedy=remedy)


def _judge_placement(subject: Subject, found: Mapping[str, Any]) -> Findings:
    """Hosts of a placement group use what is reserved in it (EC2 User Guide, "Capacity Reservations with placement groups")."""
    settings = subject.settings
    wanted = settings.capacity_reservation
    if wanted is None or wanted.block or not settings.train_hardware.efa_interfaces:
        return
    own = subject.physical(subject.blueprint.pipeline_stack, "AWS::EC2::PlacementGroup") if subject.after else []
    name = wanted.placement_group or next(iter(own), None)
    reserved_in = str(found.get("PlacementGroupArn", "")).rpartition("/")[2]
    if not reserved_in or (name is not None and reserved_in != name):
        yield warning(
            "the capacity was not reserved in the gangs' placement group",
            value=f"{found['CapacityReservationId']}: {reserved_in or 'in none'}",
            rule=f"hosts start in {name or 'the placement group that the stack makes'}, and may pass the reservation over",
            remedy="reserve with --placement-group-arn, and name that group under trnpipe.capacity_reservation.placement_group",
        )
