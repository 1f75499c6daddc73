"""neuron-monitor as a real program beside training: what is kept of it, what it costs when it is of no use, what it raises."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import RunPaths, Stage
from pipeline.errors import ExitCode, UnhealthyHost
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import NodeWorld, World
from pipeline.sdk.monitor import HostMonitor, configuration, parse_report
from tests.trainium import monitor_report, write_tool

PRINT_FOREVER = """
import json, sys, time
config = json.load(open(sys.argv[sys.argv.index("-c") + 1]))
assert config["neuron_runtimes"][0]["metrics"] and config["period"].endswith("s")
for line in {lines!r}:
    print(line, flush=True)
while True:
    time.sleep(0.02)
    print({last!r}, flush=True)
"""


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return context_of(tmp_path)


def context_of(tmp_path: Path, **world: Any) -> StageContext:
    world = {"node": NodeWorld(node=3, nodes=4, attempt=2, host="host-9"), **world}
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return StageContext(
        stage=Stage.TRAIN,
        paths=RunPaths(str(tmp_path / "runs" / "week-01")),
        world=World(**world),
        scratch=scratch,
        heartbeat=Heartbeat(None, 0),
    )


@pytest.fixture
def prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes neuron-monitor print some lines, the last one again and again."""

    def prints(*reports: Any) -> None:
        lines = [report if isinstance(report, str) else json.dumps(report) for report in reports]
        write_tool(tmp_path / "bin", "neuron-monitor", PRINT_FOREVER.format(lines=lines, last=lines[-1]))
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    return prints


def monitor(context: StageContext, **options: Any) -> HostMonitor:
    return HostMonitor(context, "neuron", **{"period_seconds": 1, "interval_seconds": 600, **options})


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def lines_of(context: StageContext) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.read_bytes(context.paths.host_monitor(3)).splitlines()]


def test_the_newest_reading_and_the_line_that_stays(context: StageContext, prints: Callable[..., None]) -> None:
    prints(monitor_report(utilization=10.0), monitor_report(utilization=50.0, sram_ecc_corrected=2))
    with monitor(context) as watching:
        until(lambda: watching.latest().get("core_utilization_min") == 50.0)
        metrics = watching.latest()
        watching.check()
    assert metrics == {
        "core_utilization": 57.0,
        "core_utilization_min": 50.0,
        "core_utilization_max": 64.0,
        "device_memory_gib": 4.0,
        "host_memory_gib": 128.0,
        "ecc_corrected": 2,
        "ecc_uncorrected": 0,
    }
    (line,) = lines_of(context)
    assert (line["attempt"], line["host"]) == (2, "host-9")
    assert set(line["cores"]) == {"0", "1"}
    assert 10.0 < line["utilization"]["min"] == line["cores"]["0"] <= 50.0
    assert line["utilization"]["max"] == line["cores"]["1"] == 64.0
    assert (line["device_memory_bytes"], line["host_memory_bytes"]) == (4 << 30, 128 << 30)
    assert line["ecc"]["sram_ecc_corrected"] == 2
    assert line["errors"]["hardware"] == 0
    assert watching.latest() == {}


def test_cloudwatch_is_told_of_memory_errors_as_they_happen(
    context: StageContext, prints: Callable[..., None], cloudwatch: Callable[[], list[dict[str, Any]]]
) -> None:
    """Corrected ones from before the attempt are no news; every one is told once, whatever the counters go on showing."""
    prints(
        monitor_report(utilization=50.0, sram_ecc_corrected=2),
        monitor_report(utilization=50.0, sram_ecc_corrected=5, mem_ecc_uncorrected=1),
    )
    with monitor(context, interval_seconds=0.05) as watching:
        until(lambda: watching.latest().get("ecc_uncorrected") == 1)
        time.sleep(0.2)
    told = cloudwatch()
    assert len(told) > 1
    assert sum(record["EccCorrected"] for record in told) == 3
    assert sum(record["EccUncorrected"] for record in told) == 1
    assert {record["CoreUtilization"] for record in told if "CoreUtilization" in record} == {57.0}


def test_lines_are_written_all_along_and_after_those_of_earlier_attempts(
    context: StageContext, prints: Callable[..., None]
) -> None:
    store.write_bytes(context.paths.host_monitor(3), b'{"attempt": 1}\n')
    prints(monitor_report())
    with monitor(context, interval_seconds=0.2):
        until(lambda: len(lines_of(context)) >= 3)
    written = lines_of(context)
    assert [line["attempt"] for line in written[:3]] == [1, 2, 2]
    assert written[-1]["time"] > written[1]["time"]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"hardware": 1}, "hardware errors: 1"), ({"sram_ecc_uncorrected": 3}, "sram_ecc_uncorrected: 3")],
)
def test_failing_hardware_ends_the_attempt_at_the_next_look(
    context: StageContext, prints: Callable[..., None], caplog: pytest.LogCaptureFixture, change: dict[str, int], words: str
) -> None:
    prints(monitor_report(), monitor_report(**change), monitor_report(**{**change, "hardware": 0}))
    with caplog.at_level(logging.WARNING), monitor(context) as watching:
        until(lambda: caplog.records)
        with pytest.raises(UnhealthyHost, match=r"the hardware of node 3 \(host-9\) fails") as found:
            watching.check()
    assert found.value.exit_code == ExitCode.UNHEALTHY_HOST
    assert words in found.value.value
    assert sum("ecc" in record.message or "hardware" in record.message for record in caplog.records) == 1


