"""The hold-out as evaluation takes it: distinct queries, the candidates they are ranked against, and which of these are relevant.

Reads `holdout.arrow`, `candidates.arrow` and `known.arrow`, which are mapped into memory: token lists are views of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config import RunConfig
from pipeline.dataset.ids import id_hash, id_hashes
from pipeline.dataset.row_files import CLASSES, HOLDOUT_FILES, KNOWN, read_table
from pipeline.errors import BadData
from pipeline.evaluation.query_values import QueryKey
from pipeline.evaluation.retrieval_metrics import Relevant
from pipeline.evaluation.statistics import Integers, Units

if TYPE_CHECKING:
    from pipeline.model.inference import TokenList  # publish needs no framework


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holdout:
    """Distinct queries with their relevant documents among the candidates; or distinct texts with their classes.

    Attributes:
        keys: per query, what it is known by in other runs: the hash of its text (of text and task where rows have one), and its
            locale (None where rows have none).
        queries: token ids of each query, or classified text.
        candidates: token ids of each candidate document.
        relevant: the relevant candidates of each query.
        known: other candidates that are relevant to the text: of rows that are not held out, or of another task. They count
            neither as found nor as wrong.
        units: what was held out together (documents, if not queries or groups): the queries of each.
        tasks: (queries,) task of each query, None where rows have none.
        fresh: (queries,) whether a relevant document comes from a shard that no earlier run had; None where queries are made up.
        classes: (queries,) the number of each text's class in the classes of its task. None: queries search documents.
    """

    keys: tuple[QueryKey, ...]
    queries: Sequence[TokenList]
    candidates: Sequence[TokenList]
    relevant: Relevant
    known: Relevant
    units: Units
    tasks: Sequence[str | None]
    fresh: NDArray[np.bool_] | None = None
    classes: NDArray[np.int32] | None = None

    @property
    def locales(self) -> list[str | None]:
        return [locale for _, locale in self.keys]


def read_judged(folder: Path, config: RunConfig, within: str = "", *, most: int | None = None) -> Holdout:
    """Return what the gate's primary rule judges: classified texts if every task has classes, else queries.

    Raises:
        BadData: see `join_holdout`.
    """
    return read_texts(folder, within, most=most) if config.classifies_only else read_holdout(folder, within, most=most)


def read_texts(folder: Path, within: str = "", *, most: int | None = None) -> Holdout:
    """Return the classified texts that a folder of row files has, in the order of their hashes; see `read_holdout`."""
    table = read_table(folder / within / CLASSES)
    hashes = table["query_hash"].to_numpy() ^ id_hashes(table["task"].to_pylist())
    both = np.rec.fromarrays([hashes, pc.fill_null(table["locale"], "").to_numpy().astype(str)])
    distinct = np.unique(both, return_index=True)[1][:most]
    table = table.take(pa.array(distinct))
    tasks = table["task"].to_pylist()
    return Holdout(
        keys=tuple(zip(hashes[distinct].tolist(), table["locale"].to_pylist(), strict=True)),
        queries=token_lists(table["query_tokens"]),
        candidates=(),
        relevant=Relevant.of(()),
        known=Relevant.of(()),
        units=Units.of(np.arange(len(tasks)), table["key"].to_numpy()),
        tasks=tasks,
        fresh=np.asarray(table["new"]),
        classes=table["class"].to_numpy().copy(),  # writable, as torch wants it
    )


def read_holdout(folder: Path, within: str = "", *, most: int | None = None) -> Holdout:
    """Return the hold-out that a folder of row files has.

    Args:
        within: the folder below it with the tokens, if they are not the parent's.
        most: take the first so many queries in the order of their hashes, which is random but the same every week, and their own
            documents alone as candidates; None: everything.

    Raises:
        BadData: see `join_holdout`.
    """
    holdout, candidates = (read_table(folder / within / name) for name in HOLDOUT_FILES)
    return join_holdout(holdout, candidates, read_table(folder / KNOWN), most)


def join_holdout(holdout: pa.Table, candidates: pa.Table, known: pa.Table, most: int | None = None) -> Holdout:
    """Group the hold-out's rows into distinct queries (text, locale and task), in the order of their hashes, locales and tasks.

    A query without a relevant document does not count. Of equal pairs the largest label is the gain.

    Raises:
        BadData: a held-out document is not among the candidates, or no query has a relevant document.
    """
    place, there = _places(candidates, holdout)
    if missing := np.count_nonzero(~there):
        raise BadData(
            "held-out documents are not among the candidates",
            value=f"{missing} rows",
            rule="candidates hold all hold-out documents",
        )
    labels = holdout["label"].to_numpy().astype(np.float64)
    # The largest gain first: it is the first of equal pairs.
    rows = np.argsort(-labels, kind="stable")[: np.count_nonzero(labels > 0)]
    columns = [pc.fill_null(holdout[name], "").to_numpy().astype(str) for name in ("locale", "task")]
    names, name = np.unique(np.rec.fromarrays(columns), return_inverse=True)
    both = np.stack([holdout["query_hash"].to_numpy(), name.astype(np.uint64)], axis=1)
    keys, firsts, query = np.unique(both[rows], axis=0, return_index=True, return_inverse=True)
    if not len(keys):
        raise BadData("the hold-out has no query with a relevant document", remedy="raise data.holdout_fraction")
    keys, firsts = keys[:most], rows[firsts[:most]]
    rows, query = rows[query < len(keys)], query[query < len(keys)]
    place = place[rows]
    if most is not None:
        own, place = np.unique(place, return_inverse=True)
        candidates = candidates.take(pa.array(own))
    fresh = np.zeros(len(keys), np.bool_)
    fresh[query[np.asarray(holdout["new"])[rows]]] = True
    pairs, best = np.unique(np.stack([query, place], axis=1), axis=0, return_index=True)
    named = [(value, *names[number].tolist()) for value, number in keys.tolist()]
    texts = [(value, locale) for value, locale, _ in named]
    return Holdout(
        keys=tuple((value ^ id_hash(task) if task else value, locale or None) for value, locale, task in named),
        queries=token_lists(holdout["query_tokens"].take(pa.array(firsts))),
        candidates=token_lists(candidates["document_tokens"]),
        relevant=Relevant(pairs[:, 0], pairs[:, 1], labels[rows[best]]),
        # What answers a text in one of its tasks is not wrong in another.
        known=_known([known, holdout.take(pa.array(rows))] if len({*texts}) < len(texts) else [known], texts, candidates, pairs),
        units=Units.of(query, holdout["key"].to_numpy()[rows]),
        tasks=holdout["task"].take(pa.array(firsts)).to_pylist(),
        fresh=fresh,
    )


def _places(candidates: pa.Table, rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the candidate that is the document of each row, and whether there is one."""
    hashes, documents = candidates["document_hash"].to_numpy(), rows["document_hash"].to_numpy()
    order = np.argsort(hashes)
    place = order[np.searchsorted(hashes[order], documents).clip(max=len(hashes) - 1)]
    return place, hashes[place] == documents


