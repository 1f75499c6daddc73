"""Building blocks of the state machine: each gives the states that do one thing, errors caught and retried, as plain data.

A block's way out when all is well is its argument `then`. Its failures lead to a state `NAME failed`, which remembers where
that was, and from there to `KeepFailure` (infra/workflow.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.console import Console
from pipeline.contract import EXECUTION_TAG, RUN_TAG, STAGES, Queue, Stage, StageSpec

State = dict[str, Any]
States = dict[str, State]

INCOMPLETE_RESULT = "IncompleteResult"

CALL_SECONDS = 60
"""Timeout of a state that calls a service once."""

POLL_SECONDS = 60
POLL_LAPS = 400
"""A polled gang is looked at this often at most: an execution may have 25,000 events, and a lap makes about eleven."""

DISCARD: dict[str, Any] = {"ResultPath": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the states call, as plain strings (ARNs, names), and the settings that shape them.

    Attributes:
        partition: of the stack.
        console: links for the notification.
        bucket, lock_table, topic: names of bucket and table, ARN of the topic.
        queues: ARN of each queue.
        jobs: ARN of the job definition of each single or array stage.
        gangs: node count -> gang stage -> ARN of its job definition.
        gang_submit: `sync` lets Step Functions wait for a gang; `poll` submits it and looks again and again.
        capacity_wait_minutes: how long a job may wait for hosts, added to every job state's timeout.
        config: the deployment's partial run configuration.
        read: s3:// folders and files that runs may read beside the bucket.
        local_paths: whether runs may name local paths.
        prices: queue -> USD for an hour of one node, as far as it is known.
        hosts: queue -> what its nodes are.
        embed_hosts: how many of them the embed queue has at most.
        tags: of every job, beside its run: what the deployment's costs are told by.
        defaults: share, registry and lock wait of an execution that names none.
    """

    partition: str
    console: Console
    bucket: str
    lock_table: str
    topic: str
    queues: Mapping[Queue, str]
    jobs: Mapping[Stage, str]
    gangs: Mapping[int, Mapping[Stage, str]]
    gang_submit: Literal["sync", "poll"]
    capacity_wait_minutes: int
    config: Mapping[str, Any]
    read: Sequence[str]
    local_paths: bool
    prices: Mapping[Queue, float]
    hosts: Mapping[Queue, str]
    embed_hosts: int
    tags: Mapping[str, str]
    defaults: Mapping[str, Any]


def job(
    targets: Targets,
    stage: Stage,
    *,
    then: str,
    name: str | None = None,
    more: Mapping[str, Any] | None = None,
    on_error: str | None = None,
) -> States:
    """Submit a single or array job and wait for its end."""
    submit = {**_submission(targets, stage), "JobDefinition": targets.jobs[stage], **(more or {})}
    return _submit_and_wait(targets, name or stage.value, stage, submit, then=then, on_error=on_error)


def gang(targets: Targets, stage: Stage, *, then: str) -> States:
    """Submit a gang and wait for its end, in the form that the deployment has set."""
    submit = {**_submission(targets, stage), "JobDefinition.$": f"$.gang.{stage.value}"}
    if targets.gang_submit == "sync":
        return _submit_and_wait(targets, stage.value, stage, submit, then=then)
    return _submit_and_poll(targets, stage, submit, then=then)


def _submission(targets: Targets, stage: Stage) -> dict[str, Any]:
    """The part of SubmitJob that all jobs share. No overrides: whatever a stage needs stands in the run folder."""
    return {
        "JobName.$": f"States.Format('{stage.value}-{{}}', $.run.id)",
        "JobQueue": targets.queues[STAGES[stage].queue],
        "Parameters": {"run.$": "$.run.uri"},
        "ShareIdentifier.$": "$.share",
        "SchedulingPriorityOverride": _priority(stage),
        "PropagateTags": True,
        "Tags": {**targets.tags, f"{RUN_TAG}.$": "$.run.id", f"{EXECUTION_TAG}.$": "$$.Execution.Id"},
    }


def _priority(stage: Stage) -> int:
    # Within a share, the run that has come further goes first: finishing one beats starting two.
    return 10 * (1 + list(STAGES).index(stage))


