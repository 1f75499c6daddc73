"""AWS Batch on one machine: jobs as local processes, under the rules by which Batch runs, retries and refuses them.

The rules of Batch that it keeps, because reliability is tested through it: the job and node environment variables; a gang's main
node first, the others once it is RUNNING, and only the main node's exit counts; a failed attempt restarts the whole gang if
`evaluateOnExit` says so; attempts have a timeout and are not retried after it; array children are independent; hosts have
ids and are reused, so that a fault can stick to one. Every node of every attempt has its own log file under the log folder.

This module answers Batch's operations and runs attempts; batch_checks.py refuses requests, batch_nodes.py runs processes,
batch_jobs.py has the jobs. Every job gets its hosts at once: which of several waits for hosts is Batch's own affair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import Any

from infra.local.batch_checks import check_submission
from infra.local.batch_jobs import Attempt, Job, build_job, milliseconds, named
from infra.local.batch_nodes import POLL_SECONDS, BatchSettings, start_node, stop_nodes
from infra.local.definitions import ClientError, JobDefinition, JobQueue, refuse_if
from infra.local.ecs import HostPool
from pipeline.contract import JOB_ENDED, JOBS_AT_ONCE
from pipeline.log import log
from pipeline.ports import free_port

LONGEST_REASON = 1024


class BatchRunner:
    """The Batch service. `call` answers its REST operations; every method is safe to use from several threads.

    Args:
        definitions, queues: the registered ones.
        settings: how to run jobs.

    Attributes:
        hosts: the compute environment's instances.
    """

    def __init__(self, definitions: Sequence[JobDefinition], queues: Sequence[JobQueue], settings: BatchSettings) -> None:
        self.hosts = HostPool()
        self.settings = settings
        self._definitions = list(definitions)
        self._queues = list(queues)
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._threads: list[threading.Thread] = []
        self._children = ThreadPoolExecutor(max_workers=settings.side_by_side)
        self._ended = threading.Condition()

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one operation, named as in its path (`submitjob`).

        Raises:
            ClientError: Batch refuses the request, or the endpoint does not know the operation.
        """
        operations = {
            "submitjob": self.submit,
            "describejobs": self.describe,
            "terminatejob": self.terminate,
            "listjobs": self.list_jobs,
        }
        refuse_if(operation not in operations, f"the local endpoint does not answer {operation}")
        return operations[operation](request)

    def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        definition = named(self._definitions, request.get("jobDefinition", ""), "job definition")
        queue = named(self._queues, request.get("jobQueue", ""), "job queue")
        check_submission(request, definition, queue)
        job = build_job(request, definition, queue)
        self._jobs |= {one.id: one for one in (job, *job.children)}
        thread = threading.Thread(target=self._run, args=(job,), name=f"batch-{job.name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses what DescribeJobs does (https://docs.aws.amazon.com/batch/latest/APIReference/API_DescribeJobs.html)."""
        asked = request.get("jobs", ())
        refuse_if(not 1 <= len(asked) <= JOBS_AT_ONCE, f"jobs must have 1 to {JOBS_AT_ONCE} ids, found {len(asked)}")
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

    def terminate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses what TerminateJob does (https://docs.aws.amazon.com/batch/latest/APIReference/API_TerminateJob.html)."""
        reason = request.get("reason", "")
        refuse_if(not 1 <= len(reason) <= LONGEST_REASON, f"reason must have 1 to {LONGEST_REASON} characters")
        if (job := self._jobs.get(request.get("jobId", ""))) is None:
            raise ClientError(f"job {request.get('jobId')!r} does not exist")
        self._stop(job, reason)
        return {}

    def list_jobs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Children of an array job that have one status; or by one filter, a queue's jobs of any status, newest first. Refuses
        what ListJobs does (https://docs.aws.amazon.com/batch/latest/APIReference/API_ListJobs.html)."""
        refuse_if(
            len({"jobQueue", "arrayJobId", "multiNodeJobId"} & request.keys()) != 1,
            "exactly one of jobQueue, arrayJobId and multiNodeJobId must be given",
        )
        with self._lock:
            if "arrayJobId" in request:
                parent = self._jobs.get(request["arrayJobId"])
                return {
                    "jobSummaryList": [
                        one.summary() for one in (parent.children if parent else []) if one.status == request["jobStatus"]
                    ]
                }
            queue = named(self._queues, request["jobQueue"], "job queue")
            found = [job for job in reversed(self.jobs()) if job.queue is queue]
        match request.get("filters"):
            case [{"name": "AFTER_CREATED_AT", "values": [since]}]:
                found = [job for job in found if job.created > int(since)]
            case [{"name": "JOB_NAME", "values": [name]}]:
                # Batch ignores case; an asterisk at the end stands for any text.
                found = [job for job in found if fnmatchcase(job.name.lower(), name.lower())]
            case _:
                raise ClientError("the local endpoint lists a queue's jobs by one filter, AFTER_CREATED_AT or JOB_NAME")
        return {"jobSummaryList": [job.summary() for job in found]}

    def jobs(self) -> list[Job]:
        """All jobs in the order of submission, without array children."""
        return [job for job in list(self._jobs.values()) if job.array_index is None]

    def pause(self, seconds: float, job_id: str | None = None) -> bool:
        """Wait until a job has ended, at most `seconds`; return whether one has.

        Args:
            job_id: the job; None: the next job to end. A job that ended before the call does not count.
        """
        job = self._jobs.get(job_id or "")
        with self._ended:
            return self._ended.wait(seconds) if job is None else self._ended.wait_for(job.done.is_set, seconds)

    def close(self) -> None:
        """Terminate all running jobs and wait for them; no process that a job started is left."""
        for job in self.jobs():
            self._stop(job, "The local endpoint is closing")
        for thread in self._threads:
            thread.join()
        self._children.shutdown()

    def _stop(self, job: Job, reason: str) -> None:
        for one in (job, *job.children):
            if one.status not in JOB_ENDED and one.stop_reason is None:
                one.stop_reason = reason

    def _run(self, job: Job) -> None:
        """A job's life from RUNNABLE to its end, in its own thread."""
        if not job.children:
            self._run_attempts(job, side_by_side=len(job.definition.containers))
            return
        self._set_status(job, "PENDING")
        list(self._children.map(partial(self._run_attempts, side_by_side=self.settings.side_by_side), job.children))
        failed = any(child.status == "FAILED" for child in job.children)
        self._finish(job, "FAILED" if failed else "SUCCEEDED", "Array Child Job failed" if failed else "")

    def _run_attempts(self, job: Job, *, side_by_side: int) -> None:
        for number in count(1):
            self._set_status(job, "RUNNABLE")
            if job.stop_reason is not None:
                self._finish(job, "FAILED", job.stop_reason)
                return
            attempt, retryable = self._run_attempt(job, number, side_by_side)
            job.attempts.append(attempt)
            succeeded = attempt.exit_code == 0 and retryable
            retry = job.definition.retry
            again = retryable and number < retry.attempts and retry.again(attempt.exit_code, "", attempt.status_reason)
            if succeeded or not again:
                self._finish(job, "SUCCEEDED" if succeeded else "FAILED", attempt.status_reason)
                return
            log.info("job %s: attempt %d ended with %s, the next one follows", job.name, number, attempt.exit_code)

    def _run_attempt(self, job: Job, number: int, side_by_side: int) -> tuple[Attempt, bool]:
        """Run all nodes once; how the main node ended, and whether it ended by itself (no timeout, no termination)."""
        places = list(self.hosts.take(len(job.definition.containers)).items())
        main_node = job.definition.main_node
        port = free_port()
        self._set_status(job, "STARTING")
        started = milliseconds()
        deadline = None if (limit := job.definition.timeout_seconds) is None else time.monotonic() + limit
        stopped_because = None
        try:
            # The others start once the main node runs.
            for index in sorted(range(len(places)), key=lambda index: index != main_node):
                host, task = places[index]
                node = start_node(
                    self.settings,
                    job,
                    index,
                    attempt=number,
                    host=host,
                    task=task,
                    cores=max(1, self.settings.cores // side_by_side),
                    port=port,
                    host_environment=self.hosts.environment.get(host, {}),
                )
                job.nodes.append(node)
                job.started = started
                self._set_status(job, "RUNNING")
            main = job.nodes[0]
            while main.process.poll() is None and stopped_because is None:
                if job.stop_reason is not None:
                    stopped_because = job.stop_reason
                elif deadline is not None and time.monotonic() > deadline:
                    stopped_because = "Job attempt duration exceeded timeout"
                else:
                    time.sleep(POLL_SECONDS)
        finally:
            stop_nodes(job.nodes, self.settings.grace)
            nodes, job.nodes = job.nodes, []
            self.hosts.give_back(dict(places))
        ended = f"Host EC2 (instance {main.host}) terminated." if main.host_lost else "Essential container in task exited"
        node_codes = {node.index: node.exit_code() for node in nodes if not node.host_lost}
        return Attempt(
            exit_code=node_codes.get(main.index),
            status_reason=stopped_because or ended,
            started=started,
            stopped=milliseconds(),
            host=main.host,
            log_stream=job.log_stream(number, main.index),
            node_codes=node_codes,
        ), stopped_because is None

    def _set_status(self, job: Job, status: str) -> None:
        job.status = status

    def _finish(self, job: Job, status: str, status_reason: str) -> None:
        # Invariant: an ended job has its reason. All other updates set a single attribute.
        with self._lock:
            job.status_reason = status_reason
            job.stopped = milliseconds()
            self._set_status(job, status)
        job.done.set()
        with self._ended:
            self._ended.notify_all()
