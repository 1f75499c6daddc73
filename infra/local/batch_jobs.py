"""Jobs of the local Batch service: the job of a SubmitJob request, its attempts and nodes, and their descriptions."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from infra.local import ecs
from infra.local.definitions import ACCOUNT, REGION, ClientError, JobDefinition, JobQueue, environment_of, refuse_if

Named = TypeVar("Named", JobDefinition, JobQueue)


@dataclass(slots=True, kw_only=True)
class Node:
    """A running node: its process, its index in the job and its host."""

    index: int
    host: str
    process: subprocess.Popen[bytes]
    folder: Path
    host_lost: bool = False

    def kill(self) -> None:
        """End everything that the node started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def exit_code(self) -> int:
        """The exit code of the ended process as a container reports it: 137 for one that was killed."""
        code = int(self.process.returncode)
        return 128 - code if code < 0 else code


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The end of one attempt. Times in milliseconds since the epoch.

    Attributes:
        exit_code, host, log_stream: of the main node.
        node_codes: node -> exit code of its container; none for nodes on lost hosts.
    """

    exit_code: int | None
    status_reason: str
    started: int
    stopped: int
    host: str
    log_stream: str
    node_codes: Mapping[int, int]

    def describe(self) -> dict[str, Any]:
        return {
            "container": {
                "logStreamName": self.log_stream,
                "containerInstanceArn": ecs.INSTANCE_ARN + self.host,
                **({} if self.exit_code is None else {"exitCode": self.exit_code}),
            },
            "startedAt": self.started,
            "stoppedAt": self.stopped,
            "statusReason": self.status_reason,
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job as DescribeJobs shows it, and the state of the runner while it runs."""

    id: str
    name: str
    queue: JobQueue
    definition: JobDefinition
    parameters: Mapping[str, str]
    environment: Mapping[str, str]
    share: str | None
    priority: int | None
    tags: Mapping[str, str]
    array_index: int | None = None
    children: list[Job] = field(default_factory=list)
    status: str = "SUBMITTED"
    status_reason: str = ""
    created: int
    started: int | None = None
    stopped: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    stop_reason: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def arn(self) -> str:
        return f"arn:aws:batch:{REGION}:{ACCOUNT}:job/{self.id}"

    def log_stream(self, attempt: int, node: int) -> str:
        """Log file of one node of one attempt, below the folder of all logs."""
        child = None if self.array_index is None else f"child-{self.array_index:05d}-attempt-{attempt}"
        return f"{self.name}-{self.id[:8]}/{child or f'attempt-{attempt}-node-{node:05d}'}.log"

    def summary(self) -> dict[str, Any]:
        """The job as ListJobs shows it."""
        exit_code = self.attempts[-1].exit_code if self.attempts else None
        shown = {
            "jobId": self.id,
            "jobArn": self.arn,
            "jobName": self.name,
            "jobDefinition": self.definition.arn,
            "status": self.status,
            "statusReason": self.status_reason,
            "createdAt": self.created,
            "startedAt": self.started,
            "stoppedAt": self.stopped,
            "shareIdentifier": self.share,
            "container": None if exit_code is None else {"exitCode": exit_code},
            "nodeProperties": {"isMainNode": False, "numNodes": len(self.definition.containers)}
            if self.definition.multinode
            else None,
        }
        return {key: value for key, value in shown.items() if value is not None}

    def describe(self) -> dict[str, Any]:
        """The job as DescribeJobs shows it."""
        nodes = {"numNodes": len(self.definition.containers), "mainNode": self.definition.main_node, "nodeRangeProperties": []}
        limit = self.definition.timeout_seconds
        array: dict[str, Any] | None = None if self.array_index is None else {"index": self.array_index}
        if self.children:
            states = sorted(child.status for child in self.children)
            array = {"size": len(states), "statusSummary": Counter(states)}
        detail = {
            **self.summary(),
            "jobQueue": self.queue.arn,
            "attempts": [attempt.describe() for attempt in self.attempts],
            "parameters": dict(self.parameters),
            "tags": dict(self.tags),
            "dependsOn": [],
            "isCancelled": False,
            "isTerminated": self.stop_reason is not None,
            "retryStrategy": {"attempts": self.definition.retry.attempts},
            "platformCapabilities": ["EC2"],
            "schedulingPriority": self.priority,
            "timeout": None if limit is None else {"attemptDurationSeconds": limit},
            "arrayProperties": array,
            "nodeProperties": nodes if self.definition.multinode else None,
            "container": None if self.definition.multinode else self._describe_container(0),
        }
        return {key: value for key, value in detail.items() if value is not None}

    def describe_node(self, index: int) -> dict[str, Any]:
        """One node as DescribeJobs shows it under the id JOB#INDEX."""
        detail = {**self.describe(), "jobId": f"{self.id}#{index}", "container": self._describe_container(index)}
        del detail["nodeProperties"]
        running = self._running(index)
        if running and (code := running.process.poll()) is not None:
            detail |= {"status": "FAILED" if code else "SUCCEEDED", "statusReason": "Essential container in task exited"}
        return {**detail, "nodeDetails": {"nodeIndex": index, "isMainNode": index == self.definition.main_node}}

    def _describe_container(self, index: int) -> dict[str, Any]:
        container = self.definition.containers[index]
        shown: dict[str, Any] = {
            "command": list(container.command),
            "environment": [
                {"name": key, "value": value} for key, value in {**container.environment, **self.environment}.items()
            ],
        }
        if running := self._running(index):
            shown |= {
                "logStreamName": self.log_stream(len(self.attempts) + 1, index),
                "containerInstanceArn": ecs.INSTANCE_ARN + running.host,
            }
        elif self.attempts:
            last = self.attempts[-1]
            shown["containerInstanceArn"] = ecs.INSTANCE_ARN + last.host
            shown["logStreamName"] = self.log_stream(len(self.attempts), index)
            if index in last.node_codes:
                shown["exitCode"] = last.node_codes[index]
        return shown

    def _running(self, index: int) -> Node | None:
        return next((node for node in self.nodes if node.index == index), None)


