"""A host that fails its health check leaves its cluster, and the next attempt runs on another: real stages, local endpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.local.batch_jobs import Job
from infra.local.batch_nodes import BatchSettings
from infra.local.run import DEPLOYMENT_CONFIG
from infra.local.server import local_endpoint
from infra.local.template import LocalStack, read_stack
from pipeline import store
from pipeline.contract import STAGES, RunPaths, Stage
from tests.infra.faulty_batch import FaultyBatchRunner
from tests.tiny import make_model, write_pairs

pytestmark = pytest.mark.long

SICK = """
from pipeline.backends.eager import EagerDevice
healthy = EagerDevice.all_reduce
def spoilt(self, value):
    result = healthy(self, value)
    result[3] += 1
    return result
EagerDevice.all_reduce = spoilt
"""
"""What a broken link does: one element of every sum is wrong."""


@pytest.fixture
def endpoint(tmp_path: Path, templates: Path) -> Iterator[Any]:
    stack = read_stack(templates)

    def runner(environment: dict[str, str]) -> FaultyBatchRunner:
        settings = BatchSettings(logs=tmp_path / "logs", environment=environment)
        return FaultyBatchRunner(stack.job_definitions, stack.queues, settings)

    with local_endpoint(stack, tmp_path / "state", runner) as endpoint:
        store._s3_client_of.cache_clear()
        yield SimpleNamespace(stack=stack, batch=endpoint.batch)
    store._s3_client_of.cache_clear()


def finish(endpoint: Any, stage: Stage, definition: str, paths: RunPaths) -> Job:
    """Run one stage's job as the state machine submits it."""
    stack: LocalStack = endpoint.stack
    (name,) = [found.name for found in stack.job_definitions if found.name.endswith(definition)]
    (queue,) = [found.name for found in stack.queues if found.name.endswith(STAGES[stage].queue.value)]
    request = {"jobName": f"{stage}-sick", "jobQueue": queue, "jobDefinition": name, "parameters": {"run": paths.root}}
    job_id = endpoint.batch.submit(request | {"shareIdentifier": "manual", "schedulingPriorityOverride": 1})["jobId"]
    return endpoint.batch.wait(job_id, timedelta(seconds=300))


def test_a_sick_host_takes_itself_out_and_the_next_attempt_runs_elsewhere(endpoint: Any, tmp_path: Path) -> None:
    bucket = f"s3://{endpoint.stack.bucket}"
    paths = RunPaths(f"{bucket}/runs/sick")
    make_model(tmp_path / "parent")
    store.upload_folder(tmp_path / "parent", f"{bucket}/models/parent")
    store.write_bytes(f"{bucket}/data/shard.jsonl", write_pairs(tmp_path / "shard.jsonl", 200).read_bytes())
    execution = {
        "registry": None,
        "nodes": 2,
        "device": {"kind": "cpu", "precision": "fp32"},
        "data": {"train": [f"{bucket}/data/shard.jsonl"], "holdout_fraction": 0.2},
        "model": {"parent": f"{bucket}/models/parent"},
        "train": {"batch_size": 8, "query_length": 8, "length": 32},
        "embed": {"length": 32},
        "gate": {"undecided": "accept"},
        "health_check": {"matmul_size": 48, "memory_mib": 4, "collective_bytes": [4096], "storage_mib": 1},
    }
    deployment = {"config": DEPLOYMENT_CONFIG, "allowed_nodes": [1, 2]}
    store.write_json(paths.input, {"deployment": deployment, "execution": execution, "execution_arn": ""})
    for stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN):
        assert finish(endpoint, stage, stage.value, paths).status == "SUCCEEDED", failed(paths, stage)

    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(SICK)
    hosts = endpoint.batch.hosts
    first, second = hosts.take(2)
    hosts.give_back([first, second])
    hosts.environment[second] = {"PYTHONPATH": os.pathsep.join([str(hook), str(Path.cwd())])}

    job = finish(endpoint, Stage.HEALTH_CHECK, "health_check-2", paths)
    assert job.status == "SUCCEEDED", failed(paths, Stage.HEALTH_CHECK)
    assert [attempt.exit_code for attempt in job.attempts] == [76, 0]
    assert second in hosts.drained
    assert first not in hosts.drained
    ended = store.read_json(paths.node_exit(Stage.HEALTH_CHECK, 1, 1))
    assert (ended["exit_code"], ended["host"]) == (76, second)
    assert f"node 1 ({second}) failed its health check: all_reduce_4096" in ended["failure"]["what"]
    report = store.read_json(paths.node_health(1))
    assert report["passed"]
    assert second not in {store.read_json(paths.node_health(node))["host"] for node in range(2)}
    assert report["instance"] == report["host"]
    # What the sick node said of itself, once.
    log = (endpoint.batch.settings.logs / job.log_stream(1, 1)).read_text()
    assert log.count("this host takes no further jobs") == 1
    # It stays out, for other jobs too.
    assert second not in hosts.take(4)


def failed(paths: RunPaths, stage: Stage) -> str:
    return store.read_bytes(paths.failure(stage)).decode() if store.exists(paths.failure(stage)) else "no failure was left"
