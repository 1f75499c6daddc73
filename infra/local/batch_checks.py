"""Requests that Batch refuses: a state machine that runs here asks for nothing that AWS would not do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.local.definitions import ClientError, JobDefinition, JobQueue, RetryStrategy, refuse_if
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
    "retryStrategy",
    "propagateTags",
    "timeout",
    "tags",
}
"""Members of SubmitJob that the runner honours; any other is refused rather than silently ignored."""
MOST_TAGS = 50


def check_submission(
    request: Mapping[str, Any], definition: JobDefinition, queue: JobQueue, *, minimum_timeout_seconds: int
) -> None:
    """Refuse what SubmitJob refuses (https://docs.aws.amazon.com/batch/latest/APIReference/API_SubmitJob.html).

    Raises:
        ClientError: with Batch's reason.
    """
    if unknown := sorted(set(request) - SUBMIT_MEMBERS):
        raise ClientError(f"unknown or unsupported parameters: {', '.join(unknown)}")
    if not JOB_NAME_PATTERN.fullmatch(name := request.get("jobName", "")):
        raise ClientError(f"jobName must match {JOB_NAME_PATTERN.pattern}, found {name!r}")
    _check_share(request, definition, queue)
    if len(tags := request.get("tags", {})) > MOST_TAGS:
        raise ClientError(f"a job has at most {MOST_TAGS} tags, found {len(tags)}")
    _check_overrides(request.get("containerOverrides", {}), definition)
    for key, value in request.get("parameters", {}).items():
        refuse_if(not isinstance(value, str), f"parameter {key} must be a string, found {value!r}")
    if unknown := sorted(set(request.get("parameters", {})) - set(definition.parameters) - definition.references):
        raise ClientError(f"parameters unknown to job definition {definition.name}: {', '.join(unknown)}")
    timeout = request.get("timeout", {}).get("attemptDurationSeconds", definition.timeout_seconds)
    refuse_if(
        timeout is not None and timeout < minimum_timeout_seconds,
        f"attemptDurationSeconds must be at least {minimum_timeout_seconds}, found {timeout}",
    )
    if strategy := request.get("retryStrategy"):
        check_retry(RetryStrategy.parse(strategy))
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
    if unknown := sorted(set(overrides) - {"environment", "resourceRequirements"}):
        raise ClientError(f"unknown or unsupported containerOverrides: {', '.join(unknown)}")
    if reserved := sorted(one["name"] for one in overrides.get("environment", ()) if one["name"].startswith("AWS_BATCH")):
        raise ClientError(f"environment variables that start with AWS_BATCH are reserved: {', '.join(reserved)}")


def check_retry(retry: RetryStrategy) -> None:
    """Refuse retry rules that Batch refuses (https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html).

    Raises:
        ClientError: with Batch's reason.
    """
    refuse_if(not 1 <= retry.attempts <= 10, f"attempts must be 1 to 10, found {retry.attempts}")
    refuse_if(len(retry.rules) > 5, f"evaluateOnExit has at most 5 entries, found {len(retry.rules)}")
    texts = r"[A-Za-z0-9.:\s]{0,511}\*?"
    for rule in retry.rules:
        refuse_if(
            rule.action.upper() not in ("RETRY", "EXIT"), f"evaluateOnExit action must be RETRY or EXIT, found {rule.action}"
        )
        for pattern, form in ((rule.on_exit_code, r"[0-9]{0,511}\*?"), (rule.on_reason, texts), (rule.on_status_reason, texts)):
            refuse_if(
                pattern is not None and not re.fullmatch(form, pattern),
                f"evaluateOnExit takes {form} with an asterisk at the end only, found {pattern}",
            )
