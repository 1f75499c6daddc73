"""Questions of a job to AWS about itself: its parameters in Batch, where the command holds a literal `Ref::run`; its host in ECS.

A host that fails its health check leaves its cluster (DRAINING), or the retry would land on it again. A container learns which
host it runs on from ECS's task metadata (version 4) and DescribeTasks. EC2's own metadata is no way to it: the hosts keep their
containers from it, because it also hands out the host's role (infra/constructs/compute.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from pipeline.contract import JOB_ENDED, JOBS_AT_ONCE, RUN_PARAMETER
from pipeline.errors import BadConfig, Transient, one_line
from pipeline.log import log
from pipeline.run import ecs_metadata
from pipeline.store.aws_errors import AwsError, classify_aws_error, error_text

RULE = f"Batch replaces Ref::{RUN_PARAMETER} in the command, or the job can read its own parameters"
ATTEMPTS = 8
ECS_CLIENT = Config(connect_timeout=2, read_timeout=3, retries={"mode": "standard", "total_max_attempts": 2})
"""The node is about to end and its gang waits for its record: better to skip draining than to wait long."""
BATCH_CLIENT = Config(connect_timeout=2, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 2})
"""For questions about other nodes during the work, which are repeated."""
ECS_TROUBLE = (*ecs_metadata.TROUBLE, BotoCoreError, ClientError)
"""No answer, or not the documented one."""


def run_uri_of_job(job_id: str) -> str:
    """The run folder's URI among the parameters of this job.

    Args:
        job_id: the id under which the job was submitted, without a node's or an array child's suffix.

    Raises:
        BadConfig: no such job, no such parameter, no permission.
        Transient: Batch cannot be reached or answers with an error of its own.
    """
    if not job_id:
        raise BadConfig(
            f"the command holds the literal Ref::{RUN_PARAMETER} and there is no Batch job to ask for its value",
            value="AWS_BATCH_JOB_ID is not set",
            rule=RULE,
            remedy="pass the run folder's URI: trnpipe stage NAME --run URI",
        )
    try:
        jobs = _jobs([job_id], Config(retries={"mode": "standard", "max_attempts": ATTEMPTS}))
    except (ClientError, BotoCoreError) as error:
        if classify_aws_error(error) in (AwsError.BUSY, AwsError.UNREACHABLE):
            raise Transient("AWS Batch did not answer", value=f"{job_id}: {error_text(error)}") from error
        raise BadConfig(
            "AWS Batch did not describe this job",
            value=f"{job_id}: {error_text(error)}",
            rule=RULE,
            remedy="allow batch:DescribeJobs in the job role, and set AWS_REGION",
        ) from error
    if not jobs:
        raise BadConfig("AWS Batch does not know this job", value=job_id, rule=RULE)
    if uri := jobs[0].get("parameters", {}).get(RUN_PARAMETER):
        log.info("the command holds a literal Ref::%s; the job's own parameter says %s", RUN_PARAMETER, uri)
        return str(uri)
    raise BadConfig(
        f"the job was submitted without the parameter `{RUN_PARAMETER}`",
        value=job_id,
        rule=RULE,
        remedy=f"submit it with Parameters: {{{RUN_PARAMETER}: URI}}, as the state machine does",
    )


def ended_nodes(job_id: str, nodes: Sequence[int]) -> dict[int, str]:
    """Return the nodes of a gang whose containers have ended, with Batch's reason. Best effort; never raises.

    Args:
        job_id: the gang's, without a node's suffix.
    """
    try:
        return {
            int(str(job["jobId"]).rpartition("#")[2]): str(job.get("statusReason") or job["status"])
            for job in _jobs([f"{job_id}#{node}" for node in nodes[:JOBS_AT_ONCE]], BATCH_CLIENT)
            if job["status"] in JOB_ENDED
        }
    except (OSError, ValueError, KeyError, BotoCoreError, ClientError) as error:
        log.info("the state of the other nodes is unknown: %s", one_line(error))
        return {}


def queue_wait_seconds(job_id: str, *, now: float) -> float | None:
    """Return how long this attempt of a job has waited: since its submission, or the end of the attempt before. Best effort.

    Args:
        job_id: without a node's suffix.
        now: seconds since the epoch, when its main container has begun.

    Returns:
        None where Batch gives no answer.
    """
    try:
        [job] = _jobs([job_id], BATCH_CLIENT)
        ended = [attempt["stoppedAt"] for attempt in job.get("attempts", ()) if "stoppedAt" in attempt]
        since = max([int(job["createdAt"]), *ended]) / 1000
    except (OSError, ValueError, KeyError, BotoCoreError, ClientError) as error:
        log.info("this job's waiting time is unknown: %s", one_line(error))
        return None
    return max(0.0, now - float(since))


def _jobs(ids: Sequence[str], config: Config) -> list[dict[str, Any]]:
    return list(boto3.session.Session().client("batch", config=config).describe_jobs(jobs=ids)["jobs"])


def instance_id() -> str:
    """Return the EC2 id of this container's host; empty outside ECS, or where ECS does not answer."""
    try:
        if (host := _container_instance()) is None:
            return ""
        return str(_ecs().describe_container_instances(**host)["containerInstances"][0].get("ec2InstanceId", ""))
    except (*ECS_TROUBLE, IndexError) as error:
        log.info("the instance's id is not known: %s", one_line(error))
        return ""


def leave_cluster() -> bool:
    """Take this host out of its ECS cluster: its containers continue, ECS starts no new ones there. Best effort; never raises.

    It is drained, not terminated, because this process must still report its failure. Batch's guide does not say how it counts a
    host that is DRAINING ("Managed compute environments"), so `max_vcpus` leaves room for one more host.

    Returns:
        Whether ECS confirmed it. False outside ECS, and where there is no instance to take out (Fargate).
    """
    try:
        if (host := _container_instance()) is None:
            return False
        answer = _ecs().update_container_instances_state(**host, status="DRAINING")
        if answer.get("failures"):
            raise ValueError(f"ECS answered {answer['failures']}")
    except ECS_TROUBLE as error:
        log.warning("this host could not be taken out of its cluster, a retry may land on it again: %s", one_line(error))
        return False
    log.warning("this host takes no further jobs: container instance %s is DRAINING", *host["containerInstances"])
    return True


def _container_instance() -> dict[str, Any] | None:
    """Return this container's EC2 instance as arguments of ECS's requests; None outside ECS and on Fargate."""
    if (task := ecs_metadata.read_metadata("/task")) is None:
        return None
    cluster, arn = str(task["Cluster"]), str(task["TaskARN"])
    answer = _ecs().describe_tasks(cluster=cluster, tasks=[arn])
    if not answer["tasks"]:
        raise ValueError(f"ECS does not know this task: {answer.get('failures')}")
    instance = answer["tasks"][0].get("containerInstanceArn")
    return {"cluster": cluster, "containerInstances": [instance]} if instance else None


def _ecs() -> Any:
    return boto3.session.Session().client("ecs", config=ECS_CLIENT)
