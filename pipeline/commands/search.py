"""`trnpipe search`: embed queries with the published model and compare them with every published embedding.

Exact, to judge a run by hand; a service would load the parts into an index. Reads the registry's pointer, the manifest and the
parts once, into a matrix that later searches map into memory, and the texts of a corpus shard once a document in it is found.
Loads torch and pyarrow only once it has found something to search in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.contract import RunPaths, check_registry, registry_uri
from pipeline.errors import BadConfig, BadData, MissingInput, StorageRefused, one_line, plain
from pipeline.files import replacing
from pipeline.plan import RunPlan
from pipeline.run.find_run import mirrored, read_plan
from pipeline.run.registry import read_pointer
from pipeline.run.world import World

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

log = logging.getLogger("trnpipe")

BLOCK_ROWS = 65_536
"""Embeddings that are scored at once: 100 MB of the matrix at 384 dimensions."""

TEXT_ROWS = 1024
"""Texts of a record batch."""

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


@dataclass(kw_only=True)
class Searcher:
    """The published embeddings and their model, opened for any number of queries.

    Attributes:
        embed: returns a query's embedding, (D,).
        matrix: all embeddings, (N, D), mapped into memory.
        documents: columns id, locale, shard and row, of the same rows; `row` counts the shard's documents.
        chosen: whether a row is searched, (N,).
        texts: returns the ids and texts of a shard's documents.
    """

    embed: Callable[[str], Vector]
    matrix: Vector
    documents: pa.Table
    chosen: npt.NDArray[np.bool_]
    texts: ShardTexts

    def find(self, query: str, count: int) -> list[Hit]:
        """Return the best documents for a query, best first.

        Args:
            count: the most documents to return.

        Raises:
            BadConfig: an empty query.
        """
        rows, scores = best_rows(self.matrix, self.embed(check_query(query)), count, self.chosen)
        found = self.documents.take(rows).to_pylist()
        return [
            Hit(
                query=query,
                id=document["id"],
                score=score,
                locale=document["locale"],
                text=self.texts.read(document["shard"], document["row"], document["id"]),
            )
            for document, score in zip(found, scores.tolist(), strict=True)
        ]


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
) -> Searcher:
    """Open what is published; the first call for a run copies its embeddings into the cache folder.

    Args:
        bucket: `s3://BUCKET` of a deployment; None: the local run's bucket, as files in `state`.
        state: folder of the local run.
        registry: name under which the run published the embeddings.
        locale: search only the documents of this locale.

    Raises:
        BadConfig: an invalid registry name, a locale that no document has, or a cache folder that cannot be written.
        MissingInput: nothing is published under this name.
        BadData: the published files do not match each other.
    """
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
    model, manifest = mirrored(pointer.model, mirror), mirrored(pointer.embeddings, mirror)
    allowed.check((("the registry's model", model), ("the registry's embeddings", manifest)), BadData)
    published = read_manifest(manifest, mirror)
    allowed.check((("a part", part.uri) for part in published.parts), BadData)
    paths = RunPaths(store.join(bucket_root, "runs", pointer.run))
    plan = read_plan(paths)
    folder = (_user_cache(bucket_root) if bucket else state / "search") / registry / published.sha256
    try:
        if not (folder / MATRIX).is_file():
            write_cache(folder, published, plan, paths)
    except OSError as error:
        raise BadConfig(
            "the embeddings cannot be copied",
            value=f"{folder}: {error}",
            rule="search keeps a copy of the published embeddings: 4 bytes for each number in them",
            remedy="make room, or set XDG_CACHE_HOME (for --bucket) or --state to a folder that has some",
        ) from error
    documents = map_table(folder / DOCUMENTS)
    return Searcher(
        matrix=np.lib.format.open_memmap(folder / MATRIX, mode="r"),
        documents=documents,
        chosen=choose(documents, locale),
        texts=ShardTexts(folder=folder, plan=_mirrored_plan(plan, mirror), rows=paths.rows),
        embed=query_encoder(store.local_folder(model, folder / "model"), plan),
    )


def _user_cache(bucket_root: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "trnpipe" / "search" / hashlib.sha256(bucket_root.encode()).hexdigest()[:16]


def _mirrored_plan(plan: RunPlan, mirror: str | None) -> RunPlan:
    """Return the plan with the URIs from which its shards can be read here."""
    shards = tuple(shard.model_copy(update={"uri": mirrored(shard.uri, mirror)}) for shard in plan.embed.shards)
    return plan.model_copy(update={"embed": plan.embed.model_copy(update={"shards": shards})})


@dataclass(frozen=True, slots=True)
class Part:
    """A part in the manifest of the embeddings.

    Attributes:
        uri: readable from here.
        rows: number of its embeddings.
        quarantined: number of its documents without an embedding, which it leaves out.
    """

    uri: str
    rows: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class PublishedEmbeddings:
    """The manifest of the embeddings.

    Attributes:
        sha256: of the manifest, which names all content.
        dimension: of every embedding.
    """

    sha256: str
    dimension: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


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
        parts = tuple(
            Part(mirrored(str(part["uri"]), mirror), int(part["rows"]), int(part.get("quarantined", 0)))
            for part in manifest["parts"]
        )
        return PublishedEmbeddings(hashlib.sha256(data).hexdigest(), int(manifest["dimension"]), parts)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadData("the manifest of the embeddings cannot be read", value=f"{uri}: {error!r}") from error


def write_cache(folder: Path, published: PublishedEmbeddings, plan: RunPlan, paths: RunPaths) -> None:
    """Copy the published embeddings into one matrix, in float32, which needs no conversion in a search, and say where the
    documents are in the corpus shards. Removes the copies of earlier runs next to it. Downloads one part at a time.

    Raises:
        BadData: the parts do not match the manifest or the plan.
    """
    import pyarrow as pa

    from pipeline.dataset.parts import read_part

    schema = pa.schema({"id": pa.string(), "locale": pa.string(), "shard": pa.int32(), "row": pa.int64()})
    header = {"descr": "<f4", "fortran_order": False, "shape": (published.rows, published.dimension)}
    # The matrix appears last: where it is, the rest is.
    with replacing(folder / MATRIX) as matrix, tempfile.TemporaryDirectory(prefix="trnpipe-search-") as scratch:
        np.lib.format.write_array_header_1_0(matrix, header)
        with replacing(folder / DOCUMENTS) as stream, pa.ipc.new_file(stream, schema) as documents:
            for index, part in enumerate(published.parts):
                shards, rows = document_places(plan, paths, index, part)
                path, start = store.local_file(part.uri, Path(scratch)), 0
                for ids, embeddings, locales in read_part(path):
                    stop = start + len(ids)
                    places = pa.array(shards[start:stop], pa.int32()), pa.array(rows[start:stop], pa.int64())
                    columns = [pa.array(ids, pa.string()), pa.array(locales, pa.string()), *places]
                    if embeddings.shape[1] != published.dimension or stop > part.rows:
                        raise _mismatch(part.uri)
                    matrix.write(embeddings.astype("<f4").tobytes())
                    documents.write_batch(pa.record_batch(columns, schema=schema))
                    start = stop
                if start != part.rows:
                    raise _mismatch(part.uri)
                if store.is_s3(part.uri):
                    path.unlink()
    for other in folder.parent.glob("?" * len(folder.name)):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def document_places(
    plan: RunPlan, paths: RunPaths, index: int, part: Part
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the shard of each embedding of a part, and the number of its document there.

    Raises:
        BadData: the part is not the planned one.
    """
    from pipeline.dataset.parts import quarantine_from_json

    planned = plan.embed.parts[index : index + 1]
    if not planned or planned[0].rows != part.rows + part.quarantined:
        raise _mismatch(part.uri)
    spans = planned[0].spans
    shards = np.concatenate([np.full(span.stop - span.start, span.shard) for span in spans])
    rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    if not part.quarantined:
        return shards, rows
    left_out = quarantine_from_json(store.read_bytes(paths.part_quarantine(index, len(plan.embed.parts))))
    gone = [document.row for document in left_out]
    return np.delete(shards, gone), np.delete(rows, gone)


