"""Rows that are classified: of tasks with `train.classes`, whose rows name their class in place of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.ingested import IngestedShard
from pipeline.dataset.rows import normalized_hash
from pipeline.errors import BadData

NO_CLASS = -1


def class_numbers(
    table: pa.Table, shards: NDArray[np.int64], listed: Sequence[IngestedShard], classes: Mapping[str, Sequence[str]]
) -> NDArray[np.int32]:
    """Return the number of each row's class in the classes of its task, NO_CLASS for rows of other tasks.

    Args:
        table: facts of ingested rows.
        shards: the number of each row's shard among the listed ones.
        classes: `train.classes`.

    Raises:
        BadData: a row of such a task names another class.
    """
    tasks, documents = np.array(table["task"].fill_null("")), table["document_hash"].to_numpy()
    found = np.full(table.num_rows, NO_CLASS, np.int32)
    for task, names in classes.items():
        own = tasks == task
        for number, name in enumerate(names):
            found[own & (documents == normalized_hash(name))] = number
        if len(unknown := np.flatnonzero(own & (found == NO_CLASS))):
            first, lines = int(unknown[0]), table["line"].to_pylist()
            raise BadData(
                "rows name classes that their task does not have",
                value=f"task {task}: {len(unknown)} of {own.sum()} rows looked at, with {len(np.unique(documents[unknown]))} "
                f"other classes; the first is {listed[int(shards[first])].shard.uri}:{lines[first]}",
                rule=f"the document of such a row is one of train.classes: {', '.join(names)}",
                remedy="add the class to train.classes, or correct the rows",
            )
    return found


def without_documents(table: pa.Table, rows: NDArray[np.bool_]) -> pa.Table:
    """Return the table with empty document and negative tokens in some rows."""
    for name in table.column_names:
        if name.endswith("_tokens") and name != "query_tokens":
            lists = pa.concat_arrays([table[name].combine_chunks(), pa.array([[]], table[name].type)])
            chosen = np.where(rows, table.num_rows, np.arange(table.num_rows))
            table = table.set_column(table.column_names.index(name), name, lists.take(pa.array(chosen)))
    return table
