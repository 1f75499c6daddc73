"""Building blocks of the state machine: each returns the states of one action, errors caught and retried, as plain data.

A block continues on success with the state of its argument `then`. Its failures lead to a state `NAME failed`, which records
the place, and from there to `KeepFailure` (infra/workflow/machine.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.console import Console
from pipeline.contract import EXECUTION_TAG, RUN_TAG, STAGES, Queue, Shape, Stage

State = dict[str, Any]
States = dict[str, State]

SHARE_TAG = "trnpipe:share"
"""Tag of every job with its fair-share identifier, by which the bill tells models apart."""

CALL_SECONDS = 60
"""Timeout of a state that calls a service once."""

GANG_OVERDUE = "GangOverdue"
GANG_LOST = "GangLost"
"""Errors of a gang's states: its job has not ended in time; Batch does not describe its job."""

JOB_VARIABLE = "job"
"""Variable of the execution: id of the gang's job that it polls."""

SEEN_JOB = "$.seen.job"
"""Path of the gang's job as the last look saw it."""

SHORT_LAP_SECONDS = 60
SHORT_LAPS = 120
LONG_LAP_SECONDS = 300
"""Laps of polling a gang's job: every minute for two hours, then every five minutes."""

MOST_MISSES = 10
"""So many looks in a row may fail, or not find the job, before the gang counts as lost; each is retried for about a minute."""

MOST_EVENTS = 17_000
"""Budget of events of an execution, whose history may hold 25,000. At that limit the execution ends at once, past every catch
(https://docs.aws.amazon.com/step-functions/latest/dg/service-quotas.html). The rest is for calls that are retried."""
LAP_EVENTS = 9
OTHER_EVENTS = 4_200
"""Events of a lap of polling (entered and left: wait, look, choice; scheduled, started, succeeded: look), and of
everything else, the longest wait for the lock included."""

DISCARD: dict[str, Any] = {"ResultPath": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The resources that the states call, as plain strings (ARNs, names), and the settings that shape the states.

    Attributes:
        partition: of the stack.
        console: links for the notification.
        bucket, lock_table, topic: names of bucket and table, ARN of the topic.
        queues: ARN of each queue.
        jobs: ARN of the job definition of each single or array stage.
        gangs: node count -> gang stage -> ARN of its job definition.
        minutes: stage -> after how many Batch ends an attempt.
        capacity_wait_minutes: how long a job may wait for hosts, added to every job state's timeout.
        deployment: the part of every run's input.json that the settings determine.
        tags: of every job, in addition to its run and share; they allocate the deployment's costs.
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
    minutes: Mapping[Stage, int]
    capacity_wait_minutes: int
    deployment: Mapping[str, Any]
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
    name = name or stage.value
    catch, failed = _catch(name, stage=stage, on_error=on_error)
    return {
        name: {
            "Type": "Task",
            "Resource": resource(targets, "batch:submitJob.sync"),
            "Parameters": {**_submission(targets, stage), "JobDefinition": targets.jobs[stage], **(more or {})},
            "TimeoutSeconds": _patience_seconds(targets, stage),
            **DISCARD,
            "Retry": _batch_retry(),
            "Catch": catch,
            "Next": then,
        },
        **failed,
    }


def gang(targets: Targets, stage: Stage, *, then: str) -> States:
    """Submit a gang and look at its job until it ends.

    Not `.sync`: that form adds an environment variable as a container override, which multi-node jobs do not take
    (https://github.com/apache/airflow/issues/25522). Step Functions therefore does not end the job of an execution that is
    stopped; infra/workflow/watches.py does.
    """
    wait, long_wait, look, status = (_named(stage, word) for word in ("wait", "wait long", "look", "status"))
    long_lap = _long_lap_seconds(targets)
    catch, remember = _catch(stage.value, stage=stage)
    unseen = {"Not": {"Variable": f"{SEEN_JOB}.Status", "IsPresent": True}}
    laps = {"laps.$": "States.MathAdd($laps, 1)"}
    found = {"misses": 0}
    return {
        stage.value: {
            **_batch_call(targets, "submitJob", {**_submission(targets, stage), "JobDefinition.$": f"$.gang.{stage.value}"}),
            # An error of the connection says nothing of the request: repeated, it may submit the gang twice.
            "Retry": _batch_retry(refused_only=True),
            "Assign": {f"{JOB_VARIABLE}.$": "$.JobId", "laps": 0, "misses": 0},
            **DISCARD,
            "Catch": catch,
            "Next": wait,
        },
        wait: {"Type": "Wait", "Seconds": SHORT_LAP_SECONDS, "Assign": laps, "Next": look},
        long_wait: {"Type": "Wait", "Seconds": long_lap, "Assign": {**laps, **found}, "Next": look},
        look: {
            **_batch_call(targets, "describeJobs", {"Jobs.$": f"States.Array(${JOB_VARIABLE})"}),
            "ResultSelector": {"job.$": "States.ArrayGetItem($.Jobs, 0)"},
            "ResultPath": "$.seen",
            # An error, and an answer without the job (States.IntrinsicFailure), leave no job behind: they count as a miss.
            "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.seen", "Next": status}],
            "Next": status,
        },
        status: {
            "Type": "Choice",
            "Choices": [
                {
                    "And": [unseen, {"Variable": "$misses", "NumericGreaterThanEquals": MOST_MISSES}],
                    "Next": _named(stage, "lost"),
                },
                {**unseen, "Assign": {"misses.$": "States.MathAdd($misses, 1)"}, "Next": wait},
                {"Variable": f"{SEEN_JOB}.Status", "StringEquals": "SUCCEEDED", "Next": then},
                {"Variable": f"{SEEN_JOB}.Status", "StringEquals": "FAILED", "Next": _named(stage, "ended")},
                {
                    "Variable": "$laps",
                    "NumericGreaterThanEquals": _laps(_patience_seconds(targets, stage), long_lap),
                    "Next": _named(stage, "overdue"),
                },
                {"Variable": "$laps", "NumericLessThan": SHORT_LAPS, "Assign": found, "Next": wait},
            ],
            "Default": long_wait,
        },
        **_gang_failures(targets, stage),
        **remember,
    }


