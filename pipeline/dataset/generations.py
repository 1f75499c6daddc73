"""List the corpus as `data.corpus_mode` reads it: which files count, and which replace the documents of which."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import store
from pipeline.dataset.shards import find_shards
from pipeline.errors import MissingInput
from pipeline.log import log

SETTING = "data.corpus"
MARKER = "_SUCCESS"
"""Empty file that Spark and Hadoop write into a folder when it is complete."""


def list_corpus(uris: Sequence[str], mode: str) -> list[tuple[store.ObjectInfo, int]]:
    """Return the corpus shards and the generation of each, sorted by URI.

    Args:
        mode: `files`: all of them, one generation; `snapshots`: those of the newest complete folder below each URI;
            `deltas`: all of them, every file or folder below a URI a generation of its own, in the order of their names.

    Raises:
        MissingInput: nothing is there, or no complete snapshot.
        BadConfig: a URI names a file that is not a shard.
    """
    if mode == "snapshots":
        uris = [_newest_snapshot(uri) for uri in uris]
    shards = find_shards(uris, SETTING)
    if mode != "deltas":
        return [(shard, 0) for shard in shards]
    names = [max((_below(shard.uri, uri) for uri in uris), key=len) for shard in shards]
    order = {name: number for number, name in enumerate(sorted(set(names)))}
    return [(shard, order[name]) for shard, name in zip(shards, names, strict=True)]


def _newest_snapshot(uri: str) -> str:
    found = [info.uri for info in store.list_objects(uri)]
    folders = {_below(one, uri) for one in found if "/" in one.removeprefix(_root(uri)).lstrip("/")}
    if not (complete := {folder for folder in folders if f"{_root(uri)}/{folder}/{MARKER}" in found}):
        raise MissingInput(
            "no snapshot of the corpus is complete",
            value=[f"{SETTING}: {uri}", *sorted(folders)[-3:]],
            rule=f"data.corpus_mode = snapshots: a folder below the URI is complete when it holds an empty file {MARKER}",
            remedy=f"write {MARKER} into the folder when all of its files are there, or set data.corpus_mode=files",
        )
    newest = max(complete)
    if later := sorted(folder for folder in folders - complete if folder > newest):
        log.warning("corpus: using snapshot %s; %s has no %s yet", newest, later[-1], MARKER)
    return f"{_root(uri)}/{newest}/"


def _root(uri: str) -> str:
    return uri.removeprefix("file://").rstrip("/")


def _below(uri: str, folder: str) -> str:
    """Return the first part of a URI's path below a folder; the file's own name where the URI is the file itself."""
    root = _root(folder)
    if uri == root:
        return uri.rsplit("/", 1)[-1]
    return uri[len(root) + 1 :].split("/")[0] if uri.startswith(f"{root}/") else ""
