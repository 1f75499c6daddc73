"""Jobs of the local Batch service: what the runner remembers of them, and how Batch's operations show them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.local import ecs
from infra.local.definitions import ACCOUNT, REGION, JobDefinition, JobQueue, RetryStrategy

FINAL_STATES = ("SUCCEEDED", "FAILED")


@dataclass(slots=True, kw_only=True)
class Node:
    """A running node: its process, its place in the job and the host it is on.

    Attributes:
        task: its id in ECS.
    """

    index: int
    host: str
    task: str
    process: subprocess.Popen[bytes]
    folder: Path
    log_stream: str
    host_lost: bool = False

    def kill(self) -> None:
        """End everything that the node started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def exit_code(self) -> int:
        """The exit code of the ended process as a container reports it: 137 for one that was killed."""
        code: int = self.process.returncode
        return 128 - code if code < 0 else code


@dataclass(slots=True, kw_only=True)
class Attempt:
    """How one attempt ended. Times in milliseconds since the epoch.

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
        container: dict[str, Any] = {"logStreamName": self.log_stream, "containerInstanceArn": ecs.instance_arn(self.host)}
        if self.exit_code is not None:
            container["exitCode"] = self.exit_code
        return {
            "container": container,
            "startedAt": self.started,
            "stoppedAt": self.stopped,
            "statusReason": self.status_reason,
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job as DescribeJobs shows it, and what the runner must remember while it runs it."""

    id: str
    name: str
    queue: JobQueue
    definition: JobDefinition
    parameters: Mapping[str, str]
    environment: Mapping[str, str]
    command: tuple[str, ...] | None
    retry: RetryStrategy
    timeout_seconds: float | None
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
        """Where the output of one node of one attempt stands, below the folder of all logs."""
        folder = f"{self.name}-{self.id[:8]}"
        if self.array_index is not None:
            return f"{folder}/child-{self.array_index:05d}-attempt-{attempt}.log"
        return f"{folder}/attempt-{attempt}-node-{node:05d}.log"

    def summary(self) -> dict[str, Any]:
        """The job as ListJobs shows it."""
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
        }
        if self.attempts and self.attempts[-1].exit_code is not None:
            shown["container"] = {"exitCode": self.attempts[-1].exit_code}
        if self.definition.multinode:
            shown["nodeProperties"] = {"isMainNode": False, "numNodes": len(self.definition.containers)}
        return {key: value for key, value in shown.items() if value is not None}

    def describe(self) -> dict[str, Any]:
        """The job as DescribeJobs shows it."""
        detail = {
            **self.summary(),
            "jobQueue": self.queue.arn,
            "attempts": [attempt.describe() for attempt in self.attempts],
            "parameters": dict(self.parameters),
            "tags": dict(self.tags),
            "dependsOn": [],
            "isCancelled": False,
            "isTerminated": self.stop_reason is not None,
            "retryStrategy": {"attempts": self.retry.attempts},
            "platformCapabilities": ["EC2"],
        }
        if self.priority is not None:
            detail["schedulingPriority"] = self.priority
        if self.timeout_seconds is not None:
            detail["timeout"] = {"attemptDurationSeconds": self.timeout_seconds}
        if self.children:
            states = [child.status for child in self.children]
            detail["arrayProperties"] = {
                "size": len(self.children),
                "statusSummary": {state: states.count(state) for state in sorted(set(states))},
            }
        elif self.array_index is not None:
            detail["arrayProperties"] = {"index": self.array_index}
        if self.definition.multinode:
            detail["nodeProperties"] = {
                "numNodes": len(self.definition.containers),
                "mainNode": self.definition.main_node,
                "nodeRangeProperties": [],
            }
            detail.pop("container", None)
        else:
            detail["container"] = self._describe_container(0)
        return detail

    def describe_node(self, index: int) -> dict[str, Any]:
        """One node as DescribeJobs shows it under the id JOB#INDEX."""
        detail = {**self.describe(), "jobId": f"{self.id}#{index}", "container": self._describe_container(index)}
        detail.pop("nodeProperties", None)
        running = self._running(index)
        if running and (code := running.process.poll()) is not None:
            detail |= {"status": "FAILED" if code else "SUCCEEDED", "statusReason": "Essential container in task exited"}
        return {**detail, "nodeDetails": {"nodeIndex": index, "isMainNode": index == self.definition.main_node}}

    def _describe_container(self, index: int) -> dict[str, Any]:
        container = self.definition.containers[index]
        environment = {**container.environment, **self.environment}
        shown: dict[str, Any] = {
            "command": list(self.command if self.command is not None else container.command),
            "environment": [{"name": key, "value": value} for key, value in environment.items()],
        }
        if running := self._running(index):
            shown["logStreamName"] = running.log_stream
            shown["containerInstanceArn"] = ecs.instance_arn(running.host)
        elif self.attempts:
            shown["containerInstanceArn"] = ecs.instance_arn(self.attempts[-1].host)
            if index in self.attempts[-1].node_codes:
                shown["exitCode"] = self.attempts[-1].node_codes[index]
            shown["logStreamName"] = self.log_stream(len(self.attempts), index)
        return shown

    def _running(self, index: int) -> Node | None:
        return next((node for node in self.nodes if node.index == index), None)


def failed_attempts(job: Job) -> Iterator[tuple[Job, Attempt]]:
    """The last attempt of every job or array child that failed."""
    for one in job.children or [job]:
        if one.status == "FAILED" and one.attempts:
            yield one, one.attempts[-1]


def milliseconds() -> int:
    """Milliseconds since the epoch."""
    return int(time.time() * 1000)
