"""How the doctor asks an account, and what it says of the answers: findings, checks, and the calls that checks may make.

A check is a generator over answers: it asks (`service`, `Operation`, parameters, all spelled as in the API) and yields findings.
It states the calls that it needs, and may make no others, so that the list of permissions is complete.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import boto3
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound

from infra.doctor.blueprint import Blueprint
from infra.settings import Settings
from pipeline.errors import Defect
from pipeline.store.aws_errors import AwsError, classify_aws_error, error_code, error_message, error_text

SIDE_BY_SIDE = 8
HOME_REGION = "us-east-1"
"""Always enabled: where the account is asked about itself, since a region that is not enabled knows none of its keys."""

HOME_SERVICES = frozenset({"account", "sts"})

IAM_PREFIX = {"service-quotas": "servicequotas", "stepfunctions": "states"}
IAM_ACTION = {"budgets:DescribeBudgets": "budgets:ViewBudget", "s3:HeadBucket": "s3:ListBucket"}
IAM_ACTION |= {"s3:GetBucketEncryption": "s3:GetEncryptionConfiguration"}
"""Where the permission is called otherwise than the operation (Service Authorization Reference)."""


class Level(str, Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One answer to one question.

    Attributes:
        level: a problem stops a run or a deployment; a warning may, or hides an outcome from the operator.
        what: the finding in one sentence.
        value: what was found.
        rule: what it should be, and why.
        remedy: an exact command, a setting or a link.
        area: heading that it stands under; given by the check.
        transient: the question could not be asked now.
    """

    level: Level
    what: str
    value: str = ""
    rule: str = ""
    remedy: str = ""
    area: str = ""
    transient: bool = False


def ok(what: str, value: object = "") -> DoctorFinding:
    return DoctorFinding(level=Level.OK, what=what, value=str(value))


def warning(what: str, *, value: object = "", rule: str = "", remedy: str = "") -> DoctorFinding:
    return DoctorFinding(level=Level.WARNING, what=what, value=str(value), rule=rule, remedy=remedy)


def problem(what: str, *, value: object = "", rule: str = "", remedy: str = "") -> DoctorFinding:
    return DoctorFinding(level=Level.PROBLEM, what=what, value=str(value), rule=rule, remedy=remedy)


class Denied(Exception):
    """The credentials may not make a call.

    Attributes:
        action: the permission that is missing.
    """

    def __init__(self, action: str) -> None:
        super().__init__(action)
        self.action = action


class NotAuthenticated(Exception):
    """There are no credentials, or AWS does not accept them."""


class Unavailable(Exception):
    """A service did not answer, or asked to be left alone."""


class Refused(Exception):
    """A service answered with an error of its own, which is often the answer to the question.

    Attributes:
        code, message: of the error.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Ask(Protocol):
    """Makes a call and gives its whole answer, pages joined.

    Raises:
        Denied, NotAuthenticated, Unavailable, Refused: as described there.
    """

    def __call__(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]: ...


class Aws:
    """Asks a real account, every question once; safe to use from several threads.

    Args:
        region: where the deployment is or will be.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._answers: dict[str, Future[dict[str, Any]]] = {}
        try:
            self._session = boto3.session.Session(region_name=region)
        except ProfileNotFound as error:
            raise NotAuthenticated(str(error)) from error

    def __call__(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        key = json.dumps([service, operation, parameters], sort_keys=True)
        with self._lock:
            known = key in self._answers
            answer = self._answers.setdefault(key, Future())
        if not known:
            try:
                answer.set_result(self.call(service, operation, **parameters))
            except BaseException as error:  # noqa: BLE001 - raised again by everyone who waits for it
                answer.set_exception(error)
        return answer.result()

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """The same without a memory, for calls that change something or watch it change."""
        try:
            client = self._client(service)
            method = xform_name(operation)
            if client.can_paginate(method):
                return dict(client.get_paginator(method).paginate(**parameters).build_full_result())
            return dict(getattr(client, method)(**parameters))
        except (ClientError, BotoCoreError) as error:
            raise _explained(error, permission(f"{service}:{operation}")) from error

    def _client(self, service: str) -> Any:
        # Making a client is not safe from several threads.
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._session.client(
                    service,
                    region_name=HOME_REGION if service in HOME_SERVICES else self._region,
                    config=Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "max_attempts": 5}),
                )
            return self._clients[service]


