"""The part of Amazon ECS that a job's container asks about its own host: task metadata, and three operations of the API.

A local node is a task on a container instance, which is a host of the pool. A container instance that is set to DRAINING gets no
further job, until it is set to ACTIVE again.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from infra.local.definitions import ACCOUNT, REGION, refuse_if

CLUSTER = "local"
CLUSTER_ARN = f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/{CLUSTER}"
TASK_ARN = f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/{CLUSTER}/"
"""Before the id of a task."""
INSTANCE_ARN = f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/{CLUSTER}/"
"""Before the id of a host."""
METADATA = "/ecs/v4/"
METADATA_PATH = re.compile(METADATA + r"(?P<task>[0-9a-f]{32})(?P<rest>(?:/task)?)")
"""Path of ECS_CONTAINER_METADATA_URI_V4 below the endpoint."""
OPERATIONS = {
    "DescribeTasks": "tasks",
    "DescribeContainerInstances": "containerInstances",
    "UpdateContainerInstancesState": "containerInstances",
}
"""Operation -> the member of its request and answer that it is about. botocore refuses unknown members before it sends them."""


@dataclass(slots=True, kw_only=True)
class HostPool:
    """The instances of the compute environment: the pool reuses free ones, lowest id first, unless they are drained.

    Attributes:
        environment: host id -> variables of every process on that host; tests make a fault stick to a host by them.
        known: all hosts that there ever were.
        drained: hosts that get no new job.
        tasks: ECS task id -> host of every node, from before its start: its container asks for its task's metadata at once.
    """

    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    drained: set[str] = field(default_factory=set)
    tasks: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> dict[str, str]:
        """Give a task to each of `count` free hosts: host id -> task id."""
        with self._lock:
            free = [host for host in self.known if host not in {*self.tasks.values(), *self.drained}]
            while len(free) < count:
                self.known.append(f"i-{len(self.known) + 1:017x}")
                free.append(self.known[-1])
            taken = {host: uuid.uuid4().hex for host in free[:count]}
            self.tasks |= {task: host for host, task in taken.items()}
            return taken

    def give_back(self, hosts: Collection[str]) -> None:
        with self._lock:
            self.tasks = {task: host for task, host in self.tasks.items() if host not in hosts}


def metadata(hosts: HostPool, path: str) -> dict[str, Any] | None:
    """Return what the metadata endpoint (version 4) answers a container; None for an unknown task or path."""
    found = METADATA_PATH.fullmatch(path)
    if found is None or found["task"] not in hosts.tasks:
        return None
    if not found["rest"]:
        return {"DockerId": found["task"], "Networks": []}
    return {
        "Cluster": CLUSTER_ARN,
        "TaskARN": TASK_ARN + found["task"],
        "DesiredStatus": "RUNNING",
        "KnownStatus": "RUNNING",
        "LaunchType": "EC2",
    }


def call(hosts: HostPool, operation: str, request: dict[str, Any]) -> dict[str, Any]:
    """Answer one operation.

    Raises:
        ClientError: ECS refuses the request, or the endpoint does not know the operation.
    """
    refuse_if(operation not in OPERATIONS, f"the local endpoint does not answer ecs:{operation}")
    refuse_if(
        request.get("cluster", "default") not in (CLUSTER, CLUSTER_ARN),
        f"cluster {request.get('cluster', 'default')!r} not found",
    )
    key = OPERATIONS[operation]
    refuse_if(not request.get(key), f"{key} must not be empty")
    if operation == "UpdateContainerInstancesState":
        status = request.get("status")
        refuse_if(status not in ("ACTIVE", "DRAINING"), f"status must be ACTIVE or DRAINING, found {status!r}")
        named = {arn.removeprefix(INSTANCE_ARN) for arn in request[key]}.intersection(hosts.known)
        hosts.drained = hosts.drained | named if status == "DRAINING" else hosts.drained - named
    known: dict[str, dict[str, dict[str, Any]]] = {
        "tasks": {
            TASK_ARN + task: {
                "taskArn": TASK_ARN + task,
                "clusterArn": CLUSTER_ARN,
                "containerInstanceArn": INSTANCE_ARN + host,
                "lastStatus": "RUNNING",
                "desiredStatus": "RUNNING",
                "launchType": "EC2",
            }
            for task, host in dict(hosts.tasks).items()
        },
        "containerInstances": {
            INSTANCE_ARN + host: {
                "containerInstanceArn": INSTANCE_ARN + host,
                "ec2InstanceId": host,
                "status": "DRAINING" if host in hosts.drained else "ACTIVE",
                "agentConnected": True,
            }
            for host in list(hosts.known)
        },
    }
    return {
        key: [known[key][arn] for arn in request[key] if arn in known[key]],
        "failures": [{"arn": arn, "reason": "MISSING"} for arn in request[key] if arn not in known[key]],
    }
