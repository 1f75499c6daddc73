"""The target of the operator commands: a deployment in an AWS account, or the local run of a state folder.

Both run the same state machine, whose definition holds everything else that a command needs: the bucket, the queues, the
deployment's own configuration and limits. AWS errors become our own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError

from pipeline.config import Deployment
from pipeline.errors import BadConfig, BadData, MissingInput, ServiceRefused, Transient
from pipeline.operate import aws_console
from pipeline.operate.endpoint import NAME, only_environment, read_endpoint
from pipeline.operate.run_files import Listed, LocalFiles, RunFiles
from pipeline.store.aws_errors import AwsError, classify_aws_error, error_code, error_text
from pipeline.store.retries import ABSENT
from pipeline.store.s3 import split

CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 8}, connect_timeout=10, read_timeout=30)
LOCAL_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=5, read_timeout=60)
"""The local endpoint does not throttle; if it does not answer, it has ended."""

STATE_MACHINE_OUTPUT = "StateMachineArn"
LOG_GROUP_OUTPUT = "JobLogGroup"
"""Outputs of the pipeline's stack (infra/stacks.py)."""


class EndpointGone(Transient):
    """The local run ended during a request to it, and all its jobs with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The parts of the state machine's definition that the commands need.

    Attributes:
        bucket: name of the bucket of runs.
        queues: ARNs of the queues that its jobs go to.
        deployment: the deployment's own configuration and limits.
    """

    bucket: str
    queues: tuple[str, ...]
    deployment: Deployment

    @classmethod
    def parse(cls, definition: str) -> Machine:
        """Read a definition that infra/workflow/machine.py made.

        Raises:
            BadData: the definition of another state machine.
        """
        try:
            states = json.loads(definition)["States"].values()
            submits = [state["Parameters"] for state in states if "submitJob" in str(state.get("Resource"))]
            [written] = [
                state["Parameters"] for state in states if "deployment" in str(state.get("Parameters", {}).get("Body", ""))
            ]
            return cls(
                bucket=str(written["Bucket"]),
                queues=tuple(dict.fromkeys(str(submit["JobQueue"]) for submit in submits)),
                deployment=Deployment.model_validate(written["Body"]["deployment"]),
            )
        except (ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadData(
                "this version of trnpipe did not deploy the state machine",
                value=f"{type(error).__name__}: {error}".splitlines()[0],
                rule="a state writes input.json with the deployment's configuration, others submit jobs to its queues",
                remedy="name the right --stack, or deploy it with this version",
            ) from error


@dataclass(eq=False)
class Site:
    """One deployment, or one local run; use `open_site`.

    Attributes:
        machine_arn: ARN of the state machine.
        stack: name of the pipeline's stack; empty of a local run.
        log_group: of the jobs; None of a local run.
        state: the local run's state folder, None for an account.
        region: of its services; None: that of the environment or the AWS configuration.
    """

    machine_arn: str
    stack: str = ""
    log_group: str | None = None
    state: Path | None = None
    region: str | None = None
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def option(self) -> str:
        """The command-line option that names it."""
        return f"--state {self.state}" if self.state else f"--stack {self.stack}"

    @cached_property
    def machine(self) -> Machine:
        answer = self.ask("the state machine", "stepfunctions", "describe_state_machine", stateMachineArn=self.machine_arn)
        return Machine.parse(answer["definition"])

    def client(self, service: str) -> Any:
        """A client of one service; may be used from several threads."""
        if service not in self._clients:
            with self.asking(service):
                self._clients[service] = boto3.session.Session(region_name=self.region).client(
                    service, config=LOCAL_CONFIG if self.state else CONFIG
                )
        return self._clients[service]

    def files(self, run: str) -> RunFiles:
        """A run's folder."""
        if self.state is not None:
            return LocalFiles(self.state / "bucket" / "runs" / run)
        return S3Files(self, f"s3://{self.machine.bucket}/runs/{run}")

    def execution_arn(self, name: str) -> str:
        return self.machine_arn.replace(":stateMachine:", ":execution:", 1) + f":{name}"

    def console_link(self, execution_arn: str) -> str | None:
        """Return the URL that shows the execution in a browser; None for a local run."""
        return None if self.state else aws_console.execution(execution_arn.split(":")[3], execution_arn)

    def log_of(self, stream: str) -> str:
        """Return where to read a job's output."""
        return str(self.state / "logs" / stream) if self.state else f"{self.log_group or 'log group unknown'}, stream {stream}"

    def ask(self, what: str, service: str, operation: str, absent: Collection[str] = (), **parameters: Any) -> Any:
        """Make one call and return its answer, None where the error's code is one of `absent`; raises as `asking`.

        Args:
            what: the request's subject.
            operation: the client's method.
        """
        with self.asking(what):
            try:
                return getattr(self.client(service), operation)(**parameters)
            except ClientError as error:
                if error_code(error) not in absent:
                    raise
                return None

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Turn what the AWS library raises into our errors.

        Args:
            what: the request's subject.

        Raises:
            BadConfig: no region, no credentials or none that work.
            ServiceRefused: access denied, or a request that is refused otherwise.
            Transient: still throttled or unreachable after the library's retries.
            EndpointGone: the local run has ended.
        """
        try:
            yield
        except (ClientError, BotoCoreError, OSError) as error:
            raise self._explained(error, what) from error

    def _explained(self, error: Exception, what: str) -> Exception:
        operation = getattr(error, "operation_name", "the call")
        value = f"{operation} for {what}: {error_text(error)}"
        match classify_aws_error(error):
            case AwsError.NO_CREDENTIALS | AwsError.SETUP:
                return BadConfig(
                    "no AWS region or credentials",
                    value=error,
                    rule="as for the AWS CLI: environment, `aws configure`, AWS_PROFILE, or a role",
                    remedy="set AWS_REGION and credentials (`aws sso login`, `aws configure`), or name a local run with --state",
                )
            case AwsError.CREDENTIALS:
                return BadConfig(
                    "AWS does not accept the credentials",
                    value=value,
                    rule="valid credentials of the deployment's account",
                    remedy="renew them (`aws sso login`, `aws configure`), or set AWS_PROFILE",
                )
            case AwsError.DENIED:
                return ServiceRefused(
                    "access is denied",
                    value=value,
                    rule="your role may call this operation on the deployment's resources",
                    remedy=f"grant it {operation}, or set AWS_PROFILE to a role that has it",
                )
            case AwsError.BUSY:
                return Transient("AWS answered with an error", value=value, remedy="a new attempt may succeed")
            case AwsError.REFUSED:
                return ServiceRefused("AWS refused the request", value=value, remedy="see the message")
            case AwsError.UNREACHABLE if self.state is not None:
                return EndpointGone(
                    "the local run does not answer",
                    value=f"{self.state / NAME}: {error}",
                    rule="a local run lasts as long as its `trnpipe local`",
                    remedy=f"`trnpipe runs --state {self.state}` shows its outcome; `trnpipe local --run ID` resumes it",
                )
            case AwsError.UNREACHABLE:
                return Transient("AWS could not be reached", value=f"{what}: {error}", remedy="a new attempt may succeed")


@dataclass(frozen=True, slots=True)
class S3Files:
    """A run's folder on S3.

    Attributes:
        root: s3://BUCKET/runs/RUN_ID.
    """

    site: Site
    root: str

    def read(self, name: str, last: int | None = None) -> bytes | None:
        uri = self._uri_of(name)
        bucket, key = split(uri)
        span = {} if last is None else {"Range": f"bytes=-{last}"}
        with self.site.asking(uri):  # the body, too, is still on its way
            answer = self.site.ask(uri, "s3", "get_object", ABSENT, Bucket=bucket, Key=key, **span)
            return None if answer is None else bytes(answer["Body"].read())

    def listed(self, prefix: str) -> list[Listed]:
        uri = self._uri_of(prefix)
        bucket, start = split(uri)
        with self.site.asking(uri):
            pages = self.site.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=start)
            return [
                Listed(
                    f"s3://{bucket}/{item['Key']}".removeprefix(f"{self.root}/"), item["LastModified"].timestamp(), item["ETag"]
                )
                for item in pages.search("Contents || `[]`")
            ]

    def as_typed(self, text: str) -> str:
        return text

    def _uri_of(self, name: str) -> str:
        return f"{self.root}/{name.lstrip('/')}"


@contextmanager
def open_site(stack: str, state: Path | None) -> Iterator[Site]:
    """Yield the deployment of a stack, or the local run of a state folder, whose key then signs this process's requests.

    Raises:
        MissingInput: no such stack, or no local run in progress in the folder.
        BadConfig: a stack of something else; see also `Site.asking`.
    """
    if state is not None:
        if (record := read_endpoint(state)) is None:
            raise MissingInput(
                "no local run is in progress in this state folder",
                value=state,
                rule=f"`trnpipe local` writes {NAME} there while it runs",
                remedy=f"start one with `trnpipe local`, or see earlier ones with `trnpipe runs --state {state}`",
            )
        with only_environment(record.environment):
            yield Site(record.state_machine, state=state)
    else:
        outputs = stack_outputs(Site(""), stack)
        if STATE_MACHINE_OUTPUT not in outputs:
            raise BadConfig(
                "the stack is not a pipeline",
                value=f"{stack}: outputs {', '.join(sorted(outputs)) or 'none'}",
                rule=f"the pipeline's stack has the output {STATE_MACHINE_OUTPUT}",
                remedy="name the stack that is called as `name` in cdk.json, without -data",
            )
        yield Site(outputs[STATE_MACHINE_OUTPUT], stack=stack, log_group=outputs.get(LOG_GROUP_OUTPUT))


def stack_outputs(site: Site, stack: str) -> dict[str, str]:
    """Return the outputs of a deployed stack: key -> value.

    Raises:
        MissingInput: no such stack; see also `Site.asking`.
    """
    with site.asking(f"the stack {stack}"):
        client = site.client("cloudformation")
        try:
            [described] = client.describe_stacks(StackName=stack)["Stacks"]
        except ClientError as error:
            # CloudFormation has no error code for it.
            if error.response["Error"]["Code"] != "ValidationError" or "does not exist" not in str(error):
                raise
            raise MissingInput(
                "there is no such stack",
                value=f"{stack} in {client.meta.region_name}",
                rule="the name of a deployed pipeline, in the region and account of your credentials",
                remedy="set AWS_REGION and AWS_PROFILE, name another with --stack, or a local run with --state",
            ) from error
    return {output["OutputKey"]: output["OutputValue"] for output in described.get("Outputs", ())}
