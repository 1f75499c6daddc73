"""Find out before a long run whether every host computes, remembers and communicates as it should.

Each rank: known-answer tensor operations and a memory probe. Each node: a storage round trip. All ranks together: collectives
with known answers and their bandwidth. Each node's first rank writes `health_check/node-N.json` with everything its ranks
measured; a node that fails a test ends the stage with 76, so that a new attempt runs on another host.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config import HealthCheckConfig
from pipeline.contract import now
from pipeline.errors import Transient, UnhealthyHost
from pipeline.runtime import store
from pipeline.runtime.context import StageContext, StageOutput
from pipeline.runtime.device import Device, open_device

log = logging.getLogger("trnpipe")

BANDWIDTH_REPEATS = 3
MEMORY_CHUNK_ELEMENTS = 1 << 18
"""1 MiB of int32; a chunk's values stay far below 2^24, so that a device that computes integers in fp32 is exact too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRecord:
    """One test on one rank.

    Attributes:
        value: what was measured, in `unit`.
        floor, ceiling: the bound that `value` was held against; None: measured without judging.
        seconds: what the whole test took.
        detail: what was tried, and what was wrong.
    """

    __test__ = False  # not a test case of pytest's

    name: str
    rank: int
    passed: bool
    value: float
    floor: float | None = None
    ceiling: float | None = None
    unit: str = ""
    seconds: float = 0.0
    detail: str = ""


def run(context: StageContext) -> StageOutput | None:
    """Test this rank's part; rank 0 speaks for the stage.

    Raises:
        UnhealthyHost: this node failed a test.
        Transient: storage failed.
    """
    plan = context.plan
    config = plan.config.health_check
    device = open_device(
        plan.world.kind,
        plan.world.precision,
        context.world,
        threads=plan.config.device.threads_per_rank,
        timeout_seconds=config.collective_timeout_seconds,
    )
    try:
        return check_host(context, device, config)
    finally:
        device.close()


def check_host(context: StageContext, device: Device, config: HealthCheckConfig) -> StageOutput | None:
    """All tests, from this rank alone to all ranks together; the node is judged after each round.

    A rank that is wrong by itself would only confuse everybody else's collectives, hence the order.
    """
    started = time.monotonic()
    node = NodeReport(context, wait_seconds=config.collective_timeout_seconds)
    context.heartbeat.beat(note="known answers and memory")
    records = [*known_answers(device, config), memory(device, config)]
    if context.world.local_rank == 0:
        context.heartbeat.beat(note="storage round trip")
        records.append(storage_round_trip(context, config))
    node.judge("alone", records)
    if context.world.size > 1:
        records = []
        for record in collectives(device, config):
            context.heartbeat.beat(note=f"collectives: {record.name}")
            records.append(record)
        node.judge("together", records)
        device.barrier()
    return summary(context, time.monotonic() - started) if context.world.is_leader else None


# What a node found.


class NodeReport:
    """Collects the records of a node's ranks through the node's scratch folder, which works when collectives do not."""

    def __init__(self, context: StageContext, *, wait_seconds: float) -> None:
        self._context = context
        self._wait_seconds = wait_seconds
        self._earlier: list[TestRecord] = []

    def judge(self, round_name: str, records: list[TestRecord]) -> None:
        """Join this rank's records of a round with those of the node's other ranks; the node's first rank publishes them all.

        Raises:
            UnhealthyHost: a test failed on one of the node's ranks, the same on all of them.
        """
        world = self._context.world
        own = self._path(round_name, world.local_rank)
        temporary = own.with_suffix(".tmp")
        temporary.write_text(json.dumps([asdict(record) for record in records]))
        temporary.replace(own)
        joined = [
            TestRecord(**record)
            for local_rank in range(world.local_size)
            for record in json.loads(self._wait_for(self._path(round_name, local_rank)))
        ]
        failed = [record for record in joined if not record.passed]
        if world.local_rank == 0:
            for record in joined:
                log.info("%s %s", "ok    " if record.passed else "FAILED", describe(record))
            self._earlier += joined
            self._publish(self._earlier, passed=not failed)
        if failed:
            raise UnhealthyHost(
                f"node {world.node.node} ({world.node.host}) failed its health check: "
                + ", ".join(sorted({record.name for record in failed})),
                value=[describe(record) for record in failed],
                rule="every test gives the known answer and reaches its floor (health_check in the configuration)",
                remedy="the run is retried on another host; if this host fails again, take it out of service",
            )

    def _publish(self, records: list[TestRecord], *, passed: bool) -> None:
        node = self._context.world.node
        store.write_json(
            self._context.paths.node_health(node.node),
            {
                "node": node.node,
                "host": node.host,
                "attempt": node.attempt,
                "time": now(),
                "passed": passed,
                "tests": [asdict(record) for record in records],
            },
        )

    def _path(self, round_name: str, local_rank: int) -> Path:
        return self._context.scratch / f"health-{round_name}-{local_rank}.json"

    def _wait_for(self, path: Path) -> str:
        node = self._context.world.node
        deadline = time.monotonic() + self._wait_seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise UnhealthyHost(
                    f"node {node.node} ({node.host}): a rank did not finish its tests",
                    value=path.stem,
                    rule=f"within {self._wait_seconds:g} seconds of the others",
                    remedy="see that rank's log",
                )
            time.sleep(0.05)
        return path.read_text()


