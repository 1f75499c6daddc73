"""Notices, alarms and the dashboard, held against the catalogue of metrics and the runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from aws_cdk import Stack
from aws_cdk.assertions import Template

from infra.constructs.monitoring import CHECKPOINT_STALL_SECONDS, REFUSALS, Topic
from infra.runbook import ADVICE, RUNBOOK, advice
from infra.setting_sections import ENDPOINTS
from infra.settings import Settings
from pipeline.contract import GATE_REFUSED, METRICS, METRICS_NAMESPACE, Metric

SERVICES = {
    "AWS/States": {"ExecutionsStarted", "ExecutionsSucceeded", "ExecutionsFailed", "ExecutionsAborted", "ExecutionsTimedOut"}
    | {"ExecutionTime"},
    "AWS/Events": {"Invocations"},
    "AWS/SQS": {"ApproximateNumberOfMessagesVisible"},
}
"""Metrics of services that are used here, as their guides name them."""

ALARMS = {"Failed", "Refused", "Aborted", "TimedOut", "Overdue", "NotStarted", "WatchFailed"} | {
    "UnhealthyHost",
    "MemoryErrors",
    "NewGraphs",
    "CheckpointStall",
    "QueueBlocked",
}


def alarms_of(deployment: Any) -> dict[str, dict[str, Any]]:
    return {alarm["AlarmName"].split("-", 1)[1]: alarm for alarm in deployment.resources("AWS::CloudWatch::Alarm")}


def rules_on(deployment: Any, kind: str) -> list[dict[str, Any]]:
    return [rule for rule in deployment.resources("AWS::Events::Rule") if rule["EventPattern"]["detail-type"] == [kind]]


def text_of(value: Any) -> str:
    """A string of the template, references in it as `<Ref>`."""
    if isinstance(value, str):
        return value
    if "Fn::Join" in value:
        return "".join(text_of(part) for part in value["Fn::Join"][1])
    return "<Ref>"


def notices(deployment: Any, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, str], str]]:
    """Event pattern, paths and text of everything that a rule says to a topic."""
    for rule in rules_on(deployment, kind):
        for target in rule["Targets"]:
            transformer = target.get("InputTransformer")
            if transformer and text_of(transformer["InputTemplate"]).startswith('"'):
                yield rule["EventPattern"], transformer["InputPathsMap"], text_of(transformer["InputTemplate"])


def used_metrics(alarm: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(namespace, name, dimensions) of what an alarm looks at."""
    entries = [entry["MetricStat"]["Metric"] for entry in alarm.get("Metrics", ()) if "MetricStat" in entry] or [alarm]
    for entry in entries:
        yield entry["Namespace"], entry["MetricName"], {one["Name"]: one["Value"] for one in entry.get("Dimensions", ())}


def test_an_execution_that_is_stopped_or_times_out_is_noticed(deployment: Any) -> None:
    found = list(notices(deployment, "Step Functions Execution Status Change"))
    assert sorted(pattern["detail"]["status"] for pattern, _, _ in found) == [["ABORTED"], ["TIMED_OUT"]]
    for pattern, paths, text in found:
        assert pattern["source"] == ["aws.states"]
        assert len(pattern["detail"]["stateMachineArn"]) == 1
        assert set(paths.values()) == {"$.detail.name", "$.detail.executionArn"}
        assert "#/v2/executions/details/<detail-executionArn>" in text
        assert RUNBOOK["Aborted"] in text or RUNBOOK["TimedOut"] in text


def test_a_blocked_queue_is_noticed_with_its_reason(deployment: Any) -> None:
    """Event: "Job queue blocked events", AWS Batch User Guide."""
    [(pattern, paths, text)] = notices(deployment, "Batch Job Queue Blocked")
    assert pattern["source"] == ["aws.batch"]
    assert len(pattern["detail"]["jobQueue"]) == len(deployment.resources("AWS::Batch::JobQueue"))
    assert set(paths.values()) == {"$.detail.jobName", "$.detail.jobQueue", "$.detail.statusReason"}
    assert RUNBOOK["QueueBlocked"] in text
    [(_, _, dimensions)] = used_metrics(alarms_of(deployment)["QueueBlocked"])
    counted = deployment.pipeline["Resources"][dimensions["RuleName"]["Ref"]]
    assert counted["Properties"]["EventPattern"] == pattern