def _mismatch(uri: str) -> BadData:
    return BadData(
        "a part does not match its manifest or the run's plan",
        value=uri,
        rule="publish writes the manifest of the parts that the run planned",
        remedy="publish again, or name the right --registry",
    )


def map_table(path: Path) -> pa.Table:
    """Return an Arrow file as a table that stays in the file."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


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


def query_encoder(model: Path, plan: RunPlan) -> Callable[[str], Vector]:
    """Return a function that embeds a query on the host's processor; it cuts the query to the length of training."""
    from pipeline.backends.device import open_device
    from pipeline.dataset.tokens import TextTokenizer
    from pipeline.model.folder import load_encoder
    from pipeline.model.inference import encode

    # One query is too little for several threads: 17 ms with one, 90 to 520 ms with two where both cores have other work.
    device = open_device("cpu", "fp32", World(), threads=1)
    encoder = device.place(load_encoder(model, plan.config.model))
    tokenizer, length = TextTokenizer(model), plan.config.train.query_length

    def embed(query: str) -> Vector:
        vector: Vector = encode(encoder, device, tokenizer.encode([query], length), (length,), length).embeddings[0].numpy()
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
    rows, scores = np.empty(0, np.int64), np.empty(0, np.float32)
    for start in range(0, len(matrix), BLOCK_ROWS):
        inside = np.flatnonzero(chosen[start : start + BLOCK_ROWS])
        rows = np.concatenate([rows, start + inside])
        scores = np.concatenate([scores, (matrix[start : start + BLOCK_ROWS] @ vector)[inside]])
        if len(rows) > count:
            # Every row that ties with the last one stays, so that blocks and counts do not change which one wins.
            kept = scores >= np.partition(scores, -count)[-count]
            rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:count]
    return rows[order], scores[order]


