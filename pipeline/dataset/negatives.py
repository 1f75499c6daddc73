"""The negatives of rows: documents that do not answer the query, named by the row itself, or by others of the same query."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.ingested import SLICES, Hashes, mixed, pair_hashes, string_hashes
from pipeline.dataset.tokens import cut
from pipeline.run_inputs import TokenizerPlan

JUDGED = 4
"""Documents that other rows give a row, at most: each is stored with every row of its query."""


def add_judged(rows: pa.Table) -> pa.Table:
    """Add to the `negatives` of rows the documents that rows with a label of 0 or less have for the same query, locale and task.

    Args:
        rows: see pipeline/dataset/rows.SCHEMAS.
    """
    wrong = rows["label"].to_numpy() <= 0
    if not wrong.any():
        return rows
    query = mixed(mixed(rows["query_hash"].to_numpy()) ^ string_hashes(rows["locale"])) ^ string_hashes(rows["task"])
    judged = np.flatnonzero(wrong)[np.argsort(query[wrong], kind="stable")]
    first, behind = (np.searchsorted(query[judged], query, side) for side in ("left", "right"))
    counts = np.where(wrong, 0, np.minimum(behind - first, JUDGED))
    ends = np.concatenate([[0], np.cumsum(counts)])
    taken = pa.array(judged[np.repeat(first - ends[:-1], counts) + np.arange(ends[-1])])
    for name, document in (("negatives", "document"), ("negative_hashes", "document_hash")):
        more = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), rows[document].take(taken).combine_chunks())
        rows = rows.set_column(rows.schema.get_field_index(name), name, joined(rows[name].combine_chunks(), more))
    return rows


def joined(first: pa.ListArray, second: pa.ListArray) -> pa.ListArray:
    """Return lists of the values of both, those of the first one before the others. No list is null."""
    lengths = [pc.list_value_length(each).to_numpy() for each in (first, second)]
    rows = np.concatenate([np.repeat(np.arange(len(first)), each) for each in lengths])
    values = pa.concat_arrays([first.flatten(), second.flatten()]).take(pa.array(np.argsort(rows, kind="stable")))
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(sum(lengths))]), pa.int32()), values)


def negative_columns(
    tokens: pa.ListArray,
    hashes: pa.ListArray,
    own: Hashes,
    count: int,
    length: int,
    tokenizer: TokenizerPlan,
    held: int,
    held_keys: Hashes,
) -> dict[str, pa.Array]:
    """Return the columns of `train.arrow` with each row's first negatives, see pipeline/dataset/row_files.row_schemas.

    Left out are texts without tokens, texts that come before, a row's own document, and documents that are held out: no model
    may be trained on them.

    Args:
        tokens, hashes: of the negatives of each row.
        own: hash of the document of each row, (rows,).
        count: negatives of a row, at most.
        length: tokens at which they are cut.
        held: slices of documents' hashes that are held out.
        held_keys: divided by SLICES, the hashes of documents that are held out with a file.
    """
    texts, values = cut(tokens.flatten(), length, tokenizer), hashes.flatten().to_numpy()
    lengths = pc.list_value_length(hashes).to_numpy()
    rows = np.repeat(np.arange(len(own)), lengths)
    free = (values // np.uint64((1 << 64) // SLICES) >= held) & ~np.isin(values // np.uint64(SLICES), held_keys)
    places = np.flatnonzero(np.asarray(texts.is_valid()) & (values != own[rows]) & free)
    # Of the same text several times, the first one.
    first = np.unique(pair_hashes(rows[places].astype(np.uint64), values[places]), return_index=True)[1]
    good = np.isin(np.arange(len(rows)), places[first])
    before = np.concatenate([[0], np.cumsum(good)])
    place = before[:-1] - before[np.cumsum(lengths) - lengths][rows]
    # Behind the last one, what a row without a negative gets.
    texts, values = pa.concat_arrays([texts, pa.array([[]], texts.type)]), np.append(values, np.uint64(0))
    found: dict[str, pa.Array] = {}
    for number in range(count):
        chosen = np.full(len(own), len(values) - 1)
        taken = np.flatnonzero(good & (place == number))
        chosen[rows[taken]] = taken
        found[f"negative_{number}_tokens"] = texts.take(pa.array(chosen))
        found[f"negative_{number}_hash"] = pa.array(values[chosen])
    return found
