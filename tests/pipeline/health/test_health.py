"""Health checks beside the stage: a Trainium host by its tools, the short form before training, and how a node's ranks join."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.backends.device import open_device
from pipeline.backends.eager import EagerDevice
from pipeline.config import HealthCheckConfig
from pipeline.contract import RunPaths, Stage
from pipeline.errors import ExitCode, UnhealthyHost
from pipeline.health import neuron_host
from pipeline.health.quick import meet_graphs, quick_check
from pipeline.health.results import NodeReport, TestRecord
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import NodeWorld, World
from tests.gangs import run_gang
from tests.trainium import HANG, NCCOM_FAILURE, TrainiumHost, neuron_ls

CONFIG = HealthCheckConfig(tool_timeout_seconds=20, nccom_timeout_seconds=20)
CHEAP = ["driver_version", "neuron_files", "efa_files", "neuron_ls", "uncorrected_errors"]
COLLECTIVES = ["nccom_all_reduce", "nccom_all_gather", "nccom_reduce_scatter"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainiumHost:
    return TrainiumHost(tmp_path / "host", monkeypatch)


def run_tests(host: TrainiumHost, nodes: int = 2, config: HealthCheckConfig = CONFIG) -> dict[str, TestRecord]:
    return {record.name: record for record in neuron_host.host_tests(config, 32, nodes, root=host.root)}


# A Trainium host.


def test_a_healthy_trn1_passes_every_test_in_order(host: TrainiumHost) -> None:
    records = run_tests(host)
    assert list(records) == [*CHEAP, *COLLECTIVES]
    assert all(record.passed and record.rank == 32 and record.seconds > 0 for record in records.values())
    assert records["driver_version"].detail == "driver 2.27.4.0, runtime 2.31.24.0"
    assert (records["neuron_ls"].value, records["neuron_ls"].floor, records["neuron_ls"].unit) == (32, 32, "cores")
    assert records["nccom_all_reduce"].value == 21.97975251876395
    assert host.collectives() == ["-r 32 allr", "-r 32 allg", "-r 32 redsct"]


def test_a_host_alone_needs_no_efa(host: TrainiumHost) -> None:
    for device in (host.root / "dev/infiniband").iterdir():
        device.unlink()
    assert "efa_files" not in run_tests(host, nodes=1)
    assert "/dev/infiniband/uverbs7" in run_tests(host, nodes=2)["efa_files"].detail


Change = Callable[[TrainiumHost], object]


@pytest.mark.parametrize(
    ("change", "failed", "words"),
    [
        (lambda host: (host.root / "dev/neuron7").unlink(), "neuron_files", "missing: /dev/neuron7"),
        (lambda host: (host.root / "dev/infiniband/uverbs0").unlink(), "efa_files", "missing: /dev/infiniband/uverbs0"),
        (lambda host: host.set_neuron_ls(neuron_ls(15)), "neuron_ls", "devices missing: 15"),
        (lambda host: host.set_neuron_ls(neuron_ls(nc_count=1, neuroncore_ids=[6])), "neuron_ls", "device 3 has 1 cores"),
        (lambda host: host.set_neuron_ls(neuron_ls(memory_size=17179869184)), "neuron_ls", "device 3 has 16.0 GiB"),
        (
            lambda host: host.set_neuron_ls(neuron_ls(neuron_processes=[{"pid": 77, "command": "python train.py"}])),
            "neuron_ls",
            "device 3 is held by 77 python train.py",
        ),
        (lambda host: host.set_tool("neuron-ls", "import sys\nsys.exit(1)"), "neuron_ls", "ended with status 1"),
        (lambda host: host.set_tool("neuron-ls", "print('hello')"), "neuron_ls", "unknown format"),
        (
            lambda host: host.write("sys/devices/virtual/neuron_device/neuron9/stats/hardware/sram_ecc_uncorrected", "2"),
            "uncorrected_errors",
            "neuron9 sram_ecc_uncorrected 2",
        ),
    ],
)
def test_a_sick_host_fails_the_test_that_names_its_trouble(host: TrainiumHost, change: Change, failed: str, words: str) -> None:
    change(host)
    records = run_tests(host)
    assert [name for name, record in records.items() if not record.passed] == [failed]
    assert words in records[failed].detail
    # What takes every core and minutes is not tried on a host that is known to be sick.
    assert not set(COLLECTIVES) & set(records)
    assert host.collectives() == []


def test_a_wrong_driver_ends_all_tests_and_makes_no_host_sick(host: TrainiumHost) -> None:
    host.write("sys/module/neuron/version", "2.29.0.0\n")
    records = run_tests(host)
    assert list(records) == ["driver_version"]
    assert not records["driver_version"].passed
    error = neuron_host.wrong_driver(records["driver_version"])
    assert error.exit_code == ExitCode.BAD_CONFIG
    assert "driver 2.29.0.0, runtime 2.31.24.0: a driver 2.29 or newer needs a runtime 2.33 or newer" in str(error)
    assert "AMI" in error.remedy


def test_another_driver_release_can_be_accepted(host: TrainiumHost) -> None:
    host.write("sys/module/neuron/version", "2.28.0.0\n")
    assert not run_tests(host)["driver_version"].passed
    accepting = CONFIG.model_copy(update={"driver_versions": ("2.27", "2.28")})
    assert run_tests(host, config=accepting)["driver_version"].passed


@pytest.mark.parametrize(("code", "words"), [(NCCOM_FAILURE, "Failure running neuron-bench"), (HANG, "did not end within 1")])
def test_collectives_that_fail(host: TrainiumHost, code: str, words: str) -> None:
    host.set_nccom_test(code)
    records = run_tests(host, config=CONFIG.model_copy(update={"nccom_timeout_seconds": 1}))
    assert [name for name, record in records.items() if not record.passed] == COLLECTIVES
    assert all(words in records[name].detail for name in COLLECTIVES)


def test_slow_links_are_sick_only_below_the_floor(host: TrainiumHost) -> None:
    at_floor = CONFIG.model_copy(update={"min_nccom_gibps": 21.9})
    assert run_tests(host, config=at_floor)["nccom_all_gather"].passed
    above = run_tests(host, config=CONFIG.model_copy(update={"min_nccom_gibps": 22.0}))["nccom_all_gather"]
    assert (above.passed, above.floor) == (False, 22.0)


def test_the_tests_own_graphs_are_compiled_without_the_cast_and_apart() -> None:
    flags = "--target=trn1 --auto-cast=all --auto-cast-type=bf16 --optlevel=1"
    assert neuron_host.compiler_environment(flags, Path("/scratch/cache")) == {
        "NEURON_CC_FLAGS": "--target=trn1 --optlevel=1 --auto-cast=none",
        "NEURON_COMPILE_CACHE_URL": "/scratch/cache",
    }
    assert neuron_host.compiler_environment("", Path("/c"))["NEURON_CC_FLAGS"] == "--auto-cast=none"


# The ranks of a node.


def context_of(folder: Path, world: World) -> StageContext:
    scratch = folder / f"scratch-{world.node.node}"
    scratch.mkdir(parents=True, exist_ok=True)
    return StageContext(
        stage=Stage.TRAIN,
        paths=RunPaths(str(folder / "runs" / "week-01")),
        world=world,
        scratch=scratch,
        heartbeat=Heartbeat(scratch, world.rank),
    )


def record(rank: int, *, passed: bool = True) -> TestRecord:
    return TestRecord(name=f"test_{rank}", rank=rank, passed=passed, value=1.0)


def test_every_rank_of_a_node_hears_of_one_ranks_failure(tmp_path: Path) -> None:
    ends: dict[int, str] = {}

    def judge(local_rank: int) -> None:
        node = NodeWorld(node=1, nodes=2, host="host-9")
        world = World(rank=2 + local_rank, size=4, local_rank=local_rank, local_size=2, node=node)
        report = NodeReport(context_of(tmp_path, world), uri=str(tmp_path / "node.json"), wait_seconds=20)
        report.judge("first", [record(world.rank)])
        try:
            report.judge("second", [record(world.rank, passed=local_rank == 0)])
        except UnhealthyHost as error:
            ends[local_rank] = error.what

    threads = [threading.Thread(target=judge, args=(local_rank,)) for local_rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == dict.fromkeys((0, 1), "node 1 (host-9) failed its health check: test_3")
    written = json.loads((tmp_path / "node.json").read_text())
    assert [(test["name"], test["passed"]) for test in written["tests"]] == [
        ("test_2", True),
        ("test_3", True),
        ("test_2", True),
        ("test_3", False),
    ]
    assert (written["passed"], written["host"], written["instance"]) == (False, "host-9", "")


def test_a_rank_that_never_says_anything_is_missed(tmp_path: Path) -> None:
    report = NodeReport(context_of(tmp_path, World(size=2, local_size=2)), uri=None, wait_seconds=0.2)
    with pytest.raises(UnhealthyHost, match="a rank did not finish its tests") as found:
        report.judge("alone", [record(0)])
    assert found.value.value == "health-alone-1"


# The short form.


def cpu(world: World) -> EagerDevice:
    device = open_device("cpu", "fp32", world, threads=1)
    assert isinstance(device, EagerDevice)
    return device


def test_the_short_form_is_short_and_leaves_nothing(tmp_path: Path) -> None:
    context = context_of(tmp_path, World())
    quick_check(context, cpu(context.world), CONFIG)
    began = time.monotonic()
    quick_check(context, cpu(context.world), CONFIG)
    assert time.monotonic() - began < 1
    assert not (tmp_path / "runs").exists()


def test_a_rank_that_multiplies_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = torch.Tensor.__matmul__

    def spoilt(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = healthy(left, right)
        product[100, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", spoilt)
    context = context_of(tmp_path, World(node=NodeWorld(host="host-9")))
    with pytest.raises(UnhealthyHost, match=r"node 0 \(host-9\) failed its health check: quick_matmul"):
        quick_check(context, cpu(context.world), CONFIG)


def test_a_core_that_gives_no_answer_takes_its_host_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> torch.Tensor:
        raise RuntimeError("execution timeout (600000 ms) on Neuron Device 0 NC 0")

    monkeypatch.setattr(torch.Tensor, "__matmul__", hang)
    context = context_of(tmp_path, World(node=NodeWorld(host="host-9")))
    with pytest.raises(UnhealthyHost, match=r"node 0 \(host-9\) failed its health check: quick_matmul"):
        quick_check(context, cpu(context.world), CONFIG)


def test_a_setting_that_the_runtime_refuses_takes_no_host_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("[NCC_EXTP004] The number of instructions generated exceeds the limit.")

    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    with pytest.raises(RuntimeError, match="NCC_EXTP004"):
        quick_check(context_of(tmp_path, World()), cpu(World()), CONFIG)


def test_the_short_form_is_compiled_without_casts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = "--target=trn1 --auto-cast=all --auto-cast-type=bf16 --retry_failed_compilation"
    monkeypatch.setenv("NEURON_CC_FLAGS", training)
    healthy = torch.Tensor.__matmul__
    seen: list[str] = []

    def compiled(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append(os.environ["NEURON_CC_FLAGS"])
        return healthy(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", compiled)
    device = cpu(World())
    quick_check(context_of(tmp_path, World()), device, CONFIG)
    # A graph's key has the flags in it: the trial meets the same.
    meet_graphs(device)
    assert seen == 2 * ["--target=trn1 --retry_failed_compilation --auto-cast=none"]
    assert os.environ["NEURON_CC_FLAGS"] == training


def test_the_short_form_looks_at_a_trainium_host_but_takes_no_core(tmp_path: Path, host: TrainiumHost) -> None:
    """The device is a CPU that says it is neuron: what is tried is which host tests are run, by whom, and what they allow."""
    # While ranks hold their cores, their processes are listed.
    host.set_neuron_ls(neuron_ls(neuron_processes=[{"pid": 1, "command": "python -m pipeline.stages.rank train"}]))
    context = context_of(tmp_path, World(node=NodeWorld(nodes=2)))
    device = cpu(context.world)
    device.kind = "neuron"
    quick_check(context, device, CONFIG, root=host.root)
    assert host.collectives() == []
    (host.root / "dev/infiniband/uverbs3").unlink()
    again = context_of(tmp_path / "again", context.world)
    with pytest.raises(UnhealthyHost, match="efa_files"):
        quick_check(again, device, CONFIG, root=host.root)
    # The node's other ranks leave the host to its first one.
    waiting = context_of(tmp_path / "other", World(local_rank=1, local_size=2, node=NodeWorld(nodes=2)))
    (waiting.scratch / "health-quick-alone-0.json").write_text('{"instance": "i-1", "records": []}')
    quick_check(waiting, device, CONFIG, root=host.root)


RANKS = """
import sys
from pathlib import Path
from pipeline.config import HealthCheckConfig
from pipeline.contract import RunPaths, Stage
from pipeline.errors import TrnpipeError
from pipeline.run.context import StageContext
from pipeline.backends.device import open_device
from pipeline.backends.eager import EagerDevice
from pipeline.health.quick import meet_graphs, quick_check
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
rank, port, kind, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
folder, fault = Path(sys.argv[5]), sys.argv[6]
world = World(rank=rank, size=size, local_rank=rank, local_size=size, port=port)
beat = Heartbeat(None, rank)
context = StageContext(stage=Stage.TRAIN, paths=RunPaths("/nowhere"), world=world, scratch=folder, heartbeat=beat)
device = open_device(kind, "fp32", world, threads=1)
quick_check(context, device, HealthCheckConfig())
print("healthy", device.graph_counts().compiled)
meet_graphs(device)
context.scratch = folder / "again"
context.scratch.mkdir(exist_ok=True)
if fault == str(rank):
    healthy = EagerDevice.all_reduce
    def spoilt(self, value):
        result = healthy(self, value)
        result[rank] += 1
        return result
    EagerDevice.all_reduce = spoilt
try:
    quick_check(context, device, HealthCheckConfig())
    print("healthy again", device.graph_counts().compiled)
except TrnpipeError as error:
    print(error.what)
"""


def quick_ranks(tmp_path: Path, kind: str, size: int, fault: str = "none") -> list[list[str]]:
    """What every rank says after a check of healthy ranks, and after one more with a rank that adds wrongly."""
    return [said.splitlines()[-2:] for said in run_gang(RANKS, size, kind, size, tmp_path, fault)]


def test_a_rank_that_adds_wrongly_takes_its_whole_node_out(tmp_path: Path) -> None:
    for first, second in quick_ranks(tmp_path, "cpu", 2, fault="1"):
        assert first == "healthy 0"
        assert second.endswith("failed its health check: quick_all_reduce")


def test_a_lazy_device_needs_one_graph_for_its_own_answer(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    assert quick_ranks(tmp_path, "xla", 1) == [["healthy 1", "healthy again 1"]]
