"""The project that builds images in the account: its template, what its role may do, and its commands run with fake programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.constructs.image_builder import BUILD_SPEC

ROOT = Path(__file__).resolve().parents[2]
REPOSITORIES = "123456789012.dkr.ecr.us-west-2.amazonaws.com/trnpipe"
DIGEST = "sha256:" + 64 * "a"


def test_a_large_privileged_container_builds_from_one_object_and_leaves_no_artifact(deployment: Any) -> None:
    project = deployment.only("AWS::CodeBuild::Project")
    environment = project["Environment"]
    assert (environment["Type"], environment["PrivilegedMode"]) == ("LINUX_CONTAINER", True)
    assert environment["ComputeType"] == "BUILD_GENERAL1_LARGE"
    assert project["Source"]["Type"] == "S3"
    assert json.dumps(project["Source"]["Location"]).endswith('"/images/source.zip"]]}')
    assert project["Artifacts"] == {"Type": "NO_ARTIFACTS"}
    assert (project["TimeoutInMinutes"], project["QueuedTimeoutInMinutes"]) == (120, 60)
    variables = {one["Name"]: one["Value"] for one in environment["EnvironmentVariables"]}
    assert variables["TAG"] == "0.1.0"
    assert json.dumps(variables["REPOSITORIES"]).endswith('"/trnpipe"]]}')


def test_nothing_starts_a_build_by_itself(deployment: Any) -> None:
    assert "Triggers" not in deployment.only("AWS::CodeBuild::Project")
    assert "codebuild" not in json.dumps(deployment.pipeline).lower()


def test_it_is_encrypted_as_the_bucket_is(deployment: Any, small_deployment: Any) -> None:
    key = "arn:aws:kms:us-west-2:123456789012:key/0a1b2c3d"
    assert deployment.only("AWS::CodeBuild::Project")["EncryptionKey"] == "alias/aws/s3"
    assert small_deployment.only("AWS::CodeBuild::Project")["EncryptionKey"] == key
    assert "kms:Decrypt" not in allowed(deployment)
    [statement] = [one for one in statements(small_deployment) if one["Action"] == "kms:Decrypt"]
    assert statement["Resource"] == key
    assert statement["Condition"] == {"StringEquals": {"kms:ViaService": "s3.us-west-2.amazonaws.com"}}


def statements(deployment: Any) -> list[dict[str, Any]]:
    [policy] = [
        one["Properties"]
        for name, one in deployment.data["Resources"].items()
        if one["Type"] == "AWS::IAM::Policy" and name.startswith("ImageBuilder")
    ]
    return list(policy["PolicyDocument"]["Statement"])


def allowed(deployment: Any) -> dict[str, str]:
    """Action -> the resources that the role may use it on, as text."""
    return {
        action: json.dumps(statement["Resource"])
        for statement in statements(deployment)
        for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }


def test_its_role_reads_the_source_uses_its_own_repositories_and_writes_its_log(deployment: Any) -> None:
    found = allowed(deployment)
    # Registries' passwords know no resources; every other action names its resource.
    assert {action for action, resource in found.items() if "*" in resource} == {
        "ecr:GetAuthorizationToken",
        "ecr-public:GetAuthorizationToken",
        "sts:GetServiceBearerToken",
    }
    assert {action for action in found if action.startswith("s3:")} == {"s3:GetObject", "s3:GetObjectVersion"}
    assert found["s3:GetObject"].endswith('"/images/source.zip"]]}')
    assert all(
        name in found["ecr:PutImage"]
        for name in ("StorageCpuImage", "StorageCudaImage", "StorageNeuronImage", "StorageNeuronBaseImage")
    )
    assert {action for action in found if action.startswith("logs:")} == {"logs:CreateLogStream", "logs:PutLogEvents"}
    assert "StorageBuildLogs" in found["logs:PutLogEvents"]
    assert {action.partition(":")[0] for action in found} == {"s3", "ecr", "ecr-public", "sts", "logs"}
    [role] = [one for name, one in deployment.data["Resources"].items() if name.startswith("ImageBuilderRole")][:1]
    [trust] = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "codebuild.amazonaws.com"}


FAKES = {
    "aws": "echo password",
    "apt-get": "true",
    "docker": 'case "$1" in login) cat >/dev/null ;; esac; test "$1 $FAILING" != "build yes"',
    # The base is in the deployment's repository once it has been copied there.
    "skopeo": 'case "$1 $*" in "inspect "*trnpipe/neuron-base*) test -e copied && echo "$DIGEST" ;; '
    'inspect*) echo "$DIGEST" ;; *) touch copied ;; esac',
}


def run_phases(folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Run the build's commands as CodeBuild does, phase by phase; return the exit code and the calls of programs."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in FAKES.items():
        (programs / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
        (programs / name).chmod(0o755)
    for name in ("Makefile", "cdk.json"):
        shutil.copy(ROOT / name, folder)
    if not (folder / "containers").exists():
        shutil.copytree(ROOT / "containers", folder / "containers")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "DIGEST": DIGEST, "REPOSITORIES": REPOSITORIES, "FAILING": ""}
    (folder / "calls").unlink(missing_ok=True)
    for phase in yaml.safe_load(BUILD_SPEC)["phases"].values():
        for command in phase["commands"]:
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment | variables, capture_output=True, text=True, check=False
            )
            if done.returncode:
                return done.returncode, (folder / "calls").read_text().splitlines()
    return 0, (folder / "calls").read_text().splitlines()


def test_the_commands_build_as_make_images_does_and_push(tmp_path: Path) -> None:
    code, calls = run_phases(tmp_path, KINDS="cpu neuron", TAG="1.2.3", REVISION="abc")
    assert code == 0
    logins = [call for call in calls if call.startswith("docker login")]
    assert [call.split()[-1] for call in logins] == ["123456789012.dkr.ecr.us-west-2.amazonaws.com", "public.ecr.aws"]
    cpu, neuron = [call for call in calls if call.startswith("docker build")]
    base = f"--build-arg NEURON_IMAGE={REPOSITORIES}/neuron-base@{DIGEST}"
    for call in (cpu, neuron):
        assert "--build-arg VERSION=1.2.3 --build-arg REVISION=abc ." in call
    assert "--build-arg LOCK=cpu/requirements.lock --build-arg TORCH_BACKEND=cpu" in cpu
    assert f"--tag trnpipe/neuron:1.2.3 {base}" in neuron
    pushed = [call.split()[-1] for call in calls if call.startswith("docker push")]
    assert pushed == [f"{REPOSITORIES}/cpu:1.2.3", f"{REPOSITORIES}/neuron:1.2.3"]
    [copy] = [call for call in calls if call.startswith("skopeo copy")]
    assert copy.endswith(f"docker://{REPOSITORIES}/neuron-base:2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04")
    # Tags never move: a base that was copied stays as it is.
    code, calls = run_phases(tmp_path, KINDS="neuron", TAG="1.2.4", REVISION="")
    assert (code, [call for call in calls if call.startswith("skopeo copy")]) == (0, [])
    assert any(base in call for call in calls)


def test_the_cpu_image_alone_takes_no_base(tmp_path: Path) -> None:
    code, calls = run_phases(tmp_path, KINDS="cpu", TAG="1.2.3", REVISION="")
    assert code == 0
    assert [call for call in calls if call.startswith(("skopeo", "apt-get"))] == []
    assert [call.split()[-1] for call in calls if call.startswith("docker push")] == [f"{REPOSITORIES}/cpu:1.2.3"]


@pytest.mark.parametrize("failing", ["docker", "skopeo"])
def test_what_fails_pushes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setitem(FAKES, failing, FAKES[failing] if failing == "docker" else "false")
    code, calls = run_phases(tmp_path, KINDS="cpu neuron", TAG="1.2.3", REVISION="", FAILING="yes" * (failing == "docker"))
    assert code != 0
    assert [call for call in calls if call.startswith("docker push")] == []
