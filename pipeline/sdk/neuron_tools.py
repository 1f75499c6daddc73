"""The Neuron system tools and the driver's files, with a deadline and strict parsing: unknown output counts as a failure.

Formats are those of SDK 2.29.1: neuron-ls, nccom-test and neuron-monitor user guides, sysfs user guide
(aws-neuron-sdk, tools/neuron-sys-tools at v2.29.1). Loads no framework.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any

from msgspec import convert

from pipeline.run.processes import end_group

HOST = Path("/")
"""Root folder of devices, sysfs and tools."""
TOOLS_FOLDER = "opt/aws/neuron/bin"
RUNTIME_LIBRARY = "opt/aws/neuron/lib/libnrt.so.1"
"""The runtime's library as programs load it: a link to libnrt.so.VERSION."""
DRIVER_VERSION = "sys/module/neuron/version"
"""Version of the driver that is loaded. `modinfo neuron` names the one on disk, which may be another (nrt-troubleshoot.rst)."""

UNCORRECTED = ("mem_ecc_uncorrected", "mem_ecc_repairable_uncorrected", "sram_ecc_uncorrected")
"""Counters of a device since its driver was loaded, in `neuronN/stats/hardware`."""

NCCOM_OPERATIONS = {"all_reduce": "allr", "all_gather": "allg", "reduce_scatter": "redsct"}
NCCOM_FAILURE = re.compile(r"failure running|test failed|\b[1-9]\d* errors? found|driver is not running", re.IGNORECASE)
"""Output of a failed nccom-test, whose exit status no document describes."""

ALL_CORES = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_RT_ROOT_COMM_ID")
"""Variables that bind a process to some cores, or to a gang; a tool must see the whole host."""
OUTPUT_LIMIT_BYTES = 1 << 20
LINES_SHOWN = 3

Version = tuple[int, int, int]


class ToolError(Exception):
    """A tool is missing, fails, does not end, or prints something undocumented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronLsDevice:
    """One entry of `neuron-ls -j`.

    Attributes:
        cores: ids of its NeuronCores.
        memory: bytes.
        processes: `PID COMMAND` of the processes that hold cores of it.
    """

    index: int
    cores: tuple[int, ...]
    memory: int
    processes: tuple[str, ...]


# Tools as processes.


def find_tool(name: str, root: Path = HOST) -> str:
    """Return the program's path, on PATH or in the folder of the Neuron packages.

    Raises:
        ToolError: it is in neither.
    """
    if (found := shutil.which(name) or shutil.which(name, path=str(root / TOOLS_FOLDER))) is None:
        raise ToolError(f"{name} is neither on PATH nor in /{TOOLS_FOLDER}")
    return found


def run_tool(name: str, *arguments: str, seconds: float, root: Path = HOST, folder: Path | None = None) -> tuple[str, str]:
    """Run a tool to its end, and end everything that it started if it takes too long.

    Args:
        folder: where it runs and leaves its own files; None: where this process is.

    Returns:
        Standard output and standard error.

    Raises:
        ToolError: no such tool, an exit status other than 0, or no end in time.
    """
    # Files, because a pipe stays open as long as any of the tool's own children holds it.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                [find_tool(name, root), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=tool_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"{name} cannot be started: {error}") from error
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"{name} did not end within {seconds:g} seconds{_last_words(stdout, stderr)}") from error
        finally:
            end_group(process)
        if code != 0:
            raise ToolError(f"{name} ended with status {code}{_last_words(stdout, stderr)}")
        return _text(stdout), _text(stderr)


def tool_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that bind a rank to its own core."""
    return {name: value for name, value in base.items() if name not in ALL_CORES}


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(OUTPUT_LIMIT_BYTES).decode(errors="replace")


def _last_words(stdout: IO[bytes], stderr: IO[bytes]) -> str:
    lines = [line.strip() for line in (_text(stdout) + "\n" + _text(stderr)).splitlines() if line.strip()]
    return ": " + " | ".join(lines[-LINES_SHOWN:]) if lines else ""


# Versions.


