"""The rows of a run as Arrow files: plan writes them once as a stream, training and evaluation map them into memory.

Under `plan/rows`: `train.arrow` (pairs to train on), `holdout.arrow` (queries to evaluate, with their relevant documents),
`candidates.arrow` (the distinct documents that queries are ranked against), `known.arrow` (queries with other candidates that are
relevant, but not held out), `classes.arrow` (held-out texts of tasks with classes). Uncompressed, so that every rank of a
node shares one copy in the page cache. Where the published model has another tokenizer, `published/` has the hold-out, the
candidates and the classified texts in its tokens, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config import RunConfig
from pipeline.dataset.ingested import PAIRS, token_schema

WRITTEN_ROWS = 1 << 16
"""Rows of a record batch in the files, at most: some 20 MB."""

HOLDOUT_FILES = ("holdout.arrow", "candidates.arrow")
KNOWN = "known.arrow"
CLASSES = "classes.arrow"
PUBLISHED = "published"
"""Folder of HOLDOUT_FILES and CLASSES in the published model's own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Maximum numbers of tokens: of queries, also those of tasks that have their own, of documents to train on, and of those that
    are searched."""

    query: int
    document: int
    candidate: int
    queries_of: dict[str, int]

    @classmethod
    def of(cls, config: RunConfig) -> Lengths:
        """Return those of a run."""
        return cls(
            query=config.train.query_length,
            document=config.train.length,
            candidate=config.embed.length,
            queries_of={
                name: task.query_length
                for name, task in config.train.tasks.items()
                if task.query_length not in (None, config.train.query_length)
            },
        )

    def of_column(self, name: str, rows: pa.Table) -> int | NDArray[np.int64]:
        """Return that of a column of tokens of the hold-out; or those of each row, (rows,), where tasks have their own."""
        if name != "query_tokens" or not self.queries_of:
            return self.query if name == "query_tokens" else self.candidate
        own = (np.asarray(pc.fill_null(pc.equal(rows["task"], task), False)) for task in self.queries_of)
        return np.select([*own], [*self.queries_of.values()], self.query)

    def within(self, longest: int) -> Lengths:
        """Return those of a model for texts of at most `longest` tokens."""
        return replace(
            self,
            query=min(self.query, longest),
            candidate=min(self.candidate, longest),
            queries_of={task: min(length, longest) for task, length in self.queries_of.items()},
        )


def row_schemas(tokens: pa.DataType, negatives: int = 0) -> dict[str, pa.Schema]:
    """Return the schemas of the files.

    Args:
        tokens: type of the token ids, the smallest that holds the vocabulary.
        negatives: of a row to train on, at most: columns `negative_0_tokens`, `negative_0_hash` and so on, empty and 0 where the
            row has fewer.

    `shard` counts along plan.train.new, then plan.train.replay. `new`: whether no run of the lineage was trained on the row; of
    the hold-out, whether its shard is new. `key`: what is held out together. Hashes: pipeline/dataset/rows.normalized_hash.
    `version`: pipeline/dataset/ingested.row_versions. `class`: pipeline/dataset/classes.class_numbers. Tokens: with special
    ones, cut to `Lengths`; none of the document where there is a class.
    """
    texts = pa.list_(tokens)
    holdout = pa.schema(
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
    )
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
                ("locale", pa.string()),
                ("shard", pa.int32()),
                ("line", pa.int64()),
                ("class", pa.int32()),
                *((f"negative_{number}_tokens", texts) for number in range(negatives)),
                *((f"negative_{number}_hash", pa.uint64()) for number in range(negatives)),
            ]
        ),
        "holdout.arrow": holdout,
        CLASSES: holdout.append(pa.field("class", pa.int32())),
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
    """Tokens of each row's query, document and negatives in `train.arrow`, (n, texts), piece by piece, as often as asked for."""

    path: Path

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            batches, names = reader.num_record_batches, [name for name in reader.schema.names if name.endswith("_tokens")]
        for number in range(batches):
            # A map of its own: what was read of one counts as memory of this process until it ends.
            with pa.memory_map(str(self.path)) as source:
                batch = pa.ipc.open_file(source).get_batch(number).select(names)
                yield np.stack([np.diff(column.offsets.to_numpy()) for column in batch.columns], axis=1)


class PairStrata:
    """The tasks, or tasks and locales, of the rows of `train.arrow`.

    Args:
        path: the file.
        columns: `task` alone, or `task` and `locale`.

    Attributes:
        rows: stratum, its values joined by `/` -> number of rows, in the order of the names.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, columns
        counts: Counter[str] = Counter()
        for names in self._names():
            counts.update({each["values"]: each["counts"] for each in names.value_counts().to_pylist()})
        self.rows = dict(sorted(counts.items()))

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Yield the number of each row's stratum in `rows`, in the pieces of `PairLengths`."""
        known = pa.array(self.rows)
        for names in self._names():
            yield pc.index_in(names, known).to_numpy()

    def _names(self) -> Iterator[pa.Array]:
        for batch in read_table(self._path).select(self._columns).to_batches():
            yield pc.binary_join_element_wise(*(column.fill_null("") for column in batch.columns), "/")


class RowWriter(AbstractContextManager["RowWriter"]):
    """Arrow files that grow; use as a context manager.

    Args:
        folder: gets the files, which replace older ones.
        vocabulary: every token id is below this.
        names: the files.
        negatives: see `row_schemas`.

    Attributes:
        schemas: file -> its schema.
        rows: file -> rows so far.
    """

    def __init__(self, folder: Path, vocabulary: int, names: Sequence[str], negatives: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.schemas = row_schemas(token_schema(PAIRS, vocabulary).field("query_tokens").type.value_type, negatives)
        self._stack = ExitStack()
        self._files = {name: self._stack.enter_context(pa.ipc.new_file(str(folder / name), self.schemas[name])) for name in names}
        self._waiting: dict[str, list[pa.Table]] = {name: [] for name in names}
        self.rows = dict.fromkeys(names, 0)

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
