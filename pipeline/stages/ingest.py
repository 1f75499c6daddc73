"""ingest: one child of the array that reads each new input file once, and writes its rows and tokens for all runs to come.

Reads `prepare/inputs.json`, `prepare/missing.json` and the input files that the latter names; writes `ingested/rows` and
`ingested/tokens` (pipeline/dataset/ingested). What is complete is left alone, so a child that is interrupted loses at most the
file it was in.
Where only the tokens are missing, because the tokenizer is another one, they are made from the ingested texts. Rows that
`data.delete` names are left out, and removed from what is ingested already. The child that finds the files of all children
complete speaks for the stage.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline import store
from pipeline.contract import Artifact
from pipeline.dataset.columns import Columns
from pipeline.dataset.deletions import Deletions, have_negatives
from pipeline.dataset.ids import id_hashes
from pipeline.dataset.ingested import (
    DOCUMENTS,
    FACTS,
    FILE_ROWS,
    PAIRS,
    PROFILE,
    SCHEMA_VERSION,
    SLICES,
    TOKENS,
    TOMBSTONE,
    IngestedFile,
    IngestedShard,
    Profile,
    TokenProfile,
    ingested_tokens_uri,
    not_ingested,
    row_versions,
    string_hashes,
    token_schema,
    with_values,
    write_batches,
    write_file,
    write_profile,
)
from pipeline.dataset.negatives import add_judged
from pipeline.dataset.reading import in_threads, return_memory
from pipeline.dataset.refusals import Refusals
from pipeline.dataset.rows import Block, normalized_hashes, read_blocks, shard_columns
from pipeline.dataset.tokens import SIDES, TEXTS_AT_ONCE, TextTokenizer
from pipeline.errors import BadData, Transient
from pipeline.log import log
from pipeline.model.inventory import fetch_without_weights, load_tokenizer
from pipeline.run.context import StageContext, StageOutput
from pipeline.run_inputs import InputShard, MissingShards, RunInputs

FILE_BYTES = 16 << 20
"""Text of a file's rows. Sorted, written and tokenized they are in memory some three times."""

TEXTS_OF = {
    "query_tokens": ("query", "query"),
    "document_tokens": ("document", "document"),
    "negative_tokens": ("negatives", "document"),
}
"""Column of token ids -> the column of its texts, and their side."""

QUARANTINE = "quarantine.jsonl"
NAMED_VALUES = 1000
OTHERS = "…"


def run(context: StageContext) -> StageOutput | None:
    """Ingest this child's share of the input files.

    Returns:
        The stage's output if the files of all children are complete, else None.

    Raises:
        BadData: a file is damaged, or has changed since the run began.
        Transient: a file has changed, and this is the job's first attempt.
    """
    return_memory()
    inputs = RunInputs.from_json(store.read_bytes(context.paths.inputs))
    listed = MissingShards.model_validate_json(store.read_bytes(context.paths.missing))
    child, begun = context.world.node.array_index, time.monotonic()
    files: dict[tuple[str, str, str], list[InputShard]] = {}
    for shard in listed.shards:
        files.setdefault((shard.uri, shard.version, shard.setting), []).append(shard)
    own = list(files.values())[child :: listed.children or 1]
    # This child, or another run, may have made some of them by now.
    missing = set(not_ingested(context.paths.bucket_root, [shard for shards in own for shard in shards]))
    todo = [left for shards in own if (left := [shard for shard in shards if shard in missing])]
    log.info("ingest: child %d of %d: %d of its %d files are to do", child, listed.children, len(todo), len(own))
    if todo:
        worker = open_ingester(context, inputs, listed.shards[0].deletions)
        for shards in todo:
            ingest_file(worker, shards)
    return stage_output(context, listed.shards, time.monotonic() - begun)


def _ingested(context: StageContext, shard: InputShard) -> IngestedShard:
    return IngestedShard(context.paths.bucket_root, shard)


