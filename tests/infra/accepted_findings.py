"""Findings of cdk-nag's AwsSolutions pack that this app accepts, each with the reason.

cdk-nag names a finding by the resolved ARN, exports and logical ids included, so acknowledging it on the construct would
pin generated names. This table says the same in patterns; a test runs the pack, refuses every finding that no entry
accepts, and every entry that accepts nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """One accepted kind of finding.

    Attributes:
        rule: pattern of the finding's whole name, e.g. `AwsSolutions-IAM5[Resource::*]`.
        where: pattern of the construct's path below its stack.
        reason: why it is right here.
    """

    rule: re.Pattern[str]
    where: re.Pattern[str]
    reason: str

    def covers(self, rule: str, path: str) -> bool:
        return bool(self.rule.fullmatch(rule) and self.where.match(path.partition("/")[2]))


def _accepted(rule: str, where: str, reason: str) -> Accepted:
    return Accepted(rule=re.compile(rule), where=re.compile(where), reason=reason)


def _wildcard(resource: str) -> str:
    return rf"AwsSolutions-IAM5\[Resource::{resource}\]"


ACCEPTED: tuple[Accepted, ...] = (
    _accepted(
        r"AwsSolutions-IAM4\[.*/AmazonEC2ContainerServiceforEC2Role\]",
        r"Compute/InstanceRole/",
        "What the ECS agent needs of its host changes with the agent; AWS keeps this policy with it.",
    ),
    _accepted(_wildcard(r"\*"), r"Jobs/ExecutionRole/", "ecr:GetAuthorizationToken knows no resource-level permissions."),
    _accepted(
        _wildcard(r"\*"),
        r"Jobs/(Collect|HealthCheck|Compile|Train)Role/",
        "batch:DescribeJobs knows no resource-level permissions; a gang asks for its own job's parameters.",
    ),
    _accepted(
        _wildcard(r".*/(runs|registry|graphs|ingested|mined|seen|data)/.*"),
        r"Jobs/\w+Role/",
        "Run ids and the objects of a stage are not known at deploy time; the folder of the stage is spelled out.",
    ),
    _accepted(
        _wildcard(r"arn:\w+:s3:::[^*]+\*"),
        r"Jobs/(Prepare|Ingest|Plan|Collect|Precompile|Compile|Train|Evaluate|Publish)Role/",
        "Files are added under the folders that the settings name.",
    ),
    _accepted(
        _wildcard(r"arn:\w+:ecs:.*:(container-instance|task)/.*/\*"),
        r"Jobs/(Mine|Collect|HealthCheck|Compile|Train|Evaluate|Embed)Role/",
        "Batch adds a random part to the name of the cluster it makes, and instance and task ids come and go.",
    ),
    _accepted(
        _wildcard(r"\*"),
        r"(Workflow/StateMachine|Watches/\w+)/Role/",
        "batch:ListJobs, batch:DescribeJobs and the delivery of logs and traces know no resource-level permissions.",
    ),
    _accepted(
        _wildcard(r"arn:\w+:batch:.*:job-definition/[\w-]+:\*"),
        r"Workflow/StateMachine/Role/",
        "The wildcard is the revision: an execution that is redriven names the revision it began with.",
    ),
    _accepted(
        _wildcard(r"arn:\w+:batch:.*:job/\*"),
        r"(Workflow/StateMachine|Watches/Cleanup)/Role/",
        "Job ids are not known at deploy time.",
    ),
    _accepted(
        _wildcard(r".*/runs/\*/(input|result|failure)\.json"),
        r"Workflow/StateMachine/Role/",
        "Run ids and stages stand before the file's name, which is spelled out.",
    ),
    _accepted(
        _wildcard(r"arn:\w+:states:.*:execution:[\w-]+:\*"),
        r"(Workflow/StateMachine|Watches/(Overdue|Cleanup|Week\w+))/Role/",
        "Names of executions are not known at deploy time; the state machine's is spelled out.",
    ),
    _accepted(
        _wildcard(r"\*"),
        r"ImageBuilder/Role/",
        "The passwords of ECR and ECR Public know no resource-level permissions.",
    ),
    _accepted(
        r"AwsSolutions-CB4",
        r"ImageBuilder/Project",
        "Encrypted as the bucket is: without a `customer_key` by a key of AWS. The build leaves no artifact to encrypt.",
    ),
    _accepted(r"AwsSolutions-SQS3", r"Schedule/DeadLetters/", "This queue is itself the dead-letter queue of the schedule."),
)
