"""The account itself: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from infra.app import CDK
from infra.doctor import check_account
from infra.doctor.asking import Denied, NotAuthenticated, Refused
from infra.doctor.blueprint import Blueprint, Fleet

ARN = "arn:aws:sts::123456789012:assumed-role/Admin/me"
CALLER = {"sts:GetCallerIdentity": {"Account": "123456789012", "Arn": ARN, "UserId": "AROA:me"}}


def test_credentials_of_the_account_that_is_set(other_blueprint: Blueprint, recorded: Any) -> None:
    assert check_account.who(recorded(CALLER), other_blueprint)[0] == "123456789012"
    assert check_account.who(recorded(CALLER), other_blueprint)[1].level == "ok"


def test_credentials_of_any_account_where_none_is_set(blueprint: Blueprint, recorded: Any) -> None:
    elsewhere = {"sts:GetCallerIdentity": {**CALLER["sts:GetCallerIdentity"], "Account": "999999999999"}}
    assert check_account.who(recorded(elsewhere), blueprint)[1].level == "ok"


def test_credentials_of_another_account(other_blueprint: Blueprint, recorded: Any) -> None:
    elsewhere = {"sts:GetCallerIdentity": {**CALLER["sts:GetCallerIdentity"], "Account": "999999999999"}}
    _, found = check_account.who(recorded(elsewhere), other_blueprint)
    assert (found.level, found.what) == ("problem", "the credentials are of another account")
    assert "123456789012" in found.rule


def test_credentials_that_are_not_accepted() -> None:
    found = check_account.not_accepted(NotAuthenticated("ExpiredToken: too old"))
    assert (found.level, found.value) == ("problem", "ExpiredToken: too old")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"RegionName": "us-west-2", "RegionOptStatus": "ENABLED_BY_DEFAULT"}, []),
        ({"RegionName": "us-west-2", "RegionOptStatus": "ENABLED"}, []),
        (
            {"RegionName": "us-west-2", "RegionOptStatus": "DISABLED"},
            [("problem", "the region us-west-2 is not enabled in this account")],
        ),
        (Refused("ValidationException", "no such region"), [("problem", "there is no region us-west-2")]),
        (Denied("account:GetRegionOptStatus"), [("warning", "the check needs the permission account:GetRegionOptStatus")]),
    ],
    ids=["default", "enabled", "disabled", "unknown", "denied"],
)
def test_region(blueprint: Blueprint, look: Any, bad: Any, answer: Any, expected: Any) -> None:
    assert bad(look(check_account.region, blueprint, {"account:GetRegionOptStatus": answer})) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"Parameter": {"Value": "6"}}, []),
        ({"Parameter": {"Value": "21"}}, []),
        ({"Parameter": {"Value": "5"}}, [("problem", "the CDK bootstrap is too old")]),
        (Refused("ParameterNotFound", ""), [("problem", "the CDK is not bootstrapped in this account and region")]),
    ],
    ids=["enough", "newer", "older", "absent"],
)
def test_bootstrap(blueprint: Blueprint, look: Any, bad: Any, answer: Any, expected: Any) -> None:
    findings = look(check_account.bootstrap, blueprint, {"ssm:GetParameter": answer})
    assert bad(findings) == expected
    assert all(finding.remedy == f"{CDK} bootstrap aws://123456789012/us-west-2" for finding in findings if finding.remedy)


def missing_role(name: str) -> Any:
    role = {"Path": "/", "RoleName": "role", "RoleId": "AROA123456789012345", "Arn": ARN, "CreateDate": "2026-01-01T00:00:00Z"}
    return lambda parameters: Refused("NoSuchEntity", "") if parameters["RoleName"] == name else {"Role": role}


def test_service_roles(blueprint: Blueprint, look: Any, bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bad(look(check_account.service_roles, blueprint, {"iam:GetRole": missing_role("none")})) == []
    batch = look(check_account.service_roles, blueprint, {"iam:GetRole": missing_role("AWSServiceRoleForBatch")})
    assert bad(batch) == [("warning", "the service-linked role of Batch is missing")]
    spot = {"iam:GetRole": missing_role("AWSServiceRoleForEC2Spot")}
    assert bad(look(check_account.service_roles, blueprint, spot)) == []
    on_spot = [dataclasses.replace(fleet, market="SPOT") for fleet in blueprint.fleets()]
    monkeypatch.setattr(Blueprint, "fleets", lambda self: on_spot)
    assert bad(look(check_account.service_roles, blueprint, spot)) == [
        ("problem", "the service-linked role of EC2 Spot is missing")
    ]


def test_names_that_an_earlier_deployment_left(blueprint: Blueprint, look: Any, bad: Any) -> None:
    no_stack = Refused("ValidationError", "Stack with id trnpipe-data does not exist")
    repository = {"repositories": [{"repositoryName": "trnpipe/cpu"}]}
    free = {
        "cloudformation:DescribeStacks": no_stack,
        "ecr:DescribeRepositories": Refused("RepositoryNotFoundException", ""),
        "logs:DescribeLogGroups": {"logGroups": [{"logGroupName": "/trnpipe/jobs-of-others"}]},
    }
    assert bad(look(check_account.names, blueprint, free)) == []
    taken = {
        **free,
        "ecr:DescribeRepositories": repository,
        "logs:DescribeLogGroups": {"logGroups": [{"logGroupName": "/trnpipe/jobs"}]},
    }
    [finding] = look(check_account.names, blueprint, taken)
    assert finding.what == "names of the first deployment are taken"
    assert "image repository trnpipe/cpu" in finding.value
    assert finding.value.count("log group /trnpipe/jobs") == 1
    stack = {"StackName": "trnpipe-data", "CreationTime": "2026-01-01T00:00:00Z", "StackStatus": "CREATE_COMPLETE"}
    assert look(check_account.names, blueprint, {**taken, "cloudformation:DescribeStacks": {"Stacks": [stack]}}) == []


def test_budgets(blueprint: Blueprint, look: Any, bad: Any) -> None:
    budget = {"BudgetName": "all", "TimeUnit": "MONTHLY", "BudgetType": "COST"}
    assert bad(look(check_account.budgets, blueprint, {"budgets:DescribeBudgets": {"Budgets": [budget]}})) == []
    assert bad(look(check_account.budgets, blueprint, {"budgets:DescribeBudgets": {}})) == [
        ("warning", "this account has no budget")
    ]


def test_addressees(blueprint: Blueprint, other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    assert bad(look(check_account.addressees, other_blueprint, {})) == []
    assert bad(look(check_account.addressees, blueprint, {})) == [("warning", "no address receives notifications")]


def test_fleets_are_read_from_the_template(blueprint: Blueprint, other_blueprint: Blueprint) -> None:
    def told(fleet: Fleet) -> tuple[Any, ...]:
        return fleet.market, fleet.instance_type, fleet.max_vcpus, fleet.interfaces, fleet.subnet_ids or fleet.zones

    assert [told(fleet) for fleet in blueprint.fleets()] == [
        ("EC2", "trn1.32xlarge", 640, 8, ("us-west-2d",)),
        ("EC2", "trn1.32xlarge", 512, 1, ("us-west-2d",)),
        ("FARGATE", None, 64, 1, ("us-west-2d",)),
    ]
    subnet = ("subnet-0a1b2c3d",)
    assert [told(fleet) for fleet in other_blueprint.fleets()] == [
        ("EC2", "trn1n.32xlarge", 384, 16, subnet),
        ("EC2", "inf2.8xlarge", 512, 1, subnet),
        ("FARGATE", None, 64, 1, subnet),
    ]


def test_containers_are_read_from_the_settings(blueprint: Blueprint, other_blueprint: Blueprint) -> None:
    own, others = blueprint.containers, other_blueprint.containers
    assert [(one.repository, one.version, one.registry) for one in own] == [
        ("trnpipe/neuron", "0.1.0", None),
        ("trnpipe/cpu", "0.1.0", None),
    ]
    assert [(one.repository, one.version, one.registry, one.region) for one in others] == [
        ("team/neuron", "7", "123456789012", "us-east-2"),
        ("team/neuron", "7-cpu", "123456789012", "us-east-2"),
    ]
