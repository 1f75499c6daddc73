"""Quotas, zones and reservations: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.doctor import check_capacity
from infra.doctor.asking import Refused
from infra.doctor.blueprint import Blueprint
from infra.doctor.check_capacity import Need, needs


def quota_answers(values: dict[str, float], requests: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "service-quotas:GetServiceQuota": lambda asked: {
            "Quota": {"QuotaCode": asked["QuotaCode"], "Value": values[asked["QuotaCode"]]}
        },
        "service-quotas:ListRequestedServiceQuotaChangeHistoryByQuota": {"RequestedQuotas": list(requests)},
    }


def test_what_quotas_have_to_allow(blueprint: Blueprint, other_blueprint: Blueprint) -> None:
    # Two fleets of one family share a quota: 640 and 512 vCPUs; the widest gang has four nodes of 128.
    assert needs(blueprint.fleets(), 4) == {("EC2", "trn"): Need(least=512, most=1152), ("FARGATE", ""): Need(least=1, most=64)}
    assert needs(other_blueprint.fleets(), 2)[("EC2", "inf")] == Need(least=32, most=512)
    on_spot = [dataclasses.replace(fleet, market="SPOT") if fleet.interfaces == 1 else fleet for fleet in blueprint.fleets()[:2]]
    assert needs(on_spot, 4) == {("EC2", "trn"): Need(least=512, most=640), ("SPOT", "trn"): Need(least=128, most=512)}


def test_hosts_with_gpus_have_the_quotas_of_their_letter(gpu_blueprint: Blueprint) -> None:
    # A host of 192 vCPUs and one more, and 512 of hosts that embed.
    assert needs(gpu_blueprint.fleets(), 1)["EC2", "g"] == Need(least=192, most=896)
    assert set(needs(gpu_blueprint.fleets(), 1)) <= set(check_capacity.QUOTAS)


def test_hosts_without_accelerators_have_quotas_and_zones_too(smoke_blueprint: Blueprint, look: Any, bad: Any) -> None:
    # Codes: https://docs.aws.amazon.com/mgn/latest/ug/common-fails.html and the Service Quotas console.
    answers = quota_answers({"L-1216C47A": 5.0, "L-3032A538": 64.0})
    [finding] = [one for one in look(check_capacity.quotas, smoke_blueprint, answers) if one.level == "problem"]
    assert finding.what == "the quota 'Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances' (L-1216C47A) is too low"
    assert bad(look(check_capacity.quotas, smoke_blueprint, quota_answers({"L-1216C47A": 64.0, "L-3032A538": 64.0}))) == []
    zone = smoke_blueprint.settings.zone
    found = {"ec2:DescribeInstanceTypeOfferings": {"InstanceTypeOfferings": [{"Location": zone, "InstanceType": "c7i.2xlarge"}]}}
    assert bad(look(check_capacity.zones, smoke_blueprint, found)) == []


@pytest.mark.parametrize(
    ("trn", "fargate", "expected"),
    [
        (1152.0, 64.0, []),
        (512.0, 64.0, [("warning", "the quota 'Running On-Demand Trn instances' (L-2C3B7624) is too low")]),
        (256.0, 64.0, [("problem", "the quota 'Running On-Demand Trn instances' (L-2C3B7624) is too low")]),
        (1152.0, 6.0, [("warning", "the quota 'Fargate On-Demand vCPU resource count' (L-3032A538) is too low")]),
        (1152.0, 0.0, [("problem", "the quota 'Fargate On-Demand vCPU resource count' (L-3032A538) is too low")]),
    ],
)
def test_quotas(blueprint: Blueprint, look: Any, bad: Any, trn: float, fargate: float, expected: Any) -> None:
    findings = look(check_capacity.quotas, blueprint, quota_answers({"L-2C3B7624": trn, "L-3032A538": fargate}))
    assert bad(findings) == expected
    for finding in findings:
        if "L-2C3B7624" in finding.what:
            assert "--quota-code L-2C3B7624 --desired-value 1152 --region us-west-2" in finding.remedy


def test_an_increase_that_was_asked_for_is_named(blueprint: Blueprint, look: Any) -> None:
    requests = ({"DesiredValue": 1024.0, "Status": "PENDING"}, {"DesiredValue": 9999.0, "Status": "DENIED"})
    answers = quota_answers({"L-2C3B7624": 0.0, "L-3032A538": 64.0}, requests)
    [finding] = [one for one in look(check_capacity.quotas, blueprint, answers) if one.level == "problem"]
    assert finding.value == "0 vCPUs; an increase to 1024 is pending"
    assert finding.remedy.startswith("wait for the request")


def offers(*zones: str) -> dict[str, Any]:
    offerings = [{"LocationType": "availability-zone", "Location": zone, "InstanceType": "trn1.32xlarge"} for zone in zones]
    return {"ec2:DescribeInstanceTypeOfferings": {"InstanceTypeOfferings": offerings}}


def test_zones(blueprint: Blueprint, look: Any, bad: Any) -> None:
    assert bad(look(check_capacity.zones, blueprint, offers("us-west-2b", "us-west-2d"))) == []
    [finding] = look(check_capacity.zones, blueprint, offers("us-west-2b"))
    assert (finding.what, finding.value) == ("us-west-2d does not offer trn1.32xlarge", "offered in: us-west-2b")
    [nowhere] = look(check_capacity.zones, blueprint, offers())
    assert nowhere.value == "offered in: no zone of us-west-2"
    assert nowhere.remedy.startswith("choose another region")


def test_zones_of_an_existing_vpc_are_those_of_its_subnets(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    subnet = {"ec2:DescribeSubnets": {"Subnets": [{"SubnetId": "subnet-0a1b2c3d", "AvailabilityZone": "us-east-2b"}]}}
    assert bad(look(check_capacity.zones, other_blueprint, {**offers("us-east-2b"), **subnet})) == []
    assert bad(look(check_capacity.zones, other_blueprint, {**offers("us-east-2a"), **subnet})) == [
        ("problem", "us-east-2b does not offer trn1n.32xlarge"),
        ("problem", "us-east-2b does not offer inf2.8xlarge"),
    ]
    gone = {"ec2:DescribeSubnets": Refused("InvalidSubnetID.NotFound", "")}
    assert bad(look(check_capacity.zones, other_blueprint, {**offers("us-east-2a"), **gone})) == []


RESERVATION = {
    "CapacityReservationId": "cr-0a1b2c3d",
    "State": "active",
    "InstanceType": "trn1n.32xlarge",
    "AvailabilityZone": "us-east-2a",
    "TotalInstanceCount": 2,
    "AvailableInstanceCount": 2,
    "ReservationType": "default",
    "PlacementGroupArn": "arn:aws:ec2:us-east-2:123456789012:placement-group/gangs",
}


def reservation_answers(*changes: dict[str, Any]) -> dict[str, Any]:
    """A group with a reservation for each change."""
    arns = [f"arn:aws:ec2:us-east-2:123456789012:capacity-reservation/cr-{number:08x}" for number in range(len(changes))]
    members = [{"Identifier": {"ResourceArn": arn, "ResourceType": "AWS::EC2::CapacityReservation"}} for arn in arns]
    return {
        "resource-groups:ListGroupResources": {"Resources": members},
        "ec2:DescribeCapacityReservations": {"CapacityReservations": [{**RESERVATION, **change} for change in changes]},
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
        ({"ReservationType": "capacity-block"}, [("problem", "the capacity reservation is of another kind")]),
        (
            {"PlacementGroupArn": "arn:aws:ec2:us-east-2:123456789012:placement-group/other"},
            [("warning", "the capacity was not reserved in the gangs' placement group")],
        ),
    ],
)
def test_reservation(other_blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: Any) -> None:
    assert bad(look(check_capacity.reservation, other_blueprint, reservation_answers(change))) == expected


def test_reservations_of_a_group_count_together_and_others_in_it_do_not(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    one = {"TotalInstanceCount": 1, "AvailableInstanceCount": 1}
    other = {"InstanceType": "p4d.24xlarge"}
    findings = look(check_capacity.reservation, other_blueprint, reservation_answers(one, one, other))
    assert bad(findings) == []
    assert findings[-1].value == "2 of 2 hosts free"


def test_a_reservation_that_is_not_there(blueprint: Blueprint, other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    refused = Refused("InvalidCapacityReservationId.NotFound", "")
    for gone in ({**reservation_answers({}), "ec2:DescribeCapacityReservations": refused}, reservation_answers()):
        assert bad(look(check_capacity.reservation, other_blueprint, gone)) == [
            ("problem", "the capacity reservation does not exist")
        ]
    assert look(check_capacity.reservation, blueprint, {}) == []
