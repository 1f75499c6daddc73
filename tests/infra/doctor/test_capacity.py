"""Quotas, zones and reservations: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.doctor import capacity
from infra.doctor.asking import Refused
from infra.doctor.blueprint import Blueprint
from infra.doctor.capacity import Need, needs


def quota_answers(values: dict[str, float], requests: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "service-quotas:GetServiceQuota": lambda asked: {
            "Quota": {"QuotaCode": asked["QuotaCode"], "Value": values[asked["QuotaCode"]]}
        },
        "service-quotas:ListRequestedServiceQuotaChangeHistoryByQuota": {"RequestedQuotas": list(requests)},
    }


def test_what_quotas_have_to_allow(blueprint: Blueprint, other_blueprint: Blueprint) -> None:
    # Two fleets of one family share a quota: 512 vCPUs each; the widest gang has four nodes of 128.
    assert needs(blueprint.fleets(), 4) == {("EC2", "Trn"): Need(least=512, most=1024), ("FARGATE", ""): Need(least=1, most=64)}
    assert needs(other_blueprint.fleets(), 2)[("EC2", "Inf")] == Need(least=32, most=512)
    on_spot = [dataclasses.replace(fleet, market="SPOT") if fleet.interfaces == 1 else fleet for fleet in blueprint.fleets()[:2]]
    assert needs(on_spot, 4) == {("EC2", "Trn"): Need(least=512, most=512), ("SPOT", "Trn"): Need(least=128, most=512)}


@pytest.mark.parametrize(
    ("trn", "fargate", "expected"),
    [
        (1024.0, 64.0, []),
        (512.0, 64.0, [("warning", "the quota 'Running On-Demand Trn instances' (L-2C3B7624) is too low")]),
        (256.0, 64.0, [("problem", "the quota 'Running On-Demand Trn instances' (L-2C3B7624) is too low")]),
        (1024.0, 6.0, [("warning", "the quota 'Fargate On-Demand vCPU resource count' (L-3032A538) is too low")]),
        (1024.0, 0.0, [("problem", "the quota 'Fargate On-Demand vCPU resource count' (L-3032A538) is too low")]),
    ],
)
def test_quotas(blueprint: Blueprint, look: Any, bad: Any, trn: float, fargate: float, expected: Any) -> None:
    findings = look(capacity.quotas, blueprint, quota_answers({"L-2C3B7624": trn, "L-3032A538": fargate}))
    assert bad(findings) == expected
    for finding in findings:
        if "L-2C3B7624" in finding.what:
            assert "--quota-code L-2C3B7624 --desired-value 1024 --region us-west-2" in finding.remedy


def test_an_increase_that_was_asked_for_is_named(blueprint: Blueprint, look: Any) -> None:
    requests = ({"DesiredValue": 1024.0, "Status": "PENDING"}, {"DesiredValue": 9999.0, "Status": "DENIED"})
    answers = quota_answers({"L-2C3B7624": 0.0, "L-3032A538": 64.0}, requests)
    [finding] = [one for one in look(capacity.quotas, blueprint, answers) if one.level == "problem"]
    assert finding.value == "0 vCPUs; an increase to 1024 is being looked at"
    assert finding.remedy.startswith("wait for the request")


def offers(*zones: str) -> dict[str, Any]:
    offerings = [{"LocationType": "availability-zone", "Location": zone, "InstanceType": "trn1.32xlarge"} for zone in zones]
    return {"ec2:DescribeInstanceTypeOfferings": {"InstanceTypeOfferings": offerings}}


def test_zones(blueprint: Blueprint, look: Any, bad: Any) -> None:
    assert bad(look(capacity.zones, blueprint, offers("us-west-2b", "us-west-2d"))) == []
    [finding] = look(capacity.zones, blueprint, offers("us-west-2b"))
    assert (finding.what, finding.value) == ("us-west-2d does not offer trn1.32xlarge", "offered in: us-west-2b")
    [nowhere] = look(capacity.zones, blueprint, offers())
    assert nowhere.value == "offered in: no zone of us-west-2"
    assert nowhere.remedy.startswith("choose another region")


def test_zones_of_an_existing_vpc_are_those_of_its_subnets(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    subnet = {"ec2:DescribeSubnets": {"Subnets": [{"SubnetId": "subnet-0a1b2c3d", "AvailabilityZone": "us-east-2b"}]}}
    assert bad(look(capacity.zones, other_blueprint, {**offers("us-east-2b"), **subnet})) == []
    assert bad(look(capacity.zones, other_blueprint, {**offers("us-east-2a"), **subnet})) == [
        ("problem", "us-east-2b does not offer trn1n.32xlarge"),
        ("problem", "us-east-2b does not offer inf2.8xlarge"),
    ]
    gone = {"ec2:DescribeSubnets": Refused("InvalidSubnetID.NotFound", "")}
    assert bad(look(capacity.zones, other_blueprint, {**offers("us-east-2a"), **gone})) == []


RESERVATION = {
    "CapacityReservationId": "cr-0a1b2c3d",
    "State": "active",
    "InstanceType": "trn1n.32xlarge",
    "AvailabilityZone": "us-east-2a",
    "TotalInstanceCount": 2,
    "AvailableInstanceCount": 2,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"EndDate": datetime.now(timezone.utc) + timedelta(days=30)}, []),
        ({"EndDate": datetime.now(timezone.utc) + timedelta(days=2)}, [("warning", "the capacity reservation ends soon")]),
        ({"State": "expired"}, [("problem", "the capacity reservation is not active")]),
        ({"InstanceType": "trn1.32xlarge"}, [("problem", "the capacity reservation is of another instance type")]),
        ({"AvailabilityZone": "us-east-2b"}, [("problem", "the capacity reservation is in another zone")]),
        ({"TotalInstanceCount": 1}, [("problem", "the capacity reservation holds too few hosts")]),
    ],
)
def test_reservation(other_blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: Any) -> None:
    answers = {"ec2:DescribeCapacityReservations": {"CapacityReservations": [{**RESERVATION, **change}]}}
    assert bad(look(capacity.reservation, other_blueprint, answers)) == expected


def test_a_reservation_that_is_not_there(blueprint: Blueprint, other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    gone = {"ec2:DescribeCapacityReservations": Refused("InvalidCapacityReservationId.NotFound", "")}
    assert bad(look(capacity.reservation, other_blueprint, gone)) == [("problem", "the capacity reservation is not there")]
    assert look(capacity.reservation, blueprint, {}) == []
