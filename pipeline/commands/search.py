"""`trnpipe search`: embed a query with the published model and compare it with every published embedding.

Exact and simple, to judge a run by hand; a service would load the parts into an index. Reads the registry's pointer, the
manifest, the parts one after another, and the texts of the best documents from the corpus shards. Loads torch and pyarrow only
once it has found something to search in.
"""

from __future__ import annotations

import heapq
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.contract import RunPaths, check_registry, registry_uri
from pipeline.errors import BadConfig, BadData, MissingInput, StorageRefused
from pipeline.plan import RunPlan
from pipeline.run.find_run import mirrored
from pipeline.run.registry import read_pointer
from pipeline.run.world import World

log = logging.getLogger("trnpipe")


@dataclass(frozen=True, slots=True)
class Hit:
    """A document, its inner product with the query, and its text (empty if its shard is gone)."""

    id: str
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """Location of an embedding: part and row in it, which the plan maps to a corpus shard's row."""

    score: float
    part: int
    row: int
    id: str


def search(
    query: str, *, bucket: str | None = None, state: Path = Path(".trnpipe"), registry: str = "current", count: int = 5
) -> list[Hit]:
    """Return the best documents for a query, best first.

    Args:
        query: any text.
        bucket: `s3://BUCKET` of a deployment; None: the local run's bucket, as files in `state`.
        state: folder of the local run.
        registry: name under which the run published the embeddings.
        count: the most documents to return.

    Raises:
        BadConfig: an empty query, or an invalid registry name.
        MissingInput: nothing is published under this name.
    """
    if not query.strip():
        raise BadConfig("the query is empty", rule="a query has at least one word")
    bucket_root = bucket.rstrip("/") if bucket else str(state / "bucket")
    pointer = read_pointer(bucket_root, check_registry(registry))
    if pointer is None:
        raise MissingInput(
            "nothing is published under this name",
            value=registry_uri(bucket_root, registry),
            rule="search reads the embeddings of the last published run",
            remedy="run `make local` first, or name the right --state, --bucket or --registry",
        )
    # Files of a local run name the bucket that its state folder mirrors.
    mirror = None if bucket else bucket_root
    allowed = AllowedUris(own=bucket_root)
    published, embeddings = mirrored(pointer.model, mirror), mirrored(pointer.embeddings, mirror)
    allowed.check((("the registry's model", published), ("the registry's embeddings", embeddings)), BadData)
    parts = read_parts(embeddings, mirror)
    allowed.check((("a part", part.uri) for part in parts), BadData)
    plan = RunPlan.from_json(store.read_bytes(RunPaths(store.join(bucket_root, "runs", pointer.run)).plan))
    with tempfile.TemporaryDirectory(prefix="trnpipe-search-") as scratch:
        model = store.local_folder(published, Path(scratch) / "model")
        vector = embed_query(query, model, plan)
        best = best_places(vector, parts, Path(scratch), count)
    return [Hit(place.id, place.score, read_text(place, plan, mirror, parts[place.part].quarantined)) for place in best]


@dataclass(frozen=True, slots=True)
class Part:
    """A part in the manifest of the embeddings.

    Attributes:
        uri: readable from here.
        quarantined: number of its documents without an embedding, which it leaves out.
    """

    uri: str
    quarantined: int


def read_parts(uri: str, mirror: str | None) -> list[Part]:
    """Return the parts in a manifest of embeddings.

    Args:
        mirror: see `mirrored`.

    Raises:
        BadData: not a manifest.
    """
    try:
        parts = json.loads(store.read_bytes(uri))["parts"]
        return [Part(mirrored(str(part["uri"]), mirror), int(part.get("quarantined", 0))) for part in parts]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadData("the manifest of the embeddings cannot be read", value=f"{uri}: {error!r}") from error


def embed_query(query: str, model: Path, plan: RunPlan) -> npt.NDArray[np.float32]:
    """Return the query's embedding, (D,), computed on the host's processor; the query is cut to the length of training."""
    from pipeline.backends.device import open_device
    from pipeline.dataset.tokens import TextTokenizer
    from pipeline.model.folder import load_encoder
    from pipeline.model.inference import encode

    device = open_device("cpu", "fp32", World())
    encoder = device.place(load_encoder(model, plan.config.model))
    length = plan.config.train.query_length
    tokens = TextTokenizer(model).encode([query.strip()], length)
    vector: npt.NDArray[np.float32] = encode(encoder, device, tokens, (length,), length).embeddings[0].numpy()
    return vector


def best_places(vector: npt.NDArray[np.float32], parts: Sequence[Part], scratch: Path, count: int) -> list[Place]:
    """Return the embeddings with the largest inner product, best first. Downloads one part at a time.

    Args:
        vector: (D,).
    """
    from pipeline.dataset.parts import read_part

    best: list[Place] = []
    for index, part in enumerate(parts):
        path = store.local_file(part.uri, scratch)
        start = 0
        for ids, embeddings in read_part(path):
            scores = embeddings.astype(np.float32, copy=False) @ vector
            rows = np.argsort(-scores, kind="stable")[:count].tolist()
            found = (Place(float(scores[row]), index, start + row, ids[row]) for row in rows)
            best = heapq.nlargest(count, chain(best, found), key=lambda place: place.score)
            start += len(ids)
        if store.is_s3(part.uri):
            path.unlink()
    return best


def read_text(place: Place, plan: RunPlan, mirror: str | None, skipped: int = 0) -> str:
    """Return a document's text from its shard, empty if the shard is gone or has changed.

    Args:
        skipped: documents of the part without an embedding: the text may be this many rows further down.
    """
    from pipeline.dataset.rows import read_documents

    first, last = place.row, place.row + skipped
    for span in plan.embed.parts[place.part].spans:
        rows = span.stop - span.start
        if first < rows:
            shard = plan.embed.shards[span.shard]
            shard = shard.model_copy(update={"uri": mirrored(shard.uri, mirror)})
            start, stop = span.start + max(first, 0), span.start + min(last + 1, rows)
            try:
                for identifier, text in read_documents(shard, plan.embed.source, plan.config.data.columns, start, stop):
                    if identifier == place.id:
                        return text
            except (MissingInput, StorageRefused, BadData) as error:
                log.warning("the text of %s cannot be read: %s", place.id, error.what)
                return ""
        first, last = first - rows, last - rows
        if last < 0:
            break
    log.warning("the shard no longer has the text of %s", place.id)
    return ""