def _explained(error: Exception, action: str) -> Exception:
    """What a failed call means to the one who asked.

    Args:
        action: the permission that the call takes.
    """
    match classify_aws_error(error):
        case AwsError.DENIED:
            return Denied(action)
        case AwsError.CREDENTIALS | AwsError.NO_CREDENTIALS:
            return NotAuthenticated(error_text(error))
        case AwsError.BUSY | AwsError.UNREACHABLE:
            return Unavailable(error_text(error))
        case AwsError.REFUSED | AwsError.SETUP:
            return Refused(error_code(error), error_message(error))


def permission(operation: str) -> str:
    """The IAM action behind `service:Operation`."""
    service, _, name = operation.partition(":")
    return IAM_ACTION.get(operation, f"{IAM_PREFIX.get(service, service)}:{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a check looks at.

    Attributes:
        blueprint: what the deployment should be.
        account: the account of the credentials.
        after: whether the deployment should be there already.
    """

    blueprint: Blueprint
    account: str
    after: bool
    ask: Ask

    @property
    def settings(self) -> Settings:
        return self.blueprint.settings

    def seek(self, absent: Sequence[str], service: str, operation: str, **parameters: Any) -> dict[str, Any] | None:
        """The answer of a call; None where an error code says that there is no such thing.

        Args:
            absent: those codes.

        Raises:
            Refused: the service answers with another error.
        """
        try:
            return self.ask(service, operation, **parameters)
        except Refused as refused:
            if refused.code not in absent:
                raise
            return None

    def physical(self, stack: str, kind: str) -> list[str]:
        """Physical ids of a deployed stack's resources of a type.

        Raises:
            Refused: there is no such stack.
        """
        listed = self.ask("cloudformation", "ListStackResources", StackName=stack)["StackResourceSummaries"]
        return [one["PhysicalResourceId"] for one in listed if one["ResourceType"] == kind and "PhysicalResourceId" in one]


Findings = Iterator[DoctorFinding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question with everything that it takes.

    Attributes:
        area: heading of its findings.
        needs: the calls that it may make, as `service:Operation`.
        find: asks and judges.
    """

    area: str
    needs: tuple[str, ...]
    find: Callable[[Subject], Findings]

    def __call__(self, subject: Subject) -> list[DoctorFinding]:
        """The findings, with what stood in their way as the last one.

        Raises:
            NotAuthenticated: the credentials went bad on the way.
        """
        found: list[DoctorFinding] = []

        def ask(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
            if f"{service}:{operation}" not in self.needs:
                raise Defect("a check makes a call that it does not state", value=f"{service}:{operation}")
            return subject.ask(service, operation, **parameters)

        try:
            for finding in self.find(dataclasses.replace(subject, ask=ask)):
                found.append(finding)
        except Denied as denied:
            found.append(
                warning(
                    f"cannot look: needs {denied.action}",
                    rule="doctor only reads; what it may not read it cannot judge",
                    remedy="trnpipe doctor --policy prints the permissions that it takes",
                )
            )
        except Unavailable as error:
            gone = warning("cannot look now: the service does not answer", value=error, remedy="try again")
            found.append(dataclasses.replace(gone, transient=True))
        except Refused as refused:
            found.append(problem("a call was answered with an error", value=refused, remedy="see what the error says"))
        return [dataclasses.replace(finding, area=self.area) for finding in found]


def check(area: str, *needs: str) -> Callable[[Callable[[Subject], Findings]], Check]:
    """Make a generator function a check.

    Args:
        area: heading of its findings.
        needs: the calls that it may make, as `service:Operation`.
    """
    return lambda find: Check(area=area, needs=needs, find=find)


def examine(checks: Sequence[Check], subject: Subject) -> list[DoctorFinding]:
    """Run checks side by side; their findings in the order of the checks.

    Raises:
        NotAuthenticated: the credentials went bad on the way.
    """
    with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE) as pool:
        return [finding for found in pool.map(lambda one: one(subject), checks) for finding in found]


def policy(checks: Iterable[Check], more: Iterable[str] = ()) -> dict[str, Any]:
    """An IAM policy that allows the calls of the checks.

    Args:
        more: further calls, as `service:Operation`.
    """
    actions = {permission(need) for one in checks for need in one.needs} | {permission(need) for need in more}
    statement: Mapping[str, Any] = {"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}
    return {"Version": "2012-10-17", "Statement": [statement]}
