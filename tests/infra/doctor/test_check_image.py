"""AMI and container images: every finding once where it belongs, and once where it does not."""

from __future__ import annotations

import dataclasses
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.doctor import check_image
from infra.doctor.asking import Refused, Unavailable
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


BASE = "sha256:" + 64 * "b"
MIRRORED = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/trnpipe/neuron-base@{BASE}"
SINGLE = {"images": [{"imageManifest": json.dumps({"schemaVersion": 2, "config": {"digest": "sha256:cc"}, "layers": []})}]}


def manifest(*platforms: str) -> dict[str, Any]:
    manifests = [
        {"digest": "sha256:b", "platform": dict(zip(("os", "architecture"), one.split("/"), strict=True))} for one in platforms
    ]
    return {"images": [{"imageManifest": json.dumps({"schemaVersion": 2, "manifests": manifests})}]}


def answers_of(index: dict[str, Any], *, mirrored: bool = True) -> dict[str, Any]:
    """ECR with both images as one index, or as a single image.

    Args:
        index: what the images' digest names.
        mirrored: whether the registry has a copy of the base.
    """

    def described(asked: dict[str, Any]) -> Any:
        if asked["repositoryName"] == "trnpipe/neuron-base":
            assert asked["imageIds"] == [{"imageDigest": BASE}]
            return {"imageDetails": [DETAILS]} if mirrored else Refused("ImageNotFoundException", "")
        return {"imageDetails": [DETAILS]}

    return {
        "ecr:DescribeImages": described,
        "ecr:BatchGetImage": lambda asked: SINGLE if asked["imageIds"] == [{"imageDigest": "sha256:b"}] else index,
        "ecr:GetDownloadUrlForLayer": {"downloadUrl": "https://layers/cc", "layerDigest": "sha256:cc"},
    }


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Let every image's configuration name this base."""

    def configure(label: str | None) -> None:
        labels = {"Labels": {check_image.BASE_LABEL: label}} if label else {}
        configuration = {"os": "linux", "architecture": "amd64", "config": labels}
        monkeypatch.setattr(check_image, "download", lambda url: json.dumps(configuration).encode())

    return configure


@pytest.mark.parametrize(
    ("details", "platforms", "after", "expected"),
    [
        ({"imageDetails": [DETAILS]}, ["linux/amd64", "unknown/unknown"], True, []),
        (
            {"imageDetails": [DETAILS]},
            ["linux/arm64"],
            True,
            [("problem", "the image trnpipe/neuron:0.1.0 is for another processor")],
        ),
        (Refused("ImageNotFoundException", ""), [], False, [("problem", "the image trnpipe/neuron:0.1.0 has not been pushed")]),
        (
            Refused("RepositoryNotFoundException", ""),
            [],
            False,
            [("warning", "the image repository trnpipe/neuron does not exist yet")],
        ),
        (
            Refused("RepositoryNotFoundException", ""),
            [],
            True,
            [("problem", "the image trnpipe/neuron:0.1.0 has not been pushed")],
        ),
    ],
    ids=["pushed", "other processor", "not pushed", "before the first deployment", "repository deleted"],
)
def test_containers(
    blueprint: Blueprint,
    look: Any,
    bad: Any,
    configured: Callable[[str | None], None],
    details: Any,
    platforms: list[str],
    after: bool,
    expected: Any,
) -> None:
    configured(MIRRORED)
    answers = {**answers_of(manifest(*platforms)), "ecr:DescribeImages": details}
    findings = look(check_image.containers, blueprint, answers, after=after)
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


@pytest.fixture
def blob() -> Iterator[str]:
    """An address that answers with an image's configuration."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            configuration = {"os": "linux", "architecture": self.path.strip("/")}
            labels = {"Labels": {check_image.BASE_LABEL: MIRRORED}}
            self.wfile.write(json.dumps({**configuration, "config": labels}).encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("architecture", "problems"), [("amd64", 0), ("arm64", 2)])
def test_a_single_image_says_its_processor_in_its_configuration(
    blueprint: Blueprint, look: Any, bad: Any, blob: str, architecture: str, problems: int
) -> None:
    answers = {
        **answers_of(SINGLE),
        "ecr:GetDownloadUrlForLayer": {"downloadUrl": f"{blob}/{architecture}", "layerDigest": "sha256:cc"},
    }
    assert len(bad(look(check_image.containers, blueprint, answers))) == problems


def test_a_registry_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        check_image.download("http://127.0.0.1:9/blob")


NOT_PINNED = ("problem", "the Neuron image names no base by digest")
NOT_MIRRORED = ("problem", "the Neuron image's base is not in the deployment's registry")


@pytest.mark.parametrize(
    ("label", "mirrored", "expected"),
    [
        (MIRRORED, True, []),
        (f"public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0@{BASE}", True, []),
        (f"public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0@{BASE}", False, [NOT_MIRRORED]),
        ("public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0", True, [NOT_PINNED]),
        (None, True, [NOT_PINNED]),
    ],
)
@pytest.mark.parametrize("index", [manifest("linux/arm64", "linux/amd64"), SINGLE], ids=["index", "single"])
def test_the_base_of_the_neuron_image_is_kept(
    blueprint: Blueprint,
    look: Any,
    bad: Any,
    configured: Callable[[str | None], None],
    label: str | None,
    mirrored: bool,
    expected: Any,
    index: dict[str, Any],
) -> None:
    configured(label)
    findings = look(check_image.containers, blueprint, answers_of(index, mirrored=mirrored))
    assert bad(findings) == expected
    remedy = "make mirror REPOSITORY=123456789012.dkr.ecr.us-west-2.amazonaws.com/trnpipe/neuron-base"
    assert all(finding.remedy.startswith(remedy) for finding in findings if finding.remedy)


def test_an_image_that_is_gone_meanwhile(blueprint: Blueprint, look: Any, bad: Any) -> None:
    missing = {"images": [], "failures": [{"imageId": {"imageTag": "0.1.0"}, "failureCode": "ImageNotFound"}]}
    assert bad(look(check_image.containers, blueprint, answers_of(missing))) == [("problem", "a call failed")]
