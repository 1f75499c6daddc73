"""The texts that are embedded and trained on: short, long and mixed, real, and the same wherever the same packages are.

Short ones are WordNet's glosses (Debian package `wordnet-base`; without it docstrings' first lines only) and first lines of the
installed packages' docstrings, long ones whole docstrings joined, mixed ones both and whole docstrings. Pairs for training are a
docstring's first line and the rest of it. In the order of their hashes, so that a part is a sample of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from infra.local.demo import Pair, read_pairs

WORDNET = Path("/usr/share/wordnet")
LONG_CHARACTERS = 1500
"""Some 350 tokens: more than the model's limit of 256."""

SETS = ("short", "mixed", "long")


def write_corpus(path: Path, name: str, rows: int) -> Path:
    """Rows {id, text} of one of SETS.

    Args:
        rows: at most so many.
    """
    makers = {"short": short, "mixed": mixed, "long": long}
    return _write(
        path, ({"id": f"{name}-{number:07d}", "text": text} for number, text in enumerate(islice(makers[name](), rows)))
    )


def write_pairs(path: Path, rows: int) -> Path:
    """Rows {id, query, document}.

    Args:
        rows: at most so many.
    """
    chosen = pairs()[:rows]
    return _write(path, ({"id": pair.id, "query": pair.query, "document": pair.document} for pair in chosen))


@cache
def pairs() -> tuple[Pair, ...]:
    """Docstrings, in the order of their hashes; reading them takes a while."""
    return tuple(sorted(read_pairs(), key=lambda pair: _hash(pair.id)))


def short() -> Iterator[str]:
    """Some 10 to 30 tokens."""
    yield from sorted({*glosses(), *(pair.query for pair in pairs())}, key=_hash)


def long() -> Iterator[str]:
    """Longer than the model reads."""
    joined = ""
    for text in whole():
        joined = f"{joined}\n{text}" if joined else text
        if len(joined) >= LONG_CHARACTERS:
            yield joined
            joined = ""


def mixed() -> Iterator[str]:
    """A half is short, the other half whole docstrings, every eighth of these joined to long ones."""
    yield from sorted([text for pair in zip(short(), whole()) for text in pair] + list(islice(long(), 2000)), key=_hash)  # noqa: B905


def whole() -> Iterator[str]:
    """Docstrings under their signatures, some 30 to 300 tokens."""
    yield from sorted({pair.document for pair in pairs()}, key=_hash)


def glosses() -> Iterator[str]:
    """Lemma and gloss of every WordNet entry, nothing where it is not installed (format: wndb(5WN))."""
    for path in sorted(WORDNET.glob("data.*")):
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                entry, separator, gloss = line.partition("|")
                if separator and not line.startswith("  "):
                    yield f"{entry.split()[4].replace('_', ' ')}: {gloss.strip()}"


def _write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
