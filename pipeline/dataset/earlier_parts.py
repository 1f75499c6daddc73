"""Embeddings that are there already: what has not changed is taken from earlier parts, and not computed again.

A vector depends on the text's tokens and on the form: the weights, how they are used, and the packages and the device that
compute with them. In other batches it would differ by rounding only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import store
from pipeline.contract import RunPaths
from pipeline.dataset.ids import IdDigest, id_hashes
from pipeline.dataset.ingested import Hashes, mixed, string_hashes
from pipeline.dataset.parts import Embeddings, PartRecord, embeddings_of, read_batches
from pipeline.errors import BadData, MissingInput
from pipeline.log import log

HASH_BYTES = 8

Parts = list[tuple[str, PartRecord]]
"""URIs of parts with their records."""


def embedding_form(facts: Mapping[str, Any]) -> str:
    """Return a hash of all that decides the embedding of a text's tokens."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def token_hashes(tokens: NDArray[np.int32], lengths: NDArray[np.int64]) -> Hashes:
    """Return the first 8 bytes of the BLAKE2b hash of each text's token ids as little-endian int32, (rows,).

    Args:
        tokens: of all texts, one behind another.
        lengths: of each.
    """
    ends = (4 * np.cumsum(lengths)).tolist()
    content = memoryview(tokens.astype("<i4").tobytes())
    digests = (hashlib.blake2b(content[a:b], digest_size=HASH_BYTES).digest() for a, b in zip([0, *ends], ends, strict=False))
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def content_digest(documents: pa.Table, tokens: Hashes) -> IdDigest:
    """Return a digest of documents, equal for the same ones in any order: ids, texts, locales.

    Args:
        documents: with `key`, `document_hash` and `locale`.
        tokens: see `token_hashes`.
    """
    texts = mixed(documents["document_hash"].to_numpy() ^ mixed(tokens ^ string_hashes(documents["locale"])))
    return IdDigest.of(mixed(documents["key"].to_numpy() ^ texts))


class EarlierParts:
    """Finds parts of one form that hold the documents of a part.

    Args:
        paths: of the run that embeds, whose own earlier parts come first.
        count: of its parts.
        manifests: of earlier embeddings, in the order in which they are looked at.
        form: see `embedding_form`.
    """

    def __init__(self, paths: RunPaths, count: int, manifests: Sequence[str], form: str) -> None:
        self._paths = paths
        self._count = count
        self._form = form
        self._sets = [uris for uris in map(self._uris_of, manifests) if uris]

    def _uris_of(self, manifest: str) -> list[str]:
        try:
            content = store.read_json(manifest)
            if content.get("form") == self._form:
                return [part["uri"] for part in content["parts"]]
            log.info("embed: the embeddings of %s have another form; they are computed anew", manifest)
        except MissingInput:
            log.info("embed: %s is not there", manifest)
        return []

    def covering(self, index: int) -> Parts:
        """Return the parts that hold the documents of a part, in the order of their keys; empty: none do."""
        # Those that overlap with it: both numbers are powers of two, of equal intervals.
        ranges = [(uris, index * len(uris) // self._count, (index + 1) * len(uris) // self._count) for uris in self._sets]
        sets = [[self._paths.part(index, self._count)], *(uris[start : max(end, start + 1)] for uris, start, end in ranges)]
        for uris in sets:
            with suppress(MissingInput, BadData):
                found = [(uri, PartRecord.from_json(store.read_bytes(f"{uri.removesuffix('.parquet')}.json"))) for uri in uris]
                found = [(record.uri or uri, record) for uri, record in found]
                if all(record.form == self._form and store.sha256(uri) == record.sha256 for uri, record in found):
                    return found
        return []


class EarlierVectors:
    """The vectors of some parts, read once in the order of their keys.

    Args:
        paths: local files of the parts, in order.
        dimension: of a vector.
    """

    def __init__(self, paths: Sequence[Path], dimension: int, dtype: str) -> None:
        self._batches = self._read(paths)
        self._keys, self._tokens = np.empty(0, np.uint64), np.empty(0, np.uint64)
        self._vectors: Embeddings = np.empty((0, dimension), dtype)

    @staticmethod
    def _read(paths: Sequence[Path]) -> Iterator[tuple[Hashes, Hashes, Embeddings]]:
        for path in paths:
            for batch in read_batches(path, ["id", "embedding", "token_hash"]):
                yield id_hashes(batch["id"].to_pylist()), batch["token_hash"].to_numpy(), embeddings_of(batch)

    def take(self, keys: Hashes, tokens: Hashes) -> tuple[NDArray[np.bool_], Embeddings]:
        """Return which documents have a vector, (rows,), and these vectors, (n, D).

        Args:
            keys: hashes of ids, ascending, and above those of the call before.
            tokens: see `token_hashes`.
        """
        while not (len(self._keys) and self._keys[-1] >= keys[-1]) and (batch := next(self._batches, None)):
            self._keys = np.concatenate([self._keys, batch[0]])
            self._tokens = np.concatenate([self._tokens, batch[1]])
            self._vectors = np.concatenate([self._vectors, batch[2]])
        if not len(self._keys):
            return np.zeros(len(keys), np.bool_), self._vectors
        place = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        found = (self._keys[place] == keys) & (self._tokens[place] == tokens)
        vectors = self._vectors[place[found]]
        behind = int(np.searchsorted(self._keys, keys[-1], "right"))
        self._keys, self._tokens, self._vectors = self._keys[behind:], self._tokens[behind:], self._vectors[behind:]
        return found, vectors
