"""Selection: the same rows whatever the groups and files, exact numbers of replayed rows, and memory that does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract import seen_uri
from pipeline.dataset import selection
from pipeline.dataset.ingested import (
    PAIRS,
    SCHEMA_VERSION,
    SLICES,
    IngestedShard,
    Profile,
    ingested_rows_uri,
    slice_rows,
    write_profile,
)
from pipeline.dataset.seen import KEYS, RECORD, VERSIONS, SeenRecord, SeenRows
from pipeline.dataset.selection import HashedRows, Selection, groups, holdout_slices, pieces, select
from pipeline.run_inputs import InputShard

Pair = tuple[int, int]
"""Key and version of a row."""


def version(identity: int, label: int = 1, positive: bool = True) -> int:
    return identity << 16 | label << 1 | positive


def make_shard(root: Path, name: str, rows: Sequence[Pair], *, modified: float = 0.0, files: int = 1) -> IngestedShard:
    """A shard of which there are only the hashes, in the order of the rows."""
    shard = InputShard(uri=name, version="1", size=1, modified=modified, kind=PAIRS, rows=name, tokens=name)
    local = root / f"local-{name}"
    local.mkdir()
    described = []
    for number, found in enumerate(np.array_split(np.array(rows, np.uint64).reshape(-1, 2), files)):
        found = found[np.argsort(found[:, 0], kind="stable")]
        (local / f"hashes-{number:05d}.bin").write_bytes(np.ascontiguousarray(found[:, 1]).tobytes())
        described.append({"rows": len(found), "slices": slice_rows(found[:, 0]), "facts": (), "texts": ()})
    facts: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "uri": name, "version": "1", "size": 1, "sha256": name}
    profile = Profile(**facts, kind=PAIRS, rows=len(rows), bad_rows=0, files=described, sizes={})  # type: ignore[arg-type]
    write_profile(local, ingested_rows_uri(str(root), name), profile)
    return IngestedShard(str(root), shard)


def make_seen(root: Path, run: str, rows: Sequence[Pair]) -> None:
    folder = Path(seen_uri(str(root), run))
    folder.mkdir(parents=True)
    found = np.array(sorted(rows), np.uint64).reshape(-1, 2)
    for name, column in ((KEYS, 0), (VERSIONS, 1)):
        (folder / name).write_bytes(np.ascontiguousarray(found[:, column]).tobytes())
    known: dict[str, Any] = {"run": run, "lineage": (run,), "identity": {}, "shards": (), "rows": len(rows), "steps": 1}
    record = SeenRecord(**known, holdout_by="document", slices=slice_rows(found[:, 0]))
    (folder / RECORD).write_text(record.model_dump_json())


def rows_of(root: Path, shards: Sequence[IngestedShard], seen: Sequence[str] = (), max_repeats: int = 1) -> HashedRows:
    return HashedRows(shards, SeenRows(str(root), seen, "document"), max_repeats, Path(tempfile.mkdtemp(dir=root)))


def chosen(rows: HashedRows, found: Selection) -> list[tuple[int, int, int, bool]]:
    """Shard, file, row and whether it is seen, of every row to train on."""
    parts = [found.choose(rows.read(first, last)) for first, last in groups(rows.per_slice, 0, SLICES)]
    columns = [np.concatenate([getattr(part, name) for part in parts]).tolist() for name in ("shard", "file", "row", "seen")]
    return sorted(zip(*columns, strict=True))


def random_rows(count: int, seed: int) -> list[Pair]:
    random = np.random.default_rng(seed)
    keys = random.integers(0, 1 << 64, count, np.uint64).tolist()
    return [(key, version(int(random.integers(0, 1 << 47)), positive=bool(random.random() < 0.9))) for key in keys]


SETTINGS: dict[str, Any] = {"holdout_fraction": 0.1, "replay_fraction": 0.3, "seed": 1, "new_shards": ["b"], "beat": id}


def test_groups_and_files_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = random_rows(3000, 0), random_rows(1000, 1)
    make_seen(tmp_path, "one", old)
    one = [make_shard(tmp_path, "a", old), make_shard(tmp_path, "b", [*new, *old[:500]], modified=1)]
    rows = rows_of(tmp_path, one, ["one"])
    found = select(rows, **SETTINGS)
    everything = chosen(rows, found)

    held = holdout_slices(0.1)
    expected = sum(key * SLICES >> 64 >= held and found & 1 for key, found in new)
    assert found.new.sum() == sum(not seen for *_, seen in everything) == expected
    assert found.replay.sum() == sum(seen for *_, seen in everything) == -(-expected * 3 // 10)
    assert not found.new[:held].any()
    assert not found.replay[:held].any()
    # What is replayed is in few slices next to each other, wrapping around.
    taken = np.flatnonzero(found.replay)
    assert max(np.diff(np.concatenate([taken, taken[:1] + SLICES - held]))) > SLICES - held - 2 * len(taken)

    monkeypatch.setattr(selection, "GROUP_ROWS", 50)
    assert len(list(groups(rows.per_slice, 0, SLICES, 50))) > 50
    again = select(rows, **SETTINGS)
    assert np.array_equal(again.replay, found.replay)
    assert chosen(rows, again) == everything
    files = [make_shard(tmp_path, "c", old, files=3), make_shard(tmp_path, "d", [*new, *old[:500]], modified=1, files=2)]
    other = rows_of(tmp_path, files, ["one"])
    there = chosen(other, select(other, **SETTINGS))
    assert sorted((shard, seen) for shard, _, _, seen in there) == sorted((shard, seen) for shard, _, _, seen in everything)
    elsewhere = select(rows, **{**SETTINGS, "new_shards": ["c"]})
    assert elsewhere.replay.sum() == found.replay.sum()
    assert not np.array_equal(elsewhere.replay, found.replay)


def test_without_new_rows_a_share_of_the_seen_ones_is_replayed(tmp_path: Path) -> None:
    old = random_rows(1000, 0)
    make_seen(tmp_path, "one", old)
    rows = rows_of(tmp_path, [make_shard(tmp_path, "a", old)], ["one"])
    whole = select(rows, **{**SETTINGS, "replay_fraction": 100.0})
    assert select(rows, **SETTINGS).rows == -(-whole.rows * 3 // 10)
    assert whole.rows == sum(key * SLICES >> 64 >= holdout_slices(0.1) and found & 1 for key, found in old)


def test_the_newest_of_equal_identities_counts(tmp_path: Path) -> None:
    key = 1 << 63
    shards = [
        make_shard(tmp_path, "newest", [(key, version(1, 5)), (key, version(2, 5)), (key, version(2, 6))], modified=9),
        make_shard(tmp_path, "oldest", [(key, version(1, 4)), (key, version(2, 6)), (key, version(3, 1))], modified=1),
        make_shard(tmp_path, "middle", [(key, version(1, 3, positive=False)), (key, version(3, 1))], modified=5),
    ]
    group = rows_of(tmp_path, shards, max_repeats=9).read(0, SLICES)
    found = sorted(zip(group.versions.tolist(), group.repeat.tolist(), group.shard.tolist(), group.row.tolist(), strict=True))
    assert found == [
        (version(1, 5), 1, 0, 0),
        (version(2, 6), 1, 0, 2),  # the later line of its file
        (version(2, 6), 2, 1, 1),
        (version(3, 1), 1, 2, 1),
        (version(3, 1), 2, 1, 2),
    ]
    assert len(rows_of(tmp_path, shards).read(0, SLICES)) == 3


def test_pieces_are_what_one_request_returns() -> None:
    row = np.array([4000, 4095, 4096, 5, 1029, 2054, 6], np.int64)
    shard, file = np.array([0, 0, 0, 0, 0, 0, 2]), np.array([0, 0, 0, 1, 1, 1, 1])
    found = [(shard, file, rows.tolist(), places.tolist()) for shard, file, rows, places in pieces(shard, file, row)]
    first, second = [(0, 0, [4000, 4095], [0, 1]), (0, 0, [4096], [2])], [(0, 1, [5, 1029], [3, 4]), (0, 1, [2054], [5])]
    assert found == [*first, *second, (2, 1, [6], [6])]
    nothing = np.empty(0, np.int64)
    assert list(pieces(nothing, nothing, nothing)) == []


PROGRAM = """
import sys
from pathlib import Path
from pipeline.dataset import selection
from tests.pipeline.dataset import test_selection as own
selection.GROUP_ROWS = 1 << 15
root = Path(sys.argv[1])
names = sys.argv[2].split(",")
shards = [own.IngestedShard(str(root), own.InputShard(uri=n, version="1", size=1, kind="pairs", rows=n, tokens=n)) for n in names]
rows = own.rows_of(root, shards, ["one"])
found = own.select(rows, **own.SETTINGS)
for first, last in own.groups(rows.per_slice, 0, own.SLICES):
    found.choose(rows.read(first, last))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_history(tmp_path: Path) -> None:
    """Between a million rows and 200,000 is less than one array of their hashes."""
    random = np.random.default_rng(0)
    pairs = random.integers(0, 1 << 63, (1_000_000, 2), np.uint64) << np.uint64(1) | np.uint64(1)
    names = [f"shard-{number}" for number in range(10)]
    for name, part in zip(names, np.array_split(pairs, 10), strict=True):
        make_shard(tmp_path, name, part)  # type: ignore[arg-type]
    make_seen(tmp_path, "one", pairs[:100_000].tolist())

    def peak(used: Sequence[str]) -> int:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), ",".join(used)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return 1024 * int(done.stdout)

    assert peak(names) - peak(names[:2]) < 8 * 800_000
