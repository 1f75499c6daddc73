"""`trnpipe images`: what it packs, and a build over real HTTP; what moto's CodeBuild lacks is answered by its service model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from pipeline.cost import IMAGE_KINDS
from pipeline.errors import BadConfig, MissingInput, Transient
from pipeline.operate import image_build
from pipeline.operate.deployment import Site
from pipeline.operate.image_build import build_images, pack

ROOT = Path(__file__).resolve().parents[3]
BUCKET = "image-sources"
REGISTRY = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
NAME = "images-test"
OUTPUTS = {
    "ImageProject": f"{NAME}-images",
    "ImageSource": f"{BUCKET}/images/source.zip",
    "CpuRepositoryUri": f"{REGISTRY}/{NAME}/cpu",
    "CudaRepositoryUri": f"{REGISTRY}/{NAME}/cuda",
    "NeuronRepositoryUri": f"{REGISTRY}/{NAME}/neuron",
}
BUILD = f"{NAME}-images:0a1b"


def put_image(kind: str, tag: str) -> str:
    """Push an image, as a build does; return its digest."""
    media_type = "application/vnd.oci.image.index.v1+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": media_type, "manifests": [], "annotations": {"kind": kind}})
    pushed = boto3.client("ecr").put_image(repositoryName=f"{NAME}/{kind}", imageManifest=manifest, imageTag=tag)
    return str(pushed["image"]["imageId"]["imageDigest"])


@pytest.fixture
def data_stack(account: str) -> str:
    """A deployed data stack, whose project and repositories exist; the name of the pipeline's stack."""
    s3, cloudformation, codebuild = (boto3.client(name) for name in ("s3", "cloudformation", "codebuild"))
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": account})
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    template = {
        "Resources": {"Topic": {"Type": "AWS::SNS::Topic"}},
        "Outputs": {key: {"Value": value} for key, value in OUTPUTS.items()},
    }
    cloudformation.create_stack(StackName=f"{NAME}-data", TemplateBody=json.dumps(template))
    codebuild.create_project(
        name=OUTPUTS["ImageProject"],
        source={"type": "S3", "location": OUTPUTS["ImageSource"]},
        artifacts={"type": "NO_ARTIFACTS"},
        environment={"type": "LINUX_CONTAINER", "image": "aws/codebuild/standard:8.0", "computeType": "BUILD_GENERAL1_LARGE"},
        serviceRole="arn:aws:iam::123456789012:role/images",
    )
    for kind in IMAGE_KINDS:
        boto3.client("ecr").create_repository(repositoryName=f"{NAME}/{kind}")
    return NAME


