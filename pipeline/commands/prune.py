"""`trnpipe registry prune`: which runs' folders nothing needs any more, and their removal.

Needed are: what the registry's pointers name, with the runs that hold parts of these embeddings; what was replaced a short time
ago, as readers may still be at it; the references; and every run that was written to a short time ago. The rows that a run was
trained on are recorded outside of its folder, and stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from rich.table import Table

from pipeline import store
from pipeline.commands.terminal import left, right, simple_table
from pipeline.errors import MissingInput
from pipeline.evaluation.reference import read_reference
from pipeline.run.registry import publications, read_pointer

DAY = 86_400
GB = 1e9


@dataclass(frozen=True, slots=True)
class OldRun:
    """A run that nothing needs: its folder, how many bytes that holds, and when it was last written to."""

    folder: str
    size: int
    written: float


def find(root: str, keep_days: int) -> list[OldRun]:
    """Return the runs of a bucket that can be removed.

    Args:
        keep_days: for so long after its replacement what was published stays, and a run after its last file.

    Raises:
        BadData: what the registry names cannot be read: then nothing can be removed.
    """
    needed = {run for name in _names(root) for run in _needed(root, name, keep_days)}
    sizes: dict[str, int] = {}
    written: dict[str, float] = {}
    for info in store.list_objects(store.join(root, "runs")):
        run = info.uri.removeprefix(store.join(root, "runs")).strip("/").split("/")[0]
        sizes[run] = sizes.get(run, 0) + info.size
        written[run] = max(written.get(run, 0.0), info.modified)
    limit = time.time() - keep_days * DAY
    old = sorted(run for run in sizes if run not in needed and written[run] < limit)
    return [OldRun(store.join(root, "runs", run), sizes[run], written[run]) for run in old]


def _names(root: str) -> set[str]:
    """Return all names under which anything is published."""
    found = (info.uri.split("/")[-2:] for info in store.list_objects(store.join(root, "registry")))
    return {name.removesuffix(".json") for folder, name in found if folder == "registry" and name.count(".") == 1}


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
        try:
            # A local run's files are named as its endpoint has them.
            parts = store.read_json(store.join(root, "runs", _below_runs(record["embeddings"])))["parts"]
        except MissingInput:
            continue  # removed already, by hand
        yield from (_below_runs(part["uri"]).split("/")[0] for part in parts)


def _below_runs(uri: str) -> str:
    return uri.rsplit("/runs/", 1)[-1]


def table(runs: list[OldRun]) -> Table:
    """Return them as a table."""
    shown = simple_table(left("run"), right("GB"), left("last written"))
    for run in runs:
        moment = datetime.fromtimestamp(run.written, timezone.utc)
        shown.add_row(run.folder.rsplit("/", 1)[-1], f"{run.size / GB:,.3f}", f"{moment:%Y-%m-%d %H:%M}")
    return shown


def remove(runs: list[OldRun]) -> str:
    """Remove the folders; return in words what was removed."""
    for run in runs:
        store.delete_folder(run.folder)
    return f"{len(runs)} runs removed, {sum(run.size for run in runs) / GB:,.3f} GB"
