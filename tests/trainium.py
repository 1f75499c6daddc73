"""A Trainium host made of files, and the Neuron tools as small programs that print what AWS's documents say they print.

Documents: aws-neuron-sdk at v2.29.1 (SDK 2.29.1), tools/neuron-sys-tools: neuron-ls.rst, nccom-test.rst,
neuron-monitor-user-guide.rst, neuron-sysfs-user-guide.rst; versions from src/helperscripts/n2-manifest.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.sdk.neuron_tools import UNCORRECTED

DRIVER = "2.27.4.0"
RUNTIME = "2.31.24.0"
"""aws-neuronx-dkms and aws-neuronx-runtime-lib of SDK 2.29.1 (n2-manifest.json)."""

GIB = 1 << 30

STANDINS = Path(__file__).parent / "standins"
"""For PYTHONPATH: packages in the place of torch-neuronx and libneuronxla."""

COMPILER = "neuronxcc-2.24.8799.0+6f62ff7c"
"""The folder of a compiler's results in the persistent cache."""

COMPILER_WORDS = "[NLA001]  Unhandled exception with message: tensor size must be more than 0, input1_set"
"""Of a compilation that fails (aws-neuron-sdk issue 948)."""


def neuron_ls(devices: int = 16, **changes: Any) -> list[dict[str, Any]]:
    """neuron-ls.rst, `neuron-ls -j`, with the numbers of a trn1.32xlarge (trn1-arch.rst): 16 devices of 2 cores and 32 GiB.

    Args:
        changes: of device 3, e.g. nc_count=1.
    """
    found: list[dict[str, Any]] = [
        {
            "neuron_device": index,
            "bdf": f"{0x10 + index:x}:1c.0",
            "cpu_affinity": "48-95,144-191",
            "numa_node": "1",
            "connected_to": [(index + step) % devices for step in (-4, -1, 1, 4)],
            "nc_count": 2,
            "memory_size": 32 * GIB,
            "neuroncore_ids": [2 * index, 2 * index + 1],
            "neuron_processes": [],
        }
        for index in range(devices)
    ]
    found[min(3, devices - 1)].update(changes)
    return found


NCCOM_TEST = """
import json, sys
size = int(sys.argv[sys.argv.index("-b") + 1])
assert sys.argv[sys.argv.index("-d") + 1] == "fp32" and "--check" in sys.argv and "--non-interactive" in sys.argv
result = {"size(B)": size, "count(elems)": size // 4, "type": "fp32",
          "algbw(GB/s)": 22.688776793562784, "busbw(GB/s)": 21.97975251876395, "time:avg(us)": 23.11}
print("    size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)")
print(f"  {size}          {size // 4}    fp32           23.11          22.69          21.98")
print("Avg bus bandwidth:\\t21.9798GB/s")
with open(sys.argv[sys.argv.index("--report-to-json-file") + 1], "w") as report: json.dump({"results": [result]}, report)
"""
"""nccom-test.rst, "Example results as JSON with --report-to-json-file"."""

NCCOM_FAILURE = """
print("         size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)")
print("        33554432    Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log")
print("    1 errors found - test failed")
"""
"""nccom-test.rst, "After a benchmark attempt". The exit status is documented nowhere: here it is 0, the worst case."""

HANG = "import time\nprint('working', flush=True)\ntime.sleep(600)"