def describe(record: TestRecord) -> str:
    bound = f", floor {record.floor:g}" if record.floor else "" if record.ceiling is None else f", at most {record.ceiling:g}"
    return f"rank {record.rank} {record.name}: {record.value:.4g} {record.unit}{bound}" + (
        f" ({record.detail})" if record.detail else ""
    )


def summary(context: StageContext, seconds: float) -> StageOutput:
    """The stage's output on rank 0, from the reports of all nodes (written before the last barrier)."""
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
            "storage_mbps": [_lowest(node["tests"], "storage") for node in nodes],
        }
    )


def _lowest(tests: list[dict[str, Any]], prefix: str) -> float | None:
    """A node's lowest bandwidth in its judged tests of one kind, None if it ran none."""
    values = [float(test["value"]) for test in tests if test["name"].startswith(prefix) and test["floor"] is not None]
    return round(min(values), 3) if values else None


# One rank: known answers.


def sequence(count: int, low: int, high: int, offset: int = 0) -> npt.NDArray[np.int64]:
    """`count` integers in [low, high) that look irregular and are the same everywhere: a multiplicative hash of 0, 1, 2, ...

    Knuth's multiplier 2654435761 modulo 2^32, of which the upper 16 bits are used; no random generator is involved.
    """
    hashed = (np.arange(offset, offset + count, dtype=np.int64) * 2654435761) % (1 << 32)
    return low + (hashed >> 16) % (high - low)


def known_answers(device: Device, config: HealthCheckConfig) -> Iterator[TestRecord]:
    """Matrix product, sum, exponential and gather in fp32 and bf16 against answers computed in fp64 on the host.

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
            kind = operation.__name__.removesuffix("_error")
            # A value that is not a number is within no bound.
            passed = error <= (0.0 if operation is gather_error else tolerance)
            yield TestRecord(
                name=f"{kind}_{name}",
                rank=device.world.rank,
                passed=passed,
                value=error,
                ceiling=0.0 if operation is gather_error else tolerance,
                unit="relative error",
                seconds=time.monotonic() - began,
            )


def matmul_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Largest error of a (size, size) product, as a share of the largest entry; the integer reference is exact in fp64."""
    half = 1 << (bits - 1)
    left = sequence(size * size, -half, half).reshape(size, size)
    right = sequence(size * size, -half, half, offset=size * size).reshape(size, size)
    product = _on(device, left, dtype, bits) @ _on(device, right, dtype, bits)
    expected = left.astype(np.float64) @ right.astype(np.float64) / (1 << 2 * bits)
    return _error(device, product, expected, relative_to="largest")


def sum_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Largest relative error of the sums of `size` rows; the reference is exact in int64."""
    values = sequence(size * size, 1, 1 << bits).reshape(size, size)
    return _error(device, _on(device, values, dtype, bits).sum(dim=1), values.sum(axis=1) / (1 << bits), relative_to="each")


def exp_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Largest relative error of exp over [-4, 4); the reference is fp64."""
    half = 1 << (bits - 1)
    values = sequence(size * size, -half, half)
    shift = bits - 3
    return _error(device, torch.exp(_on(device, values, dtype, shift)), np.exp(values / (1 << shift)), relative_to="each")


def gather_error(device: Device, dtype: torch.dtype, bits: int, size: int) -> float:
    """Largest relative error of rows picked by index; copying is exact, so any error is too much."""
    values = sequence(size * size, 1, 1 << bits).reshape(size, size)
    index = sequence(size, 0, size, offset=7)
    picked = _on(device, values, dtype, bits).index_select(0, torch.from_numpy(index).to(device.torch_device))
    return _error(device, picked, values[index] / (1 << bits), relative_to="each")


