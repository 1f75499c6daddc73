"""Golden sets: queries, judgements and a corpus of their own, which stay the same, as row files like those of the hold-out.

In the form of BEIR (Thakur et al. 2021, "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of Information Retrieval
Models"): `queries` and `corpus` are JSONL with `_id`, `text` and perhaps `title`; `qrels` is TSV with a heading: query, document,
score. A score above 0 is relevant. The files may be packed with gzip or Zstandard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from pipeline import store
from pipeline.config import GoldenSet
from pipeline.dataset.ids import id_hash
from pipeline.dataset.row_files import HOLDOUT_FILES, KNOWN, Lengths, RowWriter
from pipeline.dataset.tokens import TextTokenizer, Tokens
from pipeline.dataset.unpack import pieces
from pipeline.errors import BadData

GOLDEN = "golden"
"""Folder of the sets among the row files."""

EXAMPLES = 5


def write_golden(folder: Path, golden: GoldenSet, tokenizers: Mapping[str, tuple[TextTokenizer, Lengths]]) -> dict[str, int]:
    """Write a set's queries that are judged, and its corpus.

    Args:
        folder: local folder for the files.
        tokenizers: folder below it -> the tokenizer whose tokens it gets.

    Returns:
        Path below `folder` -> rows in it.

    Raises:
        MissingInput: no such file.
        BadData: a line cannot be read, or judgements name what is not there.
    """
    queries, corpus = (_texts(uri) for uri in (golden.queries, golden.corpus))
    judged = list(_judgements(golden.qrels))
    found: dict[str, int] = {}
    for below, (tokenizer, lengths) in tokenizers.items():
        asked = _encoded(tokenizer, queries, lengths.query, "query")
        documents = _encoded(tokenizer, corpus, lengths.candidate, "document")
        _check(golden, "queries", {query for query, *_ in judged}, asked)
        _check(golden, "documents", {document for _, document, _ in judged}, documents)
        with RowWriter(folder / below, tokenizer.vocabulary, [*HOLDOUT_FILES, KNOWN]) as writer:
            # Ids stand for texts: equal documents of a set are candidates of their own.
            rows = [
                {
                    "id": document,
                    "query_tokens": asked[query],
                    "query_hash": id_hash(query),
                    "document_hash": id_hash(document),
                    "label": score,
                    "locale": None,
                    "task": None,
                    "key": id_hash(query),
                    "new": False,
                }
                for query, document, score in judged
            ]
            writer.add(HOLDOUT_FILES[0], pa.Table.from_pylist(rows, writer.schemas[HOLDOUT_FILES[0]]))
            candidates = [
                {"document_tokens": tokens, "document_hash": id_hash(document), "id": document}
                for document, tokens in documents.items()
            ]
            writer.add(HOLDOUT_FILES[1], pa.Table.from_pylist(candidates, writer.schemas[HOLDOUT_FILES[1]]))
        found |= {str(Path(below, name)): rows for name, rows in writer.rows.items()}
    return found


def _check(golden: GoldenSet, what: str, named: set[str], texts: Mapping[str, Tokens]) -> None:
    if unknown := sorted(named - texts.keys()):
        raise BadData(
            f"judgements of the golden set {golden.name} name unknown {what}",
            value=[f"{len(unknown) / len(named):.1%} of {len(named):,} {what}", *unknown[:EXAMPLES]],
            rule="every judged id has a text, which is not empty, in the set's own files",
            remedy=f"correct {golden.qrels}, or add the {what}",
        )


def _encoded(tokenizer: TextTokenizer, texts: Mapping[str, str], length: int, side: str) -> dict[str, Tokens]:
    tokens = tokenizer.encode_each(list(texts.values()), length, tokenizer.prompts[side])
    return {name: one for name, one in zip(texts, tokens, strict=True) if texts[name].strip() and not isinstance(one, str)}


def _texts(uri: str) -> dict[str, str]:
    found = {}
    for place, line in _lines(uri):
        try:
            record = json.loads(line)
            found[str(record["_id"])] = " ".join(filter(None, [record.get("title"), record["text"]]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(place, 'a JSON object with "_id" and "text", and of a document perhaps "title"', error) from error
    return found


def _judgements(uri: str) -> Iterator[tuple[str, str, float]]:
    """Yield query, document and score of those that say that a document is relevant."""
    lines = _lines(uri)
    next(lines, None)
    for place, line in lines:
        try:
            query, document, score = line.split("\t")
            if float(score) > 0:
                yield query, document, float(score)
        except ValueError as error:
            raise _unreadable(
                place, "query, document and score, with tabs between them, below one line of headings", error
            ) from error


def _lines(uri: str) -> Iterator[tuple[str, str]]:
    with store.open_read(uri) as stream:
        # Of bytes: text would be split at U+2028 and its like, which JSON has within strings.
        lines = b"".join(pieces(uri, stream)).splitlines()
    yield from ((f"{uri}:{number}", line.decode(errors="replace")) for number, line in enumerate(lines, start=1) if line.strip())


def _unreadable(place: str, rule: str, error: Exception) -> BadData:
    return BadData("a line of a golden set cannot be read", value=f"{place}: {error!r}", rule=rule, remedy="correct the file")
