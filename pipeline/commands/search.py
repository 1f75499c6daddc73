"""`trnpipe search`: embed queries with the published model and compare them with every published embedding.

Exact, to judge a run by hand; a service would load the parts into an index. Reads the registry's pointer, the manifest and the
parts once, into a matrix that later searches map into memory, and the texts of hits from the ingested shards.
Loads torch and pyarrow only once it has found something to search in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.contract import RunPaths, check_registry, registry_uri
from pipeline.errors import BadConfig, BadData, MissingInput, StorageRefused, one_line, plain
from pipeline.files import replacing
from pipeline.log import log
from pipeline.plan import EmbedPlan, RunPlan
from pipeline.run.find_run import mirrored, read_plan
from pipeline.run.registry import read_pointer
from pipeline.run.world import World

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from pipeline.dataset.corpus import CorpusReader

MATRIX, DOCUMENTS = "embeddings.npy", "documents.arrow"

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A document, its inner product with the query, its locale (None if its row has none), and its text (empty if unreadable)."""

    query: str
    id: str
    score: float
    locale: str | None
    text: str


Search = Callable[[str, int], list[Hit]]


def check_query(query: str) -> str:
    """Return a query without the white space around it.

    Raises:
        BadConfig: it is empty.
    """
    if not query.strip():
        raise BadConfig("the query is empty", rule="a query has at least one word")
    return query.strip()


def open_search(
    *, bucket: str | None = None, state: Path = Path(".trnpipe"), registry: str = "current", locale: str | None = None
) -> Search:
    """Open what is published; the first call for a run copies its embeddings into the cache folder.

    Args:
        bucket: `s3://BUCKET` of a deployment; None: the local run's bucket, as files in `state`.
        state: folder of the local run.
        registry: name under which the run published the embeddings.
        locale: search only the documents of this locale.

    Returns:
        A function that returns the best documents for a query, best first, and at most as many as its second argument says.

    Raises:
        BadConfig: an invalid registry name, a locale that no document has, or a cache folder that cannot be written.
        MissingInput: nothing is published under this name.
        BadData: the published files do not match each other.
    """
    bucket_root = bucket.rstrip("/") if bucket else str(state / "bucket")
    if (pointer := read_pointer(bucket_root, check_registry(registry))) is None:
        raise MissingInput(
            "nothing is published under this name",
            value=registry_uri(bucket_root, registry),
            rule="search reads the embeddings of the last published run",
            remedy="run `make local` first, or name the right --state, --bucket or --registry",
        )
    # Files of a local run name the bucket that its state folder mirrors.
    mirror = None if bucket else bucket_root
    allowed = AllowedUris(own=bucket_root)
    model, manifest = mirrored(pointer.model, mirror), mirrored(pointer.embeddings, mirror)
    allowed.check((("the registry's model", model), ("the registry's embeddings", manifest)), BadData)
    published = read_manifest(manifest, mirror)
    allowed.check((("a part", uri) for uri in published.parts), BadData)
    made, embedded = (RunPaths(store.join(bucket_root, "runs", run)) for run in (pointer.run, pointer.embeddings_run))
    plan = read_plan(made)
    embed_plan = EmbedPlan.from_json(store.read_bytes(embedded.embed_plan)) if store.exists(embedded.embed_plan) else plan.embed
    folder = (_user_cache(bucket_root) if bucket else state / "search") / registry / published.sha256
    try:
        if not (folder / MATRIX).is_file():
            write_cache(folder, published)
    except OSError as error:
        raise BadConfig(
            "the embeddings cannot be copied",
            value=f"{folder}: {error}",
            rule="search keeps a copy of the published embeddings: 4 bytes for each number in them",
            remedy="make room, or set XDG_CACHE_HOME (for --bucket) or --state to a folder that has some",
        ) from error
    import pyarrow as pa

    from pipeline.dataset.corpus import CorpusReader

    documents = pa.ipc.open_file(pa.memory_map(str(folder / DOCUMENTS))).read_all()  # which stays in the file
    chosen = choose(documents, locale)
    matrix = np.lib.format.open_memmap(folder / MATRIX, mode="r")
    corpus = CorpusReader(bucket_root, embed_plan.shards)
    embed = query_encoder(store.local_folder(model, folder / "model"), plan, published.dimension)

    def find(query: str, count: int) -> list[Hit]:
        rows, scores = best_rows(matrix, embed(check_query(query)), count, chosen)
        found = documents.take(rows).to_pylist()
        texts = _texts(corpus, [document["id"] for document in found])
        return [
            Hit(query=query, id=document["id"], score=score, locale=document["locale"], text=text)
            for document, score, text in zip(found, scores.tolist(), texts, strict=True)
        ]

    return find


def _texts(corpus: CorpusReader, ids: Sequence[str]) -> list[str]:
    """Return the documents' texts, empty ones if they cannot be read."""
    try:
        return [corpus.text(identifier) for identifier in ids]
    except (MissingInput, StorageRefused, BadData) as error:
        log.warning("the texts of the documents cannot be read: %s", one_line(error))
        return [""] * len(ids)


