"""The Batch jobs of an execution, found by their tag: their states, and where their output is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from pipeline.contract import EXECUTION_TAG, JOB_ENDED, JOBS_AT_ONCE, StageFailure
from pipeline.operate.deployment import Site
from pipeline.operate.executions import Execution

CLOCKS_DIFFER = timedelta(minutes=1)
"""Allowance for a job that seems older than its execution."""

Job = Mapping[str, Any]


def describe(site: Site, ids: Sequence[str]) -> list[Job]:
    """Return the jobs as DescribeJobs describes them, without those that Batch has forgotten (a week after their end)."""
    pages = (list(ids[first : first + JOBS_AT_ONCE]) for first in range(0, len(ids), JOBS_AT_ONCE))
    return [job for page in pages for job in site.ask("jobs", "batch", "describe_jobs", jobs=page)["jobs"]]


def alive(site: Site, execution: Execution) -> list[Job]:
    """Return the jobs of an execution that have not ended.

    ListJobs filters by one status at a time and not by tag. So this lists all jobs of the machine's queues since the execution
    started, and describes those that have not ended. Children of arrays and nodes of gangs belong to their job.
    """
    since = {"name": "AFTER_CREATED_AT", "values": [str(round((execution.started - CLOCKS_DIFFER).timestamp() * 1000))]}
    with site.asking("jobs"):
        paginate = site.client("batch").get_paginator("list_jobs").paginate
        pages = [page for queue in site.machine.queues for page in paginate(jobQueue=queue, filters=[since])]
    ids = [job["jobId"] for page in pages for job in page["jobSummaryList"] if job["status"] not in JOB_ENDED]
    return [
        job
        for job in describe(site, ids)
        if job.get("tags", {}).get(EXECUTION_TAG) == execution.arn and job["status"] not in JOB_ENDED
    ]


def failed_logs(site: Site, job_id: str, failure: StageFailure | None) -> Iterator[str]:
    """Yield where the output of a failed job is: that of the node or child that failed first, as far as known.

    Args:
        failure: the stage's own record of the failure, which names the node or the child.
    """
    job = _one(site, job_id)
    if job and job.get("arrayProperties", {}).get("size"):
        job = _one(site, f"{job_id}:{failure.node}" if failure else _failed_child(site, job_id))
    elif job and failure is not None and job.get("nodeProperties") and failure.node != job["nodeProperties"].get("mainNode"):
        job = _one(site, f"{job_id}#{failure.node}") or job
    if job and (stream := _log_stream(job)):
        yield site.log_of(stream)


def _one(site: Site, job_id: str | None) -> Job | None:
    return next(iter(describe(site, [job_id])), None) if job_id else None


def _failed_child(site: Site, job_id: str) -> str | None:
    answer = site.ask("an array's children", "batch", "list_jobs", arrayJobId=job_id, jobStatus="FAILED")
    return next((str(child["jobId"]) for child in answer["jobSummaryList"]), None)


def _log_stream(job: Job) -> str | None:
    """Return the log stream of a job's last attempt; a gang's job names its main node's alone."""
    ended = [attempt.get("container", {}).get("logStreamName") for attempt in job.get("attempts", ())]
    return next((stream for stream in (job.get("container", {}).get("logStreamName"), *reversed(ended)) if stream), None)
