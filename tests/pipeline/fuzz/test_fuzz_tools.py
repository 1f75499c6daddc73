"""What tools print, mangled: understood, refused in the caller's own terms, or passed over; and never slower than it is long."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import TrnpipeError, plain
from pipeline.run.world import NodeWorld
from pipeline.sdk import compile_cache, known_errors, neuron_launch, neuron_tools
from pipeline.sdk.monitor import parse_report
from pipeline.sdk.neuron_tools import ToolError
from tests.pipeline.fuzz.mutations import files

DEVICES = [
    {
        "neuron_device": 0,
        "nc_count": 2,
        "neuroncore_ids": [0, 1],
        "memory_size": 1 << 35,
        "neuron_processes": [{"pid": 3, "command": "p"}],
    }
]
PROCESS = {
    "pid": 3,
    "error": "",
    "report": {
        "neuroncore_counters": {"period": 5, "neuroncores_in_use": {"0": {"neuroncore_utilization": 50.0}}, "error": ""},
        "memory_used": {"neuron_runtime_used_bytes": {"host": 1, "neuron_device": 2}, "error": ""},
        "execution_stats": {"error_summary": {"generic": 0, "hardware": 0}, "error": ""},
    },
}
COUNTERS = dict.fromkeys(("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected"), 0)
REPORT = {
    "neuron_runtime_data": [PROCESS],
    "system_data": {
        "memory_info": {"memory_used_bytes": 5, "error": ""},
        "neuron_hw_counters": {"neuron_devices": [{"neuron_device_index": 0, **COUNTERS}], "error": ""},
    },
}
SUMMARY = (
    "2025-01-01 ||NEURON_PARALLEL_COMPILE||: Total graphs: 3",
    "||PARALLEL_COMPILE||: Total successful compilations: 2",
    "||PARALLEL_COMPILE||: Total failed compilations: 1",
    "Using a cached neff at /var/cache/neuronxcc-2.0/MODULE_1+a/model.neff",
    '"/x/MODULE_2+b/model.hlo_module.pb": {',
    '"status": false',
    "||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'MODULE_2+b/model']: out of memory",
)
ALARMS = (
    "NRT_EXEC_HW_ERR_NC_UE",
    "nd0 completed with err: 1202",
    "Too many open files",
    "neuron:mc_alloc: device mempool full needed 5 available 4",
    "execution timeout (5 ms) on x waiting for execution completion notification",
    "Failed to allocate 3GB (x) on ND 0:NC 1",
    "Connect to host failed - retrying",
)


def test_valid_output_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_tools, "run_tool", lambda *_, **__: (json.dumps(DEVICES), ""))
    assert neuron_tools.neuron_ls(seconds=1)[0].cores == (0, 1)
    assert parse_report(json.dumps(REPORT)).utilization == {0: 50.0}


@given(files(DEVICES))
def test_neuron_ls(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neuron_tools, "run_tool", lambda *_, **__: (data.decode(errors="replace"), ""))
        try:
            devices = neuron_tools.neuron_ls(seconds=1)
        except ToolError:
            return
    assert all(isinstance(device.memory, int) for device in devices)


@given(files(REPORT))
@example(json.dumps(REPORT).replace('"neuron_device": 2', '"neuron_device": 1e999').encode())
@example(json.dumps(REPORT).replace("50.0", "NaN").encode())
@example(json.dumps(REPORT).replace("50.0", '"50"').encode())
def test_neuron_monitor(data: bytes) -> None:
    try:
        reading = parse_report(data)
    except ValueError:
        return
    assert all(0 <= share <= 100.5 for share in reading.utilization.values())
    json.dumps([reading.errors, reading.ecc], allow_nan=False)


lines = st.lists(st.sampled_from([*SUMMARY, *ALARMS]) | st.text(max_size=60), max_size=20)


@given(lines, st.sampled_from([0, 1, -9]), st.data())
def test_the_compilers_summary(tmp_path_factory: pytest.TempPathFactory, said: list[str], code: int, data: st.DataObject) -> None:
    cut = [line[: data.draw(st.integers(0, 200))] if data.draw(st.booleans()) else line for line in [*SUMMARY, *said]]
    try:
        summary = compile_cache._summary(code, cut, str(tmp_path_factory.getbasetemp() / "no-cache"), 1.0)
    except TrnpipeError as error:
        assert error.what  # noqa: PT017
    else:
        assert summary.graphs == summary.compiled + summary.failed.__len__() or summary.failed


@given(lines)
def test_known_errors(said: list[str]) -> None:
    finding = known_errors.classify(said, nodes=2)
    if finding:
        assert len(finding.line) <= known_errors.LINE_CHARACTERS
        assert finding.error(NodeWorld()).what


@given(st.text(max_size=30))
@example("1" * 5000 + ".2.3")
@example("٢.٢٧.٤")
def test_versions(text: str) -> None:
    try:
        assert len(neuron_tools.parse_version(text)) == 3
    except ToolError:
        return


LONG = 200_000
BEGINNINGS = (
    "",
    "execution timeout (",
    "execution timeout (1 ms) on ",
    "Failed to allocate ",
    "Failed to allocate 1B (",
    "neuron:mc_alloc: device mempool ",
    "status=",
    "Connect to ",
    "Using a cached neff at ",
    '"MODULE_',
    "||NEURON_CC_WRAPPER||: Failed compilation with MODULE_",
    "||PARALLEL_COMPILE||: Total graphs: ",
    "http://",
    "://",
)
FILLINGS = (
    *("a", " ", "1", "/", ".", "(a", '"'),
    *("needed 1 ", "MODULE_a", "http://a", "neuron:mc_alloc: device mempool ", "Failed to allocate 1B ("),
)


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_pattern_takes_longer_than_a_line_is_long(beginning: str, filling: str) -> None:
    line = beginning + filling * (LONG // len(filling))
    started = time.process_time()
    known_errors.match(line, nodes=2)
    neuron_tools.NCCOM_FAILURE.search(line)
    neuron_launch.FAILED_RANK.search(line)
    plain(line)
    # Lines of the tool that compiles are cut before they are kept.
    kept = [line[: 4 * known_errors.LINE_CHARACTERS]] * 20
    for pattern in (compile_cache.TOTAL, compile_cache.CACHED, compile_cache.FAILED, compile_cache.CACHE_KEY):
        pattern.search(kept[0])
    compile_cache._reported(kept)
    assert time.process_time() - started < 3, (beginning, filling)
