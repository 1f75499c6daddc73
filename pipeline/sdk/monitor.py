"""neuron-monitor during training: the use of every core and of the host, and an immediate failure when hardware fails.

Format: neuron-monitor user guide of SDK 2.29.1 (aws-neuron-sdk, tools/neuron-sys-tools/neuron-monitor-user-guide.rst at v2.29.1).
Writes `train/monitor/node-N.jsonl`, one line per interval: `{time, attempt, host, utilization: {mean, min, max}, cores: {core:
mean}, device_memory_bytes, host_memory_bytes, ecc: {counter: count}, errors: {kind: count}}`. The monitor is optional: where
the tool is absent or prints an unknown format, training continues without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from msgspec import convert

from pipeline import store
from pipeline.contract import Metric
from pipeline.errors import MissingInput, TrnpipeError, UnhealthyHost, one_line
from pipeline.log import log
from pipeline.run.context import StageContext
from pipeline.run.processes import end_group
from pipeline.sdk.neuron_tools import HOST, ToolError, find_tool, tool_environment

PERIOD_SECONDS = 5
"""neuron-monitor's own default."""
INTERVAL_SECONDS = 60.0
STOP_SECONDS = 20.0
"""Time for an unfinished upload when training ends."""
ECC_COUNTERS = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected")
"""Per device, since its driver was loaded."""
FATAL_ECC = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
FATAL_ERROR = "hardware"
"""The kind of execution error that means broken hardware, "such as uncorrectable ECC issues"; counted per period."""


def configuration(period_seconds: float) -> dict[str, Any]:
    """neuron-monitor's configuration file: every process on every core, and the host."""
    return {
        "period": f"{period_seconds:g}s",
        "neuron_runtimes": [
            {
                "tag_filter": ".*",
                "metrics": [{"type": name} for name in ("neuroncore_counters", "memory_used", "execution_stats")],
            }
        ],
        "system_metrics": [{"type": name} for name in ("memory_info", "neuron_hw_counters")],
    }


@dataclass(kw_only=True)
class Reading:
    """One report of neuron-monitor, all processes together.

    Attributes:
        utilization: core -> percent, of cores that a process holds.
        device_memory, host_memory: bytes in use; None: not reported.
        ecc: ECC_COUNTERS over all devices; empty: not reported.
        errors: kind -> failed executions of the period.
        gaps: parts that neuron-monitor could not collect, in its words.
    """

    utilization: dict[int, float] = field(default_factory=dict)
    device_memory: int | None = None
    host_memory: int | None = None
    ecc: dict[str, int] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    gaps: list[str] = field(default_factory=list)


def parse_report(line: bytes | str) -> Reading:
    """Read one line of neuron-monitor's output.

    Raises:
        ValueError: not of the documented form.
    """
    try:
        report = json.loads(line)
        reading = Reading()
        for process in report["neuron_runtime_data"]:
            _read_process(process, reading)
        system = report["system_data"]
        if memory := _group(system, "memory_info", reading):
            reading.host_memory = convert(memory["memory_used_bytes"], int)
        if (counters := _group(system, "neuron_hw_counters", reading)) and (devices := counters["neuron_devices"]):
            reading.ecc = {name: sum(convert(device[name], int) for device in devices) for name in ECC_COUNTERS}
    except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return reading


def _read_process(process: Mapping[str, Any], reading: Reading) -> None:
    if process.get("error"):
        reading.gaps.append(str(process["error"]))
        return
    report = process["report"]
    if counters := _group(report, "neuroncore_counters", reading):
        for core, counted in (counters["neuroncores_in_use"] or {}).items():
            share = float(counted["neuroncore_utilization"])
            if not 0.0 <= share <= 100.5:
                raise ValueError(f"core {core} is used to {share} percent")
            # Every process lists every core of the host; only one of them holds it.
            reading.utilization[int(core)] = max(share, reading.utilization.get(int(core), 0.0))
    if memory := _group(report, "memory_used", reading):
        reading.device_memory = (reading.device_memory or 0) + convert(memory["neuron_runtime_used_bytes"]["neuron_device"], int)
    if stats := _group(report, "execution_stats", reading):
        reading.errors.update(convert(stats["error_summary"], dict[str, int]))


