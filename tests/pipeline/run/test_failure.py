"""How failures travel and which of several is the cause."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError

from pipeline.contract import RunPaths, Stage, StageFailure
from pipeline.errors import BadData, ExitCode, FailureKind, Transient, TrnpipeError
from pipeline.host.ranks import unexplained_end
from pipeline.run import failure
from pipeline.run.world import NodeWorld, World
from pipeline.stages.rank import as_expected, fail


def record(exit_code: int, time: str, what: str = "something") -> StageFailure:
    return StageFailure(stage="train", run="run", exit_code=exit_code, what=what, time=time)


def test_a_failure_survives_its_way_through_the_node_folder(tmp_path: Path) -> None:
    error = BadData("rows are broken", value=[f"a:{line}" for line in range(30)], rule="one object per line", remedy="fix them")
    node = NodeWorld(node=2, nodes=4, attempt=3, host="host-7")
    written = failure.describe(error, stage=Stage.TRAIN, run="week-01", node=node, rank=9)
    failure.write_failure(tmp_path, written)
    read = failure.read_failure(tmp_path, 9)
    assert read == written
    assert failure.read_failure(tmp_path, 8) is None
    assert (read.exit_code, read.node, read.attempt, read.host) == (65, 2, 3, "host-7")
    assert failure.error_of(read).lines()[0] == "error:  rows are broken"
    assert failure.error_of(read).lines()[-1] == "remedy: fix them"


def test_the_earliest_failure_is_the_cause_but_a_lost_peer_only_if_there_is_no_other() -> None:
    lost = replace(record(75, "2026-01-01T00:00:00"), kind=FailureKind.LOST_PEER)
    later = record(76, "2026-01-01T00:00:09")
    latest = record(64, "2026-01-01T00:00:10")
    assert failure.cause([latest, lost, later]) is later
    assert failure.cause([lost]) is lost
    assert failure.cause([]) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (failure.lost_peer("gloo"), FailureKind.LOST_PEER),
        (failure.unexpected(KeyError("x")), FailureKind.UNEXPECTED),
        (unexplained_end(0, -9), FailureKind.UNEXPECTED),
        (Transient("the node was terminated by SIGTERM", kind=FailureKind.TERMINATED), FailureKind.TERMINATED),
        (BadData("rows are broken"), FailureKind.OWN),
    ],
)
def test_a_failure_keeps_its_kind_whatever_its_words_are(error: TrnpipeError, kind: FailureKind) -> None:
    error.what, error.rule = "other words", "another rule"
    written = failure.describe(error, stage=Stage.TRAIN, run="week-01", node=NodeWorld(), rank=0)
    read = StageFailure.from_json(written.to_json())
    assert (read.kind, failure.error_of(read).kind) == (kind, kind)
    first = replace(read, time="2026-01-01T00:00:00")
    later = record(64, "2026-01-01T00:00:09", what=failure.lost_peer("gloo").what)
    assert failure.cause([later, first]) is (later if kind is FailureKind.LOST_PEER else first)


def test_a_record_of_an_earlier_version_has_no_kind() -> None:
    fields = json.loads(record(75, "2026-01-01T00:00:00").to_json())
    del fields["kind"]
    assert StageFailure.from_json(json.dumps(fields).encode()).kind is FailureKind.OWN
    with pytest.raises(BadData):
        StageFailure.from_json(json.dumps(fields | {"kind": "theirs"}).encode())


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1"), 75),
        (DistNetworkError("The client socket has timed out after 60000ms"), 75),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 69),
        (OSError(errno.ENOSPC, "No space left on device"), 75),
        (OSError(errno.EIO, "Input/output error"), 69),
        (MemoryError(), 69),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 64),
        (BadData("rows are broken"), 65),
    ],
)
def test_exceptions_get_the_exit_code_that_tells_batch_what_to_do(error: BaseException, exit_code: int) -> None:
    assert as_expected(error, World(rank=0, size=2)).exit_code == exit_code


def test_one_rank_alone_can_lose_no_peer() -> None:
    assert as_expected(RuntimeError("timed out waiting for input"), World()).exit_code == ExitCode.DEFECT


@pytest.mark.parametrize(("status", "exit_code"), [(-9, 75), (-11, 75), (1, 69), (2, 69), (66, 66), (76, 76), (200, 69)])
def test_an_unexplained_end_is_judged_by_its_status(status: int, exit_code: int) -> None:
    assert unexplained_end(0, status).exit_code == exit_code


def test_a_signal_is_named() -> None:
    assert "SIGSEGV" in unexplained_end(5, -11).what


def test_a_full_disk_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRNPIPE_NODE_DIR", str(tmp_path / "full"))  # where nothing can be written
    error = OSError(errno.ENOSPC, "No space left on device")
    assert fail(Stage.TRAIN, RunPaths("s3://bucket/runs/week"), World(), error) == ExitCode.TRANSIENT
