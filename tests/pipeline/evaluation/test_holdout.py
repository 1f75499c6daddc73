"""The hold-out as evaluation takes it: which queries, in which order, and what is relevant to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.dataset.ids import id_hash
from pipeline.dataset.row_files import SCHEMAS, read_table, row_schemas
from pipeline.errors import BadData
from pipeline.evaluation.holdout import Holdout, join_holdout, read_holdout, token_lists

ROWS = [
    (30, 103, 1.0, None),
    (10, 101, 2.0, None),
    (10, 102, 1.0, None),
    (10, 101, 3.0, None),  # the same pair again: the larger gain
    (20, 101, 1.0, "en"),
    (20, 104, 1.0, "de"),
    (2**64 - 1, 101, 1.0, None),
    (5, 105, 0.0, None),  # not relevant to anything
]


# Also to the query (20, de): 101. Not in the hold-out, or not among the candidates: the others.
KNOWN_PAIRS = [(20, "de", 101), (20, "de", 101), (20, "fr", 104), (77, None, 101), (10, None, 999)]


def tables(rows: list[tuple[int, int, float, str | None]], candidates: list[int]) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Rows (query, document, label, locale), hashes for texts; the tokens of a text are its hash, twice for a document.

    Even documents are of a new shard.
    """
    holdout = {
        "id": [str(row) for row in range(len(rows))],
        "query_tokens": [[query % 1000] for query, *_ in rows],
        "query_hash": [query for query, *_ in rows],
        "document_hash": [document for _, document, *_ in rows],
        "label": [label for *_, label, _ in rows],
        "locale": [locale for *_, locale in rows],
        "task": ["search" if document == 104 else None for _, document, *_ in rows],
        "key": [document for _, document, *_ in rows],
        "new": [document % 2 == 0 for _, document, *_ in rows],
    }
    documents = {
        "document_tokens": [[value, value] for value in candidates],
        "document_hash": candidates,
        "id": [f"document {value}" for value in candidates],
    }
    known = {name: [pair[place] for pair in KNOWN_PAIRS] for place, name in enumerate(SCHEMAS["known.arrow"].names)}
    made = zip(("holdout.arrow", "candidates.arrow", "known.arrow"), (holdout, documents, known), strict=True)
    first, second, third = (pa.table(columns, schema=SCHEMAS[name]) for name, columns in made)
    return first, second, third


def lists(texts: object) -> list[list[int]]:
    return [text.tolist() for text in texts]  # type: ignore[attr-defined]


def relevant(holdout: Holdout) -> list[tuple[float, ...]]:
    return list(zip(*(column.tolist() for column in holdout.relevant), strict=True))


def test_rows_of_one_query_are_joined() -> None:
    holdout = join_holdout(*tables(ROWS, [105, 104, 103, 102, 101]))
    assert holdout.keys == ((10, None), (20 ^ id_hash("search"), "de"), (20, "en"), (30, None), (2**64 - 1, None))
    assert holdout.locales == [None, "de", "en", None, None]
    assert lists(holdout.queries) == [[10], [20], [20], [30], [(2**64 - 1) % 1000]]
    assert lists(holdout.candidates) == [[value, value] for value in (105, 104, 103, 102, 101)]
    assert relevant(holdout) == [(0, 3, 1.0), (0, 4, 3.0), (1, 1, 1.0), (2, 4, 1.0), (3, 2, 1.0), (4, 4, 1.0)]
    assert holdout.fresh is not None
    # (20, "de") has the even document 104, (10, None) has 102.
    assert holdout.fresh.tolist() == [True, True, False, False, False]
    assert holdout.tasks == [None, "search", None, None, None]
    # The query (10, None) belongs to two documents, and 101 has three queries.
    named = {int(unit): value for unit, value in enumerate((101, 102, 103, 104))}
    assert [(int(query), named[int(unit)]) for query, unit in zip(*holdout.units, strict=True)] == [
        *((0, 101), (0, 102), (1, 104), (2, 101), (3, 103), (4, 101))
    ]


