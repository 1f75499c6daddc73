"""The synthesized CloudFormation templates: resources by type, with their references or with every reference resolved.

References (Ref, GetAtt, Join, Select, Split and ImportValue) resolve into names and ARNs of the local endpoint's account.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.local.definitions import ACCOUNT, REGION
from pipeline.errors import Defect

PSEUDO_PARAMETERS = {
    "AWS::AccountId": ACCOUNT,
    "AWS::Region": REGION,
    "AWS::Partition": "aws",
    "AWS::URLSuffix": "amazonaws.com",
}


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of a template: its name, given or made of its path, and its properties without references."""

    name: str
    properties: dict[str, Any]


NAME_PROPERTIES = {
    "AWS::S3::Bucket": "BucketName",
    "AWS::DynamoDB::Table": "TableName",
    "AWS::SNS::Topic": "TopicName",
    "AWS::Batch::JobQueue": "JobQueueName",
    "AWS::Batch::JobDefinition": "JobDefinitionName",
    "AWS::StepFunctions::StateMachine": "StateMachineName",
}
ARNS = {
    "AWS::S3::Bucket": "arn:aws:s3:::{name}",
    "AWS::DynamoDB::Table": "arn:aws:dynamodb:{region}:{account}:table/{name}",
    "AWS::SNS::Topic": "arn:aws:sns:{region}:{account}:{name}",
    "AWS::Batch::ComputeEnvironment": "arn:aws:batch:{region}:{account}:compute-environment/{name}",
    "AWS::Batch::JobQueue": "arn:aws:batch:{region}:{account}:job-queue/{name}",
    "AWS::Batch::JobDefinition": "arn:aws:batch:{region}:{account}:job-definition/{name}:1",
    "AWS::StepFunctions::StateMachine": "arn:aws:states:{region}:{account}:stateMachine:{name}",
    "AWS::IAM::Role": "arn:aws:iam::{account}:role/{name}",
}
REF_IS_ARN = {
    "AWS::Batch::ComputeEnvironment",
    "AWS::Batch::JobDefinition",
    "AWS::Batch::JobQueue",
    "AWS::SNS::Topic",
    "AWS::StepFunctions::StateMachine",
}


class Stacks:
    """All stacks of the app, with their references to each other.

    What a run does not touch (networks, hosts, alarms) resolves to its logical id: present, unique and never used.

    Attributes:
        templates: stack name -> its template.
    """

    def __init__(self, templates: Mapping[str, dict[str, Any]]) -> None:
        self.templates = templates
        self._exports = {
            json.dumps(output["Export"]["Name"]): (stack, output["Value"])
            for stack, template in templates.items()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }

    @classmethod
    def read(cls, folder: Path) -> Stacks:
        """Read the stacks of a cloud assembly; the data stack, which is deployed first, is the first."""
        return cls(
            {
                path.name.removesuffix(".template.json"): json.loads(path.read_text())
                for path in sorted(folder.glob("*.template.json"))
            }
        )

    def unresolved(self, kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Stack, logical id and properties of every resource of a type, with unresolved references."""
        return (
            (stack, logical_id, resource.get("Properties", {}))
            for stack, template in self.templates.items()
            for logical_id, resource in template.get("Resources", {}).items()
            if resource["Type"] == kind
        )

    def of_type(self, kind: str) -> list[Resource]:
        """Every resource of a type, resolved."""
        return [
            Resource(self._name(stack, logical_id), self.resolve(stack, properties))
            for stack, logical_id, properties in self.unresolved(kind)
        ]

    def resolve(self, stack: str, value: Any) -> Any:
        """Replace every intrinsic function in a value by its result."""
        if isinstance(value, list):
            return [self.resolve(stack, inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            [(function, argument)] = value.items()
            if function == "Ref" or function.startswith("Fn::"):
                return self._call(stack, function, argument)
        return {key: self.resolve(stack, inner) for key, inner in value.items()}

    def _call(self, stack: str, function: str, argument: Any) -> Any:
        match function:
            case "Ref":
                return self._ref(stack, argument)
            case "Fn::GetAtt":
                logical_id, attribute = argument
                if attribute.endswith("Arn"):
                    return self._arn(stack, logical_id)
                return self._name(stack, logical_id) if attribute.endswith("Name") else f"{logical_id}.{attribute}"
            case "Fn::ImportValue":
                exporter, value = self._exports[json.dumps(argument)]
                return self.resolve(exporter, value)
        match function, self.resolve(stack, argument):
            case "Fn::Join", [separator, parts]:
                return separator.join(map(str, parts))
            case "Fn::Select", [index, values]:
                return values[int(index)]
            case "Fn::Split", [separator, text]:
                return text.split(separator)
        raise Defect("the template uses a function that the local endpoint does not know", value=function)

    def _ref(self, stack: str, target: str) -> Any:
        if target in PSEUDO_PARAMETERS:
            return PSEUDO_PARAMETERS[target]
        template = self.templates[stack]
        if target in template.get("Parameters", {}):
            return template["Parameters"][target].get("Default", target)
        return self._arn(stack, target) if template["Resources"][target]["Type"] in REF_IS_ARN else self._name(stack, target)

    def _name(self, stack: str, logical_id: str) -> str:
        resource = self.templates[stack]["Resources"][logical_id]
        if (given := resource.get("Properties", {}).get(NAME_PROPERTIES.get(resource["Type"], ""))) is not None:
            return str(self.resolve(stack, given))
        # People know it by its path in the construct tree; valid as a bucket's name, too.
        path = resource.get("Metadata", {}).get("aws:cdk:path", f"{stack}/{logical_id}").removesuffix("/Resource")
        return re.sub(r"[^a-z0-9-]+", "-", path.lower()).strip("-")[:63] if resource["Type"] in NAME_PROPERTIES else logical_id

    def _arn(self, stack: str, logical_id: str) -> str:
        kind = self.templates[stack]["Resources"][logical_id]["Type"]
        pattern = ARNS.get(kind, f"arn:aws:{kind.split('::')[1].lower()}:{{region}}:{{account}}:{{name}}")
        return pattern.format(region=REGION, account=ACCOUNT, name=self._name(stack, logical_id))