def _submit_and_wait(
    targets: Targets, name: str, stage: Stage, submit: Mapping[str, Any], *, then: str, on_error: str | None = None
) -> States:
    catch, failed = _catch(name, stage=stage, on_error=on_error)
    return {
        name: {
            "Type": "Task",
            "Resource": resource(targets, "batch:submitJob.sync"),
            "Parameters": dict(submit),
            "TimeoutSeconds": _patience_seconds(targets, STAGES[stage]),
            **DISCARD,
            "Retry": _batch_retry(),
            "Catch": catch,
            "Next": then,
        },
        **failed,
    }


def _submit_and_poll(targets: Targets, stage: Stage, submit: Mapping[str, Any], *, then: str) -> States:
    """The same without `.sync`, for an account where that form does not take gangs."""
    name = stage.value
    wait, look, status, stop = (f"{name} ({word})" for word in ("wait", "look", "status", "stop"))
    patience = _patience_seconds(targets, STAGES[stage])
    lap_seconds = max(POLL_SECONDS, -(-patience // POLL_LAPS))
    laps = patience // lap_seconds
    catch, failed = _catch(name, stage=stage)
    stop_catch = [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.caught", "Next": stop}]
    task = {"Type": "Task", "TimeoutSeconds": CALL_SECONDS, "Retry": _batch_retry()}
    return {
        name: {
            **task,
            "Resource": resource(targets, "aws-sdk:batch:submitJob"),
            "Parameters": dict(submit),
            "ResultSelector": {"JobId.$": "$.JobId", "laps": 0},
            "ResultPath": "$.job",
            "Catch": catch,
            "Next": wait,
        },
        wait: {"Type": "Wait", "Seconds": lap_seconds, "Next": look},
        look: {
            **task,
            "Resource": resource(targets, "aws-sdk:batch:describeJobs"),
            "Parameters": {"Jobs.$": "States.Array($.job.JobId)"},
            "ResultSelector": {"job.$": "States.ArrayGetItem($.Jobs, 0)"},
            "ResultPath": "$.job.seen",
            "Catch": stop_catch,
            "Next": status,
        },
        status: {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$.job.seen.job.Status", "StringEquals": "SUCCEEDED", "Next": then},
                {"Variable": "$.job.seen.job.Status", "StringEquals": "FAILED", "Next": f"{name} (ended)"},
                {"Variable": "$.job.laps", "NumericGreaterThan": laps, "Next": f"{name} (overdue)"},
            ],
            "Default": f"{name} (lap)",
        },
        f"{name} (lap)": {
            "Type": "Pass",
            "Parameters": {"JobId.$": "$.job.JobId", "laps.$": "States.MathAdd($.job.laps, 1)"},
            "ResultPath": "$.job",
            "Next": wait,
        },
        f"{name} (ended)": {
            "Type": "Pass",
            "Parameters": {"Error": "States.TaskFailed", "Cause.$": "States.JsonToString($.job.seen.job)"},
            "ResultPath": "$.caught",
            "Next": f"{name} failed",
        },
        f"{name} (overdue)": {
            "Type": "Pass",
            "Result": {"Error": "States.Timeout", "Cause": ""},
            "ResultPath": "$.caught",
            "Next": stop,
        },
        stop: {
            **task,
            "Resource": resource(targets, "aws-sdk:batch:terminateJob"),
            "Parameters": {"JobId.$": "$.job.JobId", "Reason": "the execution gave the job up"},
            **DISCARD,
            "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": None, "Next": f"{name} failed"}],
            "Next": f"{name} failed",
        },
        **failed,
    }


def call(
    targets: Targets,
    name: str,
    action: str,
    parameters: Mapping[str, Any],
    *,
    then: str,
    fields: Mapping[str, Any],
    catch: list[dict[str, Any]] | None = None,
    on_error: str | None = None,
    started: bool = False,
) -> States:
    """Call a service once."""
    catch_all, failed = _catch(name, on_error=on_error, started=started)
    return {
        name: {
            "Type": "Task",
            "Resource": resource(targets, action),
            "Parameters": dict(parameters),
            **fields,
            "TimeoutSeconds": CALL_SECONDS,
            "Retry": call_retry(),
            "Catch": [*(catch or ()), *catch_all],
            "Next": then,
        },
        **failed,
    }


