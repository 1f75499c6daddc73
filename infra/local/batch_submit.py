"""What AWS Batch refuses of a SubmitJob request, and the job that it makes of one that is right
(https://docs.aws.amazon.com/batch/latest/APIReference/API_SubmitJob.html)."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infra.local.batch_jobs import Job, milliseconds
from infra.local.definitions import ClientError, JobDefinition, JobQueue, RetryStrategy, camel, environment_of
from pipeline.contract import SHARE_PATTERN

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

MOST_TAGS = 50


def find_queue(queues: Sequence[JobQueue], wanted: str) -> JobQueue:
    """The queue of a name or ARN.

    Raises:
        ClientError: there is none.
    """
    for queue in queues:
        if wanted in (queue.arn, queue.name):
            return queue
    raise ClientError(f"job queue {wanted!r} does not exist")


def build_job(
    request: dict[str, Any],
    definitions: Sequence[JobDefinition],
    queues: Sequence[JobQueue],
    *,
    minimum_timeout_seconds: int,
) -> Job:
    """The job of a SubmitJob request, with its array children.

    Args:
        minimum_timeout_seconds: the shortest attempt timeout that is accepted.

    Raises:
        ClientError: Batch refuses the request.
    """
    if unknown := sorted(set(request) - SUBMIT_MEMBERS):
        raise ClientError(f"unknown or unsupported parameters: {', '.join(unknown)}")
    name = request.get("jobName", "")
    if not JOB_NAME_PATTERN.fullmatch(name):
        raise ClientError(f"jobName must match {JOB_NAME_PATTERN.pattern}, found {name!r}")
    queue = find_queue(queues, request.get("jobQueue", ""))
    definition = _find_definition(definitions, request.get("jobDefinition", ""))
    share, priority = _fair_share(request, queue, definition)
    if len(tags := request.get("tags", {})) > MOST_TAGS:
        raise ClientError(f"a job has at most {MOST_TAGS} tags, found {len(tags)}")
    command, environment = _overrides(request, definition)
    timeout = camel(request.get("timeout", {})).get("attemptDurationSeconds", definition.timeout_seconds)
    if timeout is not None and timeout < minimum_timeout_seconds:
        raise ClientError(f"attemptDurationSeconds must be at least {minimum_timeout_seconds}, found {timeout}")
    job = Job(
        id=str(uuid.uuid4()),
        name=name,
        queue=queue,
        definition=definition,
        parameters=_parameters(request, definition, command),
        environment=environment,
        command=command,
        retry=RetryStrategy.parse(request["retryStrategy"]) if request.get("retryStrategy") else definition.retry,
        timeout_seconds=timeout,
        share=share,
        priority=priority,
        tags=tags,
        created=milliseconds(),
    )
    job.children = _array_children(request, job)
    return job


def _find_definition(definitions: Sequence[JobDefinition], wanted: str) -> JobDefinition:
    revisions = [
        definition
        for definition in definitions
        if wanted in (definition.arn, f"{definition.name}:{definition.revision}", definition.name)
    ]
    if not revisions:
        raise ClientError(f"job definition {wanted!r} does not exist")
    return max(revisions, key=lambda definition: definition.revision)


def _parameters(request: dict[str, Any], definition: JobDefinition, command: tuple[str, ...] | None) -> dict[str, str]:
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
    if definition.multinode and overrides:
        # Also what `batch:submitJob.sync` adds to every job. The words are those for another type of job that has overrides of
        # its own (https://github.com/nextflow-io/nextflow/issues/5817); that nodeOverrides exclude containerOverrides is in
        # https://github.com/apache/airflow/issues/25522.
        raise ClientError("Container overrides should not be set for multinode jobs.")
    if unknown := sorted(set(overrides) - {"command", "environment", "resourceRequirements"}):
        raise ClientError(f"unknown or unsupported containerOverrides: {', '.join(unknown)}")
    environment = environment_of(overrides.get("environment", ()))
    if reserved := sorted(key for key in environment if key.startswith("AWS_BATCH")):
        raise ClientError(f"environment variables that start with AWS_BATCH are reserved: {', '.join(reserved)}")
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
        replace(parent, id=f"{parent.id}:{index}", array_index=index, children=[], attempts=[], nodes=[], done=threading.Event())
        for index in range(size)
    ]