def _on(device: Device, integers: npt.NDArray[np.int64], dtype: torch.dtype, shift: int) -> Tensor:
    """integers / 2^shift on the device."""
    return (torch.from_numpy(integers).to(torch.float32) / (1 << shift)).to(dtype).to(device.torch_device)


def _error(device: Device, found: Tensor, expected: npt.NDArray[np.float64], *, relative_to: str) -> float:
    values = np.asarray(device.read(found.to(torch.float32)), dtype=np.float64).reshape(expected.shape)
    scale = np.abs(expected).max() if relative_to == "largest" else np.abs(expected)
    return float(np.max(np.abs(values - expected) / scale))


# One rank: memory.


def memory(device: Device, config: HealthCheckConfig) -> TestRecord:
    """Write every bit of a block of device memory as 0 and as 1 and read it back; time copies of one half onto the other."""
    began = time.monotonic()
    chunks = max(2, config.memory_mib * (1 << 20) // (4 * MEMORY_CHUNK_ELEMENTS))
    pattern = torch.from_numpy(sequence(MEMORY_CHUNK_ELEMENTS, 0, 1 << 16).astype(np.int32)).to(device.torch_device)
    block = torch.empty((chunks, MEMORY_CHUNK_ELEMENTS), dtype=torch.int32, device=device.torch_device)
    wrong = 0
    for mask in (0, -1):  # as it is, then with every bit inverted
        for chunk in range(chunks):
            block[chunk] = (pattern + chunk) ^ mask
        differences = [(block[chunk] != (pattern + chunk) ^ mask).sum() for chunk in range(chunks)]
        wrong += int(sum(device.read(torch.stack(differences))))
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
    """The shortest of a few runs, the device's queue included; the first one, which allocates and compiles, does not count."""
    best = float("inf")
    for repeat in range(BANDWIDTH_REPEATS + 1):
        began = time.perf_counter()
        device.read(operation().reshape(-1)[:1])
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best


# One node: storage.


def storage_round_trip(context: StageContext, config: HealthCheckConfig) -> TestRecord:
    """Write an object under the run folder, read it, compare, remove it.

    Raises:
        Transient: what came back is not what was written.
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
        raise Transient("storage gave back other bytes than were written", value=uri, remedy="a new attempt may succeed")
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
    """All-reduce, all-gather and reduce-scatter at every configured size, by value and by bus bandwidth.

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
    """The sum over all ranks of (base + rank) is size * base + size * (size - 1) / 2; small integers are exact in fp32."""
    size = device.world.size
    base = _base(device, elements * size)
    mine = base + device.world.rank
    error = _largest(device, device.all_reduce(mine) - _sum_of_all(base, size))
    seconds = _best_seconds(device, lambda: device.all_reduce(mine))
    return error, f"{size} ranks", seconds, 2 * (size - 1) / size


def all_gather(device: Device, elements: int) -> Measured:
    """Rank r contributes base + r; where a segment is wrong, its rank is named."""
    size = device.world.size
    base = _base(device, elements)
    mine = base + device.world.rank
    gathered = device.gather(mine).reshape(size, elements)
    errors = [_largest(device, gathered[rank] - (base + rank)) for rank in range(size)]
    seconds = _best_seconds(device, lambda: device.gather(mine))
    wrong = [f"rank {rank}" for rank, error in enumerate(errors) if error != 0.0]
    # max() would pass over a value that is not a number.
    error = next(filter(math.isnan, errors), max(errors))
    return error, "what came from " + ", ".join(wrong) if wrong else f"{size} ranks", seconds, (size - 1) / size


def reduce_scatter(device: Device, elements: int) -> Measured:
    """As all_reduce, of which this rank keeps its share."""
    size, rank = device.world.size, device.world.rank
    base = _base(device, elements * size)
    mine = base + rank
    own = _sum_of_all(base, size)[rank * elements : (rank + 1) * elements]
    error = _largest(device, device.reduce_scatter(mine) - own)
    seconds = _best_seconds(device, lambda: device.reduce_scatter(mine))
    return error, f"{size} ranks", seconds, (size - 1) / size


def _base(device: Device, elements: int) -> Tensor:
    return torch.from_numpy(sequence(elements, -128, 128).astype(np.float32)).to(device.torch_device)


def _sum_of_all(base: Tensor, size: int) -> Tensor:
    return base * size + size * (size - 1) // 2


def _largest(device: Device, difference: Tensor) -> float:
    return device.read(difference.abs().max())[0]
