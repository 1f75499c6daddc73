"""`trnpipe registry prune`: which folders of runs and of ingested shards nothing needs any more, and their removal.

Needed are: what the registry's pointers name, with the runs that hold parts of these embeddings; what was replaced a short time
ago, as readers may still be at it; the references; and every run that was written to a short time ago. The rows that a run was
trained on are recorded outside of its folder, and stay. Of the ingested shards those stay which the last weekly run, the last
refresh or a young run has listed, and young ones: what a file held before it was rewritten or removed goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from operator import attrgetter

from rich.table import Table

from pipeline import store
from pipeline.commands.terminal import left, right, simple_table
from pipeline.contract import RunPaths
from pipeline.errors import MissingInput
from pipeline.evaluation.reference import read_reference
from pipeline.run.registry import publications, read_pointer

GB = 1e9


@dataclass(frozen=True, slots=True)
class OldFolder:
    """A folder that nothing needs: how many bytes it holds, and when it was last written to."""

    folder: str
    size: int
    written: float


def find(root: str, keep_days: int) -> list[OldFolder]:
    """Return the runs of a bucket, and the ingested shards, that can be removed.

    Args:
        keep_days: for so long after its replacement what was published stays, and a folder after its last file.

    Raises:
        BadData: what the registry names cannot be read: then nothing can be removed.
    """
    limit = (datetime.now(timezone.utc) - timedelta(days=keep_days)).timestamp()
    # NAME.json is a pointer; next to it are NAME.reference.json, and the folder NAME.
    names = [file.removesuffix(".json") for file in _folders(root, "registry") if file.count(".") == 1]
    needed = {run for name in names for run in _needed(root, name, keep_days)}
    runs = _folders(root, "runs")
    old = [run for name, run in runs.items() if name not in needed and run.written < limit]
    recent = [*_newest(runs).values(), *(run for run in runs.values() if run.written >= limit)]
    listed = {shard.get("rows") for run in recent for shard in _shards(run.folder)}
    ingested = [found for kind in ("ingested/rows", "ingested/tokens", "mined") for found in _folders(root, kind).items()]
    return old + [shard for rows, shard in ingested if rows not in listed and shard.written < limit]


def _folders(root: str, parent: str) -> dict[str, OldFolder]:
    """Return the folders and files in a folder by name, in the order of their names."""
    found: dict[str, OldFolder] = {}
    for info in store.list_objects(store.join(root, parent)):
        name = info.uri.removeprefix(store.join(root, parent)).strip("/").split("/")[0]
        before = found.get(name, OldFolder(store.join(root, parent, name), 0, 0.0))
        found[name] = OldFolder(before.folder, before.size + info.size, max(before.written, info.modified))
    return dict(sorted(found.items()))


def _newest(runs: dict[str, OldFolder]) -> dict[tuple[str | None, str], OldFolder]:
    """Return the run of each registry name and mode that was written to last."""
    found: dict[tuple[str | None, str], OldFolder] = {}
    for run in sorted(runs.values(), key=attrgetter("written")):
        with suppress(MissingInput):
            config = store.read_json(RunPaths(run.folder).inputs)["config"]
            found[config["registry"], config.get("mode", "train")] = run
    return found


def _shards(run: str) -> Iterator[dict[str, str]]:
    """Yield the shards that a run has listed."""
    for uri in (RunPaths(run).inputs, RunPaths(run).corpus):
        with suppress(MissingInput):
            yield from store.read_json(uri)["shards"]


def _needed(root: str, name: str, keep_days: int) -> Iterator[str]:
    pointer, reference = read_pointer(root, name), read_reference(root, name)
    if reference:
        yield reference
    if pointer is None:
        return
    limit = (datetime.now(timezone.utc) - timedelta(days=keep_days)).isoformat()
    readable, replaced = [dict(pointer.content)], ""
    for record in publications(root, name):
        if replaced >= limit:
            readable.append(record)
        replaced = record["published"]
    for record in readable:
        yield from (record["run"], record.get("embeddings_run", record["run"]))
        with suppress(MissingInput):  # removed already, by hand
            # A local run's files are named as its endpoint has them.
            parts = store.read_json(store.join(root, "runs", _below_runs(record["embeddings"])))["parts"]
            yield from (_below_runs(part["uri"]).split("/")[0] for part in parts)


def _below_runs(uri: str) -> str:
    return uri.rsplit("/runs/", 1)[-1]


def table(folders: list[OldFolder]) -> Table:
    """Return them as a table."""
    shown = simple_table(left("folder"), right("GB"), left("last written"))
    for one in folders:
        shown.add_row(
            "/".join(one.folder.split("/")[-2:]),
            f"{one.size / GB:,.3f}",
            f"{datetime.fromtimestamp(one.written, timezone.utc):%Y-%m-%d %H:%M}",
        )
    return shown


def remove(folders: list[OldFolder]) -> str:
    """Remove the folders; return in words what was removed."""
    for one in folders:
        store.delete_folder(one.folder)
    return f"{len(folders)} folders removed, {sum(one.size for one in folders) / GB:,.3f} GB"
