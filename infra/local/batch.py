"""AWS Batch on one machine: jobs as local processes, under the rules by which Batch runs, retries and refuses them.

What it keeps of Batch, because reliability is tested through it: the job and node environment variables; a gang's main node
first, the others once it is RUNNING, and only the main node's exit counts; a failed attempt restarts the whole gang if
`evaluateOnExit` says so; attempts have a timeout and are not retried after it; array children are independent; hosts have
ids and are used again, so that a fault can stick to one; and requests that Batch refuses are refused. Every node of every
attempt has a log file of its own under the log folder.

This module answers Batch's operations and schedules attempts; batch_submit.py checks requests, batch_nodes.py runs processes,
batch_jobs.py has the jobs.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from infra.local.batch_jobs import FINAL_STATES, Attempt, Job, Node, milliseconds
from infra.local.batch_nodes import POLL_SECONDS, AttemptLaunch, BatchSettings, HostPool, free_port, stop_nodes
from infra.local.batch_submit import build_job, find_queue
from infra.local.definitions import ClientError, JobDefinition, JobQueue

log = logging.getLogger("trnpipe")

MOST_DESCRIBED = 100
LONGEST_REASON = 1024


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
        job = build_job(request, self._definitions, self._queues, minimum_timeout_seconds=self.settings.minimum_timeout_seconds)
        with self._lock:
            self._jobs[job.id] = job
            self._jobs.update({child.id: child for child in job.children})
            thread = threading.Thread(target=self._run, args=(job,), name=f"batch-{job.name}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """Refuses what DescribeJobs does (https://docs.aws.amazon.com/batch/latest/APIReference/API_DescribeJobs.html)."""
        asked = request.get("jobs", ())
        if not 1 <= len(asked) <= MOST_DESCRIBED:
            raise ClientError(f"jobs must have 1 to {MOST_DESCRIBED} ids, found {len(asked)}")
        found = []
        with self._lock:
            for job_id in asked:
                parent_id, is_node, index = job_id.partition("#")
                job = self._jobs.get(parent_id)
                if job and is_node and index.isdigit() and int(index) < len(job.definition.containers):
                    found.append(job.describe_node(int(index)))
                elif job and not is_node:
                    found.append(job.describe())
        return {"jobs": found}

    def terminate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Refuses what TerminateJob does (https://docs.aws.amazon.com/batch/latest/APIReference/API_TerminateJob.html)."""
        job, reason = self._existing(request), request.get("reason")
        if not reason or len(reason) > LONGEST_REASON:
            raise ClientError(f"reason must have 1 to {LONGEST_REASON} characters")
        self._stop(job, reason)
        return {}

    def cancel(self, request: dict[str, Any]) -> dict[str, Any]:
        """Stops jobs that have not started; jobs that have are left alone, as in Batch."""
        job = self._existing(request)
        for one in job.children or [job]:
            if one.status in ("SUBMITTED", "PENDING", "RUNNABLE"):
                self._stop(one, request.get("reason") or "Cancelled")
        return {}

    def list_jobs(self, request: dict[str, Any]) -> dict[str, Any]:
        """Refuses what ListJobs does (https://docs.aws.amazon.com/batch/latest/APIReference/API_ListJobs.html)."""
        if len({"jobQueue", "arrayJobId", "multiNodeJobId"} & request.keys()) != 1:
            raise ClientError("exactly one of jobQueue, arrayJobId and multiNodeJobId must be given")
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
        return {"jobSummaryList": [job.summary() for job in shown]}

    def _list_filtered(self, request: dict[str, Any], filters: list[dict[str, Any]]) -> dict[str, Any]:
        """Jobs of a queue with any status, newest first; a status that is asked for is ignored, as in Batch."""
        name, values = filters[0].get("name"), filters[0].get("values", [])
        if len(filters) != 1 or len(values) != 1 or name not in ("AFTER_CREATED_AT", "JOB_NAME") or not request.get("jobQueue"):
            raise ClientError("the local endpoint lists a queue's jobs by one filter, AFTER_CREATED_AT or JOB_NAME")
        [value] = values
        queue = find_queue(self._queues, request["jobQueue"])
        ours = [job for job in reversed(self.jobs()) if job.queue is queue]
        if name == "AFTER_CREATED_AT":
            shown = [job for job in ours if job.created > int(value)]
        else:
            # Of either case; an asterisk at the end stands for anything.
            matches = str.startswith if value.endswith("*") else str.__eq__
            shown = [job for job in ours if matches(job.name.lower(), value.removesuffix("*").lower())]
        return {"jobSummaryList": [job.summary() for job in shown]}

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

    def pause(self, seconds: float, job_id: str | None = None) -> bool:
        """Wait until a job is over, or so long; whether it is.

        Args:
            job_id: the job; None: whichever is over next, so that one who looked just before it was over waits in vain.
        """
        job = self._jobs.get(job_id or "")
        with self._ended:
            return self._ended.wait(seconds) if job is None else self._ended.wait_for(job.done.is_set, seconds)

    def log_file(self, job: Job, attempt: int, node: int) -> Path:
        """Where the output of one node of one attempt stands."""
        return self.settings.logs / job.log_stream(attempt, node)

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
        for number in count(1):
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
            again = retryable and number < job.retry.attempts and job.retry.again(attempt.exit_code, "", attempt.status_reason)
            if not again:
                self._finish(job, attempt.status_reason)
                return
            log.info("job %s: attempt %d ended with %s, the next one follows", job.name, number, attempt.exit_code)

    def _run_attempt(self, job: Job, number: int, side_by_side: int) -> tuple[Attempt, bool]:
        """Run all nodes once; how the main node ended, and whether that is the job's own doing (not a timeout or a stop)."""
        hosts = self.hosts.take(len(job.definition.containers))
        tasks = [uuid.uuid4().hex for _ in hosts]
        launch = AttemptLaunch(
            settings=self.settings,
            job=job,
            attempt=number,
            hosts=hosts,
            tasks=tasks,
            cores=max(1, self.settings.cores // side_by_side),
            host_environment=self.hosts.environment,
            port=free_port(),
        )
        with self._lock:
            # Before they start: a container asks for its task's metadata at once.
            self._tasks.update(zip(tasks, hosts, strict=True))
        self._set_status(job, "STARTING")
        started = milliseconds()
        deadline = None if job.timeout_seconds is None else time.monotonic() + job.timeout_seconds
        try:
            main = self._start_nodes(launch, started)
            stopped_because = self._wait_for_main(job, main, deadline)
        finally:
            stop_nodes(job.nodes, self.settings.grace)
            with self._lock:
                nodes, job.nodes = job.nodes, []
                for task in tasks:
                    del self._tasks[task]
            self.hosts.give_back(hosts)
        node_codes = {node.index: node.exit_code() for node in nodes if not node.host_lost}
        attempt = Attempt(
            exit_code=node_codes.get(main.index),
            status_reason=stopped_because
            or (f"Host EC2 (instance {main.host}) terminated." if main.host_lost else "Essential container in task exited"),
            started=started,
            stopped=milliseconds(),
            host=main.host,
            log_stream=main.log_stream,
            node_codes=node_codes,
        )
        return attempt, stopped_because is None

    def _start_nodes(self, launch: AttemptLaunch, started: int) -> Node:
        """Start the main node, which makes the job RUNNING, then the others; the main node."""
        job = launch.job
        main = self._start_node(launch, job.definition.main_node)
        job.started = started
        self._set_status(job, "RUNNING")
        for index in range(len(launch.hosts)):
            if index != main.index:
                self._start_node(launch, index)
        return main

    def _start_node(self, launch: AttemptLaunch, index: int) -> Node:
        node = launch.start(index)
        with self._lock:
            launch.job.nodes.append(node)
        return node

    def _wait_for_main(self, job: Job, main: Node, deadline: float | None) -> str | None:
        """Wait for the main node's end; why it was ended from outside, None when it ended by itself."""
        while main.process.poll() is None:
            if job.stop_reason is not None:
                return job.stop_reason
            if deadline is not None and time.monotonic() > deadline:
                return "Job attempt duration exceeded timeout"
            time.sleep(POLL_SECONDS)
        return None

    def _set_status(self, job: Job, status: str) -> None:
        with self._lock:
            job.status = status
        self._changed(job)

    def _finish(self, job: Job, failure: str | None, status_reason: str = "") -> None:
        with self._lock:
            job.status_reason = failure or status_reason
            job.stopped = milliseconds()
        self._set_status(job, "SUCCEEDED" if failure is None else "FAILED")
        job.done.set()
        with self._ended:
            self._ended.notify_all()