class Builds:
    """CodeBuild, as its model describes it: answers of BatchGetBuilds, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> None:
        self.started: dict[str, Any] = {}
        self._answers = iter(answers)
        self._real = Site.ask
        monkeypatch.setattr(image_build, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(Site, "ask", lambda site, *asked, **given: self.ask(site, *asked, **given))

    def ask(self, site: Any, what: str, service: str, operation: str, *absent: Any, **given: Any) -> Any:
        if operation == "start_build":
            self.started = given
            return {"build": {"id": BUILD}}
        if operation == "batch_get_builds":
            assert given == {"ids": [BUILD]}
            return {"builds": [{"id": BUILD, **next(self._answers)}]}
        return self._real(site, what, service, operation, *absent, **given)


def phase(kind: str, status: str | None = "SUCCEEDED", message: str = "") -> dict[str, Any]:
    ended = {"phaseStatus": status, "durationInSeconds": 7, "contexts": [{"statusCode": "", "message": message}]}
    return {"phaseType": kind, **(ended if status else {})}


def test_what_is_packed_is_what_docker_would_see_and_make_reads() -> None:
    names = zipfile.ZipFile(io.BytesIO(pack(ROOT))).namelist()
    for wanted in ("Makefile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE", "pipeline/cli.py"):
        assert wanted in names
    assert {"containers/cpu/Dockerfile", "containers/neuron/requirements.lock", "containers/build.lock"} <= set(names)
    assert not [name for name in names if name.startswith(("infra/", "tests/", "docs/", ".git/")) or "__pycache__" in name]
    assert names == sorted(names)
    assert len(names) == len(set(names))


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "pipeline" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".dockerignore").write_text("*\n!pipeline\n!LICENSE\n**/__pycache__\n")
    for name in ("Makefile", "LICENSE", "secret", "pipeline/a.py", "pipeline/__pycache__/a.pyc"):
        (tmp_path / name).write_text(name)
    first = pack(tmp_path)
    for name in ("Makefile", "pipeline/a.py"):
        os.utime(tmp_path / name, (1, 1))
    assert pack(tmp_path) == first
    assert zipfile.ZipFile(io.BytesIO(first)).namelist() == [".dockerignore", "LICENSE", "Makefile", "pipeline/a.py"]
    (tmp_path / "LICENSE").write_text("other")
    assert pack(tmp_path) != first


def test_a_build_is_followed_and_its_images_are_named_by_digest(
    data_stack: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests: dict[str, str] = {}
    builds = Builds(
        monkeypatch,
        {"buildStatus": "IN_PROGRESS", "phases": [phase("SUBMITTED"), phase("BUILD", None)]},
        {"buildStatus": "SUCCEEDED", "phases": [phase("SUBMITTED"), phase("BUILD")]},
    )
    real = image_build._follow

    def follow(*given: Any) -> Any:
        ended = real(*given)
        digests.update({kind: put_image(kind, "1.0") for kind in IMAGE_KINDS})
        return ended

    monkeypatch.setattr(image_build, "_follow", follow)
    printed = build_images(data_stack, ["cpu", "neuron"], "1.0", ROOT)
    assert yaml.safe_load(printed) == {
        "images": {"tag": "1.0", **{kind: f"{REGISTRY}/{NAME}/{kind}@{digests[kind]}" for kind in ("cpu", "neuron")}}
    }
    told = capsys.readouterr().err.splitlines()[1:]
    assert told == ["SUBMITTED SUCCEEDED 7 s", "BUILD SUCCEEDED 7 s"]
    stored = boto3.client("s3").get_object(Bucket=BUCKET, Key="images/source.zip", VersionId=builds.started["sourceVersion"])
    assert stored["Body"].read() == pack(ROOT)
    variables = {one["name"]: one["value"] for one in builds.started["environmentVariablesOverride"]}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    assert variables == {"KINDS": "cpu neuron", "TAG": "1.0", "REVISION": head}


@pytest.mark.parametrize(("status", "expected"), [("FAILED", BadConfig), ("TIMED_OUT", Transient), ("STOPPED", Transient)])
@pytest.mark.parametrize("logged", [True, False])
def test_a_build_that_fails_ends_with_its_log(
    data_stack: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    expected: type[Exception],
    logged: bool,
) -> None:
    place = {"groupName": f"/{NAME}/images", "streamName": "0a1b"}
    logs = boto3.client("logs")
    logs.create_log_group(logGroupName=place["groupName"])
    logs.create_log_stream(logGroupName=place["groupName"], logStreamName="0a1b")
    now = int(time.time() * 1000)
    events = [{"timestamp": now + number, "message": f"line {number}\n"} for number in range(100)]
    logs.put_log_events(logGroupName=place["groupName"], logStreamName="0a1b", logEvents=events)
    Builds(
        monkeypatch,
        {"buildStatus": status, "phases": [phase("BUILD", status, "exit status 1")], "logs": place if logged else {}},
    )
    with pytest.raises(expected, match=status):
        build_images(data_stack, ["cpu"], "1.0", ROOT)
    told = capsys.readouterr().err.splitlines()[1:]
    lines = [f"line {number}" for number in range(60, 100)]
    assert told == [f"BUILD {status} 7 s exit status 1", *(lines if logged else [])]


def test_nothing_is_started_where_it_cannot_end_well(data_stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(monkeypatch)
    put_image("neuron", "1.0")
    with pytest.raises(BadConfig, match="the tag is taken"):
        build_images(data_stack, ["cpu", "neuron"], "1.0", ROOT)
    with pytest.raises(BadConfig, match="gpu"):
        build_images(data_stack, ["gpu"], "2.0", ROOT)
    with pytest.raises(MissingInput, match="no such stack"):
        build_images("absent", ["cpu"], "2.0", ROOT)
    template = {"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}
    boto3.client("cloudformation").create_stack(StackName="older-data", TemplateBody=json.dumps(template))
    with pytest.raises(BadConfig, match="deploy the data stack"):
        build_images("older", ["cpu"], "2.0", ROOT)
    assert builds.started == {}


def test_the_command_over_http(data_stack: str) -> None:
    """moto's build succeeds and pushes nothing: the command reaches the end, and finds no image."""
    command = [sys.executable, "-m", "pipeline.cli", "images", "--stack", data_stack, "--kinds", "cpu", "--tag", "9.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "BUILD SUCCEEDED" in done.stderr, done.stderr
    assert (done.returncode, done.stdout) == (69, "")
    assert "9.9" in done.stderr
