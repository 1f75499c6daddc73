"""Find the input files under the configured URIs, hash them, and check and count all rows in one pass."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline import store
from pipeline.dataset.ids import id_hash, repeated
from pipeline.dataset.records import EXCERPT_CHARACTERS, SUFFIXES, BadRow, is_shard
from pipeline.dataset.rows import CorpusRow, TrainingRow, normalized_hash, read_corpus_rows, read_training_rows
from pipeline.errors import BadConfig, MissingInput

log = logging.getLogger("trnpipe")

BEAT_ROWS = 5000
READ_BYTES = 4 << 20

Refuse = Callable[[BadRow], None]
Beat = Callable[[int], None]
"""Called regularly with the bytes or rows done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A shard before its rows are read: URI, SHA-256, size in bytes."""

    uri: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScan:
    """The result of one pass over a training shard; the arrays have one element per good row, in the file's order.

    Attributes:
        file: the shard.
        bad_rows: refused rows.
        ids: hashes of the ids.
        documents: normalized hashes of the documents.
        positive: the label is above 0: a pair to train on.
        conflicts: rows whose id has another document in an earlier row; none until `distinct_documents` has looked.
    """

    file: InputFile
    bad_rows: int
    ids: NDArray[np.uint64]
    documents: NDArray[np.uint64]
    positive: NDArray[np.bool_]
    conflicts: NDArray[np.bool_] | None = None

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def usable(self) -> NDArray[np.bool_]:
        """The rows without a conflict."""
        return np.ones(self.rows, np.bool_) if self.conflicts is None else ~self.conflicts


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusScan:
    """The result of one pass over a corpus shard; attributes as of `ShardScan`."""

    file: InputFile
    bad_rows: int
    ids: NDArray[np.uint64]
    documents: NDArray[np.uint64]
    conflicts: NDArray[np.bool_] | None = None

    @property
    def rows(self) -> int:
        return len(self.ids)


def find_shards(uris: Sequence[str], setting: str) -> list[store.ObjectInfo]:
    """Return the shards that URIs of files and folders name, each once, sorted by URI.

    In folders it skips (and logs) other kinds of files, and names that begin with `_` or `.`, as those of work in progress do.

    Args:
        setting: the configuration key the URIs come from, for messages.

    Raises:
        MissingInput: a URI names nothing, or a folder without a shard.
        BadConfig: a URI names a file that is not a shard.
    """
    found: dict[str, store.ObjectInfo] = {}
    for uri in uris:
        info = None if uri.endswith("/") else store.stat(uri)
        if info is not None and not is_shard(uri):
            raise BadConfig(
                "unknown kind of input file", value=f"{setting}: {uri}", rule=f"a shard's name ends in one of {SUFFIXES}"
            )
        shards = [info] if info is not None else _shards_of_folder(uri)
        if not shards:
            raise MissingInput(
                "no shard found",
                value=f"{setting}: {uri}",
                rule=f"a file, or a folder of files, whose names end in one of {', '.join(SUFFIXES)}",
                remedy="check the URI and that the data was uploaded",
            )
        found.update((shard.uri, shard) for shard in shards)
    return [found[uri] for uri in sorted(found)]


def hash_shards(shards: Iterable[store.ObjectInfo], beat: Beat) -> list[InputFile]:
    """Return the shards with their SHA-256. Calls `beat` with the bytes read so far."""
    files, done = [], 0
    for shard in shards:
        digest, size = hashlib.sha256(), 0
        with store.open_read(shard.uri) as stream:
            while piece := stream.read(READ_BYTES):
                digest.update(piece)
                size += len(piece)
                beat(done + size)
        done += size
        files.append(InputFile(uri=shard.uri, sha256=digest.hexdigest(), size=size))
    return files


def scan_training(files: Iterable[InputFile], columns: Mapping[str, str], refuse: Refuse, beat: Beat) -> list[ShardScan]:
    """Check every row of training shards.

    Args:
        refuse: called with every bad row.
        beat: called with the number of rows read so far.
    """
    scans, done = [], 0
    for file in files:
        ids, documents, positive, bad = array("Q"), array("Q"), bytearray(), 0
        for row in read_training_rows(file.uri, columns):
            done += 1
            if done % BEAT_ROWS == 0:
                beat(done)
            if isinstance(row, BadRow):
                bad += 1
                refuse(row)
                continue
            ids.append(id_hash(row.id))
            documents.append(normalized_hash(row.document))
            positive.append(row.label > 0)
        scans.append(
            ShardScan(
                file=file,
                bad_rows=bad,
                ids=np.frombuffer(ids, np.uint64),
                documents=np.frombuffer(documents, np.uint64),
                positive=np.frombuffer(positive, np.bool_),
            )
        )
    return scans


def scan_corpus(files: Iterable[InputFile], columns: Mapping[str, str], refuse: Refuse, beat: Beat) -> list[CorpusScan]:
    """Check every row of corpus shards; arguments as for `scan_training`."""
    scans, done = [], 0
    for file in files:
        ids, documents, bad = array("Q"), array("Q"), 0
        for row in read_corpus_rows(file.uri, columns):
            done += 1
            if done % BEAT_ROWS == 0:
                beat(done)
            if isinstance(row, BadRow):
                bad += 1
                refuse(row)
                continue
            ids.append(id_hash(row.id))
            documents.append(normalized_hash(row.text))
        scans.append(
            CorpusScan(
                file=file,
                bad_rows=bad,
                ids=np.frombuffer(ids, np.uint64),
                documents=np.frombuffer(documents, np.uint64),
            )
        )
    return scans


def distinct_documents(scans: Sequence[ShardScan | CorpusScan]) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.bool_]]]:
    """Return for each shard which rows are the first of their id, and which have another document than the first of their id.

    Rows that repeat an id with the same normalized document, as several queries for one document do, are neither.
    """
    ids, documents = (np.concatenate([getattr(scan, name) for scan in scans]) for name in ("ids", "documents"))
    first, conflicts = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    rows = np.flatnonzero(np.isin(ids, repeated([ids])))
    rows = rows[np.argsort(ids[rows], kind="stable")]
    begins = np.flatnonzero(np.diff(ids[rows], prepend=~ids[rows[:1]]) != 0)
    leaders = np.repeat(rows[begins], np.diff(begins, append=len(rows)))
    first[rows] = rows == leaders
    conflicts[rows] = documents[rows] != documents[leaders]
    ends = np.cumsum([scan.rows for scan in scans])[:-1]
    return np.split(first, ends), np.split(conflicts, ends)


def locate_conflicts(
    files: Iterable[InputFile],
    source: str,
    columns: Mapping[str, str],
    conflicts: Sequence[NDArray[np.bool_]],
    hashes: NDArray[np.uint64],
    beat: Beat,
) -> Iterator[tuple[int, int, BadRow | None]]:
    """Yield shard and row of each conflict, with both places; None instead of them if the ids only share a hash.

    Args:
        source: `corpus` or `documents`: which kind of rows the files hold.
        conflicts: of each shard, see `distinct_documents`.
        hashes: hashes of the ids of rows with a conflict.
        beat: called with the number of rows read so far.
    """
    suspects = set(hashes.tolist())
    first: dict[int, tuple[str, str]] = {}
    done = 0
    for number, (file, marked) in enumerate(zip(files, conflicts, strict=True)):
        for index, row in enumerate(_good_rows(file, source, columns)):
            done += 1
            if done % BEAT_ROWS == 0:
                beat(done)
            if (value := id_hash(row.id)) not in suspects:
                continue
            place = f"{file.uri}:{row.line}"
            identifier, before = first.setdefault(value, (row.id, place))
            if marked[index]:
                reason = f"id {row.id!r} has another document at {before}"
                same = identifier == row.id
                yield number, index, BadRow(place, reason, row.id[:EXCERPT_CHARACTERS]) if same else None


def _good_rows(file: InputFile, source: str, columns: Mapping[str, str]) -> Iterator[TrainingRow | CorpusRow]:
    rows: Iterator[TrainingRow | CorpusRow | BadRow]
    rows = read_corpus_rows(file.uri, columns) if source == "corpus" else read_training_rows(file.uri, columns)
    return (row for row in rows if not isinstance(row, BadRow))


def _shards_of_folder(uri: str) -> list[store.ObjectInfo]:
    root = uri.removeprefix("file://").rstrip("/")
    shards: list[store.ObjectInfo] = []
    others: list[store.ObjectInfo] = []
    for info in store.list_objects(uri):
        if any(part.startswith(("_", ".")) for part in info.uri.removeprefix(root).strip("/").split("/")):
            continue
        (shards if is_shard(info.uri) else others).append(info)
    if others:
        log.warning("skipped %d files under %s that are not shards, e.g. %s", len(others), uri, others[0].uri)
    return shards
