"""The published prices: what must hold of any such table, and what is said of places and types that are not in it."""

from __future__ import annotations

import pytest

from pipeline.cost import INSTANCE_HOUR, REGIONS, fargate_hour, instance_hour


@pytest.mark.parametrize("region", REGIONS)
def test_prices_of_one_family_go_with_its_chips(region: str) -> None:
    """AWS prices sizes of one family by what is in them: a mistyped figure stands out."""
    hour = {kind: instance_hour(region, kind) for kind in INSTANCE_HOUR}
    assert hour["trn1.32xlarge"] == 16 * hour["trn1.2xlarge"]
    assert hour["inf2.48xlarge"] == pytest.approx(2 * hour["inf2.24xlarge"], rel=1e-5)
    assert hour["trn1n.32xlarge"] > hour["trn1.32xlarge"]
    assert hour["inf2.xlarge"] < hour["inf2.8xlarge"] < hour["inf2.24xlarge"]


@pytest.mark.parametrize(("region", "kind"), [("eu-central-1", "trn1.32xlarge"), ("us-east-1", "trn2.48xlarge")])
def test_what_is_not_published_has_no_price(region: str, kind: str) -> None:
    assert instance_hour(region, kind) is None


def test_a_fargate_task_pays_for_its_parts_and_not_for_the_first_20_gib_of_disk() -> None:
    assert fargate_hour("us-east-2", vcpus=1, memory_gib=0, disk_gib=20) == 0.04048
    assert fargate_hour("us-east-2", vcpus=1, memory_gib=2, disk_gib=21) == pytest.approx(0.04048 + 2 * 0.004445 + 0.000111)
    assert fargate_hour("eu-west-1", vcpus=1, memory_gib=2, disk_gib=20) is None
