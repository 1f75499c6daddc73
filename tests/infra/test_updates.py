"""Settings of a deployed stack can change: CloudFormation and Batch take the update. Each test names what an operator changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.cdk_context import ENVIRONMENTS
from tests.infra.conftest import Deployment, deploy
from tests.infra.updates import problems

SMALL = {"instance_type": "trn1.2xlarge", "allowed_nodes": [1]}
IMAGES = {name: f"123456789012.dkr.ecr.us-west-2.amazonaws.com/team/{name}:7" for name in ("neuron", "cpu")}
CHANGES: dict[str, dict[str, Any]] = {
    "another zone for the gangs": {"zone": "us-west-2b"},
    "zones for the hosts that embed": {"embed_zones": ["us-west-2a", "us-west-2d"]},
    "zones for Fargate and the endpoints": {"service_zones": ["us-west-2c"]},
    "images of one's own": {"images": IMAGES},
    "small hosts": SMALL,
    "hosts with more network cards": {"instance_type": "trn1n.32xlarge"},
    "hosts of a Capacity Block": {"capacity_reservation": {"id": "cr-0a1b2c3d", "block": True}},
    "a reservation in a placement group": {"capacity_reservation": {"id": "cr-0a1b2c3d", "placement_group": "gangs"}},
    "more vCPUs": {"cpu_max_vcpus": 128, "max_vcpus": 2048, "embed_max_vcpus": 1024},
    "Spot hosts that embed": {"embed_instance_type": "inf2.8xlarge", "embed_market": "spot"},
    "other images of the hosts": {"ami": "ami-0123456789abcdef0"},
    "tags and a permissions boundary": {"tags": {"team": "search"}, "permissions_boundary": "team/boundary"},
    "a gang of another size": {"allowed_nodes": [1, 2, 8]},
    "the schedules": {"schedules": {}},
}


@pytest.mark.parametrize("settings", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_and_the_way_back(deployment: Deployment, tmp_path: Path, settings: dict[str, Any]) -> None:
    changed = deploy(tmp_path, **settings)
    assert (changed.data, changed.pipeline) != (deployment.data, deployment.pipeline)
    assert problems(deployment, changed) == []
    assert problems(changed, deployment) == []


@pytest.mark.parametrize(
    "settings",
    [{"instance_type": "c7i.4xlarge", "embed_instance_type": "c7i.4xlarge"}, {"zone": "us-west-2b"}, {"allowed_nodes": [2]}],
    ids=["larger hosts", "another zone", "gangs of two only"],
)
def test_a_change_of_the_first_deployment(smoke_deployment: Deployment, tmp_path: Path, settings: dict[str, Any]) -> None:
    changed = deploy(tmp_path, **{**yaml.safe_load((ENVIRONMENTS / "smoke.yaml").read_text()), **settings})
    assert changed.pipeline != smoke_deployment.pipeline
    assert problems(smoke_deployment, changed) == []
    assert problems(changed, smoke_deployment) == []


def test_zones_in_another_order(tmp_path: Path) -> None:
    zones = ["us-west-2a", "us-west-2b"]
    before, after = (deploy(tmp_path / name, embed_zones=order) for name, order in (("before", zones), ("after", zones[::-1])))
    assert problems(before, after) == []


def by_type(template: dict[str, Any], kind: str) -> dict[str, Any]:
    [found] = [key for key, resource in template["Resources"].items() if resource["Type"] == kind]
    return template["Resources"][found]["Properties"]


def move_subnet(after: Deployment) -> None:
    by_type(after.pipeline, "AWS::EC2::Subnet")["AvailabilityZone"] = "us-west-2b"


def rename_subnet(after: Deployment) -> None:
    resources = after.pipeline["Resources"]
    [key] = [key for key, resource in resources.items() if resource["Type"] == "AWS::EC2::Subnet"]
    resources["Other"] = resources.pop(key)


def rename_queue(after: Deployment) -> None:
    resources = after.pipeline["Resources"]
    [key, *_] = [key for key, resource in resources.items() if resource["Type"] == "AWS::Batch::JobQueue"]
    resources["Other"] = resources.pop(key)


def drop_exports(after: Deployment) -> None:
    for key in [key for key, output in after.data["Outputs"].items() if "Export" in output]:
        del after.data["Outputs"][key]


def update_fargate(after: Deployment) -> None:
    for resource in after.pipeline["Resources"].values():
        if resource.get("Properties", {}).get("ComputeResources", {}).get("Type") == "FARGATE":
            resource["Properties"]["ReplaceComputeEnvironment"] = False


def drop_placement_group(after: Deployment) -> None:
    for resource in after.pipeline["Resources"].values():
        resource.get("Properties", {}).get("ComputeResources", {}).pop("PlacementGroup", None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move_subnet, "AvailabilityZone cannot change in place"),
        (rename_subnet, "the addresses of"),
        (rename_queue, "the name of"),
        (drop_exports, "is in use"),
        (update_fargate, "Fargate cannot be updated in place"),
        (drop_placement_group, "PlacementGroup is left out"),
    ],
)
def test_an_update_that_fails_is_found(deployment: Deployment, change: Callable[[Deployment], None], words: str) -> None:
    after = dataclasses.replace(deployment, stacks=copy.deepcopy(deployment.stacks))
    assert problems(deployment, after) == []
    change(after)
    assert any(words in found for found in problems(deployment, after)), problems(deployment, after)
