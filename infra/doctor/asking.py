"""The doctor's calls to an account, and their results: findings, checks, and the calls that each check may make.

A check is a generator: it calls AWS (`service`, `Operation`, parameters, all spelled as in the API) and yields findings.
It states the calls that it needs, and may make no others, so that the list of permissions is complete.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import boto3
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound

from infra.doctor.blueprint import Blueprint
from infra.settings import Settings
from pipeline.errors import Defect
from pipeline.store.aws_errors import AwsError, classify_aws_error, error_code, error_message, error_text

HOME_REGION = "us-east-1"
"""Always enabled: a region that is not enabled knows none of the account's keys, so calls about the account itself go here."""

IAM_PREFIX = {"service-quotas": "servicequotas"}
IAM_ACTION = {
    "budgets:DescribeBudgets": "budgets:ViewBudget",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:GetBucketEncryption": "s3:GetEncryptionConfiguration",
}
"""Permissions whose name differs from the operation's (Service Authorization Reference)."""


Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One answer to one question.

    Attributes:
        level: a problem stops a run or a deployment; a warning may, or hides an outcome from the operator.
        what: the finding in one sentence.
        value: the value in the account.
        rule: the expected value, and why.
        remedy: an exact command, a setting or a link.
        area: heading of the finding; given by the check.
        transient: the service did not answer now.
    """

    level: Level
    what: str
    value: str = ""
    rule: str = ""
    remedy: str = ""
    area: str = ""
    transient: bool = False


def ok(what: str, value: object = "") -> DoctorFinding:
    return DoctorFinding(level="ok", what=what, value=str(value))


def warning(what: str, *, value: object = "", rule: str = "", remedy: str = "", transient: bool = False) -> DoctorFinding:
    return DoctorFinding(level="warning", what=what, value=str(value), rule=rule, remedy=remedy, transient=transient)


def problem(what: str, *, value: object = "", rule: str = "", remedy: str = "") -> DoctorFinding:
    return DoctorFinding(level="problem", what=what, value=str(value), rule=rule, remedy=remedy)


class Denied(Exception):
    """The credentials lack a permission, its only argument."""


class NotAuthenticated(Exception):
    """There are no credentials, or AWS does not accept them."""


class Unavailable(Exception):
    """A service did not answer, or throttled the call."""


class Refused(Exception):
    """A service answered with an error of its own, which is often what a check looks for.

    Attributes:
        code, message: of the error.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Ended(Exception):
    """A check cannot go on: its only argument is the finding that says why."""


Ask = Callable[..., dict[str, Any]]
"""Makes a call (`service`, `Operation`, parameters) and returns its whole answer, pages joined. Raises the errors above."""


