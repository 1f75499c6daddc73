"""Batch job definitions, queues and retry rules as the synthesized template states them, in the form the process runner uses.

Reads CloudFormation properties (`AWS::Batch::JobDefinition`, `AWS::Batch::JobQueue`, names already resolved) and the same
structures from a SubmitJob request; both spell the same thing, one in PascalCase, the other in camelCase.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REGION = "us-east-1"
ACCOUNT = "123456789012"


class ClientError(Exception):
    """A request that AWS Batch refuses with `ClientException`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRule:
    """One entry of `evaluateOnExit`. Patterns that are given must all match; `*` stands at the end only
    (https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html)."""

    action: str
    on_exit_code: str | None = None
    on_reason: str | None = None
    on_status_reason: str | None = None

    def __post_init__(self) -> None:
        if self.action.upper() not in ("RETRY", "EXIT"):
            raise ClientError(f"evaluateOnExit action must be RETRY or EXIT, found {self.action}")
        texts = r"[A-Za-z0-9.:\s]{0,511}\*?"
        for pattern, form in ((self.on_exit_code, r"[0-9]{0,511}\*?"), (self.on_reason, texts), (self.on_status_reason, texts)):
            if pattern is not None and not re.fullmatch(form, pattern):
                raise ClientError(f"evaluateOnExit takes {form} with an asterisk at the end only, found {pattern}")

    def matches(self, exit_code: int | None, reason: str, status_reason: str) -> bool:
        return (
            _matches(self.on_exit_code, "" if exit_code is None else str(exit_code))
            and _matches(self.on_reason, reason)
            and _matches(self.on_status_reason, status_reason)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStrategy:
    """How many attempts a job has and which failures deserve another one."""

    attempts: int = 1
    rules: tuple[ExitRule, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 10:
            raise ClientError(f"attempts must be 1 to 10, found {self.attempts}")
        if len(self.rules) > 5:
            raise ClientError(f"evaluateOnExit has at most 5 entries, found {len(self.rules)}")

    def again(self, exit_code: int | None, reason: str, status_reason: str) -> bool:
        """Whether a failed attempt deserves another. The first rule that matches decides; none matches: yes.

        Args:
            exit_code: of the main container; None when its host went away.
            reason: the container's, e.g. `OutOfMemoryError: ...`.
            status_reason: the attempt's, e.g. `Host EC2 (instance i-...) terminated.`.
        """
        for rule in self.rules:
            if rule.matches(exit_code, reason, status_reason):
                return rule.action.upper() == "RETRY"
        return True

    @classmethod
    def parse(cls, properties: Mapping[str, Any]) -> RetryStrategy:
        lowered = camel(properties)
        rules = tuple(
            ExitRule(
                action=rule["action"],
                on_exit_code=rule.get("onExitCode"),
                on_reason=rule.get("onReason"),
                on_status_reason=rule.get("onStatusReason"),
            )
            for rule in lowered.get("evaluateOnExit", ())
        )
        if rules and "attempts" not in lowered:
            raise ClientError("evaluateOnExit needs attempts")
        return cls(attempts=int(lowered.get("attempts", 1)), rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What runs on one node."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, properties: Mapping[str, Any]) -> Container:
        lowered = camel(properties)
        return cls(command=tuple(lowered.get("command", ())), environment=environment_of(lowered.get("environment", ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDefinition:
    """One revision of a job definition.

    Attributes:
        containers: one per node; a single-container definition has one.
        multinode: a gang even when it has one node.
        timeout_seconds: per attempt; None: unlimited.
        priority: within the job's share.
    """

    name: str
    containers: tuple[Container, ...]
    multinode: bool = False
    main_node: int = 0
    revision: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    retry: RetryStrategy = RetryStrategy()
    timeout_seconds: int | None = None
    priority: int | None = None

    @property
    def arn(self) -> str:
        return f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition/{self.name}:{self.revision}"

    @classmethod
    def parse(cls, name: str, properties: Mapping[str, Any]) -> JobDefinition:
        """From the resolved properties of an `AWS::Batch::JobDefinition`."""
        multinode = properties["Type"] == "multinode"
        timeout = camel(properties.get("Timeout", {})).get("attemptDurationSeconds")
        priority = properties.get("SchedulingPriority")
        if multinode:
            nodes = properties["NodeProperties"]
            containers, main_node = _node_containers(nodes), int(camel(nodes).get("mainNode", 0))
        else:
            containers, main_node = (Container.parse(properties["ContainerProperties"]),), 0
        return cls(
            name=name,
            containers=containers,
            multinode=multinode,
            main_node=main_node,
            parameters=dict(properties.get("Parameters", {})),
            retry=RetryStrategy.parse(properties.get("RetryStrategy", {})),
            timeout_seconds=None if timeout is None else int(timeout),
            priority=None if priority is None else int(priority),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueue:
    """A job queue; `fair_share` says whether it has a scheduling policy."""

    name: str
    fair_share: bool

    @property
    def arn(self) -> str:
        return f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/{self.name}"


def environment_of(entries: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Batch's list of {name, value} as a dictionary."""
    return {entry["name"]: entry["value"] for entry in map(camel, entries)}


def camel(value: Any) -> Any:
    """The same structure with every key's first letter lowered: CloudFormation's spelling as the API's."""
    if isinstance(value, Mapping):
        return {key[:1].lower() + key[1:]: camel(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [camel(inner) for inner in value]
    return value


def _matches(pattern: str | None, text: str) -> bool:
    if pattern is None:
        return True
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def _node_containers(properties: Mapping[str, Any]) -> tuple[Container, ...]:
    lowered = camel(properties)
    count = int(lowered["numNodes"])
    ranges = []
    for entry in lowered["nodeRangeProperties"]:
        first, separator, last = entry["targetNodes"].partition(":")
        low = int(first or 0)
        high = (int(last) if last else count - 1) if separator else low
        ranges.append((low, high, Container.parse(entry["container"])))
    containers = []
    for node in range(count):
        covering = [(high - low, container) for low, high, container in ranges if low <= node <= high]
        if not covering:
            raise ClientError(f"node {node} is in no node range")
        # Of nested ranges the inner one holds.
        containers.append(min(covering, key=lambda item: item[0])[1])
    return tuple(containers)
