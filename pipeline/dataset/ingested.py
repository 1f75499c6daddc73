"""Ingested shards: the rows of an input file as columnar files that all runs of a bucket share, and their tokens.

ingest writes them once for each version of a file; plan, embed, publish and search read ranges of them, and nothing else of the
input. They are named by all that they depend on, and complete once their `profile.json.gz` is there, which is written last. They
never change, but for rows that `data.delete` names: the others are written into a folder of their own below the shard's, the
profile is replaced by one that names that folder, and the files before it are removed.

    ingested/rows/NAME/    facts-00000.arrow    what decides about a row: hashes, id, label, locale, task, line
                           texts-00000.arrow    its texts
                           hashes-00000.bin     its 64-bit hashes by which plan decides, see HASHES
                           quarantine.jsonl     refused rows, if there are any
                           profile.json.gz      Profile
    ingested/tokens/ROWS/NAME/
                           tokens-00000.arrow   token ids of the rows of that name, for one tokenizer
                           profile.json.gz      TokenProfile
    mined/ROWS/NAME/
                           mined-00000.arrow    mined negatives of these rows, see `mined_schema`; only with train.mine
                           profile.json.gz      TokenProfile

A file holds at most FILE_ROWS rows, sorted by `key`, a hash: of pairs the hash of what is held out together (`data.holdout_by`),
of documents the hash of the id. So the hold-out, a sample to replay, and the documents of an output part are intervals of keys,
and contiguous rows of every file. The interval of all keys is divided into SLICES equal ones, whose first rows the profile holds.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, PlainSerializer, ValidationError

from pipeline import store
from pipeline.config import MineConfig
from pipeline.dataset.ids import id_hash
from pipeline.dataset.reading import in_threads, read_records
from pipeline.errors import BadData, MissingInput
from pipeline.log import log
from pipeline.run_inputs import InputShard, PlanSection, TokenizerPlan

PROFILE = "profile.json.gz"
"""Compressed: it has the places of thousands of pieces of rows, and prepare and plan read that of every known shard each week."""

SCHEMA_VERSION = 4
"""Of everything below, and of the rules of rows.py: a change of either makes new names."""

IDENTITY_VERSION = 3
"""Of `row_versions` and the hashes of texts: with another one, every row counts as new."""

SLICES = 1024
FILE_ROWS = 1 << 18
BATCH_ROWS, TOKEN_BATCH_ROWS = 64, 16
"""Rows of a record batch, the smallest piece that is read; of tokens, which are larger than what decides about their rows."""

READ_ROWS = 4096
"""Rows of one request: some megabytes. Whole batches."""

PAIRS, DOCUMENTS = "pairs", "documents"
HASHES = {PAIRS: np.dtype([("version", np.uint64)]), DOCUMENTS: np.dtype([("key", np.uint64), ("document_hash", np.uint64)])}
"""Of each row, side by side: 8 bytes of a pair, 16 of a document."""

FACTS = {
    PAIRS: pa.schema(
        [
            ("key", pa.uint64()),
            ("version", pa.uint64()),
            ("query_hash", pa.uint64()),
            ("document_hash", pa.uint64()),
            ("negative_hashes", pa.list_(pa.uint64())),
            ("id", pa.string()),
            ("label", pa.float32()),
            ("locale", pa.string()),
            ("task", pa.string()),
            ("line", pa.int64()),
        ]
    ),
    DOCUMENTS: pa.schema(
        [
            ("key", pa.uint64()),
            ("document_hash", pa.uint64()),
            ("id", pa.string()),
            ("locale", pa.string()),
            ("line", pa.int64()),
        ]
    ),
}
"""`key`: see above. `version`: see `row_versions`. Other hashes: rows.normalized_hash. `line`: from 1, in the input file."""

TOMBSTONE = 0
"""`document_hash` of a row that removes the document of its id from earlier generations."""

TEXTS = pa.schema([("texts", pa.list_(pa.string())), ("negatives", pa.list_(pa.string())), ("group", pa.string())])
"""`texts`: query and document of a pair; the text of a document."""

TOKENS = {PAIRS: ("query_tokens", "document_tokens", "negative_tokens"), DOCUMENTS: ("document_tokens",)}
"""Columns of token ids, in the order of `texts`, and of each of `negatives`; null where the tokenizer cannot take the text."""

Hashes = NDArray[np.uint64]


def ingested_rows_uri(bucket_root: str, name: str) -> str:
    """Return the folder of an ingested shard's rows (pipeline/dataset/ingested), which all runs of a bucket share."""
    return f"{bucket_root.rstrip('/')}/ingested/rows/{name}"


