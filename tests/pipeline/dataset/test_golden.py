"""Golden sets: from BEIR's files to row files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import GoldenSet
from pipeline.dataset.golden import write_golden
from pipeline.dataset.row_files import PUBLISHED, Lengths, read_table
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData
from pipeline.evaluation.holdout import read_holdout
from tests.tiny import make_model

LENGTHS = Lengths(query=12, document=16, candidate=24, queries_of={})
QUERIES = [{"_id": "q1", "text": "bake limo"}, {"_id": "q2", "text": "keli"}, {"_id": "unjudged", "text": "nu"}]
CORPUS = [
    {"_id": "d1", "title": "bara", "text": "kese liti"},
    {"_id": "d2", "title": "", "text": "movo"},
    {"_id": "d3", "text": "nuzu " * 40},
    {"_id": "empty", "text": ""},
]
QRELS = [("q1", "d1", "2"), ("q1", "d3", "1"), ("q2", "d2", "1"), ("q2", "d1", "0")]


def golden(folder: Path, queries: Any = QUERIES, corpus: Any = CORPUS, qrels: Any = QRELS) -> GoldenSet:
    """A set in a folder; lines that are no records are written as they are."""

    def lines(values: Any) -> bytes:
        return "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values).encode()

    (folder / "queries.jsonl").write_bytes(lines(queries))
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines(corpus)))
    table = ["query-id\tcorpus-id\tscore", *(row if isinstance(row, str) else "\t".join(row) for row in qrels)]
    (folder / "test.tsv").write_bytes(lines(table))
    return GoldenSet(
        name="shop",
        queries=str(folder / "queries.jsonl"),
        qrels=str(folder / "test.tsv"),
        corpus=str(folder / "corpus.jsonl.gz"),
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    make_model(tmp_path / "model")
    return TextTokenizer(tmp_path / "model")


def test_the_files_are_those_of_a_holdout(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    tokenizers = {"": (tokenizer, LENGTHS), PUBLISHED: (tokenizer, Lengths(query=3, document=4, candidate=5, queries_of={}))}
    found = write_golden(tmp_path / "rows", golden(tmp_path), tokenizers)
    # What is judged irrelevant is a candidate like any other.
    files = {"holdout.arrow": 3, "candidates.arrow": 3, "known.arrow": 0}
    assert found == {**files, **{f"{PUBLISHED}/{name}": rows for name, rows in files.items()}}
    exam = read_holdout(tmp_path / "rows")
    candidates = read_table(tmp_path / "rows" / "candidates.arrow")
    assert candidates["id"].to_pylist() == ["d1", "d2", "d3"]
    assert exam.candidates[0].tolist() == tokenizer.encode(["bara kese liti"], 24)[0].tolist()
    assert [len(tokens) for tokens in exam.candidates][2] == 24
    texts = [tokens.tolist() for tokens in exam.queries]
    assert sorted(texts) == sorted(tokens.tolist() for tokens in tokenizer.encode(["bake limo", "keli"], 12))
    first = texts.index(tokenizer.encode(["bake limo"], 12)[0].tolist())
    relevant = zip(exam.relevant.query.tolist(), exam.relevant.candidate.tolist(), exam.relevant.gain.tolist(), strict=True)
    assert sorted(relevant) == sorted([(first, 0, 2.0), (first, 2, 1.0), (1 - first, 1, 1.0)])
    own = read_holdout(tmp_path / "rows", PUBLISHED)
    assert (max(map(len, own.queries)), max(map(len, own.candidates))) == (3, 5)


def test_texts_may_have_what_python_calls_the_end_of_a_line(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """As JSON has them that is not escaped."""
    text = "ba\u2028ra\u2029ke\x85se"
    corpus = [json.dumps({"_id": "d1", "text": text}, ensure_ascii=False), *CORPUS[1:]]
    write_golden(tmp_path / "rows", golden(tmp_path, corpus=corpus), {"": (tokenizer, LENGTHS)})
    [first, *_] = read_holdout(tmp_path / "rows").candidates
    assert first.tolist() == tokenizer.encode([text], 24)[0].tolist()


@pytest.mark.parametrize(
    ("qrels", "words"),
    [
        ([*QRELS, ("q1", "d9", "1")], ["unknown documents", "25.0% of 4 documents", "d9"]),
        ([*QRELS, ("q2", "empty", "1")], ["unknown documents", "empty", "not empty"]),
        ([*QRELS, ("q9", "d1", "1")], ["unknown queries", "33.3% of 3 queries", "q9"]),
    ],
)
def test_judgements_of_what_is_not_there_are_refused(tmp_path: Path, tokenizer: TextTokenizer, qrels: Any, words: Any) -> None:
    with pytest.raises(BadData) as caught:
        write_golden(tmp_path / "rows", golden(tmp_path, qrels=qrels), {"": (tokenizer, LENGTHS)})
    assert all(word in "\n".join(caught.value.lines()) for word in [*words, "golden set shop", "test.tsv"])
    assert int(caught.value.exit_code) == 65


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ({"qrels": [*QRELS, "q1\td1"]}, "test.tsv:6"),
        ({"qrels": ["q1\td1\thigh"]}, "test.tsv:2"),
        ({"queries": [*QUERIES, {"text": "without an id"}]}, "queries.jsonl:4"),
        ({"queries": ["no json"]}, "queries.jsonl:1"),
        ({"corpus": [*CORPUS, {"_id": "d4", "text": 5}]}, "corpus.jsonl.gz:5"),
        ({"corpus": [["d4"]]}, "corpus.jsonl.gz:1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: TextTokenizer, broken: Any, place: str) -> None:
    with pytest.raises(BadData, match="golden set cannot be read") as caught:
        write_golden(tmp_path / "rows", golden(tmp_path, **broken), {"": (tokenizer, LENGTHS)})
    assert place in str(caught.value.value)
