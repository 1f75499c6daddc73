"""Nodes of local Batch jobs: the processes that emulate their containers, and their environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from infra.local import ecs
from infra.local import node as node_program
from infra.local.batch_jobs import Job, Node
from infra.local.definitions import REFERENCE_PATTERN

THIS_INSTALLATION = (sys.executable, "-m", "pipeline.cli")
POLL_SECONDS = 0.05
INHERITED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "VIRTUAL_ENV",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
    "SSL_CERT_FILE",
)
INHERITED_PREFIXES = ("LC_", "TRNPIPE_", "NVIDIA_", "ONEDNN_", "XLA_")
"""Variables of the user's environment that a job process gets. None of AWS: real credentials must never reach a local run."""


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of the runner.

    Attributes:
        logs: folder of the log files.
        environment: variables that every job process gets (endpoint, dummy credentials).
        program: replaces `trnpipe` in a command.
        side_by_side: array children that run at the same time.
        cores: processor cores that processes running side by side share.
        grace: between SIGTERM and SIGKILL.
        start: starts a node's process, with the arguments and the result of `subprocess.Popen`.
    """

    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = THIS_INSTALLATION
    side_by_side: int = 2
    cores: int = field(default_factory=available_cores)
    grace: timedelta = timedelta(seconds=10)
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


def start_node(
    settings: BatchSettings,
    job: Job,
    index: int,
    *,
    attempt: int,
    host: str,
    task: str,
    cores: int,
    port: int,
    host_environment: Mapping[str, str],
) -> Node:
    """Start the process that emulates one node's container.

    Args:
        attempt: its number, from 1.
        task: id in ECS.
        cores: processor cores of the node.
        port: of the gang's rendezvous: all nodes share one address here.
        host_environment: variables of the host's own.
    """
    path = settings.logs / job.log_stream(attempt, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A container starts with an empty file system and leaves nothing behind.
    folder = Path(tempfile.mkdtemp(prefix="trnpipe-node-"))
    definition = job.definition
    container = definition.containers[index]
    command = [REFERENCE_PATTERN.sub(lambda match: job.parameters[match[1]], word) for word in container.command]
    if command[:1] == ["trnpipe"]:
        command[:1] = settings.program
    inherited = {
        key: value for key, value in os.environ.items() if key in INHERITED_VARIABLES or key.startswith(INHERITED_PREFIXES)
    }
    variables = {
        **inherited,
        **container.environment,
        **job.environment,
        **settings.environment,
        "OMP_NUM_THREADS": str(cores),
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        "AWS_BATCH_CE_NAME": "local",
        "AWS_BATCH_JQ_NAME": job.queue.name,
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_JOB_ID": f"{job.id}#{index}" if definition.multinode else job.id,
        "TRNPIPE_HOST": host,
    }
    if job.array_index is not None:
        variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(job.array_index)
    if definition.multinode:
        variables |= {
            "AWS_BATCH_JOB_NUM_NODES": str(len(definition.containers)),
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(definition.main_node),
            "TRNPIPE_LEADER_PORT": str(port),
            "TRNPIPE_LISTEN": "127.0.0.1",
        }
        if index != definition.main_node:
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
    if endpoint := settings.environment.get("AWS_ENDPOINT_URL"):
        variables["ECS_CONTAINER_METADATA_URI_V4"] = f"{endpoint}{ecs.METADATA}{task}"
    with open(path, "wb") as stream:
        process = settings.start(
            [sys.executable, "-I", "-S", node_program.__file__, *command],
            cwd=folder,
            env={**variables, **host_environment},
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Node(index=index, host=host, process=process, folder=folder)


def stop_nodes(nodes: Sequence[Node], grace: timedelta) -> None:
    """Send SIGTERM to running nodes; after the grace period SIGKILL to them and to every process that the nodes left behind."""
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
    deadline = time.monotonic() + grace.total_seconds()
    while time.monotonic() < deadline and any(node.process.poll() is None for node in nodes):
        time.sleep(POLL_SECONDS)
    for node in nodes:
        node.kill()
        node.process.wait()
        if node.process.stdin:
            node.process.stdin.close()
        shutil.rmtree(node.folder, ignore_errors=True)
