"""`trnpipe stop`: end an execution and every Batch job of it, and wait until nothing of it runs.

StopExecution alone is not enough: Step Functions terminates the job of a `.sync` state as best effort, and knows nothing of a
gang's. The deployment's clean-up (infra/workflow/watches.py) ends both, if its rule and its role are in order; here the operator
sees it done.
"""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console

from pipeline.commands.terminal import note
from pipeline.errors import Transient
from pipeline.operate import run_jobs
from pipeline.operate.deployment import EndpointGone, Site
from pipeline.operate.executions import Execution

PATIENCE = timedelta(minutes=15)
"""Time for terminated jobs to end: a gang finishes its step and writes a checkpoint first."""

LOOK_SECONDS = 5.0
LOCAL_LOOK_SECONDS = 0.5
QUIET_LOOKS = 2
"""Consecutive looks that must find no live job: Step Functions may have been submitting one when the execution was stopped."""


def stop(site: Site, execution: Execution, reason: str, console: Console) -> None:
    """Stop an execution and its jobs; of one that has ended already, only its jobs.

    Raises:
        Transient: jobs still run after PATIENCE.
    """
    try:
        _stop(site, execution, reason, console)
    except EndpointGone:
        note(console, "the local run has ended, and all its jobs with it")
        return
    note(console, f"nothing of execution {execution.name} runs any more")
    note(console, f"resume the run with: trnpipe {'local' if site.state else 'start'} --run {execution.run} {site.option}")


def _stop(site: Site, execution: Execution, reason: str, console: Console) -> None:
    if execution.running:
        site.ask(execution.name, "stepfunctions", "stop_execution", executionArn=execution.arn, error="Stopped", cause=reason)
        note(console, f"execution {execution.name} stopped")
    else:
        note(console, f"execution {execution.name} is {execution.status} already")
    terminated: set[str] = set()
    quiet, deadline = 0, time.monotonic() + PATIENCE.total_seconds()
    while quiet < QUIET_LOOKS:
        alive = run_jobs.alive(site, execution)
        quiet = 0 if alive else quiet + 1
        for job in alive:
            if job["jobId"] not in terminated:
                site.ask(job["jobName"], "batch", "terminate_job", jobId=job["jobId"], reason=reason)
                terminated.add(job["jobId"])
                note(console, f"job {job['jobName']} ({job['jobId']}) terminated, was {job['status']}")
        if time.monotonic() > deadline:
            raise Transient(
                "terminated jobs still run",
                value=[f"{job['jobName']} ({job['jobId']}) is {job['status']}" for job in alive],
                rule=f"they end within {PATIENCE.total_seconds() / 60:.0f} minutes",
                remedy="see their logs; run the same command again to keep waiting",
            )
        if quiet < QUIET_LOOKS:
            time.sleep(LOCAL_LOOK_SECONDS if site.state else LOOK_SECONDS)
