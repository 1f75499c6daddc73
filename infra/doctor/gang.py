"""Tries in a real account what no document settles about gangs, on two cheap hosts, and says which `gang_submit` to set.

1. Does `batch:submitJob.sync` take a multi-node job, and hear of its end? It adds container overrides of its own.
2. Is `Ref::run` replaced in the command of every node?

Both forms are the deployment's own states (infra/states.py). Each node tells by its exit code what its command said.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from infra.console import Console
from infra.doctor.asking import Finding, ok, problem, warning
from infra.doctor.probe import LIVE_JOBS, Probe
from infra.states import Targets, gang
from pipeline.contract import Queue, Stage

Form = Literal["sync", "poll"]
FORMS: tuple[Form, ...] = get_args(Form)

STAGE = Stage.HEALTH_CHECK
"""Whose states are tried: the gang with the shortest timeout."""

RUN = "s3://doctor/run"
REPLACED, LITERAL, NEITHER = 0, 41, 42
ENDED = ("SUCCEEDED", "FAILED")


def node_command(hold_seconds: int) -> list[str]:
    """What every node runs: it ends with what it was given for `Ref::run`.

    Args:
        hold_seconds: how long the main node stays, since its end takes the others with it; they start after it.
    """
    script = (
        f'if [ "$AWS_BATCH_JOB_NODE_INDEX" = 0 ]; then sleep {hold_seconds}; fi; '
        f'case "$0" in {RUN}) exit {REPLACED};; Ref:*) exit {LITERAL};; *) exit {NEITHER};; esac'
    )
    return ["sh", "-c", script, "Ref::run"]


def definition(form: Form, queue_arn: str, partition: str, region: str) -> dict[str, Any]:
    """A state machine of nothing but the deployment's states for one gang, in one form."""
    targets = Targets(
        partition=partition,
        console=Console(region=region, bucket="", job_logs="", dashboard=""),
        bucket="",
        lock_table="",
        topic="",
        queues=dict.fromkeys(Queue, queue_arn),
        jobs={},
        gangs={},
        gang_submit=form,
        capacity_wait_minutes=20,
        config={},
        read=(),
        local_paths=False,
        prices={},
        hosts={},
        embed_hosts=1,
        tags={},
        defaults={},
    )
    return {
        "Comment": "trnpipe doctor --gang: may be deleted",
        "StartAt": STAGE.value,
        "States": {
            **gang(targets, STAGE, then="Done"),
            "KeepFailure": {"Type": "Fail", "ErrorPath": "$.caught.Error", "CausePath": "$.caught.Cause"},
            "Done": {"Type": "Succeed"},
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one form went.

    Attributes:
        execution: status of its execution; RUNNING if it never heard of the job's end.
        error, cause: of an execution that failed.
        job: status of its job; None if there never was one.
        reason: the job's.
        codes: node -> exit code, None where Batch gives none.
    """

    form: Form
    execution: str
    error: str = ""
    cause: str = ""
    job: str | None = None
    reason: str = ""
    codes: Mapping[int, int | None]

    @property
    def works(self) -> bool:
        """Whether the job was taken and run, and the execution ended as its job did, whatever its nodes were given."""
        agrees = {"SUCCEEDED": "SUCCEEDED", "FAILED": "FAILED"}
        return self.job is not None and agrees.get(self.job) == self.execution and self.codes.get(0) in (REPLACED, LITERAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long to look.

    Attributes:
        look_seconds: between two looks.
        deaf_seconds: how long after its job's end an execution may go on before it is taken for deaf.
        patience_seconds: for one form.
        pause: waits.
        clock: seconds from any moment on.
    """

    look_seconds: float = 10
    deaf_seconds: float = 300
    patience_seconds: float = 1800
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def walk(probe: Probe, form: Form, machine_arn: str, definition_arn: str, queue_arn: str, pace: Pace) -> Outcome:
    """Execute one form to its end, or until it is clear that it does not come to one.

    Raises:
        Denied, Unavailable, Refused: as the calls do.
    """
    # Batch remembers jobs for a week, those of an earlier probe's queue of this name too.
    run = f"doctor-{form}-{secrets.token_hex(4)}"
    given = {
        "gang": {STAGE.value: definition_arn},
        "run": {"id": run, "uri": RUN},
        "share": probe.share,
    }
    execution_arn = probe.call("stepfunctions", "StartExecution", stateMachineArn=machine_arn, input=json.dumps(given))[
        "executionArn"
    ]
    started, ended = pace.clock(), None
    while True:
        execution = probe.call("stepfunctions", "DescribeExecution", executionArn=execution_arn)
        job = _job(probe, queue_arn, f"{STAGE.value}-{run}")
        if ended is None and job is not None and job["status"] in ENDED:
            ended = pace.clock()
        deaf = ended is not None and pace.clock() - ended > pace.deaf_seconds
        if execution["status"] != "RUNNING" or deaf or pace.clock() - started > pace.patience_seconds:
            return Outcome(
                form=form,
                execution=execution["status"],
                error=execution.get("error", ""),
                cause=execution.get("cause", ""),
                job=job["status"] if job else None,
                reason=(job or {}).get("statusReason", ""),
                codes=_codes(probe, job["jobId"]) if job else {},
            )
        pace.pause(pace.look_seconds)


def _job(probe: Probe, queue_arn: str, name: str) -> dict[str, Any] | None:
    """The job of a name; a queue of our own holds few."""
    for status in (*LIVE_JOBS, *ENDED):
        for job in probe.call("batch", "ListJobs", jobQueue=queue_arn, jobStatus=status)["jobSummaryList"]:
            if job["jobName"] == name:
                return dict(job)
    return None


def _codes(probe: Probe, job_id: str) -> dict[int, int | None]:
    ids = [f"{job_id}#{node}" for node in range(probe.nodes)]
    described = probe.call("batch", "DescribeJobs", jobs=ids)["jobs"]
    by_id = {job["jobId"]: job.get("container", {}).get("exitCode") for job in described}
    return {node: by_id.get(name) for node, name in enumerate(ids)}


def verdict(outcomes: Mapping[Form, Outcome], setting: Form) -> list[Finding]:
    """What to set, and what every node was given.

    Args:
        setting: `gang_submit` as it is set.
    """
    working = [form for form in FORMS if outcomes[form].works]
    found = [_judge_form(outcome) for outcome in outcomes.values()]
    if not working:
        found.append(
            problem(
                "neither form of submitting gangs works",
                value=f"gang_submit is {setting}",
                rule="one of sync and poll has to",
                remedy="what the two findings above say has to be put right first",
            )
        )
        return found
    if setting in working and (setting == "sync" or "sync" not in working):
        found.append(ok("gang_submit", f"{setting} is right"))
    else:
        tell = warning if setting in working else problem
        found.append(
            tell(
                f"set gang_submit to {working[0]}",
                value=f"gang_submit is {setting}",
                rule="sync, where it works: then stopping an execution stops its gang too"
                if setting in working
                else "the form that works in this account",
                remedy=f"-c trnpipe.gang_submit={working[0]}, or the same in cdk.json; then npx aws-cdk@2 deploy",
            )
        )
    found.append(_judge_reference(outcomes[working[0]]))
    return found


def _judge_form(outcome: Outcome) -> Finding:
    value = "; ".join(
        part
        for part in (
            f"execution {outcome.execution} {outcome.error}".strip(),
            f"job {outcome.job} {outcome.reason}".strip() if outcome.job else "no job",
            outcome.cause,
        )
        if part
    )
    if outcome.works:
        return ok(f"form {outcome.form}", value)
    if outcome.job is None:
        return problem(f"the form {outcome.form} does not take gangs", value=value, rule="Batch takes the job")
    if outcome.execution == "RUNNING" and outcome.job in ENDED:
        return problem(
            f"the form {outcome.form} takes a gang but does not hear of its end",
            value=value,
            rule="the execution ends when its job does",
        )
    return problem(
        f"the gang of the form {outcome.form} did not run",
        value=value,
        rule="both nodes start and end by themselves",
        remedy="see the reason; hosts need a way to ECR, ECS and the image: --subnet, --image, --instance-type",
    )


def _judge_reference(outcome: Outcome) -> Finding:
    value = ", ".join(f"node {node}: {code}" for node, code in sorted(outcome.codes.items()))
    if all(code == REPLACED for code in outcome.codes.values()):
        return ok("Ref::run", "replaced in every node's command")
    if literal := [str(node) for node, code in outcome.codes.items() if code == LITERAL]:
        return ok("Ref::run", f"left as it is on node {', '.join(literal)}: stages then ask Batch for their parameters")
    return warning(
        "what became of Ref::run cannot be told for every node",
        value=f"exit codes: {value}",
        rule=f"{REPLACED}: replaced; {LITERAL}: left as it is; None or 137: the main node ended first",
        remedy="trnpipe doctor --gang --hold 600",
    )
