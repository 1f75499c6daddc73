"""The registry: `registry/NAME.json` points at the model and the embeddings that are published under a name.

Several write it: a run that publishes its model, refreshes of the embeddings, rollbacks, and people who hold models. Each write
replaces exactly what its writer has read, and each writer says what must still be so. `registry/NAME/` keeps every publication,
next to the history of all runs (pipeline/stages/history).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline import store
from pipeline.contract import RUN_ID_PATTERN, registry_uri
from pipeline.errors import BadData, MissingInput, Transient

MOST_WRITES = 20
"""Writers are few: a run, a refresh, a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of the pointer.

    Attributes:
        model: URI of the model folder.
        run: the run that made the model.
        embeddings: URI of the manifest of the embeddings.
        embeddings_run: the run that made them: the same one, or a refresh.
        corpus: when their documents were listed, ISO 8601 in UTC; empty: unknown.
        epoch: is raised by a rollback and by a hold; a run publishes its model only in the epoch in which it began.
        held: since when models are held, empty: they are not.
        etag: version of the pointer.
        content: all of it.
    """

    model: str
    run: str
    embeddings: str
    embeddings_run: str
    corpus: str
    epoch: int
    held: str
    etag: str
    content: Mapping[str, Any]


def read_pointer(bucket_root: str, name: str) -> Pointer | None:
    """Return the pointer of a registry name, None where nothing was published under it.

    Raises:
        BadData: the pointer cannot be read.
    """
    uri = registry_uri(bucket_root, name)
    try:
        data, etag = store.read_versioned(uri)
    except MissingInput:
        return None
    try:
        found = json.loads(data)
        runs = found["run"], found.get("embeddings_run", found["run"])
        if not all(RUN_ID_PATTERN.fullmatch(run) for run in runs):
            raise ValueError(f"run, embeddings_run = {runs}")
        return Pointer(
            model=str(found["model"]),
            run=runs[0],
            embeddings=str(found["embeddings"]),
            embeddings_run=runs[1],
            corpus=str(found.get("corpus", "")),
            epoch=int(found.get("epoch", 0)),
            held=str(found.get("held", "")),
            etag=etag,
            content=found,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadData(
            "the registry's pointer cannot be read",
            value=f"{uri}: {error!r}",
            rule="{model, embeddings, run}, written by publish",
            remedy="restore an earlier version of it",
        ) from error


def change_pointer(
    bucket_root: str, name: str, change: Callable[[Pointer | None], Mapping[str, Any] | None]
) -> Mapping[str, Any] | None:
    """Replace the pointer by what `change` makes of it; asks again where another writer was faster.

    Args:
        change: returns the new content, None to leave the pointer as it is; or raises.

    Returns:
        The content that is there.

    Raises:
        Transient: others kept on writing it.
    """
    uri = registry_uri(bucket_root, name)
    for _ in range(MOST_WRITES):
        pointer = read_pointer(bucket_root, name)
        if (content := change(pointer)) is None:
            return pointer.content if pointer else None
        condition: dict[str, Any] = {"if_match": pointer.etag} if pointer else {"if_absent": True}
        with suppress(store.Conflict):
            store.write_json(uri, content, **condition)
            return content
    raise Transient("others keep writing the registry's pointer", value=uri, remedy="try again later")


def keep_publication(bucket_root: str, name: str, record: Mapping[str, Any]) -> None:
    """Add a publication to those that the registry keeps.

    Args:
        record: what the pointer says, with figures for people.
    """
    moment = str(record["published"]).replace(":", "").replace("+0000", "Z")
    store.write_json(f"{_publications_uri(bucket_root, name)}/{moment}-{record['embeddings_run']}.json", dict(record))


def publications(bucket_root: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield what was published under a name, the newest first, as `keep_publication` got it."""
    for uri in sorted((info.uri for info in store.list_objects(_publications_uri(bucket_root, name))), reverse=True):
        # The history of runs is in the same folder: a page, and records in a folder below.
        if uri.endswith(".json") and uri.split("/")[-3:-1] == ["registry", name]:
            yield store.read_json(uri)


def _publications_uri(bucket_root: str, name: str) -> str:
    return f"{bucket_root.rstrip('/')}/registry/{name}"