def read_result(targets: Targets, name: str, stage: Stage, path: str, *, needed: tuple[str, ...], then: str) -> States:
    """Read a stage's result file and keep its metrics at `path`.

    Args:
        needed: metrics that later states use. A path that leads nowhere would end the execution on the spot, past every
            catch, with the lock held: so they are looked for once, here.
    """
    parameters = {"Bucket": targets.bucket, "Key.$": f"States.Format('{{}}/{stage.value}/result.json', $.run.key)"}
    key = path.removeprefix("$.")
    check, keep, incomplete = (f"{word}{key.capitalize()}" for word in ("Check", "Keep", "Incomplete"))
    fields = {"ResultSelector": {"result.$": "States.StringToJson($.Body)"}, "ResultPath": "$.file"}
    return {
        **call(targets, name, "aws-sdk:s3:getObject", parameters, then=check, fields=fields, started=True),
        check: {
            "Type": "Choice",
            "Choices": [
                {"And": [{"Variable": f"$.file.result.metrics.{metric}", "IsPresent": True} for metric in needed], "Next": keep}
            ],
            "Default": incomplete,
        },
        keep: {"Type": "Pass", "Parameters": {"metrics.$": "$.file.result.metrics"}, "ResultPath": path, "Next": then},
        incomplete: {
            "Type": "Pass",
            "Result": {
                "result": "failed",
                "state": name,
                "Error": INCOMPLETE_RESULT,
                "Cause": f"{stage}/result.json lacks one of the metrics {', '.join(needed)}. rule: the machine chooses by them. "
                "remedy: the image and this deployment are of different versions; deploy the matching ones",
            },
            "ResultPath": "$.outcome",
            "Next": "report",
        },
    }


def _catch(
    name: str, *, stage: Stage | None = None, on_error: str | None = None, started: bool = False
) -> tuple[list[dict[str, Any]], States]:
    """The catch-all of a state and the state it leads to, which remembers where the failure was.

    Args:
        stage: the stage whose failure.json explains the failure, None for a state that is no job.
        on_error: where to go on instead, for states whose failure changes nothing.
        started: whether there is something to report on; always so for a stage.
    """
    if on_error is not None:
        return [{"ErrorEquals": ["States.ALL"], "ResultPath": None, "Next": on_error}], {}
    failed = f"{name} failed"
    at = {
        "result": "failed",
        "state": name,
        "stage": stage.value if stage else "",
        "started": started or stage is not None,
        "Error": "",
        "Cause": "",
    }
    keep: State = {"Type": "Pass", "Result": at, "ResultPath": "$.at", "Next": "KeepFailure"}
    return [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.caught", "Next": failed}], {failed: keep}


def _patience_seconds(targets: Targets, spec: StageSpec) -> int:
    # A stage resumes where its last attempt ended, so all attempts together take little more than one; the wait for hosts
    # comes on top. Twice the attempt's limit bounds a stage that starts over and over.
    return 60 * (2 * spec.timeout_minutes + targets.capacity_wait_minutes)


def resource(targets: Targets, action: str) -> str:
    return f"arn:{targets.partition}:states:::{action}"


def _backoff(errors: list[str]) -> dict[str, Any]:
    return {
        "ErrorEquals": errors,
        "IntervalSeconds": 2,
        "BackoffRate": 2,
        "MaxAttempts": 6,
        "MaxDelaySeconds": 60,
        "JitterStrategy": "FULL",
    }


def _batch_retry() -> list[dict[str, Any]]:
    """Only errors of the service itself: a job that failed has had its attempts."""
    return [
        _backoff(
            ["Batch.ServerException", "Batch.AWSBatchException", "Batch.SdkClientException", "Batch.TooManyRequestsException"]
        )
    ]


def call_retry() -> list[dict[str, Any]]:
    """Every error but those that are answers: the services disagree on the names of theirs, and all calls may be repeated."""
    answers = ["DynamoDB.ConditionalCheckFailedException", "S3.NoSuchKeyException", "Sfn.ExecutionDoesNotExistException"]
    return [{"ErrorEquals": answers, "MaxAttempts": 0}, _backoff(["States.TaskFailed", "States.Timeout"])]