def ingested_tokens_uri(bucket_root: str, rows: str, name: str = "") -> str:
    """Return the folder of the tokens of an ingested shard's rows, for one tokenizer; without a name, for all of them."""
    return f"{bucket_root.rstrip('/')}/ingested/tokens/{rows}/{name}".rstrip("/")


def token_schema(kind: str, vocabulary: int) -> pa.Schema:
    """Return the schema of the tokens of a kind of rows, with the smallest integers that hold the vocabulary."""
    tokens = pa.list_(pa.uint16() if vocabulary <= 1 << 16 else pa.uint32())
    return pa.schema([(name, pa.list_(tokens) if name == "negative_tokens" else tokens) for name in TOKENS[kind]])


def mined_schema(vocabulary: int) -> pa.Schema:
    """Return the schema of mined negatives: of each row their token ids, the hardest first, and the hashes of their texts."""
    return pa.schema([token_schema(PAIRS, vocabulary).field("negative_tokens"), FACTS[PAIRS].field("negative_hashes")])


def with_values(lists: pa.ListArray, values: pa.Array) -> pa.ListArray:
    """Return lists of other values: as many in each as it has. No list is null."""
    return pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())]), pa.int32()), values
    )


def mixed(values: Hashes) -> Hashes:
    """Return the finalizer of SplitMix64: a bijection whose every output bit depends on every input bit, wrapping as meant."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def pair_hashes(first: Hashes, second: Hashes) -> Hashes:
    """Return a hash of each pair of hashes."""
    return mixed(mixed(first) ^ second)


def string_hashes(column: pa.Array | pa.ChunkedArray) -> Hashes:
    """Return a hash of each value of a column with few distinct ones; of null too."""
    encoded = (column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column).dictionary_encode()
    known = np.array([*(id_hash(value) for value in encoded.dictionary.to_pylist()), 0], np.uint64)
    found: Hashes = known[encoded.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False)]
    return found


def row_versions(query: Hashes, document: Hashes, locale: Hashes, task: Hashes, label: NDArray[np.float32]) -> Hashes:
    """Return what a row is and what it says: 48 bits of identity, 15 of the label, and 1 whether the label is above 0.

    Rows of equal identity (task, locale, query, document) are one row, wherever they are; with another label it is an update.
    Identities are only compared inside a slice of keys: of 10 million rows two different ones are equal with a chance of 2 %.
    """
    identity = mixed(mixed(mixed(mixed(query) ^ document) ^ locale) ^ task)
    labels = mixed(label.astype(np.float32).view(np.uint32).astype(np.uint64))
    low = (labels >> np.uint64(49) << np.uint64(1)) | (label > 0).astype(np.uint64)
    return (identity >> np.uint64(16) << np.uint64(16)) | low


def identities(versions: Hashes) -> Hashes:
    """Return the identity of each row, see `row_versions`."""
    return versions >> np.uint64(16)


def positive(versions: Hashes) -> NDArray[np.bool_]:
    """Return whether the label of each row is above 0: a pair to train on."""
    return (versions & np.uint64(1)).astype(np.bool_)


def slice_rows(keys: Hashes) -> tuple[int, ...]:
    """Return the first row of each slice of sorted keys, and the number of rows behind them: SLICES + 1 numbers."""
    limits = np.arange(SLICES, dtype=np.uint64) << np.uint64(64 - SLICES.bit_length() + 1)
    return (*np.searchsorted(keys, limits).tolist(), len(keys))


def part_range(index: int, count: int) -> tuple[int, int]:
    """Return the interval of keys [first, last] of one of `count` equal ones, a power of two."""
    width = (1 << 64) // count
    return index * width, (index + 1) * width - 1


Offsets = Annotated[Sequence[int], AfterValidator(partial(array, "q")), PlainSerializer(list)]
"""Ascending numbers, 8 bytes each: as Python's integers, those of 10 million rows take 75 MB of each process that reads them."""


class IngestedFile(PlanSection):
    """One file of rows.

    Attributes:
        rows: in it.
        slices: see `slice_rows`.
        facts, texts: first byte of each record batch in the Arrow files, and the first one behind the last.
    """

    rows: int
    slices: Offsets
    facts: Offsets
    texts: Offsets