def _group(groups: Mapping[str, Any], name: str, reading: Reading) -> Mapping[str, Any] | None:
    """A metric group, None where neuron-monitor left it out (its period is not over) or could not collect it."""
    if (group := groups.get(name)) is None:
        return None
    if group.get("error"):
        reading.gaps.append(f"{name}: {group['error']}")
        return None
    return dict(group)


class HostMonitor:
    """Watches this node's host while it is entered; does nothing on kinds other than neuron and on all but a node's first rank.

    `check` and `latest` are cheap: they use what the reading thread stored.

    Args:
        kind: of the devices.
        interval_seconds: between two lines, each followed by an upload.
    """

    def __init__(
        self,
        context: StageContext,
        kind: str,
        *,
        period_seconds: float = PERIOD_SECONDS,
        interval_seconds: float = INTERVAL_SECONDS,
        root: Path = HOST,
    ) -> None:
        self._context = context
        self._kind = kind
        self._period_seconds = period_seconds
        self._interval_seconds = interval_seconds
        self._root = root
        self._lock = threading.Lock()
        self._latest = Reading()
        self._readings: list[Reading] = []
        self._new_ecc: Counter[str] = Counter()
        """The readings since the last line, and the new memory errors among them."""
        self._ecc: dict[str, int] = {}
        self._fatal: list[str] = []
        self._said: set[str] = set()
        self._stopping = threading.Event()
        self._lines: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> HostMonitor:
        if self._kind != "neuron" or self._context.world.local_rank > 0:
            return self
        folder = self._context.scratch / "monitor"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "neuron-monitor.json"
        config.write_text(json.dumps(configuration(self._period_seconds)))
        try:
            self._process = subprocess.Popen(
                [find_tool("neuron-monitor", self._root), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=tool_environment(os.environ),
                start_new_session=True,
            )
        except (ToolError, OSError) as error:
            self._say_once(f"training continues without a monitor: {error}")
            return self
        self._threads = [
            threading.Thread(target=self._read, args=(self._process, self._process.stdout), name="neuron-monitor", daemon=True),
            threading.Thread(target=self._publish_regularly, name="monitor-upload", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._stopping.set()
        with self._process:
            end_group(self._process)
            for thread in self._threads:
                thread.join(STOP_SECONDS)
        self._publish()

    def latest(self) -> dict[str, float]:
        """Return the newest reading as flat metrics; empty where no monitor runs, or before the first reading."""
        if self._process is None or self._process.poll() is not None:
            return {}
        with self._lock:
            reading, ecc = self._latest, dict(self._ecc)
        shares = list(reading.utilization.values())
        values = {
            "core_utilization": fmean(shares) if shares else None,
            "core_utilization_min": min(shares, default=None),
            "core_utilization_max": max(shares, default=None),
            "device_memory_gib": None if reading.device_memory is None else reading.device_memory / (1 << 30),
            "host_memory_gib": None if reading.host_memory is None else reading.host_memory / (1 << 30),
            "ecc_corrected": sum(count for name, count in ecc.items() if name not in FATAL_ECC) if ecc else None,
            "ecc_uncorrected": sum(ecc[name] for name in FATAL_ECC) if ecc else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def check(self) -> None:
        """Call it now and then, e.g. whenever metrics are logged.

        Raises:
            UnhealthyHost: hardware failed since the monitor was entered.
        """
        if self._fatal:
            node = self._context.world.node
            raise UnhealthyHost(
                f"the hardware of node {node.node} ({node.host}) fails",
                value=list(self._fatal),
                rule="no uncorrected memory errors and no hardware errors while training",
                remedy="the run is retried on another host from its newest checkpoint; terminate this one",
            )

    # In the reading thread.

    def _read(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        for line in filter(bytes.strip, output):
            try:
                reading = parse_report(line)
            except ValueError as error:
                self._say_once(f"skipped a line of neuron-monitor that has an undocumented form: {error}: {line[:200]!r}")
            else:
                self._take(reading)
        if not self._stopping.is_set():
            self._say_once(f"neuron-monitor ended with status {process.wait()}: training continues without a monitor")

    def _take(self, reading: Reading) -> None:
        for gap in reading.gaps:
            self._say_once(f"neuron-monitor could not collect everything: {gap}")
        with self._lock:
            for name, count in reading.ecc.items():
                risen = count - self._ecc.get(name, 0)
                # Corrected errors from before this attempt are no news; an uncorrected one always is.
                if risen > 0 and (name in FATAL_ECC or self._ecc):
                    log.warning("memory errors: %s is now %d", name, count)
                    self._new_ecc[name] += risen
                if risen > 0 and name in FATAL_ECC:
                    self._fatal.append(f"{name}: {count}")
            for kind, count in reading.errors.items():
                if count:
                    log.warning("failed executions within %g seconds: %d of kind %s", self._period_seconds, count, kind)
                if count and kind == FATAL_ERROR:
                    self._fatal.append(f"{kind} errors: {count}")
            self._latest = reading
            self._readings.append(reading)
            self._ecc |= reading.ecc

    def _say_once(self, text: str) -> None:
        # What differs in numbers only is the same message.
        key = "".join(character for character in text[:80] if not character.isdigit())
        if key not in self._said:
            self._said.add(key)
            log.warning("%s", text)

    # In the uploading thread; at the end, in the caller's.

    def _publish_regularly(self) -> None:
        """Upload a line per interval, after the lines of earlier attempts."""
        try:
            self._lines = store.read_bytes(self._uri).decode().splitlines()
        except MissingInput:
            pass
        except (TrnpipeError, OSError, ValueError) as error:
            self._say_once(f"the monitor lines of earlier attempts are lost: {one_line(error)}")
        while not self._stopping.wait(self._interval_seconds):
            self._publish()

    def _publish(self) -> None:
        with self._lock:
            readings, self._readings = self._readings, []
            new_ecc, self._new_ecc = self._new_ecc, Counter()
            reading, ecc = self._latest, dict(self._ecc)
        shares: defaultdict[int, list[float]] = defaultdict(list)
        errors: Counter[str] = Counter()
        for each in readings:
            errors.update(each.errors)
            for core, share in each.utilization.items():
                shares[core].append(share)
        means = {core: fmean(values) for core, values in sorted(shares.items())}
        if not means and reading.host_memory is None:
            return
        uncorrected = sum(new_ecc[name] for name in FATAL_ECC)
        self._context.cloudwatch.write(
            {
                Metric.ECC_CORRECTED: new_ecc.total() - uncorrected,
                Metric.ECC_UNCORRECTED: uncorrected,
                **({Metric.CORE_UTILIZATION: fmean(means.values())} if means else {}),
            }
        )
        node = self._context.world.node
        used = {"mean": fmean(means.values()), "min": min(means.values()), "max": max(means.values())} if means else {}
        self._lines.append(
            json.dumps(
                {
                    "time": time.time(),
                    "attempt": node.attempt,
                    "host": node.host,
                    **({"utilization": {name: round(share, 2) for name, share in used.items()}} if used else {}),
                    "cores": {str(core): round(mean, 2) for core, mean in means.items()},
                    "device_memory_bytes": reading.device_memory,
                    "host_memory_bytes": reading.host_memory,
                    "ecc": ecc,
                    "errors": errors,
                }
            )
        )
        try:
            store.write_bytes(self._uri, "".join(f"{text}\n" for text in self._lines).encode())
        except (TrnpipeError, OSError) as error:
            log.warning("the monitor's lines could not be written: %s", one_line(error))

    @property
    def _uri(self) -> str:
        return self._context.paths.host_monitor(self._context.world.node.node)
