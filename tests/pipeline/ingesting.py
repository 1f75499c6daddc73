"""Ingested shards made here, without the ingest stage: for tests of what reads them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.ids import IdDigest, id_hash
from pipeline.dataset.ingested import (
    DOCUMENTS,
    FACTS,
    PAIRS,
    SCHEMA_VERSION,
    TEXTS,
    TOKENS,
    TOMBSTONE,
    Profile,
    TokenProfile,
    ingested_rows_uri,
    ingested_tokens_uri,
    row_versions,
    rows_name,
    string_hashes,
    token_schema,
    tokens_name,
    write_batches,
    write_file,
    write_profile,
)
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.plan import EmbedPlan, PartPlan
from pipeline.run_inputs import InputShard, TokenizerPlan

CAP = 64
"""Positions of the tiny model."""


def tokenizer_plan(tokenizer: TextTokenizer) -> TokenizerPlan:
    """The plan of a BERT-like tokenizer, which puts one special token on each side."""
    return TokenizerPlan(digest=tokenizer.digest, vocabulary=tokenizer.vocabulary, cap=CAP, prefix=1, suffix=1)


def name_shard(uri: str, kind: str, *, version: str = "1", size: int = 0, tokenizer: TokenizerPlan, **more: Any) -> InputShard:
    """What prepare lists of a shard, with its names."""
    rows = rows_name({"uri": uri, "version": version, "size": size}, kind, {}, "document")
    names = {"rows": rows, "tokens": tokens_name(rows, tokenizer)}
    return InputShard(uri=uri, version=version, size=size, kind=kind, **names, **more)


def ingest(
    root: str,
    shard: InputShard,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: TextTokenizer,
    files: int = 1,
    without_tokens: Collection[str] = (),
    **profile: Any,
) -> None:
    """Write rows and tokens of a shard: rows {query, document, label?, task?, group?} or {id, text}, each with its `line`.

    Args:
        files: among which the rows are divided, as those of a large shard are.
        without_tokens: ids of rows whose texts the tokenizer is said not to take.
        profile: attributes of the profile beside those that follow from the rows.
    """
    kind = shard.kind
    with tempfile.TemporaryDirectory() as name:
        rows_folder, tokens_folder = Path(name) / "rows", Path(name) / "tokens"
        rows_folder.mkdir()
        tokens_folder.mkdir()
        described, offsets = [], []
        for number, chosen in enumerate(np.array_split(np.arange(len(rows)), files)):
            table = _table(kind, [rows[index] for index in chosen])
            file, ordered = write_file(rows_folder, number, kind, table)
            described.append(file)
            texts = ordered["texts"].to_pylist()
            lost = np.isin(ordered["id"].to_pylist(), list(without_tokens))
            sides = TOKENS[kind][: len(texts[0]) if texts else None]
            columns: dict[str, Any] = {
                column: tokenizer.encode([each[place] for each in texts], CAP) for place, column in enumerate(sides)
            }
            if kind == PAIRS:
                columns["negative_tokens"] = [tokenizer.encode(each, CAP) for each in ordered["negatives"].to_pylist()]
            schema = token_schema(kind, tokenizer.vocabulary)
            tokens = pa.table({name: pa.array(each, schema.field(name).type, mask=lost) for name, each in columns.items()})
            offsets.append(write_batches(tokens_folder / f"tokens-{number:05d}.arrow", tokens))
        write_profile(
            rows_folder,
            ingested_rows_uri(root, shard.rows),
            Profile(
                **{
                    "schema_version": SCHEMA_VERSION,
                    "kind": kind,
                    "uri": shard.uri,
                    "version": shard.version,
                    "size": shard.size,
                    "sha256": hashlib.sha256(shard.rows.encode()).hexdigest(),
                    "rows": len(rows),
                    "bad_rows": 0,
                    "files": tuple(described),
                    "sizes": {},
                    "positive_rows": sum(row.get("label", 1.0) > 0 for row in rows),
                    "tombstones": sum(row.get("text") == "" for row in rows),
                    **profile,
                }
            ),
        )
        write_profile(
            tokens_folder,
            ingested_tokens_uri(root, shard.rows, shard.tokens),
            TokenProfile(
                schema_version=SCHEMA_VERSION,
                rows_name=shard.rows,
                vocabulary=tokenizer.vocabulary,
                files=tuple(offsets),
                without_tokens=len(without_tokens),
                sizes={},
            ),
        )


def plan_documents(
    root: str, shards: Sequence[InputShard], tokenizer: TextTokenizer, *, parts: int = 1, children: int = 1
) -> EmbedPlan:
    """Plan to embed every document of ingested shards."""
    keys = CorpusReader(root, shards).read_part(0, 1)["key"].to_numpy()
    # The leading bits of a key are its part.
    own = [IdDigest.of(keys[keys >> np.uint64(32) >> np.uint64(33 - parts.bit_length()) == index]) for index in range(parts)]
    return EmbedPlan(
        source="corpus",
        shards=tuple(shards),
        tokenizer=tokenizer_plan(tokenizer),
        rows=len(keys),
        ids=str(IdDigest.of(keys)),
        parts=tuple(PartPlan(rows=digest.count, ids=str(digest)) for digest in own),
        children=children,
    )


def _table(kind: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    texts = [[row["query"], row["document"]] if kind == PAIRS else [row["text"]] for row in rows]
    columns: dict[str, Any] = {
        # An empty text is a tombstone.
        "document_hash": np.array([normalized_hash(each[-1]) if each[-1] else TOMBSTONE for each in texts], np.uint64),
        "id": [row.get("id", f"row-{row['line']}") for row in rows],
        "locale": [row.get("locale") for row in rows],
        "line": [row["line"] for row in rows],
        "texts": texts,
        "negatives": [row.get("negatives", []) for row in rows],
        "group": [row.get("group") for row in rows],
    }
    if kind == DOCUMENTS:
        columns["key"] = np.array([id_hash(identifier) for identifier in columns["id"]], np.uint64)
    else:
        columns["query_hash"] = np.array([normalized_hash(each[0]) for each in texts], np.uint64)
        columns["key"] = columns["document_hash"]
        columns["label"] = np.array([row.get("label", 1.0) for row in rows], np.float32)
        columns["task"] = [row.get("task") for row in rows]
        columns["negative_hashes"] = [[normalized_hash(text) for text in each] for each in columns["negatives"]]
        columns["version"] = row_versions(
            columns["query_hash"],
            columns["document_hash"],
            string_hashes(pa.array(columns["locale"], pa.string())),
            string_hashes(pa.array(columns["task"], pa.string())),
            columns["label"],
        )
    schema = {field.name: field.type for field in (*FACTS[kind], *TEXTS)}
    return pa.table({name: pa.array(values, schema[name]) for name, values in columns.items()})