def _gang_failures(targets: Targets, stage: Stage) -> States:
    """The failures of a gang's job; a job that may still run is terminated."""
    stop, failed = _named(stage, "stop"), f"{stage.value} failed"
    minutes = _patience_seconds(targets, stage) // 60

    def caught(error: str, cause: str, then: str) -> State:
        return {"Type": "Pass", "Parameters": {"Error": error, "Cause.$": cause}, "ResultPath": "$.caught", "Next": then}

    return {
        # As `.sync` has it.
        _named(stage, "ended"): caught("States.TaskFailed", f"States.JsonToString({SEEN_JOB})", failed),
        _named(stage, "overdue"): caught(
            GANG_OVERDUE,
            f"States.Format('job {{}} is {{}} and has not ended. rule: {stage.value} has {minutes} minutes, its "
            "wait for hosts included. remedy: see its log and the queue, then start the run again with its id', "
            f"${JOB_VARIABLE}, {SEEN_JOB}.Status)",
            stop,
        ),
        _named(stage, "lost"): caught(
            GANG_LOST,
            f"States.Format('Batch does not describe job {{}}. rule: at most {MOST_MISSES} looks in a row may fail. "
            f"remedy: see the job and the health of AWS Batch, then start the run again with its id', ${JOB_VARIABLE})",
            stop,
        ),
        stop: {
            **_batch_call(targets, "terminateJob", {"JobId.$": f"${JOB_VARIABLE}", "Reason": "the execution gave the job up"}),
            **DISCARD,
            "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": None, "Next": failed}],
            "Next": failed,
        },
    }


def _named(stage: Stage, word: str) -> str:
    return f"{stage.value} ({word})"


def _batch_call(targets: Targets, action: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "Type": "Task",
        "TimeoutSeconds": CALL_SECONDS,
        "Retry": _batch_retry(),
        "Resource": resource(targets, f"aws-sdk:batch:{action}"),
        "Parameters": dict(parameters),
    }


