"""Notices, alarms and the watch on the time budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.monitoring import watch_definition


def test_an_execution_that_is_stopped_or_times_out_is_noticed(deployment: Any) -> None:
    patterns = [rule["EventPattern"] for rule in deployment.resources("AWS::Events::Rule")]
    [pattern] = [pattern for pattern in patterns if "ABORTED" in pattern["detail"]["status"]]
    assert pattern["source"] == ["aws.states"]
    assert pattern["detail"]["status"] == ["ABORTED", "TIMED_OUT"]
    assert len(pattern["detail"]["stateMachineArn"]) == 1


def test_every_execution_gets_a_watch(deployment: Any) -> None:
    patterns = [rule["EventPattern"] for rule in deployment.resources("AWS::Events::Rule")]
    assert [pattern for pattern in patterns if pattern["detail"]["status"] == ["RUNNING"]]


def test_the_watch_looks_once_the_budget_is_spent(service_model: Any) -> None:
    machine: Any = json.loads(json.dumps(watch_definition("aws", "arn:topic", 12 * 3600)))
    states = machine["States"]
    assert states["Wait"]["Seconds"] == 12 * 3600
    [choice] = states["StillRuns"]["Choices"]
    assert (choice["StringEquals"], choice["Next"]) == ("RUNNING", "Notify")
    request = {key.removesuffix(".$"): value for key, value in states["Notify"]["Parameters"].items()}
    assert service_model.problems("sns", "Publish", request) == ""
    assert "720 minutes" in request["Message"]


@pytest.mark.parametrize("fixture", ["deployment", "other_deployment"])
def test_alarms_speak_through_the_topic(request: pytest.FixtureRequest, fixture: str) -> None:
    deployment = request.getfixturevalue(fixture)
    alarms = {alarm["AlarmName"].split("-", 1)[1]: alarm for alarm in deployment.resources("AWS::CloudWatch::Alarm")}
    expected = {"Failed", "Aborted", "TimedOut", "Overdue", "NotStarted"}
    # Without a schedule nobody waits for a weekly success.
    assert set(alarms) == expected | ({"NoSuccess"} if fixture == "deployment" else set())
    assert all(len(alarm["AlarmActions"]) == 1 for alarm in alarms.values())
    assert alarms["Overdue"]["Threshold"] == 12 * 3600 * 1000


def test_the_week_without_success_fits_what_cloudwatch_evaluates(deployment: Any) -> None:
    alarm = deployment.named("AWS::CloudWatch::Alarm", "AlarmName", "trnpipe-NoSuccess")
    assert alarm["Period"] * alarm["EvaluationPeriods"] <= 7 * 86_400
    assert alarm["TreatMissingData"] == "breaching"


def test_the_topic_is_encrypted_with_a_key_that_its_publishers_may_use(deployment: Any, other_deployment: Any) -> None:
    assert "KmsMasterKeyId" in deployment.only("AWS::SNS::Topic")
    principals = str(deployment.only("AWS::KMS::Key")["KeyPolicy"])
    assert "events.amazonaws.com" in principals
    assert "cloudwatch.amazonaws.com" in principals
    assert deployment.resources("AWS::SNS::Subscription") == []
    assert other_deployment.only("AWS::SNS::Subscription")["Endpoint"] == "team@example.com"


def test_there_is_a_dashboard(deployment: Any) -> None:
    assert deployment.only("AWS::CloudWatch::Dashboard")["DashboardName"] == "trnpipe"
