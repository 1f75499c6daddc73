"""AMI and container images: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from infra.doctor import check_image
from infra.doctor.asking import Refused
from infra.doctor.blueprint import Blueprint

AMI = {
    "ImageId": "ami-0123456789abcdef0",
    "Name": "ecs-neuron-driver-2.27.4.0",
    "State": "available",
    "Architecture": "x86_64",
    "RootDeviceName": "/dev/xvda",
    "OwnerId": "123456789012",
    "BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 30}}],
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"State": "pending"}, [("problem", "the AMI is not available")]),
        ({"Architecture": "arm64"}, [("problem", "the AMI is for another processor")]),
        (
            {"RootDeviceName": "/dev/sda1"},
            [("problem", "the AMI's root device has another name than the launch template assumes")],
        ),
        (
            {"BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 1000}}]},
            [("problem", "the AMI's volume is larger than the launch template's")],
        ),
        ({"OwnerId": "999999999999"}, [("warning", "another account owns the AMI")]),
        ({"OwnerId": "591542846629", "ImageOwnerAlias": "amazon"}, []),
        ({"Name": "ecs-neuron"}, [("warning", "the AMI's name, description and tags do not name its Neuron driver")]),
        ({"Name": "ecs-neuron", "Description": "aws-neuronx-dkms 2.27.4.0, kernel 6.1"}, []),
        ({"Name": "ecs-neuron", "Tags": [{"Key": "neuron-driver", "Value": "2.27"}]}, []),
        ({"Name": "ecs-neuron driver 2.29.0.0"}, [("problem", "the AMI's Neuron driver is too new")]),
        ({"Name": "neuronx-dkms-2.26.1"}, [("warning", "the AMI has another Neuron driver")]),
    ],
    ids=str,
)
def test_ami(other_blueprint: Blueprint, look: Any, bad: Any, change: Any, expected: Any) -> None:
    findings = look(check_image.ami, other_blueprint, {"ec2:DescribeImages": {"Images": [{**AMI, **change}]}})
    assert bad(findings) == expected


def test_an_ami_that_is_not_there(other_blueprint: Blueprint, look: Any, bad: Any) -> None:
    for gone in (Refused("InvalidAMIID.NotFound", ""), {"Images": []}):
        assert bad(look(check_image.ami, other_blueprint, {"ec2:DescribeImages": gone})) == [
            ("problem", "the AMI does not exist")
        ]


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ({"Parameter": {"Value": "ami-0123456789abcdef0"}}, []),
        ({"Parameter": {"Value": "a driver"}}, [("problem", "the AMI's SSM parameter holds no image id")]),
        (Refused("ParameterVersionNotFound", ""), [("problem", "the AMI's SSM parameter does not exist")]),
    ],
    ids=["good", "text", "absent"],
)
def test_ami_by_parameter(blueprint: Blueprint, look: Any, bad: Any, parameter: Any, expected: Any) -> None:
    answers = {"ssm:GetParameter": parameter, "ec2:DescribeImages": {"Images": [AMI]}}
    assert bad(look(check_image.ami, blueprint, answers)) == expected


DETAILS = {"imageDigest": "sha256:aa", "imageTags": ["0.1.0"], "imageSizeInBytes": 3 << 30}


@pytest.mark.parametrize(
    ("details", "after", "expected"),
    [
        ({"imageDetails": [DETAILS]}, True, []),
        (Refused("ImageNotFoundException", ""), False, [("problem", "the image trnpipe/neuron:0.1.0 has not been pushed")]),
        (
            Refused("RepositoryNotFoundException", ""),
            False,
            [("warning", "the image repository trnpipe/neuron does not exist yet")],
        ),
        (
            Refused("RepositoryNotFoundException", ""),
            True,
            [("problem", "the image trnpipe/neuron:0.1.0 has not been pushed")],
        ),
    ],
    ids=["pushed", "not pushed", "before the first deployment", "repository deleted"],
)
def test_containers(
    blueprint: Blueprint,
    look: Any,
    bad: Any,
    details: Any,
    after: bool,
    expected: Any,
) -> None:
    findings = look(check_image.containers, blueprint, {"ecr:DescribeImages": details}, after=after)
    # The neuron image, and the same of the cpu image.
    assert bad(findings)[: len(expected)] == expected
    assert len(bad(findings)) == 2 * len(expected)
    for finding in findings:
        assert not finding.remedy or re.search(
            r"make images KINDS=(cpu|neuron) TAG=new && docker tag trnpipe/\1:new ", finding.remedy
        )
        assert not finding.remedy or "docker push 123456789012.dkr.ecr.us-west-2.amazonaws.com/trnpipe/" in finding.remedy


def test_a_container_elsewhere_cannot_be_judged(blueprint: Blueprint, look: Any, bad: Any) -> None:
    public = dataclasses.replace(blueprint.containers[0], repository=None, uri="public.ecr.aws/team/neuron:7")
    private = dataclasses.replace(blueprint.containers[1], region="eu-west-1", registry="123456789012", uri="there")
    elsewhere = dataclasses.replace(blueprint, containers=(public, private))
    assert bad(look(check_image.containers, elsewhere, {})) == [
        ("warning", "the neuron image cannot be looked at"),
        ("warning", "the cpu image is in another region"),
    ]
