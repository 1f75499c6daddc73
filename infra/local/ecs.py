"""The little of Amazon ECS that a job's container asks about its own host: task metadata, and three operations of the API.

A local node is a task on a container instance, which is a host of the runner's pool. A container instance that is set to DRAINING
gets no further job, until it is set to ACTIVE again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from infra.local.definitions import ACCOUNT, REGION, ClientError

if TYPE_CHECKING:
    from infra.local.batch import BatchRunner

CLUSTER = "local"
METADATA_PATH = re.compile(r"/ecs/v4/(?P<task>[0-9a-f]{32})(?P<rest>(?:/task)?)")
"""Where ECS_CONTAINER_METADATA_URI_V4 points, below the endpoint."""
MEMBERS = {
    "DescribeTasks": {"cluster", "tasks", "include"},
    "DescribeContainerInstances": {"cluster", "containerInstances", "include"},
    "UpdateContainerInstancesState": {"cluster", "containerInstances", "status"},
}
"""Operation -> members of its request (botocore's service model of 2014-11-13)."""


def metadata_uri(endpoint: str, task: str) -> str:
    return f"{endpoint}/ecs/v4/{task}"


def cluster_arn() -> str:
    return _arn(f"cluster/{CLUSTER}")


def task_arn(task: str) -> str:
    return _arn(f"task/{CLUSTER}/{task}")


def instance_arn(host: str) -> str:
    return _arn(f"container-instance/{CLUSTER}/{host}")


def metadata(runner: BatchRunner, path: str) -> dict[str, Any] | None:
    """What the metadata endpoint (version 4) answers a container; None where it knows nothing of the path."""
    found = METADATA_PATH.fullmatch(path)
    if found is None or found["task"] not in runner.tasks():
        return None
    if not found["rest"]:
        return {"DockerId": found["task"], "Networks": []}
    return {
        "Cluster": cluster_arn(),
        "TaskARN": task_arn(found["task"]),
        "DesiredStatus": "RUNNING",
        "KnownStatus": "RUNNING",
        "LaunchType": "EC2",
    }


def call(runner: BatchRunner, operation: str, request: dict[str, Any]) -> dict[str, Any]:
    """Answer one operation.

    Raises:
        ClientError: ECS refuses the request, or the operation is none of those answered here.
    """
    if operation not in MEMBERS:
        raise ClientError(f"the local endpoint does not answer ecs:{operation}")
    if unknown := sorted(set(request) - MEMBERS[operation]):
        raise ClientError(f"unknown parameters: {', '.join(unknown)}")
    if request.get("cluster", "default") not in (CLUSTER, cluster_arn()):
        raise ClientError(f"cluster {request.get('cluster', 'default')!r} not found")
    if operation == "DescribeTasks":
        return _describe_tasks(runner, request)
    instances = _instances(runner, request)
    if operation == "UpdateContainerInstancesState":
        status = request.get("status")
        if status not in ("ACTIVE", "DRAINING"):
            raise ClientError(f"status must be ACTIVE or DRAINING, found {status!r}")
        for host in instances.values():
            (runner.hosts.drain if status == "DRAINING" else runner.hosts.restore)(host)
    return {
        "containerInstances": [
            {
                "containerInstanceArn": arn,
                "ec2InstanceId": host,
                "status": "DRAINING" if runner.hosts.is_drained(host) else "ACTIVE",
                "agentConnected": True,
            }
            for arn, host in instances.items()
        ],
        "failures": [{"arn": arn, "reason": "MISSING"} for arn in request["containerInstances"] if arn not in instances],
    }


def _describe_tasks(runner: BatchRunner, request: dict[str, Any]) -> dict[str, Any]:
    wanted = request.get("tasks")
    if not wanted:
        raise ClientError("tasks must not be empty")
    hosts = {task_arn(task): host for task, host in runner.tasks().items()}
    return {
        "tasks": [
            {
                "taskArn": arn,
                "clusterArn": cluster_arn(),
                "containerInstanceArn": instance_arn(hosts[arn]),
                "lastStatus": "RUNNING",
                "desiredStatus": "RUNNING",
                "launchType": "EC2",
            }
            for arn in wanted
            if arn in hosts
        ],
        "failures": [{"arn": arn, "reason": "MISSING"} for arn in wanted if arn not in hosts],
    }


def _instances(runner: BatchRunner, request: dict[str, Any]) -> dict[str, str]:
    """ARN -> host of the requested instances that exist."""
    wanted = request.get("containerInstances")
    if not wanted:
        raise ClientError("containerInstances must not be empty")
    hosts = {instance_arn(host): host for host in runner.hosts.known()}
    return {arn: hosts[arn] for arn in wanted if arn in hosts}


def _arn(resource: str) -> str:
    return f"arn:aws:ecs:{REGION}:{ACCOUNT}:{resource}"
