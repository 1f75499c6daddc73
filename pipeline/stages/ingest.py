"""ingest: read every input file that is not ingested yet, once, and write its rows and their tokens as shared columnar files.

An array job: the children divide the files, finished ones are not repeated, and the child that finds all of them ingested speaks
for the stage. Reads `prepare/inputs.json` and the input files; writes `ingested/` (pipeline/dataset/ingested).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import store
from pipeline.contract import Artifact
from pipeline.dataset.blocks import id_hashes, normalized_hashes, read_blocks, shard_columns
from pipeline.dataset.ingested import (
    DOCUMENTS,
    FILE_ROWS,
    PAIRS,
    SCHEMA_VERSION,
    TOKENS,
    Hashes,
    IngestedFile,
    IngestedShard,
    Profile,
    TokenProfile,
    row_versions,
    string_hashes,
    token_schema,
    write_batches,
    write_file,
    write_profile,
)
from pipeline.dataset.refusals import Refusals
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData, Transient
from pipeline.model.inventory import transformer_folder
from pipeline.model.shape import fetch_without_weights
from pipeline.plan import InputShard, RunInputs
from pipeline.run.context import StageContext, StageOutput

log = logging.getLogger("trnpipe")

FILE_BYTES = 128 << 20
"""Text of a file of rows, at most: the rows are held twice while they are sorted."""

LISTED_VALUES = 1000
"""Locales, or tasks, of a shard that its profile counts one by one."""
OTHER_VALUES = "…"

STATISTICS = ("locales", "tasks", "query_tokens", "document_tokens", "labels", "repeated")
PIECE_TEXTS = 16_384
"""Texts between two heartbeats of the tokenizer."""


def run(context: StageContext) -> StageOutput | None:
    """Ingest this child's files.

    Returns:
        The stage's output if all files of all children are ingested, else None.

    Raises:
        BadData: a file is damaged, or keeps changing.
        Transient: a file has changed since it was listed.
    """
    inputs = RunInputs.from_json(store.read_bytes(context.paths.inputs))
    root = context.paths.bucket_root
    files = [list(shards) for _, shards in groupby(sorted(inputs.shards, key=_file), key=_file)]
    child, children = context.world.node.array_index, max(inputs.ingest_children, 1)
    todo = [shards for shards in files[child::children] if not all(IngestedShard(root, shard).is_ingested() for shard in shards)]
    log.info("ingest: child %d of %d: %d files are to do", child, children, len(todo))
    begun = time.monotonic()
    if todo:
        folder = fetch_without_weights(inputs.parent.folder, context.scratch / "tokenizer")
        worker = Worker(context, inputs, TextTokenizer(transformer_folder(folder)))
        for shards in todo:
            worker.ingest(shards)
    ingested = [IngestedShard(root, shard) for shard in inputs.shards]
    if not all(shard.is_ingested() for shard in ingested):
        log.info("ingest: this child is done; others still run")
        return None
    profiles = [shard.profile for shard in ingested]
    return StageOutput(
        outputs={"inputs": Artifact(context.paths.inputs, store.sha256(context.paths.inputs))},
        metrics={
            "files": len(files),
            "ingested": len(todo),
            "rows": sum(profile.rows for profile in profiles),
            "bad_rows": sum(profile.bad_rows for profile in profiles),
            "seconds": time.monotonic() - begun,
        },
    )


def _file(shard: InputShard) -> tuple[str, str]:
    return shard.uri, shard.version


@dataclass
class Worker:
    """Ingests files one after another.

    Attributes:
        rows: read so far.
    """

    context: StageContext
    inputs: RunInputs
    tokenizer: TextTokenizer
    rows: int = 0

    def ingest(self, shards: Sequence[InputShard]) -> None:
        """Ingest one file.

        Args:
            shards: its uses: as pairs, as documents, or both.
        """
        root, [first, *_] = self.context.paths.bucket_root, shards
        missing = [shard for shard in shards if not IngestedShard(root, shard).has_rows()]
        if missing:
            try:
                self._read(first, [ShardWriter(self.context, self.inputs, self.tokenizer, shard) for shard in missing])
            except store.Conflict as conflict:
                raise self._changed(first) from conflict
        for shard in shards:
            if not IngestedShard(root, shard).is_ingested():
                ShardWriter(self.context, self.inputs, self.tokenizer, shard).tokenize_again()

    def _read(self, file: InputShard, writers: Sequence[ShardWriter]) -> None:
        """Read a file once, for all of its uses."""
        beat, columns = self.context.heartbeat.beat, self.inputs.config.data.columns
        hashing = partial(beat, total=file.size, unit="bytes", note="reading a shard")
        refusals, refused = Refusals(), self.context.scratch / "quarantine.jsonl"
        begun, before = time.monotonic(), self.rows
        cache = self.context.scratch / "shard"
        kind = PAIRS if file.of_pairs else DOCUMENTS
        with (
            store.one_version(file.uri, file.version, file.size, cache, hashing) as (path, sha256),
            refused.open("w", encoding="utf-8") as quarantine,
        ):
            for block in read_blocks(file.uri, kind, columns, str(path)):
                for row in block.bad:
                    quarantine.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
                    refusals.add(row)
                for writer in writers:
                    writer.add(block.rows)
                self.rows += len(block.rows) + len(block.bad)
                beat(self.rows, unit="rows", note="checking and tokenizing rows")
            recognised = dict(shard_columns(file.uri, kind, columns, str(path)).names)
        for writer in writers:
            writer.finish(sha256, refusals, refused, recognised)
        rows, seconds = self.rows - before, time.monotonic() - begun
        log.info("%s: %d rows, %d refused, %.0f per second", file.uri, rows, refusals.count, rows / max(seconds, 1e-9))

    def _changed(self, file: InputShard) -> BadData | Transient:
        """Return the error of a file that another process has replaced: once to be tried again, then for good."""
        kind = Transient if self.context.world.node.attempt == 1 else BadData
        return kind(
            "a shard has changed since the run listed it",
            value=f"{file.uri}: version {file.version} was listed",
            rule="a run reads the versions of its inputs that it listed when it began",
            remedy="put that version back, or start a new run, which reads the new one",
        )


@dataclass
class ShardWriter:
    """Collects the rows of one use of a file, and writes them FILE_ROWS at a time.

    Attributes:
        waiting: rows that are not written yet, and `size` their bytes.
        files, tokens: what the profiles say of each file that is written.
        without_tokens: rows with a text that the tokenizer cannot take.
    """

    context: StageContext
    inputs: RunInputs
    tokenizer: TextTokenizer
    shard: InputShard
    waiting: list[pa.Table] = field(default_factory=list)
    size: int = 0
    files: list[IngestedFile] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    without_tokens: int = 0
    statistics: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in STATISTICS})
    positive: int = 0

    def __post_init__(self) -> None:
        for folder in (self.rows_folder, self.tokens_folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    @property
    def rows_folder(self) -> Path:
        return self.context.scratch / f"rows-{self.shard.kind}"

    @property
    def tokens_folder(self) -> Path:
        return self.context.scratch / f"tokens-{self.shard.kind}"

    def add(self, rows: pa.Table) -> None:
        """Add rows with the columns of a block."""
        while rows.num_rows:
            taken = rows.slice(0, FILE_ROWS - sum(map(len, self.waiting)))
            rows = rows.slice(len(taken))
            self.waiting.append(taken)
            self.size += taken.nbytes
            if self.size >= FILE_BYTES or sum(map(len, self.waiting)) == FILE_ROWS:
                self._flush()

    def finish(self, sha256: str, refusals: Refusals, quarantine: Path, columns: dict[str, str]) -> None:
        """Write what waits, upload everything, and complete it by its profiles."""
        self._flush()
        if refusals.count:
            shutil.copyfile(quarantine, self.rows_folder / "quarantine.jsonl")
        profile = Profile(
            schema_version=SCHEMA_VERSION,
            kind=self.shard.kind,
            uri=self.shard.uri,
            version=self.shard.version,
            size=self.shard.size,
            sha256=sha256,
            rows=sum(file.rows for file in self.files),
            bad_rows=refusals.count,
            reasons=tuple(refusals.reasons()),
            files=tuple(self.files),
            sizes={},
            columns=columns,
            positive_rows=self.positive,
            statistics=self._statistics(),
        )
        write_profile(self.rows_folder, self.ingested.rows_uri, profile)
        self._finish_tokens()

    def tokenize_again(self) -> None:
        """Make the tokens of rows that are there, for another tokenizer; the input file is not needed."""
        for number, file in enumerate(self.ingested.profile.files):
            texts = pa.concat_tables(self.ingested.texts(number, 0, file.rows))["texts"].combine_chunks()
            places = [pc.list_element(texts, place) for place in range(len(TOKENS[self.shard.kind]))]
            self._write_tokens(number, [pa.chunked_array([column]) for column in places])
        self._finish_tokens()

    @property
    def ingested(self) -> IngestedShard:
        return IngestedShard(self.context.paths.bucket_root, self.shard)

    def _flush(self) -> None:
        if not self.waiting:
            return
        table, number = pa.concat_tables(self.waiting), len(self.files)
        self.waiting, self.size = [], 0
        file, table = write_file(self.rows_folder, number, self.shard.kind, self._with_facts(table))
        self.files.append(file)
        names = ("query", "document") if self.shard.kind == PAIRS else ("document",)
        lengths = self._write_tokens(number, [table[name] for name in names])
        self._count(table, dict(zip(TOKENS[self.shard.kind], lengths, strict=True)))

    def _with_facts(self, table: pa.Table) -> pa.Table:
        """Return rows of a block with the columns that an ingested shard has in addition."""
        if self.shard.kind == DOCUMENTS:
            columns: dict[str, Any] = {
                "key": id_hashes(table["id"]),
                "texts": _lists(table["document"]),
                "negatives": pa.nulls(len(table), pa.list_(pa.string())),
                "group": pa.nulls(len(table), pa.string()),
            }
            table = table.select(["id", "document", "document_hash", "locale", "line"])
        else:
            query, document = table["query_hash"].to_numpy(), table["document_hash"].to_numpy()
            labels = table["label"].to_numpy()
            locale, task = string_hashes(table["locale"]), string_hashes(table["task"])
            columns = {
                "key": self._keys(table),
                "version": row_versions(query, document, locale, task, labels),
                "texts": _lists(table["query"], table["document"]),
            }
        for name, values in columns.items():
            table = table.append_column(name, values if isinstance(values, pa.Array) else [pa.array(values)])
        return table

    def _keys(self, table: pa.Table) -> Hashes:
        """Return the hash of what is held out together; a row without a group stands for itself, by its document."""
        by = self.inputs.config.data.holdout_by
        keys: Hashes = table["document_hash" if by == "group" else f"{by}_hash"].to_numpy()
        if by == "group":
            groups = table["group"].combine_chunks()
            keys = np.where(np.asarray(groups.is_valid()), normalized_hashes(groups.fill_null("")), keys)
        return keys

    def _write_tokens(self, number: int, texts: Sequence[pa.ChunkedArray]) -> list[np.ndarray]:
        """Tokenize columns of texts and write their file; return the tokens of each text, 0 where there are none."""
        schema = token_schema(self.shard.kind, self.inputs.tokenizer.vocabulary)
        columns = [self._tokenized(column, schema.field(0).type) for column in texts]
        table = pa.table(columns, schema=schema)
        self.tokens.append(write_batches(self.tokens_folder / f"tokens-{number:05d}.arrow", table))
        missing = np.zeros(len(table), np.bool_)
        for column in table.columns:
            missing |= np.asarray(column.is_null())
        self.without_tokens += int(missing.sum())
        return [np.asarray(pc.list_value_length(column).fill_null(0)) for column in columns]

    def _tokenized(self, texts: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
        """Return the token ids of each text, equal texts computed once; null where the tokenizer cannot take it."""
        encoded = texts.combine_chunks().dictionary_encode()
        found: list[pa.Array] = []
        for piece in _pieces(encoded.dictionary):
            tokens = self.tokenizer.encode_each(piece, self.inputs.tokenizer.cap)
            found.append(pa.array([None if isinstance(one, str) else one for one in tokens], kind))
            self.context.heartbeat.beat(note="tokenizing")
        return pa.concat_arrays(found or [pa.array([], kind)]).take(encoded.indices)

    def _finish_tokens(self) -> None:
        profile = TokenProfile(
            schema_version=SCHEMA_VERSION,
            rows_name=self.shard.rows,
            vocabulary=self.inputs.tokenizer.vocabulary,
            files=tuple(self.tokens),
            without_tokens=self.without_tokens,
            sizes={},
        )
        write_profile(self.tokens_folder, self.ingested.tokens_uri, profile)

    def _count(self, table: pa.Table, lengths: dict[str, np.ndarray]) -> None:
        for name, values in lengths.items():
            # The power of two that a length stays below.
            bounds, counts = np.unique(np.left_shift(1, np.ceil(np.log2(values + 1)).astype(np.int64)), return_counts=True)
            self.statistics[name].update(dict(zip(map(str, bounds.tolist()), counts.tolist(), strict=True)))
        for name in {"locale", "task"} & set(table.column_names):
            for entry in table[name].value_counts().to_pylist():
                known = self.statistics[f"{name}s"]
                value = entry["values"] or ""
                known[value if value in known or len(known) < LISTED_VALUES else OTHER_VALUES] += entry["counts"]
        if self.shard.kind == PAIRS:
            self.positive += int(pc.sum(pc.greater(table["label"], 0)).as_py() or 0)
            self.statistics["labels"]["sum"] += pc.sum(table["label"]).as_py() or 0
            self.statistics["repeated"]["rows"] += len(table) - pc.count_distinct(table["version"]).as_py()

    def _statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: dict(counts) for name, counts in self.statistics.items() if counts}
        return {**found, "labels": float(self.statistics["labels"]["sum"]), "repeated": self.statistics["repeated"]["rows"]}


def _pieces(texts: pa.Array) -> Iterator[list[str]]:
    for start in range(0, len(texts), PIECE_TEXTS):
        yield texts.slice(start, PIECE_TEXTS).to_pylist()


def _lists(*columns: pa.ChunkedArray) -> pa.Array:
    """Return a column of lists, of one value of each of some columns of texts."""
    parts = [column.combine_chunks() for column in columns]
    rows, count = len(parts[0]), len(parts)
    order = np.arange(rows * count).reshape(count, rows).T.ravel()
    values = pa.concat_arrays(parts).take(pa.array(order))
    return pa.ListArray.from_arrays(pa.array(np.arange(0, rows * count + 1, count), pa.int32()), values)
