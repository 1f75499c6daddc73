"""Nodes of local Batch jobs: the hosts that they are on, the processes that stand for their containers, and what these see."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from infra.local import ecs
from infra.local import node as node_program
from infra.local.batch_jobs import Job, Node
from infra.local.batch_submit import REFERENCE_PATTERN

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
INHERITED_PREFIXES = ("LC_", "TRNPIPE_", "NVIDIA_")
"""What a job process sees of the user's environment. Nothing of AWS: real credentials must never reach a local run."""


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How the runner runs jobs.

    Attributes:
        logs: folder of the log files.
        environment: variables that every job process gets (endpoint, dummy credentials).
        program: what stands for `trnpipe` in a command.
        side_by_side: array children that run at the same time.
        cores: processor cores that processes running side by side share.
        grace: between SIGTERM and SIGKILL.
        minimum_timeout_seconds: the shortest attempt timeout that is accepted.
        literal_references: leave `Ref::name` in the commands of gangs as it stands.
        start: starts a node's process; called as `subprocess.Popen`, whose likes it gives.
    """

    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = THIS_INSTALLATION
    side_by_side: int = 2
    cores: int = field(default_factory=available_cores)
    grace: timedelta = timedelta(seconds=10)
    minimum_timeout_seconds: int = 60
    literal_references: bool = False
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


class HostPool:
    """The instances of the compute environment: free ones are used again, lowest id first; a drained one when it is restored.

    Attributes:
        environment: host id -> variables that every process on that host gets; how a test makes a fault stick to a host.
    """

    def __init__(self) -> None:
        self.environment: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._made: list[str] = []
        self._busy: set[str] = set()
        self._drained: set[str] = set()

    def take(self, count: int) -> list[str]:
        with self._lock:
            free = [host for host in self._made if host not in self._busy | self._drained]
            while len(free) < count:
                self._made.append(f"i-{len(self._made) + 1:017x}")
                free.append(self._made[-1])
            self._busy |= set(free[:count])
            return free[:count]

    def give_back(self, hosts: Sequence[str]) -> None:
        with self._lock:
            self._busy -= set(hosts)

    def drain(self, host: str) -> None:
        """No new job runs on this host."""
        with self._lock:
            self._drained.add(host)

    def restore(self, host: str) -> None:
        """Jobs may run on this host again."""
        with self._lock:
            self._drained.discard(host)

    def is_drained(self, host: str) -> bool:
        with self._lock:
            return host in self._drained

    def known(self) -> list[str]:
        """All hosts that there ever were."""
        with self._lock:
            return list(self._made)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunch:
    """One attempt of a job, as its nodes are started.

    Attributes:
        attempt: its number, from 1.
        hosts, tasks: of each node; tasks are ids in ECS.
        cores: processor cores of each node.
        host_environment: host -> variables of that host's own.
        port: of the gang's rendezvous: all nodes share one address here.
    """

    settings: BatchSettings
    job: Job
    attempt: int
    hosts: Sequence[str]
    tasks: Sequence[str]
    cores: int
    host_environment: Mapping[str, Mapping[str, str]]
    port: int

    def start(self, index: int) -> Node:
        """Start the process that stands for one node's container."""
        log_stream = self.job.log_stream(self.attempt, index)
        path = self.settings.logs / log_stream
        path.parent.mkdir(parents=True, exist_ok=True)
        # A container starts with an empty file system and leaves nothing behind.
        folder = Path(tempfile.mkdtemp(prefix="trnpipe-node-"))
        with open(path, "wb") as stream:
            process = self.settings.start(
                [sys.executable, "-I", "-S", node_program.__file__, *self._command(index)],
                cwd=folder,
                env=self._environment(index, folder),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Node(
            index=index, host=self.hosts[index], task=self.tasks[index], process=process, folder=folder, log_stream=log_stream
        )

    def _command(self, index: int) -> list[str]:
        job = self.job
        words = list(job.command if job.command is not None else job.definition.containers[index].command)
        if not (self.settings.literal_references and job.definition.multinode):
            words = [REFERENCE_PATTERN.sub(lambda match: job.parameters[match[1]], word) for word in words]
        return [*self.settings.program, *words[1:]] if words[:1] == ["trnpipe"] else words

    def _environment(self, index: int, folder: Path) -> dict[str, str]:
        job, definition, host = self.job, self.job.definition, self.hosts[index]
        inherited = {
            key: value for key, value in os.environ.items() if key in INHERITED_VARIABLES or key.startswith(INHERITED_PREFIXES)
        }
        variables = {
            **inherited,
            **definition.containers[index].environment,
            **job.environment,
            **self.settings.environment,
            "OMP_NUM_THREADS": str(self.cores),
            "TMPDIR": str(folder),
            "PYTHONUNBUFFERED": "1",
            "AWS_BATCH_CE_NAME": "local",
            "AWS_BATCH_JQ_NAME": job.queue.name,
            "AWS_BATCH_JOB_ATTEMPT": str(self.attempt),
            "AWS_BATCH_JOB_ID": f"{job.id}#{index}" if definition.multinode else job.id,
            "TRNPIPE_HOST": host,
        }
        if job.array_index is not None:
            variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(job.array_index)
        if definition.multinode:
            variables["AWS_BATCH_JOB_NUM_NODES"] = str(len(definition.containers))
            variables["AWS_BATCH_JOB_NODE_INDEX"] = str(index)
            variables["AWS_BATCH_JOB_MAIN_NODE_INDEX"] = str(definition.main_node)
            variables["TRNPIPE_LEADER_PORT"] = str(self.port)
            variables["TRNPIPE_LISTEN"] = "127.0.0.1"
            if index != definition.main_node:
                variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
        if endpoint := self.settings.environment.get("AWS_ENDPOINT_URL"):
            variables["ECS_CONTAINER_METADATA_URI_V4"] = ecs.metadata_uri(endpoint, self.tasks[index])
        return {**variables, **self.host_environment.get(host, {})}


def stop_nodes(nodes: Sequence[Node], grace: timedelta) -> None:
    """Send SIGTERM to what still runs; after the grace period SIGKILL to that and to everything the nodes leave behind."""
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


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
