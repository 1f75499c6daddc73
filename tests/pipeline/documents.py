"""Documents as ingest leaves them, and a plan to embed them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.contract import ingested_rows_uri, ingested_tokens_uri
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.ids import IdDigest, id_hash
from pipeline.dataset.ingested import (
    DOCUMENTS,
    SCHEMA_VERSION,
    Profile,
    TokenProfile,
    rows_name,
    token_schema,
    tokens_name,
    write_batches,
    write_file,
    write_profile,
)
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.plan import EmbedPlan, InputShard, PartPlan, TokenizerPlan

Row = tuple[str, str, str | None]
"""Id, text, locale."""

CAP = 64


def tokenizer_plan(tokenizer: TextTokenizer) -> TokenizerPlan:
    """The plan of a BERT tokenizer: one special token on each side."""
    return TokenizerPlan(digest=tokenizer.digest, vocabulary=tokenizer.vocabulary, cap=CAP, prefix=1, suffix=1)


def ingest_documents(
    bucket_root: str,
    uri: str,
    rows: Sequence[Row],
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    generation: int = 0,
    file_rows: int = 1 << 18,
    without_tokens: Collection[str] = (),
) -> InputShard:
    """Write the rows of a shard as ingest does.

    Args:
        folder: for its local files.
        file_rows: rows of a file.
        without_tokens: ids of rows whose texts the tokenizer is said not to take.
    """
    input_file = {"uri": uri, "version": "1", "size": len(rows)}
    name = rows_name(input_file, DOCUMENTS, {}, "")
    tokens = tokens_name(name, tokenizer_plan(tokenizer))
    schema = token_schema(DOCUMENTS, tokenizer.vocabulary)
    files, offsets = [], []
    for kind in ("rows", "tokens"):
        (folder / name / kind).mkdir(parents=True)
    for number, start in enumerate(range(0, len(rows), file_rows)):
        some = rows[start : start + file_rows]
        encoded = tokenizer.encode([text for _, text, _ in some], CAP)
        table = pa.table(
            {
                "key": pa.array([id_hash(key) for key, *_ in some], pa.uint64()),
                "document_hash": pa.array([normalized_hash(text) for _, text, _ in some], pa.uint64()),
                "id": [key for key, *_ in some],
                "locale": pa.array([locale for *_, locale in some], pa.string()),
                "line": pa.array(range(start + 1, start + 1 + len(some)), pa.int64()),
                "texts": [[text] for _, text, _ in some],
                "negatives": pa.nulls(len(some), pa.list_(pa.string())),
                "group": pa.nulls(len(some), pa.string()),
                "document_tokens": pa.array(
                    [None if key in without_tokens else ids for (key, *_), ids in zip(some, encoded, strict=True)],
                    schema.field("document_tokens").type,
                ),
            }
        )
        file, table = write_file(folder / name / "rows", number, DOCUMENTS, table)
        files.append(file)
        path = folder / name / "tokens" / f"tokens-{number:05d}.arrow"
        offsets.append(write_batches(path, table.select(["document_tokens"])))
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        kind=DOCUMENTS,
        sha256="",
        rows=len(rows),
        bad_rows=0,
        files=tuple(files),
        sizes={},
        **input_file,
    )
    write_profile(folder / name / "rows", ingested_rows_uri(bucket_root, name), profile)
    token_profile = TokenProfile(
        schema_version=SCHEMA_VERSION,
        rows_name=name,
        vocabulary=tokenizer.vocabulary,
        files=tuple(offsets),
        without_tokens=len(without_tokens),
        sizes={},
    )
    write_profile(folder / name / "tokens", ingested_tokens_uri(bucket_root, tokens), token_profile)
    return InputShard(kind=DOCUMENTS, rows=name, tokens=tokens, generation=generation, **input_file)


def plan_documents(
    bucket_root: str, shards: Sequence[InputShard], tokenizer: TextTokenizer, *, parts: int, children: int = 1
) -> EmbedPlan:
    """Plan to embed every document of some shards."""
    keys = CorpusReader(bucket_root, shards).read_part(0, 1)["key"].to_numpy()
    owner = (keys >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)
    own = [IdDigest.of(keys[owner == index]) for index in range(parts)]
    return EmbedPlan(
        source="corpus",
        shards=tuple(shards),
        tokenizer=tokenizer_plan(tokenizer),
        rows=len(keys),
        ids=str(IdDigest.of(keys)),
        parts=tuple(PartPlan(rows=digest.count, ids=str(digest)) for digest in own),
        children=children,
    )