def test_errors_that_are_no_hardware_are_counted_and_logged_only(
    context: StageContext, prints: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    report = monitor_report(mem_ecc_corrected=5)
    report["neuron_runtime_data"][0]["report"]["execution_stats"]["error_summary"]["numerical"] = 2
    prints(monitor_report(), report, monitor_report(mem_ecc_corrected=5))
    with caplog.at_level(logging.WARNING), monitor(context) as watching:
        until(lambda: len(caplog.records) >= 2)
        watching.check()
    assert lines_of(context)[-1]["errors"]["numerical"] == 2
    assert any("2 of kind numerical" in record.message for record in caplog.records)
    assert any("mem_ecc_corrected is now 5" in record.message for record in caplog.records)


@pytest.mark.parametrize("garbage", ["hello", "[]", '{"neuron_runtime_data": 3}', '{"neuron_runtime_data": []}', "null"])
def test_garbage_is_said_once_and_passed_over(
    context: StageContext, prints: Callable[..., None], caplog: pytest.LogCaptureFixture, garbage: str
) -> None:
    prints(garbage, garbage, monitor_report(), garbage)
    with caplog.at_level(logging.WARNING), monitor(context) as watching:
        until(watching.latest)
        time.sleep(0.1)
        watching.check()
    assert [record.message.startswith("skipped a line of neuron-monitor") for record in caplog.records] == [True]


def test_training_goes_on_without_neuron_monitor(
    context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with caplog.at_level(logging.WARNING), monitor(context, root=tmp_path) as watching:
        watching.check()
        assert watching.latest() == {}
    assert [record.message for record in caplog.records] == [
        "training continues without a monitor: neuron-monitor is neither on PATH nor in /opt/aws/neuron/bin"
    ]
    assert not store.exists(context.paths.host_monitor(3))


def test_training_goes_on_when_neuron_monitor_ends(
    context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tool(tmp_path / "bin", "neuron-monitor", "import sys\nsys.exit(3)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with caplog.at_level(logging.WARNING), monitor(context) as watching:
        until(lambda: caplog.records)
        watching.check()
    assert "neuron-monitor ended with status 3" in caplog.text


@pytest.mark.parametrize(("kind", "local_rank"), [("cpu", 0), ("xla", 0), ("cuda", 0), ("neuron", 1)])
def test_only_the_first_rank_of_a_trainium_node_watches(
    tmp_path: Path, prints: Callable[..., None], kind: str, local_rank: int
) -> None:
    prints(monitor_report(hardware=1))
    context = context_of(tmp_path, local_rank=local_rank, local_size=2)
    with HostMonitor(context, kind, interval_seconds=0.01) as watching:
        time.sleep(0.1)
        watching.check()
        assert watching.latest() == {}
    assert not (context.scratch / "monitor").exists()


def test_storage_trouble_costs_nothing_but_the_lines(
    tmp_path: Path, prints: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("a file in the place of a folder")
    prints(monitor_report())
    with caplog.at_level(logging.WARNING), monitor(context_of(tmp_path), interval_seconds=0.1) as watching:
        until(lambda: "could not be written" in caplog.text)
        watching.check()


def test_a_part_that_could_not_be_collected_is_left_out() -> None:
    """The error of a metric group is documented as a string; a group whose period is not over is absent."""
    report = monitor_report()
    counters = report["neuron_runtime_data"][0]["report"]
    counters["neuroncore_counters"]["error"] = "open /proc/1/stat: no such file or directory"
    del report["system_data"]["neuron_hw_counters"]
    reading = parse_report(json.dumps(report))
    assert reading.utilization == {0: 0.0, 1: 64.0}
    assert reading.ecc == {}
    assert reading.gaps == ["neuroncore_counters: open /proc/1/stat: no such file or directory"]


def test_a_host_without_any_process_yet() -> None:
    """The first line, printed at once."""
    report = {"neuron_runtime_data": [], "system_data": {"memory_info": monitor_report()["system_data"]["memory_info"]}}
    reading = parse_report(json.dumps(report))
    assert (reading.utilization, reading.device_memory, reading.host_memory) == ({}, None, 128 << 30)


@pytest.mark.parametrize("share", [-1.0, 120.0, float("nan"), "busy", None])
def test_a_utilization_that_is_none(share: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_report(json.dumps(monitor_report(utilization=share)))


def test_the_configuration_is_of_the_documented_form() -> None:
    """neuron-monitor-user-guide.rst, "Configuration file example" (SDK 2.29.1)."""
    assert configuration(5) == {
        "period": "5s",
        "neuron_runtimes": [
            {
                "tag_filter": ".*",
                "metrics": [{"type": "neuroncore_counters"}, {"type": "memory_used"}, {"type": "execution_stats"}],
            }
        ],
        "system_metrics": [{"type": "memory_info"}, {"type": "neuron_hw_counters"}],
    }
