"""The two images as their Dockerfiles describe them. What only a build can show, containers/verify.py says at its end."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.version import Version

from pipeline.contract import STAGES, stage_command

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
KINDS = ("cpu", "neuron")

IN_THE_IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "platform_machine": "x86_64"}
LOCKED = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\]+))?", re.MULTILINE)


@dataclass
class Step:
    """One instruction: `RUN`, its options (`--mount=...`) and the rest."""

    instruction: str
    options: list[str]
    rest: str


@dataclass
class BuildStage:
    """From one FROM to the next."""

    base: str
    name: str | None
    steps: list[Step] = field(default_factory=list)

    def texts(self, instruction: str) -> list[str]:
        return [step.rest for step in self.steps if step.instruction == instruction]

    def lock(self, text: str) -> str:
        """A text with the stage's default lock file."""
        defaults = dict(each.partition("=")[::2] for each in self.texts("ARG"))
        return text.replace("${LOCK}", defaults.get("LOCK", "${LOCK}"))


def read(kind: str) -> tuple[dict[str, str], list[BuildStage]]:
    """Arguments before the first FROM, and the stages."""
    text = (CONTAINERS / kind / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    arguments: dict[str, str] = {}
    stages: list[BuildStage] = []
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if not line.strip():
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(BuildStage(base, name or None))
        elif not stages:
            assert instruction == "ARG", line
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            words = rest.split()
            options = [word for word in words if word.startswith("--")] if instruction in {"RUN", "COPY"} else []
            options = options[: next((place for place, word in enumerate(words) if not word.startswith("--")), len(words))]
            stages[-1].steps.append(Step(instruction, options, " ".join(words[len(options) :])))
    return arguments, stages


def locked(path: Path) -> dict[str, str]:
    """Package -> version in an image, by a lock file."""
    found = {}
    for line in LOCKED.finditer(path.read_text()):
        if line["marker"] is None or Marker(line["marker"].strip()).evaluate(IN_THE_IMAGE):
            assert line["name"] not in found, line["name"]
            found[line["name"]] = line["version"]
    return found


def in_build_context(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last pattern that matches it or a folder above it decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        named = parts if line.removeprefix("!").startswith("**/") else above
        if any(fnmatch.fnmatchcase(each, pattern) for each in named):
            ignored = not line.startswith("!")
    return not ignored


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_from_the_repository_is_there_and_reaches_the_build(kind: str) -> None:
    _, stages = read(kind)
    names = {stage.name for stage in stages if stage.name}
    taken: list[str] = []
    for stage in stages:
        for step in stage.steps:
            options = dict(option.removeprefix("--").split("=", 1) for option in step.options)
            if step.instruction == "COPY" and "from" not in options:
                taken += stage.lock(step.rest).split()[:-1]
            elif step.instruction == "COPY":
                assert options["from"] in names
            for mount in (option for option in step.options if option.startswith("--mount=type=bind")):
                parts = dict(part.split("=") for part in mount.removeprefix("--mount=").split(","))
                if "from" in parts:
                    assert parts["from"] in names
                else:
                    taken.append(parts["source"])
                    assert step.rest.count(parts["target"]) >= 1, "mounted and not used"
                    words = stage.lock(step.rest).split()
                    taken += [word.removeprefix("/") for word in words if word.startswith(f"{parts['target']}/")]
    assert {"pyproject.toml", "pipeline", "containers/build.lock", "containers/verify.py"} <= set(taken)
    for path in taken:
        assert (ROOT / path).exists(), path
        assert in_build_context(path), path


@pytest.mark.parametrize("path", [".git/config", "cdk.json", "tests/conftest.py", ".venv/bin/python", "pipeline/__pycache__"])
def test_nothing_else_reaches_the_build(path: str) -> None:
    assert not in_build_context(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_package_is_installed_by_hash_or_from_this_repository(kind: str) -> None:
    _, stages = read(kind)
    commands = [
        shlex.split(command)
        for stage in stages
        for text in stage.texts("RUN")
        for command in re.split(r"&&|;", text)
        if "install" in command.split()
    ]
    assert commands
    for command in commands:
        by_hash = "--require-hashes" in command and "-r" in command
        assert by_hash or {"--no-index", "--no-deps"} <= set(command), command
        assert not any(word.startswith(("--extra-index-url", "--trusted-host", "git+", "http")) for word in command)


@pytest.mark.parametrize("kind", KINDS)
def test_bases_are_versions_and_arguments(kind: str) -> None:
    arguments, stages = read(kind)
    for base in arguments.values():
        tag = base.rpartition(":")[2]
        assert re.match(r"[0-9]+\.[0-9]+", tag), base
    named = {stage.name for stage in stages}
    assert all(re.fullmatch(r"\$\{\w+\}", stage.base) or stage.base in named for stage in stages)
    assert {stage.base.strip("${}") for stage in stages} - named <= set(arguments)


def test_the_neuron_base_is_the_sdk_that_the_code_is_pinned_to() -> None:
    arguments, _ = read("neuron")
    tag = arguments["NEURON_IMAGE"].rpartition(":")[2]
    assert re.search(r"-sdk2\.29\.1-", tag)
    assert re.search(r"-py312-", tag)
    torch = locked(ROOT / "requirements.lock")["torch"]
    assert Version(tag.split("-")[0]).release[:2] == Version(torch).release[:2]


@pytest.mark.parametrize(("suffix", "code"), [("", 64), ("@sha256:" + 64 * "a", 0)])
def test_the_neuron_image_is_built_on_a_digest_and_says_which(suffix: str, code: int) -> None:
    arguments, stages = read("neuron")
    base = arguments["NEURON_IMAGE"] + suffix
    refusal = stages[0].texts("RUN")[0]
    done = subprocess.run(["sh", "-c", refusal], env={"NEURON_IMAGE": base}, capture_output=True, text=True)
    assert (done.returncode, base in done.stderr, "`make mirror`" in done.stderr) == (code, bool(code), bool(code))
    assert 'org.opencontainers.image.base.name="${NEURON_IMAGE}"' in stages[-1].texts("LABEL")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_thing_built_is_looked_at(kind: str) -> None:
    _, stages = read(kind)
    last = stages[-1].lock(stages[-1].texts("RUN")[-1])
    expected = f"python /containers/verify.py /containers/{kind}/requirements.lock" + (" --neuron" if kind == "neuron" else "")
    assert last == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_definitions_command_is_what_runs(kind: str) -> None:
    """No entry point stands before it, neither the image's nor its base's, and the program that it names is installed."""
    _, stages = read(kind)
    entry_points = stages[-1].texts("ENTRYPOINT")
    assert entry_points == (["[]"] if kind == "neuron" else [])
    [default] = stages[-1].texts("CMD")
    program = json.loads(default)[0]
    assert {stage_command(stage)[0] for stage in STAGES} == {program}
    assert re.search(rf'^{program} = "pipeline\.', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_only_devices_need_root() -> None:
    users = {kind: read(kind)[1][-1].texts("USER") for kind in KINDS}
    assert users == {"cpu": ["10001:10001"], "neuron": ["0:0"]}
    created = " ".join(read("cpu")[1][-1].texts("RUN"))
    assert re.search(r"useradd --uid 10001 --create-home trnpipe", created)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_say_which_version_and_commit(kind: str) -> None:
    _, stages = read(kind)
    arguments = [text for text in stages[-1].texts("ARG") if not text.startswith(("LOCK=", "NEURON_IMAGE"))]
    declared = dict(text.partition("=")[::2] for text in arguments)
    project = dict(re.findall(r'^(version|license) = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert declared == {"VERSION": project["version"], "REVISION": ""}
    [labels] = stages[-1].texts("LABEL")
    found = dict(label.split("=", 1) for label in shlex.split(labels))
    assert found["org.opencontainers.image.version"] == "${VERSION}"
    assert found["org.opencontainers.image.revision"] == "${REVISION}"
    assert found["org.opencontainers.image.licenses"] == project["license"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_and_no_installed_system_package(kind: str) -> None:
    """What the system needs is in the bases; a package that is added here has to be pinned."""
    _, stages = read(kind)
    for stage in stages:
        for text in (*stage.texts("RUN"), *stage.texts("ENV"), *stage.texts("ARG")):
            assert not re.search(r"password|secret|token|AWS_ACCESS|_KEY\b", text, re.IGNORECASE), text
            assert not re.search(r"\b(apt-get|apt|curl|wget)\b", text), text


def test_the_wheel_is_built_from_what_is_copied_and_whole(tmp_path: Path) -> None:
    """With the files that the Dockerfiles copy and nothing else, offline, as their stage `wheel` does it."""
    for kind in KINDS:
        _, stages = read(kind)
        [stage] = [stage for stage in stages if stage.name == "wheel"]
        copied = {path for step in stage.steps if step.instruction == "COPY" for path in step.rest.split()[:-1]}
        assert copied - {"containers/build.lock"} == {"pyproject.toml", "README.md", "LICENSE", "pipeline"}
        [epoch] = [text.partition("=")[2] for text in stage.texts("ARG") if text.startswith("SOURCE_DATE_EPOCH")]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist", "."]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    subprocess.run([sys.executable, "-m", "pip", *build], cwd=tmp_path, env=environment, check=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {entry.filename: entry for entry in archive.infolist()}
    code = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline").rglob("*") if path.suffix in (".py", ".j2", ".yaml")
    }
    assert {"pipeline/stages/report.html.j2", "pipeline/sdk/known_errors.yaml"} <= code
    assert {name for name in held if not name.startswith("trnpipe-")} == code
    # Nothing of when or where it was built.
    assert {entry.date_time for entry in held.values()} == {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize("name", ["cpu/requirements.lock", "cuda/requirements.lock", "neuron/requirements.lock", "build.lock"])
def test_images_have_the_versions_that_are_tested(name: str) -> None:
    tested = locked(ROOT / "requirements.lock")
    image = locked(CONTAINERS / name)
    # The build of torch is the image's own; what it is a build of is not. uv is the Makefile's.
    others = {
        package: version for package, version in image.items() if Version(version).public != tested.get(package, "").split("+")[0]
    }
    uv = re.search(r"^UV := uv==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert uv is not None
    assert others == ({"uv": uv[1]} if name == "build.lock" else {})


def test_the_cpu_image_holds_no_cuda() -> None:
    packages = locked(CONTAINERS / "cpu/requirements.lock")
    assert packages["torch"].endswith("+cpu")
    assert not [name for name in packages if name.startswith("nvidia-") or name == "triton"]


def test_the_image_for_gpus_holds_the_build_for_cuda() -> None:
    packages = locked(CONTAINERS / "cuda/requirements.lock")
    assert packages["torch"] == locked(ROOT / "requirements.lock")["torch"]
    assert {"nvidia-nccl-cu12", "nvidia-cudnn-cu12", "triton"} <= set(packages)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [("cpu", "cpu", "cpu"), ("neuron", "neuron", None)]),
        ({"KINDS": "cuda cpu"}, [("cuda", "cpu", "cuda"), ("cpu", "cpu", "cpu")]),
        ({"KINDS": "cpu", "TORCH_BACKEND": ""}, [("cpu", "cpu", "cuda")]),
    ],
)
def test_make_images_builds_each_kind_from_its_dockerfile_and_lock(
    tmp_path: Path, variables: dict[str, str], expected: list[tuple[str, str, str | None]]
) -> None:
    """The image's name, the folder of its Dockerfile and that of its lock."""
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n')
    engine.chmod(0o755)
    given = [f"{name}={value}" for name, value in {"ENGINE": str(engine), **variables}.items()]
    subprocess.run(["make", "--silent", "images", *given], cwd=ROOT, check=True, capture_output=True)
    found = []
    for call in (tmp_path / "calls").read_text().splitlines():
        lock = re.search(r"LOCK=(\w+)/requirements.lock", call)
        backend = re.search(r"TORCH_BACKEND=(\w*)", call)
        assert (backend and backend[1]) == (None if lock is None else "cpu" if lock[1] == "cpu" else "")
        tag, folder = re.search(r"trnpipe/(\w+):", call), re.search(r"containers/(\w+)/Dockerfile", call)
        assert tag
        assert folder
        found.append((tag[1], folder[1], lock and lock[1]))
    assert found == expected


def test_the_neuron_images_lock_leaves_the_bases_builds_alone() -> None:
    packages = locked(CONTAINERS / "neuron/requirements.lock")
    assert not {"torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "networkx"} & set(packages)


def test_numpy_is_the_locks_and_not_the_bases() -> None:
    """One of the base's packages pins numpy 1.26.4 (nxdt_requirements.txt of aws-neuron/deep-learning-containers)."""
    required = re.search(r'"numpy>=(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    assert Version(locked(CONTAINERS / "neuron/requirements.lock")["numpy"]).major >= int(required[1])


def test_the_neuron_image_holds_bytecode() -> None:
    """Its base sets PYTHONDONTWRITEBYTECODE=1 (pytorch/training/2.9.0/Dockerfile.neuronx), which only an empty value undoes."""
    _, stages = read("neuron")
    assert any("PYTHONDONTWRITEBYTECODE=" in text.split() for text in stages[-1].texts("ENV"))
    assert any(text.startswith("python -m compileall ") for text in stages[-1].texts("RUN"))


@pytest.mark.parametrize("name", ["cpu/requirements.lock", "cuda/requirements.lock", "neuron/requirements.lock", "build.lock"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    blocks = re.split(r"(?m)^(?=[a-z])", (CONTAINERS / name).read_text())
    assert all("--hash=sha256:" in block for block in blocks if block.strip())