def parse_version(text: str) -> Version:
    """The first three numbers of `2.27.4.0` or `2.31.24.0-0b044f4ce`.

    Raises:
        ToolError: no version.
    """
    if (found := re.match(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", text.strip())) is None:
        raise ToolError(f"not a version: {text.strip()!r}")
    return int(found[1]), int(found[2]), int(found[3])


def driver_version(root: Path = HOST) -> str:
    """Version of the loaded driver.

    Raises:
        ToolError: no driver is loaded.
    """
    try:
        return (root / DRIVER_VERSION).read_text().strip()
    except OSError as error:
        raise ToolError(f"no Neuron driver is loaded: /{DRIVER_VERSION} cannot be read ({error.strerror})") from error


def runtime_version(root: Path = HOST, *, seconds: float) -> str:
    """Version of the runtime library in this container: by the library's own file name, else by its package.

    Raises:
        ToolError: neither names one.
    """
    if named := re.fullmatch(r"libnrt\.so\.(\d+(?:\.\d+){2,3})", (root / RUNTIME_LIBRARY).resolve().name):
        return named[1]
    try:
        stdout, _ = run_tool("dpkg-query", "-W", "-f=${Version}", "aws-neuronx-runtime-lib", seconds=seconds, root=root)
    except ToolError as error:
        raise ToolError(f"the Neuron runtime is not known: no /{RUNTIME_LIBRARY}, and {error}") from error
    return stdout.strip()


def driver_objection(driver: Version, runtime: Version, accepted: Sequence[str]) -> str | None:
    """Return the rule by which this driver does not fit this runtime, None if it fits.

    The hard limits are those of the Neuron runtime's release notes (SDK 2.30, 2.31); within them, tested releases are accepted.

    Args:
        accepted: driver releases as `MAJOR.MINOR`.
    """
    if driver[:2] >= (2, 29) and runtime[:2] < (2, 33):
        return "a driver 2.29 or newer needs a runtime 2.33 or newer"
    if driver[:2] <= (2, 26) and runtime[:2] >= (2, 32):
        return "a runtime 2.32 or newer refuses drivers up to 2.26"
    return None if f"{driver[0]}.{driver[1]}" in accepted else f"health_check.driver_versions accepts {', '.join(accepted)}"


# Devices.


def missing_files(root: Path, names: Sequence[str]) -> list[str]:
    """Return the names that are missing under /dev."""
    return [f"/dev/{name}" for name in names if not (root / "dev" / name).exists()]


def uncorrected_errors(devices: int, root: Path = HOST) -> dict[str, int]:
    """Return the uncorrected memory errors of devices 0 to `devices` - 1: `neuron3 sram_ecc_uncorrected` -> count.

    Raises:
        ToolError: a counter is missing or not a number.
    """
    counts = {}
    for device, name in product(range(devices), UNCORRECTED):
        file = root / f"sys/devices/virtual/neuron_device/neuron{device}/stats/hardware" / name
        # The guide draws counters as folders with a file `total`; the driver makes these plain files.
        file = file / "total" if file.is_dir() else file
        try:
            counts[f"neuron{device} {name}"] = int(file.read_text())
        except (OSError, ValueError) as error:
            raise ToolError(f"the error counter of neuron{device} cannot be read: {error}") from error
    return counts


def neuron_ls(root: Path = HOST, *, seconds: float) -> list[NeuronLsDevice]:
    """Return the host's Neuron devices, as `neuron-ls -j` lists them. Needs no core, so it works while training holds them all.

    Raises:
        ToolError: the tool fails, or prints something else.
    """
    stdout, _ = run_tool("neuron-ls", "-j", seconds=seconds, root=root)
    try:
        return [_neuron_device(entry) for entry in convert(json.loads(stdout), list[dict[str, Any]])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ToolError(f"neuron-ls printed an unknown format ({type(error).__name__}: {error}): {stdout[:200]!r}") from error


def _neuron_device(entry: dict[str, Any]) -> NeuronLsDevice:
    cores = convert(entry["neuroncore_ids"], tuple[int, ...])
    if len(cores) != convert(entry["nc_count"], int):
        raise ValueError(f"nc_count {entry['nc_count']} with cores {cores}")
    processes = convert(entry["neuron_processes"], list[dict[str, Any]])
    return NeuronLsDevice(
        index=convert(entry["neuron_device"], int),
        cores=cores,
        memory=convert(entry["memory_size"], int),
        processes=tuple(f"{convert(process['pid'], int)} {process['command']}" for process in processes),
    )


# Collectives within the host.


def nccom_test(operation: str, ranks: int, size: int, *, seconds: float, root: Path = HOST) -> float:
    """Run one collective over cores of this host with its values checked. Takes all cores: before any rank opens its own.

    Args:
        operation: a key of NCCOM_OPERATIONS.
        size: bytes of the message.

    Returns:
        Bus bandwidth in GiB/s, which is what the tool's column `busbw(GB/s)` holds.

    Raises:
        ToolError: anything but an exit status of 0, a report of the documented form, and no word of a failure.
    """
    with tempfile.TemporaryDirectory(prefix="trnpipe-nccom-") as name:
        folder = Path(name)
        report = folder / "report.json"
        stdout, stderr = run_tool(
            "nccom-test",
            *("-r", str(ranks), NCCOM_OPERATIONS[operation], "-b", str(size), "-e", str(size), "-d", "fp32", "--check"),
            *("--non-interactive", "--report-to-json-file", str(report)),
            seconds=seconds,
            root=root,
            folder=folder,
        )
        if found := NCCOM_FAILURE.search(stdout + "\n" + stderr):
            line = next((line for line in (stdout + "\n" + stderr).splitlines() if found[0] in line), found[0])
            raise ToolError(f"nccom-test: {line.strip()}")
        try:
            results = convert(json.loads(report.read_text())["results"], list[dict[str, Any]])
            rates = [float(result["busbw(GB/s)"]) for result in results if result["type"] == "fp32" and result["size(B)"]]
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ToolError(f"nccom-test left no report of the known form ({type(error).__name__}: {error})") from error
    if len(rates) != 1 or len(results) != 1 or not math.isfinite(rates[0]) or rates[0] <= 0:
        raise ToolError(f"nccom-test reported other results than requested: {results}")
    return rates[0]
