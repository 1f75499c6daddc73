"""Job definitions as CloudFormation states them: node ranges, retry rules, priorities."""

from __future__ import annotations

from typing import Any

import pytest

from infra.local.definitions import ClientError, JobDefinition, camel


def gang(*ranges: tuple[str, str], nodes: int = 4) -> dict[str, Any]:
    return {
        "Type": "multinode",
        "NodeProperties": {
            "MainNode": 0,
            "NumNodes": nodes,
            "NodeRangeProperties": [
                {"TargetNodes": target, "Container": {"Command": [command], "Environment": [{"Name": "RANGE", "Value": target}]}}
                for target, command in ranges
            ],
        },
    }


@pytest.mark.parametrize(
    ("ranges", "commands"),
    [
        ([("0:", "all")], ["all"] * 4),
        ([("0:3", "all")], ["all"] * 4),
        ([(":1", "low"), ("2:", "high")], ["low", "low", "high", "high"]),
        ([("0:", "all"), ("0", "main")], ["main", "all", "all", "all"]),
        ([("0:", "all"), ("1:2", "inner")], ["all", "inner", "inner", "all"]),
    ],
)
def test_the_inner_node_range_holds(ranges: list[tuple[str, str]], commands: list[str]) -> None:
    definition = JobDefinition.parse("gang", gang(*ranges))
    assert [container.command[0] for container in definition.containers] == commands
    assert definition.multinode


def test_every_node_must_be_in_a_range() -> None:
    with pytest.raises(ClientError, match="node 3 is in no node range"):
        JobDefinition.parse("gang", gang(("0:2", "most")))


def test_a_gang_of_one_node_is_a_gang() -> None:
    definition = JobDefinition.parse("gang", gang(("0:", "all"), nodes=1))
    assert (definition.multinode, len(definition.containers)) == (True, 1)


def test_everything_else_is_read_in_both_spellings() -> None:
    properties = {
        "Type": "container",
        "ContainerProperties": {"Command": ["run", "Ref::a"], "Environment": [{"Name": "Key", "Value": "Value"}]},
        "Parameters": {"a": "1"},
        "RetryStrategy": {"Attempts": 4, "EvaluateOnExit": [{"Action": "exit", "OnExitCode": "6*"}]},
        "Timeout": {"AttemptDurationSeconds": 60},
        "SchedulingPriority": 7,
    }
    definition = JobDefinition.parse("single", properties)
    assert definition.containers[0].environment == {"Key": "Value"}
    assert (definition.parameters, definition.timeout_seconds, definition.priority) == ({"a": "1"}, 60, 7)
    assert definition.retry.attempts == 4
    assert not definition.retry.again(64, "", "")
    assert definition.arn.endswith(":job-definition/single:1")
    lowered = camel(properties["RetryStrategy"])
    assert lowered == {"attempts": 4, "evaluateOnExit": [{"action": "exit", "onExitCode": "6*"}]}
