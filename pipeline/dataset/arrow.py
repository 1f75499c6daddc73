"""The tokenized rows of a run as Arrow files: prepare writes them once as a stream, training and evaluation map them into memory.

Three files under `prepare/rows`: `train.arrow` (pairs to train on), `holdout.arrow` (queries to evaluate, with their relevant
documents), `candidates.arrow` (the distinct documents that queries are ranked against). Uncompressed, so that every rank of a
node shares one copy in the page cache. Where the published model has another tokenizer, `published/` has the last two in its
tokens, row by row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.records import BadRow
from pipeline.dataset.rows import TrainingRow, normalized_hash, read_training_rows
from pipeline.dataset.shards import Beat, ShardScan
from pipeline.dataset.split import Selection
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData

BATCH_ROWS = 4096
"""Rows that are tokenized and written at a time: enough to keep the tokenizer's threads busy, a few MB."""

TOKENS = pa.list_(pa.int32())
SCHEMAS = {
    "train.arrow": pa.schema(
        [
            ("id", pa.string()),
            ("query_tokens", TOKENS),
            ("document_tokens", TOKENS),
            ("query_hash", pa.uint64()),
            ("document_hash", pa.uint64()),
            ("shard", pa.int32()),
            ("line", pa.int64()),
        ]
    ),
    "holdout.arrow": pa.schema(
        [
            ("id", pa.string()),
            ("query_tokens", TOKENS),
            ("query_hash", pa.uint64()),
            ("document_hash", pa.uint64()),
            ("label", pa.float32()),
            ("locale", pa.string()),
        ]
    ),
    "candidates.arrow": pa.schema([("document_tokens", TOKENS), ("document_hash", pa.uint64())]),
}
"""`shard` counts along plan.train.new, then plan.train.replay. Hashes: pipeline/dataset/rows.normalized_hash. Tokens: with
special ones, cut to `Lengths`."""

HOLDOUT_FILES = ("holdout.arrow", "candidates.arrow")
PUBLISHED = "published"
"""Folder of HOLDOUT_FILES in the published model's own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Maximum numbers of tokens."""

    query: int
    document: int
    candidate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """The content of the written files.

    Attributes:
        rows: file name, relative to the folder -> rows.
        document_lengths: (training rows,) tokens of each document.
        queries: distinct hold-out queries (text and locale) that have a relevant document.
    """

    rows: dict[str, int]
    document_lengths: NDArray[np.int32]
    queries: int


