"""The deployment of cdk.json on one page: an unintended change shows as a difference of `snapshot.yaml`.

`UPDATE_SNAPSHOT=1 pytest tests/infra/test_snapshot.py` writes it anew; read the difference before it is committed. Generated
ids are left out, and so is what other tests judge by a rule.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

SNAPSHOT = Path(__file__).with_name("snapshot.yaml")


def test_the_deployment_is_as_it_was(deployment: Any) -> None:
    text = yaml.safe_dump(dict(pages(deployment.stacks)), sort_keys=True, width=120, default_flow_style=None)
    if os.environ.get("UPDATE_SNAPSHOT"):
        SNAPSHOT.write_text(text, encoding="utf-8")
    assert text == SNAPSHOT.read_text(encoding="utf-8"), "UPDATE_SNAPSHOT=1 writes the snapshot anew"


def pages(stacks: Any) -> Iterator[tuple[str, Any]]:
    """Title -> what stands under it."""
    environments = [one.properties["ComputeResources"] for one in stacks.of_type("AWS::Batch::ComputeEnvironment")]
    yield "compute environments", [_environment(resources) for resources in environments]
    yield (
        "launch templates",
        [
            {
                "network interfaces": [
                    f"card {card['NetworkCardIndex']}, device {card['DeviceIndex']}, {card['InterfaceType']}"
                    for card in data.get("NetworkInterfaces", ())
                ],
                "disks": [disk["Ebs"] for disk in data["BlockDeviceMappings"]],
                "metadata": data["MetadataOptions"],
            }
            for data in (one.properties["LaunchTemplateData"] for one in stacks.of_type("AWS::EC2::LaunchTemplate"))
        ],
    )
    [policy] = stacks.of_type("AWS::Batch::SchedulingPolicy")
    yield "fair share", policy.properties["FairsharePolicy"]
    queues = [one.properties for one in stacks.of_type("AWS::Batch::JobQueue")]
    yield "queues", {one["JobQueueName"]: one["JobStateTimeLimitActions"] for one in queues}
    definitions = [one.properties for one in stacks.of_type("AWS::Batch::JobDefinition")]
    yield "job definitions", {one["JobDefinitionName"]: _definition(one) for one in definitions}
    schedules = [one.properties for one in stacks.of_type("AWS::Scheduler::Schedule")]
    times = ("ScheduleExpression", "ScheduleExpressionTimezone", "FlexibleTimeWindow", "State")
    yield "schedules", [{**{key: one[key] for key in times}, "Input": one["Target"]["Input"]} for one in schedules]
    alarms = [one.properties for one in stacks.of_type("AWS::CloudWatch::Alarm")]
    yield "alarms", {one["AlarmName"]: f"{one['ComparisonOperator']} {one['Threshold']:g}" for one in alarms}
    endpoints = [one.properties["ServiceName"] for one in stacks.of_type("AWS::EC2::VPCEndpoint")]
    yield "endpoints", sorted(endpoints)
    buckets = [one.properties.get("LifecycleConfiguration", {}).get("Rules", []) for one in stacks.of_type("AWS::S3::Bucket")]
    yield "lifecycle of the buckets", buckets
    groups = [one.properties for one in stacks.of_type("AWS::Logs::LogGroup")]
    yield "log groups", {one["LogGroupName"]: one["RetentionInDays"] for one in groups if "LogGroupName" in one}


def _environment(resources: Mapping[str, Any]) -> dict[str, Any]:
    said = ("Type", "AllocationStrategy", "InstanceTypes", "MinvCpus", "MaxvCpus", "ScalingPolicy")
    found = {key: resources[key] for key in said if key in resources}
    return {**found, "groups of its own": len(resources.get("SecurityGroupIds", ())), "subnets": len(resources["Subnets"])}


def _definition(properties: Mapping[str, Any]) -> dict[str, Any]:
    nodes = properties.get("NodeProperties", {})
    [container] = [one["Container"] for one in nodes.get("NodeRangeProperties", ())] or [properties["ContainerProperties"]]
    linux = container.get("LinuxParameters", {})
    return {
        "nodes": nodes.get("NumNodes", 1),
        "command": " ".join(container["Command"]),
        "needs": {one["Type"]: one["Value"] for one in container["ResourceRequirements"]},
        "devices": dict(Counter(device["HostPath"].rstrip("0123456789") for device in linux.get("Devices", ()))),
        "shared memory": linux.get("SharedMemorySize"),
        "ulimits": {limit["Name"]: limit["HardLimit"] for limit in container.get("Ulimits", ())},
        "environment": {one["Name"]: one["Value"] for one in container["Environment"]},
        "attempts": properties["RetryStrategy"]["Attempts"],
        "retries": [" ".join(rule.values()) for rule in properties["RetryStrategy"]["EvaluateOnExit"]],
        "seconds": properties["Timeout"]["AttemptDurationSeconds"],
    }
