"""Every change to moto's engine is still needed, and does what it is for: small state machines with and without each."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import boto3
import pytest

from infra.local import moto_adapter
from infra.local.batch_jobs import Job
from infra.local.batch_nodes import BatchSettings
from infra.local.definitions import Container, JobDefinition, JobQueue
from infra.local.moto_adapter import CHANGES, Change, adapted
from infra.local.server import LocalEndpoint, WsgiApplication, local_endpoint
from infra.local.template import LocalStack
from tests.infra.faulty_batch import FaultyBatchRunner

Front = Callable[[WsgiApplication], WsgiApplication]
SUBMIT: dict[str, Any] = {
    "JobName": "job",
    "JobQueue": "queue",
    "JobDefinition": "job",
    "ShareIdentifier": "weekly",
    "SchedulingPriorityOverride": 1,
}


def definition(resource: str, parameters: dict[str, Any], **fields: Any) -> str:
    task = {"Type": "Task", "Resource": f"arn:aws:states:::{resource}", "Parameters": parameters, "End": True, **fields}
    return json.dumps({"StartAt": "Call", "States": {"Call": task}})


@contextlib.contextmanager
def endpoint_on(
    text: str, state: Path, monkeypatch: pytest.MonkeyPatch, leave_out: Change | None, seconds: float, front: Front
) -> Iterator[LocalEndpoint]:
    kept = tuple(change for change in CHANGES if change is not leave_out)
    monkeypatch.setattr(moto_adapter, "CHANGES", kept)
    key = {"KeySchema": [{"AttributeName": "name", "KeyType": "HASH"}]}
    stack = LocalStack(
        state_machine="small",
        definition=text,
        role_arn="arn:aws:iam::123456789012:role/small",
        bucket="bucket",
        table={
            "TableName": "lock",
            "AttributeDefinitions": [{"AttributeName": "name", "AttributeType": "S"}],
            "BillingMode": "PAY_PER_REQUEST",
            **key,
        },
        topics=(),
        job_definitions=(JobDefinition(name="job", containers=(Container(command=("sleep", str(seconds))),)),),
        queues=(JobQueue(name="queue", fair_share=True),),
    )
    settings = BatchSettings(logs=state / "logs")
    runner = lambda _: FaultyBatchRunner(stack.job_definitions, stack.queues, settings)  # noqa: E731
    with local_endpoint(stack, state, runner, front) as endpoint:
        endpoint.client("s3").put_object(Bucket="bucket", Key="file.json", Body=b'{"is": "here"}')
        yield endpoint


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], list[Job]]]:
    """Execute a state machine of one task without one of the changes (None: with all); how it ended, and its jobs."""

    def run(
        text: str, leave_out: Change | None, seconds: float = 0, front: Front = lambda application: application
    ) -> tuple[dict[str, Any], list[Job]]:
        with endpoint_on(text, tmp_path / "state", monkeypatch, leave_out, seconds, front) as endpoint:
            client = endpoint.client("stepfunctions")
            machine = "arn:aws:states:us-east-1:123456789012:stateMachine:small"
            arn = client.start_execution(stateMachineArn=machine, name="one", input="{}")["executionArn"]
            deadline = time.monotonic() + 30
            while (execution := client.describe_execution(executionArn=arn))["status"] == "RUNNING":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            jobs = endpoint.batch.jobs()
            for job in jobs:
                job.done.wait(10 if leave_out is None else 1)
            return dict(execution), [Job(**{name: getattr(job, name) for name in job.__slots__}) for job in jobs]

    return run


Execute = Callable[..., tuple[dict[str, Any], list[Job]]]
READ = definition(
    "aws-sdk:s3:getObject", {"Bucket": "bucket", "Key": "file.json"}, ResultSelector={"is.$": "States.StringToJson($.Body)"}
)
READ_ABSENT = definition(
    "aws-sdk:s3:getObject",
    {"Bucket": "bucket", "Key": "absent.json"},
    Catch=[{"ErrorEquals": ["S3.NoSuchKeyException"], "Next": "Absent"}],
).replace('"States": {', '"States": {"Absent": {"Type": "Succeed"}, ')
IMPATIENT = definition("batch:submitJob.sync", SUBMIT, TimeoutSeconds=2)


def test_spelling_is_changed_between_step_functions_and_services(execute: Execute) -> None:
    assert execute(READ, moto_adapter.change_spelling)[0]["status"] == "FAILED"
    execution, _ = execute(READ, None)
    assert (execution["status"], json.loads(execution["output"])) == ("SUCCEEDED", {"is": {"is": "here"}})


def test_fair_share_reaches_batch(execute: Execute) -> None:
    text = definition("batch:submitJob.sync", SUBMIT)
    execution, jobs = execute(text, moto_adapter.pass_on_fair_share)
    assert (execution["status"], execution["error"], jobs) == ("FAILED", "Batch.ClientException", [])
    execution, jobs = execute(text, None)
    assert (execution["status"], jobs[0].share, jobs[0].priority) == ("SUCCEEDED", "weekly", 1)
    assert json.loads(execution["output"])["Status"] == "SUCCEEDED"


def test_errors_have_the_names_that_aws_gives_them(execute: Execute) -> None:
    execution, _ = execute(READ_ABSENT, moto_adapter.name_errors)
    assert (execution["status"], execution["error"]) == ("FAILED", "s3.NoSuchKeyException")
    assert execute(READ_ABSENT, None)[0]["status"] == "SUCCEEDED"


def failing_looks(application: WsgiApplication) -> WsgiApplication:
    """Batch answers the first two looks at a job with an error of its own."""
    looks = itertools.count()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not environ["PATH_INFO"].endswith("/describejobs") or next(looks) >= 2:
            return application(environ, start_response)
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("500 Internal Server Error", [("x-amzn-ErrorType", "ServerException"), ("x-amzn-RequestId", "1")])
        return [b'{"message": "a mistake of the service"}']

    return answer


def test_a_look_that_fails_does_not_submit_the_job_again(execute: Execute) -> None:
    retry = [{"ErrorEquals": ["Batch.ServerException"], "IntervalSeconds": 1, "MaxAttempts": 3}]
    text = definition("batch:submitJob.sync", SUBMIT, Retry=retry)
    assert len(execute(text, moto_adapter.follow_jobs, front=failing_looks)[1]) > 1
    execution, jobs = execute(text, None, front=failing_looks)
    assert (execution["status"], len(jobs)) == ("SUCCEEDED", 1)


def test_a_job_ends_with_the_state_that_submitted_it(execute: Execute) -> None:
    execution, jobs = execute(IMPATIENT, moto_adapter.follow_jobs, 600)
    assert (execution["error"], jobs[0].stop_reason) == ("States.Timeout", None)
    execution, jobs = execute(IMPATIENT, None, 600)
    assert (execution["error"], jobs[0].status) == ("States.Timeout", "FAILED")
    assert jobs[0].status_reason == "The state that submitted this job ended before it"


def test_the_engine_signs_as_the_endpoint_asks(execute: Execute) -> None:
    execution, _ = execute(READ, moto_adapter.share_clients)
    assert execution["status"] == "FAILED"
    assert "Status Code: 403" in execution["cause"]
    assert execute(READ, None)[0]["status"] == "SUCCEEDED"


def test_clients_and_definitions_are_made_once(execute: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def count(**arguments: Any) -> Any:
        made.append(arguments["service_name"])
        # The key that the change would give it.
        return boto3.client(**{**arguments, "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"]})

    monkeypatch.setattr(moto_adapter.boto_client, "boto3", SimpleNamespace(client=count))
    assert execute(READ, moto_adapter.share_clients)[0]["status"] == "SUCCEEDED"
    assert made.count("s3") > 1
    made.clear()
    assert execute(READ, None)[0]["status"] == "SUCCEEDED"
    assert made == ["s3"]
    others = tuple(change for change in CHANGES if change is not moto_adapter.parse_once)
    with mock.patch.object(moto_adapter, "CHANGES", others), adapted(time.sleep):
        parse = moto_adapter.AmazonStateLanguageParser.parse
        assert parse(READ) is not parse(READ)
    with adapted(time.sleep):
        parse = moto_adapter.AmazonStateLanguageParser.parse
        assert parse(READ) is parse(READ)


def test_the_end_of_a_job_is_noticed_at_once(execute: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than `execute` waits; a constant of another name would be a reason to look at the change again.
    monkeypatch.setattr(moto_adapter.callback_module, "_DELAY_SECONDS_SYNC_CONDITION_CHECK", 600)
    assert execute(definition("batch:submitJob.sync", SUBMIT), None, seconds=1)[0]["status"] == "SUCCEEDED"


def test_variables_are_read_where_they_are_named(execute: Execute) -> None:
    more = {"count": {"Type": "Wait", "Seconds": 0, "Assign": {"laps.$": "States.MathAdd($laps, 2)"}, "Next": "enough"}}
    more["enough"] = {"Type": "Choice", "Choices": [{"Variable": "$laps", "NumericEquals": 3, "Next": "done"}]}
    states = {"begin": {"Type": "Pass", "Assign": {"laps": 1}, "Next": "count"}, **more, "done": {"Type": "Succeed"}}
    text = json.dumps({"StartAt": "begin", "States": states})
    assert execute(text, moto_adapter.read_variables)[0]["status"] == "FAILED"
    assert execute(text, None)[0]["status"] == "SUCCEEDED"


def test_a_wait_ends_with_the_gang_that_its_execution_polls(execute: Execute) -> None:
    task = {"Type": "Task", "Resource": "arn:aws:states:::aws-sdk:batch:submitJob", "Parameters": SUBMIT, "Next": "Wait"}
    states = {
        "Submit": {**task, "Assign": {"job.$": "$.JobId"}},
        # Longer than `execute` waits.
        "Wait": {"Type": "Wait", "Seconds": 600, "End": True},
    }
    execution, [job] = execute(json.dumps({"StartAt": "Submit", "States": states}), None, seconds=1)
    assert (execution["status"], job.status) == ("SUCCEEDED", "SUCCEEDED")


def test_the_engine_is_as_it_was_afterwards() -> None:
    owners = (
        moto_adapter.AmazonStateLanguageParser,
        moto_adapter.boto_client,
        moto_adapter.StateTaskService,
        moto_adapter.WaitFunction,
        moto_adapter.StringVariableSample,
        moto_adapter.StateTaskServiceBatch,
        moto_adapter.batch_module,
        moto_adapter.callback_module,
        moto_adapter.aws_sdk_module,
    )
    before = [dict(vars(owner)) for owner in owners]
    with adapted(time.sleep):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before
