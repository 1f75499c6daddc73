"""Find out before a long run whether every host computes, remembers and communicates as it should.

On neuron first, by one rank of each node and before any rank opens its core: driver, devices, memory errors, collectives inside
the host, by the Neuron tools. Then each rank: known-answer tensor operations and a memory probe. Each node: a storage round trip.
All ranks together: collectives with known answers and their bandwidth. Each node's first rank writes `health_check/node-N.json`
with everything its ranks measured; a node that fails a test ends the stage with 76, so that a new attempt runs on another host.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline import store
from pipeline.backends.device import Device, open_device
from pipeline.config import HealthCheckConfig
from pipeline.contract import graphs_uri
from pipeline.errors import Transient
from pipeline.health.answers import largest_error, on_device, sequence
from pipeline.health.neuron_host import DRIVER, compiler_environment, host_tests, wait_seconds, wrong_driver
from pipeline.health.results import NodeReport, TestRecord
from pipeline.run.context import StageContext, StageOutput
from pipeline.sdk import compile_cache
from pipeline.sdk.neuron_tools import HOST

BANDWIDTH_REPEATS = 3
MEMORY_CHUNK_ELEMENTS = 1 << 18
"""1 MiB of int32; a chunk's values stay far below 2^24, so that a device that computes integers in fp32 is exact too."""


def run(context: StageContext, *, root: Path = HOST) -> StageOutput | None:
    """Test this rank's part; rank 0 speaks for the stage.

    Args:
        root: where the host's devices and tools are looked for.

    Raises:
        BadConfig: the host's driver does not fit this container's runtime.
        UnhealthyHost: this node failed a test.
        Transient: storage failed.
    """
    started = time.monotonic()
    plan = context.plan
    config = plan.config.health_check
    report = NodeReport(
        context,
        uri=context.paths.node_health(context.world.node.node),
        wait_seconds=config.collective_timeout_seconds,
    )
    compiled, cache = f"{graphs_uri(context.paths.bucket_root)}/health", context.scratch / "neuron-cache"
    if plan.world.kind == "neuron":
        if context.world.local_rank == 0:  # for whose verdict the node's other ranks wait
            compile_cache.fetch(compiled, cache)
        check_with_tools(context, report, config, root=root)
        os.environ |= compiler_environment(os.environ.get("NEURON_CC_FLAGS", ""), cache)
    device = open_device(
        plan.world.kind,
        # The compiler's cast is left out.
        "fp32" if plan.world.precision == "compiler" else plan.world.precision,
        context.world,
        threads=plan.config.device.threads_per_rank,
        timeout_seconds=config.collective_timeout_seconds,
    )
    try:
        check_ranks(context, device, report, config)
    finally:
        device.close()
    if plan.world.kind == "neuron" and context.world.is_leader:
        compile_cache.keep(cache, compiled)
    return summary(context, time.monotonic() - started) if context.world.is_leader else None


def check_with_tools(context: StageContext, report: NodeReport, config: HealthCheckConfig, *, root: Path = HOST) -> None:
    """Test the host by its own tools, on the node's first rank, while the others wait with their cores still closed.

    Raises:
        BadConfig: the host's driver does not fit this container's runtime.
        UnhealthyHost: this node failed a test.
    """
    records = []
    if context.world.local_rank == 0:
        context.heartbeat.beat(note="host: versions")
        for record in host_tests(config, context.world.rank, context.world.node.nodes, root=root):
            records.append(record)
            if record.name == DRIVER and not record.passed:
                report.publish(records)
                raise wrong_driver(record)
            context.heartbeat.beat(note=f"host: after {record.name}")
    report.judge("host", records, wait_seconds=wait_seconds(config))


