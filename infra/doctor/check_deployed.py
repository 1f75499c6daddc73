"""The deployed stacks: whether they match the settings, are healthy, and whether jobs or notifications are stuck."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from infra.app import CDK
from infra.doctor.asking import Findings, Refused, Subject, check, ok, problem, warning
from infra.doctor.blueprint import COMPUTE_ENVIRONMENT
from pipeline.contract import JOBS_AT_ONCE

COMPLETE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE")
REASONS = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": (
        "EC2 has no free hosts of this type in the zone now",
        "wait (the job is cancelled after capacity_wait_hours), reserve capacity, or set another zone",
    ),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": (
        "the job is larger than its compute environment may become",
        "raise max_vcpus (or embed_max_vcpus) in the settings and deploy",
    ),
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": (
        "no host of the compute environment has what the job asks for",
        "deploy: the job definitions then ask for what the instance type has",
    ),
    "MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": (
        "the instance type and the launch template or zone do not go together",
        "check the zone: aws ec2 describe-instance-type-offerings --location-type availability-zone; then the AMI's architecture",
    ),
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS": (
        "the service role of Batch may not start hosts",
        "aws iam create-service-linked-role --aws-service-name batch.amazonaws.com, and look for policies that deny it",
    ),
    "ACTION_REQUIRED": (
        "its compute environment is INVALID",
        "aws batch describe-compute-environments names the cause",
    ),
    "UNDETERMINED": (
        "Batch cannot determine why the job waits",
        "check the EC2 quota, and that hosts reach ECS: routes, endpoints, DNS, egress",
    ),
}
"""statusReason of a job at the head of its queue -> meaning and remedy
(https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html)."""


@check("Stacks", "cloudformation:DescribeStacks", "cloudformation:GetTemplate")
def stacks(subject: Subject) -> Findings:
    for name, template in subject.blueprint.stacks.templates.items():
        deploy = f"{CDK} deploy {name}"
        try:
            [stack] = subject.ask("cloudformation", "DescribeStacks", StackName=name)["Stacks"]
        except Refused as refused:
            yield problem(f"the stack {name} does not exist", value=refused, remedy=deploy)
            continue
        status = stack["StackStatus"]
        if status not in COMPLETE:
            yield problem(
                f"the stack {name} is not complete",
                value=f"{status} {stack.get('StackStatusReason', '')}".strip(),
                rule=f"one of {', '.join(COMPLETE)}",
                remedy=f"aws cloudformation describe-stack-events --stack-name {name} names the cause; then {deploy}",
            )
        body = subject.ask("cloudformation", "GetTemplate", StackName=name)["TemplateBody"]
        if differing := differences(json.loads(body) if isinstance(body, str) else body, template):
            yield warning(
                f"the stack {name} is not what these settings would deploy",
                value=", ".join(differing),
                rule="deployed and synthesized template are the same",
                remedy=f"{CDK} diff {name} shows it; {deploy}, or read the settings that it was deployed from",
            )
        elif status in COMPLETE:
            yield ok(f"stack {name}", f"{status}, as the settings say")


def differences(deployed: Mapping[str, Any], synthesized: Mapping[str, Any]) -> list[str]:
    """Resources that differ, as `+ Id` (not deployed yet), `- Id` (only deployed) and `~ Id`.

    What the CDK CLI adds of its own, paths and usage statistics, is no difference.
    """
    there, wanted = (
        {
            logical_id: {key: value for key, value in resource.items() if key != "Metadata"}
            for logical_id, resource in template["Resources"].items()
            if resource["Type"] != "AWS::CDK::Metadata"
        }
        for template in (deployed, synthesized)
    )
    return [
        f"{'+' if key not in there else '-' if key not in wanted else '~'} {key}"
        for key in sorted(there.keys() | wanted.keys())
        if there.get(key) != wanted.get(key)
    ]


@check("Batch", "cloudformation:ListStackResources", "batch:DescribeComputeEnvironments")
def environments(subject: Subject) -> Findings:
    answer = subject.deployed(COMPUTE_ENVIRONMENT, "batch", "DescribeComputeEnvironments", "computeEnvironments")
    for environment in answer.get("computeEnvironments", ()):
        name, status, state = (environment[key] for key in ("computeEnvironmentName", "status", "state"))
        if (status, state) == ("VALID", "ENABLED"):
            yield ok("compute environment", f"{name}: VALID, ENABLED")
        else:
            yield problem(
                f"the compute environment {name} is {state if status == 'VALID' else status}",
                value=environment.get("statusReason", ""),
                rule="hosts start in VALID and ENABLED environments only",
                remedy=f"aws batch update-compute-environment --state ENABLED --compute-environment {name}"
                if status == "VALID"
                else f"correct what the reason names; then {CDK} deploy",
            )


@check(
    "Batch",
    "cloudformation:ListStackResources",
    "batch:DescribeJobQueues",
    "batch:GetJobQueueSnapshot",
    "batch:DescribeJobs",
)
def queues(subject: Subject) -> Findings:
    for queue in subject.deployed("AWS::Batch::JobQueue", "batch", "DescribeJobQueues", "jobQueues").get("jobQueues", ()):
        name = queue["jobQueueName"]
        yield (
            ok("queue", f"{name}: VALID, ENABLED")
            if queue.get("status") == "VALID" and queue["state"] == "ENABLED"
            else problem(
                f"the queue {name} is {queue.get('status')}, {queue['state']}",
                value=queue.get("statusReason", ""),
                rule="VALID and ENABLED",
                remedy=f"aws batch update-job-queue --state ENABLED --job-queue {name}",
            )
        )
        snapshot = subject.ask("batch", "GetJobQueueSnapshot", jobQueue=queue["jobQueueArn"])
        for front in snapshot.get("frontOfQueue", {}).get("jobs", ())[:1]:
            for job in subject.ask("batch", "DescribeJobs", jobs=[front["jobArn"].rpartition("/")[2]])["jobs"]:
                yield from judge_front(name, job, front["earliestTimeAtPosition"], datetime.now(timezone.utc))


def judge_front(queue: str, job: Mapping[str, Any], since_ms: int, now: datetime) -> Findings:
    """Judge the job at the front of a queue, behind which all others wait.

    Args:
        job: of Batch's DescribeJobs.
        since_ms: when it came to the front, in milliseconds since the epoch.
    """
    minutes = int((now.timestamp() - since_ms / 1000) // 60)
    reason = job.get("statusReason", "")
    waiting = f"{job['jobName']} ({job['jobId']}), for {minutes} min"
    for code, (meaning, remedy) in REASONS.items():
        if code in reason:
            yield problem(f"the queue {queue} is blocked: {meaning}", value=f"{waiting}: {reason}", rule=code, remedy=remedy)
            return
    yield (
        warning(
            f"the job at the front of {queue} waits",
            value=f"{waiting}: {reason}",
            remedy=f"aws batch describe-jobs --jobs {job['jobId']}",
        )
        if reason and job["status"] == "RUNNABLE"
        else ok(f"front of {queue}", waiting)
    )


@check("Batch", "cloudformation:ListStackResources", "batch:DescribeJobDefinitions")
def job_definitions(subject: Subject) -> Findings:
    wanted = subject.physical(subject.blueprint.pipeline_stack, "AWS::Batch::JobDefinition")
    pages = (wanted[start : start + JOBS_AT_ONCE] for start in range(0, len(wanted), JOBS_AT_ONCE))
    answers = [subject.ask("batch", "DescribeJobDefinitions", jobDefinitions=page)["jobDefinitions"] for page in pages]
    active = {one["jobDefinitionArn"] for found in answers for one in found if one.get("status") == "ACTIVE"}
    if gone := [arn for arn in wanted if arn not in active]:
        yield problem(
            "job definitions of the stack are not active",
            value=", ".join(arn.rpartition("/")[2] for arn in gone),
            rule="the state machine names these revisions, and Batch refuses jobs of inactive ones",
            remedy="register them anew: delete the pipeline stack and deploy it again (the data stack stays)",
        )
    elif wanted:
        yield ok("job definitions", f"{len(wanted)} revisions, all ACTIVE")


@check("Schedule", "cloudformation:ListStackResources", "scheduler:GetSchedule", "sqs:GetQueueAttributes")
def schedule(subject: Subject) -> Findings:
    named = {(one.registry, one.mode): (name, one) for name, one in subject.settings.schedules.items()}
    for physical in subject.physical(subject.blueprint.pipeline_stack, "AWS::Scheduler::Schedule"):
        found = subject.ask("scheduler", "GetSchedule", Name=physical)
        given = json.loads(found["Target"]["Input"])
        name, wanted = named.get((given.get("registry"), given.get("mode")), (physical, None))
        asked = {
            "State": "ENABLED" if wanted and wanted.enabled else "DISABLED",
            "ScheduleExpression": wanted and wanted.when,
            "ScheduleExpressionTimezone": wanted and wanted.time_zone,
        }
        other = [f"{key} {found.get(key)}, not {value}" for key, value in asked.items() if found.get(key) != value]
        yield (
            problem(
                f"the schedule {name} is not what the settings say",
                value=f"{physical}: {', '.join(other)}",
                rule="the next deployment sets it to trnpipe.schedules",
                remedy=f"set `schedules` in the environment's file, {CDK} deploy",
            )
            if wanted is None or other
            else ok(
                f"schedule {name}",
                f"{wanted.when} {wanted.time_zone}" if wanted.enabled else "switched off, as the settings say",
            )
        )
    for url in subject.physical(subject.blueprint.pipeline_stack, "AWS::SQS::Queue"):
        name = "ApproximateNumberOfMessages"
        waiting = int(subject.ask("sqs", "GetQueueAttributes", QueueUrl=url, AttributeNames=[name])["Attributes"][name])
        yield (
            problem(
                "a start could not be delivered",
                value=f"{waiting} messages in {url.rpartition('/')[2]}",
                rule="the dead-letter queue is empty",
                remedy=f"aws sqs receive-message --queue-url {url} --message-attribute-names All says why; "
                "start the run by hand, then aws sqs purge-queue",
            )
            if waiting
            else ok("dead-letter queue", "empty")
        )


@check("Monitoring", "cloudformation:ListStackResources", "cloudwatch:DescribeAlarms")
def alarms(subject: Subject) -> Findings:
    if not (answer := subject.deployed("AWS::CloudWatch::Alarm", "cloudwatch", "DescribeAlarms", "AlarmNames")):
        return
    found = answer.get("MetricAlarms", [])
    ringing = [alarm for alarm in found if alarm["StateValue"] == "ALARM"]
    for alarm in ringing:
        yield warning(
            f"the alarm {alarm['AlarmName']} is on",
            value=alarm.get("StateReason", ""),
            rule=alarm.get("AlarmDescription", ""),
            remedy=f"aws cloudwatch describe-alarm-history --alarm-name {alarm['AlarmName']}",
        )
    if silent := [alarm["AlarmName"] for alarm in found if not alarm.get("ActionsEnabled", True)]:
        yield warning(
            "alarms are switched off",
            value=", ".join(silent),
            remedy=f"aws cloudwatch enable-alarm-actions --alarm-names {' '.join(silent)}",
        )
    if not ringing:
        yield ok("alarms", f"{len(found)}, none is on")


@check("Notifications", "cloudformation:ListStackResources", "sns:ListSubscriptionsByTopic")
def subscriptions(subject: Subject) -> Findings:
    for topic in subject.physical(subject.blueprint.pipeline_stack, "AWS::SNS::Topic"):
        found = subject.ask("sns", "ListSubscriptionsByTopic", TopicArn=topic)["Subscriptions"]
        confirmed = {one["Endpoint"] for one in found if one["SubscriptionArn"] != "PendingConfirmation"}
        for address, protocol in sorted(
            {(one["Endpoint"], one["Protocol"]) for one in found if one["Endpoint"] not in confirmed}
        ):
            yield warning(
                "a subscription is not confirmed",
                value=address,
                rule="nothing is sent to an address before",
                remedy="open the link in the message `AWS Notification - Subscription Confirmation` that went there; "
                f"aws sns subscribe --topic-arn {topic} --protocol {protocol} --notification-endpoint {address} sends another",
            )
        if lost := sorted({one.endpoint for one in subject.settings.notify} - {one["Endpoint"] for one in found}):
            yield problem(
                "addresses of the settings are not subscribed",
                value=", ".join(lost),
                rule="a deployment does not subscribe an address again that has unsubscribed",
                remedy=f"aws sns subscribe --topic-arn {topic} --protocol PROTOCOL --notification-endpoint ADDRESS",
            )
        if confirmed:
            yield ok("subscriptions", ", ".join(sorted(confirmed)))
