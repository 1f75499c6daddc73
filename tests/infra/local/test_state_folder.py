"""The state folder: whose it is, how long a run holds it, and which ones a run refuses."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from infra.local.state_folder import INPUT_COPIES, MODEL_COPIES, STAMP, check_space, check_state_folder, owned
from pipeline.errors import BadConfig


def test_the_state_folder_is_its_users_alone(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        with owned(tmp_path / "state"), owned(tmp_path / "shared"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755


def test_one_run_at_a_time_has_the_state_folder(tmp_path: Path) -> None:
    with owned(tmp_path), pytest.raises(BadConfig, match="another local run has this state folder open"), owned(tmp_path):
        pass
    with owned(tmp_path):
        check_state_folder(tmp_path)


def test_a_run_leaves_a_stamp_by_which_later_versions_know_the_layout(tmp_path: Path) -> None:
    with owned(tmp_path / "state"):
        (tmp_path / "state/bucket").mkdir()
    check_state_folder(tmp_path / "state")
    (tmp_path / "state" / STAMP).unlink()
    with pytest.raises(BadConfig, match="another version"):
        check_state_folder(tmp_path / "state")


@pytest.mark.parametrize("where", ["given", "given/model.safetensors", None])
def test_the_space_that_a_run_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | None) -> None:
    """The model's largest file counts, wherever it is: a folder, a file, or published in the state folder."""
    shard, state = tmp_path / "rows.jsonl", tmp_path / "state"
    shard.write_bytes(b"x" * 1000)
    weights = tmp_path / (where or "state/bucket/runs/first/model")
    weights = weights if weights.suffix else weights / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"x" * 5000)
    usage = shutil.disk_usage(tmp_path)
    needed = INPUT_COPIES * 1000 + MODEL_COPIES * 5000
    model = None if where is None else tmp_path / where
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    check_space(state, [shard], model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(BadConfig, match="not enough space"):
        check_space(state, [shard], model)
