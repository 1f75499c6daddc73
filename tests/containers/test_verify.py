"""containers/verify.py: what it finds in an installation that is not what the code needs."""

from __future__ import annotations

import os
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path

import pytest

from containers import verify
from tests.trainium import STANDINS


class Installed:
    """Packages as pip leaves them: folders NAME.dist-info with a METADATA file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, version: str, *requires: str) -> Installed:
        info = self._folder / f"{name}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")
        return self

    def find(self, name: str) -> Distribution:
        info = self._folder / f"{name}.dist-info"
        if not info.is_dir():
            raise PackageNotFoundError(name)
        return PathDistribution(info)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


LOCK = "numpy==2.5.5 \\\n    --hash=sha256:00\nrich==14.1 ; sys_platform == 'linux' \\\n    --hash=sha256:00\n"


def test_the_lock_files_versions_are_looked_for(installed: Installed) -> None:
    installed.add("numpy", "2.5.5").add("rich", "14.1")
    assert list(verify.differences(LOCK, installed.find)) == []


def test_another_version_and_a_missing_package_are_named(installed: Installed) -> None:
    installed.add("numpy", "1.26.4")
    assert list(verify.differences(LOCK, installed.find)) == [
        "numpy: 1.26.4 is installed, the lock file says 2.5.5",
        "rich: nothing is installed, the lock file says 14.1",
    ]


def test_what_a_lock_file_has_for_other_machines_is_left_out(installed: Installed) -> None:
    assert list(verify.differences("numpy==2.5.5 ; sys_platform == 'win32' \\\n", installed.find)) == []


def test_a_package_laid_over_the_base_that_the_base_cannot_use_is_found(installed: Installed) -> None:
    """The case this exists for: two levels down, through an extra, with a base's local version in between."""
    installed.add("trnpipe", "0.1.0", "numpy>=2", "neuronx-cc==2.24.8799.0; extra == 'neuron'")
    installed.add("neuronx-cc", "2.24.8799.0+6f62ff7c", "numpy<=1.26.4", "protobuf")
    installed.add("numpy", "2.5.5")
    assert list(verify.conflicts("trnpipe", installed.find)) == []
    assert sorted(verify.conflicts("trnpipe[neuron]", installed.find)) == [
        "numpy: neuronx-cc needs <=1.26.4, 2.5.5 is installed",
        "protobuf: neuronx-cc needs it (protobuf), nothing is installed",
    ]


def test_packages_that_need_each_other_end_it(installed: Installed) -> None:
    installed.add("trnpipe", "0.1.0", "torch").add("torch", "2.9.1", "torch-xla").add("torch-xla", "2.9.0", "torch>=2.9")
    assert list(verify.conflicts("trnpipe", installed.find)) == []


def test_this_environment_has_what_trnpipe_needs() -> None:
    assert list(verify.conflicts("trnpipe", distribution)) == []


def test_tools_and_libraries_are_looked_for_where_the_code_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert len(list(verify.missing_files(tmp_path))) == len(verify.TOOLS) + len(verify.LIBRARIES)
    for tool in verify.TOOLS:
        (tools / tool).touch(mode=0o755)
    for library in verify.LIBRARIES:
        path = tmp_path / library.replace("*", "1")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list(verify.missing_files(tmp_path)) == []


@pytest.mark.parametrize(("runtime", "objections"), [("2.31.24.0-0b044f4ce", 0), ("2.32.31.0", 1), ("nonsense", 1)])
def test_the_runtime_is_the_sdks(runtime: str, objections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.sdk.neuron_tools.runtime_version", lambda **_: runtime)
    assert len(list(verify.runtime_objection())) == objections


def test_neurons_packages_load_and_compile_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDINS))
    assert list(verify.compile_objection()) == []
    monkeypatch.setattr(verify, "COMPILE", verify.COMPILE.replace("cpu_backend=True", "cpu_backend=False"))
    [objection] = verify.compile_objection()
    assert objection.endswith("(exit code 1): RuntimeError: no NeuronCore: only with cpu_backend is something compiled here")


@pytest.mark.parametrize("package", ["libneuronxla", "neuronxcc", "torch_neuronx"])
def test_a_package_that_does_not_go_with_another_one_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / f"{package}.py").write_text("raise TypeError('Descriptors cannot be created directly.')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{STANDINS}")
    [objection] = verify.compile_objection()
    assert objection.endswith("(exit code 1): TypeError: Descriptors cannot be created directly.")


def test_a_compiler_that_hangs_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "COMPILE", "import time; time.sleep(600)")
    monkeypatch.setattr(verify, "COMPILE_SECONDS", 0.1)
    assert list(verify.compile_objection()) == ["Neuron compiler: a graph of two operations took more than 0 s"]


def test_it_ends_with_1_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("no-such-package==1.0 \\\n    --hash=sha256:00\n")
    assert verify.main([str(lock)]) == 1
    assert capsys.readouterr().err == "no-such-package: nothing is installed, the lock file says 1.0\n"
    lock.write_text("")
    assert verify.main([str(lock)]) == 0


def test_a_neuron_image_without_neurons_packages_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("")
    assert verify.main([str(lock), "--neuron"]) == 1
    objections = capsys.readouterr().err.splitlines()
    assert "neuronx-cc: not on PATH" in objections
    assert objections[-1].endswith("(exit code 1): ModuleNotFoundError: No module named 'libneuronxla'")
