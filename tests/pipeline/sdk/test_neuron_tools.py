"""The Neuron tools as real programs: good answers, and every way in which a tool can be of no use."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipeline.sdk import neuron_tools
from pipeline.sdk.neuron_tools import ToolError, driver_objection, parse_version
from tests.trainium import HANG, NCCOM_FAILURE, NCCOM_TEST, TrainiumHost, write_tool
from tests.trainium import neuron_ls as listing

SECONDS = 20.0


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainiumHost:
    return TrainiumHost(tmp_path, monkeypatch)


# Running.


def test_a_tool_is_found_on_the_path_and_where_the_packages_put_it(host: TrainiumHost) -> None:
    assert neuron_tools.find_tool("neuron-ls", host.root) == str(host.tools / "neuron-ls")
    write_tool(host.root / "opt/aws/neuron/bin", "neuron-only-there", "print('here')")
    assert neuron_tools.run_tool("neuron-only-there", seconds=SECONDS, root=host.root) == ("here\n", "")
    with pytest.raises(ToolError, match="neither on PATH nor in /opt/aws/neuron/bin"):
        neuron_tools.find_tool("neuron-nowhere", host.root)


def test_a_tool_that_fails_is_quoted(host: TrainiumHost) -> None:
    host.set_tool("tool", "import sys\nprint('one')\nsys.exit('the device is gone')")
    with pytest.raises(ToolError, match=r"tool ended with status 1: one \| the device is gone"):
        neuron_tools.run_tool("tool", seconds=SECONDS)


def test_a_tool_that_hangs_is_killed_with_all_that_it_started(host: TrainiumHost, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({str(pids)!r} + ".part", "w") as stream: print(os.getpid(), child.pid, file=stream)
os.rename({str(pids)!r} + ".part", {str(pids)!r})
print("halfway", flush=True)
time.sleep(600)
"""
    host.set_tool("tool", code)
    began = time.monotonic()
    with pytest.raises(ToolError, match="tool did not end within 2 seconds: halfway"):
        neuron_tools.run_tool("tool", seconds=2)
    assert time.monotonic() - began < 10
    deadline = time.monotonic() + 10
    for pid in map(int, pids.read_text().split()):
        while alive(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is only not yet waited for by its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_tool_sees_the_whole_host_and_not_this_ranks_core(host: TrainiumHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "7")
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "WARN")
    host.set_tool("tool", "import os\nprint([name for name in sorted(os.environ) if name.startswith('NEURON')])")
    assert neuron_tools.run_tool("tool", seconds=SECONDS)[0] == "['NEURON_RT_LOG_LEVEL']\n"


# Versions.


def test_versions_of_driver_and_runtime(host: TrainiumHost) -> None:
    assert neuron_tools.driver_version(host.root) == "2.27.4.0"
    assert neuron_tools.runtime_version(host.root, seconds=SECONDS) == "2.31.24.0"
    (host.root / "opt/aws/neuron/lib/libnrt.so.1").unlink()
    # Debian's policy manual, dpkg-query(1): -W -f prints the format and nothing else.
    host.set_tool(
        "dpkg-query",
        "import sys\nassert sys.argv[1:] == ['-W', '-f=${Version}', 'aws-neuronx-runtime-lib']\n"
        "sys.stdout.write('2.31.24.0-0b044f4ce')",
    )
    assert parse_version(neuron_tools.runtime_version(host.root, seconds=SECONDS)) == (2, 31, 24)
    host.set_tool("dpkg-query", "import sys\nsys.exit('dpkg-query: no packages found matching aws-neuronx-runtime-lib')")
    with pytest.raises(ToolError, match=r"the Neuron runtime is not known: .*no packages found"):
        neuron_tools.runtime_version(host.root, seconds=SECONDS)


def test_a_host_without_a_driver(host: TrainiumHost) -> None:
    (host.root / "sys/module/neuron/version").unlink()
    with pytest.raises(ToolError, match="no Neuron driver is loaded"):
        neuron_tools.driver_version(host.root)