def _user_cache(bucket_root: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "trnpipe" / "search" / hashlib.sha256(bucket_root.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PublishedEmbeddings:
    """The manifest of the embeddings.

    Attributes:
        sha256: of the manifest, which names all content.
        dimension: of every embedding.
        parts: URI of each, readable from here -> number of its embeddings.
    """

    sha256: str
    dimension: int
    parts: dict[str, int]


def read_manifest(uri: str, mirror: str | None) -> PublishedEmbeddings:
    """Return a manifest of embeddings.

    Args:
        mirror: see `mirrored`.

    Raises:
        BadData: not a manifest.
    """
    data = store.read_bytes(uri)
    try:
        manifest = json.loads(data)
        return PublishedEmbeddings(
            sha256=hashlib.sha256(data).hexdigest(),
            dimension=int(manifest["dimension"]),
            parts={mirrored(str(part["uri"]), mirror): int(part["rows"]) for part in manifest["parts"]},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadData("the manifest of the embeddings cannot be read", value=f"{uri}: {error!r}") from error


def write_cache(folder: Path, published: PublishedEmbeddings) -> None:
    """Copy the published embeddings into one matrix, in float32, which needs no conversion in a search, with their ids and
    locales. Removes the copies of earlier runs next to it. Downloads one part at a time.

    Raises:
        BadData: the parts do not match the manifest.
    """
    import pyarrow as pa

    from pipeline.dataset.parts import read_part

    schema = pa.schema({"id": pa.string(), "locale": pa.string()})
    header = {"descr": "<f4", "fortran_order": False, "shape": (sum(published.parts.values()), published.dimension)}
    # The matrix appears last: where it is, the rest is.
    with replacing(folder / MATRIX) as matrix, tempfile.TemporaryDirectory(prefix="trnpipe-search-") as scratch:
        np.lib.format.write_array_header_1_0(matrix, header)
        with replacing(folder / DOCUMENTS) as stream, pa.ipc.new_file(stream, schema) as documents:
            for uri, rows in published.parts.items():
                path, found = store.local_file(uri, Path(scratch)), 0
                for ids, embeddings, locales in read_part(path):
                    found += len(ids)
                    if embeddings.shape[1] != published.dimension:
                        raise _mismatch(uri)
                    matrix.write(embeddings.astype("<f4").tobytes())
                    documents.write_batch(
                        pa.record_batch([pa.array(each, pa.string()) for each in (ids, locales)], schema=schema)
                    )
                if found != rows:
                    raise _mismatch(uri)
                if store.is_s3(uri):
                    path.unlink()
    for other in folder.parent.glob("?" * len(folder.name)):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _mismatch(uri: str) -> BadData:
    return BadData(
        "a part does not match the manifest",
        value=uri,
        rule="publish writes the manifest of the parts that the run made",
        remedy="publish again, or name the right --registry",
    )


def choose(documents: pa.Table, locale: str | None) -> npt.NDArray[np.bool_]:
    """Return which rows are of a locale; None: all.

    Raises:
        BadConfig: none is.
    """
    import pyarrow.compute as pc

    if locale is None:
        return np.ones(documents.num_rows, np.bool_)
    chosen: npt.NDArray[np.bool_] = pc.fill_null(pc.equal(documents["locale"], locale), False).to_numpy()
    if not chosen.any():
        known = sorted(filter(None, pc.unique(documents["locale"]).to_pylist()))
        raise BadConfig(
            "no published document has this locale",
            value=locale,
            rule=f"locales of the documents: {', '.join(known[:20]) or 'none'}",
            remedy="name one of these, or leave --locale out",
        )
    return chosen


def query_encoder(model: Path, plan: RunPlan, dimension: int) -> Callable[[str], Vector]:
    """Return a function that embeds a query on the host's processor, with the prompt and the length of the model's folder.

    Args:
        dimension: of the published embeddings.
    """
    from pipeline.backends.device import open_device
    from pipeline.evaluation.vectors import shortened
    from pipeline.model.folder import load_encoder
    from pipeline.model.inference import encode
    from pipeline.model.inventory import load_tokenizer, read_max_length

    # One query is too little for several threads: 17 ms with one, 90 to 520 ms with two where both cores have other work.
    device = open_device("cpu", "fp32", World(), threads=1)
    encoder = device.place(load_encoder(model, plan.config.model))
    tokenizer, length = load_tokenizer(model), read_max_length(model) or plan.config.embed.length

    def embed(query: str) -> Vector:
        tokens = tokenizer.encode([query], length, tokenizer.prompts["query"])
        vectors = encode(encoder, device, tokens, length, length).embeddings.numpy()
        vector: Vector = shortened(vectors, dimension, normalize=encoder.normalize)[0]
        return vector

    return embed


def best_rows(matrix: Vector, vector: Vector, count: int, chosen: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], Vector]:
    """Return the rows with the largest inner product and these products, best first and equal ones in their order.

    Args:
        matrix: (N, D).
        vector: (D,).
        count: the most rows to return.
        chosen: whether a row counts, (N,).
    """
    rows = np.flatnonzero(chosen)
    # The product reads the matrix from its file: in memory are the scores alone.
    scores = (matrix @ vector)[rows]
    if len(rows) > count:
        # Every row that ties with the last one stays, so that the count does not change which one wins.
        kept = scores >= np.partition(scores, -count)[-count]
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:count]
    return rows[order], scores[order]


def show(hits: Sequence[Hit], console: Console, *, heading: bool, as_json: bool) -> None:
    """Print the hits of one query at once.

    Args:
        heading: print the query above them.
        as_json: one JSON object per hit instead of two lines.
    """
    from rich.text import Text

    if heading and hits and not as_json:
        console.print(Text(plain(hits[0].query), style="bold"), soft_wrap=True)
    for hit in hits:
        if as_json:
            console.file.write(json.dumps(asdict(hit), ensure_ascii=False) + "\n")
        else:
            console.print(Text.assemble((f"{hit.score:6.3f}", "bold green"), "  ", (plain(hit.id), "bold")), soft_wrap=True)
            console.print(Text("        " + plain(" ".join(hit.text.split())), style="dim"), no_wrap=True, overflow="ellipsis")
    console.file.flush()