def read_table(path: Path) -> pa.Table:
    """Return a row file as a table over the mapped file: only the accessed parts of columns take memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def token_lengths(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """Return the number of tokens of each row of a `..._tokens` column, from the offsets alone."""
    chunks = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    return np.concatenate(chunks) if chunks else np.empty(0, np.int32)


def write_rows(
    folder: Path,
    selection: Selection,
    shard_numbers: Mapping[str, int],
    columns: Mapping[str, str],
    tokenizer: TextTokenizer,
    lengths: Lengths,
    beat: Beat,
    published: tuple[TextTokenizer, Lengths] | None = None,
) -> WrittenRows:
    """Read the selected rows once more, tokenize them, and write the three files into `folder`.

    Args:
        published: tokenizer and lengths of the published model; None: its tokens are the same.
        shard_numbers: URI of a shard that is trained on -> its number in `shard`.
        columns: our column name -> the files'.
        beat: called with the number of rows written so far.

    Raises:
        BadData: a shard changed since it was scanned.
    """
    done = 0
    with (
        RowWriter(folder, tokenizer, lengths) as writer,
        RowWriter(folder / PUBLISHED, *published, names=HOLDOUT_FILES) if published else nullcontext() as other,
    ):
        holdout_writers = [writer, other] if other else [writer]
        for scan, held, train, distractor in zip(
            selection.scans, selection.holdout, selection.train, selection.distractors, strict=True
        ):
            wanted = held | train | distractor
            if not wanted.any():
                continue
            number = shard_numbers.get(scan.file.uri, -1)
            marks = zip(*(mask[wanted].tolist() for mask in (held, train, distractor, scan.documents)), strict=True)
            for row, (is_held, is_trained, is_distractor, document) in zip(_rows(scan, columns, wanted), marks, strict=True):
                if is_trained:
                    writer.add_train(row, document, number)
                for each in holdout_writers:
                    if is_held:
                        each.add_holdout(row, document)
                    if is_distractor:
                        each.add_distractor(row, document)
                done += 1
                if done % BATCH_ROWS == 0:
                    beat(done)
    written = writer.written()
    if other:
        written.rows.update({f"{PUBLISHED}/{name}": rows for name, rows in other.written().rows.items()})
    return written


class RowWriter:
    """Three Arrow files that grow batch by batch; use as a context manager, `written` afterwards.

    Args:
        folder: gets the files, which replace older ones.
        names: the files; callers add no rows of others.
    """

    def __init__(self, folder: Path, tokenizer: TextTokenizer, lengths: Lengths, names: Sequence[str] = tuple(SCHEMAS)) -> None:
        folder.mkdir(exist_ok=True)
        self._tokenizer = tokenizer
        self._lengths = lengths
        self._stack = ExitStack()
        self._writers = {name: self._stack.enter_context(pa.ipc.new_file(str(folder / name), SCHEMAS[name])) for name in names}
        self._rows = dict.fromkeys(names, 0)
        self._train: list[tuple[TrainingRow, int, int]] = []
        self._holdout: list[tuple[TrainingRow, int]] = []
        self._documents: list[tuple[str, int]] = []
        self._distractors: list[tuple[str, int]] = []
        # Candidates begin with the hold-out's documents, so the distractors wait; as tokens they are small.
        self._waiting: list[pa.RecordBatch] = []
        self._known: set[int] = set()
        self._queries: set[tuple[int, str | None]] = set()
        self._document_lengths = array("i")

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            if error is None:
                self._flush_train()
                self._flush_holdout()
                self._write_candidates(self._candidates(self._documents))
                self._waiting.append(self._candidates(self._distractors))
                for batch in self._waiting:
                    self._write_candidates(batch)

    def add_train(self, row: TrainingRow, document: int, shard: int) -> None:
        """Add a pair to train on; `document` is the document's normalized hash."""
        self._train.append((row, document, shard))
        if len(self._train) == BATCH_ROWS:
            self._flush_train()

    def add_holdout(self, row: TrainingRow, document: int) -> None:
        """Add a pair to evaluate with; its document becomes a candidate."""
        self._holdout.append((row, document))
        if document not in self._known:
            self._known.add(document)
            self._documents.append((row.document, document))
        if len(self._holdout) == BATCH_ROWS:
            self._flush_holdout()
        if len(self._documents) == BATCH_ROWS:
            self._write_candidates(self._candidates(self._documents))

    def add_distractor(self, row: TrainingRow, document: int) -> None:
        """Add a candidate from the training side."""
        if document in self._known:
            return
        self._known.add(document)
        self._distractors.append((row.document, document))
        if len(self._distractors) == BATCH_ROWS:
            self._waiting.append(self._candidates(self._distractors))

    def written(self) -> WrittenRows:
        """Return the content of the files, once they are closed."""
        lengths = np.frombuffer(self._document_lengths, np.int32)
        return WrittenRows(rows=self._rows, document_lengths=lengths, queries=len(self._queries))

    def _flush_train(self) -> None:
        rows = [row for row, _, _ in self._train]
        documents = self._tokenizer.encode([row.document for row in rows], self._lengths.document)
        self._document_lengths.extend(map(len, documents))
        self._write(
            "train.arrow",
            [row.id for row in rows],
            self._tokenizer.encode([row.query for row in rows], self._lengths.query),
            documents,
            [normalized_hash(row.query) for row in rows],
            [document for _, document, _ in self._train],
            [shard for _, _, shard in self._train],
            [row.line for row in rows],
        )
        self._train.clear()

    def _flush_holdout(self) -> None:
        rows = [row for row, _ in self._holdout]
        queries = [normalized_hash(row.query) for row in rows]
        self._queries.update((query, row.locale) for query, row in zip(queries, rows, strict=True) if row.label > 0)
        self._write(
            "holdout.arrow",
            [row.id for row in rows],
            self._tokenizer.encode([row.query for row in rows], self._lengths.query),
            queries,
            [document for _, document in self._holdout],
            [row.label for row in rows],
            [row.locale for row in rows],
        )
        self._holdout.clear()

    def _candidates(self, pending: list[tuple[str, int]]) -> pa.RecordBatch:
        """Tokenize and empty a list of (text, hash)."""
        tokens = self._tokenizer.encode([text for text, _ in pending], self._lengths.candidate)
        batch = _record_batch("candidates.arrow", tokens, [document for _, document in pending])
        pending.clear()
        return batch

    def _write_candidates(self, batch: pa.RecordBatch) -> None:
        self._write_batch("candidates.arrow", batch)

    def _write(self, name: str, *columns: Sequence[Any]) -> None:
        self._write_batch(name, _record_batch(name, *columns))

    def _write_batch(self, name: str, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._writers[name].write_batch(batch)
            self._rows[name] += batch.num_rows


def _record_batch(name: str, *columns: Sequence[Any]) -> pa.RecordBatch:
    schema = SCHEMAS[name]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


def _rows(scan: ShardScan, columns: Mapping[str, str], wanted: NDArray[np.bool_]) -> Iterator[TrainingRow]:
    """Yield the wanted ones of a shard's good rows.

    Raises:
        BadData: the number of good rows differs from the scan's.
    """
    count = 0
    for row in read_training_rows(scan.file.uri, columns):
        if isinstance(row, BadRow):
            continue
        if count < scan.rows and wanted[count]:
            yield row
        count += 1
    if count != scan.rows:
        raise BadData(
            "a shard changed while it was read",
            value=f"{scan.file.uri}: {scan.rows} good rows at first, {count} now",
            rule="shards never change; new data is a new file",
            remedy="start the run again when the upload is complete",
        )
