"""A full disk and a host without memory are named, whoever notices them, and however it words it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from pipeline.contract import Stage
from pipeline.dataset.external_sort import ExternalSort
from pipeline.errors import BadData
from pipeline.host import exhaustion as exhausted
from pipeline.host.exhaustion import exhaustion, kernel_kills
from pipeline.host.launch import RankLaunch
from pipeline.host.ranks import ProcessRanks, unexplained_end
from pipeline.run.world import NodeWorld, World
from pipeline.stages.rank import as_expected

ROOT = Path(__file__).resolve().parents[3]
VALUES = np.random.default_rng(0).random(1 << 20)

WRITERS: dict[str, Callable[[Path], object]] = {
    "plain": lambda path: path.write_bytes(VALUES.tobytes()),
    "pyarrow": lambda path: pq.write_table(pa.table({"x": VALUES}), path),
    "safetensors": lambda path: save_file({"x": torch.from_numpy(VALUES)}, path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_by_whatever_writes(full_disk: Path, writer: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each library has its own
        WRITERS[writer](full_disk / "file")
    found = as_expected(caught.value, World())
    assert found.exit_code == 75, caught.value
    assert found.what == "the disk is full"
    assert "larger root volume" in found.remedy
    assert any("MB are free" in value for value in found.value)


def test_a_few_bytes_that_the_disk_has_no_room_for_are_not_lost_silently(full_disk: Path) -> None:
    sort = ExternalSort(full_disk / "sort", 10, np.dtype([("key", np.uint64)]))
    with (full_disk / "filler").open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(1 << 12)):
            pass
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        sort.add(key=np.arange(10, dtype=np.uint64))


def test_no_array_writes_itself_to_a_file() -> None:
    """`tofile` buffers up to 4 KiB, does not look whether the end of it could be written, and its errors have no errno."""
    sources = [path for top in ("infra", "pipeline") for path in (ROOT / top).rglob("*.py")]
    assert len(sources) > 200
    assert [path for path in sources if ".tofile(" in path.read_text("utf-8")] == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_quotas_and_texts_count_too(error: Exception) -> None:
    found = exhaustion(error)
    assert found is not None
    assert found.what == "the disk is full"


def test_what_wraps_a_full_disk_does_not_hide_it() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch/file")
        except OSError:
            raise ValueError("cannot be written")  # noqa: B904 - as libraries do
    except ValueError as error:
        found = exhaustion(error)
    assert found is not None
    assert "/scratch/file" in found.value[0]


@pytest.mark.parametrize("allocate", [lambda: np.ones(1 << 50), lambda: torch.ones(1 << 50), lambda: bytearray(1 << 60)])
def test_memory_that_is_not_there_is_named(allocate: Callable[[], object]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    found = as_expected(caught.value, World())
    assert (found.what, found.exit_code) == ("out of host memory", 69)
    assert "ranks_per_node" in found.remedy


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.EIO, "Input/output error"), RuntimeError("shapes differ")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert exhaustion(error) is None


def test_our_own_errors_speak_for_themselves() -> None:
    assert as_expected(BadData("rows are broken"), World()).what == "rows are broken"


# ---- killed by the kernel --------------------------------------------------------------------------------------------


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the kernel's count of killed processes."""
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 0\noom_kill 3\noom_group_kill 0\n")
    monkeypatch.setattr(exhausted, "KILL_COUNTS", (path, tmp_path / "absent"))
    return path


class _Sleeping(ProcessRanks):
    """A rank that does nothing, to be killed."""

    def _start(self, local_rank: int, port: int):  # type: ignore[no-untyped-def]
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[Callable[[], ProcessRanks]]:
    started: list[ProcessRanks] = []

    def start() -> ProcessRanks:
        launch = RankLaunch(stage=Stage.EMBED, run="r", node=NodeWorld(), nodes=1, ranks_per_node=1, kind="cpu", folder=tmp_path)
        started.append(_Sleeping(launch))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.mark.parametrize("counted", [True, False])
def test_a_rank_killed_by_the_kernel_is_told_from_one_killed_by_a_process(
    counter: Path, sleeping: Callable[[], ProcessRanks], counted: bool
) -> None:
    ranks = sleeping()
    if counted:
        counter.write_text(counter.read_text().replace("oom_kill 3", "oom_kill 4"))
    ranks._processes[0].kill()
    assert ranks.wait(30)
    [failure] = ranks.failures()
    assert failure.exit_code == 75
    assert ("out of memory" in failure.what) == counted
    assert "ranks_per_node" in failure.remedy


def test_the_kernels_count_is_read_where_it_can_be(counter: Path) -> None:
    assert kernel_kills() == 3


def test_only_sigkill_is_the_kernels() -> None:
    assert "SIGSEGV" in unexplained_end(0, -11, out_of_memory=True).what


def test_a_rank_killed_in_a_group_without_memory_is_explained(sleeping: Callable[[], ProcessRanks]) -> None:
    """The real thing, where control groups can be made."""
    group = Path("/sys/fs/cgroup/memory") / f"trnpipe-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(32 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    ranks = sleeping()
    eater = "import sys; sys.stdin.read(1); kept = [bytearray(1 << 20) for _ in range(4096)]"
    process = subprocess.Popen([sys.executable, "-c", eater], stdin=subprocess.PIPE)
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        ranks._processes[0].kill()
        ranks._processes[0].wait()
        ranks._processes[0] = process
        process.communicate(b"x", timeout=60)
        [failure] = ranks.failures()
        assert "out of memory" in failure.what
    finally:
        process.kill()
        process.wait()
        group.rmdir()
