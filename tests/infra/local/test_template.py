"""Resolution of CloudFormation references, and the stack that a local run sees in the real templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.local.run import DEPLOYMENT_CONFIG
from infra.local.template import LocalStack, local_context, read_stack, synthesize
from pipeline.contract import STAGES, Shape, stage_command
from pipeline.errors import BadConfig, Defect

AT = {"Fn::Join": ["/", [{"Ref": "AWS::Region"}, {"Ref": "Queue"}, {"Fn::GetAtt": ["Table", "Arn"]}]]}

POLICY = {"ShareDecaySeconds": 60, "ShareDistribution": [{"ShareIdentifier": "team*", "WeightFactor": 0.5}]}


def template(definition: Any, **resources: Any) -> dict[str, Any]:
    return {
        "Parameters": {"Size": {"Type": "Number", "Default": "7"}},
        "Resources": {
            "Machine": {
                "Type": "AWS::StepFunctions::StateMachine",
                "Properties": {
                    "StateMachineName": "machine",
                    "RoleArn": {"Fn::GetAtt": ["Role", "Arn"]},
                    "DefinitionString": definition,
                },
            },
            "Role": {"Type": "AWS::IAM::Role", "Properties": {}},
            "Table": {
                "Type": "AWS::DynamoDB::Table",
                "Properties": {"KeySchema": [], "AttributeDefinitions": []},
            },
            "Job": {
                "Type": "AWS::Batch::JobDefinition",
                "Properties": {
                    "JobDefinitionName": "job",
                    "Type": "container",
                    "ContainerProperties": {
                        "Command": ["run", {"Ref": "Size"}],
                        "Environment": [{"Name": "AT", "Value": AT}],
                    },
                },
            },
            "Queue": {
                "Type": "AWS::Batch::JobQueue",
                "Properties": {"JobQueueName": "queue", "SchedulingPolicyArn": {"Fn::GetAtt": ["Policy", "Arn"]}},
            },
            "Policy": {"Type": "AWS::Batch::SchedulingPolicy", "Properties": {"FairsharePolicy": POLICY}},
            **resources,
        },
    }


DATA = {
    "Resources": {"Bucket": {"Type": "AWS::S3::Bucket", "Metadata": {"aws:cdk:path": "app-data/Storage/Bucket/Resource"}}},
    "Outputs": {"Export": {"Value": {"Ref": "Bucket"}, "Export": {"Name": "app-data:Bucket"}}},
}
DEFINITION = {
    "Fn::Join": [
        "",
        [
            '{"Resource": "arn:',
            {"Ref": "AWS::Partition"},
            ':states:::batch:submitJob.sync", "Bucket": "',
            {"Fn::ImportValue": "app-data:Bucket"},
            '", "Queue": "',
            {"Ref": "Queue"},
            '", "Job": "',
            {"Ref": "Job"},
            '", "Part": "',
            {"Fn::Select": [1, {"Fn::Split": ["/", {"Fn::GetAtt": ["Queue", "JobQueueArn"]}]}]},
            '"}',
        ],
    ]
}


def write(folder: Path, **templates: Any) -> Path:
    for name, text in templates.items():
        (folder / f"{name}.template.json").write_text(json.dumps(text))
    return folder


def test_references_are_resolved_across_stacks(tmp_path: Path) -> None:
    stack = read_stack(write(tmp_path, app=template(DEFINITION), data=DATA))
    assert json.loads(stack.definition) == {
        "Resource": "arn:aws:states:::batch:submitJob.sync",
        "Bucket": "app-data-storage-bucket",
        "Queue": "arn:aws:batch:us-east-1:123456789012:job-queue/queue",
        "Job": "arn:aws:batch:us-east-1:123456789012:job-definition/job:1",
        "Part": "queue",
    }
    assert stack.bucket == "app-data-storage-bucket"
    assert stack.role_arn == "arn:aws:iam::123456789012:role/Role"
    [job] = stack.job_definitions
    assert job.containers[0].command == ("run", "7")
    assert job.containers[0].environment == {
        "AT": "us-east-1/arn:aws:batch:us-east-1:123456789012:job-queue/queue/"
        "arn:aws:dynamodb:us-east-1:123456789012:table/app-table"
    }
    assert stack.queues[0].fair_share


def test_a_queue_without_policy_takes_no_share(tmp_path: Path) -> None:
    queue = {"Type": "AWS::Batch::JobQueue", "Properties": {"JobQueueName": "queue"}}
    assert not read_stack(write(tmp_path, app=template(DEFINITION, Queue=queue), data=DATA)).queues[0].fair_share


def test_unknown_functions_and_missing_machines_are_named(tmp_path: Path) -> None:
    with pytest.raises(Defect, match="function") as unknown:
        read_stack(write(tmp_path, app=template({"Fn::Length": []}), data=DATA))
    assert unknown.value.value == "Fn::Length"
    with pytest.raises(Defect, match="0 resources where one is expected: state machine"):
        read_stack(write(tmp_path, app={"Resources": {}}, data=DATA))


def test_the_real_templates_hold_a_definition_for_every_stage_and_node_count(stack: LocalStack) -> None:
    commands = {definition.name: definition.containers for definition in stack.job_definitions}
    for stage, spec in STAGES.items():
        sizes = (1, 2) if spec.shape is Shape.GANG else (None,)
        for size in sizes:
            containers = commands.pop(f"trnpipe-{stage}" + (f"-{size}" if size else ""))
            assert [list(container.command) for container in containers] == [stage_command(stage)] * (size or 1)
    assert commands == {}
    assert all(queue.fair_share for queue in stack.queues)
    assert all(definition.timeout_seconds and definition.retry.rules for definition in stack.job_definitions)
    assert "${Token" not in stack.definition


def test_the_watch_that_an_abort_starts_is_found_with_its_queues_resolved(stack: LocalStack) -> None:
    """The notices of the same event go to a topic, and other watches wait for other events."""
    [(name, definition)] = stack.watches.items()
    assert name == "trnpipe-cleanup"
    assert all(queue.arn in definition for queue in stack.queues)


def test_synth_is_done_again_only_after_a_change(templates: Path) -> None:
    manifest = templates / "manifest.json"
    before = manifest.stat().st_mtime_ns
    synthesize(templates, local_context((1, 2), DEPLOYMENT_CONFIG))
    assert manifest.stat().st_mtime_ns == before


def test_refused_settings_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="refused at synth") as refused:
        synthesize(tmp_path, local_context((1, 2), {"train": {"stepz": 5}}))
    assert any("train.stepz" in line for line in refused.value.value)
    with pytest.raises(BadConfig, match="refused at synth"):
        synthesize(tmp_path, local_context((1, 2), {}, nonsense=1))