def _submission(targets: Targets, stage: Stage) -> dict[str, Any]:
    """The part of SubmitJob that all jobs share. No overrides: everything that a stage needs is in the run folder."""
    return {
        "JobName.$": f"States.Format('{stage.value}-{{}}', $.run.id)",
        "JobQueue": targets.queues[STAGES[stage].queue],
        "Parameters": {"run.$": "$.run.uri"},
        "ShareIdentifier.$": "$.share",
        # Within a share, the run that has come further goes first: finishing one beats starting two.
        "SchedulingPriorityOverride": 10 * (1 + list(STAGES).index(stage)),
        "PropagateTags": True,
        "Tags": {
            **targets.tags,
            f"{SHARE_TAG}.$": "$.share",
            f"{RUN_TAG}.$": "$.run.id",
            f"{EXECUTION_TAG}.$": "$$.Execution.Id",
        },
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
    check, keep, incomplete = (f"{word}{path.removeprefix('$.').capitalize()}" for word in ("Check", "Keep", "Incomplete"))
    return {
        **call(
            targets,
            name,
            "aws-sdk:s3:getObject",
            parameters,
            then=check,
            fields={"ResultSelector": {"result.$": "States.StringToJson($.Body)"}, "ResultPath": "$.file"},
            started=True,
        ),
        check: {
            "Type": "Choice",
            "Choices": [
                {"And": [{"Variable": f"$.file.result.metrics.{metric}", "IsPresent": True} for metric in needed], "Next": keep}
            ],
            "Default": incomplete,
        },
        keep: {"Type": "Pass", "Parameters": {"metrics.$": "$.file.result.metrics"}, "ResultPath": path, "Next": then},
        incomplete: outcome(
            "report",
            result="failed",
            state=name,
            Error="IncompleteResult",
            Cause=f"{stage}/result.json lacks one of the metrics {', '.join(needed)}. rule: the machine chooses by them. "
            "remedy: the image and this deployment are of different versions; deploy the matching ones",
        ),
    }


def outcome(then: str, **fields: str) -> State:
    """A state that records how the run ends: result, state, Error and Cause, each a text, a path or an intrinsic function."""
    filled = {f"{key}.$" if value.startswith(("$", "States.")) else key: value for key, value in fields.items()}
    kind = "Result" if filled.keys() == fields.keys() else "Parameters"
    return {"Type": "Pass", kind: filled, "ResultPath": "$.outcome", "Next": then}


def _catch(
    name: str, *, stage: Stage | None = None, on_error: str | None = None, started: bool = False
) -> tuple[list[dict[str, Any]], States]:
    """The catch-all of a state and the state it leads to, which remembers where the failure was.

    Args:
        stage: the stage whose failure.json explains the failure, None for a state that is no job.
        on_error: the next state after a failure that changes nothing.
        started: whether there is something to report on; always so for a stage.
    """
    if on_error is not None:
        return [{"ErrorEquals": ["States.ALL"], "ResultPath": None, "Next": on_error}], {}
    failed = f"{name} failed"
    return (
        [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.caught", "Next": failed}],
        {
            failed: {
                "Type": "Pass",
                "Result": {
                    "result": "failed",
                    "state": name,
                    "stage": stage.value if stage else "",
                    "started": started or stage is not None,
                    "Error": "",
                    "Cause": "",
                },
                "ResultPath": "$.at",
                "Next": "KeepFailure",
            }
        },
    )


def _patience_seconds(targets: Targets, stage: Stage) -> int:
    # A stage resumes where its last attempt ended, so all attempts together take little more than one; the wait for hosts
    # comes on top. Twice the attempt's limit bounds a stage that starts over and over.
    return 60 * (2 * targets.minutes[stage] + targets.capacity_wait_minutes)


def _laps(patience_seconds: int, long_lap_seconds: int) -> int:
    """Return how many laps of polling take that long."""
    beyond = max(0, patience_seconds - SHORT_LAPS * SHORT_LAP_SECONDS)
    return min(SHORT_LAPS, -(-patience_seconds // SHORT_LAP_SECONDS)) + -(-beyond // long_lap_seconds)


def _long_lap_seconds(targets: Targets) -> int:
    """Longer than LONG_LAP_SECONDS only where the limits of all gangs together would take more than MOST_EVENTS."""
    gangs = [stage for stage, spec in STAGES.items() if spec.shape is Shape.GANG]
    beyond = sum(max(0, _patience_seconds(targets, stage) - SHORT_LAPS * SHORT_LAP_SECONDS) for stage in gangs)
    # Each gang may begin a lap that it does not finish.
    most_laps = (MOST_EVENTS - OTHER_EVENTS) // LAP_EVENTS - len(gangs) * (SHORT_LAPS + 1)
    return max(LONG_LAP_SECONDS, -(-beyond // most_laps))


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


def _batch_retry(*, refused_only: bool = False) -> list[dict[str, Any]]:
    """Only errors of the service itself: a job that failed has had its attempts.

    Errors without a name of their own, throttling among them, are `AWSBatchException` to `.sync` and `BatchException` to calls
    of the SDK.

    Args:
        refused_only: whether Batch must have answered, so that the request has had no effect.
    """
    unanswered = [] if refused_only else ["SdkClientException"]
    errors = ["ServerException", "AWSBatchException", "BatchException", "TooManyRequestsException", *unanswered]
    return [_backoff([f"Batch.{error}" for error in errors])]


def call_retry() -> list[dict[str, Any]]:
    """Every error but those that are answers: the services disagree on the names of theirs, and all calls may be repeated."""
    answers = ["DynamoDB.ConditionalCheckFailedException", "S3.NoSuchKeyException", "Sfn.ExecutionDoesNotExistException"]
    return [{"ErrorEquals": answers, "MaxAttempts": 0}, _backoff(["States.TaskFailed", "States.Timeout"])]
