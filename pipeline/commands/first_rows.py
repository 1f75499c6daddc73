"""Look at the first rows of a run's shards before it is started: a wrong column is said within seconds, not by prepare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import store
from pipeline.config import DataConfig, RunConfig
from pipeline.dataset.columns import check_columns
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, SLICES
from pipeline.dataset.refusals import Refusals
from pipeline.dataset.rows import SCHEMAS, Block, read_blocks
from pipeline.dataset.selection import holdout_slices
from pipeline.dataset.shards import find_shards
from pipeline.errors import BadData
from pipeline.evaluation.gate import check_holdout

LOOK_FILES = 10
LOOK_ROWS = 50_000
"""Rows of all files together, an equal share of each: about a second."""
LOOK_CHARACTERS = 64 << 20
"""Their text, so that a look at long documents is short, too."""

SURELY_BAD = 0.5
"""Share of bad rows at which a look that has not seen all of them refuses: such files are wrong as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """The first rows of some shards.

    Attributes:
        shards: those that were read.
        rows: the good rows, see `rows.SCHEMAS`.
        refusals: the others.
        complete: these are all rows of all shards.
    """

    shards: tuple[store.ObjectInfo, ...]
    rows: pa.Table
    refusals: Refusals
    complete: bool


def read_first_rows(
    shards: Sequence[store.ObjectInfo], columns: Mapping[str, str], max_bad: float, kind: str = PAIRS
) -> FirstRows:
    """Read the first rows of up to LOOK_FILES of the shards, which are spread over all of them.

    Args:
        columns: `data.columns`.
        max_bad: `data.max_bad_fraction`.
        kind: PAIRS or DOCUMENTS.

    Raises:
        BadData: a file is damaged, its columns cannot be told, or too many rows are bad.
    """
    step = max(1.0, len(shards) / LOOK_FILES)
    chosen = tuple(shards[int(index * step)] for index in range(min(len(shards), LOOK_FILES)))
    good = [SCHEMAS[kind].empty_table()]
    refusals, complete = Refusals(), len(chosen) == len(shards)
    for shard in chosen:
        rows, characters = LOOK_ROWS // len(chosen), LOOK_CHARACTERS // len(chosen)
        for block in filter(_size, read_blocks(shard.uri, kind, columns)):
            first, read = _beginning(block, rows, characters)
            good.append(first.rows)
            for row in first.bad:
                refusals.add(row)
            rows, characters = rows - _size(first), characters - read
            if _size(first) < _size(block):
                complete = False
                break
    found = FirstRows(shards=chosen, rows=pa.concat_tables(good), refusals=refusals, complete=complete)
    _refuse_bad_rows(found, max_bad)
    return found


def _size(block: Block) -> int:
    return len(block.rows) + len(block.bad)


def _beginning(block: Block, rows: int, characters: int) -> tuple[Block, int]:
    """Return the first rows of a block, so many or up to the one that exceeds the characters, and their characters."""
    good = np.asarray(block.rows["line"])
    bad = np.array([int(row.at.rpartition(":")[2]) for row in block.bad], np.int64)
    texts = [np.asarray(pc.utf8_length(block.rows[name])) for name in ("document", "query") if name in block.rows.column_names]
    read = np.cumsum(sum(texts))
    # Lines behind these are cut off.
    last = [*np.sort(np.concatenate([good, bad]))[:rows][-1:], *good[read > characters][:1]]
    limit = min(last) if rows > 0 and characters >= 0 else 0
    count = int((good <= limit).sum())
    return Block(block.rows.slice(0, count), block.bad[: int((bad <= limit).sum())]), int(read[count - 1]) if count else 0


def check_first_rows(
    config: RunConfig, training: Sequence[str], corpus: Sequence[str], earlier: Sequence[str] | None = ()
) -> None:
    """Refuse a run that prepare is certain to refuse, as far as the first rows show, or files of which half is bad.

    Args:
        training, corpus: URIs of shards and folders.
        earlier: training shards of earlier runs, which have their share of the hold-out; None: not known.

    Raises:
        BadConfig, BadData, MissingInput: as prepare would.
    """
    (own, (_, columns)), *tasks = config.data.training.items()
    check_columns(columns)
    if corpus:
        read_first_rows(find_shards(corpus, "data.corpus"), columns, config.data.max_bad_fraction, DOCUMENTS)
    for setting, (uris, their_columns) in tasks:
        check_columns(their_columns, setting.rpartition(".")[0] + ".columns")
        read_first_rows(find_shards(uris, setting), their_columns, config.data.max_bad_fraction)
    if training:
        first = read_first_rows(find_shards(training, own), columns, config.data.max_bad_fraction)
        # What the gate needs later depends on the last evaluation, and on the tasks' files. Without a positive row there is
        # nothing to hold out: plan names that cause.
        # The keys of groups are ingest's.
        if (
            earlier is not None
            and not (earlier or tasks)
            and config.data.holdout_by != "group"
            and first.complete
            and (np.asarray(first.rows["label"]) > 0).any()
        ):
            check_holdout(held_out_queries(first.rows, config.data), config.gate)


def _refuse_bad_rows(first: FirstRows, limit: float) -> None:
    """Refuse files of which more than `limit` (a fraction) is bad, or half where not all of it was read.

    Raises:
        BadData: each reason with its count, first places and remedy.
    """
    bad, seen = first.refusals.count, first.refusals.count + len(first.rows)
    files = f"{first.shards[0].uri}{f' and {len(first.shards) - 1} more files' if len(first.shards) > 1 else ''}"
    if not seen:
        raise BadData("there is no row", value=files, remedy="check that the files were written to their end")
    if bad > (limit if first.complete else max(limit, SURELY_BAD)) * seen:
        raise BadData(
            f"too many rows are bad: {bad:,} of {'' if first.complete else 'the first '}{seen:,}",
            value=[*first.refusals.reasons(), f"files: {files}"],
            rule=f"data.max_bad_fraction = {limit:g}",
            remedy="correct the rows or the columns, or raise data.max_bad_fraction",
        )


def held_out_queries(rows: pa.Table, data: DataConfig) -> int:
    """Return how many distinct queries of these pairs the hold-out has, counted as plan does."""
    keys = np.asarray(rows["query_hash" if data.holdout_by == "query" else "document_hash"])
    held = keys // np.uint64((1 << 64) // SLICES) < holdout_slices(data.holdout_fraction)
    return distinct(rows.filter(pa.array(held & (np.asarray(rows["label"]) > 0))), "query_hash", "locale")


def distinct(rows: pa.Table, *columns: str) -> int:
    """Return the number of distinct rows in some columns."""
    return int(rows.group_by(list(columns)).aggregate([]).num_rows)
