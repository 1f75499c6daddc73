"""Requests that Batch refuses: a state machine that runs here asks for nothing that AWS would not do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.local.definitions import ClientError, JobDefinition, JobQueue, refuse_if
from pipeline.contract import SHARE_PATTERN

JOB_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
SUBMIT_MEMBERS = {
    "jobName",
    "jobQueue",
    "jobDefinition",
    "shareIdentifier",
    "schedulingPriorityOverride",
    "arrayProperties",
    "parameters",
    "containerOverrides",
    "propagateTags",
    "tags",
}
"""Members of SubmitJob that the runner honours; any other is refused rather than silently ignored."""
MOST_TAGS = 50


def check_submission(request: Mapping[str, Any], definition: JobDefinition, queue: JobQueue) -> None:
    """Refuse what SubmitJob refuses (https://docs.aws.amazon.com/batch/latest/APIReference/API_SubmitJob.html).

    Raises:
        ClientError: with Batch's reason.
    """
    refuse_if(unknown := sorted(set(request) - SUBMIT_MEMBERS), f"unknown or unsupported parameters: {', '.join(unknown)}")
    refuse_if(
        not JOB_NAME_PATTERN.fullmatch(name := request.get("jobName", "")),
        f"jobName must match {JOB_NAME_PATTERN.pattern}, found {name!r}",
    )
    _check_share(request, definition, queue)
    refuse_if(len(tags := request.get("tags", {})) > MOST_TAGS, f"a job has at most {MOST_TAGS} tags, found {len(tags)}")
    _check_overrides(request.get("containerOverrides", {}), definition)
    for key, value in request.get("parameters", {}).items():
        refuse_if(not isinstance(value, str), f"parameter {key} must be a string, found {value!r}")
    refuse_if(
        unknown := sorted(set(request.get("parameters", {})) - set(definition.parameters) - definition.references),
        f"parameters unknown to job definition {definition.name}: {', '.join(unknown)}",
    )
    if properties := request.get("arrayProperties"):
        size = properties.get("size")
        refuse_if(not isinstance(size, int) or not 2 <= size <= 10_000, f"an array job has 2 to 10,000 children, found {size!r}")
        refuse_if(definition.multinode, "a multi-node parallel job cannot be an array job")


def _check_share(request: Mapping[str, Any], definition: JobDefinition, queue: JobQueue) -> None:
    share, override = request.get("shareIdentifier"), request.get("schedulingPriorityOverride")
    if not queue.fair_share:
        refuse_if(
            share is not None or override is not None,
            f"queue {queue.name} has no scheduling policy: shareIdentifier and priority must not be given",
        )
        return
    if share is None:
        raise ClientError(f"shareIdentifier must be specified: queue {queue.name} has a fair-share scheduling policy")
    refuse_if(not SHARE_PATTERN.fullmatch(share), f"shareIdentifier must be alphanumeric, found {share!r}")
    priority = override if override is not None else definition.priority
    refuse_if(priority is None, "schedulingPriority must be in the job definition, or schedulingPriorityOverride in the request")
    refuse_if(
        not isinstance(priority, int) or not 0 <= priority <= 9999,
        f"the scheduling priority must be 0 to 9999, found {priority!r}",
    )


def _check_overrides(overrides: Mapping[str, Any], definition: JobDefinition) -> None:
    # Also what `batch:submitJob.sync` adds to every job. The words are those for another type of job that has overrides of
    # its own (https://github.com/nextflow-io/nextflow/issues/5817); that nodeOverrides exclude containerOverrides is in
    # https://github.com/apache/airflow/issues/25522.
    refuse_if(definition.multinode and overrides, "Container overrides should not be set for multinode jobs.")
    refuse_if(
        unknown := sorted(set(overrides) - {"environment", "resourceRequirements"}),
        f"unknown or unsupported containerOverrides: {', '.join(unknown)}",
    )
    refuse_if(
        reserved := sorted(one["name"] for one in overrides.get("environment", ()) if one["name"].startswith("AWS_BATCH")),
        f"environment variables that start with AWS_BATCH are reserved: {', '.join(reserved)}",
    )