def _known(tables: Sequence[pa.Table], texts: Sequence[tuple[int, str]], candidates: pa.Table, own: Integers) -> Relevant:
    """Return the candidates that are relevant to each query's text, without its own.

    Args:
        tables: rows whose documents are relevant.
        texts: hash and locale of each query.
        own: pairs of query and candidate, (N, 2).
    """
    queries = defaultdict[tuple[int, str], list[int]](list)
    for number, text in enumerate(texts):
        queries[text].append(number)
    rows = pa.concat_tables([table.select(["query_hash", "locale", "document_hash"]) for table in tables])
    place, there = _places(candidates, rows)
    named = zip(rows["query_hash"].to_pylist(), pc.fill_null(rows["locale"], "").to_pylist(), place.tolist(), strict=True)
    found = {
        (number, document) for value, locale, document in compress(named, there) for number in queries.get((value, locale), ())
    }
    query, candidate = np.array(sorted(found.difference(map(tuple, own.tolist()))), np.int64).reshape(-1, 2).T
    return Relevant(query, candidate, np.ones(len(query)))


def token_lists(column: pa.ChunkedArray) -> list[TokenList]:
    """Return the token ids of each row, as views of the column's memory."""
    found: list[TokenList] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        found += np.split(chunk.values.to_numpy()[: offsets[-1]], offsets[:-1])[1:]
    return found
