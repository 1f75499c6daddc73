"""`trnpipe ami`: which of Amazon's AMIs it lists, and a copy over real HTTP, as doctor judges it afterwards."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from typing import Any

import boto3
import pytest
from botocore.exceptions import WaiterError
from moto.ec2.models import ec2_backends

from infra.cdk_context import read_context
from infra.doctor.check_image import judge_ami
from infra.settings import AMI_PARAMETER, DEFAULT_AMI_PARAMETER
from pipeline.errors import MissingInput, Transient
from pipeline.operate import neuron_ami
from pipeline.operate.deployment import Site
from pipeline.operate.neuron_ami import copy_ami, find_amis

ACCOUNT = "123456789012"
AMAZON = "591542846629"
NAME = "al2023-ami-ecs-neuron-hvm-2023.0.{}-kernel-6.1-x86_64"


def publish(day: str, name: str = NAME, owner: str = AMAZON) -> str:
    """Register an AMI of Amazon's that was created on a day, YYYYMMDD; return its id. moto sets no dates over HTTP."""
    image_id = boto3.client("ec2").register_image(
        Name=name.format(day),
        Architecture="x86_64",
        RootDeviceName="/dev/xvda",
        BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 30}}],
    )["ImageId"]
    image = ec2_backends[ACCOUNT]["us-west-2"].amis[image_id]
    image.owner_id, image.owner_alias = owner, "amazon" if owner == AMAZON else None
    image.creation_date = datetime.strptime(day, "%Y%m%d").replace(tzinfo=timezone.utc, hour=20)
    return str(image_id)


@pytest.fixture
def site(account: str) -> Site:
    return Site("", region=account)


def test_amis_of_the_period_are_listed_the_oldest_first(site: Site) -> None:
    last = publish("20260520")
    first = publish("20260410")
    for day in ("20260105", "20260409", "20260521", "20260805"):
        publish(day)
    publish("20260504", name="al2023-ami-ecs-hvm-2023.0.{}-kernel-6.1-x86_64")
    publish("20260504", owner="210987654321")
    assert [image["ImageId"] for image in find_amis(site)] == [first, last]


def test_amis_that_amazon_has_deprecated_are_listed_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto deprecates none."""
    asked: dict[str, Any] = {}
    image = {"ImageId": "ami-0a1b2c3d", "CreationDate": "2026-05-04T20:00:00.000Z"}
    monkeypatch.setattr(Site, "ask", lambda *_, **given: asked.update(given) or {"Images": [image]})
    assert find_amis(site) == [image]
    assert (asked["IncludeDeprecated"], asked["Owners"]) == (True, ["amazon"])


def test_without_one_the_remedy_is_to_bake_one(site: Site) -> None:
    # moto has Amazon's AMIs of earlier years.
    with pytest.raises(MissingInput, match=r"us-west-2: \d+ named (.|\n)*bake one: docs/deploy.md, section 2"):
        find_amis(site)


def test_a_copy_is_ours_tagged_and_named_by_a_version_of_the_parameter(site: Site) -> None:
    source = publish("20260504")
    ec2, ssm = boto3.client("ec2"), boto3.client("ssm")
    assert copy_ami(site, source, DEFAULT_AMI_PARAMETER) == f"ssm:{DEFAULT_AMI_PARAMETER}:1"
    parameter = ssm.get_parameter(Name=f"{DEFAULT_AMI_PARAMETER}:1")["Parameter"]
    assert parameter["DataType"] == "aws:ec2:image"
    [copy] = ec2.describe_images(ImageIds=[parameter["Value"]])["Images"]
    assert (copy["OwnerId"], copy["Name"]) == (ACCOUNT, NAME.format("20260504"))
    assert copy["ImageId"] != source
    [tag] = copy["Tags"]
    assert tag == {"Key": "neuron-driver", "Value": "2.27.x presumed from its creation on 2026-05-04"}
    # moto's copies lose these.
    real = copy | {"Architecture": "x86_64", "RootDeviceName": "/dev/xvda"}
    findings = {finding.what: finding for finding in judge_ami(real, ACCOUNT)}
    assert findings["Neuron driver"].level == "ok"
    assert findings["Neuron driver"].value == "neuron-driver 2.27.x presumed"
    # The same command once more continues with that copy.
    assert copy_ami(site, source, DEFAULT_AMI_PARAMETER) == f"ssm:{DEFAULT_AMI_PARAMETER}:2"
    assert ssm.get_parameter(Name=DEFAULT_AMI_PARAMETER)["Parameter"]["Value"] == copy["ImageId"]
    assert len(ec2.describe_images(Owners=["self"])["Images"]) == 1


def test_another_ami_is_not_copied(site: Site) -> None:
    good, other = publish("20260504"), publish("20260805")
    with pytest.raises(MissingInput, match=rf"{other}(.|\n)*one of {good}"):
        copy_ami(site, other, DEFAULT_AMI_PARAMETER)
    assert boto3.client("ec2").describe_images(Owners=["self"])["Images"] == []


def test_a_copy_that_fails_is_named_by_no_parameter(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    source = publish("20260504")
    monkeypatch.setattr(neuron_ami, "POLL", {"Delay": 0, "MaxAttempts": 2})

    def fail(*_: Any, **__: Any) -> None:
        raise WaiterError("ImageAvailable", "Max attempts exceeded", {})

    monkeypatch.setattr(site.client("ec2"), "get_waiter", lambda _: type("Waiter", (), {"wait": fail}))
    with pytest.raises(Transient, match=r"not available(.|\n)*Max attempts exceeded"):
        copy_ami(site, source, DEFAULT_AMI_PARAMETER)
    assert boto3.client("ssm").describe_parameters()["Parameters"] == []


def test_the_default_parameter_is_that_of_cdk_json() -> None:
    named = AMI_PARAMETER.fullmatch(read_context()["trnpipe"]["ami"])
    assert named is not None
    assert named["name"] == DEFAULT_AMI_PARAMETER


def ami(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", "ami", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.usefixtures("account")
def test_the_command_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    # The settings name the region, not the environment.
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    source = publish("20260504")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    listed = ami()
    assert (listed.returncode, listed.stdout) == (0, f"{source}  2026-05-04  {NAME.format('20260504')}\n"), listed.stderr
    copied = ami("--copy", source, "-c", "trnpipe.ami=ssm:/other/name:7")
    assert (copied.returncode, copied.stdout) == (0, "ami: ssm:/other/name:1\n"), copied.stderr
    assert ami("--env", "smoke", "--copy", source).stdout == f"ami: ssm:{DEFAULT_AMI_PARAMETER}:1\n"
    none = ami("-c", "trnpipe.region=us-east-2", "-c", "trnpipe.zone=us-east-2a")
    assert (none.returncode, "bake one" in none.stderr) == (66, True)