def test_other_relevant_candidates_are_known() -> None:
    holdout = join_holdout(*tables(ROWS, [105, 104, 103, 102, 101]))
    assert [column.tolist() for column in holdout.known[:2]] == [[1], [4]]


def test_a_text_of_two_tasks_is_two_queries() -> None:
    rows = [(10, 101, 1.0, None), (10, 104, 2.0, None), (10, 102, 1.0, None), (30, 103, 1.0, None)]
    holdout = join_holdout(*tables(rows, [101, 102, 103, 104]))
    assert holdout.keys == ((10, None), (10 ^ id_hash("search"), None), (30, None))
    assert holdout.tasks == [None, "search", None]
    assert relevant(holdout) == [(0, 0, 1.0), (0, 1, 1.0), (1, 3, 2.0), (2, 2, 1.0)]
    # What answers it in one task is no wrong answer in the other.
    assert [column.tolist() for column in holdout.known[:2]] == [[0, 1, 1], [3, 0, 1]]
    # Where a document answers it in both, it is found in both.
    holdout, documents, known = tables(rows, [101, 102, 103, 104])
    tasks = pa.array([None, "search", "search", None])
    again = holdout.append_column("again", tasks).drop_columns("task").rename_columns({"again": "task"})
    both = join_holdout(
        pa.concat_tables([holdout.drop_columns("task").append_column("task", holdout["task"]), again]), documents, known
    )
    assert relevant(both) == [(0, 0, 1.0), (0, 1, 1.0), (1, 1, 1.0), (1, 3, 2.0), (2, 2, 1.0)]
    assert [column.tolist() for column in both.known[:2]] == [[0, 1], [3, 0]]


def test_some_queries_come_with_their_own_documents_alone() -> None:
    holdout = join_holdout(*tables(ROWS, [105, 104, 103, 102, 101]), 3)
    assert [column.tolist() for column in holdout.known[:2]] == [[1], [2]]
    assert holdout.keys == ((10, None), (20 ^ id_hash("search"), "de"), (20, "en"))
    assert lists(holdout.candidates) == [[104, 104], [102, 102], [101, 101]]
    assert relevant(holdout) == [(0, 1, 1.0), (0, 2, 3.0), (1, 0, 1.0), (2, 2, 1.0)]
    assert len(join_holdout(*tables(ROWS, [105, 104, 103, 102, 101]), 100).queries) == 5


def test_holdouts_that_do_not_fit_are_refused() -> None:
    for row in ((5, 20, 1.0, None), (5, 40, 0.0, None)):
        with pytest.raises(BadData, match="not among the candidates"):
            join_holdout(*tables([row], [30]))
    with pytest.raises(BadData, match="no query"):
        join_holdout(*tables([(1, 101, 0.0, None)], [101]))


@pytest.mark.parametrize("kind", [pa.uint16(), pa.uint32(), pa.int32()])
def test_tokens_of_any_integers_stay_where_they_are_mapped(tmp_path: Path, kind: pa.DataType) -> None:
    expected = [[7], [1, 2, 3], [], [65535], [4, 5]]
    holdout, documents, known = tables([(index, index, 1.0, None) for index in range(5)], list(range(5)))
    tokens = pa.array(expected, pa.list_(kind))
    for name, table in (
        ("holdout", holdout.set_column(1, "query_tokens", tokens)),
        ("candidates", documents.set_column(0, "document_tokens", tokens)),
        ("known", known),
    ):
        with pa.ipc.new_file(str(tmp_path / f"{name}.arrow"), row_schemas(kind)[f"{name}.arrow"]) as writer:
            writer.write_table(table, max_chunksize=2)
    assert lists(token_lists(pa.chunked_array([tokens.slice(1, 3), tokens.slice(4)]))) == expected[1:]
    column = read_table(tmp_path / "candidates.arrow")["document_tokens"]
    assert column.num_chunks == 3
    allocated = pa.total_allocated_bytes()
    found = read_holdout(tmp_path)
    assert lists(found.candidates) == lists(found.queries) == expected
    assert {text.dtype for text in found.candidates if isinstance(text, np.ndarray)} == {np.dtype(kind.to_pandas_dtype())}
    assert pa.total_allocated_bytes() - allocated < 4096
