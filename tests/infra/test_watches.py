"""The watches: their definitions against the services, what starts them, what they may do, and both that speak up, walked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sns.models import sns_backends

from infra.console import Console
from infra.local.definitions import ACCOUNT, REGION
from infra.local.server import LocalEndpoint, local_endpoint
from infra.runbook import RUNBOOK
from infra.setting_sections import Schedule
from infra.workflow.watches import ENDED_BADLY, LOOK_AGAIN_SECONDS, LOOKS, cleanup, overdue, week
from pipeline.contract import JOB_ENDED, STAGES, Queue
from tests.infra.machines import stack_around
from tests.infra.test_stacks import granted

TOPIC = f"arn:aws:sns:{REGION}:{ACCOUNT}:notifications"
MACHINE = f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:trnpipe"
CONSOLE = Console(region=REGION, bucket="bucket", job_logs="/trnpipe/jobs", dashboard="trnpipe")
SERVICES = {"sfn": "stepfunctions"}
EXAMPLES = {"Jobs.$": ["id"], "Filters": [{"Name": "JOB_NAME", "Values": ["train-week-1"]}]}
"""Values of paths that lead to anything but text."""
WEEKLY = Schedule(when="cron(0 3 ? * SUN *)", every_days=7)
QUEUES = {queue: f"arn:{queue}" for queue in Queue}


def definitions() -> dict[str, dict[str, Any]]:
    return {
        "overdue": overdue("aws", TOPIC, 12 * 3600, CONSOLE),
        "week": week("aws", TOPIC, MACHINE, "weekly", WEEKLY, 24 * 3600, CONSOLE),
        "cleanup": cleanup("aws", TOPIC, QUEUES, CONSOLE),
    }


def all_states(machine: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """States with those of inner maps."""
    for name, state in machine["States"].items():
        yield name, state
        if "ItemProcessor" in state:
            yield from all_states(state["ItemProcessor"])


def test_what_they_send_is_what_the_services_take(service_model: Any) -> None:
    for watch, machine in definitions().items():
        for name, state in all_states(machine):
            if state["Type"] != "Task":
                continue
            service, action = re.fullmatch(r"arn:aws:states:::(?:aws-sdk:)?(\w+):(\w+)", state["Resource"]).groups()  # type: ignore[union-attr]
            request = {key.removesuffix(".$"): EXAMPLES.get(key, value) for key, value in state["Parameters"].items()}
            operation = action[0].upper() + action[1:]
            lowered = service_model.from_template(SERVICES.get(service, service), operation, request)
            assert service_model.problems(SERVICES.get(service, service), operation, lowered) == "", (watch, name)
            assert state["TimeoutSeconds"] > 0
            assert state["Retry"][0]["MaxAttempts"] >= 5


def test_they_wait_as_long_as_a_run_may_take() -> None:
    assert definitions()["overdue"]["States"]["Wait"]["Seconds"] == 12 * 3600
    assert definitions()["week"]["States"]["Wait"]["Seconds"] == (7 + 1) * 24 * 3600


def test_a_run_is_missed_after_the_days_that_the_schedule_names(small_deployment: Any) -> None:
    [machine] = [
        json.loads(one.properties["DefinitionString"])
        for one in small_deployment.stacks.of_type("AWS::StepFunctions::StateMachine")
        if one.name == "dev-week-weekly"
    ]
    # The time budget, the wait for the lock (both twelve hours) and the flexible quarter of an hour come on top.
    assert machine["States"]["Wait"]["Seconds"] == 35 * 24 * 3600 + (12 + 12) * 3600 + 15 * 60
    assert machine["States"]["WaitAgain"]["Seconds"] == 35 * 24 * 3600
    assert machine["States"]["Notify"]["Parameters"]["Subject"] == "trnpipe: weekly: 35 days without a successful run"


def test_cleanup_looks_for_the_job_of_every_stage_in_its_queue(service_model: Any) -> None:
    machine = definitions()["cleanup"]
    assert machine["States"]["Begin"]["Result"] == [
        {"stage": stage.value, "queue": f"arn:{spec.queue}"} for stage, spec in STAGES.items()
    ]
    # Whatever Batch calls a job that has ended.
    assert set(JOB_ENDED) < set(service_model.enumeration("batch", "ListJobs", "jobStatus"))
    assert (LOOKS, machine["States"]["Wait"]["Seconds"]) == (2, LOOK_AGAIN_SECONDS)


@pytest.mark.parametrize(
    ("watch", "statuses"), [("overdue", ["RUNNING"]), ("week-weekly", ["SUCCEEDED"]), ("cleanup", list(ENDED_BADLY))]
)
def test_what_starts_them(deployment: Any, other_deployment: Any, watch: str, statuses: list[str]) -> None:
    rules = [
        rule
        for rule in deployment.resources("AWS::Events::Rule")
        if rule["Description"] == f"Starts trnpipe-{watch}" and rule["EventPattern"]["detail"]["status"] == statuses
    ]
    [target] = [target for rule in rules for target in rule["Targets"]]
    assert target["InputTransformer"] == {
        "InputPathsMap": {"detail-executionArn": "$.detail.executionArn"},
        "InputTemplate": '{"execution":<detail-executionArn>}',
    }
    # Without a start no success is due.
    names = {
        machine["StateMachineName"].split("-", 1)[-1]
        for machine in other_deployment.resources("AWS::StepFunctions::StateMachine")
    }
    assert (watch in names) == (watch != "week-weekly")
    # Every schedule that is switched on has its own.
    assert "week-products" in names


@pytest.mark.parametrize(
    ("watch", "actions"),
    [
        ("Overdue", {"states:DescribeExecution": "execution:trnpipe:*", "sns:Publish": ""}),
        (
            "WeekWeekly",
            {"states:ListExecutions": "", "states:DescribeExecution": "execution:trnpipe:*", "sns:Publish": ""},
        ),
        (
            "Cleanup",
            {
                "states:DescribeExecution": "execution:trnpipe:*",
                "batch:ListJobs": "*",
                "batch:DescribeJobs": "*",
                "batch:TerminateJob": "job/*",
                "sns:Publish": "",
            },
        ),
    ],
)
def test_they_may_do_what_their_states_do_and_no_more(deployment: Any, watch: str, actions: dict[str, str]) -> None:
    role = f"Watches/{watch}/Role"
    for action, resource in actions.items():
        found = granted(deployment, role, action)
        assert [one.endswith(resource) for one in found] == [True], action
    others = {"batch:TerminateJob", "batch:SubmitJob", "sns:Publish", "states:StopExecution", "s3:GetObject"} - set(actions)
    assert not [action for action in others if granted(deployment, role, action)]


# Walked.

OF_WEEKLY = {"waits": False, "registry": "current", "mode": "train"}
OF_OTHERS = [
    {"waits": False, "registry": "products", "mode": "train"},
    {"waits": False, "registry": "current", "mode": "refresh"},
    {"waits": False, "registry": None, "mode": "train"},
]
"""Output of executions, which the watched machine copies from its input."""


class Account:
    """The local endpoint, whose state machine waits for good, succeeds or fails, with a watch."""

    def __init__(self, endpoint: LocalEndpoint) -> None:
        self.endpoint = endpoint
        self.client = endpoint.client("stepfunctions")

    def start(self, machine: str, given: dict[str, Any], name: str) -> str:
        arn = self.client.start_execution(stateMachineArn=machine, name=name, input=json.dumps(given))["executionArn"]
        return str(arn)

    def status(self, arn: str) -> str:
        return str(self.client.describe_execution(executionArn=arn)["status"])

    def watch(self, execution: str) -> str:
        return self.start(f"{MACHINE}-watch", {"execution": execution}, f"of-{execution.rsplit(':', 1)[1]}")

    def notices(self) -> list[tuple[str, str]]:
        sent = sns_backends[DEFAULT_ACCOUNT_ID][REGION].topics[TOPIC].sent_notifications
        return [(subject, message) for _, message, subject, *_ in sent]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)


class NoBatch:
    """No test submits a job here."""

    pause = staticmethod(time.sleep)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def account(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Account]:
    watch = definitions()[request.param]
    for state in watch["States"].values():
        if state["Type"] == "Wait":
            state["Seconds"] = 1
    watched = {
        "StartAt": "Whether",
        "States": {
            "Whether": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.waits", "BooleanEquals": True, "Next": "Wait"}],
                "Default": "Done",
            },
            "Wait": {"Type": "Wait", "Seconds": 600, "Next": "Done"},
            "Done": {"Type": "Succeed"},
        },
    }
    stack = stack_around(watched, watches={"trnpipe-watch": watch})
    with local_endpoint(stack, tmp_path / "state", lambda _: NoBatch()) as endpoint:  # type: ignore[arg-type,return-value]
        yield Account(endpoint)


def test_only_rules_of_this_stack_may_start_a_watch(other_deployment: Any) -> None:
    trusts = [role["AssumeRolePolicyDocument"]["Statement"] for role in other_deployment.resources("AWS::IAM::Role")]
    found = [one for [one] in trusts if one["Principal"]["Service"] == "events.amazonaws.com"]
    targets = [rule["Targets"] for rule in other_deployment.resources("AWS::Events::Rule")]
    assert len(found) == len([target for [target] in targets if "RoleArn" in target]) > 0
    for trust in found:
        assert trust["Condition"] == {
            "StringEquals": {"aws:SourceAccount": "123456789012"},
            "ArnLike": {"aws:SourceArn": "arn:aws:events:us-east-2:123456789012:rule/ranker-*"},
        }


@pytest.mark.parametrize("account", ["overdue"], indirect=True)
def test_only_a_run_that_still_goes_on_is_overdue(account: Account) -> None:
    done, going_on = (account.start(MACHINE, {"waits": waits}, name) for waits, name in ((False, "done"), (True, "late")))
    account.wait(lambda: account.status(done) == "SUCCEEDED")
    watches = [account.watch(arn) for arn in (done, going_on)]
    account.wait(lambda: [account.status(watch) for watch in watches] == ["SUCCEEDED", "SUCCEEDED"])
    [(subject, message)] = account.notices()
    assert subject == "trnpipe: late overdue"
    assert "720 minutes" in message
    assert f"executions/details/{going_on}" in message
    assert RUNBOOK["Overdue"] in message


@pytest.mark.parametrize("account", ["week"], indirect=True)
def test_a_missed_week_is_said_until_a_run_succeeds(account: Account) -> None:
    first = account.start(MACHINE, OF_WEEKLY, "week-1")
    account.wait(lambda: account.status(first) == "SUCCEEDED")
    watch = account.watch(first)
    account.wait(lambda: len(account.notices()) >= 2)
    subject, message = account.notices()[0]
    assert subject == "trnpipe: weekly: a week without a successful run"
    assert first in message
    assert RUNBOOK["MissedWeek"] in message
    # Runs of another model, and refreshes, are none of the schedule's.
    for number, other in enumerate(OF_OTHERS):
        done = account.start(MACHINE, other, f"other-{number}")
        account.wait(lambda done=done: account.status(done) == "SUCCEEDED")
    told = len(account.notices())
    account.wait(lambda: len(account.notices()) >= told + 2)
    assert account.status(watch) == "RUNNING"
    account.start(MACHINE, OF_WEEKLY, "week-2")
    account.wait(lambda: account.status(watch) == "SUCCEEDED")


@pytest.mark.parametrize("account", ["week"], indirect=True)
def test_a_success_of_others_starts_no_wait(account: Account) -> None:
    for number, other in enumerate(OF_OTHERS):
        done = account.start(MACHINE, other, f"other-{number}")
        account.wait(lambda done=done: account.status(done) == "SUCCEEDED")
        watch = account.watch(done)
        account.wait(lambda watch=watch: account.status(watch) == "SUCCEEDED")
    assert account.notices() == []
