"""Which rows of the embedded shards are documents of their own: prepare decides, embed and publish read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import store
from pipeline.dataset.rows import DocumentReader
from pipeline.plan import RunPlan

DISTINCT = "distinct.arrow"
"""Where documents are repeated: for every good row of the embedded shards, in the plan's order, whether embed takes it."""


def write_distinct(folder: Path, masks: Sequence[NDArray[np.bool_]]) -> int:
    """Write DISTINCT, a bit for each row; return its rows."""
    rows = pa.table({"distinct": pa.array(np.concatenate(masks))})
    with pa.ipc.new_file(str(folder / DISTINCT), rows.schema) as writer:
        writer.write_table(rows)
    return int(rows.num_rows)


def open_documents(plan: RunPlan, rows: str, scratch: Path) -> DocumentReader:
    """Return the reader of the documents that a plan embeds.

    Args:
        rows: URI of the run's row files.
        scratch: folder for a copy of DISTINCT.
    """
    distinct = None
    if DISTINCT in plan.row_files:
        with pa.memory_map(str(store.local_file(store.join(rows, DISTINCT), scratch))) as source:
            taken = pa.ipc.open_file(source).read_all()["distinct"].to_numpy()
        ends = np.cumsum([shard.rows for shard in plan.embed.shards])[:-1]
        distinct = dict(zip((shard.uri for shard in plan.embed.shards), np.split(taken, ends), strict=True))
    return DocumentReader(plan.embed.source, plan.config.data.columns, distinct)
