"""The rows of a run as Arrow files: plan writes them once as a stream, training and evaluation map them into memory.

Three files under `plan/rows`: `train.arrow` (pairs to train on), `holdout.arrow` (queries to evaluate, with their relevant
documents), `candidates.arrow` (the distinct documents that queries are ranked against). Uncompressed, so that every rank of a
node shares one copy in the page cache. Where the published model has another tokenizer, `published/` has the last two in its
tokens, row by row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

HOLDOUT_FILES = ("holdout.arrow", "candidates.arrow")
PUBLISHED = "published"
"""Folder of HOLDOUT_FILES in the published model's own tokens."""


def row_schemas(tokens: pa.DataType) -> dict[str, pa.Schema]:
    """Return the schemas of the files; `tokens`: type of the token ids, the smallest that holds the vocabulary.

    `shard` counts along plan.train.new, then plan.train.replay. Hashes: pipeline/dataset/rows.normalized_hash. `version`:
    pipeline/dataset/ingested.row_versions. Tokens: with special ones, cut to `Lengths`.
    """
    texts = pa.list_(tokens)
    return {
        "train.arrow": pa.schema(
            [
                ("query_tokens", texts),
                ("document_tokens", texts),
                ("query_hash", pa.uint64()),
                ("document_hash", pa.uint64()),
                ("version", pa.uint64()),
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
            ]
        ),
        "candidates.arrow": pa.schema([("document_tokens", texts), ("document_hash", pa.uint64()), ("id", pa.string())]),
    }


SCHEMAS = row_schemas(pa.uint16())


def read_table(path: Path) -> pa.Table:
    """Return a row file as a table over the mapped file: only the accessed parts of columns take memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def token_lengths(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """Return the number of tokens of each row of a `..._tokens` column, from the offsets alone."""
    chunks = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    return np.concatenate(chunks) if chunks else np.empty(0, np.int32)
