"""Heartbeats: what ranks write, and when the watchdog barks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.run import heartbeat
from pipeline.run.heartbeat import Heartbeat, Watchdog


def test_beats_are_thinned_out_but_the_last_one_is_always_written(tmp_path: Path) -> None:
    beat, watchdog = Heartbeat(tmp_path, 3), Watchdog(tmp_path, [3], startup_seconds=9, progress_seconds=9)
    assert watchdog.read(3) == {}
    for step in range(1, 100):
        beat.beat(step, 100, unit="pairs", rate=12.5, note="training")
    assert watchdog.read(3)["done"] == 1
    beat.beat(100, 100)
    assert watchdog.read(3)["done"] == 100


def test_without_a_supervisor_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Heartbeat(None, 0).beat(1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_has_longer_for_its_first_heartbeat_than_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.0)
    watchdog = Watchdog(tmp_path, [0, 1], startup_seconds=60, progress_seconds=10)
    quick = Heartbeat(tmp_path, 0)
    quick.beat(note="loading")
    assert watchdog.stalls([0, 1]) == []
    moment += 30
    stalls = watchdog.stalls([0, 1])
    assert [(stall.rank, stall.deadline, stall.last) for stall in stalls] == [(0, 10, "loading")]
    quick.beat(1, 2)
    assert watchdog.stalls([0, 1]) == []
    moment += 40
    assert [(stall.rank, stall.deadline) for stall in watchdog.stalls([0, 1])] == [(1, 60), (0, 10)]
    # A rank that has ended owes no heartbeat.
    assert [stall.rank for stall in watchdog.stalls([1])] == [1]


def test_a_rank_that_compiles_is_given_the_time_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    watchdog = Watchdog(tmp_path, [0], startup_seconds=60, progress_seconds=10, patience_seconds=500)
    rank = Heartbeat(tmp_path, 0)
    rank.beat(1, 9, note="training")
    # Half a second has not passed, and still the wish is written, and so is its end.
    rank.beat(2, 9, note="compiling", patience=100)
    assert watchdog.stalls([0]) == []
    moment += 90
    assert watchdog.stalls([0]) == []
    moment += 20
    assert [(stall.deadline, stall.last) for stall in watchdog.stalls([0])] == [(100, "compiling")]
    rank.beat(note="compiling", patience=10_000)
    assert watchdog.stalls([0]) == []
    moment += 501
    assert [stall.deadline for stall in watchdog.stalls([0])] == [500]
    rank.beat(3, 9, note="compiled", patience=1)
    rank.beat(4, 9, note="training")
    assert watchdog.stalls([0]) == []
    moment += 11
    assert [(stall.deadline, stall.last) for stall in watchdog.stalls([0])] == [(10, "training")]
