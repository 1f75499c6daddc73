"""What a job asks AWS Batch about itself: its parameters, where Batch left `Ref::run` in the command as it stands."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

from pipeline.contract import RUN_PARAMETER
from pipeline.errors import BadConfig, Transient

RULE = f"Batch replaces Ref::{RUN_PARAMETER} in the command, or the job can read its own parameters"
ATTEMPTS = 8


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
    jobs = _describe(job_id)
    if not jobs:
        raise BadConfig("AWS Batch does not know this job", value=job_id, rule=RULE)
    uri = jobs[0].get("parameters", {}).get(RUN_PARAMETER)
    if not uri:
        raise BadConfig(
            f"the job was submitted without the parameter `{RUN_PARAMETER}`",
            value=job_id,
            rule=RULE,
            remedy=f"submit it with Parameters: {{{RUN_PARAMETER}: URI}}, as the state machine does",
        )
    return str(uri)


def _describe(job_id: str) -> list[dict[str, Any]]:
    try:
        client = boto3.session.Session().client("batch", config=Config(retries={"mode": "standard", "max_attempts": ATTEMPTS}))
        jobs: list[dict[str, Any]] = client.describe_jobs(jobs=[job_id])["jobs"]
    except (NoRegionError, NoCredentialsError) as error:
        raise BadConfig("AWS Batch cannot be asked", value=error, rule=RULE, remedy="set AWS_REGION and a job role") from error
    except ClientError as error:
        code = error.response["Error"]["Code"]
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status >= 500 or "Throttl" in code or code == "TooManyRequestsException":
            raise Transient("AWS Batch answered with an error", value=f"{job_id}: {code}") from error
        raise BadConfig(
            "AWS Batch refused to describe this job",
            value=f"{job_id}: {code}",
            rule=RULE,
            remedy="allow batch:DescribeJobs in the job role",
        ) from error
    except BotoCoreError as error:
        raise Transient("AWS Batch could not be reached", value=error, remedy="a new attempt may succeed") from error
    return jobs
