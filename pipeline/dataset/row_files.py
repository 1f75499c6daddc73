"""The rows of a run as Arrow files: plan writes them once as a stream, training and evaluation map them into memory.

Four files under `plan/rows`: `train.arrow` (pairs to train on), `holdout.arrow` (queries to evaluate, with their relevant
documents), `candidates.arrow` (the distinct documents that queries are ranked against), `known.arrow` (queries with other
candidates that are relevant, but not held out). Uncompressed, so that every rank of a node shares one copy in the page cache.
Where the published model has another tokenizer, `published/` has the hold-out and the candidates in its tokens, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config import RunConfig
from pipeline.dataset.ingested import PAIRS, token_schema

WRITTEN_ROWS = 1 << 16
"""Rows of a record batch in the files, at most: some 20 MB."""

HOLDOUT_FILES = ("holdout.arrow", "candidates.arrow")
KNOWN = "known.arrow"
PUBLISHED = "published"
"""Folder of HOLDOUT_FILES in the published model's own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Maximum numbers of tokens."""

    query: int
    document: int
    candidate: int

    @classmethod
    def of(cls, config: RunConfig) -> Lengths:
        """Return those of a run."""
        return cls(query=config.train.query_length, document=config.train.length, candidate=config.embed.length)

    def of_columns(self, names: Sequence[str]) -> dict[str, int]:
        """Return those of columns of tokens of the hold-out."""
        return {name: self.query if name == "query_tokens" else self.candidate for name in names}

    def within(self, longest: int) -> Lengths:
        """Return those of a model for texts of at most `longest` tokens."""
        return replace(self, query=min(self.query, longest), candidate=min(self.candidate, longest))


def row_schemas(tokens: pa.DataType) -> dict[str, pa.Schema]:
    """Return the schemas of the files; `tokens`: type of the token ids, the smallest that holds the vocabulary.

    `shard` counts along plan.train.new, then plan.train.replay. `new`: whether no run of the lineage was trained on the row; of
    the hold-out, whether its shard is new. `key`: what is held out together. Hashes: pipeline/dataset/rows.normalized_hash.
    `version`: pipeline/dataset/ingested.row_versions. Tokens: with special ones, cut to `Lengths`.
    """
    texts = pa.list_(tokens)
    return {
        "train.arrow": pa.schema(
            [
                ("query_tokens", texts),
                ("document_tokens", texts),
                ("query_hash", pa.uint64()),
                ("document_hash", pa.uint64()),
                ("key", pa.uint64()),
                ("version", pa.uint64()),
                ("new", pa.bool_()),
                ("task", pa.string()),
                ("shard", pa.int32()),
                ("line", pa.int64()),
            ]
        ),
        "holdout.arrow": pa.schema(
            [
                ("id", pa.string()),
                ("query_tokens", texts),
                ("query_hash", pa.uint64()),
                ("document_hash", pa.uint64()),
                ("label", pa.float32()),
                ("locale", pa.string()),
                ("task", pa.string()),
                ("key", pa.uint64()),
                ("new", pa.bool_()),
            ]
        ),
        "candidates.arrow": pa.schema([("document_tokens", texts), ("document_hash", pa.uint64()), ("id", pa.string())]),
        "known.arrow": pa.schema([("query_hash", pa.uint64()), ("locale", pa.string()), ("document_hash", pa.uint64())]),
    }


SCHEMAS = row_schemas(pa.uint16())


def read_table(path: Path) -> pa.Table:
    """Return a row file as a table over the mapped file: only the accessed parts of columns take memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


@dataclass(frozen=True, slots=True)
class PairLengths:
    """Tokens of each row's query and document in `train.arrow`, (n, 2), piece by piece, as often as they are asked for."""

    path: Path

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        with pa.memory_map(str(self.path)) as source:
            batches = pa.ipc.open_file(source).num_record_batches
        for number in range(batches):
            # A map of its own: what was read of one counts as memory of this process until it ends.
            with pa.memory_map(str(self.path)) as source:
                batch = pa.ipc.open_file(source).get_batch(number).select(["query_tokens", "document_tokens"])
                yield np.stack([np.diff(column.offsets.to_numpy()) for column in batch.columns], axis=1)


class RowWriter:
    """Arrow files that grow; use as a context manager.

    Args:
        folder: gets the files, which replace older ones.
        vocabulary: every token id is below this.
        names: the files.

    Attributes:
        schemas: file -> its schema.
        rows: file -> rows so far.
    """

    def __init__(self, folder: Path, vocabulary: int, names: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.schemas = row_schemas(token_schema(PAIRS, vocabulary).field("query_tokens").type.value_type)
        self._stack = ExitStack()
        self._files = {name: self._stack.enter_context(pa.ipc.new_file(str(folder / name), self.schemas[name])) for name in names}
        self._waiting: dict[str, list[pa.Table]] = {name: [] for name in names}
        self.rows = dict.fromkeys(names, 0)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            for name in self._files if error is None else ():
                self._flush(name)

    def add(self, name: str, table: pa.Table) -> None:
        """Append rows to a file: a table with the columns of its schema, and any others."""
        schema = self.schemas[name]
        self._waiting[name].append(table.select(schema.names).cast(schema))
        self.rows[name] += table.num_rows
        if sum(each.num_rows for each in self._waiting[name]) >= WRITTEN_ROWS:
            self._flush(name)

    def _flush(self, name: str) -> None:
        if self._waiting[name]:
            self._files[name].write_table(pa.concat_tables(self._waiting[name]).combine_chunks(), WRITTEN_ROWS)
            self._waiting[name].clear()
