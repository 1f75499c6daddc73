"""The registry's pointer, `registry/NAME.json`: the model and the embeddings that were published last under a name."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipeline import store
from pipeline.contract import RUN_ID_PATTERN, registry_uri
from pipeline.errors import BadData


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of the pointer.

    Attributes:
        model: URI of the model folder.
        embeddings: URI of the manifest of the embeddings.
        run: the run that made both.
        etag: version of the pointer.
    """

    model: str
    embeddings: str
    run: str
    etag: str


def read_pointer(bucket_root: str, name: str) -> Pointer | None:
    """Return the pointer of a registry name, None where nothing was published under it.

    Raises:
        BadData: the pointer cannot be read.
    """
    uri = registry_uri(bucket_root, name)
    if not store.exists(uri):
        return None
    data, etag = store.read_versioned(uri)
    try:
        found = json.loads(data)
        if not RUN_ID_PATTERN.fullmatch(found["run"]):
            raise ValueError(f"run = {found['run']!r}")
        return Pointer(model=str(found["model"]), embeddings=str(found["embeddings"]), run=found["run"], etag=etag)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadData(
            "the registry's pointer cannot be read",
            value=f"{uri}: {error!r}",
            rule="{model, embeddings, run}, written by publish",
            remedy="restore an earlier version of it",
        ) from error
