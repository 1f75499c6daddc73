"""Findings of cfn-lint in the templates and in the state machine's definition, and in planted mistakes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cfnlint.api import lint
from cfnlint.core import get_rules

from infra.workflow.machine import definition
from tests.infra.machines import targets

ACCEPTED = {
    "W3005": "CDK names dependencies that a reference implies",
    "W6001": "an output of one stack that people look for in the other, too",
}
"""Rules whose findings stand, with the reason."""

ROLE = f"arn:aws:iam::{'1' * 12}:role/machine"

Lint = Callable[[Mapping[str, Any]], set[str]]


@pytest.fixture(scope="module")
def findings() -> Lint:
    """The rules that a template breaks, those for information (which look at a policy's resources) included."""
    rules = get_rules([], [], ["I"], {}, False)
    return lambda template: {found.rule.id for found in lint(json.dumps(template), rules, ["us-east-1"])}


def with_machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"RoleArn": ROLE, "DefinitionString": json.dumps(machine)}
    return {"Resources": {"Machine": {"Type": "AWS::StepFunctions::StateMachine", "Properties": properties}}}


def with_statement(action: str, resource: str) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": action, "Resource": resource}
    document = {"Version": "2012-10-17", "Statement": [statement]}
    properties = {"PolicyName": "p", "Roles": ["r"], "PolicyDocument": document}
    return {"Resources": {"Policy": {"Type": "AWS::IAM::Policy", "Properties": properties}}}


def test_the_templates(deployment: Any, findings: Lint) -> None:
    assert findings(deployment.data) | findings(deployment.pipeline) == set(ACCEPTED)


def test_the_definition(findings: Lint) -> None:
    assert findings(with_machine(definition(targets()))) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: machine.update(StartAt="nowhere"),
        lambda machine: machine["States"]["prepare"].update(TimeOutSeconds=1),
        lambda machine: machine["States"]["prepare"].pop("Resource"),
        lambda machine: machine["States"]["Wait"].update(Type="Await"),
    ],
)
def test_a_broken_definition_is_found(findings: Lint, change: Callable[[dict[str, Any]], object]) -> None:
    """cfn-lint finds no `Next` that leads nowhere, and checks no operators of a Choice: test_walk does."""
    machine = copy.deepcopy(definition(targets()))
    change(machine)
    assert "E3601" in findings(with_machine(machine))


@pytest.mark.parametrize(
    ("action", "resource", "rule"),
    [
        ("s3:GetObjekt", "arn:aws:s3:::bucket/*", "W3037"),
        ("states:DescribeExecution", "arn:aws:states:us-east-1:111111111111:stateMachine:m", "I3510"),
    ],
)
def test_a_permission_that_means_nothing_is_found(findings: Lint, action: str, resource: str, rule: str) -> None:
    assert rule in findings(with_statement(action, resource))
