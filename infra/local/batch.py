"""AWS Batch on one machine: jobs as local processes, under the rules by which Batch runs, retries and refuses them.

What it keeps of Batch, because reliability is tested through it: the job and node environment variables; a gang's main node
first, the others once it is RUNNING, and only the main node's exit counts; a failed attempt restarts the whole gang if
`evaluateOnExit` says so; attempts have a timeout and are not retried after it; array children are independent; hosts have
ids and are used again, so that a fault can stick to one; and requests that Batch refuses are refused. Every node of every
attempt has a log file of its own under the log folder.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from infra.local import ecs
from infra.local import node as node_program
from infra.local.definitions import (
    ACCOUNT,
    REGION,
    ClientError,
    Container,
    JobDefinition,
    JobQueue,
    RetryStrategy,
    camel,
    environment_of,
)
from pipeline.contract import SHARE_PATTERN

log = logging.getLogger("trnpipe")

THIS_INSTALLATION = (sys.executable, "-m", "pipeline.cli")
POLL_SECONDS = 0.05
JOB_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
REFERENCE_PATTERN = re.compile(r"Ref::([A-Za-z0-9_-]+)")
SUBMIT_MEMBERS = {
    "jobName",
    "jobQueue",
    "jobDefinition",
    "shareIdentifier",
    "schedulingPriorityOverride",
    "arrayProperties",
    "parameters",
    "containerOverrides",
    "retryStrategy",
    "propagateTags",
    "timeout",
    "tags",
}
"""Members of SubmitJob that this runner honours; any other is refused rather than silently ignored."""

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

MANAGED_BY_STEP_FUNCTIONS = {"MANAGED_BY_AWS": "STARTED_BY_STEP_FUNCTIONS"}
FINAL_STATES = ("SUCCEEDED", "FAILED")


class HostPool:
    """The instances of the compute environment: free ones are used again, lowest id first; a drained one when it is restored.

    Attributes:
        environment: host id -> variables that every process on that host gets; how a test makes a fault stick to a host.
    """

    def __init__(self) -> None:
        self.environment: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._made: list[str] = []
        self._free: list[str] = []
        self._drained: set[str] = set()
        self._busy: set[str] = set()

    def take(self, count: int) -> list[str]:
        with self._lock:
            self._free.sort()
            while len(self._free) < count:
                self._made.append(f"i-{len(self._made) + 1:017x}")
                self._free.append(self._made[-1])
            taken, self._free = self._free[:count], self._free[count:]
            self._busy |= set(taken)
            return taken

    def give_back(self, hosts: Sequence[str]) -> None:
        with self._lock:
            self._busy -= set(hosts)
            self._free += [host for host in hosts if host not in self._drained]

    def drain(self, host: str) -> None:
        """No new job runs on this host."""
        with self._lock:
            self._drained.add(host)
            self._free = [free for free in self._free if free != host]

    def restore(self, host: str) -> None:
        """Jobs may run on this host again."""
        with self._lock:
            self._drained.discard(host)
            if host not in self._free and host not in self._busy:
                self._free.append(host)

    def is_drained(self, host: str) -> bool:
        with self._lock:
            return host in self._drained

    def known(self) -> list[str]:
        """All hosts that there ever were."""
        with self._lock:
            return list(self._made)


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


@dataclass(slots=True, kw_only=True)
class Attempt:
    """How one attempt ended. Times in milliseconds since the epoch.

    Attributes:
        exit_code, host, log_stream: of the main node.
        node_codes: node -> exit code of its container; of lost hosts none.
    """

    exit_code: int | None
    reason: str
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
        if self.reason:
            container["reason"] = self.reason
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
    cores: int = field(default_factory=lambda: available_cores())
    grace: timedelta = timedelta(seconds=10)
    minimum_timeout_seconds: int = 60
    literal_references: bool = False
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


class BatchRunner:
    """The Batch service. `call` answers its REST operations; everything is safe to use from several threads.

    Args:
        definitions, queues: what exists.
        settings: how to run jobs.
        changed: called with a job whenever its status has changed.
    """

    def __init__(
        self,
        definitions: Sequence[JobDefinition],
        queues: Sequence[JobQueue],
        settings: BatchSettings,
        changed: Callable[[Job], None] = lambda _job: None,
    ) -> None:
        self.hosts = HostPool()
        self.settings = settings
        self._definitions = list(definitions)
        self._queues = list(queues)
        self._changed = changed
        self._lock = threading.RLock()
        self._jobs: dict[str, Job] = {}
        self._threads: list[threading.Thread] = []
        self._slots = threading.BoundedSemaphore(settings.side_by_side)
        self._tasks: dict[str, str] = {}
        self._ended = threading.Condition()

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one operation, named as in its path (`submitjob`).

        Raises:
            ClientError: Batch refuses the request, or the operation is none of those answered here.
        """
        operations = {
            "submitjob": self.submit,
            "describejobs": self.describe,
            "terminatejob": self.terminate,
            "canceljob": self.cancel,
            "listjobs": self.list_jobs,
        }
        if operation not in operations:
            raise ClientError(f"the local endpoint does not answer {operation}")
        return operations[operation](request)

    def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._job_of(request)
        with self._lock:
            self._jobs[job.id] = job
            self._jobs.update({child.id: child for child in job.children})
            thread = threading.Thread(target=self._run, args=(job,), name=f"batch-{job.name}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        found = []
        for job_id in request.get("jobs", ()):
            parent_id, is_node, index = job_id.partition("#")
            job = self._jobs.get(parent_id)
            if job and is_node and index.isdigit() and int(index) < len(job.definition.containers):
                found.append(self._describe_node(job, int(index)))
            elif job and not is_node:
                found.append(self._describe_job(job))
        return {"jobs": found}

    def terminate(self, request: dict[str, Any]) -> dict[str, Any]:
        job = self._existing(request)
        self._stop(job, request.get("reason") or "Terminated")
        return {}

    def cancel(self, request: dict[str, Any]) -> dict[str, Any]:
        """Stops jobs that have not started; jobs that have are left alone, as in Batch."""
        job = self._existing(request)
        for one in job.children or [job]:
            if one.status in ("SUBMITTED", "PENDING", "RUNNABLE"):
                self._stop(one, request.get("reason") or "Cancelled")
        return {}

    def list_jobs(self, request: dict[str, Any]) -> dict[str, Any]:
        if filters := request.get("filters"):
            return self._list_filtered(request, filters)
        status = request.get("jobStatus", "RUNNING")
        with self._lock:
            if parent := request.get("arrayJobId"):
                jobs = list(self._jobs[parent].children) if parent in self._jobs else []
            else:
                jobs = [job for job in self._jobs.values() if job.array_index is None]
        queue = request.get("jobQueue")
        shown = [job for job in jobs if job.status == status and (queue is None or queue in (job.queue.arn, job.queue.name))]
        return {"jobSummaryList": [self._summary(job) for job in shown]}

    def _list_filtered(self, request: dict[str, Any], filters: list[dict[str, Any]]) -> dict[str, Any]:
        """Jobs of a queue with any status, newest first; a status that is asked for is ignored, as in Batch."""
        if len(filters) != 1 or filters[0].get("name") != "AFTER_CREATED_AT" or not request.get("jobQueue"):
            raise ClientError("the local endpoint lists a queue's jobs by one filter, AFTER_CREATED_AT")
        after = int(filters[0]["values"][0])
        queue = self._queue(request["jobQueue"])
        shown = [job for job in reversed(self.jobs()) if job.queue is queue and job.created > after]
        return {"jobSummaryList": [self._summary(job) for job in shown]}

    def jobs(self) -> list[Job]:
        """All jobs in the order of submission, array children not among them."""
        with self._lock:
            return [job for job in self._jobs.values() if job.array_index is None]

    def tasks(self) -> dict[str, str]:
        """ECS task id -> host of every running node."""
        with self._lock:
            return dict(self._tasks)

    def wait(self, job_id: str, timeout: timedelta) -> Job:
        """Wait until a job is over.

        Raises:
            TimeoutError: it is not over in time.
        """
        job = self._jobs[job_id]
        if not job.done.wait(timeout.total_seconds()):
            raise TimeoutError(f"job {job.name} is still {job.status}")
        return job

    def pause(self, seconds: float) -> bool:
        """Wait until some job is over, or so long; whether one is. Who looked just before it was over waits in vain."""
        with self._ended:
            return self._ended.wait(seconds)

    def log_file(self, job: Job, attempt: int, node: int) -> Path:
        """Where the output of one node of one attempt stands."""
        return self.settings.logs / _log_stream(job, attempt, node)

    def kill_node(self, job_id: str, index: int) -> None:
        """Kill one running node's processes, as an out-of-memory kill of its container does."""
        for node in list(self._jobs[job_id].nodes):
            if node.index == index:
                node.kill()

    def lose_host(self, host: str) -> None:
        """The host goes away with everything on it; it never comes back."""
        self.hosts.drain(host)
        with self._lock:
            lost = [node for job in self._jobs.values() for node in job.nodes if node.host == host]
        for node in lost:
            node.host_lost = True
            node.kill()

    def close(self) -> None:
        """Terminate what still runs and wait for it; nothing that a job started is left."""
        for job in self.jobs():
            self._stop(job, "The local endpoint is closing")
        for thread in self._threads:
            thread.join()

    def _job_of(self, request: dict[str, Any]) -> Job:
        """Check a SubmitJob request as Batch does and build the job."""
        if unknown := sorted(set(request) - SUBMIT_MEMBERS):
            raise ClientError(f"unknown or unsupported parameters: {', '.join(unknown)}")
        name = request.get("jobName", "")
        if not JOB_NAME_PATTERN.fullmatch(name):
            raise ClientError(f"jobName must match {JOB_NAME_PATTERN.pattern}, found {name!r}")
        queue = self._queue(request.get("jobQueue", ""))
        definition = self._definition(request.get("jobDefinition", ""))
        share, priority = _fair_share(request, queue, definition)
        command, environment = _overrides(request, definition)
        parameters = self._parameters(request, definition, command)
        timeout = camel(request.get("timeout", {})).get("attemptDurationSeconds", definition.timeout_seconds)
        if timeout is not None and timeout < self.settings.minimum_timeout_seconds:
            raise ClientError(f"attemptDurationSeconds must be at least {self.settings.minimum_timeout_seconds}, found {timeout}")
        retry = RetryStrategy.parse(request["retryStrategy"]) if request.get("retryStrategy") else definition.retry
        job = Job(
            id=str(uuid.uuid4()),
            name=name,
            queue=queue,
            definition=definition,
            parameters=parameters,
            environment=environment,
            command=command,
            retry=retry,
            timeout_seconds=timeout,
            share=share,
            priority=priority,
            tags=request.get("tags", {}),
            created=_now(),
        )
        job.children = _array_children(request, job)
        return job

    def _queue(self, wanted: str) -> JobQueue:
        for queue in self._queues:
            if wanted in (queue.arn, queue.name):
                return queue
        raise ClientError(f"job queue {wanted!r} does not exist")

    def _definition(self, wanted: str) -> JobDefinition:
        revisions = [
            definition
            for definition in self._definitions
            if wanted in (definition.arn, f"{definition.name}:{definition.revision}", definition.name)
        ]
        if not revisions:
            raise ClientError(f"job definition {wanted!r} does not exist")
        return max(revisions, key=lambda definition: definition.revision)

    def _parameters(self, request: dict[str, Any], definition: JobDefinition, command: tuple[str, ...] | None) -> dict[str, str]:
        given = request.get("parameters") or {}
        for key, value in given.items():
            if not isinstance(value, str):
                raise ClientError(f"parameter {key} must be a string, found {value!r}")
        commands = [command] if command is not None else [container.command for container in definition.containers]
        needed = {match for words in commands for word in words for match in REFERENCE_PATTERN.findall(word)}
        if unknown := sorted(set(given) - set(definition.parameters) - needed):
            raise ClientError(f"parameters unknown to job definition {definition.name}: {', '.join(unknown)}")
        parameters = {**definition.parameters, **given}
        if missing := sorted(needed - set(parameters)):
            raise ClientError(f"no value for {', '.join(f'Ref::{key}' for key in missing)} in the command of {definition.name}")
        return parameters

    def _existing(self, request: dict[str, Any]) -> Job:
        job = self._jobs.get(request.get("jobId", ""))
        if job is None:
            raise ClientError(f"job {request.get('jobId')!r} does not exist")
        return job

    def _stop(self, job: Job, reason: str) -> None:
        with self._lock:
            for one in (job, *job.children):
                if one.status not in FINAL_STATES and one.stop_reason is None:
                    one.stop_reason = reason

    def _run(self, job: Job) -> None:
        """A job's life from RUNNABLE to its end, in a thread of its own."""
        if not job.children:
            self._run_attempts(job, side_by_side=len(job.definition.containers))
            return
        self._set_status(job, "PENDING")
        with ThreadPoolExecutor(max_workers=min(len(job.children), self.settings.side_by_side)) as pool:
            list(pool.map(self._run_child, job.children))
        failed = [child for child in job.children if child.status == "FAILED"]
        self._finish(job, "Array Child Job failed" if failed else None)

    def _run_child(self, child: Job) -> None:
        with self._slots:
            self._run_attempts(child, side_by_side=self.settings.side_by_side)

    def _run_attempts(self, job: Job, *, side_by_side: int) -> None:
        number = 0
        while True:
            number += 1
            self._set_status(job, "RUNNABLE")
            if job.stop_reason is not None:
                self._finish(job, job.stop_reason)
                return
            attempt, retryable = self._run_attempt(job, number, side_by_side)
            with self._lock:
                job.attempts.append(attempt)
            if attempt.exit_code == 0 and retryable:
                self._finish(job, None, attempt.status_reason)
                return
            again = (
                retryable
                and number < job.retry.attempts
                and job.retry.again(attempt.exit_code, attempt.reason, attempt.status_reason)
            )
            if not again:
                self._finish(job, attempt.status_reason)
                return
            log.info("job %s: attempt %d ended with %s, the next one follows", job.name, number, attempt.exit_code)

    def _run_attempt(self, job: Job, number: int, side_by_side: int) -> tuple[Attempt, bool]:
        """Run all nodes once; how the main node ended, and whether that is the job's own doing (not a timeout or a stop)."""
        hosts = self.hosts.take(len(job.definition.containers))
        port = _free_port()
        self._set_status(job, "STARTING")
        order = sorted(range(len(hosts)), key=lambda index: index != job.definition.main_node)
        started = _now()
        deadline = None if job.timeout_seconds is None else time.monotonic() + job.timeout_seconds
        try:
            for index in order:
                node = self._start_node(job, number, index, hosts[index], port, side_by_side)
                with self._lock:
                    job.nodes.append(node)
                if index == job.definition.main_node:
                    main = node
                    job.started = started
                    self._set_status(job, "RUNNING")
            stopped_because = self._wait_for_main(job, main, deadline)
        finally:
            self._stop_nodes(job.nodes)
            with self._lock:
                nodes, job.nodes = job.nodes, []
                for node in nodes:
                    del self._tasks[node.task]
            for node in nodes:
                shutil.rmtree(node.folder, ignore_errors=True)
            self.hosts.give_back(hosts)
        node_codes = {node.index: _exit_code(node.process) for node in nodes if not node.host_lost}
        exit_code = node_codes.get(main.index)
        status_reason = stopped_because or (
            f"Host EC2 (instance {main.host}) terminated." if main.host_lost else "Essential container in task exited"
        )
        attempt = Attempt(
            exit_code=exit_code,
            reason="",
            status_reason=status_reason,
            started=started,
            stopped=_now(),
            host=main.host,
            log_stream=main.log_stream,
            node_codes=node_codes,
        )
        return attempt, stopped_because is None

    def _wait_for_main(self, job: Job, main: Node, deadline: float | None) -> str | None:
        """Wait for the main node's end; why it was ended from outside, None when it ended by itself."""
        while main.process.poll() is None:
            if job.stop_reason is not None:
                return job.stop_reason
            if deadline is not None and time.monotonic() > deadline:
                return "Job attempt duration exceeded timeout"
            time.sleep(POLL_SECONDS)
        return None

    def _stop_nodes(self, nodes: Sequence[Node]) -> None:
        """SIGTERM to what still runs, SIGKILL after the grace period, and to everything the nodes leave behind."""
        for node in nodes:
            if node.process.poll() is None:
                node.process.terminate()
        deadline = time.monotonic() + self.settings.grace.total_seconds()
        while time.monotonic() < deadline and any(node.process.poll() is None for node in nodes):
            time.sleep(POLL_SECONDS)
        for node in nodes:
            node.kill()
            node.process.wait()
            if node.process.stdin:
                node.process.stdin.close()

    def _start_node(self, job: Job, number: int, index: int, host: str, port: int, side_by_side: int) -> Node:
        log_stream = _log_stream(job, number, index)
        path = self.settings.logs / log_stream
        path.parent.mkdir(parents=True, exist_ok=True)
        # A container starts with an empty file system and leaves nothing behind.
        folder = Path(tempfile.mkdtemp(prefix="trnpipe-node-"))
        container = job.definition.containers[index]
        command = [sys.executable, "-I", "-S", node_program.__file__, *self._command(job, container)]
        task = uuid.uuid4().hex
        with self._lock:
            self._tasks[task] = host
        environment = self._environment(job, number, index, host, port, side_by_side, folder)
        if endpoint := self.settings.environment.get("AWS_ENDPOINT_URL"):
            environment["ECS_CONTAINER_METADATA_URI_V4"] = ecs.metadata_uri(endpoint, task)
        with open(path, "wb") as stream:
            process = self.settings.start(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Node(index=index, host=host, task=task, process=process, folder=folder, log_stream=log_stream)

    def _command(self, job: Job, container: Container) -> list[str]:
        words = list(job.command if job.command is not None else container.command)
        if not (self.settings.literal_references and job.definition.multinode):
            words = [REFERENCE_PATTERN.sub(lambda match: job.parameters[match[1]], word) for word in words]
        return [*self.settings.program, *words[1:]] if words[:1] == ["trnpipe"] else words

    def _environment(
        self, job: Job, number: int, index: int, host: str, port: int, side_by_side: int, folder: Path
    ) -> dict[str, str]:
        inherited = {
            key: value for key, value in os.environ.items() if key in INHERITED_VARIABLES or key.startswith(INHERITED_PREFIXES)
        }
        definition = job.definition
        variables = {
            **inherited,
            **definition.containers[index].environment,
            **job.environment,
            **self.settings.environment,
            "OMP_NUM_THREADS": str(max(1, self.settings.cores // side_by_side)),
            "TMPDIR": str(folder),
            "PYTHONUNBUFFERED": "1",
            "AWS_BATCH_CE_NAME": "local",
            "AWS_BATCH_JQ_NAME": job.queue.name,
            "AWS_BATCH_JOB_ATTEMPT": str(number),
            "AWS_BATCH_JOB_ID": f"{job.id}#{index}" if definition.multinode else job.id,
            "TRNPIPE_HOST": host,
        }
        if job.array_index is not None:
            variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(job.array_index)
        if definition.multinode:
            variables["AWS_BATCH_JOB_NUM_NODES"] = str(len(definition.containers))
            variables["AWS_BATCH_JOB_NODE_INDEX"] = str(index)
            variables["AWS_BATCH_JOB_MAIN_NODE_INDEX"] = str(definition.main_node)
            # All nodes share one address here, so each gang needs a port of its own.
            variables["TRNPIPE_LEADER_PORT"] = str(port)
            if index != definition.main_node:
                variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
        return {**variables, **self.hosts.environment.get(host, {})}

    def _set_status(self, job: Job, status: str) -> None:
        with self._lock:
            job.status = status
        self._changed(job)

    def _finish(self, job: Job, failure: str | None, status_reason: str = "") -> None:
        with self._lock:
            job.status_reason = failure or status_reason
            job.stopped = _now()
        self._set_status(job, "SUCCEEDED" if failure is None else "FAILED")
        job.done.set()
        with self._ended:
            self._ended.notify_all()

    def _summary(self, job: Job) -> dict[str, Any]:
        shown = {
            "jobId": job.id,
            "jobArn": job.arn,
            "jobName": job.name,
            "jobDefinition": job.definition.arn,
            "status": job.status,
            "statusReason": job.status_reason,
            "createdAt": job.created,
            "startedAt": job.started,
            "stoppedAt": job.stopped,
            "shareIdentifier": job.share,
        }
        if job.attempts and job.attempts[-1].exit_code is not None:
            shown["container"] = {"exitCode": job.attempts[-1].exit_code}
        if job.definition.multinode:
            shown["nodeProperties"] = {"isMainNode": False, "numNodes": len(job.definition.containers)}
        return {key: value for key, value in shown.items() if value is not None}

    def _describe_job(self, job: Job) -> dict[str, Any]:
        with self._lock:
            detail = {
                **self._summary(job),
                "jobQueue": job.queue.arn,
                "attempts": [attempt.describe() for attempt in job.attempts],
                "parameters": dict(job.parameters),
                "tags": dict(job.tags),
                "dependsOn": [],
                "isCancelled": False,
                "isTerminated": job.stop_reason is not None,
                "retryStrategy": {"attempts": job.retry.attempts},
                "platformCapabilities": ["EC2"],
            }
            if job.priority is not None:
                detail["schedulingPriority"] = job.priority
            if job.timeout_seconds is not None:
                detail["timeout"] = {"attemptDurationSeconds": job.timeout_seconds}
            if job.children:
                states = [child.status for child in job.children]
                detail["arrayProperties"] = {
                    "size": len(job.children),
                    "statusSummary": {state: states.count(state) for state in sorted(set(states))},
                }
            elif job.array_index is not None:
                detail["arrayProperties"] = {"index": job.array_index}
            if job.definition.multinode:
                detail["nodeProperties"] = {
                    "numNodes": len(job.definition.containers),
                    "mainNode": job.definition.main_node,
                    "nodeRangeProperties": [],
                }
                detail.pop("container", None)
            else:
                detail["container"] = self._describe_container(job, 0)
            return detail

    def _describe_node(self, job: Job, index: int) -> dict[str, Any]:
        detail = {**self._describe_job(job), "jobId": f"{job.id}#{index}", "container": self._describe_container(job, index)}
        detail.pop("nodeProperties", None)
        running = next((node for node in job.nodes if node.index == index), None)
        if running and (code := running.process.poll()) is not None:
            detail |= {"status": "FAILED" if code else "SUCCEEDED", "statusReason": "Essential container in task exited"}
        return {**detail, "nodeDetails": {"nodeIndex": index, "isMainNode": index == job.definition.main_node}}

    def _describe_container(self, job: Job, index: int) -> dict[str, Any]:
        container = job.definition.containers[index]
        environment = {**container.environment, **job.environment}
        shown: dict[str, Any] = {
            "command": list(job.command if job.command is not None else container.command),
            "environment": [{"name": key, "value": value} for key, value in environment.items()],
        }
        if running := next((node for node in job.nodes if node.index == index), None):
            shown["logStreamName"] = running.log_stream
            shown["containerInstanceArn"] = ecs.instance_arn(running.host)
        elif job.attempts:
            shown.update(job.attempts[-1].describe()["container"])
            shown.pop("exitCode", None)
            if index in job.attempts[-1].node_codes:
                shown["exitCode"] = job.attempts[-1].node_codes[index]
            shown["logStreamName"] = _log_stream(job, len(job.attempts), index)
        return shown


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fair_share(request: dict[str, Any], queue: JobQueue, definition: JobDefinition) -> tuple[str | None, int | None]:
    share, override = request.get("shareIdentifier"), request.get("schedulingPriorityOverride")
    if not queue.fair_share:
        if share is not None or override is not None:
            raise ClientError(f"queue {queue.name} has no scheduling policy: shareIdentifier and priority must not be given")
        return None, None
    if share is None:
        raise ClientError(f"shareIdentifier must be specified: queue {queue.name} has a fair-share scheduling policy")
    if not SHARE_PATTERN.fullmatch(share):
        raise ClientError(f"shareIdentifier must be alphanumeric, found {share!r}")
    priority = override if override is not None else definition.priority
    if priority is None:
        raise ClientError("schedulingPriority must be in the job definition, or schedulingPriorityOverride in the request")
    if not isinstance(priority, int) or not 0 <= priority <= 9999:
        raise ClientError(f"the scheduling priority must be 0 to 9999, found {priority!r}")
    return share, priority


def _overrides(request: dict[str, Any], definition: JobDefinition) -> tuple[tuple[str, ...] | None, dict[str, str]]:
    overrides = camel(request.get("containerOverrides") or {})
    if unknown := sorted(set(overrides) - {"command", "environment", "resourceRequirements"}):
        raise ClientError(f"unknown or unsupported containerOverrides: {', '.join(unknown)}")
    environment = environment_of(overrides.get("environment", ()))
    if reserved := sorted(key for key in environment if key.startswith("AWS_BATCH")):
        raise ClientError(f"environment variables that start with AWS_BATCH are reserved: {', '.join(reserved)}")
    # Step Functions adds this variable to whatever it submits with `.sync`, a gang included.
    beyond = {key: value for key, value in environment.items() if MANAGED_BY_STEP_FUNCTIONS.get(key) != value}
    if definition.multinode and (beyond or set(overrides) - {"environment"}):
        raise ClientError("containerOverrides are not applicable to multi-node parallel jobs")
    command = overrides.get("command")
    return None if command is None else tuple(command), environment


def _array_children(request: dict[str, Any], parent: Job) -> list[Job]:
    properties = camel(request.get("arrayProperties") or {})
    if not properties:
        return []
    size = properties.get("size")
    if not isinstance(size, int) or not 2 <= size <= 10_000:
        raise ClientError(f"an array job has 2 to 10,000 children, found {size!r}")
    if parent.definition.multinode:
        raise ClientError("a multi-node parallel job cannot be an array job")
    return [
        Job(
            id=f"{parent.id}:{index}",
            name=parent.name,
            queue=parent.queue,
            definition=parent.definition,
            parameters=parent.parameters,
            environment=parent.environment,
            command=parent.command,
            retry=parent.retry,
            timeout_seconds=parent.timeout_seconds,
            share=parent.share,
            priority=parent.priority,
            tags=parent.tags,
            array_index=index,
            created=parent.created,
        )
        for index in range(size)
    ]


def failed_attempts(job: Job) -> Iterator[tuple[Job, Attempt]]:
    """The last attempt of every job or array child that failed."""
    for one in job.children or [job]:
        if one.status == "FAILED" and one.attempts:
            yield one, one.attempts[-1]


def _log_stream(job: Job, attempt: int, node: int) -> str:
    folder = f"{job.name}-{job.id[:8]}"
    if job.array_index is not None:
        return f"{folder}/child-{job.array_index:05d}-attempt-{attempt}.log"
    return f"{folder}/attempt-{attempt}-node-{node:05d}.log"


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """As a container has it: 137 for one that was killed."""
    code = process.returncode
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _now() -> int:
    return int(time.time() * 1000)
