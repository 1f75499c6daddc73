"""`trnpipe doctor` as people type it: real processes against moto's services over HTTP, their output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import boto3
import pytest

from infra.doctor import command
from infra.doctor.asking import Aws, Subject, examine
from infra.doctor.blueprint import Blueprint, chosen_context
from infra.doctor.command import run_doctor
from pipeline.errors import BadConfig, Transient

REGION = "us-west-2"


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "pipeline.cli", "doctor", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=300)


@pytest.mark.usefixtures("account")
def test_an_empty_account_is_told_what_it_lacks(blueprint: Blueprint) -> None:
    findings = examine(
        (*command.ALWAYS, *command.BEFORE), Subject(blueprint=blueprint, account="123456789012", after=False, ask=Aws(REGION))
    )
    found = {finding.what: finding.level for finding in findings}
    # The codes that make these of it are moto's, and so the services'.
    assert found["the CDK is not bootstrapped in this account and region"] == "problem"
    assert found["the AMI's SSM parameter does not exist"] == "problem"
    assert found["the service-linked role of Batch is missing"] == "warning"
    assert found["the image repository trnpipe/neuron does not exist yet"] == "warning"
    assert found["names are free"] == "ok"
    assert found["this account has no budget"] == "warning"
    assert "a call failed" not in {f.what for f in findings if f.area in ("Account", "Images", "Network")}


@pytest.mark.usefixtures("account")
def test_what_is_there_is_found(blueprint: Blueprint) -> None:
    ssm, ec2, ecr = (boto3.client(name) for name in ("ssm", "ec2", "ecr"))
    ssm.put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="21", Type="String")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    ssm.put_parameter(Name="/trnpipe/ami/neuron-driver-2.27", Value=image, Type="String")
    ecr.create_repository(repositoryName="trnpipe/cpu")
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
    index["manifests"] = [{"digest": "sha256:aa", "platform": {"os": "linux", "architecture": "amd64"}}]
    ecr.put_image(repositoryName="trnpipe/cpu", imageManifest=json.dumps(index), imageTag="0.1.0")
    boto3.client("iam").create_role(RoleName="AWSServiceRoleForBatch", AssumeRolePolicyDocument="{}")
    subject = Subject(blueprint=blueprint, account="123456789012", after=False, ask=Aws(REGION))
    checks = (
        command.check_account.bootstrap,
        command.check_account.service_roles,
        command.check_image.ami,
        command.check_image.containers,
    )
    findings = [(finding.level, finding.what) for finding in examine(checks, subject)]
    assert ("ok", "CDK bootstrap") in findings
    assert ("ok", "service-linked role") in findings
    assert ("ok", "SSM parameter of the AMI") in findings
    assert ("ok", "image trnpipe/cpu:0.1.0") in findings


@pytest.mark.usefixtures("account")
def test_names_that_are_taken_over_http(blueprint: Blueprint) -> None:
    logs = boto3.client("logs")
    logs.create_log_group(logGroupName="/trnpipe/jobs")
    subject = Subject(blueprint=blueprint, account="123456789012", after=False, ask=Aws(REGION))
    [finding] = command.check_account.names(subject)
    assert finding.value == "log group /trnpipe/jobs"
    logs.delete_log_group(logGroupName="/trnpipe/jobs")
    assert [one.what for one in command.check_account.names(subject)] == ["names of the first deployment are taken"]
    assert [
        one.what
        for one in command.check_account.names(Subject(blueprint=blueprint, account="123456789012", after=False, ask=Aws(REGION)))
    ] == ["names are free"]


@pytest.mark.usefixtures("account")
def test_after_without_a_deployment(blueprint: Blueprint) -> None:
    subject = Subject(blueprint=blueprint, account="123456789012", after=True, ask=Aws(REGION))
    findings = examine(command.AFTER, subject)
    assert {"the stack trnpipe does not exist", "the stack trnpipe-data does not exist"} <= {finding.what for finding in findings}
    assert {finding.level for finding in findings} == {"problem"}


@pytest.mark.usefixtures("account")
def test_a_stack_as_cloudformation_gives_it(blueprint: Blueprint) -> None:
    cloudformation = boto3.client("cloudformation")
    template = {"Resources": {"Topic": {"Type": "AWS::SNS::Topic", "Properties": {}}}}
    cloudformation.create_stack(StackName="trnpipe", TemplateBody=json.dumps(template))
    try:
        subject = Subject(blueprint=blueprint, account="123456789012", after=True, ask=Aws(REGION))
        [topic] = subject.physical("trnpipe", "AWS::SNS::Topic")
        assert topic.startswith("arn:aws:sns:us-west-2:123456789012:")
        found = command.check_deployed.stacks(subject)
        differing = [one for one in found if "is not what these settings would deploy" in one.what]
        assert "- Topic" in differing[0].value
    finally:
        cloudformation.delete_stack(StackName="trnpipe")


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_the_command_ends_with_64_and_says_why() -> None:
    # moto knows no regions of an account: the command ends with that question.
    result = doctor("--json")
    record = json.loads(result.stdout)
    assert result.returncode == record["exit_code"] == 64, result.stderr
    assert {finding["area"] for finding in record["findings"]} >= {"Credentials", "Account"}


def test_settings_that_are_refused_end_with_64_before_anything_is_asked() -> None:
    result = doctor("-c", "trnpipe.zone=mars-1a")
    assert result.returncode == 64
    assert "mars-1a" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_policy_is_printed() -> None:
    assert "sts:GetCallerIdentity" in json.loads(doctor("--policy").stdout)["Statement"][0]["Action"]


@pytest.fixture
def drawn(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    monkeypatch.setattr(command, "draw", lambda context: blueprint)
    return blueprint


@pytest.mark.usefixtures("drawn", "account")
def test_without_credentials_that_is_the_only_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert run_doctor(as_json=True) == 64
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["what"] == "AWS does not accept the credentials"


@pytest.mark.usefixtures("drawn", "account")
def test_an_account_that_cannot_be_reached_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0)
    with pytest.raises(Transient):
        run_doctor()


@pytest.mark.usefixtures("drawn", "account")
def test_a_wrong_region_stops_the_questions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "examine", lambda checks, subject: asked.append(checks) or [])
    answers = {
        "sts:GetCallerIdentity": {"Account": "123456789012", "Arn": "arn:me"},
        "account:GetRegionOptStatus": {"RegionName": REGION, "RegionOptStatus": "DISABLED"},
        "cloudformation:ListStackResources": {"StackResourceSummaries": []},
    }
    monkeypatch.setattr(Aws, "__call__", lambda self, service, name, **_: answers[f"{service}:{name}"])
    assert run_doctor(as_json=True) == 64
    assert asked == []
    answers["account:GetRegionOptStatus"]["RegionOptStatus"] = "ENABLED"
    assert run_doctor(as_json=True) == 0
    assert asked == [(*command.ALWAYS, *command.BEFORE)]
    assert run_doctor(as_json=True, after=True) == 0
    assert asked[1] == (*command.ALWAYS, *command.AFTER)


def test_options_of_the_context_lie_over_cdk_json() -> None:
    context = chosen_context(["trnpipe.region=us-east-2", "a=b=c"], "prod")
    assert (context["trnpipe.region"], context["a"], context["env"]) == ("us-east-2", "b=c", "prod")
    assert context["trnpipe"]["name"] == "trnpipe"
    with pytest.raises(BadConfig, match="not KEY=VALUE"):
        chosen_context(["region"], None)


def test_every_check_is_run_by_the_command() -> None:
    from infra.doctor import check_account, check_capacity, check_deployed, check_image, check_network, check_storage
    from infra.doctor.asking import Check

    modules = (check_account, check_capacity, check_deployed, check_image, check_network, check_storage)
    written = [one for module in modules for one in vars(module).values() if isinstance(one, Check)]
    run = {id(one) for one in (check_account.region, *command.ALWAYS, *command.BEFORE, *command.AFTER)}
    assert {id(one) for one in written} == run