@dataclass(kw_only=True)
class ShardTexts:
    """The texts of the corpus shards. A shard is read once, as a whole, and kept next to the matrix.

    Attributes:
        folder: of the copies.
        plan: with shard URIs that can be read here.
        rows: URI of the run's row files.
    """

    folder: Path
    plan: RunPlan
    rows: str
    _open: dict[int, pa.Table | None] = field(default_factory=dict)

    def read(self, shard: int, row: int, identifier: str) -> str:
        """Return a document's text, empty if its shard is gone or has changed."""
        if shard not in self._open:
            self._open[shard] = self._table(shard)
        table = self._open[shard]
        if table is None:
            return ""
        if table["id"][row].as_py() != identifier:
            log.warning("the shard no longer has the text of %s", identifier)
            return ""
        return str(table["text"][row])

    def _table(self, shard: int) -> pa.Table | None:
        path = self.folder / f"shard-{shard:05d}.arrow"
        if not path.is_file():
            try:
                self._copy(shard, path)
            except (MissingInput, StorageRefused, BadData, OSError) as error:
                log.warning("the texts of %s cannot be read: %s", self.plan.embed.shards[shard].uri, one_line(error))
                return None
        return map_table(path)

    def _copy(self, shard: int, path: Path) -> None:
        import pyarrow as pa

        from pipeline.dataset.distinct import open_documents

        schema = pa.schema({"id": pa.string(), "text": pa.large_string()})
        last = max(span.stop for part in self.plan.embed.parts for span in part.spans if span.shard == shard)
        with tempfile.TemporaryDirectory(prefix="trnpipe-search-") as scratch:
            found = open_documents(self.plan, self.rows, Path(scratch)).read(self.plan.embed.shards[shard], 0, last)
            with replacing(path) as stream, pa.ipc.new_file(stream, schema) as writer:
                while batch := list(islice(found, TEXT_ROWS)):
                    ids, texts, _ = zip(*batch, strict=True)
                    writer.write_batch(pa.record_batch([pa.array(ids), pa.array(texts, pa.large_string())], schema=schema))


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
            continue
        console.print(Text.assemble((f"{hit.score:6.3f}", "bold green"), "  ", (plain(hit.id), "bold")), soft_wrap=True)
        console.print(Text("        " + plain(" ".join(hit.text.split())), style="dim"), no_wrap=True, overflow="ellipsis")
    console.file.flush()
