"""The local endpoint's ECS: what a job's container learns of its host, and that a host taken out gets no further job."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.local import ecs
from infra.local.ecs import HostPool
from pipeline.host import own_job

Start = Callable[..., Any]


@pytest.fixture
def running(machine: Start) -> Any:
    """An endpoint with a job that runs until it is stopped; `task` and `host` are its node's."""
    local = machine({"prepare": {"seconds": 600}})
    local.start("waiting")
    deadline = time.monotonic() + 30
    while not local.endpoint.batch.hosts.tasks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ((local.task, local.host),) = local.endpoint.batch.hosts.tasks.items()
    local.uri = f"{local.endpoint.url}{ecs.METADATA}{local.task}"
    return local


def test_a_container_takes_its_own_host_out_and_an_operator_brings_it_back(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", running.uri)
    hosts = running.endpoint.batch.hosts
    assert own_job.instance_id() == running.host
    assert running.host not in hosts.drained
    assert own_job.leave_cluster()
    assert running.host in hosts.drained
    client = running.endpoint.client("ecs")
    arn = ecs.INSTANCE_ARN + running.host
    assert (
        client.describe_container_instances(cluster=ecs.CLUSTER, containerInstances=[arn])["containerInstances"][0]["status"]
        == "DRAINING"
    )
    answer = client.update_container_instances_state(cluster=ecs.CLUSTER, containerInstances=[arn, "unknown"], status="ACTIVE")
    assert answer["failures"] == [{"arn": "unknown", "reason": "MISSING"}]
    assert running.host not in hosts.drained


def test_the_metadata_of_a_task_is_there_while_it_runs(running: Any) -> None:
    def get(uri: str) -> dict[str, Any]:
        with urllib.request.urlopen(uri) as response:
            return dict(json.load(response))

    task = get(f"{running.uri}/task")
    assert task["TaskARN"].endswith(f":task/local/{running.task}")
    assert get(running.uri)["Networks"] == []
    for uri in (f"{running.uri}/stats", f"{running.endpoint.url}{ecs.METADATA}{32 * '0'}"):
        with pytest.raises(urllib.error.HTTPError):
            get(uri)
    answer = running.endpoint.client("ecs").describe_tasks(cluster=task["Cluster"], tasks=[task["TaskARN"], "other"])
    assert [found["containerInstanceArn"] for found in answer["tasks"]] == [ecs.INSTANCE_ARN + running.host]
    assert answer["failures"] == [{"arn": "other", "reason": "MISSING"}]


def test_what_ecs_refuses(running: Any) -> None:
    client = running.endpoint.client("ecs")
    arn = ecs.INSTANCE_ARN + running.host
    for call, words in (
        (lambda: client.list_tasks(cluster=ecs.CLUSTER), "does not answer"),
        (lambda: client.describe_tasks(cluster="other", tasks=["x"]), "not found"),
        (lambda: client.describe_tasks(tasks=["x"]), "not found"),
        (lambda: client.describe_tasks(cluster=ecs.CLUSTER, tasks=[]), "must not be empty"),
        (lambda: client.describe_container_instances(cluster=ecs.CLUSTER, containerInstances=[]), "must not be empty"),
        (
            lambda: client.update_container_instances_state(cluster=ecs.CLUSTER, containerInstances=[arn], status="REGISTERING"),
            "must be ACTIVE or DRAINING",
        ),
    ):
        with pytest.raises(ClientError, match=words):
            call()


def test_hosts_that_are_drained_rest_until_they_are_restored() -> None:
    pool = HostPool()
    first, second = pool.take(2)
    pool.drained.add(first)
    pool.drained.discard(first)  # while its job still runs: no other job gets it
    [other] = pool.take(1)
    assert other not in (first, second)
    pool.drained.add(first)
    pool.give_back([first, second])
    assert list(pool.take(1)) == [second]
    pool.drained.discard(first)
    assert list(pool.take(1)) == [first]
    assert len(pool.known) == 3