def build_job(request: Mapping[str, Any], definition: JobDefinition, queue: JobQueue) -> Job:
    """Make the job of a SubmitJob request, with its array children
    (https://docs.aws.amazon.com/batch/latest/APIReference/API_SubmitJob.html).

    Raises:
        ClientError: a reference in a command has no value.
    """
    parameters = {**definition.parameters, **request.get("parameters", {})}
    refuse_if(
        missing := sorted(definition.references - parameters.keys()),
        f"no value for {', '.join(f'Ref::{key}' for key in missing)} in the command of {definition.name}",
    )
    job = Job(
        id=str(uuid.uuid4()),
        name=request.get("jobName", ""),
        queue=queue,
        definition=definition,
        parameters=parameters,
        environment=environment_of(request.get("containerOverrides", {}).get("environment", ())),
        share=request.get("shareIdentifier"),
        priority=request.get("schedulingPriorityOverride", definition.priority),
        tags=request.get("tags", {}),
        created=milliseconds(),
    )
    job.children = [
        replace(job, id=f"{job.id}:{index}", array_index=index, children=[], attempts=[], nodes=[], done=threading.Event())
        for index in range(request.get("arrayProperties", {}).get("size", 0))
    ]
    return job


def named(things: Sequence[Named], wanted: str, kind: str) -> Named:
    """Return the queue or job definition of a name or ARN.

    Raises:
        ClientError: there is none.
    """
    if (found := next((thing for thing in things if wanted in (thing.arn, thing.name)), None)) is None:
        raise ClientError(f"{kind} {wanted!r} does not exist")
    return found


def milliseconds() -> int:
    """Milliseconds since the epoch."""
    return int(time.time() * 1000)
