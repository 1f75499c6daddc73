"""Every row of the table with lines as they are documented, and which of several lines explains the others.

The lines and where they stand are in neuron_lines.txt beside this file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ExitCode, FailureKind
from pipeline.run.world import NodeWorld
from pipeline.sdk.known_errors import TABLE, Action, classify

DOCUMENTED = Path(__file__).with_name("neuron_lines.txt")
CODES = [  # neuron-runtime/api/nrt_status.rst: the names, in the form of nrt_infodump (nrt-troubleshoot.rst, DGE overflow)
    ("on-chip memory", 76, "NRT_EXEC_HW_ERR_NC_UE", 1202),
    ("device memory", 76, "NRT_EXEC_HW_ERR_HBM_UE", 1201),
    ("repairable device memory", 76, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", 1205),
    ("dma", 76, "NRT_EXEC_HW_ERR_DMA_ABORT", 1203),
    ("execution unit", 76, "NRT_EXEC_UNIT_UNRECOVERABLE", 101),
    ("network proxy", 76, "NRT_NETWORK_PROXY_FAILURE", 1206),
    ("notification queue", 64, "NRT_EXEC_SW_NQ_OVERFLOW", 1204),
    ("not a number", 65, "NRT_EXEC_COMPLETED_WITH_NUM_ERR", 1003),
    ("out of bounds", 65, "NRT_EXEC_OOB", 1006),
    ("core in use", 75, "NRT_EXEC_NC_BUSY", 1005),
    ("bad input", 69, "NRT_EXEC_BAD_INPUT", 1002),
    ("collectives hang", 75, "NRT_EXEC_HW_ERR_COLLECTIVES", 1200),
    ("execution unit", 76, "NRT_HW_ERROR", None),
    ("core in use", 75, "NRT_LOAD_NOT_ENOUGH_NC", None),
    ("neff version", 64, "NRT_UNSUPPORTED_NEFF_VERSION", None),
    ("host memory", 64, "NRT_FAIL_HOST_MEM_ALLOC", None),
    ("bad input", 69, "NRT_INVALID", None),
    ("resource", 64, "NRT_RESOURCE", None),
]


def documented() -> list[tuple[str, int, str]]:
    """(row, exit code, line) from the file of documented lines."""
    rows = [line.split(" | ", 2) for line in DOCUMENTED.read_text().splitlines() if line and not line.startswith("#")]
    return [(name, int(code), line) for name, code, line in rows]


LINES = [
    *documented(),
    *((name, code, f"ERROR   NRT:nrt_infodump    Failure: {status} in nrt_execute()") for name, code, status, _ in CODES),
    *((name, code, f"NMGR:dlr_infer  Inference completed with err: {number}.") for name, code, _, number in CODES if number),
    *((name, code, f"RuntimeError: nrt_execute status={number}") for name, code, _, number in CODES if number),
]
NODE = NodeWorld(node=3, nodes=4, host="host-7")


@pytest.mark.parametrize(("name", "exit_code", "line"), LINES)
def test_a_documented_line_is_understood(name: str, exit_code: int, line: str) -> None:
    found = classify([line], nodes=4)
    assert found is not None
    assert found.row.name == name
    error = found.error(NODE)
    assert error.exit_code == exit_code
    assert error.remedy
    assert line.startswith(str(error.value))


def test_every_row_is_tested_and_its_action_fits_its_code() -> None:
    assert {row.name for row in TABLE} == {name for name, _, _ in LINES} | {"compute hang"}
    retried = {Action.RETRY: {75}, Action.REPLACE: {76}, Action.STOP: {64, 65, 69}, Action.FOLLOW: {75}, Action.WAIT: {75}}
    assert all(row.exit_code in retried[row.action] for row in TABLE)
    assert {row.action for row in TABLE} == set(Action)


@pytest.mark.parametrize(
    "line",
    [
        # nrt-troubleshoot.rst
        "[298850.919248] efa 0000:a0:1a.0 rdmap160s26: Failed to process command DEREG_MR (opcode 8) comp_status 7 err -22",
        # training-troubleshooting.rst
        'E tensorflow/core/framework/op_kernel.cc:1676] OpKernel (\'op: "TPURoundRobin" device_type: "CPU"\') for unknown op',
        "(NON-FATAL, Ignoring) inference timeout (180000 ms) on Neuron Device 0 NC 1, waiting for cc status notifications.",
        "12:00:00 INFO    [node 0 rank 3] step 1202 of 2000, loss 1.0061",
        "Inference completed with err: 12020",
        "Failure: NRT_SUCCESS in nrt_execute()",
        "",
    ],
)
def test_harmless_lines_mean_nothing(line: str) -> None:
    assert classify([line], nodes=4) is None


def test_a_cause_beats_what_follows_from_it_wherever_it_stands() -> None:
    rx, closed = "Timeout waiting for RX (waited 120 sec) - retrying", "RX, connection closed by remote peer"
    files = "CCOM WARN Call to accept failed : Too many open files"  # what issue 713 turned out to be, below endless RX timeouts
    memory = "(FATAL-RT-UNDEFINED-STATE) [ND 0][NC 0] Uncorrectable memory error is detected, metadata: 0x16."
    for lines in ([rx, closed, files], [files, closed, rx]):
        found = classify(lines)
        assert found is not None
        assert found.line == files
    found = classify(
        [rx, files, "[ND 0] execution timeout (30000 ms) on X, waiting for execution completion notification", memory]
    )
    assert found is not None
    assert found.row.name == "on-chip memory"
    found = classify([rx, closed])
    assert found is not None
    assert not found.is_cause
    assert found.error(NODE).kind is FailureKind.LOST_PEER


def test_a_timeout_replaces_the_host_only_where_no_peer_can_be_its_cause() -> None:
    line = "inference timeout (600000 ms) on Neuron Device 0 NC 0, waiting for execution completion notification"
    alone, gang = classify([line], nodes=1), classify([line], nodes=2)
    assert alone is not None
    assert (alone.row.name, alone.error(NODE).exit_code) == ("compute hang", ExitCode.UNHEALTHY_HOST)
    assert gang is not None
    assert not gang.is_cause
    assert gang.error(NODE).kind is FailureKind.LOST_PEER


def test_efa_is_asked_for_only_between_nodes() -> None:
    line = "OFI plugin initNet() failed is EFA enabled?"
    assert classify([line], nodes=1) is None
    assert classify([line], nodes=2) is not None


def test_a_sick_host_is_named() -> None:
    found = classify(["[MLA 0][NC 0] DMA TX engine 0 is in an abort state"])
    assert found is not None
    error = found.error(NODE)
    assert error.exit_code == ExitCode.UNHEALTHY_HOST
    assert error.what == "node 3 (host-7): a DMA engine has aborted"
