"""The health check finds planted faults, by name, on the rank that has them; and healthy hosts pass."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import store
from pipeline.backends.device import open_device
from pipeline.contract import Stage, StageFailure, StageResult
from pipeline.errors import BadConfig, ExitCode, Transient, UnhealthyHost
from pipeline.health.answers import sequence
from pipeline.ports import free_port
from pipeline.run_inputs import PlannedWorld
from pipeline.stages import health_check
from tests.trainium import NCCOM_FAILURE, TrainiumHost

SMALL = {"matmul_size": 48, "memory_mib": 4, "collective_bytes": [4096, 10_000], "storage_mib": 1}


class Fault(TorchDispatchMode):
    """Hardware that spoils one element of what one operation gives."""

    def __init__(self, operation: str, spoil: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.operation = operation
        self.spoil = spoil

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == self.operation:
            self.spoil(result.reshape(-1)[5:6])
        return result


@pytest.fixture
def planned(plan_run: Any) -> Any:
    """A run whose plan asks for a small health check on one rank."""
    return plan_run(settings={"health_check": SMALL})


def check(run: Any) -> Any:
    return health_check.run(run.context(Stage.HEALTH_CHECK))


def test_a_healthy_host_passes_and_is_measured(planned: Any) -> None:
    output = check(planned)
    report = store.read_json(planned.paths.node_health(0))
    assert report["passed"]
    assert output.metrics["tests"] == len(report["tests"]) == 10
    assert output.metrics["memory_gbps"][0] > 0
    assert output.metrics["storage_mbps"][0] > 0
    assert output.metrics["collective_gbps"] == [None]
    assert output.metrics["slowest"]["seconds"] == max(test["seconds"] for test in report["tests"])
    # The probe object is gone again.
    left = store.list_objects(planned.paths.stage(Stage.HEALTH_CHECK))
    assert [info.uri.rsplit("/", 1)[-1] for info in left] == ["node-00000.json"]


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("operation", "test"),
    [("mm.default", "matmul"), ("sum.dim_IntList", "sum"), ("exp.default", "exp"), ("index_select.default", "gather")],
)
def test_a_spoilt_operation_is_found_by_name(planned: Any, operation: str, test: str, value: float) -> None:
    with Fault(operation, lambda element: element.fill_(value)), pytest.raises(UnhealthyHost) as found:
        check(planned)
    assert found.value.exit_code == ExitCode.UNHEALTHY_HOST
    assert found.value.what.endswith(f"{test}_bf16, {test}_fp32")
    assert "node 0" in found.value.what
    report = store.read_json(planned.paths.node_health(0))
    assert not report["passed"]
    assert {record["name"] for record in report["tests"] if not record["passed"]} == {f"{test}_fp32", f"{test}_bf16"}


def test_dropped_mantissa_bits_are_found(planned: Any) -> None:
    def truncate(element: Tensor) -> None:
        whole = element._base if element._base is not None else element
        whole.copy_(whole.to(torch.bfloat16))

    with Fault("exp.default", truncate), pytest.raises(UnhealthyHost, match="exp_fp32"):
        check(planned)


@pytest.mark.parametrize("bit", [0, 30])
def test_a_stuck_memory_bit_is_found_whichever_it_is(planned: Any, bit: int) -> None:
    def clear(element: Tensor) -> None:
        if element.dtype == torch.int32:
            element.bitwise_and_(~(1 << bit))

    with Fault("bitwise_xor_.Tensor", clear), pytest.raises(UnhealthyHost) as found:
        check(planned)
    assert found.value.what.endswith(": memory")
    assert "read back wrong" in found.value.value[0]


def test_a_slow_host_is_unhealthy_only_below_the_configured_floor(plan_run: Any) -> None:
    run = plan_run(settings={"health_check": SMALL | {"min_memory_gbps": 1e6}})
    with pytest.raises(UnhealthyHost, match="memory") as found:
        check(run)
    assert "floor 1e+06" in found.value.value[0]


def test_storage_that_gives_back_other_bytes_is_transient(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = store.read_bytes
    monkeypatch.setattr(store, "read_bytes", lambda uri: read(uri)[:-1] + b"x" if "probe" in uri else read(uri))
    with pytest.raises(Transient, match="other bytes"):
        check(planned)
    assert not [info for info in store.list_objects(planned.paths.stage(Stage.HEALTH_CHECK)) if "probe" in info.uri]


def test_the_sequence_is_the_same_everywhere() -> None:
    # A change here changes what every host is asked; the first values, written down once, pin it.
    assert sequence(6, -128, 128).tolist() == [-128, -73, -18, 38, 93, -107]
    values = sequence(1 << 14, -128, 128)
    assert (values.min(), values.max()) == (-128, 127)
    assert len(np.unique(values)) == 256


# On neuron: the host's tools come first.

TOOL_TESTS = [
    *("driver_version", "neuron_files", "neuron_ls", "uncorrected_errors"),
    *("nccom_all_reduce", "nccom_all_gather", "nccom_reduce_scatter"),
]


@pytest.fixture
def neuron_run(planned: Any) -> Any:
    planned.replan(world=PlannedWorld(kind="neuron", precision="compiler", nodes=1, ranks_per_node=1))
    return planned


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainiumHost:
    return TrainiumHost(tmp_path / "host", monkeypatch)


def test_tools_come_before_any_core_is_opened(neuron_run: Any, host: TrainiumHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """No NeuronCore is here: a CPU stands for it, and says what had happened when it was opened and how."""
    opened: dict[str, Any] = {}

    def open_cpu(kind: str, precision: str, *arguments: Any, **options: Any) -> Any:
        flags, cache = os.environ["NEURON_CC_FLAGS"], os.environ["NEURON_COMPILE_CACHE_URL"]
        opened.update(kind=kind, precision=precision, collectives=host.collectives(), flags=flags, cache=cache)
        return open_device("cpu", precision, *arguments, **options)

    monkeypatch.setattr(health_check, "open_device", open_cpu)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target=trn1 --auto-cast=all --auto-cast-type=bf16")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/graphs/neuron-cache/abc")
    context = neuron_run.context(Stage.HEALTH_CHECK)
    output = health_check.run(context, root=host.root)
    assert opened == {
        "kind": "neuron",
        "precision": "fp32",
        "collectives": ["-r 32 allr", "-r 32 allg", "-r 32 redsct"],
        "flags": "--target=trn1 --auto-cast=none",
        "cache": str(context.scratch / "neuron-cache"),
    }
    report = store.read_json(neuron_run.paths.node_health(0))
    assert report["passed"]
    names = [test["name"] for test in report["tests"]]
    assert names[: len(TOOL_TESTS)] == TOOL_TESTS
    assert {"matmul_fp32", "memory", "storage"} <= set(names[len(TOOL_TESTS) :])
    assert output is not None
    assert output.metrics["nccom_gibps"] == [21.98]


def test_what_one_gang_compiled_the_next_one_finds(neuron_run: Any, host: TrainiumHost, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []

    def open_cpu(kind: str, *arguments: Any, **options: Any) -> Any:
        graph = Path(os.environ["NEURON_COMPILE_CACHE_URL"]) / "neuronxcc-2" / "MODULE_1"
        compiled.append(graph.is_dir())
        for name in ("model.neff", "model.done", "model.neff.lock"):
            store.write_bytes(str(graph / name), b"")
        return open_device("cpu", *arguments, **options)

    monkeypatch.setattr(health_check, "open_device", open_cpu)
    for _ in range(2):
        context = neuron_run.context(Stage.HEALTH_CHECK)
        health_check.run(context, root=host.root)
        shutil.rmtree(context.scratch / "neuron-cache")
    assert compiled == [False, True]
    kept = store.list_objects(f"{neuron_run.paths.bucket_root}/graphs/health")
    assert [info.uri.rsplit("/", 1)[-1] for info in kept] == ["model.done", "model.neff"]


def never(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a device was opened")


def test_a_wrong_driver_is_a_wrong_deployment(neuron_run: Any, host: TrainiumHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "open_device", never)
    host.write("sys/module/neuron/version", "2.29.0.0\n")
    with pytest.raises(BadConfig, match="does not fit this container's runtime") as found:
        health_check.run(neuron_run.context(Stage.HEALTH_CHECK), root=host.root)
    assert found.value.exit_code == ExitCode.BAD_CONFIG
    report = store.read_json(neuron_run.paths.node_health(0))
    assert [(test["name"], test["passed"]) for test in report["tests"]] == [("driver_version", False)]
    assert not report["passed"]


def test_a_sick_trainium_host_is_named_with_its_test(
    neuron_run: Any, host: TrainiumHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_check, "open_device", never)
    host.set_nccom_test(NCCOM_FAILURE)
    with pytest.raises(UnhealthyHost, match="failed its health check: nccom_all_gather, nccom_all_reduce, nccom_reduce_scatter"):
        health_check.run(neuron_run.context(Stage.HEALTH_CHECK), root=host.root)
    tests = {test["name"]: test for test in store.read_json(neuron_run.paths.node_health(0))["tests"]}
    assert tests["neuron_ls"]["passed"]
    assert "Failure running neuron-bench" in tests["nccom_all_reduce"]["detail"]


def test_a_container_without_a_driver_ends_with_64(neuron_run: Any, tmp_path: Path) -> None:
    """As on this machine, in a rank of its own."""
    assert run_ranks(neuron_run, tmp_path, nodes=1, ranks_per_node=1, kind="neuron") == [ExitCode.BAD_CONFIG]
    failure = StageFailure.from_json((tmp_path / "node-0" / "failure-0.json").read_bytes())
    assert "no Neuron driver is loaded" in failure.value[0]
    assert "AMI" in failure.remedy


# Ranks as real processes, as their supervisor starts them.

FAULTY_ALL_REDUCE = """
from pipeline.backends.eager import EagerDevice
healthy = EagerDevice.all_reduce
def spoilt(self, value):
    result = healthy(self, value)
    result[3] += 1
    return result