@pytest.mark.parametrize("text", ["", "latest", "2", "2.27", "version: 2.27.4.0"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(ToolError, match="not a version"):
        parse_version(text)


@pytest.mark.parametrize(
    ("driver", "runtime", "accepted", "objection"),
    [
        ("2.27.4.0", "2.31.24.0", ("2.27",), None),
        ("2.27.99.1", "2.31.24.0", ("2.27",), None),
        ("2.28.0.0", "2.31.24.0", ("2.27",), "accepts 2.27"),
        ("2.28.0.0", "2.31.24.0", ("2.27", "2.28"), None),
        ("2.26.5.0", "2.31.24.0", ("2.27",), "accepts 2.27"),
        ("2.29.0.0", "2.31.24.0", ("2.27", "2.29"), "2.33 or newer"),
        ("3.0.0.0", "2.32.31.0", ("3.0",), "2.33 or newer"),
        ("2.29.0.0", "2.33.10.0", ("2.29",), None),
        ("2.26.5.0", "2.32.31.0", ("2.26",), "refuses drivers up to 2.26"),
        ("2.27.4.0", "2.32.31.0", ("2.27",), None),
    ],
)
def test_which_drivers_go_with_which_runtime(driver: str, runtime: str, accepted: tuple[str, ...], objection: str | None) -> None:
    """Neuron release notes: runtime 2.32 (SDK 2.30) refuses drivers <= 2.26; driver 2.29 (SDK 2.31) needs runtime >= 2.33."""
    found = driver_objection(parse_version(driver), parse_version(runtime), accepted)
    assert found is None if objection is None else objection in str(found)


# Devices.


def test_the_devices_of_a_trn1(host: TrainiumHost) -> None:
    devices = neuron_tools.neuron_ls(host.root, seconds=SECONDS)
    assert [device.index for device in devices] == list(range(16))
    assert devices[15].cores == (30, 31)
    assert devices[0].memory == 34359738368
    held = [{"pid": 113985, "command": "neuron-bench exec --run-as-cc-neff --...", "neuron_runtime_version": "2.0.0"}]
    host.set_neuron_ls(listing(neuron_processes=held))
    assert neuron_tools.neuron_ls(host.root, seconds=SECONDS)[3].processes == ("113985 neuron-bench exec --run-as-cc-neff --...",)


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "no neuron devices found",
        "{}",
        '[{"neuron_device": 0}]',
        json.dumps(listing(nc_count="2")),
        json.dumps(listing(nc_count=2.5)),
        json.dumps(listing(nc_count=True, neuroncore_ids=[6])),
        json.dumps(listing(memory_size=None)),
        json.dumps(listing(neuroncore_ids=[6])),
        json.dumps(listing(neuron_processes=[{"command": "python"}])),
    ],
)
def test_a_listing_of_an_unknown_form(host: TrainiumHost, printed: str) -> None:
    host.set_tool("neuron-ls", f"print({printed!r})")
    with pytest.raises(ToolError, match="neuron-ls printed an unknown format"):
        neuron_tools.neuron_ls(host.root, seconds=SECONDS)


def test_uncorrected_errors_as_files_and_as_folders(host: TrainiumHost) -> None:
    hardware = "sys/devices/virtual/neuron_device/neuron5/stats/hardware"
    host.write(f"{hardware}/mem_ecc_repairable_uncorrected", "3\n")
    (host.root / hardware / "sram_ecc_uncorrected").unlink()
    host.write(f"{hardware}/sram_ecc_uncorrected/total", "1\n")  # as the guide draws counters
    counts = neuron_tools.uncorrected_errors(16, host.root)
    assert len(counts) == 3 * 16
    assert {name: count for name, count in counts.items() if count} == {
        "neuron5 mem_ecc_repairable_uncorrected": 3,
        "neuron5 sram_ecc_uncorrected": 1,
    }
    host.write(f"{hardware}/mem_ecc_uncorrected", "many\n")
    with pytest.raises(ToolError, match="counter of neuron5 cannot be read"):
        neuron_tools.uncorrected_errors(16, host.root)
    (host.root / hardware / "mem_ecc_uncorrected").unlink()
    with pytest.raises(ToolError, match="counter of neuron5 cannot be read"):
        neuron_tools.uncorrected_errors(16, host.root)


# Collectives.


def nccom(host: TrainiumHost, seconds: float = SECONDS) -> float:
    return neuron_tools.nccom_test("all_gather", 32, 524288, seconds=seconds, root=host.root)


def test_a_collective_that_works(host: TrainiumHost) -> None:
    assert nccom(host) == 21.97975251876395
    assert host.collectives() == ["-r 32 allg"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        # As documented, and with a report that looks well.
        (NCCOM_FAILURE, "Failure running neuron-bench"),
        (NCCOM_TEST + NCCOM_FAILURE, "Failure running neuron-bench"),
        (NCCOM_TEST + "print('2 errors found - test failed', file=sys.stderr)", "2 errors found - test failed"),
        ("print('Neuron DKMS Driver is not running! Read the troubleshooting guide at: https://')", "Driver is not running"),
        (NCCOM_TEST + "sys.exit(3)", "ended with status 3"),
        # No report, or another one.
        ("print('Avg bus bandwidth: 21.9798GB/s')", "no report of the known form"),
        (NCCOM_TEST.replace('{"results": [result]}', '"done"'), "no report of the known form"),
        (NCCOM_TEST.replace('{"results": [result]}', '{"results": {}}'), "no report of the known form"),
        (NCCOM_TEST.replace("busbw", "bandwidth"), "no report of the known form"),
        (NCCOM_TEST.replace('{"results": [result]}', '{"results": []}'), "other results"),
        (NCCOM_TEST.replace('{"results": [result]}', '{"results": [result, result]}'), "other results"),
        (NCCOM_TEST.replace('"fp32", ', '"uint8", ', 1).replace('"type": "fp32"', '"type": "uint8"'), "other results"),
        (NCCOM_TEST.replace("21.97975251876395", "float('nan')"), "other results"),
        (NCCOM_TEST.replace("21.97975251876395", "0.0"), "other results"),
    ],
)
def test_a_collective_that_does_not(host: TrainiumHost, code: str, words: str) -> None:
    # The program's own check of its arguments stays as it is where a type is replaced.
    host.set_nccom_test(code.replace('== "uint8"', '== "fp32"'))
    with pytest.raises(ToolError, match=words):
        nccom(host)


def test_a_collective_that_hangs(host: TrainiumHost) -> None:
    host.set_nccom_test(HANG)
    with pytest.raises(ToolError, match="nccom-test did not end within 1 seconds: working"):
        nccom(host, seconds=1)


def test_the_tool_leaves_nothing_where_the_stage_runs(
    host: TrainiumHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    host.set_nccom_test(NCCOM_TEST + "open('golden.bin', 'w').close()")
    nccom(host)
    assert list(folder.iterdir()) == []