class Profile(PlanSection):
    """The content of an ingested shard.

    Attributes:
        schema_version: SCHEMA_VERSION of the writer.
        kind: PAIRS or DOCUMENTS.
        uri, version, size, sha256: of the input file; its lineage.
        rows, bad_rows: good and refused rows.
        reasons: of the refused rows, each with its count and first places (pipeline/dataset/refusals).
        sizes: path below the shard's folder -> bytes, without this file.
        folder: below the shard's, which has the files; empty: they are in the shard's.
        deletions: digests of all deletion lists (pipeline/dataset/deletions) whose entries are in no row.
        deleted: rows that they named.
        columns: our column -> the file's, as they were recognised.
        positive_rows: rows with a label above 0.
        tombstones: rows that remove a document.
        statistics: what is compared with other weeks (stages/ingest.Made), of the rows before any was deleted from the files.
    """

    schema_version: int
    kind: str
    uri: str
    version: str
    size: int
    sha256: str
    rows: int
    bad_rows: int
    reasons: tuple[str, ...] = ()
    files: tuple[IngestedFile, ...]
    sizes: dict[str, int]
    folder: str = ""
    deletions: tuple[str, ...] = ()
    deleted: int = 0
    columns: dict[str, str] = Field({})
    positive_rows: int = 0
    tombstones: int = 0
    statistics: dict[str, Any] = Field({})


class TokenProfile(PlanSection):
    """The content of the tokens of an ingested shard.

    Attributes:
        rows_name: name of the rows, and the folder that has their files.
        vocabulary: every token id is below this.
        files: of each file of rows, first byte of each record batch, and the first one behind the last.
        without_tokens: rows with a text that the tokenizer cannot take.
        sizes: file name -> bytes, without this file.
    """

    schema_version: int
    rows_name: str
    vocabulary: int
    files: tuple[Offsets, ...]
    without_tokens: int
    sizes: dict[str, int]


ProfileT = TypeVar("ProfileT", Profile, TokenProfile)


def rows_name(shard: Mapping[str, Any], kind: str, columns: Mapping[str, str], holdout_by: str) -> str:
    """Return the name of the rows of a shard.

    Args:
        shard: its `uri`, `version` and `size`.
        columns: `data.columns`.
        holdout_by: `DataConfig.held_out_by`, which decides the key of pairs.
    """
    return _named([dict(shard), kind, dict(columns), holdout_by if kind == PAIRS else "", SCHEMA_VERSION])


def tokens_name(rows: str, tokenizer: TokenizerPlan) -> str:
    """Return the name of the tokens of some rows."""
    return _named([rows, tokenizer.digest, tokenizer.cap, SCHEMA_VERSION])


def mined_name(tokens: str, mine: MineConfig) -> str:
    """Return the name of the mined negatives of rows with these tokens, whatever model was published when they were mined."""
    return _named([tokens, mine.model_dump()])


