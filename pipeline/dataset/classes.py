"""Rows that are classified: of tasks with classes, whose rows name their class in place of a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
        # Rows that no model learns or is judged by may have any document.
        found[own & (table["label"].to_numpy() <= 0)] = 0
        for number, name in enumerate(names):
            found[own & (documents == normalized_hash(name))] = number
        if len(unknown := np.flatnonzero(own & (found == NO_CLASS))):
            shard = listed[int(shards[unknown[0]])]
            raise BadData(
                "rows name classes that their task does not have",
                value=[
                    f"task {task}: {len(unknown)} of {own.sum()} rows looked at",
                    f"the first: {shard.shard.uri}:{table['line'][int(unknown[0])]}",
                    f"rows of this file by other class: {_other_classes(shard, task, names)}",
                ],
                rule=f"the document of such a row is one of train.tasks.{task}.classes: {', '.join(names)}",
                remedy="add the class there, or correct the rows; or name a class that is no more, as hash:DIGITS, in "
                "data.delete, which also takes out whatever else is this text: queries, documents and classes of other tasks",
            )
    return found


def _other_classes(shard: IngestedShard, task: str, names: Sequence[str]) -> str:
    """Return the most frequent classes of a task's rows in a shard that are none of these, each with its number of rows."""
    known, found = pa.array([normalized_hash(name) for name in names], pa.uint64()), Counter[str]()
    for number, file in enumerate(shard.profile.files):
        for facts, texts in zip(shard.facts(number, 0, file.rows), shard.texts(number, 0, file.rows), strict=True):
            other = pc.and_not(pc.equal(facts["task"], task), pc.is_in(facts["document_hash"], known))
            found.update(pc.list_element(texts["texts"], 1).filter(other).to_pylist())
    return ", ".join(f"{name} {rows} (hash:{normalized_hash(name):016x})" for name, rows in found.most_common(10))


def without_documents(table: pa.Table, rows: NDArray[np.bool_]) -> pa.Table:
    """Return the table with empty document and negative tokens in some rows."""
    for name in table.column_names:
        if name.endswith("_tokens") and name != "query_tokens":
            lists = pa.concat_arrays([table[name].combine_chunks(), pa.array([[]], table[name].type)])
            chosen = np.where(rows, table.num_rows, np.arange(table.num_rows))
            table = table.set_column(table.column_names.index(name), name, lists.take(pa.array(chosen)))
    return table
