"""Look at the first rows of a run's shards before it is started: a wrong column is said within seconds, not by prepare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pipeline import store
from pipeline.config import DataConfig, RunConfig
from pipeline.dataset.columns import check_columns
from pipeline.dataset.ingested import SLICES
from pipeline.dataset.records import BadRow
from pipeline.dataset.refusals import Refusals
from pipeline.dataset.rows import CorpusRow, TrainingRow, normalized_hash, read_corpus_rows, read_training_rows
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
        rows: the good rows.
        refusals: the others.
        complete: these are all rows of all shards.
    """

    shards: tuple[store.ObjectInfo, ...]
    rows: list[TrainingRow | CorpusRow]
    refusals: Refusals
    complete: bool


def read_first_rows(shards: Sequence[store.ObjectInfo], columns: Mapping[str, str], source: str = "documents") -> FirstRows:
    """Read the first rows of up to LOOK_FILES of the shards, which are spread over all of them.

    Args:
        columns: `data.columns`.
        source: `documents` (training rows) or `corpus`.

    Raises:
        BadData: a file is damaged, or its columns cannot be told.
    """
    step = max(1.0, len(shards) / LOOK_FILES)
    chosen = tuple(shards[int(index * step)] for index in range(min(len(shards), LOOK_FILES)))
    good: list[TrainingRow | CorpusRow] = []
    refusals, complete = Refusals(), len(chosen) == len(shards)
    share = max(1, len(chosen))
    for shard in chosen:
        found: Iterator[TrainingRow | CorpusRow | BadRow]
        found = read_corpus_rows(shard.uri, columns) if source == "corpus" else read_training_rows(shard.uri, columns)
        characters = 0
        for row in islice(found, LOOK_ROWS // share):
            if isinstance(row, BadRow):
                refusals.add(row)
                continue
            good.append(row)
            characters += sum(len(text) for text in row if isinstance(text, str))
            if characters > LOOK_CHARACTERS // share:
                break
        complete = complete and next(found, None) is None
    return FirstRows(shards=chosen, rows=good, refusals=refusals, complete=complete)


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
    columns = config.data.columns
    check_columns(columns)
    if corpus:
        first = read_first_rows(find_shards(corpus, "data.corpus"), columns, "corpus")
        refuse_bad_rows(first, config.data.max_bad_fraction)
    if training:
        first = read_first_rows(find_shards(training, "data.train"), columns)
        refuse_bad_rows(first, config.data.max_bad_fraction)
        if earlier is not None and first.complete:
            before = read_first_rows(find_shards(earlier, "data.train"), columns)
            rows = [*first.rows, *before.rows]
            # Without a positive row there is nothing to hold out: prepare names that cause.
            if before.complete and any(isinstance(row, TrainingRow) and row.label > 0 for row in rows):
                check_holdout(held_out_queries(rows, config.data), config.gate)


def refuse_bad_rows(first: FirstRows, limit: float) -> None:
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


def held_out_queries(rows: Sequence[TrainingRow | CorpusRow], data: DataConfig) -> int:
    """Return how many distinct queries of these rows the hold-out has, counted as plan does."""
    limit, by_query = holdout_slices(data.holdout_fraction), data.holdout_by == "query"
    pairs = [row for row in rows if isinstance(row, TrainingRow) and row.label > 0]
    held = [row for row in pairs if normalized_hash(row.query if by_query else row.document) * SLICES >> 64 < limit]
    return len({(normalized_hash(row.query), row.locale) for row in held})