@dataclass(kw_only=True)
class Ingester:
    """This process's tokenizer, what it must leave out, and its progress in rows."""

    context: StageContext
    inputs: RunInputs
    tokenizer: TextTokenizer
    deletions: Deletions
    done: int = 0

    def beat(self, rows: int, note: str) -> None:
        """Report rows that are done."""
        self.done += rows
        self.context.heartbeat.beat(self.done, unit="rows", note=note)

    def encode(self, rows: pa.Table, name: str) -> EncodedColumn:
        """Return the token ids of a column of texts or of lists of them, equal ones of which are encoded once.

        Args:
            name: one of TEXTS_OF.
        """
        column, side = TEXTS_OF[name]
        whole = self.tokenizer.with_prompts(rows[column], rows["task"]) if side == "query" else rows[column]
        lists = whole.combine_chunks() if pa.types.is_list(whole.type) else None
        encoded = (whole if lists is None else pa.chunked_array([lists.flatten()])).dictionary_encode().combine_chunks()
        kind = token_schema(DOCUMENTS, self.tokenizer.vocabulary).field(0).type
        distinct = [pa.array([], kind)]
        for start in range(0, len(encoded.dictionary), TEXTS_AT_ONCE):
            texts = encoded.dictionary.slice(start, TEXTS_AT_ONCE).to_pylist()
            found = self.tokenizer.encode_each(
                texts, self.inputs.tokenizer.cap, "" if side == "query" else self.tokenizer.prompts[side]
            )
            missing = pa.array([isinstance(tokens, str) for tokens in found])
            tokens = [np.empty(0, np.int32) if isinstance(each, str) else each for each in found]
            offsets = pa.array(np.cumsum([0, *map(len, tokens)]), pa.int32())
            # At once in Arrow: as arrays of their own, the tokens of a file would take several times its text.
            distinct.append(pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(tokens), kind.value_type), mask=missing))
            self.beat(0, "tokenizing")
        places = encoded.indices if lists is None else with_values(lists, encoded.indices)
        return EncodedColumn(pa.concat_arrays(distinct), places)


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """Token ids of distinct texts, null where there are none, and the place of each row's text, or of its texts, among them."""

    distinct: pa.ListArray
    indices: pa.Array

    def take(self, rows: pa.Array) -> pa.ListArray:
        """Return the token ids of some rows."""
        chosen = self.indices.take(rows)
        if pa.types.is_list(chosen.type):
            return with_values(chosen, self.distinct.take(chosen.flatten()))
        return self.distinct.take(chosen)


def open_ingester(context: StageContext, inputs: RunInputs, digest: str) -> Ingester:
    """Load the parent's tokenizer, and what `data.delete` names."""
    context.heartbeat.beat(note="loading the tokenizer")
    folder = fetch_without_weights(inputs.parent.folder, context.scratch / "tokenizer")
    deletions = Deletions.from_json(store.read_bytes(context.paths.deletions(digest))) if digest else Deletions()
    return Ingester(context=context, inputs=inputs, tokenizer=load_tokenizer(folder, inputs.tokenizer), deletions=deletions)


def ingest_file(worker: Ingester, shards: Sequence[InputShard]) -> None:
    """Make what is missing of one input file.

    Args:
        shards: the uses of the file, of which something is missing.
    """
    without_rows = [shard for shard in shards if not _ingested(worker.context, shard).has_rows()]
    for shard in shards:
        if shard not in without_rows:
            if _ingested(worker.context, shard).lacks_deletion():
                delete_rows(worker, shard)
            if not _ingested(worker.context, shard).is_ingested():
                tokenize_again(worker, shard)
    if without_rows:
        ingest_rows(worker, without_rows)


