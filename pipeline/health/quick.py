"""The short health check at the start of training: whether the hosts that Batch gave this job are fit to begin.

Batch may start training on other hosts than health_check tested. Costs a fraction of a second on a CPU and two
tiny graphs on a device that compiles, whose shapes no later program uses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeline.backends.device import Device
from pipeline.config import HealthCheckConfig
from pipeline.errors import ExitCode
from pipeline.health.answers import largest_error, on_device, sequence
from pipeline.health.neuron_host import presence_tests, without_casts
from pipeline.health.results import NodeReport, TestRecord
from pipeline.run.context import StageContext
from pipeline.sdk import known_errors
from pipeline.sdk.neuron_tools import HOST

SIZE = 128
"""Rows and columns. Sums of 128 zeros and ones are whole numbers up to 128, which fp32 and bf16 hold exactly: one answer for
every precision."""

FLAGS_VARIABLE = "NEURON_CC_FLAGS"


def quick_check(context: StageContext, device: Device, config: HealthCheckConfig, *, root: Path = HOST) -> None:
    """Test that devices are present and without memory errors (neuron), one matrix product per rank, one sum over all ranks.

    Every rank calls it, right after opening its device.

    Raises:
        UnhealthyHost: this node failed a test.
    """
    world = context.world
    report = NodeReport(context, uri=None, wait_seconds=config.collective_timeout_seconds)
    context.heartbeat.beat(note="quick health check")
    tools = (
        presence_tests(config, world.rank, world.node.nodes, idle=False, root=root)
        if device.kind == "neuron" and world.local_rank == 0
        else ()
    )
    report.judge("quick-alone", [*tools, judged_product(device)], wait_seconds=2 * config.tool_timeout_seconds)
    if world.size > 1:
        with uncast():
            total = known_sum(device)
        report.judge("quick-together", [total])


def judged_product(device: Device) -> TestRecord:
    """Return `known_product`, failed where the device gives no answer: no other rank takes part, so it is this host's fault.

    Raises:
        RuntimeError: a known error that is not a host's fault, such as a setting that the runtime refuses.
    """
    began = time.monotonic()
    with uncast():
        try:
            return known_product(device)
        except RuntimeError as error:
            known = known_errors.classify(str(error).splitlines())
            if known and known.row.exit_code != ExitCode.UNHEALTHY_HOST:
                raise
            return _record("quick_matmul", device, 1.0, began, detail=str(error))


def meet_graphs(device: Device) -> None:
    """Let a trial that compiles ahead of training meet the graphs of `quick_check`; their results are ignored."""
    with uncast():
        known_product(device)
        if device.world.size > 1:
            known_sum(device)


@contextmanager
def uncast() -> Iterator[None]:
    """Compile the graphs met inside without the compiler's casts, whatever training uses. Flags are part of a graph's key."""
    if (flags := os.environ.get(FLAGS_VARIABLE)) is None:
        yield
    else:
        os.environ[FLAGS_VARIABLE] = without_casts(flags)
        try:
            yield
        finally:
            os.environ[FLAGS_VARIABLE] = flags


def known_product(device: Device) -> TestRecord:
    """Test a (128, 128) product of zeros and ones."""
    began = time.monotonic()
    left = sequence(SIZE * SIZE, 0, 2).reshape(SIZE, SIZE)
    right = sequence(SIZE * SIZE, 0, 2, offset=SIZE * SIZE).reshape(SIZE, SIZE)
    product = on_device(device, left) @ on_device(device, right)
    return _record("quick_matmul", device, largest_error(device, product, (left @ right).astype(np.float64)), began)


def known_sum(device: Device) -> TestRecord:
    """Test an all-reduce: it counts the ranks for each remainder by 128; every rank marks its own in a vector of zeros."""
    began = time.monotonic()
    mine = np.zeros(SIZE, dtype=np.int64)
    mine[device.world.rank % SIZE] = 1
    expected = np.bincount(np.arange(device.world.size) % SIZE, minlength=SIZE)
    total = device.all_reduce(on_device(device, mine))
    return _record("quick_all_reduce", device, largest_error(device, total, expected.astype(np.float64)), began)


def _record(name: str, device: Device, error: float, began: float, *, detail: str = "") -> TestRecord:
    return TestRecord(
        name=name,
        rank=device.world.rank,
        passed=error == 0.0,
        value=error,
        ceiling=0.0,
        unit="relative error",
        seconds=time.monotonic() - began,
        detail=detail,
    )
