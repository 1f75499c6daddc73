"""What the main node of a gang makes of the records, and of the silence, of the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline import store
from pipeline.contract import RunPaths, Stage
from pipeline.errors import BadData
from pipeline.host import gang
from pipeline.run.world import NodeWorld

MAIN = NodeWorld(job_id="job#0", node=0, nodes=3)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(str(tmp_path / "runs" / "run"))


def test_a_node_that_ends_before_its_first_word_is_lost_at_once(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "ASK_SECONDS", 0.0)
    asked: list[tuple[str, list[int]]] = []

    def ended(job: str, nodes: Sequence[int]) -> dict[int, str]:
        asked.append((job, [*nodes]))
        return {2: "CannotPullContainerError"}

    peers = gang.Peers(paths, Stage.TRAIN, MAIN, stale_seconds=30, start_seconds=600, ended=ended)
    gang.write_progress(paths, Stage.TRAIN, NodeWorld(job_id="job#1", node=1, nodes=3), {})
    peers.poll()
    # Its last word may be on its way.
    assert peers.lost() is None
    lost = peers.lost()
    assert lost is not None
    assert "node 2" in lost.what
    assert "CannotPullContainerError" in str(lost)
    assert asked == [("job", [2])] * 2


def test_a_node_that_said_how_it_ended_is_not_lost(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "ASK_SECONDS", 0.0)
    peers = gang.Peers(
        paths, Stage.TRAIN, MAIN, stale_seconds=30, start_seconds=600, ended=lambda job, nodes: dict.fromkeys(nodes, "")
    )
    assert peers.lost() is None
    for node in (1, 2):
        gang.write_exit(paths, Stage.TRAIN, NodeWorld(job_id=f"job#{node}", node=node, nodes=3), None)
    peers.poll()
    assert peers.lost() is None
    assert peers.running() == []


@pytest.mark.parametrize("left", [b"", b"[]", b'{"exit_code": 76}', b'{"failure": {"what": 1}}'])
def test_a_last_word_that_cannot_be_read_is_named(paths: RunPaths, left: bytes) -> None:
    peers = gang.Peers(paths, Stage.TRAIN, MAIN, stale_seconds=30, start_seconds=600)
    store.write_bytes(paths.node_exit(Stage.TRAIN, MAIN.attempt, 1), left)
    with pytest.raises(BadData, match="NodeExit"):
        peers.poll()


def test_a_sign_of_life_that_cannot_be_read_is_none(paths: RunPaths) -> None:
    peers = gang.Peers(paths, Stage.TRAIN, MAIN, stale_seconds=30, start_seconds=600)
    for left in (b"", b"[]", b'{"job": "job", "attempt": 1, "time": "soon"}'):
        store.write_bytes(paths.progress(Stage.TRAIN, 1), left)
        peers.poll()
        assert peers.absent() == [1, 2]
    gang.write_progress(paths, Stage.TRAIN, NodeWorld(job_id="job#1", node=1, nodes=3), {})
    peers.poll()
    assert peers.absent() == [2]
