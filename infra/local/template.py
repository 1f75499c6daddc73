"""The synthesized CloudFormation templates as the local endpoint needs them: names resolved, nothing else changed.

`synthesize` runs the CDK app in a process of its own (the CDK library is large and keeps a Node.js process); `read_stack`
resolves Ref, GetAtt, Join, Sub, Select, Split and ImportValue into local names and ARNs and picks out what a run
touches: the state machine, job definitions, queues, buckets, the lock table and the topics.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import infra
from infra.app import read_context
from infra.local.definitions import ACCOUNT, REGION, JobDefinition, JobQueue
from infra.settings import CONTEXT_KEY, ENVIRONMENT_KEY, ENVIRONMENTS
from pipeline import config, contract, cost, errors, places, prices
from pipeline.errors import BadConfig, Defect
from pipeline.operate import console

PSEUDO_PARAMETERS = {
    "AWS::AccountId": ACCOUNT,
    "AWS::Region": REGION,
    "AWS::Partition": "aws",
    "AWS::URLSuffix": "amazonaws.com",
}
SYNTH_TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWatch:
    """A state machine that EventBridge starts with the ARN of an execution that was aborted (infra/watches.py).

    Attributes:
        definition: as JSON text.
    """

    state_machine: str
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStack:
    """What a run touches of the deployment.

    Attributes:
        state_machine: name of the state machine.
        definition: its definition as JSON text, every reference resolved.
        role_arn: the role it runs under.
        bucket: name of the bucket with runs, registry and data.
        table: the lock table, as arguments of DynamoDB's CreateTable.
        topics: names of SNS topics.
        job_definitions, queues: as the process runner takes them.
        watches: what an aborted execution starts.
    """

    state_machine: str
    definition: str
    role_arn: str
    bucket: str
    table: dict[str, Any]
    topics: tuple[str, ...]
    job_definitions: tuple[JobDefinition, ...]
    queues: tuple[JobQueue, ...]
    watches: tuple[LocalWatch, ...] = ()

    @property
    def state_machine_arn(self) -> str:
        return machine_arn(self.state_machine)


def machine_arn(name: str) -> str:
    return f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:{name}"


def local_context(allowed_nodes: tuple[int, ...], run_config: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """CDK context of a deployment on this machine: the repository's feature flags, and settings of our own.

    Args:
        allowed_nodes: node counts that get job definitions.
        run_config: the deployment's partial run configuration.
        settings: further settings of infra/settings.py.
    """
    deployed = (CONTEXT_KEY, ENVIRONMENT_KEY)
    flags = {key: value for key, value in read_context().items() if key.partition(".")[0] not in deployed}
    return {
        **flags,
        # Names by construct path: what is in the state folder is called as in the code.
        "aws:cdk:enable-path-metadata": True,
        CONTEXT_KEY: {
            "account": ACCOUNT,
            "region": REGION,
            "zone": f"{REGION}a",
            # Never started here; the settings only ask that it is pinned.
            "ami": "ami-00000000000000000",
            "allowed_nodes": list(allowed_nodes),
            "max_vcpus": 128 * max(4, *allowed_nodes),
            "config": dict(run_config),
            # All stages are processes of this machine.
            "local_paths": True,
            **settings,
        },
    }


def synthesize(folder: Path, context: Mapping[str, Any]) -> Path:
    """Run the CDK app into `folder`, or keep what is there when neither the app nor the context has changed.

    Raises:
        BadConfig: the settings are refused.
        Defect: the app fails otherwise.
    """
    fingerprint = _synth_fingerprint(context)
    stamp = folder / "synthesized-from.txt"
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return folder
    stamp.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))},
        "CDK_OUTDIR": str(folder),
        "CDK_CONTEXT_JSON": json.dumps(context),
        # An end-of-life banner of older Node.js versions would hide what matters.
        "JSII_SILENCE_WARNING_DEPRECATED_NODE_VERSION": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", "infra.app"],
        cwd=Path(infra.__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SYNTH_TIMEOUT_SECONDS,
        check=False,
    )
    if process.returncode == errors.ExitCode.BAD_CONFIG:
        raise BadConfig("the deployment's settings are refused at synth", value=process.stderr.strip().splitlines()[-8:])
    if process.returncode:
        raise Defect("the CDK app cannot be synthesized", value=process.stderr.strip().splitlines()[-20:])
    stamp.write_text(fingerprint)
    return folder


def read_stack(folder: Path) -> LocalStack:
    """Read what `synthesize` wrote.

    Raises:
        Defect: the templates hold something that cannot be resolved, or not exactly one state machine and lock table.
    """
    stacks = Stacks.read(folder)
    machines = stacks.of_type("AWS::StepFunctions::StateMachine")
    # Others look after executions; the one that submits jobs runs the stages.
    running_stages = [one for one in machines if "batch:submitJob" in json.dumps(_definition(one))]
    machine = _only("state machine that submits jobs", running_stages)
    definition = _definition(machine)
    buckets = [resource for resource in stacks.of_type("AWS::S3::Bucket") if resource.name in json.dumps(definition)]
    table = _only("lock table", [*stacks.of_type("AWS::DynamoDB::Table"), *stacks.of_type("AWS::DynamoDB::GlobalTable")])
    return LocalStack(
        state_machine=machine.name,
        definition=json.dumps(definition),
        role_arn=machine.properties["RoleArn"],
        bucket=_only("bucket in the state machine's definition", buckets).name,
        table={
            "TableName": table.name,
            "KeySchema": table.properties["KeySchema"],
            "AttributeDefinitions": table.properties["AttributeDefinitions"],
            "BillingMode": "PAY_PER_REQUEST",
        },
        topics=tuple(resource.name for resource in stacks.of_type("AWS::SNS::Topic")),
        job_definitions=tuple(
            JobDefinition.parse(resource.name, resource.properties) for resource in stacks.of_type("AWS::Batch::JobDefinition")
        ),
        queues=tuple(
            JobQueue(name=resource.name, fair_share="SchedulingPolicyArn" in resource.properties)
            for resource in stacks.of_type("AWS::Batch::JobQueue")
        ),
        watches=tuple(
            LocalWatch(state_machine=one.name, definition=json.dumps(_definition(one)))
            for one in machines
            if machine_arn(one.name) in _started_by_aborts(stacks)
        ),
    )


def _started_by_aborts(stacks: Stacks) -> set[str]:
    """What EventBridge's rules do when an execution is aborted, as ARNs; topics among them."""
    return {
        target["Arn"]
        for rule in stacks.of_type("AWS::Events::Rule")
        if "ABORTED" in rule.properties["EventPattern"]["detail"].get("status", ())
        for target in rule.properties["Targets"]
    }


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of a template: its name, given or made of its path, and its properties without references."""

    name: str
    properties: dict[str, Any]


NAME_PROPERTIES = {
    "AWS::S3::Bucket": "BucketName",
    "AWS::DynamoDB::Table": "TableName",
    "AWS::DynamoDB::GlobalTable": "TableName",
    "AWS::SNS::Topic": "TopicName",
    "AWS::Batch::JobQueue": "JobQueueName",
    "AWS::Batch::JobDefinition": "JobDefinitionName",
    "AWS::StepFunctions::StateMachine": "StateMachineName",
}
ARNS = {
    "AWS::S3::Bucket": "arn:aws:s3:::{name}",
    "AWS::DynamoDB::Table": "arn:aws:dynamodb:{region}:{account}:table/{name}",
    "AWS::DynamoDB::GlobalTable": "arn:aws:dynamodb:{region}:{account}:table/{name}",
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
    """

    def __init__(self, templates: Mapping[str, dict[str, Any]]) -> None:
        self._templates = templates
        self._exports = {
            json.dumps(output["Export"]["Name"]): (stack, output["Value"])
            for stack, template in templates.items()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }

    @classmethod
    def read(cls, folder: Path) -> Stacks:
        """The stacks of a cloud assembly."""
        names = {path.name.removesuffix(".template.json"): path for path in folder.glob("*.template.json")}
        return cls({name: json.loads(path.read_text()) for name, path in names.items()})

    def of_type(self, kind: str) -> list[Resource]:
        return [
            Resource(self._name(stack, logical_id), self.resolve(stack, resource.get("Properties", {})))
            for stack, template in self._templates.items()
            for logical_id, resource in template.get("Resources", {}).items()
            if resource["Type"] == kind
        ]

    def resolve(self, stack: str, value: Any) -> Any:
        """The value with every intrinsic function replaced by what it stands for."""
        if isinstance(value, list):
            return [inner for inner in (self.resolve(stack, inner) for inner in value) if inner is not None]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            [(function, argument)] = value.items()
            if function == "Ref" or function.startswith("Fn::"):
                return self._call(stack, function, argument)
        resolved = {key: self.resolve(stack, inner) for key, inner in value.items()}
        # AWS::NoValue removes the property.
        return {key: inner for key, inner in resolved.items() if inner is not None or value[key] is None}

    def _call(self, stack: str, function: str, argument: Any) -> Any:
        if function == "Ref":
            return self._ref(stack, argument)
        if function == "Fn::GetAtt":
            logical_id, attribute = argument.split(".", 1) if isinstance(argument, str) else argument
            return self._attribute(stack, logical_id, attribute)
        if function == "Fn::Sub":
            return self._substitute(stack, argument)
        if function == "Fn::ImportValue":
            exporter, value = self._exports[json.dumps(argument)]
            return self.resolve(exporter, value)
        arguments = self.resolve(stack, argument)
        if function == "Fn::Join":
            return arguments[0].join(map(str, arguments[1]))
        if function == "Fn::Select":
            return arguments[1][int(arguments[0])]
        if function == "Fn::Split":
            return arguments[1].split(arguments[0])
        if function == "Fn::GetAZs":
            return [f"{REGION}{letter}" for letter in "abc"]
        raise Defect("the template uses a function that the local endpoint does not know", value=function)

    def _ref(self, stack: str, target: str) -> Any:
        if target == "AWS::NoValue":
            return None
        if target in PSEUDO_PARAMETERS:
            return PSEUDO_PARAMETERS[target]
        if target in ("AWS::StackName", "AWS::StackId"):
            return stack
        template = self._templates[stack]
        if target in template.get("Parameters", {}):
            return template["Parameters"][target].get("Default", target)
        kind = template["Resources"][target]["Type"]
        return self._arn(stack, target) if kind in REF_IS_ARN else self._name(stack, target)

    def _attribute(self, stack: str, logical_id: str, attribute: str) -> str:
        if attribute.endswith("Arn"):
            return self._arn(stack, logical_id)
        if attribute.endswith("Name"):
            return self._name(stack, logical_id)
        return f"{logical_id}.{attribute}"

    def _substitute(self, stack: str, argument: Any) -> str:
        text, values = (argument, {}) if isinstance(argument, str) else argument

        def replacement(match: re.Match[str]) -> str:
            name = match[1]
            if name.startswith("!"):
                return f"${{{name[1:]}}}"
            if name in values:
                return str(self.resolve(stack, values[name]))
            if "." in name:
                logical_id, attribute = name.split(".", 1)
                return self._attribute(stack, logical_id, attribute)
            return str(self._ref(stack, name))

        return re.sub(r"\$\{([^}]+)\}", replacement, text)

    def _name(self, stack: str, logical_id: str) -> str:
        resource = self._templates[stack]["Resources"][logical_id]
        given = resource.get("Properties", {}).get(NAME_PROPERTIES.get(resource["Type"], ""))
        if given is not None:
            return str(self.resolve(stack, given))
        # The path in the construct tree is what people know it by; valid as a bucket's name, too.
        path = resource.get("Metadata", {}).get("aws:cdk:path", f"{stack}/{logical_id}").removesuffix("/Resource")
        return re.sub(r"[^a-z0-9-]+", "-", path.lower()).strip("-")[:63] if resource["Type"] in NAME_PROPERTIES else logical_id

    def _arn(self, stack: str, logical_id: str) -> str:
        kind = self._templates[stack]["Resources"][logical_id]["Type"]
        service = kind.split("::")[1].lower()
        pattern: str = ARNS.get(kind, "arn:aws:" + service + ":{region}:{account}:{name}")
        return pattern.format(region=REGION, account=ACCOUNT, name=self._name(stack, logical_id))


def _definition(machine: Resource) -> Any:
    text = machine.properties["DefinitionString"]
    for key, value in machine.properties.get("DefinitionSubstitutions", {}).items():
        text = text.replace(f"${{{key}}}", str(value))
    return json.loads(text)


def _only(what: str, found: list[Resource]) -> Resource:
    if len(found) != 1:
        names = [item.name for item in found]
        raise Defect(f"the templates hold {len(found)} resources where one is expected: {what}", value=names)
    return found[0]


def synth_sources() -> list[Path]:
    """Every file of ours that synth reads; its context is given."""
    sources = [*Path(infra.__file__).parent.glob("*.py"), *ENVIRONMENTS.glob("*.yaml")]
    return sorted(
        [*sources, *(Path(str(module.__file__)) for module in (config, console, contract, cost, errors, places, prices))]
    )


def _synth_fingerprint(context: Mapping[str, Any]) -> str:
    """Changes with everything that the templates depend on."""
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    for path in synth_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(metadata.version("aws-cdk-lib").encode())
    return digest.hexdigest()
