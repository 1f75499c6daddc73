"""The rows of a shard one by one, good and refused ones in the file's order, as tests compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.dataset.ingested import DOCUMENTS, PAIRS
from pipeline.dataset.records import BadRow
from pipeline.dataset.rows import read_blocks
from tests.benchmarks.row_by_row import CorpusRow, TrainingRow


def read_training_rows(uri: str, columns: Mapping[str, str]) -> Iterator[TrainingRow | BadRow]:
    return _rows(uri, PAIRS, columns, _training_row)


def read_corpus_rows(uri: str, columns: Mapping[str, str]) -> Iterator[CorpusRow | BadRow]:
    return _rows(uri, DOCUMENTS, columns, lambda row: CorpusRow(row["id"], row["document"], row["locale"], row["line"]))


def _rows(uri: str, kind: str, columns: Mapping[str, str], make: Any) -> Iterator[Any]:
    for block in read_blocks(uri, kind, columns):
        found: list[tuple[int, Any]] = [(row["line"], make(row)) for row in block.rows.to_pylist()]
        found += [(int(bad.at.rpartition(":")[2]), bad) for bad in block.bad]
        yield from (row for _, row in sorted(found, key=lambda each: each[0]))


def _training_row(row: dict[str, Any]) -> TrainingRow:
    values = {name: row[name] for name in TrainingRow._fields}
    return TrainingRow(**{**values, "negatives": tuple(row["negatives"])})
