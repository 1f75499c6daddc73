"""The deployment as the local endpoint needs it, from the synthesized templates.

`synthesize` runs the CDK app in a process of its own (the CDK library is large and keeps a Node.js process); `read_stack`
picks out what a run touches: the state machine, job definitions, queues, buckets, the lock table and the topics.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import infra
from infra.cdk_context import CONTEXT_KEY, ENVIRONMENT_KEY, ENVIRONMENTS, read_context
from infra.local.definitions import ACCOUNT, REGION, JobDefinition, JobQueue
from infra.templates import Resource, Stacks
from pipeline import allowed_uris, config, contract, cost, errors, packing
from pipeline.errors import BadConfig, Defect
from pipeline.operate import aws_console


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStack:
    """The part of the deployment that a run uses.

    Attributes:
        state_machine: name of the state machine.
        definition: its definition as JSON text, every reference resolved.
        role_arn: the role it runs under.
        bucket: name of the bucket with runs, registry and data.
        table: the lock table, as arguments of DynamoDB's CreateTable.
        topics: names of SNS topics.
        job_definitions, queues: as the process runner takes them.
        watches: state machines that EventBridge starts with the ARN of an aborted execution (infra/workflow/watches.py): name ->
            definition as JSON text.
    """

    state_machine: str
    definition: str
    role_arn: str
    bucket: str
    table: dict[str, Any]
    topics: tuple[str, ...]
    job_definitions: tuple[JobDefinition, ...]
    queues: tuple[JobQueue, ...]
    watches: Mapping[str, str] = field(default_factory=dict)

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
    return {
        **{key: value for key, value in read_context().items() if key.partition(".")[0] not in (CONTEXT_KEY, ENVIRONMENT_KEY)},
        # Names by construct path, so that names in the state folder are those of the code.
        "aws:cdk:enable-path-metadata": True,
        CONTEXT_KEY: {
            "account": ACCOUNT,
            "region": REGION,
            "zone": f"{REGION}a",
            # Never started here; the settings only ask that it is pinned.
            "ami": "ami-00000000000000000",
            "allowed_nodes": list(allowed_nodes),
            "config": dict(run_config),
            # All stages are processes of this machine.
            "local_paths": True,
            **settings,
        },
    }


def synthesize(folder: Path, context: Mapping[str, Any]) -> Path:
    """Run the CDK app into `folder`, or keep its content when neither the app nor the context has changed.

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
    process = subprocess.run(
        [sys.executable, "-m", "infra.app"],
        cwd=Path(infra.__file__).parent.parent,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))},
            "CDK_OUTDIR": str(folder),
            "CDK_CONTEXT_JSON": json.dumps(context),
            # An end-of-life banner of older Node.js versions would hide what matters.
            "JSII_SILENCE_WARNING_DEPRECATED_NODE_VERSION": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
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
    # The state machine that submits jobs runs the stages; the others watch executions.
    machine = _only("state machine that submits jobs", [one for one in machines if "batch:submitJob" in _definition(one)])
    definition = _definition(machine)
    # What EventBridge's rules do when an execution is aborted, as ARNs; topics among them.
    started_by_aborts = {
        target["Arn"]
        for rule in stacks.of_type("AWS::Events::Rule")
        if "ABORTED" in rule.properties["EventPattern"]["detail"].get("status", ())
        for target in rule.properties["Targets"]
    }
    table = _only("lock table", stacks.of_type("AWS::DynamoDB::Table"))
    return LocalStack(
        state_machine=machine.name,
        definition=definition,
        role_arn=machine.properties["RoleArn"],
        bucket=_only(
            "bucket in the state machine's definition",
            [resource for resource in stacks.of_type("AWS::S3::Bucket") if resource.name in definition],
        ).name,
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
        watches={one.name: _definition(one) for one in machines if machine_arn(one.name) in started_by_aborts},
    )


def _definition(machine: Resource) -> str:
    return json.dumps(json.loads(machine.properties["DefinitionString"]))


def _only(what: str, found: list[Resource]) -> Resource:
    if len(found) != 1:
        raise Defect(
            f"the templates hold {len(found)} resources where one is expected: {what}", value=[item.name for item in found]
        )
    return found[0]


def synth_sources() -> list[Path]:
    """Every file of ours that synth reads; its context is given."""
    home = Path(infra.__file__).parent
    folders = (home, home / "constructs", home / "workflow", Path(str(config.__file__)).parent)
    sources = [path for folder in folders for path in folder.glob("*.py")]
    sources += [Path(str(module.__file__)) for module in (aws_console, contract, cost, errors, allowed_uris, packing)]
    return sorted([*sources, *ENVIRONMENTS.glob("*.yaml")])


def _synth_fingerprint(context: Mapping[str, Any]) -> str:
    """Changes with everything that the templates depend on."""
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    for path in synth_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(metadata.version("aws-cdk-lib").encode())
    return digest.hexdigest()
