"""Parts of the embeddings: Parquet files of COLUMNS, each with a record that declares it complete.

A part is a stream of row groups in the order of its rows, so neither writing nor reading holds a whole part in memory. embed
writes the record (`embed/part-....json`) after the part: a record that fits its file proves the part complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.contract import Record
from pipeline.dataset.ids import IdDigest
from pipeline.errors import BadData

READ_ROWS = 65_536
COLUMNS = ["id", "embedding", "locale", "document_hash", "token_hash"]
"""Earlier releases wrote the first two, then three, then four. `document_hash`: pipeline/dataset/rows.normalized_hash.
`token_hash`: `token_hashes`. Behind them, for each classifier of the model, `TASK.class` and `TASK.probability`."""

Classified = Mapping[str, tuple[Sequence[str], npt.NDArray[np.float32]]]
"""Task -> the most probable class of each document, and its probability."""

Embeddings = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord(Record):
    """The content of a finished part, and the time that it took.

    Attributes:
        sha256, size: of the Parquet file (size in bytes).
        rows: documents in it.
        ids: order-independent digest of their ids (pipeline/dataset/ids).
        quarantined: documents of the part that have no embedding; a separate file lists them.
        quarantined_ids: digest of their ids.
        quarantine_sha256: of that list; empty where there is none.
        form: see `embedding_form`; parts of one form have the same embedding of the same text.
        content: digest of all that was to be embedded, see `content_digest`.
        uri: of the file, where it is another run's: nothing in it has changed.
        copied, copied_bytes: documents whose embeddings were taken from earlier parts, and the size of these embeddings.
        dimension, dtype: of an embedding; dtype is `float32` or `float16`.
        model: sha256 of the weights that made it.
        fingerprint: of its plan.
        tokens, padded_tokens: computed tokens (once for equal documents), without padding and with it.
        started, finished: ISO 8601 in UTC.
        seconds, documents_per_second: wall time from the first row read to the uploaded file.
    """

    if_unreadable: ClassVar[str] = "delete it and run embed again"

    sha256: str
    size: int
    rows: int
    ids: str
    dimension: int
    dtype: str
    model: str
    fingerprint: str
    tokens: int
    padded_tokens: int
    started: str
    finished: str
    seconds: float
    documents_per_second: float
    quarantined: int = 0
    quarantined_ids: str = str(IdDigest())
    quarantine_sha256: str = ""
    form: str = ""
    content: str = ""
    uri: str = ""
    copied: int = 0
    copied_bytes: int = 0


class QuarantinedDocument(NamedTuple):
    """A document without an embedding: its index among the part's documents, its id, and the reason."""

    row: int
    id: str
    reason: str


def quarantine_to_json(documents: Sequence[QuarantinedDocument]) -> bytes:
    """Return a part's list: one JSON line per document."""
    return "".join(json.dumps(document._asdict()) + "\n" for document in documents).encode()


def quarantine_from_json(data: bytes) -> list[QuarantinedDocument]:
    """Read a part's list back.

    Raises:
        BadData: not such a list.
    """
    try:
        return [QuarantinedDocument(**json.loads(line)) for line in data.splitlines()]
    except (ValueError, TypeError) as error:
        raise BadData(
            "the list of a part's quarantined documents cannot be read",
            value=str(error),
            remedy="delete the part's record and run embed again",
        ) from error


def part_schema(dimension: int, dtype: str, tasks: Sequence[str] = ()) -> pa.Schema:
    """Return the schema: `id` string, `embedding` fixed-size list of `dimension` values, neither ever null; `locale` string;
    `document_hash` and `token_hash` uint64; for each task `TASK.class` string and `TASK.probability` float32."""
    values = pa.list_(pa.from_numpy_dtype(np.dtype(dtype)), dimension)
    required = [pa.field("id", pa.string(), nullable=False), pa.field("embedding", values, nullable=False)]
    hashes = [pa.field(name, pa.uint64()) for name in COLUMNS[3:]]
    kinds = (("class", pa.string()), ("probability", pa.float32()))
    classes = [pa.field(f"{task}.{name}", kind) for task in tasks for name, kind in kinds]
    return pa.schema([*required, pa.field("locale", pa.string()), *hashes, *classes])


class PartWriter(AbstractContextManager["PartWriter"]):
    """Write one part to a local file, a row group for every call of `write`; use as a context manager.

    Args:
        path: the file, replaced.
        dimension, dtype: of an embedding.
        tasks: whose classes are written, too.
    """

    def __init__(self, path: Path, dimension: int, dtype: str, tasks: Sequence[str] = ()) -> None:
        self._schema = part_schema(dimension, dtype, tasks)
        self._dimension = dimension
        self._dtype = np.dtype(dtype)
        # Embeddings look random: neither a dictionary nor compression makes them smaller. Ids do compress.
        compression = {"id": "zstd", "embedding.list.element": "none", "locale": "zstd", **dict.fromkeys(COLUMNS[3:], "none")}
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression=compression | dict.fromkeys(self._schema.names[len(COLUMNS) :], "zstd"),
            use_dictionary=["locale", *(f"{task}.class" for task in tasks)],
        )

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(
        self,
        ids: Sequence[str],
        embeddings: npt.NDArray[np.floating],
        locales: Sequence[str | None] | None = None,
        documents: npt.NDArray[np.uint64] | None = None,
        tokens: npt.NDArray[np.uint64] | None = None,
        classified: Classified | None = None,
    ) -> None:
        """Append rows: `ids`, their embeddings, shape (rows, dimension), their locales, the hashes of their texts and tokens, and
        their classes in the order of the writer's tasks.

        Raises:
            ValueError: embeddings of another shape.
        """
        if embeddings.shape != (len(ids), self._dimension):
            raise ValueError(f"{len(ids)} ids of dimension {self._dimension} do not fit embeddings of shape {embeddings.shape}")
        values = pa.array(np.ascontiguousarray(embeddings, dtype=self._dtype).reshape(-1))
        vectors = pa.FixedSizeListArray.from_arrays(values, self._dimension)
        none = [None] * len(ids)
        hashes = [pa.array(none if values is None else values, pa.uint64()) for values in (documents, tokens)]
        columns = [pa.array(ids, pa.string()), vectors, pa.array(locales or none, pa.string()), *hashes]
        columns += (pa.array(values) for both in (classified or {}).values() for values in both)
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))


def read_part(path: Path) -> Iterator[tuple[list[str], Embeddings, list[str | None]]]:
    """Yield ids, embeddings, shape (rows, dimension), and locales, a batch of rows at a time and in order.

    Raises:
        BadData: not a part.
    """
    for batch in read_batches(path, COLUMNS[:3]):
        # Earlier releases wrote no locale.
        locales = batch.column("locale").to_pylist() if "locale" in batch.schema.names else [None] * len(batch)
        yield batch.column("id").to_pylist(), embeddings_of(batch), locales


def embeddings_of(batch: pa.RecordBatch) -> Embeddings:
    """Return the embeddings of a batch of rows, shape (rows, dimension)."""
    vectors = batch.column("embedding")
    return cast(Embeddings, vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(batch), vectors.type.list_size))


def read_batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            embedding = file.schema_arrow.field("embedding").type
            names = file.schema_arrow.names
            if names[: len(COLUMNS)] != COLUMNS[: len(names)] or not pa.types.is_fixed_size_list(embedding):
                raise BadData("the file is not a part", value=f"{path}: {names}", rule=f"columns {', '.join(COLUMNS)}")
            yield from file.iter_batches(READ_ROWS, columns=columns)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise BadData("the part cannot be read", value=f"{path}: {error}", remedy="delete it and run embed again") from error
