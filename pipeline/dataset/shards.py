"""Find the input files under the configured URIs."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import store
from pipeline.dataset.records import SUFFIXES, is_shard
from pipeline.errors import BadConfig, MissingInput
from pipeline.log import log


def find_shards(uris: Sequence[str], setting: str) -> list[store.ObjectInfo]:
    """Return the shards that URIs of files and folders name, each once, sorted by URI.

    In folders it skips (and logs) other kinds of files, and names that begin with `_` or `.`, as those of work in progress do.

    Args:
        setting: the configuration key the URIs come from, for messages.

    Raises:
        MissingInput: a URI names nothing, or a folder without a shard.
        BadConfig: a URI names a file that is not a shard.
    """
    found: dict[str, store.ObjectInfo] = {}
    for uri in uris:
        info = None if uri.endswith("/") else store.stat(uri)
        if info is not None and not is_shard(uri):
            raise BadConfig(
                "unknown kind of input file", value=f"{setting}: {uri}", rule=f"a shard's name ends in one of {SUFFIXES}"
            )
        shards = [info] if info is not None else _shards_of_folder(uri)
        if not shards:
            raise MissingInput(
                "no shard found",
                value=f"{setting}: {uri}",
                rule=f"a file, or a folder of files, whose names end in one of {', '.join(SUFFIXES)}",
                remedy="check the URI and that the data was uploaded",
            )
        found.update((shard.uri, shard) for shard in shards)
    return [found[uri] for uri in sorted(found)]


def _shards_of_folder(uri: str) -> list[store.ObjectInfo]:
    root = uri.removeprefix("file://").rstrip("/")
    finished = [
        info
        for info in store.list_objects(uri)
        if not any(part.startswith(("_", ".")) for part in info.uri.removeprefix(root).strip("/").split("/"))
    ]
    if others := [info.uri for info in finished if not is_shard(info.uri)]:
        log.warning("skipped %d files under %s that are not shards, e.g. %s", len(others), uri, others[0])
    return [info for info in finished if is_shard(info.uri)]
