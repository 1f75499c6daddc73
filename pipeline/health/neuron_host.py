"""Tests of a Trainium host by its own tools, from the cheapest to the one that takes every core.

All but the collectives work while training holds the cores. A tool that fails, hangs or prints something unknown fails its test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.config import HealthCheckConfig
from pipeline.errors import BadConfig
from pipeline.health.results import TestRecord
from pipeline.sdk.neuron_tools import (
    HOST,
    NCCOM_OPERATIONS,
    ToolError,
    driver_objection,
    driver_version,
    missing_files,
    nccom_test,
    neuron_ls,
    parse_version,
    runtime_version,
    uncorrected_errors,
)

DRIVER = "driver_version"


def wait_seconds(config: HealthCheckConfig) -> float:
    """Return the longest that `host_tests` may take."""
    return 3 * config.tool_timeout_seconds + len(NCCOM_OPERATIONS) * config.nccom_timeout_seconds


def host_tests(config: HealthCheckConfig, rank: int, nodes: int, *, root: Path = HOST) -> Iterator[TestRecord]:
    """Run every test of a host whose cores are free, before any of its ranks opens a device.

    The driver comes first: with a wrong one no other test means anything, so the tests end there. The collectives come last, and
    only where every test before has passed.
    """
    driver = _record(DRIVER, rank, partial(_driver, config, root))
    yield driver
    if not driver.passed:
        return
    all_passed = True
    for record in presence_tests(config, rank, nodes, idle=True, root=root):
        all_passed = all_passed and record.passed
        yield record
    ranks = config.neuron_devices * config.cores_per_device
    for operation in NCCOM_OPERATIONS if all_passed and ranks > 1 else ():
        yield _record(f"nccom_{operation}", rank, partial(_collective, operation, ranks, config, root))


def presence_tests(config: HealthCheckConfig, rank: int, nodes: int, *, idle: bool, root: Path = HOST) -> Iterator[TestRecord]:
    """Test that all devices are present and without memory errors. Takes no core.

    Args:
        nodes: the gang's nodes; one alone needs no EFA.
        idle: no process may hold a core yet.
    """
    yield _record("neuron_files", rank, partial(_files, "neuron", config.neuron_devices, root))
    if nodes > 1:
        yield _record("efa_files", rank, partial(_files, "infiniband/uverbs", config.efa_devices, root))
    yield _record("neuron_ls", rank, partial(_cores, config, root, idle=idle))
    yield _record("uncorrected_errors", rank, partial(_errors, config, root))


def compiler_environment(flags: str, cache: Path) -> dict[str, str]:
    """Return the variables that compile the tests' own small graphs: without casts, and apart from what training will load.

    Args:
        flags: NEURON_CC_FLAGS of the plan.
        cache: a folder that the node's ranks share.
    """
    return {"NEURON_CC_FLAGS": without_casts(flags), "NEURON_COMPILE_CACHE_URL": str(cache)}


def without_casts(flags: str) -> str:
    """Return NEURON_CC_FLAGS under which the compiler casts nothing: known answers hold for the numbers' own types."""
    return " ".join([*(flag for flag in flags.split() if not flag.startswith("--auto-cast")), "--auto-cast=none"])


def wrong_driver(record: TestRecord) -> BadConfig:
    """Return the error for a driver that does not fit the runtime: every host has it, so another host would be no better."""
    return BadConfig(
        "the host's Neuron driver does not fit this container's runtime",
        value=record.detail,
        rule="SDK 2.29.1's runtime 2.31.24 needs driver 2.27.x, never 2.29 or newer",
        remedy="set the accelerator AMI to one with driver 2.27 (aws-neuronx-dkms 2.27.*) and replace the hosts, or rebuild the "
        "image on the SDK of the AMI; health_check.driver_versions accepts another release that you have tried",
    )


def _record(name: str, rank: int, test: Callable[[TestRecord], TestRecord]) -> TestRecord:
    """Run a test, which fills in the record of a failed one; a tool that fails leaves its message in it."""
    began = time.monotonic()
    record = TestRecord(name=name, rank=rank, passed=False, value=0.0)
    try:
        record = test(record)
    except ToolError as error:
        record = replace(record, detail=str(error))
    return replace(record, seconds=time.monotonic() - began)


def _driver(config: HealthCheckConfig, root: Path, record: TestRecord) -> TestRecord:
    driver, runtime = driver_version(root), runtime_version(root, seconds=config.tool_timeout_seconds)
    numbers = parse_version(driver)
    objection = driver_objection(numbers, parse_version(runtime), config.driver_versions)
    return replace(
        record,
        passed=objection is None,
        value=numbers[0] + numbers[1] / 100,
        unit="release",
        detail=f"driver {driver}, runtime {runtime}" + (f": {objection}" if objection else ""),
    )


def _files(name: str, count: int, root: Path, record: TestRecord) -> TestRecord:
    missing = missing_files(root, [f"{name}{index}" for index in range(count)])
    return replace(
        record,
        passed=not missing,
        value=count - len(missing),
        floor=count,
        unit="device files",
        detail=f"missing: {', '.join(missing)}" if missing else "",
    )


def _cores(config: HealthCheckConfig, root: Path, record: TestRecord, *, idle: bool) -> TestRecord:
    devices = neuron_ls(root, seconds=config.tool_timeout_seconds)
    wrong = []
    if absent := sorted(set(range(config.neuron_devices)) - {device.index for device in devices}):
        wrong.append(f"devices missing: {', '.join(map(str, absent))}")
    for device in devices:
        objections = (
            (len(device.cores) != config.cores_per_device, f"has {len(device.cores)} cores"),
            (device.memory < config.device_memory_gib << 30, f"has {device.memory / (1 << 30):.1f} GiB"),
            (idle and device.processes, f"is held by {', '.join(device.processes)}"),
        )
        wrong += [f"device {device.index} {objection}" for applies, objection in objections if applies]
    return replace(
        record,
        passed=not wrong,
        value=len({core for device in devices for core in device.cores}),
        floor=config.neuron_devices * config.cores_per_device,
        unit="cores",
        detail="; ".join(wrong) or f"{len(devices)} devices",
    )


def _errors(config: HealthCheckConfig, root: Path, record: TestRecord) -> TestRecord:
    counts = {name: count for name, count in uncorrected_errors(config.neuron_devices, root).items() if count}
    return replace(
        record,
        passed=not counts,
        value=sum(counts.values()),
        ceiling=0.0,
        unit="errors",
        detail=", ".join(f"{name} {count}" for name, count in counts.items()) or "since the driver was loaded",
    )


def _collective(operation: str, ranks: int, config: HealthCheckConfig, root: Path, record: TestRecord) -> TestRecord:
    rate = nccom_test(operation, ranks, config.nccom_bytes, seconds=config.nccom_timeout_seconds, root=root)
    return replace(
        record,
        passed=rate >= config.min_nccom_gibps,
        value=rate,
        floor=config.min_nccom_gibps,
        unit="GiB/s",
        detail=f"{ranks} cores, {config.nccom_bytes} bytes, values checked",
    )
