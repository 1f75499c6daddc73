"""Batch job definitions, queues and retry rules as the synthesized template states them, in the form the local runner uses.

Reads CloudFormation properties (`AWS::Batch::JobDefinition`, names already resolved) in PascalCase; members are those of the API,
which has the same structure in camelCase.
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
class RetryStrategy:
    """The number of attempts of a job, and the failures that Batch retries.

    Attributes:
        rules: entries of `evaluateOnExit`, as in the API. All given patterns must match; `*` is allowed at the end only
            (https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html).
    """

    attempts: int = 1
    rules: tuple[Mapping[str, str], ...] = ()

    def again(self, exit_code: int | None, reason: str, status_reason: str) -> bool:
        """Return whether Batch retries a failed attempt. The first matching rule decides; without one, Batch retries.

        Args:
            exit_code: of the main container; None when its host went away.
            reason: the container's, e.g. `OutOfMemoryError: ...`.
            status_reason: the attempt's, e.g. `Host EC2 (instance i-...) terminated.`.
        """
        texts = {"onExitCode": "" if exit_code is None else str(exit_code), "onReason": reason, "onStatusReason": status_reason}
        fitting = (rule for rule in self.rules if all(fnmatchcase(text, rule.get(key, "*")) for key, text in texts.items()))
        return next((rule["action"].upper() == "RETRY" for rule in fitting), True)

    @classmethod
    def parse(cls, properties: Mapping[str, Any]) -> RetryStrategy:
        """Read a retry strategy (https://docs.aws.amazon.com/batch/latest/APIReference/API_RetryStrategy.html)."""
        lowered = camel(properties)
        return cls(attempts=lowered.get("attempts", 1), rules=tuple(lowered.get("evaluateOnExit", ())))


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
    """A job queue, and whether it has a scheduling policy."""

    name: str
    fair_share: bool = False

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
    """The container of every node: the synthesized gangs have one range of nodes."""
    [entry] = properties["nodeRangeProperties"]
    refuse_if(entry["targetNodes"] != "0:", f"the local endpoint takes one range of all nodes, 0:, found {entry['targetNodes']}")
    return (_container(entry["container"]),) * int(properties["numNodes"])
