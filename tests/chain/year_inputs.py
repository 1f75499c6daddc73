"""The inputs of a year of executions: real text, training shards and a corpus that change, and a tiny encoder to begin with.

The text is WordNet's glosses where the package wordnet-base is installed, else the demo's docstrings. A query is what a person
remembers of a document: its word (or first line) and two words of it. Everything follows from a seed. The model of expected rows
(`Inputs.new_rows`) and of the expected corpus (`Inputs.documents`) is this module's own: docs/data.md in a few lines.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertTokenizerFast

from infra.local import demo
from pipeline.config import ModelConfig
from pipeline.model.encoder import new_encoder
from pipeline.model.folder import save_folder

WORDNET = Path("/usr/share/wordnet")
PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
WORD = re.compile(r"[a-z]{4,}")
REMEMBERED_WORDS = 2

HOLDOUT_SHARE = 0.25
HIDDEN_PAIRS = 20_000
FIRST_ROWS, WEEKLY_ROWS = 8000, 300
FIRST_DOCUMENTS = 3000
CORPUS_FILES, CHANGED_FILES = 6, 2
ADDED, CHANGED, DROPPED = 40, 15, 10
"""Documents that a refresh finds added, changed and gone."""
VOCABULARY, READ_FOR_WORDS, HIDDEN_SIZE = 4000, 30_000, 48


class Row(NamedTuple):
    """A training row, and the document with its id."""

    id: str
    locale: str
    query: str
    document: str


def read_rows() -> list[Row]:
    """Return all rows in the order of a hash of their ids; of equal documents one."""
    found = _wordnet() if (WORDNET / "data.noun").is_file() else _docstrings()
    distinct = {text_hash(row.document): row for row in found}
    return sorted(distinct.values(), key=lambda row: hashlib.sha256(row.id.encode()).digest())


def _wordnet() -> Iterator[Row]:
    """The part of speech takes the place of a locale: queries and documents differ by it."""
    for part in PARTS_OF_SPEECH:
        with (WORDNET / f"data.{part}").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(" "):
                    continue
                synset, _, gloss = line.partition(" | ")
                offset, _, _, _, word, *_ = synset.split()
                yield _row(f"{part}-{offset}", part, re.sub(r"\(.*\)$", "", word.replace("_", " ")), gloss.strip())


def _docstrings() -> Iterator[Row]:
    for pair in demo.read_pairs():
        package = pair.id.partition(".")[0]
        yield _row(pair.id, package if package in demo.PACKAGES else "python", pair.query, pair.document)


def _row(name: str, locale: str, title: str, document: str) -> Row:
    words = sorted({*WORD.findall(document.lower())}, key=lambda word: hashlib.sha256(f"{name} {word}".encode()).digest())
    return Row(name, locale, " ".join([title, *words[:REMEMBERED_WORDS]]), document)


@cache
def text_hash(text: str) -> int:
    """Return the hash of a normalized text: 64 bits."""
    normalized = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int(hashlib.sha256(normalized.encode()).hexdigest()[:16], 16)


def make_initial(folder: Path, rows: Sequence[Row], seed: int) -> None:
    """Write a random two-layer BERT with a vocabulary of the rows' words as a model folder."""
    words = BertWordPieceTokenizer()
    texts = (text for row in rows[:READ_FOR_WORDS] for text in (row.query, row.document))
    words.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=3, show_progress=False)
    source = folder.with_name("tokenizer")
    source.mkdir(parents=True)
    special, learned = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], set(words.get_vocab())
    # The trainer finds the same ones in every process, in another order.
    (source / "vocab.txt").write_text("\n".join([*special, *sorted(learned - {*special})]))
    BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * HIDDEN_SIZE,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
    )
    encoder = new_encoder(config, ModelConfig())
    with torch.no_grad():
        # Larger than BERT's own start, so that different words give clearly different embeddings.
        encoder.backbone.embeddings.word_embeddings.weight.normal_()
    save_folder(encoder.eval(), folder, source)


