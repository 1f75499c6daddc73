"""The deployed state machine, whose definition is infra/workflow/machine.py, and the permissions of its role."""

from __future__ import annotations

import json
from collections.abc import Mapping

from aws_cdk import Stack
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.console import Console
from infra.run_cost import host_names, hourly_prices, most_embed_hosts
from infra.settings import COST_TAG, Settings
from infra.workflow.machine import definition
from infra.workflow.states import Targets
from pipeline.contract import STAGES, Queue, Stage
from pipeline.cost import CURRENCY


class Workflow(Construct):
    """The deployed state machine.

    Attributes:
        state_machine: named after the deployment, so that its own executions can be named in its policy.
        topic: where outcomes are published.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        bucket: s3.IBucket,
        lock_table: dynamodb.ITable,
        topic: sns.ITopic,
        topic_key: kms.IKey,
        queue_arns: Mapping[Queue, str],
        job_arns: Mapping[Stage, str],
        gang_arns: Mapping[int, Mapping[Stage, str]],
        job_names: list[str],
        console: Console,
        log_group: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        config = settings.run_config()
        targets = Targets(
            partition=stack.partition,
            console=console,
            bucket=bucket.bucket_name,
            lock_table=lock_table.table_name,
            topic=topic.topic_arn,
            queues=queue_arns,
            jobs=job_arns,
            gangs=gang_arns,
            minutes={stage: settings.minutes(stage) for stage in STAGES},
            capacity_wait_minutes=settings.capacity_wait_hours * 60,
            deployment={
                "config": settings.deployed_config(),
                "allowed_nodes": sorted(gang_arns),
                "read": list(settings.readable()),
                "local_paths": settings.local_paths,
                "prices": {**{queue.value: price for queue, price in hourly_prices(settings).items()}, "currency": CURRENCY},
                "hosts": {queue.value: host for queue, host in host_names(settings).items()},
                "embed_hosts": most_embed_hosts(settings),
                "noncurrent_days": settings.retention.noncurrent_days,
                "timeouts": {stage.value: settings.minutes(stage) for stage in STAGES},
            },
            tags={COST_TAG: settings.name},
            defaults={"share": config.share, "registry": config.registry, "wait_minutes": config.lock.wait_minutes},
        )
        self.state_machine = sfn.StateMachine(
            self,
            "StateMachine",
            state_machine_name=settings.name,
            definition_body=sfn.DefinitionBody.from_string(json.dumps(definition(targets))),
            tracing_enabled=True,
            logs=sfn.LogOptions(destination=log_group, level=sfn.LogLevel.ALL, include_execution_data=True),
        )
        # What the states call, action by action; a definition from text brings no permissions of its own.
        arn = stack.format_arn
        definitions = [arn(service="batch", resource="job-definition", resource_name=f"{name}:*") for name in job_names]
        jobs = arn(service="batch", resource="job", resource_name="*")
        rule = arn(service="events", resource="rule", resource_name="StepFunctionsGetEventsForBatchJobsRule")
        executions = f"arn:{stack.partition}:states:{stack.region}:{stack.account}:execution:{settings.name}:*"
        for actions, resources in (
            (["batch:SubmitJob"], [*definitions, *queue_arns.values()]),
            (["batch:TagResource", "batch:TerminateJob"], [jobs, *definitions]),
            (["batch:DescribeJobs"], ["*"]),
            (["events:PutTargets", "events:PutRule", "events:DescribeRule"], [rule]),
            (["s3:PutObject"], [bucket.arn_for_objects("runs/*/input.json")]),
            # Without it S3 says of an absent object that access is denied.
            (["s3:ListBucket"], [bucket.bucket_arn]),
            (["s3:GetObject"], [bucket.arn_for_objects("runs/*/result.json"), bucket.arn_for_objects("runs/*/failure.json")]),
            (["dynamodb:GetItem", "dynamodb:PutItem", "dynamodb:DeleteItem"], [lock_table.table_arn]),
            (["states:DescribeExecution"], [executions]),
            (["sns:Publish"], [topic.topic_arn]),
            (["kms:GenerateDataKey", "kms:Decrypt"], [topic_key.key_arn]),
        ):
            self.state_machine.add_to_role_policy(iam.PolicyStatement(actions=actions, resources=resources))
