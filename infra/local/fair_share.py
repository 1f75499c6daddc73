"""The order of a queue's jobs when they need more hosts than there are.

AWS Batch sums each share's use of vCPUs over time, multiplies it by the share's weight factor, and takes the job of the share
with the lowest result; within a share, jobs of a higher scheduling priority come first
(https://docs.aws.amazon.com/batch/latest/userguide/share-identifiers.html). Running and recently ended jobs count, recent use
more than earlier use, and what is older than the policy's decay does not count
(https://docs.aws.amazon.com/batch/latest/APIReference/API_FairsharePolicy.html). AWS does not publish the curve: here the weight
of a second falls linearly from 1 to 0. All hosts of a queue are of one type, so hosts stand for vCPUs. The compute reservation is
left out.

A job that does not fit keeps its place, and the jobs behind it wait
(https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html). Without a policy the order is that of submission.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from infra.local.batch_jobs import Job
from infra.local.definitions import FairShare


@dataclass(slots=True, kw_only=True)
class _Use:
    """Hosts that an attempt of a job has taken; times in seconds."""

    job: Job
    started: float
    ended: float = math.inf

    def host_seconds(self, now: float, window: float) -> float:
        """The use within the window, each second by its weight."""
        oldest, newest = (min(window, now - min(now, moment)) for moment in (self.started, self.ended))
        return len(self.job.definition.containers) * (oldest - newest) * (1 - (oldest + newest) / (2 * window))


class Turns:
    """The jobs of one queue that wait for hosts, and what its shares have used. Safe to use from several threads.

    Args:
        policy: of the queue; None: first come, first served.
        hosts: the most that run at once; None: as many as jobs ask for.
        clock: seconds.
    """

    def __init__(self, policy: FairShare | None, hosts: int | None, clock: Callable[[], float]) -> None:
        self._policy = policy or FairShare()
        self._hosts = hosts
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._uses: list[_Use] = []

    def join(self, job: Job) -> None:
        """Let a job wait, unless it does."""
        with self._lock:
            if job not in self._waiting:
                self._waiting.append(job)

    def take(self, job: Job) -> bool:
        """Give a waiting job its hosts, and return whether it was its turn."""
        with self._lock:
            now = self._clock()
            self._uses = [use for use in self._uses if now - use.ended < self._policy.decay_seconds]
            # Of equals, the first in the list is the first that was submitted.
            first = min(self._waiting, key=lambda one: (self._usage(one.share, now), -(one.priority or 0)))
            taken = sum(len(use.job.definition.containers) for use in self._uses if use.ended == math.inf)
            if self._hosts is not None and (job is not first or taken + len(job.definition.containers) > self._hosts):
                return False
            self._waiting.remove(job)
            self._uses.append(_Use(job=job, started=now))
            return True

    def leave(self, job: Job) -> None:
        """Take a job's hosts back, or its place among those that wait."""
        with self._lock:
            self._waiting = [one for one in self._waiting if one is not job]
            for use in self._uses:
                if use.job is job and use.ended == math.inf:
                    use.ended = self._clock()

    def _usage(self, share: str | None, now: float) -> float:
        """What a share has used, by its weight."""
        return self._policy.weight(share) * sum(
            use.host_seconds(now, self._policy.decay_seconds) for use in self._uses if use.job.share == share
        )