def test_a_rule_that_is_removed_from_the_default_group_is_noticed(deployment: Any, small_deployment: Any) -> None:
    """Event: "AWS service events delivered via AWS CloudTrail", EventBridge User Guide. Without EFA it is not used."""
    [(pattern, _, text)] = notices(deployment, "AWS API Call via CloudTrail")
    assert pattern["source"] == ["aws.ec2"]
    assert pattern["detail"]["eventName"] == ["RevokeSecurityGroupIngress", "RevokeSecurityGroupEgress"]
    [group] = pattern["detail"]["requestParameters"]["groupId"]
    assert group["Fn::GetAtt"][1] == "DefaultSecurityGroup"
    assert RUNBOOK["DefaultGroup"] in text
    assert list(notices(small_deployment, "AWS API Call via CloudTrail")) == []


@pytest.mark.parametrize("fixture", ["deployment", "other_deployment"])
def test_alarms_speak_through_the_topic_and_say_what_to_do(request: pytest.FixtureRequest, fixture: str) -> None:
    alarms = alarms_of(request.getfixturevalue(fixture))
    assert set(alarms) == ALARMS
    for name, alarm in alarms.items():
        assert len(alarm["AlarmActions"]) == 1
        assert alarm["TreatMissingData"] == "notBreaching"
        assert alarm["AlarmDescription"] == advice(name)
        assert len(alarm["AlarmDescription"]) <= 1024
    assert alarms["Overdue"]["Threshold"] == 12 * 3600 * 1000
    assert alarms["CheckpointStall"]["Threshold"] == CHECKPOINT_STALL_SECONDS


def test_whatever_can_be_said_has_advice_and_a_place_in_the_guide() -> None:
    assert set(ADVICE) == set(RUNBOOK) == ALARMS | {"MissedWeek", "DefaultGroup"}
    assert RUNBOOK["TimedOut"] == "docs/runbook.md#alarm-timed-out"
    for name in ("Overdue", "MissedWeek"):
        # These stand in strings of States.Format, too.
        assert not set(advice(name)) & set("'{}\\")


def test_a_refused_run_is_told_apart_from_a_failed_one(deployment: Any) -> None:
    """Step Functions counts both as failed; the log of the state machine tells which."""
    counted = deployment.only("AWS::Logs::MetricFilter")
    assert counted["FilterPattern"] == f'"ExecutionFailed" "{GATE_REFUSED}"'
    [transformation] = counted["MetricTransformations"]
    alarms = alarms_of(deployment)
    assert list(used_metrics(alarms["Refused"])) == [(transformation["MetricNamespace"], transformation["MetricName"], {})]
    [expression] = [entry["Expression"] for entry in alarms["Failed"]["Metrics"] if "Expression" in entry]
    assert expression == "failed - FILL(refused, 0)"
    by_id = {entry["Id"]: entry["MetricStat"]["Metric"]["MetricName"] for entry in alarms["Failed"]["Metrics"][1:]}
    assert by_id == {"failed": "ExecutionsFailed", "refused": transformation["MetricName"]}


def exists(namespace: str, name: str, dimensions: dict[str, Any]) -> bool:
    """Whether a container publishes such a metric."""
    if namespace in SERVICES:
        return name in SERVICES[namespace]
    if namespace == f"{METRICS_NAMESPACE}/trnpipe":
        return name == REFUSALS and not dimensions
    spec = METRICS[Metric(name)]
    in_a_stage = "Stage" not in dimensions or dimensions["Stage"] in spec.stages
    return (
        namespace == METRICS_NAMESPACE
        and dimensions.get("Deployment") == "trnpipe"
        and tuple(dimensions) in spec.dimensions
        and in_a_stage
    )


def test_alarms_look_at_metrics_that_are_published(deployment: Any) -> None:
    for name, alarm in alarms_of(deployment).items():
        used = list(used_metrics(alarm))
        assert used
        assert all(exists(*metric) for metric in used), name
    assert list(used_metrics(alarms_of(deployment)["NewGraphs"])) == [
        (METRICS_NAMESPACE, "NewGraphs", {"Deployment": "trnpipe", "Stage": "train"})
    ]


