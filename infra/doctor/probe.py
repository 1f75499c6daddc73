"""What `trnpipe doctor --gang` makes in the account, and how all of it is removed again.

Everything has a name that begins with the deployment's, then `-doctor`: so whatever an interrupted probe leaves is found by its
name, and removed by `--gang --cleanup`. Removing tolerates that something is not there, and goes on past what cannot be removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infra.doctor.asking import Ask, Denied, NotAuthenticated, Refused, Unavailable
from pipeline.errors import MissingInput, Transient

INSTANCE_POLICY = "service-role/AmazonEC2ContainerServiceforEC2Role"
MACHINE_POLICY = "submit"
SHARE = "doctor"
NODES = 2
JOB_SECONDS = 1800
LIVE_JOBS = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
TRIES = 8

CALLS = (
    "batch:CreateComputeEnvironment",
    "batch:CreateJobQueue",
    "batch:CreateSchedulingPolicy",
    "batch:DeleteComputeEnvironment",
    "batch:DeleteJobQueue",
    "batch:DeleteSchedulingPolicy",
    "batch:DeregisterJobDefinition",
    "batch:DescribeComputeEnvironments",
    "batch:DescribeJobDefinitions",
    "batch:DescribeJobQueues",
    "batch:DescribeJobs",
    "batch:ListJobs",
    "batch:RegisterJobDefinition",
    "batch:TerminateJob",
    "batch:UpdateComputeEnvironment",
    "batch:UpdateJobQueue",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "iam:AddRoleToInstanceProfile",
    "iam:AttachRolePolicy",
    "iam:CreateInstanceProfile",
    "iam:CreateRole",
    "iam:DeleteInstanceProfile",
    "iam:DeleteRole",
    "iam:DeleteRolePolicy",
    "iam:DetachRolePolicy",
    "iam:PutRolePolicy",
    "iam:RemoveRoleFromInstanceProfile",
    "pricing:GetProducts",
    "stepfunctions:CreateStateMachine",
    "stepfunctions:DeleteStateMachine",
    "stepfunctions:DescribeExecution",
    "stepfunctions:ListExecutions",
    "stepfunctions:StartExecution",
    "stepfunctions:StopExecution",
)
"""Every call of a probe, as `service:Operation`. Passing its two roles on takes `iam:PassRole` besides."""

ABSENT = ("NoSuchEntity", "StateMachineDoesNotExist")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a state machine of the probe calls."""

    queue_arn: str
    definition_arn: str
    machine_role_arn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The resources of one probe, by their names.

    Attributes:
        call: makes a call; nothing is remembered between two.
        name: of the deployment.
        account, region, partition: where.
        tell: says what is being done.
        pause: waits.
        patience_seconds: for one change of a queue or compute environment, which has hosts to end.
    """

    call: Ask
    name: str
    account: str
    region: str
    partition: str = "aws"
    nodes: int = NODES
    share: str = SHARE
    tell: Callable[[str], None] = field(default=lambda _: None)
    pause: Callable[[float], None] = time.sleep
    patience_seconds: float = 1200

    @property
    def prefix(self) -> str:
        return f"{self.name}-doctor"

    @property
    def host_role(self) -> str:
        return f"{self.prefix}-host"

    @property
    def machine_role(self) -> str:
        return f"{self.prefix}-machine"

    def machine_arn(self, form: str) -> str:
        return f"arn:{self.partition}:states:{self.region}:{self.account}:stateMachine:{self.prefix}-{form}"

    def _batch_arn(self, kind: str) -> str:
        return f"arn:{self.partition}:batch:{self.region}:{self.account}:{kind}/{self.prefix}"

    def make(self, *, subnet_id: str, instance_type: str, image: str, command: list[str]) -> Made:
        """Make everything but the state machines.

        Raises:
            MissingInput: the subnet's VPC has no default security group.
            Denied, Unavailable, Refused: as the calls do.
        """
        vcpus, group_id = self._look_around(subnet_id, instance_type)
        self.tell("roles")
        self._role(self.host_role, "ec2.amazonaws.com")
        policy = f"arn:{self.partition}:iam::aws:policy/{INSTANCE_POLICY}"
        self.call("iam", "AttachRolePolicy", RoleName=self.host_role, PolicyArn=policy)
        profile = self.call("iam", "CreateInstanceProfile", InstanceProfileName=self.host_role)["InstanceProfile"]["Arn"]
        self.call("iam", "AddRoleToInstanceProfile", InstanceProfileName=self.host_role, RoleName=self.host_role)
        machine_role_arn = self._role(self.machine_role, "states.amazonaws.com")
        self.call(
            "iam",
            "PutRolePolicy",
            RoleName=self.machine_role,
            PolicyName=MACHINE_POLICY,
            PolicyDocument=json.dumps(self._machine_policy()),
        )
        self.tell(f"compute environment and queue for {self.nodes} x {instance_type}")
        # A role is known everywhere only some seconds after it was made, and an environment without one stays INVALID.
        self.pause(15)
        environment_arn = self.call(
            "batch",
            "CreateComputeEnvironment",
            computeEnvironmentName=self.prefix,
            type="MANAGED",
            state="ENABLED",
            computeResources={
                "type": "EC2",
                "allocationStrategy": "BEST_FIT_PROGRESSIVE",
                "minvCpus": 0,
                "maxvCpus": self.nodes * vcpus,
                "instanceTypes": [instance_type],
                "instanceRole": profile,
                "subnets": [subnet_id],
                "securityGroupIds": [group_id],
                "ec2Configuration": [{"imageType": "ECS_AL2023"}],
                "tags": {"Name": self.prefix},
            },
        )["computeEnvironmentArn"]
        self._settle("DescribeComputeEnvironments", "computeEnvironments", environment_arn)
        policy_arn = self.call(
            "batch",
            "CreateSchedulingPolicy",
            name=self.prefix,
            fairsharePolicy={"shareDistribution": [{"shareIdentifier": self.share, "weightFactor": 1.0}]},
        )["arn"]
        queue_arn = self.call(
            "batch",
            "CreateJobQueue",
            jobQueueName=self.prefix,
            state="ENABLED",
            priority=1,
            schedulingPolicyArn=policy_arn,
            computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment_arn}],
        )["jobQueueArn"]
        self._settle("DescribeJobQueues", "jobQueues", queue_arn)
        definition_arn = self.call(
            "batch",
            "RegisterJobDefinition",
            jobDefinitionName=self.prefix,
            type="multinode",
            nodeProperties={
                "numNodes": self.nodes,
                "mainNode": 0,
                "nodeRangeProperties": [
                    {
                        "targetNodes": "0:",
                        "instanceTypes": [instance_type],
                        "container": {
                            "image": image,
                            "command": command,
                            "resourceRequirements": [
                                {"type": "VCPU", "value": str(vcpus)},
                                {"type": "MEMORY", "value": "512"},
                            ],
                        },
                    }
                ],
            },
            retryStrategy={"attempts": 1},
            timeout={"attemptDurationSeconds": JOB_SECONDS},
        )["jobDefinitionArn"]
        return Made(queue_arn=queue_arn, definition_arn=definition_arn, machine_role_arn=machine_role_arn)

    def make_machine(self, form: str, definition: Mapping[str, Any], role_arn: str) -> str:
        """A state machine; its ARN.

        Raises:
            Denied, Unavailable, Refused: as the call does, when it does so again and again.
        """
        for remaining in reversed(range(TRIES)):
            try:
                return str(
                    self.call(
                        "stepfunctions",
                        "CreateStateMachine",
                        name=f"{self.prefix}-{form}",
                        definition=json.dumps(definition),
                        roleArn=role_arn,
                    )["stateMachineArn"]
                )
            except (Denied, Refused):
                # So Step Functions says, too, that it has not heard of a new role yet.
                if not remaining:
                    raise
                self.pause(5)
        raise AssertionError("unreachable")

    def leftovers(self) -> list[str]:
        """What there is of these names in Batch: every probe makes it, and removes it late."""
        found = []
        for operation, key, parameter in (
            ("DescribeComputeEnvironments", "computeEnvironments", "computeEnvironments"),
            ("DescribeJobQueues", "jobQueues", "jobQueues"),
        ):
            answer = self.call("batch", operation, **{parameter: [self.prefix]})[key]
            found += [f"{key[:-1]} {self.prefix}" for one in answer if one.get("status") != "DELETED"]
        return found

    def remove(self, forms: Iterable[str]) -> list[str]:
        """Remove everything of these names, whatever there is of it; what could not be removed, with the reason."""
        kept: list[str] = []
        steps: list[tuple[str, Callable[[], None]]] = [
            *((f"state machine {self.prefix}-{form}", partial(self._remove_machine, form)) for form in forms),
            (f"jobs of queue {self.prefix}", self._end_jobs),
            (f"queue {self.prefix}", self._remove_queue),
            (f"compute environment {self.prefix}", self._remove_environment),
            (f"scheduling policy {self.prefix}", self._remove_scheduling_policy),
            (f"job definitions {self.prefix}", self._remove_definitions),
            (f"instance profile {self.host_role}", self._remove_profile),
            (f"role {self.host_role}", partial(self._remove_role, self.host_role)),
            (f"role {self.machine_role}", partial(self._remove_role, self.machine_role)),
        ]
        for what, step in steps:
            self.tell(f"removing {what}")
            try:
                step()
            except (Denied, NotAuthenticated, Refused, Unavailable, Transient) as error:
                kept.append(f"{what}: {error}")
        return kept

    def _look_around(self, subnet_id: str, instance_type: str) -> tuple[int, str]:
        """vCPUs of a host, and the default security group of the subnet's VPC."""
        types = self.call("ec2", "DescribeInstanceTypes", InstanceTypes=[instance_type])["InstanceTypes"]
        [subnet] = self.call("ec2", "DescribeSubnets", SubnetIds=[subnet_id])["Subnets"]
        filters = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
        groups = self.call("ec2", "DescribeSecurityGroups", Filters=filters)["SecurityGroups"]
        if not groups:
            raise MissingInput("the VPC has no default security group", value=subnet["VpcId"], remedy="name another --subnet")
        return int(types[0]["VCpuInfo"]["DefaultVCpus"]), str(groups[0]["GroupId"])

    def _role(self, name: str, service: str) -> str:
        trust = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}],
        }
        made = self.call("iam", "CreateRole", RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
        return str(made["Role"]["Arn"])

    def _machine_policy(self) -> dict[str, Any]:
        rule = f"arn:{self.partition}:events:{self.region}:{self.account}:rule/StepFunctionsGetEventsForBatchJobsRule"
        statements = (
            (["batch:SubmitJob", "batch:TagResource", "batch:TerminateJob", "batch:DescribeJobs"], "*"),
            (["events:PutTargets", "events:PutRule", "events:DescribeRule"], rule),
        )
        return {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": actions, "Resource": on} for actions, on in statements],
        }

    def _settle(self, operation: str, key: str, arn: str, *, gone: bool = False) -> None:
        """Wait until a queue or compute environment has become VALID, or is gone.

        Raises:
            Refused: it has become INVALID.
            Transient: it takes too long.
        """
        waited = 0.0
        while waited <= self.patience_seconds:
            found = [one for one in self.call("batch", operation, **{key: [arn]})[key] if one.get("status") != "DELETED"]
            if not found:
                if gone:
                    return
                raise Refused("Gone", f"{arn} is gone")
            status = found[0].get("status")
            if status == "INVALID":
                raise Refused("INVALID", f"{arn}: {found[0].get('statusReason', '')}")
            if status == "VALID" and not gone:
                return
            self.pause(5)
            waited += 5
        raise Transient(f"{arn} has not settled after {waited / 60:.0f} minutes", remedy="trnpipe doctor --gang --cleanup")

    def _remove_machine(self, form: str) -> None:
        arn = self.machine_arn(form)
        try:
            running = self.call("stepfunctions", "ListExecutions", stateMachineArn=arn, statusFilter="RUNNING")["executions"]
            for execution in running:
                self.call("stepfunctions", "StopExecution", executionArn=execution["executionArn"])
            self.call("stepfunctions", "DeleteStateMachine", stateMachineArn=arn)
        except Refused as refused:
            _unless_absent(refused)

    def _end_jobs(self) -> None:
        if not self.call("batch", "DescribeJobQueues", jobQueues=[self.prefix])["jobQueues"]:
            return
        for status in LIVE_JOBS:
            for job in self.call("batch", "ListJobs", jobQueue=self._batch_arn("job-queue"), jobStatus=status)["jobSummaryList"]:
                self.call("batch", "TerminateJob", jobId=job["jobId"], reason="trnpipe doctor has finished")

    def _remove_queue(self) -> None:
        self._disable_and_delete("DescribeJobQueues", "jobQueues", "jobQueue", "UpdateJobQueue", "DeleteJobQueue")

    def _remove_environment(self) -> None:
        self._disable_and_delete(
            "DescribeComputeEnvironments",
            "computeEnvironments",
            "computeEnvironment",
            "UpdateComputeEnvironment",
            "DeleteComputeEnvironment",
        )

    def _disable_and_delete(self, describe: str, key: str, parameter: str, update: str, delete: str) -> None:
        found = [one for one in self.call("batch", describe, **{key: [self.prefix]})[key] if one.get("status") != "DELETED"]
        if not found:
            return
        if found[0]["status"] != "DELETING":
            self.call("batch", update, **{parameter: self.prefix, "state": "DISABLED"})
            # One that is INVALID never becomes VALID, and may be deleted as it is.
            if found[0]["status"] != "INVALID":
                self._settle(describe, key, self.prefix)
            self.call("batch", delete, **{parameter: self.prefix})
        self._settle(describe, key, self.prefix, gone=True)

    def _remove_scheduling_policy(self) -> None:
        self.call("batch", "DeleteSchedulingPolicy", arn=self._batch_arn("scheduling-policy"))

    def _remove_definitions(self) -> None:
        answer = self.call("batch", "DescribeJobDefinitions", jobDefinitionName=self.prefix, status="ACTIVE")
        for definition in answer["jobDefinitions"]:
            self.call("batch", "DeregisterJobDefinition", jobDefinition=definition["jobDefinitionArn"])

    def _remove_profile(self) -> None:
        for operation, more in (("RemoveRoleFromInstanceProfile", {"RoleName": self.host_role}), ("DeleteInstanceProfile", {})):
            try:
                self.call("iam", operation, InstanceProfileName=self.host_role, **more)
            except Refused as refused:
                _unless_absent(refused)

    def _remove_role(self, name: str) -> None:
        for operation, more in (
            ("DetachRolePolicy", {"PolicyArn": f"arn:{self.partition}:iam::aws:policy/{INSTANCE_POLICY}"}),
            ("DeleteRolePolicy", {"PolicyName": MACHINE_POLICY}),
            ("DeleteRole", {}),
        ):
            try:
                self.call("iam", operation, RoleName=name, **more)
            except Refused as refused:
                _unless_absent(refused)


def _unless_absent(refused: Refused) -> None:
    if refused.code not in ABSENT:
        raise refused