def check_ranks(context: StageContext, device: Device, report: NodeReport, config: HealthCheckConfig) -> None:
    """Run all tests of the ranks, from each one alone to all together, and judge the node after each round.

    The order matters: a rank that is wrong by itself would only disturb the other ranks' collectives.
    """
    context.heartbeat.beat(note="known answers and memory")
    records = [*known_answers(device, config), memory(device, config)]
    if context.world.local_rank == 0:
        context.heartbeat.beat(note="storage round trip")
        records.append(storage_round_trip(context, config))
    report.judge("alone", records)
    if context.world.size > 1:
        records = []
        for record in collectives(device, config):
            context.heartbeat.beat(note=f"collectives: {record.name}")
            records.append(record)
        report.judge("together", records)
        device.barrier()


def summary(context: StageContext, seconds: float) -> StageOutput:
    """Return the stage's output on rank 0, from the reports of all nodes (written before the last barrier)."""
    nodes = [store.read_json(context.paths.node_health(node)) for node in range(context.world.node.nodes)]
    tests = [test for node in nodes for test in node["tests"]]
    slowest = max(tests, key=lambda test: float(test["seconds"]))
    return StageOutput(
        metrics={
            "nodes": len(nodes),
            "hosts": [node["host"] for node in nodes],
            "tests": len(tests),
            "seconds": round(seconds, 3),
            "slowest": {name: slowest[name] for name in ("name", "rank", "seconds")},
            "memory_gbps": [_lowest(node["tests"], "memory") for node in nodes],
            "collective_gbps": [_lowest(node["tests"], "all_reduce") for node in nodes],
            "nccom_gibps": [_lowest(node["tests"], "nccom_all_reduce") for node in nodes],
            "storage_mbps": [_lowest(node["tests"], "storage") for node in nodes],
        }
    )


def _lowest(tests: list[dict[str, Any]], prefix: str) -> float | None:
    """Return a node's lowest bandwidth in its judged tests of one kind, None if it ran none."""
    values = [float(test["value"]) for test in tests if test["name"].startswith(prefix) and test["floor"] is not None]
    return round(min(values), 3) if values else None


# One rank: known answers.


def known_answers(device: Device, config: HealthCheckConfig) -> Iterator[TestRecord]:
    """Test matrix product, sum, exponential and gather in fp32 and bf16 against answers computed in fp64 on the host.

    Inputs are integers over a power of two that both types hold exactly: 13 bits in fp32, so that a device that quietly drops
    mantissa bits is seen, and 8 bits in bf16.
    """
    for name, dtype, bits, tolerance in (
        ("fp32", torch.float32, 13, config.relative_tolerance_fp32),
        ("bf16", torch.bfloat16, 8, config.relative_tolerance_bf16),
    ):
        for operation in (matmul_error, sum_error, exp_error, gather_error):
            began = time.monotonic()
            error = operation(device, dtype, bits, config.matmul_size)
            ceiling = 0.0 if operation is gather_error else tolerance
            yield TestRecord(
                name=f"{operation.__name__.removesuffix('_error')}_{name}",
                rank=device.world.rank,
                # A value that is not a number is within no bound.
                passed=error <= ceiling,
                value=error,
                ceiling=ceiling,
                unit="relative error",
                seconds=time.monotonic() - began,
            )


def matmul_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Return the largest error of a (size, size) product, as a share of the largest entry; the reference is exact in fp64."""
    half = 1 << (bits - 1)
    left = sequence(size * size, -half, half).reshape(size, size)
    right = sequence(size * size, -half, half, offset=size * size).reshape(size, size)
    product = on_device(device, left, dtype, bits) @ on_device(device, right, dtype, bits)
    return largest_error(device, product, left.astype(np.float64) @ right.astype(np.float64) / (1 << 2 * bits))


def sum_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Return the largest relative error of the sums of `size` rows; the reference is exact in int64."""
    values = sequence(size * size, 1, 1 << bits).reshape(size, size)
    return largest_error(
        device, on_device(device, values, dtype, bits).sum(dim=1), values.sum(axis=1) / (1 << bits), relative_to="each"
    )