@dataclass
class Inputs:
    """The bucket of the systems that feed the pipeline.

    Args:
        put: writes an object: key, content.

    Attributes:
        hidden: pairs that are in no shard, ever.
        weekly_rows: new rows of a usual week.
        shards: key -> rows.
        corpus: key -> documents by id.
        deleted: ids that `data.delete` names.
        deleted_texts: texts that it names by their hashes.
    """

    put: Callable[[str, bytes], None]
    draw: random.Random
    pool: list[Row]
    hidden: list[Row]
    weekly_rows: int
    shards: dict[str, list[Row]] = field(default_factory=dict)
    corpus: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    deleted: set[str] = field(default_factory=set)
    deleted_texts: set[str] = field(default_factory=set)

    @classmethod
    def first(cls, put: Callable[[str, bytes], None], seed: int, weeks: int, hidden: int) -> Inputs:
        """What is there before the first execution of so many weeks, with so many hidden pairs if there is text enough."""
        rows = read_rows()
        hidden = min(hidden, len(rows) // 5)
        weekly = min(WEEKLY_ROWS, (len(rows) - hidden - FIRST_ROWS) // (weeks + 1))
        inputs = cls(put, random.Random(seed), rows[hidden:], rows[:hidden], weekly)
        rows = inputs.take(FIRST_ROWS)
        inputs.deliver("week-01", rows)
        for number, row in enumerate(rows[:FIRST_DOCUMENTS]):
            inputs.corpus[f"corpus/{number % CORPUS_FILES}.jsonl"][row.id] = row.document
        for key in inputs.corpus:
            inputs._put_corpus(key)
        put("delete/none.txt", b"")
        return inputs

    @property
    def smallest_locale(self) -> str:
        return Counter(row.locale for row in self.hidden).most_common()[-1][0]

    def take(self, count: int, without: str = "") -> list[Row]:
        """Take rows from the pool, none of one locale."""
        chosen = [row for row in self.pool[: 3 * count] if row.locale != without][:count]
        taken = {row.id for row in chosen}
        self.pool = [row for row in self.pool if row.id not in taken]
        return chosen

    def deliver(self, name: str, rows: Sequence[Row]) -> None:
        """Write a training shard, or write it again."""
        self.shards[f"pairs/{name}.jsonl"] = list(rows)
        self.put(f"pairs/{name}.jsonl", _lines(row._asdict() for row in rows))

    def rewrite(self, name: str) -> None:
        """Write a shard again, without some of its rows and with others."""
        changed = self.weekly_rows // 10
        kept = self.shards[f"pairs/{name}.jsonl"][:-changed]
        self.deliver(name, [*kept, *self.take(2 * changed)])

    def deliver_mixed_up(self, name: str, rows: Sequence[Row]) -> None:
        """Write a shard whose documents answer other queries of the shard."""
        self.deliver(name, [row._replace(query=other.query) for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)])

    def change_corpus(self) -> None:
        """Add, change and drop documents in some of the corpus's files."""
        searched = [row for rows in self.shards.values() for row in rows]
        keys = self.draw.sample(sorted(self.corpus), CHANGED_FILES)
        there = {name for documents in self.corpus.values() for name in documents}
        for key in keys:
            documents = self.corpus[key]
            for name in self.draw.sample(sorted(documents), DROPPED // CHANGED_FILES):
                del documents[name]
            for name in self.draw.sample(sorted(documents), CHANGED // CHANGED_FILES):
                documents[name] = " ".join(reversed(documents[name].split()))
            for row in self.draw.sample(searched, ADDED // CHANGED_FILES):
                if row.id not in there:
                    documents[row.id] = row.document
                    there.add(row.id)
            self._put_corpus(key)

    def delete(self, name: str, count: int) -> None:
        """Name documents in a list of deletions: all but one by id, one by the hash of its text."""
        documents = self.documents()
        *ids, last = self.draw.sample(sorted(documents), count)
        self.deleted.update(ids)
        self.deleted_texts.add(documents[last])
        self.put(f"delete/{name}.txt", "\n".join([*ids, f"hash:{text_hash(documents[last]):016x}"]).encode())

    def documents(self) -> dict[str, str]:
        """Return the documents that are to be embedded: id -> text."""
        hashes = {text_hash(text) for text in self.deleted_texts}
        return {
            name: text
            for documents in self.corpus.values()
            for name, text in documents.items()
            if name not in self.deleted and text_hash(text) not in hashes
        }

    def rows(self) -> set[tuple[str, str, str]]:
        """Return the distinct rows that may be trained on: neither held out nor deleted."""
        hashes = {text_hash(text) for text in self.deleted_texts}
        return {
            (row.locale, row.query, row.document)
            for rows in self.shards.values()
            for row in rows
            if text_hash(row.document) >= HOLDOUT_SHARE * 2**64
            and row.id not in self.deleted
            and not {text_hash(row.document), text_hash(row.query)} & hashes
        }

    def _put_corpus(self, key: str) -> None:
        self.put(key, _lines({"id": name, "text": text} for name, text in self.corpus[key].items()))


def _lines(rows: Iterable[dict[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()
