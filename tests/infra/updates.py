"""Violations of CloudFormation's and Batch's rules for an update from one template to the next.

CloudFormation creates what is new or replaced before it removes the old, the stack of the data before the pipeline's. Which
properties cannot change in place, the provider schemas say that cfn-lint ships (`createOnlyProperties`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any

from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

from tests.infra.conftest import Deployment

Resources = Mapping[str, Mapping[str, Any]]


def problems(before: Deployment, after: Deployment) -> list[str]:
    """Why an update of both stacks would fail, `STACK/ID: why` each."""
    found = list(_lost_exports(before, after))
    for stack in ("data", "pipeline"):
        was, becomes = getattr(before, stack)["Resources"], getattr(after, stack)["Resources"]
        for check in (_changed_in_place, _collisions, _environments):
            found += [f"{stack}/{problem}" for problem in check(was, becomes, before.region)]
    return found


def _lost_exports(before: Deployment, after: Deployment) -> Iterator[str]:
    """The pipeline's stack still imports what it did when the data's is updated: "Cannot delete export ... as it is in use"."""
    exports = {output["Export"]["Name"] for output in after.data["Outputs"].values() if "Export" in output}
    for name in sorted(set(_imports(before.pipeline)) - exports):
        yield f"data: the export {name} is in use"


def _imports(value: Any) -> Iterator[str]:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _imports(inner)
    if isinstance(value, dict) and "Fn::ImportValue" in value:
        yield value["Fn::ImportValue"]


def _changed_in_place(before: Resources, after: Resources, region: str) -> Iterator[str]:
    for key in before.keys() & after.keys():
        kind, was, becomes = before[key]["Type"], before[key]["Properties"], after[key]["Properties"]
        if after[key]["Type"] != kind:
            yield f"{key}: another type under one id"
        for path in _create_only(region, kind):
            if _at(was, path) != _at(becomes, path):
                yield f"{key}: {'/'.join(path)} cannot change in place"


def _collisions(before: Resources, after: Resources, region: str) -> Iterator[str]:
    """Properties that may exist once: names, addresses in a VPC, a service's private name in a VPC."""
    for key in after.keys() - before.keys():
        kind, properties = after[key]["Type"], after[key]["Properties"]
        for other, resource in before.items():
            old = resource["Properties"]
            if resource["Type"] != kind:
                continue
            if kind == "AWS::EC2::Subnet" and _network(properties).overlaps(_network(old)):
                yield f"{key}: the addresses of {other}, which is still there"
            if kind == "AWS::EC2::VPCEndpoint" and properties["ServiceName"] == old["ServiceName"]:
                yield f"{key}: the service of {other}, which is still there"
            for name in _names(region, kind):
                if isinstance(properties.get(name), str) and properties[name] == old.get(name):
                    yield f"{key}: the name of {other}, which is still there"


def _environments(before: Resources, after: Resources, _region: str) -> Iterator[str]:
    """UpdateComputeEnvironment, which CloudFormation calls where ReplaceComputeEnvironment is false.

    It keeps what is left out (API Reference, ComputeResourceUpdate), and on Fargate it refuses what CloudFormation sends
    (https://github.com/aws/aws-cdk/issues/27054).
    """
    for key in before.keys() & after.keys():
        was, becomes = before[key]["Properties"], after[key]["Properties"]
        if before[key]["Type"] != "AWS::Batch::ComputeEnvironment" or was == becomes:
            continue
        if becomes.get("ReplaceComputeEnvironment", True):
            if "ComputeEnvironmentName" in becomes:
                yield f"{key}: replaced under a name that is taken"
            continue
        if becomes["ComputeResources"]["Type"].startswith("FARGATE"):
            yield f"{key}: Fargate cannot be updated in place"
        for lost in sorted(was["ComputeResources"].keys() - becomes["ComputeResources"].keys()):
            yield f"{key}: {lost} is left out, and so kept"


def _create_only(region: str, kind: str) -> list[list[str]]:
    schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema(region, kind).schema
    return [path.removeprefix("/properties/").split("/") for path in schema.get("createOnlyProperties", ())]


def _names(region: str, kind: str) -> list[str]:
    """Properties that name a resource itself: `QueueName` of a queue, `Name` of anything."""
    return [path[0] for path in _create_only(region, kind) if path[0] in ("Name", f"{kind.rpartition(':')[2]}Name")]


def _at(properties: Any, path: list[str]) -> Any:
    for key in path:
        properties = properties.get(key) if isinstance(properties, dict) else None
    return properties


def _network(properties: Mapping[str, Any]) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(properties["CidrBlock"])
