"""The drawing in docs/architecture.md: every construct in it exists, and every queue, state machine and store is in it."""

from __future__ import annotations

import re
from typing import Any

from infra.cdk_context import CDK_JSON

DRAWN_TYPES = (
    "AWS::Batch::ComputeEnvironment",
    "AWS::Batch::JobQueue",
    "AWS::DynamoDB::Table",
    "AWS::ECR::Repository",
    "AWS::S3::Bucket",
    "AWS::SNS::Topic",
    "AWS::SQS::Queue",
    "AWS::Scheduler::Schedule",
    "AWS::StepFunctions::StateMachine",
)


def test_it_names_the_constructs_of_the_templates(deployment: Any) -> None:
    text = (CDK_JSON.parent / "docs/architecture.md").read_text(encoding="utf-8")
    [drawing] = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    named = set(re.findall(r"\b[A-Z][A-Za-z]+/[A-Z][A-Za-z]+\b", drawing))
    types = {
        "/".join(resource["Metadata"]["aws:cdk:path"].split("/")[1:3]): resource["Type"]
        for template in (deployment.pipeline, deployment.data)
        for resource in reversed(template["Resources"].values())
        if "aws:cdk:path" in resource.get("Metadata", {})
    }
    assert named <= types.keys()
    assert {path for path, kind in types.items() if kind in DRAWN_TYPES} <= named
