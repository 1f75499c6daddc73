"""Where the operator commands look: a stack's outputs over real HTTP, what a definition says, and every kind of refusal."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError

from pipeline.errors import BadConfig, BadData, MissingInput, ServiceRefused, Transient, TrnpipeError
from pipeline.operate.deployment import EndpointGone, Machine, S3Files, Site, open_site
from pipeline.operate.endpoint import EndpointRecord, announced, only_environment, read_endpoint

ARN = "arn:aws:states:us-west-2:123456789012:stateMachine:trnpipe"
TEMPLATE = {
    "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
    "Outputs": {"StateMachineArn": {"Value": ARN}, "JobLogGroup": {"Value": "/trnpipe/jobs"}},
}


def test_a_stack_says_where_everything_is(s3_root: str) -> None:
    client = boto3.client("cloudformation")
    other = {"Resources": TEMPLATE["Resources"], "Outputs": {"BucketName": {"Value": "weekly"}}}
    for name, template in (("site-test", TEMPLATE), ("site-test-data", other)):
        client.create_stack(StackName=name, TemplateBody=json.dumps(template))
    with open_site("site-test", None) as site:
        assert (site.machine_arn, site.option) == (ARN, "--stack site-test")
        assert site.log_of("train/a") == "/trnpipe/jobs, stream train/a"
        arn = site.execution_arn("week-1")
        assert arn == "arn:aws:states:us-west-2:123456789012:execution:trnpipe:week-1"
        assert site.console_link(arn) == (
            f"https://console.aws.amazon.com/states/home?region=us-west-2#/v2/executions/details/{arn}"
        )
    with pytest.raises(BadConfig, match="without -data"), open_site("site-test-data", None):
        pass
    with pytest.raises(MissingInput, match="no such stack"), open_site("absent", None):
        pass


def test_no_region_and_no_credentials_end_with_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(BadConfig, match="set AWS_REGION"), open_site("trnpipe", None):
        pass
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    with pytest.raises(BadConfig, match="credentials"), open_site("trnpipe", None):
        pass
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(BadConfig, match="absent"), open_site("trnpipe", None):
        pass


@pytest.mark.parametrize(
    ("code", "status", "error", "words"),
    [
        ("AccessDeniedException", 400, ServiceRefused, "grant it DescribeStateMachine"),
        ("ExpiredTokenException", 400, BadConfig, "aws sso login"),
        ("StateMachineDoesNotExist", 400, ServiceRefused, "refused"),
        ("ThrottlingException", 400, Transient, "a new attempt"),
        ("InternalFailure", 500, Transient, "a new attempt"),
    ],
)
def test_what_aws_answers_instead(answers: Any, code: str, status: int, error: type[TrnpipeError], words: str) -> None:
    answers.refuse("stepfunctions", "describe_state_machine", code, status)
    with pytest.raises(error, match=words):
        _ = answers.site.machine


def test_aws_out_of_reach_is_transient_and_a_local_run_out_of_reach_is_gone(tmp_path: Path) -> None:
    unreachable = EndpointConnectionError(endpoint_url="http://127.0.0.1:9")
    with pytest.raises(Transient, match="AWS could not be reached"), Site(ARN).asking("x"):
        raise unreachable
    with pytest.raises(EndpointGone, match="does not answer"), Site(ARN, state=tmp_path).asking("x"):
        raise unreachable


def test_the_definition_says_bucket_queues_and_limits(answers: Any) -> None:
    answers.add_machine()
    machine = answers.site.machine
    assert machine.bucket == "weekly"
    assert [queue.rpartition("/")[2] for queue in machine.queues] == ["trnpipe-cpu", "trnpipe-train"]
    assert machine.deployment.allowed_nodes == (2,)
    assert machine.deployment.read == ("s3://lake/rows",)


@pytest.mark.parametrize("definition", ["{}", "no JSON", '{"States": {}}', '{"States": {"a": {"Type": "Pass"}}}', "[]"])
def test_another_state_machine_is_refused(definition: str) -> None:
    with pytest.raises(BadData, match="this version of trnpipe"):
        Machine.parse(definition)


def test_a_run_folder_on_s3_reads_as_one_on_disk(s3_root: str) -> None:
    bucket = s3_root.removeprefix("s3://")
    client = boto3.client("s3")
    for name in ("runs/a/train/progress-00000.json", "runs/a/train/progress-00001.json", "runs/ab/train/progress-00000.json"):
        client.put_object(Bucket=bucket, Key=name, Body=name.encode())
    files = S3Files(Site(ARN), f"{s3_root}/runs/a")
    assert files.read("/train/progress-00001.json") == b"runs/a/train/progress-00001.json"
    assert files.read("/train/progress-00001.json", last=4) == b"json"
    assert files.read("train/absent.json") is None
    found = files.listed("/train/progress-")
    assert [one.name for one in found] == ["train/progress-00000.json", "train/progress-00001.json"]
    assert found[0].version != found[1].version
    assert (bool(files.listed("/train/")), bool(files.listed("/model"))) == (True, False)
    client.put_object(Bucket=bucket, Key="runs/a/train/empty", Body=b"")
    assert files.read("train/empty", last=4) == b""


def test_the_endpoint_s_file_is_its_owner_s_alone_and_goes(tmp_path: Path) -> None:
    record = EndpointRecord(state_machine=ARN, environment={"AWS_ACCESS_KEY_ID": "key"})
    (tmp_path / "endpoint.json").write_text("left by a killed one, for all to read")
    with announced(tmp_path, record):
        assert read_endpoint(tmp_path) == record
        assert stat.S_IMODE((tmp_path / "endpoint.json").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    assert read_endpoint(tmp_path) is None
    (tmp_path / "endpoint.json").write_text('{"state_machine": 5}')
    with pytest.raises(BadData, match=r"endpoint\.json"):
        read_endpoint(tmp_path)


def test_inside_a_local_run_nothing_of_the_user_s_aws_settings_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    with only_environment({"AWS_ACCESS_KEY_ID": "local"}):
        assert {key: value for key, value in os.environ.items() if key.startswith("AWS_")} == {"AWS_ACCESS_KEY_ID": "local"}
    assert os.environ["AWS_PROFILE"] == "production"
