"""The last step of an image's build: is what was installed what the code needs? Ends with 1, and a line for every difference.

    python verify.py LOCK [--neuron]

The base of the Neuron image brings packages of its own, and a lock file is laid over them without resolving anything. This is
where two that do not go together are found: when the image is built, not on four hosts that wait for each other.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Find = Callable[[str], Distribution]

LOCKED = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*==[^\\\n]+", re.MULTILINE)
"""A package of a lock file, with the marker that says which Pythons and machines it is for."""

TOOLS = ("neuron-ls", "neuron-monitor", "nccom-test", "neuronx-cc", "neuron_parallel_compile")
LIBRARIES = ("opt/aws/neuron/lib/libnrt.so.*", "opt/aws/neuron/lib/libnccom.so.*", "opt/amazon/efa/lib/libfabric.so.*")
"""The runtime, its collectives, and what these reach the network through (where EFA's installer puts it on Ubuntu)."""

RUNTIME = (2, 31)
"""Release of the Neuron runtime in SDK 2.29.1; with another, the driver that infra/settings.py asks of the AMI may be wrong."""

TOOL_SECONDS = 60.0
COMPILE_SECONDS = 600.0

COMPILE = """
import libneuronxla, neuronxcc, torch, torch_neuronx

def two_operations(a, b, c):
    return a @ b + c

example = tuple(torch.ones(128, 128) for _ in range(3))
torch_neuronx.trace(two_operations, example, compiler_args=["--target=trn1"], cpu_backend=True)
"""
"""Load Neuron's packages and compile a graph of two operations.

`cpu_backend` traces and compiles where there is no Neuron device, if the arguments name the target ("CPU Compilation" in the
PyTorch NeuronX Tracing API of SDK 2.29.1:
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.29.1/frameworks/torch/torch-neuronx/api-reference-guide/inference/api-torch-neuronx-trace.html).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--neuron", action="store_true", help="Neuron's packages, tools and libraries too")
    options = parser.parse_args(arguments)
    found = [*differences(options.lock.read_text(encoding="utf-8"), distribution)]
    found += conflicts("trnpipe[neuron]" if options.neuron else "trnpipe", distribution)
    if options.neuron:
        found += [*missing_files(Path("/")), *runtime_objection(), *compile_objection()]
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def differences(lock: str, find: Find) -> Iterator[str]:
    """Packages of a lock file that are not there in the version it names."""
    for line in LOCKED.finditer(lock):
        wanted = Requirement(line[0])
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        version = str(wanted.specifier).removeprefix("==")
        installed = _version(wanted.name, find)
        if installed != version:
            yield f"{wanted.name}: {installed or 'nothing'} is installed, the lock file says {version}"


def conflicts(root: str, find: Find) -> Iterator[str]:
    """What a requirement, and all that follow from it, ask for and do not get."""
    waiting = [("this image", Requirement(root))]
    seen: set[tuple[str, frozenset[str], str]] = set()
    while waiting:
        who, wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras), str(wanted.specifier))
        if key in seen:
            continue
        seen.add(key)
        try:
            package = find(wanted.name)
        except PackageNotFoundError:
            yield f"{wanted.name}: {who} needs it ({wanted}), nothing is installed"
            continue
        if not wanted.specifier.contains(package.version, prereleases=True):
            yield f"{wanted.name}: {who} needs {wanted.specifier}, {package.version} is installed"
        for text in package.requires or ():
            needed = Requirement(text)
            environments = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needed.marker is None or any(needed.marker.evaluate(environment) for environment in environments):
                waiting.append((package.name, needed))


def missing_files(root: Path) -> Iterator[str]:
    """Neuron tools and libraries that are not where the code looks for them."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            yield f"{tool}: not on PATH"
    for library in LIBRARIES:
        if not any(root.glob(library)):
            yield f"/{library}: not there"


def runtime_objection() -> Iterator[str]:
    """Why the image's Neuron runtime is not the one that goes with the hosts' driver."""
    from pipeline.sdk.neuron_tools import ToolError, parse_version, runtime_version

    try:
        text = runtime_version(seconds=TOOL_SECONDS)
        release = parse_version(text)[:2]
    except ToolError as error:
        yield str(error)
        return
    if release != RUNTIME:
        yield f"Neuron runtime: {text} is installed, SDK 2.29.1 has {'.'.join(map(str, RUNTIME))}"


def compile_objection() -> Iterator[str]:
    """Report why Neuron's packages cannot be loaded together or compile nothing.

    Package metadata does not show, for example, that generated code does not go with the installed protobuf. The packages are
    loaded in a process of their own: a native library that does not fit ends the process that loads it.
    """
    command = [sys.executable, "-c", COMPILE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield f"Neuron compiler: a graph of two operations took more than {COMPILE_SECONDS:.0f} s"
        return
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing was printed"]
        yield f"Neuron compiler: a graph of two operations does not compile (exit code {done.returncode}): {said[0]}"


def _version(name: str, find: Find) -> str | None:
    try:
        return find(name).version
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