EagerDevice.all_reduce = spoilt
"""
FAULTY_SENDER = """
from pipeline.backends.eager import EagerDevice
healthy = EagerDevice.gather
EagerDevice.gather = lambda self, rows: healthy(self, rows + 1)
"""


def run_ranks(run: Any, tmp_path: Path, *, nodes: int, ranks_per_node: int, fault: str = "", kind: str = "cpu") -> list[int]:
    """Run every rank; `fault` is Python that the last rank executes at its start. Returns exit codes in rank order."""
    run.replan(world=PlannedWorld(kind=kind, precision="fp32", nodes=nodes, ranks_per_node=ranks_per_node))
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(fault)
    port = free_port()
    processes = []
    size = nodes * ranks_per_node
    for rank in range(size):
        node = rank // ranks_per_node
        folder = tmp_path / f"node-{node}"
        folder.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "MASTER_PORT": str(port),
            "AWS_BATCH_JOB_NUM_NODES": str(nodes),
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "TRNPIPE_NODE_DIR": str(folder),
        }
        if fault and rank == size - 1:
            environment["PYTHONPATH"] = os.pathsep.join([str(hook), str(Path.cwd())])
        command = [sys.executable, "-m", "pipeline.stages.rank", "health_check", run.paths.root]
        processes.append(subprocess.Popen(command, env=environment))
    return [process.wait(120) for process in processes]


def test_two_healthy_ranks_of_one_node_share_a_report(planned: Any, tmp_path: Path) -> None:
    assert run_ranks(planned, tmp_path, nodes=1, ranks_per_node=2) == [0, 0]
    tests = store.read_json(planned.paths.node_health(0))["tests"]
    for rank in range(2):
        names = [test["name"] for test in tests if test["rank"] == rank]
        assert {"matmul_fp32", "memory", "all_reduce_4096", "all_gather_10000", "reduce_scatter_10000"} <= set(names)
        assert len(names) == len(set(names)) == (16 if rank == 0 else 15)
    metrics = StageResult.from_json(store.read_bytes(planned.paths.result(Stage.HEALTH_CHECK))).metrics
    assert metrics["tests"] == 31
    # Only the largest message's bandwidth is judged and reported.
    largest = [test["value"] for test in tests if test["name"] == "all_reduce_10000"]
    assert metrics["collective_gbps"] == [round(min(largest), 3)]


def test_a_rank_that_reduces_wrongly_fails_its_node(planned: Any, tmp_path: Path) -> None:
    codes = run_ranks(planned, tmp_path, nodes=2, ranks_per_node=1, fault=FAULTY_ALL_REDUCE)
    assert codes[1] == ExitCode.UNHEALTHY_HOST
    # The other node has only lost a peer.
    assert codes[0] == ExitCode.TRANSIENT
    report = store.read_json(planned.paths.node_health(1))
    failed = {test["name"]: test["detail"] for test in report["tests"] if not test["passed"]}
    assert set(failed) == {"all_reduce_4096", "all_reduce_10000"}
    assert failed["all_reduce_4096"].startswith("wrong values, by up to 1")
    failure = StageFailure.from_json((tmp_path / "node-1" / "failure-1.json").read_bytes())
    assert failure.what.startswith("node 1 (")
    assert failure.exit_code == 76


def test_who_sent_wrong_values_is_named(planned: Any, tmp_path: Path) -> None:
    codes = run_ranks(planned, tmp_path, nodes=2, ranks_per_node=1, fault=FAULTY_SENDER)
    assert ExitCode.UNHEALTHY_HOST in codes
    reports = [store.read_json(planned.paths.node_health(node)) for node in range(2)]
    details = [test["detail"] for report in reports for test in report["tests"] if not test["passed"]]
    assert details
    assert all(detail.endswith("what came from rank 1") for detail in details)


def test_bandwidths_are_those_of_the_bus() -> None:
    """The share of a message that each link carries among four ranks (NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
    # The others' values are made here: base + rank from each of them.
    device: Any = SimpleNamespace(
        world=SimpleNamespace(size=4, rank=1),
        all_reduce=lambda value: (value - 1) * 4 + 6,
        gather=lambda value: torch.stack([value - 1 + rank for rank in range(4)]),
        reduce_scatter=lambda value: ((value - 1) * 4 + 6)[8:16],
        read=lambda tensor: tensor.reshape(-1).tolist(),
        torch_device=torch.device("cpu"),
        sync=lambda: None,
    )
    tests = (health_check.all_reduce, health_check.all_gather, health_check.reduce_scatter)
    assert [(test(device, 8)[0], test(device, 8)[3]) for test in tests] == [(0.0, 1.5), (0.0, 0.75), (0.0, 0.75)]
