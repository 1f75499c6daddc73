"""The local Batch service as tests use it: they wait for its jobs, and take nodes and hosts away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from infra.local.batch import BatchRunner
from infra.local.batch_jobs import Job
from infra.local.batch_nodes import BatchSettings
from infra.local.definitions import JobDefinition, JobQueue


class FaultyBatchRunner(BatchRunner):
    """The runner with failures of nodes and hosts.

    Args:
        changed: called with a job whenever its status has changed.
    """

    def __init__(
        self,
        definitions: Sequence[JobDefinition],
        queues: Sequence[JobQueue],
        settings: BatchSettings,
        changed: Callable[[Job], None] = lambda _job: None,
    ) -> None:
        super().__init__(definitions, queues, settings)
        self._changed = changed

    def wait(self, job_id: str, timeout: timedelta) -> Job:
        """Wait until a job has ended.

        Raises:
            TimeoutError: the job still runs after the timeout.
        """
        job = self._jobs[job_id]
        if not job.done.wait(timeout.total_seconds()):
            raise TimeoutError(f"job {job.name} is still {job.status}")
        return job

    def kill_node(self, job_id: str, index: int) -> None:
        """Kill one running node's processes, as an out-of-memory kill of its container does."""
        for node in list(self._jobs[job_id].nodes):
            if node.index == index:
                node.kill()

    def lose_host(self, host: str) -> None:
        """Remove a host with everything on it; it never comes back."""
        self.hosts.drained.add(host)
        lost = [node for job in list(self._jobs.values()) for node in job.nodes if node.host == host]
        for node in lost:
            node.host_lost = True
            node.kill()

    def _set_status(self, job: Job, status: str) -> None:
        super()._set_status(job, status)
        self._changed(job)