def _named(content: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class IngestedShard:
    """Reads ranges of rows of one ingested shard.

    Args:
        bucket_root: the folder that holds `ingested/`.
        shard: which one.
    """

    bucket_root: str
    shard: InputShard

    @property
    def rows_uri(self) -> str:
        return ingested_rows_uri(self.bucket_root, self.shard.rows)

    @property
    def tokens_uri(self) -> str:
        return ingested_tokens_uri(self.bucket_root, self.shard.rows, self.shard.tokens)

    @property
    def mined_uri(self) -> str:
        return f"{self.bucket_root}/mined/{self.shard.rows}/{self.shard.mined}"

    @property
    def files_name(self) -> str:
        """What the files of rows are named by: other files, other tokens."""
        return f"{self.shard.rows}/{self.profile.folder}".rstrip("/")

    @cached_property
    def profile(self) -> Profile:
        """
        Raises:
            MissingInput: the shard is not ingested.
            BadData: its profile cannot be read.
        """
        return _read_profile(Profile, self.rows_uri)

    @cached_property
    def token_profile(self) -> TokenProfile:
        return _read_profile(TokenProfile, self.tokens_uri)

    @cached_property
    def mined_profile(self) -> TokenProfile | None:
        """None: nothing is mined for these rows, or it was for rows that are no longer there."""
        there = self.shard.mined and store.exists(f"{self.mined_uri}/{PROFILE}")
        profile = _read_profile(TokenProfile, self.mined_uri) if there else None
        return profile if profile and profile.rows_name == self.files_name else None

    def rows_in(self, file: int, first_slice: int, last_slice: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a file whose keys are in the slices [first, last)."""
        slices = self.profile.files[file].slices
        return slices[first_slice], slices[last_slice]

    def hashes(self, file: int, start: int, stop: int, cache: Path | None = None) -> NDArray[Any]:
        """Return the hashes (see HASHES) of the rows [start, stop) of a file.

        Args:
            cache: local folder, where the file is kept: of one that is read in many ranges.
        """
        uri, rows = self._file(f"hashes-{file:05d}.bin"), self.profile.files[file].rows
        return read_records(uri, HASHES[self.shard.kind], start, stop, rows, cache)

    def facts(self, file: int, start: int, stop: int) -> Iterator[pa.Table]:
        """Yield the facts of the rows [start, stop) of a file, some thousand rows at a time."""
        kind, offsets = self.profile.kind, self.profile.files[file].facts
        return _ranges(self._file(f"facts-{file:05d}.arrow"), FACTS[kind], offsets, start, stop)

    def texts(self, file: int, start: int, stop: int) -> Iterator[pa.Table]:
        """Yield the texts of the rows [start, stop) of a file, in the same pieces."""
        return _ranges(self._file(f"texts-{file:05d}.arrow"), TEXTS, self.profile.files[file].texts, start, stop)

    def tokens(self, file: int, start: int, stop: int) -> Iterator[pa.Table]:
        """Yield the tokens of the rows [start, stop) of a file, in the same pieces."""
        schema = token_schema(self.profile.kind, self.token_profile.vocabulary)
        return _ranges(f"{self.tokens_uri}/tokens-{file:05d}.arrow", schema, self.token_profile.files[file], start, stop)

    def mined(self, file: int, start: int, stop: int) -> Iterator[pa.Table]:
        """Yield the mined negatives of the rows [start, stop) of a file, in the same pieces; only where there is a
        `mined_profile`."""
        assert self.mined_profile
        schema, offsets = mined_schema(self.mined_profile.vocabulary), self.mined_profile.files[file]
        return _ranges(f"{self.mined_uri}/mined-{file:05d}.arrow", schema, offsets, start, stop)

    def has_rows(self, sizes: Mapping[str, int] | None = None) -> bool:
        """Return whether the rows are complete; log what is damaged.

        Args:
            sizes: see `ingested_sizes`.
        """
        return _is_complete(lambda: self.profile, self.rows_uri, sizes)

    def lacks_deletion(self) -> bool:
        """Return whether rows may be among those of a complete shard that the run must not use."""
        return self.shard.deletions not in ("", *self.profile.deletions)

    def is_ingested(self, sizes: Mapping[str, int] | None = None) -> bool:
        """Return whether rows and tokens are complete, without a row to delete; log what is damaged."""
        return (
            self.has_rows(sizes)
            and not self.lacks_deletion()
            and _is_complete(lambda: self.token_profile, self.tokens_uri, sizes)
            and self.token_profile.rows_name == self.files_name
        )

    def _file(self, name: str) -> str:
        return "/".join(filter(None, [self.rows_uri, self.profile.folder, name]))


def _read_profile(kind: type[ProfileT], folder: str) -> ProfileT:
    try:
        return kind.model_validate_json(gzip.decompress(store.read_bytes(f"{folder}/{PROFILE}")))
    except (ValidationError, OSError, EOFError, zlib.error) as error:
        raise BadData(
            "the profile of an ingested shard cannot be read",
            value=f"{folder}: {error}".splitlines()[:4],
            rule="ingested shards are read by the version of trnpipe that wrote them",
            remedy="delete the folder and start the run again: the shard is ingested again",
        ) from error


def ingested_sizes(folder: str) -> dict[str, int]:
    """Return the bytes of all ingested files in a folder, or of all there are in `ingested/`: by their paths below that."""
    return {_path(info.uri): info.size for info in store.list_objects(folder)}


def not_ingested(bucket_root: str, shards: Sequence[InputShard]) -> list[InputShard]:
    """Return the shards whose rows or tokens are not complete; log what is damaged."""
    # One listing of all: thousands of shards are known, and few files are of others.
    sizes = ingested_sizes(store.join(bucket_root, "ingested"))
    found = in_threads(lambda shard: IngestedShard(bucket_root, shard).is_ingested(sizes), shards)
    return [shard for shard, there in zip(shards, found, strict=True) if not there]


def not_mined(bucket_root: str, shards: Sequence[InputShard]) -> list[InputShard]:
    """Return the shards that have no mined negatives."""
    found = in_threads(lambda shard: IngestedShard(bucket_root, shard).mined_profile, shards)
    return [shard for shard, profile in zip(shards, found, strict=True) if profile is None]


def _path(uri: str) -> str:
    return uri.rpartition("/ingested/")[2]


def _is_complete(read: Callable[[], Profile | TokenProfile], folder: str, sizes: Mapping[str, int] | None) -> bool:
    sizes = ingested_sizes(folder) if sizes is None else sizes
    if _path(f"{folder}/{PROFILE}") not in sizes:
        return False
    try:
        profile = read()
    except MissingInput:
        return False
    except BadData as error:
        log.warning("%s: %s; ingesting the shard again", error.what, "; ".join(error.value))
        return False
    if wrong := [name for name, size in profile.sizes.items() if sizes.get(_path(f"{folder}/{name}")) != size]:
        log.warning("an ingested shard is damaged: %s/%s; ingesting it again", folder, wrong[0])
    return not wrong and profile.schema_version == SCHEMA_VERSION


def _ranges(uri: str, schema: pa.Schema, offsets: Sequence[int], start: int, stop: int) -> Iterator[pa.Table]:
    rows = _batch_rows(schema)
    last = -(-stop // rows) if stop > start else 0
    for first in range(start // rows, last, READ_ROWS // rows):
        behind = min(first + READ_ROWS // rows, last)
        reader = pa.BufferReader(store.read_range(uri, offsets[first], offsets[behind]))
        batches = [pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema) for _ in range(first, behind)]
        table = pa.Table.from_batches(batches, schema)
        begin = max(start - first * rows, 0)
        yield table.slice(begin, min(stop, behind * rows) - first * rows - begin)


def _batch_rows(schema: pa.Schema) -> int:
    return TOKEN_BATCH_ROWS if tuple(schema.names) in TOKENS.values() else BATCH_ROWS


def write_batches(path: Path, table: pa.Table) -> tuple[int, ...]:
    """Write an Arrow file in small batches of rows; return the first byte of each, and the first one behind the last."""
    offsets, rows = list[int](), _batch_rows(table.schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for start in range(0, table.num_rows, rows):
            # Combined, so that a batch has exactly so many rows.
            [batch] = table.slice(start, rows).combine_chunks().to_batches()
            writer.write_batch(batch)
            # The writer puts the schema before its first batch.
            offsets = offsets or [sink.tell() - pa.ipc.get_record_batch_size(batch)]
            offsets.append(sink.tell())
    return tuple(offsets)


def write_file(folder: Path, number: int, kind: str, table: pa.Table) -> tuple[IngestedFile, pa.Table]:
    """Sort rows by their key and write the files of one number into a local folder.

    Args:
        table: columns of FACTS[kind] and TEXTS, and any others.

    Returns:
        What the profile says of the file, and the sorted table.
    """
    order = np.argsort(table["key"].to_numpy(), kind="stable")
    if not (np.diff(order) > 0).all():
        table = table.take(pa.array(order))
    file = IngestedFile(
        rows=table.num_rows,
        slices=slice_rows(table["key"].to_numpy()),
        facts=write_batches(folder / f"facts-{number:05d}.arrow", table.select(FACTS[kind].names).cast(FACTS[kind])),
        texts=write_batches(folder / f"texts-{number:05d}.arrow", table.select(TEXTS.names).cast(TEXTS)),
    )
    hashes = [table[name].to_numpy() for name in HASHES[kind].names or ()]
    (folder / f"hashes-{number:05d}.bin").write_bytes(np.rec.fromarrays(hashes, dtype=HASHES[kind]).tobytes())
    return file, table


def write_profile(folder: Path | None, uri: str, profile: ProfileT) -> ProfileT:
    """Upload a local folder, and then the profile that completes it; return that.

    Args:
        folder: None: the files are there.
        profile: without `sizes`, or with those of the files that are there.
    """
    if folder is not None:
        # Readers compare sizes; hashes of the files would be read by no one.
        profile = profile.model_copy(update={"sizes": dict(sorted(store.send_folder(folder, uri).items()))})
    store.write_bytes(f"{uri}/{PROFILE}", gzip.compress(profile.model_dump_json().encode(), mtime=0))
    return profile
