"""The try of gangs: its whole flow against the local endpoint and moto, with real node processes, and its verdicts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moto.core.config import default_user_config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from infra.doctor import gang
from infra.doctor.asking import Aws, NotAuthenticated
from infra.doctor.command import hourly_price, try_forms
from infra.doctor.gang import FORMS, LITERAL, REPLACED, Outcome, Pace, definition, node_command, verdict
from infra.doctor.probe import Probe
from infra.local.batch import BatchRunner, BatchSettings
from infra.local.definitions import ACCOUNT, REGION, JobDefinition, JobQueue
from infra.local.server import LocalEndpoint, WsgiApplication
from pipeline.errors import BadConfig, ServiceRefused
from tests.infra.machines import stack_around

CONTROL = re.compile(
    r"/v1/(create|update|delete|register|deregister|listscheduling|describe(compute|jobqueues|jobdefinitions|scheduling)).*"
)
"""Batch's operations on queues, compute environments and definitions: moto keeps these, the process runner runs the jobs."""

SERVICE_ROLE = f"arn:aws:iam::{ACCOUNT}:role/AWSServiceRoleForBatch"
Refusals = Mapping[str, tuple[str, str]]


class Account:
    """An account in miniature: moto's services, Batch jobs as local processes.

    Attributes:
        refusals: pattern of a request's path -> the error that answers it, and words that it must hold for that.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self.refusals: Refusals = {}
        self._moto: WsgiApplication = DomainDispatcherApplication(create_backend_app)
        self.definitions: list[JobDefinition] = []
        self.queues: list[JobQueue] = []

    @contextmanager
    def open(self) -> Iterator[Account]:
        machine = {"StartAt": "Done", "States": {"Done": {"Type": "Succeed"}}}
        stack = stack_around(machine, name="unused")
        with LocalEndpoint(stack, self._state, self._runner, self._front) as endpoint:
            self.endpoint = endpoint
            endpoint.client("iam").create_role(RoleName="AWSServiceRoleForBatch", AssumeRolePolicyDocument="{}")
            self.subnet = endpoint.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
            yield self

    def leave_references(self, literal: bool) -> None:
        """Whether `Ref::name` stays as it is in the commands of gangs."""
        self.endpoint.batch.settings = replace(self.endpoint.batch.settings, literal_references=literal)

    def left(self) -> list[str]:
        """Everything of a probe that is there."""
        client = self.endpoint.client
        batch, iam = client("batch"), client("iam")
        found = [one["computeEnvironmentName"] for one in batch.describe_compute_environments()["computeEnvironments"]]
        found += [one["jobQueueName"] for one in batch.describe_job_queues()["jobQueues"]]
        found += [one["arn"] for one in batch.list_scheduling_policies()["schedulingPolicies"]]
        found += [one["jobDefinitionName"] for one in batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]]
        found += [one["name"] for one in client("stepfunctions").list_state_machines()["stateMachines"]]
        found += [one["InstanceProfileName"] for one in iam.list_instance_profiles()["InstanceProfiles"]]
        found += [one["RoleName"] for one in iam.list_roles()["Roles"]]
        return [name for name in found if name not in ("unused", "AWSServiceRoleForBatch")]

    def _runner(self, environment: dict[str, str]) -> BatchRunner:
        runner = BatchRunner([], [], BatchSettings(logs=self._state / "logs", environment=environment))
        # What is registered later is what the runner looks things up in.
        runner._definitions, runner._queues = self.definitions, self.queues
        return runner

    def _front(self, application: WsgiApplication) -> WsgiApplication:
        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            for pattern, (code, needle) in self.refusals.items():
                if re.search(pattern, path) and needle.encode() in body:
                    start_response("400 Bad Request", [("x-amzn-ErrorType", code), ("x-amzn-RequestId", "1")])
                    return [json.dumps({"message": "refused by the test"}).encode()]
            if not CONTROL.match(path):
                environ["wsgi.input"] = io.BytesIO(body)
                return application(environ, start_response)
            request = json.loads(body or b"{}")
            if path.endswith("createcomputeenvironment"):
                # AWS takes its service-linked role where none is named; moto wants it named.
                request["serviceRole"] = SERVICE_ROLE
            body = json.dumps(request).encode()
            environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            answered = b"".join(self._moto(environ, start_response))
            self._learn(path, request, answered)
            return [answered]

        return answer

    def _learn(self, path: str, request: dict[str, Any], answered: bytes) -> None:
        if path.endswith("/createjobqueue"):
            self.queues.append(JobQueue(name=request["jobQueueName"], fair_share="schedulingPolicyArn" in request))
        if path.endswith("/registerjobdefinition"):
            properties = {
                "Type": request["type"],
                "NodeProperties": request["nodeProperties"],
                "RetryStrategy": request["retryStrategy"],
                "Timeout": request["timeout"],
            }
            made = JobDefinition.parse(request["jobDefinitionName"], properties)
            self.definitions.append(replace(made, revision=json.loads(answered)["revision"]))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setitem(default_user_config["iam"], "load_aws_managed_policies", True)
        patch.setattr("infra.states.POLL_SECONDS", 1)
        patch.setattr("infra.states.POLL_LAPS", 100_000)
        yield stack.enter_context(Account(tmp_path_factory.mktemp("account") / "state").open())


@pytest.fixture
def account(opened: Account) -> Account:
    """An account that refuses nothing, in which no probe has left anything."""
    opened.refusals = {}
    opened.leave_references(False)
    assert opened.left() == []
    return opened


def probe_of(pause: Callable[[float], None] = lambda _: None) -> Probe:
    return Probe(call=Aws(REGION).call, name="trnpipe", account=ACCOUNT, region=REGION, pause=pause)


def attempt(one: Account, hold_seconds: int = 0, pace: Pace | None = None, probe: Probe | None = None) -> dict[Any, Outcome]:
    pace = pace or Pace(look_seconds=0.2, patience_seconds=60)
    return try_forms(probe or probe_of(), one.subnet, "c6i.large", "public.ecr.aws/some/image:1", hold_seconds, pace)


def sentences(outcomes: Mapping[Any, Outcome], setting: Any) -> list[tuple[str, str, str]]:
    return [(finding.level.value, finding.what, finding.value) for finding in verdict(outcomes, setting)]


@pytest.mark.slow
def test_both_forms_run_on_two_nodes_and_nothing_is_left(account: Account) -> None:
    one = account
    before = len(one.endpoint.batch.jobs())
    outcomes = attempt(one, hold_seconds=5)
    assert {form: (outcome.execution, outcome.job) for form, outcome in outcomes.items()} == {
        "sync": ("SUCCEEDED", "SUCCEEDED"),
        "poll": ("SUCCEEDED", "SUCCEEDED"),
    }
    assert [outcome.codes for outcome in outcomes.values()] == [{0: REPLACED, 1: REPLACED}] * 2
    assert sentences(outcomes, "sync")[2:] == [
        ("ok", "gang_submit", "sync is right"),
        ("ok", "Ref::run", "replaced in every node's command"),
    ]
    assert one.left() == []
    assert len(one.endpoint.batch.jobs()) == before + 2


def test_references_that_stay_literal_and_a_form_that_is_refused(account: Account) -> None:
    account.leave_references(True)
    account.refusals = {"submitjob": ("ClientException", "MANAGED_BY_AWS")}
    outcomes = attempt(account)
    sync, poll = outcomes["sync"], outcomes["poll"]
    assert (sync.execution, sync.error, sync.job, sync.works) == ("FAILED", "Batch.ClientException", None, False)
    assert (poll.execution, poll.job, poll.codes[0], poll.works) == ("FAILED", "FAILED", LITERAL, True)
    levels = [(level, what) for level, what, _ in sentences(outcomes, "sync")]
    assert levels[0] == ("problem", "the form sync does not take gangs")
    assert levels[2:] == [("problem", "set gang_submit to poll"), ("ok", "Ref::run")]
    assert ("ok", "gang_submit") in [(level, what) for level, what, _ in sentences(outcomes, "poll")]
    assert account.left() == []


def test_an_interruption_leaves_nothing_behind(account: Account) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(account, hold_seconds=600, pace=Pace(look_seconds=0, pause=interrupt))
    assert account.left() == []
    assert all(job.done.wait(30) for job in account.endpoint.batch.jobs())


def test_what_cannot_be_removed_is_named_and_removed_later(account: Account) -> None:
    account.refusals = {"deletejobqueue": ("AccessDeniedException", ""), "submitjob": ("ClientException", "")}
    with pytest.raises(ServiceRefused) as kept:
        attempt(account)
    assert [line.partition(":")[0] for line in kept.value.value] == ["queue trnpipe-doctor"]
    assert account.left() == ["trnpipe-doctor"]
    with pytest.raises(BadConfig, match="left something behind"):
        attempt(account)
    assert account.left() == ["trnpipe-doctor"]
    account.refusals = {}
    for _ in ("what is left", "nothing"):
        assert probe_of().remove(FORMS) == []
        assert account.left() == []


def test_a_refusal_in_the_middle_is_told_and_leaves_nothing(account: Account) -> None:
    account.refusals = {"createjobqueue": ("ClientException", "")}
    with pytest.raises(BadConfig, match="refuses a part of the probe"):
        attempt(account)
    assert account.left() == []
    account.refusals = {"/registerjobdefinition": ("AccessDeniedException", "")}
    with pytest.raises(ServiceRefused, match="may not make") as caught:
        attempt(account)
    assert caught.value.value == "batch:RegisterJobDefinition"
    assert account.left() == []


def test_an_environment_that_becomes_invalid_ends_the_wait() -> None:
    def call(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        return {"computeEnvironments": [{"status": "INVALID", "statusReason": "no such role"}]}

    probe = replace(probe_of(), call=call)
    with pytest.raises(Exception, match="no such role"):
        probe._settle("DescribeComputeEnvironments", "computeEnvironments", "arn")


GOOD = Outcome(form="sync", execution="SUCCEEDED", job="SUCCEEDED", codes={0: REPLACED, 1: REPLACED})


@pytest.mark.parametrize(
    ("sync", "poll", "setting", "expected"),
    [
        ({}, {}, "sync", ("ok", "gang_submit")),
        ({}, {}, "poll", ("warning", "set gang_submit to sync")),
        ({"execution": "RUNNING"}, {}, "sync", ("problem", "set gang_submit to poll")),
        ({"execution": "RUNNING"}, {}, "poll", ("ok", "gang_submit")),
        ({"job": None, "codes": {}}, {"job": None, "codes": {}}, "sync", ("problem", "neither form of submitting gangs works")),
    ],
)
def test_what_to_set(sync: Any, poll: Any, setting: Any, expected: tuple[str, str]) -> None:
    outcomes = {"sync": replace(GOOD, **sync), "poll": replace(GOOD, form="poll", **poll)}
    assert sentences(outcomes, setting)[2][:2] == expected


@pytest.mark.parametrize(
    ("change", "works", "told"),
    [
        ({}, True, "form sync"),
        ({"execution": "FAILED", "job": "FAILED", "codes": {0: LITERAL, 1: LITERAL}}, True, "form sync"),
        ({"execution": "RUNNING"}, False, "the form sync takes a gang but does not hear of its end"),
        ({"execution": "RUNNING", "job": "RUNNABLE", "codes": {}}, False, "the gang of the form sync did not run"),
        ({"execution": "FAILED", "job": "FAILED", "codes": {0: 1, 1: None}}, False, "the gang of the form sync did not run"),
        ({"execution": "FAILED", "job": None, "codes": {}}, False, "the form sync does not take gangs"),
    ],
)
def test_when_a_form_works(change: Any, works: bool, told: str) -> None:
    outcome = replace(GOOD, **change)
    assert outcome.works is works
    assert sentences({"sync": outcome, "poll": GOOD}, "sync")[0][1] == told


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ({0: REPLACED, 1: REPLACED}, ("ok", "Ref::run", "replaced in every node's command")),
        ({0: REPLACED, 1: LITERAL}, ("ok", "Ref::run", "left as it is on node 1: stages then ask Batch for their parameters")),
        (
            {0: REPLACED, 1: 137},
            ("warning", "what became of Ref::run cannot be told for every node", "exit codes: node 0: 0, node 1: 137"),
        ),
        (
            {0: REPLACED, 1: None},
            ("warning", "what became of Ref::run cannot be told for every node", "exit codes: node 0: 0, node 1: None"),
        ),
    ],
)
def test_what_became_of_the_reference(codes: Any, told: Any) -> None:
    assert sentences({"sync": replace(GOOD, codes=codes), "poll": GOOD}, "sync")[-1] == told


def test_an_execution_that_never_hears_of_its_jobs_end_is_given_up() -> None:
    clock = iter(range(0, 10_000, 100))
    job = {"jobId": "j", "status": "SUCCEEDED", "createdAt": 1}

    def call(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "StartExecution":
            job["jobName"] = f"health_check-{json.loads(parameters['input'])['run']['id']}"
        return {
            "StartExecution": {"executionArn": "arn"},
            "DescribeExecution": {"status": "RUNNING"},
            "ListJobs": {"jobSummaryList": [job] if parameters.get("jobStatus") == "SUCCEEDED" else []},
            "DescribeJobs": {"jobs": [{"jobId": "j#0", "container": {"exitCode": 0}}, {"jobId": "j#1", "container": {}}]},
        }[operation]

    pace = Pace(pause=lambda _: None, clock=lambda: float(next(clock)))
    outcome = gang.walk(replace(probe_of(), call=call), "sync", "machine", "definition", "queue", pace)
    assert (outcome.execution, outcome.job, outcome.codes, outcome.works) == ("RUNNING", "SUCCEEDED", {0: 0, 1: None}, False)
    assert next(clock) <= 1000


def test_definitions_are_the_deployments_own_states(deployment: Any) -> None:
    sync = definition("sync", "arn:queue", "aws", "us-west-2")["States"]["health_check"]
    assert sync["Resource"] == "arn:aws:states:::batch:submitJob.sync"
    assert "NodeOverrides" not in sync["Parameters"]
    poll = definition("poll", "arn:queue", "aws", "us-west-2")["States"]
    assert poll["health_check"]["Resource"] == "arn:aws:states:::aws-sdk:batch:submitJob"
    assert sync["Parameters"] == {**poll["health_check"]["Parameters"]}
    # Every state that is named is there.
    for states in (definition(form, "arn:queue", "aws", "us-west-2")["States"] for form in FORMS):
        assert set(re.findall(r'"(?:Next|Default)": "([^"]+)"', json.dumps(states))) <= states.keys()


def test_a_probes_requests_are_as_batch_takes_them(service_model: Any) -> None:
    sent: dict[str, dict[str, Any]] = {}

    def call(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        sent[operation] = parameters
        assert not service_model.problems(service, operation, parameters)
        return {
            "DescribeInstanceTypes": {"InstanceTypes": [{"VCpuInfo": {"DefaultVCpus": 2}}]},
            "DescribeSubnets": {"Subnets": [{"VpcId": "vpc-0a"}]},
            "DescribeSecurityGroups": {"SecurityGroups": [{"GroupId": "sg-0a"}]},
            "CreateRole": {"Role": {"Arn": "arn:role"}},
            "CreateInstanceProfile": {"InstanceProfile": {"Arn": "arn:profile"}},
            "CreateComputeEnvironment": {"computeEnvironmentArn": "arn:environment"},
            "DescribeComputeEnvironments": {"computeEnvironments": [{"status": "VALID"}]},
            "CreateSchedulingPolicy": {"arn": "arn:policy"},
            "CreateJobQueue": {"jobQueueArn": "arn:queue"},
            "DescribeJobQueues": {"jobQueues": [{"status": "VALID"}]},
            "RegisterJobDefinition": {"jobDefinitionArn": "arn:definition"},
        }.get(operation, {})

    made = replace(probe_of(), call=call).make(
        subnet_id="subnet-0a", instance_type="c6i.large", image="i", command=node_command(1)
    )
    assert (made.queue_arn, made.definition_arn, made.machine_role_arn) == ("arn:queue", "arn:definition", "arn:role")
    # Room for the gang and for nothing more.
    assert sent["CreateComputeEnvironment"]["computeResources"]["maxvCpus"] == 4
    assert sent["RegisterJobDefinition"]["nodeProperties"]["nodeRangeProperties"][0]["container"]["command"][-1] == "Ref::run"


def test_the_price_is_that_of_the_price_list(recorded: Any) -> None:
    def product(price: str) -> str:
        dimensions = {"a": {"unit": "Hrs", "pricePerUnit": {"USD": price}}}
        return json.dumps({"terms": {"OnDemand": {"t": {"priceDimensions": dimensions}}}})

    def asked(answer: Any) -> float | None:
        return hourly_price(recorded({"pricing:GetProducts": answer}), "c6i.large", "us-west-2")

    assert asked({"PriceList": [product("0.1250")]}) == 0.125
    assert asked({"PriceList": []}) is None


def test_credentials_that_go_bad_while_removing_are_told_as_what_is_left() -> None:
    def call(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        raise NotAuthenticated("ExpiredToken: too old")

    kept = replace(probe_of(), call=call).remove(FORMS)
    assert len(kept) == 10
    assert all(line.endswith("ExpiredToken: too old") for line in kept)