@dataclass(kw_only=True)
class Made:
    """What is made of a file in one use: two local folders, and what their profiles say."""

    shard: InputShard
    rows_folder: Path
    tokens_folder: Path
    files: list[IngestedFile] = field(default_factory=list)
    offsets: list[tuple[int, ...]] = field(default_factory=list)
    without_tokens: int = 0
    statistics: dict[str, Any] = field(default_factory=lambda: {"tokens": 0, "repeated": 0, "labels": 0.0})
    positive_rows: int = 0
    tombstones: int = 0
    deleted: int = 0

    @classmethod
    def within(cls, scratch: Path, shard: InputShard) -> Made:
        """Begin with empty folders."""
        rows, tokens = (scratch / f"{shard.kind}-{what}" for what in ("rows", "tokens"))
        rows.mkdir()
        tokens.mkdir()
        return cls(shard=shard, rows_folder=rows, tokens_folder=tokens)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def write_tokens(self, columns: Sequence[pa.ListArray], vocabulary: int) -> None:
        """Write the tokens of one more file, in the order of its rows."""
        table = pa.table(list(columns), schema=token_schema(self.shard.kind, vocabulary))
        self.offsets.append(write_batches(self.tokens_folder / f"tokens-{len(self.offsets):05d}.arrow", table))
        self.without_tokens += int(np.any([np.asarray(column.is_null()) for column in columns], axis=0).sum())
        for name, column in zip(TOKENS[self.shard.kind], columns, strict=True):
            texts = column.flatten() if pa.types.is_list(column.type.value_type) else column
            lengths = np.asarray(pc.list_value_length(texts).drop_null(), np.int64)
            self.statistics["tokens"] += int(lengths.sum())
            bounds, counts = np.unique(np.ceil(np.log2(lengths)).astype(np.int64), return_counts=True)
            self._count(name, {str(1 << bound): count for bound, count in zip(bounds.tolist(), counts.tolist(), strict=True)})

    def write_rows(self, rows: pa.Table, holdout_by: str) -> pa.Array:
        """Write one more file of rows, see rows.SCHEMAS; return their order."""
        kind = self.shard.kind
        table, order = _pairs(rows, holdout_by) if kind == PAIRS else _documents(rows)
        self.files.append(write_file(self.rows_folder, len(self.files), kind, table)[0])
        for name, column in (("locales", "locale"), ("tasks", "task")):
            if column in table.column_names:
                self._count(name, {each["values"] or "": each["counts"] for each in table[column].value_counts().to_pylist()})
        if kind == DOCUMENTS:
            self.tombstones += int((table["document_hash"].to_numpy() == TOMBSTONE).sum())
        else:
            labels = table["label"].to_numpy()
            self.positive_rows += int((labels > 0).sum())
            self.statistics["labels"] += float(labels.sum(dtype=np.float64))
            self.statistics["repeated"] += len(rows) - pc.count_distinct(table["version"]).as_py()
        return order

    def _count(self, name: str, counts: Mapping[str, int]) -> None:
        """Add to a count of values, of which the first NAMED_VALUES have names."""
        known = self.statistics.setdefault(name, {})
        for value, count in counts.items():
            place = value if value in known or len(known) < NAMED_VALUES else OTHERS
            known[place] = known.get(place, 0) + count

    def publish_tokens(self, context: StageContext, vocabulary: int) -> None:
        """Upload the tokens."""
        profile = TokenProfile(
            schema_version=SCHEMA_VERSION,
            rows_name=_ingested(context, self.shard).files_name,
            vocabulary=vocabulary,
            files=tuple(self.offsets),
            without_tokens=self.without_tokens,
            sizes={},
        )
        write_profile(self.tokens_folder, _ingested(context, self.shard).tokens_uri, profile)


