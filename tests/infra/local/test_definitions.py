"""Job definitions as CloudFormation states them: gangs, retry rules, priorities."""

from __future__ import annotations

from typing import Any

import pytest

from infra.local.definitions import ClientError, JobDefinition, camel


def gang(target: str, nodes: int = 4) -> dict[str, Any]:
    container = {"Command": ["run"], "Environment": [{"Name": "RANGE", "Value": target}]}
    node_range = {"TargetNodes": target, "Container": container}
    return {"Type": "multinode", "NodeProperties": {"MainNode": 0, "NumNodes": nodes, "NodeRangeProperties": [node_range]}}


def test_every_node_of_a_gang_has_the_container_of_the_one_range() -> None:
    definition = JobDefinition.parse("gang", gang("0:"))
    assert [container.environment["RANGE"] for container in definition.containers] == ["0:"] * 4
    assert definition.multinode
    with pytest.raises(ClientError, match="one range of all nodes"):
        JobDefinition.parse("gang", gang("0:2"))


def test_a_gang_of_one_node_is_a_gang() -> None:
    definition = JobDefinition.parse("gang", gang("0:", nodes=1))
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
