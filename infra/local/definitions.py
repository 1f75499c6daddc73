"""Batch job definitions, queues and retry rules as the synthesized template states them, in the form the local runner uses.

Reads CloudFormation properties (`AWS::Batch::JobDefinition`, names already resolved) and the retry strategy of a SubmitJob
request; both have the same structure, one in PascalCase, the other in camelCase.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

REGION = "us-east-1"
ACCOUNT = "123456789012"
REFERENCE_PATTERN = re.compile(r"Ref::([A-Za-z0-9_-]+)")


class ClientError(Exception):
    """A request that AWS Batch or Amazon ECS refuses with `ClientException`."""


def refuse_if(wrong: object, why: str) -> None:
    """Refuse a request where `wrong` is true.

    Raises:
        ClientError: for this reason.
    """
    if wrong:
        raise ClientError(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRule:
    """One entry of `evaluateOnExit`. All given patterns must match; `*` stands at the end only
    (https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html)."""

    action: str
    on_exit_code: str | None = None
    on_reason: str | None = None
    on_status_reason: str | None = None

    def matches(self, exit_code: int | None, reason: str, status_reason: str) -> bool:
        return all(
            pattern is None or fnmatchcase(text, pattern)
            for pattern, text in (
                (self.on_exit_code, "" if exit_code is None else str(exit_code)),
                (self.on_reason, reason),
                (self.on_status_reason, status_reason),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStrategy:
    """The number of attempts of a job, and the failures that Batch retries."""

    attempts: int = 1
    rules: tuple[ExitRule, ...] = ()

    def again(self, exit_code: int | None, reason: str, status_reason: str) -> bool:
        """Return whether Batch retries a failed attempt. The first matching rule decides; without one, Batch retries.

        Args:
            exit_code: of the main container; None when its host went away.
            reason: the container's, e.g. `OutOfMemoryError: ...`.
            status_reason: the attempt's, e.g. `Host EC2 (instance i-...) terminated.`.
        """
        matching = (rule for rule in self.rules if rule.matches(exit_code, reason, status_reason))
        return next((rule.action.upper() == "RETRY" for rule in matching), True)

    @classmethod
    def parse(cls, properties: Mapping[str, Any]) -> RetryStrategy:
        """Read a retry strategy (https://docs.aws.amazon.com/batch/latest/APIReference/API_RetryStrategy.html).

        Raises:
            ClientError: rules without a number of attempts.
        """
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
        refuse_if(rules and "attempts" not in lowered, "evaluateOnExit needs attempts")
        return cls(attempts=lowered.get("attempts", 1), rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container of one node."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDefinition:
    """A job definition; every one has revision 1 here.

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
    parameters: Mapping[str, str] = field(default_factory=dict)
    retry: RetryStrategy = RetryStrategy()
    timeout_seconds: int | None = None
    priority: int | None = None

    @property
    def arn(self) -> str:
        return f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition/{self.name}:1"

    @property
    def references(self) -> set[str]:
        """Names of the parameters that its commands refer to."""
        return {key for container in self.containers for word in container.command for key in REFERENCE_PATTERN.findall(word)}

    @classmethod
    def parse(cls, name: str, properties: Mapping[str, Any]) -> JobDefinition:
        """Read the resolved properties of an `AWS::Batch::JobDefinition`."""
        lowered = camel(properties)
        nodes = lowered.get("nodeProperties", {})
        return cls(
            name=name,
            containers=_node_containers(nodes) if nodes else (_container(lowered["containerProperties"]),),
            multinode=lowered["type"] == "multinode",
            main_node=nodes.get("mainNode", 0),
            # Their names stay as they are.
            parameters=properties.get("Parameters", {}),
            retry=RetryStrategy.parse(lowered.get("retryStrategy", {})),
            timeout_seconds=lowered.get("timeout", {}).get("attemptDurationSeconds"),
            priority=lowered.get("schedulingPriority"),
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
    return {entry["name"]: entry["value"] for entry in entries}


def camel(value: Any) -> Any:
    """The same structure with every key's first letter lowered: CloudFormation's spelling as the API's."""
    if isinstance(value, Mapping):
        return {key[:1].lower() + key[1:]: camel(inner) for key, inner in value.items()}
    return [camel(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _container(properties: Mapping[str, Any]) -> Container:
    return Container(command=tuple(properties["command"]), environment=environment_of(properties.get("environment", ())))


def _node_containers(properties: Mapping[str, Any]) -> tuple[Container, ...]:
    """The container of every node; of nested node ranges the inner one holds."""
    ranges = []
    for entry in properties["nodeRangeProperties"]:
        first, separator, last = entry["targetNodes"].partition(":")
        low = int(first or 0)
        high = int(last or properties["numNodes"] - 1) if separator else low
        ranges.append((range(low, high + 1), _container(entry["container"])))
    containers: dict[int, Container] = {}
    for nodes, container in sorted(ranges, key=lambda entry: len(entry[0]), reverse=True):
        containers |= dict.fromkeys(nodes, container)
    for node in range(properties["numNodes"]):
        refuse_if(node not in containers, f"node {node} is in no node range")
    return tuple(containers[node] for node in range(properties["numNodes"]))