class Aws:
    """Calls a real account, and makes every call once; safe to use from several threads.

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
                client = self._client(service)
                method = xform_name(operation)
                if client.can_paginate(method):
                    answer.set_result(dict(client.get_paginator(method).paginate(**parameters).build_full_result()))
                else:
                    answer.set_result(dict(getattr(client, method)(**parameters)))
            except (ClientError, BotoCoreError) as error:
                answer.set_exception(_translated(error, permission(f"{service}:{operation}")))
            except BaseException as error:  # noqa: BLE001 - every thread that waits for the answer raises it again
                answer.set_exception(error)
        return answer.result()

    def _client(self, service: str) -> Any:
        # Making a client is not safe from several threads.
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._session.client(
                    service,
                    region_name=HOME_REGION if service in ("account", "sts") else self._region,
                    config=Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "max_attempts": 5}),
                )
            return self._clients[service]


def _translated(error: Exception, action: str) -> Exception:
    """Translate botocore's error into one of the errors above.

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
    """The deployment and the account that a check compares.

    Attributes:
        blueprint: the deployment as the settings describe it.
        account: the account of the credentials.
        after: whether the deployment should exist already.
    """

    blueprint: Blueprint
    account: str
    after: bool
    ask: Ask

    @property
    def settings(self) -> Settings:
        return self.blueprint.settings

    def seek(self, absent: Sequence[str], service: str, operation: str, **parameters: Any) -> dict[str, Any] | None:
        """Return the answer of a call; None where the error code says that the resource does not exist.

        Args:
            absent: the codes of such errors.

        Raises:
            Refused: the service answers with another error.
        """
        try:
            return self.ask(service, operation, **parameters)
        except Refused as refused:
            if refused.code not in absent:
                raise
            return None

    def require(self, absent: DoctorFinding, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer of a call.

        Args:
            absent: the finding where the service refuses the call, because there is no such resource; gets the refusal as value.

        Raises:
            Ended: the service refuses the call.
        """
        try:
            return self.ask(service, operation, **parameters)
        except Refused as refused:
            raise Ended(dataclasses.replace(absent, value=str(refused))) from refused

    def physical(self, stack: str, kind: str) -> list[str]:
        """Return the physical ids of a deployed stack's resources of a type.

        Raises:
            Refused: there is no such stack.
        """
        listed = self.ask("cloudformation", "ListStackResources", StackName=stack)["StackResourceSummaries"]
        return [one["PhysicalResourceId"] for one in listed if one["ResourceType"] == kind and "PhysicalResourceId" in one]

    def deployed(self, kind: str, service: str, operation: str, parameter: str) -> dict[str, Any]:
        """Describe the pipeline stack's resources of a type; {} where it has none, as nothing named would mean all there are.

        Args:
            parameter: name of the parameter that takes their ids.

        Raises:
            Refused: there is no such stack.
        """
        ids = self.physical(self.blueprint.pipeline_stack, kind)
        return self.ask(service, operation, **{parameter: ids}) if ids else {}


Findings = Iterator[DoctorFinding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the account.

    Attributes:
        area: heading of its findings.
        needs: the calls that it may make, as `service:Operation`.
        find: makes the calls and yields findings.
    """

    area: str
    needs: tuple[str, ...]
    find: Callable[[Subject], Findings]

    def __call__(self, subject: Subject) -> list[DoctorFinding]:
        """Return the findings; a failed call ends the check and is its last finding.

        Raises:
            NotAuthenticated: the credentials expired meanwhile.
        """
        found: list[DoctorFinding] = []

        def ask(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
            if f"{service}:{operation}" not in self.needs:
                raise Defect("a check makes a call that it does not state", value=f"{service}:{operation}")
            return subject.ask(service, operation, **parameters)

        try:
            # Takes them one by one: those before an error stay.
            found.extend(self.find(dataclasses.replace(subject, ask=ask)))
        except Denied as denied:
            found.append(
                warning(
                    f"the check needs the permission {denied}",
                    rule="doctor only reads, and skips what it may not read",
                    remedy="trnpipe doctor --policy prints the permissions that it needs",
                )
            )
        except Unavailable as error:
            found.append(warning("the service does not answer now", value=error, remedy="try again", transient=True))
        except Refused as refused:
            found.append(problem("a call failed", value=refused, remedy="read the error's message"))
        except Ended as ended:
            found.append(ended.args[0])
        return [dataclasses.replace(finding, area=self.area) for finding in found]


def check(area: str, *needs: str) -> Callable[[Callable[[Subject], Findings]], Check]:
    """Make a generator function a check.

    Args:
        area: heading of its findings.
        needs: the calls that it may make, as `service:Operation`.
    """
    return lambda find: Check(area=area, needs=needs, find=find)


def examine(checks: Sequence[Check], subject: Subject) -> list[DoctorFinding]:
    """Run checks in parallel; return their findings in the order of the checks.

    Raises:
        NotAuthenticated: the credentials expired meanwhile.
    """
    with ThreadPoolExecutor(max_workers=8) as pool:
        return [finding for found in pool.map(lambda one: one(subject), checks) for finding in found]


def policy(checks: Iterable[Check], more: Iterable[str] = ()) -> dict[str, Any]:
    """An IAM policy that allows the calls of the checks.

    Args:
        more: further calls, as `service:Operation`.
    """
    actions = {permission(need) for one in checks for need in one.needs} | {permission(need) for need in more}
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}]}