def test_the_dashboard_shows_the_whole_catalogue_and_nothing_that_is_not_there(deployment: Any) -> None:
    dashboard = deployment.only("AWS::CloudWatch::Dashboard")
    assert dashboard["DashboardName"] == "trnpipe"
    widgets = json.loads(text_of(dashboard["DashboardBody"]))["widgets"]
    shown = set()
    for widget in widgets:
        for row in widget["properties"].get("metrics", ()):
            namespace, name, *rest = [part for part in row if not isinstance(part, dict)]
            dimensions = dict(zip(rest[::2], rest[1::2], strict=True))
            assert exists(namespace, name, dimensions), row
            options = next((part for part in row if isinstance(part, dict)), {})
            if namespace == METRICS_NAMESPACE:
                shown.add(Metric(name))
                assert options.get("stat", "Average") == METRICS[Metric(name)].statistic, row
    assert shown == set(Metric)
    [status] = [widget for widget in widgets if widget["type"] == "alarm"]
    assert len(status["properties"]["alarms"]) == len(ALARMS)
    [links] = [widget["properties"]["markdown"] for widget in widgets if widget["type"] == "text"]
    assert len(re.findall(r"\]\(https://console\.aws\.amazon\.com/", links)) == 3


def test_the_topic_is_encrypted_with_a_key_that_its_publishers_may_use(deployment: Any, other_deployment: Any) -> None:
    assert "KmsMasterKeyId" in deployment.only("AWS::SNS::Topic")
    principals = str(deployment.only("AWS::KMS::Key")["KeyPolicy"])
    assert "events.amazonaws.com" in principals
    assert "cloudwatch.amazonaws.com" in principals
    assert deployment.resources("AWS::SNS::Subscription") == []


def test_notifications_go_to_addresses_and_to_endpoints_of_other_protocols(other_deployment: Any) -> None:
    found = {(one["Protocol"], one["Endpoint"]) for one in other_deployment.resources("AWS::SNS::Subscription")}
    assert found == {("email", "team@example.com"), ("sqs", "arn:aws:sqs:us-east-2:123456789012:runs")}


@pytest.mark.parametrize("protocol", ENDPOINTS)
def test_every_protocol_of_sns_gets_its_subscription(protocol: str) -> None:
    role = "arn:aws:iam::123456789012:role/firehose" if protocol == "firehose" else None
    endpoint = ENDPOINTS[protocol][1]
    stack = Stack()
    Topic(
        stack,
        "Topic",
        settings=Settings(ami="ami-01234567", notify=({"protocol": protocol, "endpoint": endpoint, "role": role},)),
    )
    [found] = Template.from_stack(stack).find_resources("AWS::SNS::Subscription").values()
    assert (found["Properties"]["Protocol"], found["Properties"]["Endpoint"]) == (protocol, endpoint)
    assert found["Properties"].get("SubscriptionRoleArn") == role


def test_alarms_of_this_account_alone_use_the_topic_and_its_key(other_deployment: Any) -> None:
    """EventBridge takes no conditions there: infra/constructs/monitoring.py names the documents."""
    statements = [
        *other_deployment.only("AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"],
        *other_deployment.only("AWS::KMS::Key")["KeyPolicy"]["Statement"],
    ]
    by_service: dict[str, list[dict[str, Any]]] = {}
    for each in statements:
        if each["Effect"] == "Allow" and "Service" in each["Principal"]:
            by_service.setdefault(each["Principal"]["Service"], []).append(each)
    assert len(by_service["cloudwatch.amazonaws.com"]) == len(by_service["events.amazonaws.com"]) == 2
    for each in by_service["cloudwatch.amazonaws.com"]:
        assert each["Condition"] == {
            "StringEquals": {"aws:SourceAccount": "123456789012"},
            "ArnLike": {"aws:SourceArn": "arn:aws:cloudwatch:us-east-2:123456789012:alarm:*"},
        }
    assert not any("Condition" in each for each in by_service["events.amazonaws.com"])


def test_containers_learn_what_their_deployment_is_called(deployment: Any) -> None:
    for definition in deployment.resources("AWS::Batch::JobDefinition"):
        ranges = definition.get("NodeProperties", {}).get("NodeRangeProperties", [])
        containers = [one["Container"] for one in ranges] or [definition["ContainerProperties"]]
        for container in containers:
            assert {"Name": "TRNPIPE_DEPLOYMENT", "Value": "trnpipe"} in container["Environment"]
            assert container["LogConfiguration"]["LogDriver"] == "awslogs"