def delete_rows(worker: Ingester, shard: InputShard) -> None:
    """Remove the rows that `data.delete` names from an ingested shard, and all of its tokens if there are any such rows.

    The profile names the lists only when nothing of their rows is left, so an interrupted deletion is done again.
    """
    context, ingested, deletions = worker.context, _ingested(worker.context, shard), worker.deletions
    profile = ingested.profile
    with tempfile.TemporaryDirectory(dir=context.scratch) as name:
        folder = Path(name) / deletions.digest
        folder.mkdir()
        kept, positive_rows, deleted = [], 0, 0
        for number, file in enumerate(profile.files):
            facts = pa.concat_tables([FACTS[shard.kind].empty_table(), *ingested.facts(number, 0, file.rows)])
            named = deletions.named(facts)
            if shard.kind == PAIRS:
                # A row that is named by its id may have been a negative of others.
                named |= have_negatives(facts, facts["document_hash"].filter(pa.array(named)).combine_chunks())
            deleted += int(named.sum())
            kept.append(facts.filter(pa.array(~named)).append_column("row", pa.array(np.flatnonzero(~named))))
            worker.beat(file.rows, "looking for rows to delete")
        if deleted:
            files: list[IngestedFile] = []
            for number, (file, facts) in enumerate(zip(profile.files, kept, strict=True)):
                if not len(facts):
                    continue
                texts = pa.concat_tables(ingested.texts(number, 0, file.rows)).take(facts["row"])
                facts = _with(facts, **{column: texts[column] for column in texts.column_names})
                files.append(write_file(folder, len(files), shard.kind, facts)[0])
                positive_rows += int((facts["label"].to_numpy() > 0).sum()) if shard.kind == PAIRS else 0
            if QUARANTINE in profile.sizes:
                store.download(store.join(ingested.rows_uri, QUARANTINE), Path(name) / QUARANTINE)
            store.delete_folder(ingested_tokens_uri(context.paths.bucket_root, shard.rows))
            changed = {
                "rows": sum(file.rows for file in files),
                "files": tuple(files),
                "positive_rows": positive_rows,
                "folder": deletions.digest,
                "deleted": profile.deleted + deleted,
            }
            profile = write_profile(Path(name), ingested.rows_uri, profile.model_copy(update=changed))
    # Some of the mined negatives may be named, too: later rows get new ones, these keep those that they name themselves.
    store.delete_folder(f"{context.paths.bucket_root}/mined/{shard.rows}")
    for info in store.list_objects(ingested.rows_uri):
        if info.uri.rpartition(f"/{shard.rows}/")[2] not in (*profile.sizes, PROFILE):
            store.delete(info.uri)
    write_profile(None, ingested.rows_uri, profile.model_copy(update={"deletions": (*profile.deletions, deletions.digest)}))
    log.info("%s: %d rows are deleted", shard.uri, deleted)


def tokenize_again(worker: Ingester, shard: InputShard) -> None:
    """Make the tokens of a shard from its ingested texts."""
    context, ingested = worker.context, _ingested(worker.context, shard)
    with tempfile.TemporaryDirectory(dir=context.scratch) as name:
        made = Made.within(Path(name), shard)
        for number, file in enumerate(ingested.profile.files):
            texts = pa.concat_tables(
                _with(facts, **dict(zip(found.column_names, found.columns, strict=True)))
                for facts, found in zip(ingested.facts(number, 0, file.rows), ingested.texts(number, 0, file.rows), strict=True)
            )
            for place, side in enumerate(SIDES if shard.kind == PAIRS else ("document",)):
                texts = texts.append_column(side, pc.list_element(texts["texts"], place))
            encoded = [worker.encode(texts, name) for name in TOKENS[shard.kind]]
            made.write_tokens([column.take(pa.array(np.arange(file.rows))) for column in encoded], worker.tokenizer.vocabulary)
            worker.beat(file.rows, "tokenizing")
        made.publish_tokens(context, worker.tokenizer.vocabulary)
    log.info("%s: %d %s tokenized again", shard.uri, ingested.profile.rows, shard.kind)