def write_tool(folder: Path, name: str, code: str) -> Path:
    """An executable on its own: Python without site packages, which starts in milliseconds."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -IS\n{code}\n")
    path.chmod(0o755)
    return path


def write_parallel_compile(folder: Path) -> Path:
    """Put the program neuron_parallel_compile (tests/standins) into a folder for PATH; returns the folder."""
    path = write_tool(folder, "neuron_parallel_compile", "")
    program = [sys.executable, str(STANDINS / "neuron_parallel_compile.py")]
    path.write_text(f"#!{sys.executable} -IS\nimport os, sys\nos.execv({program[0]!r}, [*{program!r}, *sys.argv[1:]])\n")
    return folder


class TrainiumHost:
    """A healthy trn1.32xlarge at `root`, until something is changed: devices, sysfs, runtime, tools.

    Attributes:
        root: in the place of /.
        tools: the folder that is on PATH.
        calls: a file to which nccom-test adds its operation.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "root"
        self.tools = folder / "bin"
        self.calls = folder / "calls"
        for name in [f"neuron{index}" for index in range(16)] + [f"infiniband/uverbs{index}" for index in range(8)]:
            self.write(f"dev/{name}", "")
        for device in range(16):
            for counter in UNCORRECTED:
                self.write(f"sys/devices/virtual/neuron_device/neuron{device}/stats/hardware/{counter}", "0\n")
        self.write("sys/module/neuron/version", f"{DRIVER}\n")
        self.set_runtime(RUNTIME)
        self.set_neuron_ls(neuron_ls())
        self.set_nccom_test(NCCOM_TEST)
        monkeypatch.setenv("PATH", f"{self.tools}{os.pathsep}{os.environ['PATH']}")

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def set_runtime(self, version: str) -> None:
        library = self.write(f"opt/aws/neuron/lib/libnrt.so.{version}", "")
        link = library.with_name("libnrt.so.1")
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)

    def set_tool(self, name: str, code: str) -> None:
        write_tool(self.tools, name, code)

    def set_neuron_ls(self, devices: list[dict[str, Any]]) -> None:
        self.set_tool("neuron-ls", f"import sys\nassert sys.argv[1:] == ['-j']\nprint({json.dumps(devices, indent=4)!r})")

    def set_nccom_test(self, code: str) -> None:
        self.set_tool(
            "nccom-test", f"import sys\nwith open({str(self.calls)!r}, 'a') as calls: print(*sys.argv[1:4], file=calls)\n{code}"
        )

    def collectives(self) -> list[str]:
        """What nccom-test was called for."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def monitor_report(**changes: Any) -> dict[str, Any]:
    """neuron-monitor-user-guide.rst, "The JSON output format" and its metric groups, for two processes with a core each.

    Args:
        changes: utilization (of core 0, percent), hardware (execution errors), and counters of device 0.
    """
    utilization, hardware = changes.pop("utilization", 42.0), changes.pop("hardware", 0)
    counters = {"mem_ecc_corrected": 0, "mem_ecc_uncorrected": 0, "sram_ecc_uncorrected": 0, "sram_ecc_corrected": 0, **changes}
    errors = {"generic": 0, "numerical": 0, "transient": 0, "model": 0, "runtime": 0, "hardware": hardware}

    def process(pid: int, shares: dict[str, float]) -> dict[str, Any]:
        return {
            "pid": pid,
            "address": "",
            "neuron_runtime_tag": str(pid),
            "error": "",
            "report": {
                "neuroncore_counters": {
                    "period": 1.000113182,
                    "neuroncores_in_use": {
                        core: {"neuroncore_utilization": share, "flops": 1234567891011} for core, share in shares.items()
                    },
                    "error": "",
                },
                "execution_stats": {
                    "period": 1.030613214,
                    "error_summary": errors if pid == 1 else dict.fromkeys(errors, 0),
                    "execution_summary": {"completed": 123, "completed_with_err": 0},
                    "latency_stats": {"total_latency": None, "device_latency": None},
                    "error": "",
                },
                "memory_used": {
                    "period": 1.00001,
                    "neuron_runtime_used_bytes": {"host": 6997643264, "neuron_device": 2 * GIB},
                    "loaded_models": [],
                    "error": "",
                },
            },
        }

    return {
        "neuron_runtime_data": [process(1, {"0": utilization, "1": 0}), process(2, {"0": 0, "1": 64.0})],
        "system_data": {
            "neuron_hw_counters": {
                "period": 1.030359284,
                "neuron_devices": [
                    {"neuron_device_index": 0, **counters},
                    {"neuron_device_index": 1, **dict.fromkeys(counters, 0)},
                ],
                "error": "",
            },
            "memory_info": {
                "period": 5.346411129,
                "memory_total_bytes": 512 * GIB,
                "memory_used_bytes": 128 * GIB,
                "swap_total_bytes": 0,
                "swap_used_bytes": 0,
                "error": "",
            },
        },
        "instance_info": {"instance_id": "i-0011223344556677a", "instance_type": "trn1.32xlarge", "error": ""},
        "neuron_hardware_info": {"neuron_device_type": "trainium", "neuron_device_count": 16, "error": ""},
    }
