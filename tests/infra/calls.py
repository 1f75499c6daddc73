"""Calls of AWS services as IAM sees them: actions on resources, read off the requests that reach the local endpoint;
and what a role may do, by its policies in the synthesized templates.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.responses import ACTION_MAP

from infra.local.definitions import ACCOUNT, REGION
from infra.templates import Stacks
from tests.chain.front import Request
from tests.engine import CALLER

APPLICATION = re.compile(r"\bapp/job-(?P<stage>\w+)")
"""In the user agent of a job's requests, where its environment has AWS_SDK_UA_APP_ID = `job-STAGE`."""

MACHINE = "state machine"
WRITES = ("Put", "Delete", "Abort", "Update", "Submit", "Terminate", "Publish", "Tag")


@dataclass(frozen=True, order=True)
class Call:
    """One call of an AWS service.

    Attributes:
        caller: a stage, or MACHINE.
        action: as IAM names it, `s3:PutObject`.
        resource: its ARN, or `*` for an action that knows no resources.
    """

    caller: str
    action: str
    resource: str

    @property
    def writes(self) -> bool:
        return self.action.partition(":")[2].startswith(WRITES)


@dataclass
class Recorder:
    """A disturbance of tests.chain.front that disturbs nothing.

    Attributes:
        cluster: name of the cluster that Batch would make, in place of the local one.
    """

    cluster: str
    calls: set[Call] = field(default_factory=set)

    def __call__(self, request: Request) -> Iterable[bytes] | None:
        caller = self._caller(request)
        if caller is not None:
            self.calls |= {Call(caller, action, resource) for action, resource in asked(request, self.cluster)}
        return None

    def _caller(self, request: Request) -> str | None:
        of_job = APPLICATION.search(request.environ.get("HTTP_USER_AGENT", ""))
        if of_job:
            return of_job["stage"]
        return MACHINE if request.environ.get(f"HTTP_{CALLER.upper().replace('-', '_')}") else None


def asked(request: Request, cluster: str) -> Iterator[tuple[str, str]]:
    """Actions and resources of one request.

    Raises:
        AssertionError: a request of which nothing is known here.
    """
    if request.service == "s3":
        yield from _asked_of_s3(request)
        return
    if not request.service:
        # A container asks for its own metadata; no permission is needed.
        return
    body = _body(request)
    arn = f"arn:aws:{{}}:{REGION}:{ACCOUNT}:{{}}".format
    operation = request.target.rpartition(".")[2]
    if request.service == "batch":
        yield from _asked_of_batch(request.path, json.loads(body), arn)
    elif request.service == "ecs":
        for resource in json.loads(body).get("containerInstances", json.loads(body).get("tasks")):
            yield f"ecs:{operation}", resource.replace("/local/", f"/{cluster}/")
    elif request.service == "dynamodb":
        yield f"dynamodb:{operation}", arn("dynamodb", f"table/{json.loads(body)['TableName']}")
    elif request.service == "states":
        yield f"states:{operation}", json.loads(body)["executionArn"]
    elif request.service == "sns":
        [action], [topic] = (parse_qs(body.decode())[key] for key in ("Action", "TopicArn"))
        yield f"sns:{action}", topic
    else:
        raise AssertionError(f"a request to {request.service}")


def _asked_of_batch(path: str, body: dict[str, Any], arn: Any) -> Iterator[tuple[str, str]]:
    operation = path.rpartition("/")[2]
    if operation == "describejobs":
        yield "batch:DescribeJobs", "*"
    elif operation == "terminatejob":
        yield "batch:TerminateJob", arn("batch", f"job/{body['jobId']}")
    elif operation == "submitjob":
        yield "batch:SubmitJob", body["jobDefinition"]
        yield "batch:SubmitJob", body["jobQueue"]
        if body.get("tags"):
            yield "batch:TagResource", arn("batch", "job/new")
    else:
        raise AssertionError(f"a request to Batch: {path}")


def _asked_of_s3(request: Request) -> Iterator[tuple[str, str]]:
    bucket, _, key = unquote(request.path).lstrip("/").partition("/")
    query = parse_qs(request.environ.get("QUERY_STRING", ""), keep_blank_values=True)
    known = ACTION_MAP["KEY" if key else "BUCKET"][request.method]
    action = next((action for word, action in known.items() if word in query), None) or known["DEFAULT"]
    arn = f"arn:aws:s3:::{bucket}" + f"/{key}" * bool(key)
    # Which is how IAM names HeadBucket; moto names all others as IAM does.
    yield f"s3:{'ListBucket' if action == 'HeadBucket' else action}", arn
    if source := request.environ.get("HTTP_X_AMZ_COPY_SOURCE"):
        yield "s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/')}"
    if "HTTP_X_AMZ_TAGGING" in request.environ:
        yield "s3:PutObjectTagging", arn
    if "HTTP_X_AMZ_ACL" in request.environ:
        yield "s3:PutObjectAcl", arn