def ingest_rows(worker: Ingester, shards: Sequence[InputShard]) -> None:
    """Read one input file, and write its rows and tokens in each of its uses.

    Raises:
        BadData, Transient: see `run`.
    """
    context, [first, *_], begun = worker.context, shards, time.monotonic()
    with tempfile.TemporaryDirectory(dir=context.scratch) as name:
        scratch = Path(name)
        made = [Made.within(scratch, shard) for shard in shards]
        beat = partial(context.heartbeat.beat, total=first.size, unit="bytes", note="reading an input file")
        try:
            with store.one_version(first.uri, first.version, first.size, scratch / "input", beat) as (path, sha256):
                columns, refusals = read_rows(worker, made, path, scratch / QUARANTINE)
        except store.Conflict as error:
            # The listing may have been older than the file, for a moment.
            kind = Transient if context.world.node.attempt == 1 else BadData
            raise kind(
                "an input file has changed since the run began",
                value=first.uri,
                rule="input files never change; new data is a new file",
                remedy="put the old file back, or start a new run",
            ) from error
        for one in made:
            if refusals.count and (one.shard.kind == PAIRS) == one.shard.of_pairs:
                (scratch / QUARANTINE).rename(one.rows_folder / QUARANTINE)
            write_profile(
                one.rows_folder,
                _ingested(context, one.shard).rows_uri,
                Profile(
                    schema_version=SCHEMA_VERSION,
                    kind=one.shard.kind,
                    uri=first.uri,
                    version=first.version,
                    size=first.size,
                    sha256=sha256,
                    rows=one.rows,
                    bad_rows=refusals.count,
                    reasons=tuple(refusals.reasons()),
                    files=tuple(one.files),
                    sizes={},
                    columns=dict(columns.names),
                    positive_rows=one.positive_rows,
                    tombstones=one.tombstones,
                    statistics=one.statistics,
                    deletions=tuple(filter(None, [one.shard.deletions])),
                    deleted=one.deleted,
                ),
            )
            one.publish_tokens(context, worker.tokenizer.vocabulary)
    rows, seconds = made[0].rows, time.monotonic() - begun
    log.info("%s: %d rows, %d refused, %.1f seconds", first.uri, rows, refusals.count, seconds)


def read_rows(worker: Ingester, made: Sequence[Made], path: Path, quarantine: Path) -> tuple[Columns, Refusals]:
    """Read a local copy of an input file into the folders of its uses; list its refused rows.

    Returns:
        The columns of the file, and the reasons of the refused rows.
    """
    config, shard = worker.inputs.config.data, made[0].shard
    columns = config.training[shard.setting][1]
    source = PAIRS if shard.of_pairs else DOCUMENTS
    refusals = Refusals()
    with quarantine.open("w", encoding="utf-8") as stream:

        def good(blocks: Iterator[Block]) -> Iterator[pa.Table]:
            for block in blocks:
                for row in block.bad:
                    stream.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
                    refusals.add(row)
                worker.beat(len(block.rows) + len(block.bad), "checking rows")
                kept = block.rows.filter(pa.array(~worker.deletions.named(block.rows))) if len(worker.deletions) else block.rows
                for one in made:
                    one.deleted += len(block.rows) - len(kept)
                yield kept

        for rows in files_of(good(read_blocks(shard.uri, source, columns, str(path)))):
            # Each step leaves little behind: the texts, sorted, are gone when tokens are made, and all is before the next file.
            rows = add_judged(rows) if source == PAIRS else rows
            orders = [one.write_rows(rows, config.held_out_by(shard.setting)) for one in made]
            encoded = {name: worker.encode(rows, name) for name, (column, _) in TEXTS_OF.items() if column in rows.column_names}
            for one, order in zip(made, orders, strict=True):
                one.write_tokens([encoded[name].take(order) for name in TOKENS[one.shard.kind]], worker.tokenizer.vocabulary)
            del rows, encoded
    return shard_columns(shard.uri, source, columns, str(path)), refusals