def exp_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Return the largest relative error of exp over [-4, 4); the reference is fp64."""
    shift = bits - 3
    values = sequence(size * size, -4 << shift, 4 << shift)
    return largest_error(
        device, torch.exp(on_device(device, values, dtype, shift)), np.exp(values / (1 << shift)), relative_to="each"
    )


def gather_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Return the largest relative error of rows picked by index; copying is exact, so every error counts."""
    values = sequence(size * size, 1, 1 << bits).reshape(size, size)
    index = sequence(size, 0, size, offset=7)
    picked = on_device(device, values, dtype, bits).index_select(0, torch.from_numpy(index).to(device.torch_device))
    return largest_error(device, picked, values[index] / (1 << bits), relative_to="each")


# One rank: memory.


def memory(device: Device, config: HealthCheckConfig) -> TestRecord:
    """Write every bit of a block of device memory as 0 and as 1 and read it back; time copies of one half onto the other."""
    began = time.monotonic()
    chunks = max(2, config.memory_mib * (1 << 20) // (4 * MEMORY_CHUNK_ELEMENTS))
    pattern = torch.from_numpy(sequence(MEMORY_CHUNK_ELEMENTS, 0, 1 << 16).astype(np.int32)).to(device.torch_device)
    chunk = torch.arange(chunks, dtype=torch.int32).to(device.torch_device).unsqueeze(1)
    block = torch.empty((chunks, MEMORY_CHUNK_ELEMENTS), dtype=torch.int32, device=device.torch_device)
    wrong = 0
    for inverted in (0, -1):  # unchanged, then with every bit inverted
        mask = torch.tensor(inverted, dtype=torch.int32).to(device.torch_device)
        block.copy_(pattern.expand_as(block)).add_(chunk).bitwise_xor_(mask)
        # What is read back must have been in memory, also where writing and reading would otherwise be one graph.
        device.sync()
        wrong += int(device.read((block != (pattern + chunk) ^ mask).sum(dtype=torch.int32))[0])
    half = chunks // 2
    seconds = _best_seconds(device, lambda: block[:half].copy_(block[half : 2 * half]))
    gbps = 2 * half * MEMORY_CHUNK_ELEMENTS * 4 / seconds / 1e9
    return TestRecord(
        name="memory",
        rank=device.world.rank,
        passed=wrong == 0 and gbps >= config.min_memory_gbps,
        value=gbps,
        floor=config.min_memory_gbps,
        unit="GB/s",
        seconds=time.monotonic() - began,
        detail=f"{wrong} of {2 * block.numel()} words read back wrong" if wrong else f"{chunks} MiB written and read back",
    )


def _best_seconds(device: Device, operation: Callable[[], Tensor]) -> float:
    """Return the shortest of a few runs, including the device's queue; the first one, which compiles, does not count."""

    def seconds() -> float:
        began = time.perf_counter()
        result = operation()
        # The whole result, not only the part that is read: a lazy device would leave the rest out.
        device.sync()
        device.read(result.reshape(-1)[:1])
        return time.perf_counter() - began

    seconds()
    return min(seconds() for _ in range(BANDWIDTH_REPEATS))


# One node: storage.


def storage_round_trip(context: StageContext, config: HealthCheckConfig) -> TestRecord:
    """Write an object under the run folder, read it, compare, remove it.

    Raises:
        Transient: the bytes read are not those written.
    """
    began = time.monotonic()
    size = config.storage_mib << 20
    payload = sequence(size // 8, 0, 1 << 16).tobytes()
    node = context.world.node
    uri = store.join(context.paths.stage(context.stage), f"probe-{node.node:05d}-attempt-{node.attempt}.bin")
    store.write_bytes(uri, payload)
    try:
        returned = store.read_bytes(uri)
    finally:
        store.delete(uri)
    if returned != payload:
        raise Transient("storage returned other bytes than were written", value=uri, remedy="a new attempt may succeed")
    seconds = time.monotonic() - began
    return TestRecord(
        name="storage",
        rank=context.world.rank,
        passed=True,
        value=2 * size / seconds / 1e6,
        floor=0.0,
        unit="MB/s",
        seconds=seconds,
        detail=f"{config.storage_mib} MiB written, read, compared, removed",
    )


# All ranks: collectives.


def collectives(device: Device, config: HealthCheckConfig) -> Iterator[TestRecord]:
    """Test all-reduce, all-gather and reduce-scatter at every configured size, by value and by bus bandwidth.

    Sizes are those of the whole message, and bus bandwidth is nccl-tests': the rate at which each link is used, comparable
    between any numbers of ranks. The floor holds for the largest size; smaller messages measure latency.
    """
    largest = max(config.collective_bytes)
    for size in sorted(config.collective_bytes):
        for test in (all_reduce, all_gather, reduce_scatter):
            began = time.monotonic()
            elements = -(-size // (4 * device.world.size))
            error, detail, seconds, factor = test(device, elements)
            gbps = elements * device.world.size * 4 / seconds / 1e9 * factor
            floor = config.min_collective_gbps if size == largest else None
            yield TestRecord(
                name=f"{test.__name__}_{size}",
                rank=device.world.rank,
                # A value that is not a number is not 0 either.
                passed=error == 0.0 and (floor is None or gbps >= floor),
                value=gbps,
                floor=floor,
                unit="GB/s",
                seconds=time.monotonic() - began,
                detail=detail if error == 0.0 else f"wrong values, by up to {error:g}: {detail}",
            )


Measured = tuple[float, str, float, float]
"""Largest error, what was tried or where the error is, seconds, bus bandwidth factor."""


def all_reduce(device: Device, elements: int) -> Measured:
    """Test all-reduce: the ranks' base + rank sum to size * base + size * (size - 1) / 2; small integers are exact in fp32."""
    size = device.world.size
    base = _base(elements * size)
    mine = on_device(device, base + device.world.rank)
    error = _largest(device, device.all_reduce(mine) - on_device(device, _sum_of_all(base, size)))
    return error, f"{size} ranks", _best_seconds(device, lambda: device.all_reduce(mine)), 2 * (size - 1) / size


def all_gather(device: Device, elements: int) -> Measured:
    """Test all-gather: rank r contributes base + r; a wrong segment is reported with its rank."""
    size = device.world.size
    base = _base(elements)
    mine = on_device(device, base + device.world.rank)
    expected = on_device(device, base + np.arange(size).reshape(size, 1))
    errors = device.read((device.gather(mine).reshape(size, elements) - expected).abs().amax(dim=1))
    seconds = _best_seconds(device, lambda: device.gather(mine))
    wrong = [f"rank {rank}" for rank, error in enumerate(errors) if error != 0.0]
    # max() would skip a value that is not a number.
    error = next(filter(math.isnan, errors), max(errors))
    return error, "what came from " + ", ".join(wrong) if wrong else f"{size} ranks", seconds, (size - 1) / size


def reduce_scatter(device: Device, elements: int) -> Measured:
    """Test reduce-scatter: as all_reduce, of which this rank keeps its share."""
    size, rank = device.world.size, device.world.rank
    base = _base(elements * size)
    mine = on_device(device, base + rank)
    own = on_device(device, _sum_of_all(base, size)[rank * elements : (rank + 1) * elements])
    return (
        _largest(device, device.reduce_scatter(mine) - own),
        f"{size} ranks",
        _best_seconds(device, lambda: device.reduce_scatter(mine)),
        (size - 1) / size,
    )


def _base(elements: int) -> npt.NDArray[np.int64]:
    return sequence(elements, -128, 128)


def _sum_of_all(base: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    return base * size + size * (size - 1) // 2


def _largest(device: Device, difference: Tensor) -> float:
    return device.read(difference.abs().max())[0]