def _body(request: Request) -> bytes:
    """The request's body, which stays there for the service."""
    data: bytes = request.environ["wsgi.input"].read(int(request.environ.get("CONTENT_LENGTH") or 0))
    request.environ["wsgi.input"] = io.BytesIO(data)
    return data


# ------------------------------------------------------------------------------------------------------------- policies


@dataclass(frozen=True)
class Role:
    """A role of the deployment: who may assume it, and its policies' statements."""

    name: str
    service: str
    statements: tuple[dict[str, Any], ...]

    def may(self, action: str, resource: str) -> bool:
        return allows(self.statements, action, resource)

    def actions(self) -> set[str]:
        return {action for statement in self.statements for action in _list(statement["Action"])}


def allows(statements: Iterable[Mapping[str, Any]], action: str, resource: str) -> bool:
    """Whether policies of these statements allow a call: one allows it, and none denies it. Moto decides."""
    policy = {"Version": "2012-10-17", "Statement": [_escaped(statement) for statement in statements]}
    return IAMPolicy(json.dumps(policy)).is_action_permitted(action, resource) is PermissionResult.PERMITTED


def _escaped(statement: Mapping[str, Any]) -> dict[str, Any]:
    """Moto takes resources for regular expressions, in which it replaces the asterisk only."""
    patterns = {key: [re.escape(each).replace(r"\*", "*") for each in _list(statement[key])] for key in ("Action", "Resource")}
    return {**statement, **patterns}


def _list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


class Roles:
    """The roles of a synthesized deployment, every reference resolved as the local endpoint resolves it."""

    def __init__(self, templates: Path) -> None:
        self.stacks = Stacks.read(templates)
        statements: dict[str, list[dict[str, Any]]] = {}
        for policy in self.stacks.of_type("AWS::IAM::Policy"):
            for name in policy.properties["Roles"]:
                statements.setdefault(name, []).extend(policy.properties["PolicyDocument"]["Statement"])
        self.by_name: dict[str, Role] = {}
        for role in self.stacks.of_type("AWS::IAM::Role"):
            inline = [each for policy in role.properties.get("Policies", ()) for each in policy["PolicyDocument"]["Statement"]]
            [trust] = role.properties["AssumeRolePolicyDocument"]["Statement"]
            granted = (*statements.get(role.name, ()), *inline)
            self.by_name[role.name] = Role(role.name, trust["Principal"]["Service"], granted)
        self.of_stage, self.execution = self._of_jobs()
        [machine] = [
            one for one in self.stacks.of_type("AWS::StepFunctions::StateMachine") if "submitJob" in json.dumps(one.properties)
        ]
        self.machine_arn = f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:{machine.name}"
        self.machine = self.by_arn(machine.properties["RoleArn"])

    def by_arn(self, arn: str) -> Role:
        return self.by_name[arn.rpartition("/")[2]]

    def of(self, caller: str) -> Role:
        return self.machine if caller == MACHINE else self.of_stage[caller]

    def refused(self, calls: Iterable[Call]) -> list[Call]:
        """Calls that IAM would have refused; those of ECS apart where the cluster is the local one, which Batch did not name."""
        return sorted(
            call for call in calls if "/local/" not in call.resource and not self.of(call.caller).may(call.action, call.resource)
        )

    def _of_jobs(self) -> tuple[dict[str, Role], Role]:
        """The role of each stage, the same in all its job definitions, and the one under which all containers are started."""
        of_stage: dict[str, set[str]] = {}
        execution = set()
        for definition in self.stacks.of_type("AWS::Batch::JobDefinition"):
            nodes = definition.properties.get("NodeProperties", {}).get("NodeRangeProperties", ())
            for container in [one["Container"] for one in nodes] or [definition.properties["ContainerProperties"]]:
                stage = next(one["Value"] for one in container["Environment"] if one["Name"] == "TRNPIPE_STAGE")
                of_stage.setdefault(stage, set()).add(container["JobRoleArn"])
                execution.add(container["ExecutionRoleArn"])
        [started_under] = execution
        roles = {}
        for stage, arns in of_stage.items():
            [arn] = arns
            roles[stage] = self.by_arn(arn)
        return roles, self.by_arn(started_under)