def files_of(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join the rows of blocks until they fill a file."""
    pending: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        for piece in (table.slice(start, FILE_ROWS) for start in range(0, len(table), FILE_ROWS)):
            if pending and (rows + len(piece) > FILE_ROWS or size + piece.nbytes > FILE_BYTES):
                yield pa.concat_tables(pending)
                pending, rows, size = [], 0, 0
            pending.append(piece)
            rows, size = rows + len(piece), size + piece.nbytes
    if pending:
        yield pa.concat_tables(pending)


def _pairs(rows: pa.Table, holdout_by: str) -> tuple[pa.Table, pa.Array]:
    """Return the rows with the columns of ingested pairs, sorted by their key, and their order."""
    query, document = (rows[name].to_numpy() for name in ("query_hash", "document_hash"))
    versions = row_versions(query, document, string_hashes(rows["locale"]), string_hashes(rows["task"]), rows["label"].to_numpy())
    key = query if holdout_by.endswith("query") else document
    if holdout_by.endswith("group"):
        group = rows["group"].combine_chunks()
        # Rows without a group are held out with the others of their document.
        key = np.where(np.asarray(group.is_valid()), normalized_hashes(group.fill_null("")), document)
    if holdout_by.startswith("all"):
        key = key // np.uint64(SLICES)  # all of them into the first slice, which is always held out
    order = np.argsort(key, kind="stable")
    # Texts are large: they are copied once, to their places.
    texts = pa.concat_arrays([*rows["query"].chunks, *rows["document"].chunks])
    pairs = _lists(texts.take(pa.array(np.stack([order, order + len(rows)], axis=1).ravel())), 2)
    table = _with(rows.drop_columns(["query", "document"]), key=key, version=versions)
    return _with(table.take(pa.array(order)), texts=pairs), pa.array(order)


def _documents(rows: pa.Table) -> tuple[pa.Table, pa.Array]:
    """Return the rows with the columns of ingested documents, sorted by their key, and their order."""
    key = id_hashes(rows["id"].to_pylist())
    order = pa.array(np.argsort(key, kind="stable"))
    none = pa.ListArray.from_arrays(pa.array(np.zeros(len(rows) + 1), pa.int32()), pa.array([], pa.string()))
    texts = _lists(rows["document"].combine_chunks().take(order), 1)
    table = _with(rows.select(["document_hash", "id", "locale", "line"]), key=key).take(order)
    return _with(table, texts=texts, negatives=none, group=pa.nulls(len(rows), pa.string())), order


def _with(table: pa.Table, **columns: pa.Array | pa.ChunkedArray | NDArray[np.uint64]) -> pa.Table:
    for name, column in columns.items():
        table = table.append_column(name, pa.array(column) if isinstance(column, np.ndarray) else column)
    return table


def _lists(values: pa.Array, width: int) -> pa.ListArray:
    """Return lists of so many values each."""
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, width), pa.int32()), values)


def stage_output(context: StageContext, shards: Sequence[InputShard], seconds: float) -> StageOutput | None:
    """Return the output of the whole array, or None while some of these shards are missing."""
    context.heartbeat.beat(note="looking at the other children's files")
    if not_ingested(context.paths.bucket_root, shards):
        log.info("ingest: this child is done; others still run")
        return None
    # Of a file in two uses, the one that it was written for.
    counted = [shard for shard in shards if (shard.kind == PAIRS) == shard.of_pairs]
    profiles = list(in_threads(lambda shard: _ingested(context, shard).profile, counted))
    return StageOutput(
        inputs={"inputs": Artifact(context.paths.inputs, store.sha256(context.paths.inputs))},
        metrics={
            "shards": len(profiles),
            "rows": sum(profile.rows for profile in profiles),
            "bad_rows": sum(profile.bad_rows for profile in profiles),
            "tokens": sum(profile.statistics.get("tokens", 0) for profile in profiles),
            "seconds": seconds,
        },
    )
