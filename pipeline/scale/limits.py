"""What would break first: what grows with rows, shards and parts, against what there is of it. prepare judges by the same.

Sizes follow from the structures that the stages hold: elements of arrays by their type, Python objects by what the interpreter
takes for one; tests/pipeline/test_scale.py compares them with what is allocated. The two rates are measured, and only warn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import RunConfig
from pipeline.contract import (
    ARRAY_LIMIT,
    FARGATE_DISK_GIB,
    FARGATE_MEMORY_MIB,
    FARGATE_VCPUS,
    RESULT_LIMIT_BYTES,
    ROOT_VOLUME_GIB,
    STAGES,
    Artifact,
    Stage,
    StageResult,
)
from pipeline.errors import BadConfig
from pipeline.model.memory import (
    FP32,
    GIB,
    INT32,
    INT64,
    MIB,
    PROCESS_BYTES,
    Limits,
    ModelShape,
    estimate,
)
from pipeline.plan import EmbedPlan, PartPlan, Shard, Span, World, own_parts
from pipeline.scale.measured import RANKED_SCORES, TOKENIZED_TOKENS
from pipeline.scale.published import HOSTS

LISTED_SHARDS = 20
"""Shards named in prepare's result.json, which must stay small; all of them are in the plan."""

READERS = 4
"""Parts that publish holds on its disk at once: pipeline/stages/publish.READERS."""

RESULT_REST_BYTES = 4 * 1024
"""Of prepare's result.json beside the files that it names: metrics and versions, with room to spare."""

ARRAY_GROWTH = 17 / 16
"""What `array.array` allocates ahead while it grows."""

SCAN_BYTES = (INT64 + INT64) * ARRAY_GROWTH + 1
"""Of a training row in prepare, from its first reading on: hash of the id, hash of the document, whether it is a pair
(pipeline/data/shards.ShardScan)."""

CORPUS_SCAN_BYTES = INT64 * ARRAY_GROWTH

REPEATED_BYTES = INT64 + 1
"""Of an id while repeated ones are looked for: a sorted copy and a mask (pipeline/data/ids.repeated)."""

MASK_BYTES = 3
"""Of a training row: held out, trained on, distractor (pipeline/data/increments.Selection)."""

SELECT_BYTES = 3 * INT64
"""Of a training row while rows are selected: keys and their order, or sorted hashes of documents."""

MARK_BYTES = 4 * 8 + 36
"""Of a selected row of the shard that is being tokenized: four entries of lists, and the hash as an int object of Python
(pipeline/data/arrow.write_rows)."""

KNOWN_BYTES = 78
"""Of a hold-out document or distractor: an int object and its entry in a set, as CPython 3.11 allocates them for 200,000."""

QUERY_SET_BYTES = 133
"""Of a hold-out query: a tuple with an int object, and its entry in a set, likewise (pipeline/data/arrow.RowWriter)."""

SCHEDULE_BYTES = INT32 + 3 * INT64 + 1
"""Of a training row while steps are counted: its length, and as 64-bit numbers its length, bucket and place
(pipeline/data/schedule.Schedule)."""

HASH_BYTES = INT64
"""Of an embedding in publish (pipeline/stages/publish.CheckedPart)."""

TRAIN_ROW_BYTES = 2 * INT64 + 2 * INT32 + INT64 + 28
"""Of a training row in each rank: two hashes, two lengths, its place; and while an epoch is laid out its key, its new place, and
the batches before and after they are shuffled (pipeline/training/batches.TrainingBatches)."""

CANDIDATE_BYTES, HOLDOUT_QUERY_BYTES = 180, 300
"""Of a candidate and of a query in evaluate beside their tokens: lists, dicts and keys as CPython 3.11 allocates them for 50,000
(pipeline/stages/evaluate.join_holdout)."""

LISTED_TOKEN_BYTES = 42
"""Of a token there: an int object, and its entry in a list that was made longer and longer."""

RANKED_BYTES = 100 * (2 * INT64 + 8)
"""Of a query in evaluate: its 100 best candidates in pieces and joined, and their gains (pipeline/model/retrieval)."""

ROW_FIELDS_BYTES = 8 + 8 + 4 + 8 + 3 * 4
"""Of a row of train.arrow beside its id and its tokens: two hashes, shard, line, three offsets (pipeline/data/arrow.SCHEMAS)."""

ID_BYTES = 24
"""Taken for an id."""

MANY_READS = 10
"""Times that embed reads the corpus, above which its shards are too large for its parts."""

S3_LIST = 1000
"""Keys of one page of ListObjectsV2 (S3 API reference)."""

S3_GET_BYTES, S3_PUT_BYTES = 8 << 20, 32 << 20
"""Bytes of a request for a large file: PIECE_BYTES and PART_BYTES of pipeline/runtime/store/s3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much of everything a run has.

    Attributes:
        train_rows: good rows of all training shards, new and earlier.
        trained_rows: those trained on in an epoch.
        holdout: rows held out.
        queries, candidates: distinct queries and documents among these; the distractors' number is a setting.
        train_shards, corpus_shards: input files; no corpus files where the documents of the training rows are the corpus.
        largest_shard: rows of the largest training shard.
        corpus_rows: documents embedded.
        parts, children: of embed.
        rows_read: rows that embed's ranks read in all: each reads the shard that its first part begins in from the beginning.
        uri_bytes: of the longest shard's URI.
        query_tokens, document_tokens: means.
        dimension: of an embedding.
    """

    train_rows: int
    trained_rows: int
    holdout: int
    queries: int
    candidates: int
    train_shards: int
    corpus_shards: int
    largest_shard: int
    corpus_rows: int
    parts: int
    children: int
    rows_read: int
    uri_bytes: int
    query_tokens: float
    document_tokens: float
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is, in bytes; None: unknown, and not judged.

    Attributes:
        cpu_memory, cpu_disk: of the tasks that prepare and publish.
        host_memory, host_disk: of a node that trains.
        embed_memory, embed_threads: of a host that evaluates and embeds.
    """

    cpu_memory: int | None = None
    cpu_disk: int | None = None
    host_memory: int | None = None
    host_disk: int | None = None
    embed_memory: int | None = None
    embed_threads: int | None = None

    @classmethod
    def deployed(cls, limits: Limits, embed_host: str | None) -> Room:
        """A deployment's, whose evaluate and embed run on this instance type; None: on one that is not known."""
        host = HOSTS.get(embed_host or "")
        return cls(
            cpu_memory=FARGATE_MEMORY_MIB * MIB,
            cpu_disk=FARGATE_DISK_GIB * GIB,
            host_memory=limits.host,
            host_disk=ROOT_VOLUME_GIB * GIB,
            embed_memory=host.job_memory if host else None,
            embed_threads=host.job_vcpus if host else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that grows with the data.

    Attributes:
        what: e.g. `prepare, memory`.
        amount, limit: in `unit`; a limit of None is not judged.
        unit: `bytes`, or what is counted.
        breaks: above the limit the run fails, and prepare refuses it; else it is only slow or dear.
        remedy: what helps.
    """

    what: str
    amount: float
    limit: float | None
    unit: str = "bytes"
    breaks: bool = True
    remedy: str = ""

    @property
    def over(self) -> bool:
        return self.limit is not None and self.amount > self.limit

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "over": self.over}

    def shown(self, amount: float | None) -> str:
        """For people."""
        if amount is None:
            return "-"
        if self.unit != "bytes":
            return f"{_counted(amount)} {self.unit}".strip()
        return f"{amount / GIB:.2f} GiB" if amount >= GIB else f"{amount / MIB:.2f} MiB" if amount >= MIB else f"{amount:,.0f} B"


def _counted(amount: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if amount >= size:
            return f"{amount / size:.1f} {name}"
    return f"{amount:,.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.1f}"


def needs(counts: Counts, shape: ModelShape, config: RunConfig, world: World, room: Room) -> list[Need]:
    """Everything that grows with the data, what would break before what would only take long."""
    return [
        *_prepare(counts, config, room),
        *_train(counts, shape, config, world, room),
        *_evaluate(counts, config, room),
        *_embed(counts, config),
        *_publish(counts, config, room),
    ]


def require_room(counts: Counts, shape: ModelShape, config: RunConfig, world: World, room: Room) -> list[Need]:
    """The needs of a run that can end well.

    Raises:
        BadConfig: of one that cannot, with everything that is too much and what helps.
    """
    found = needs(counts, shape, config, world, room)
    refuse(found)
    return found


def refuse(found: Sequence[Need]) -> None:
    """End where a stage cannot hold its data.

    Raises:
        BadConfig: with everything that is too much and what helps.
    """
    refused = [need for need in found if need.over and need.breaks]
    if refused:
        raise BadConfig(
            "the run has more data than a stage can hold",
            value=[f"{need.what}: {need.shown(need.amount)}" for need in refused],
            rule="; ".join(f"{need.what}: at most {need.shown(need.limit)}" for need in refused),
            remedy="; ".join(dict.fromkeys(need.remedy for need in refused)),
        )


# ---- stage by stage --------------------------------------------------------------------------------------------------


def row_file_bytes(counts: Counts, config: RunConfig) -> float:
    """The three row files: rows trained on, hold-out, candidates with the distractors."""
    train = counts.trained_rows * (ROW_FIELDS_BYTES + ID_BYTES + INT32 * (counts.query_tokens + counts.document_tokens))
    holdout = counts.holdout * (ROW_FIELDS_BYTES + ID_BYTES + INT32 * counts.query_tokens)
    candidates = (counts.candidates + config.evaluate.candidates) * (INT64 + 4 + INT32 * counts.document_tokens)
    return train + holdout + candidates


def _prepare(counts: Counts, config: RunConfig, room: Room) -> Iterator[Need]:
    documents = counts.candidates + config.evaluate.candidates
    scans = SCAN_BYTES * counts.train_rows + (CORPUS_SCAN_BYTES * counts.corpus_rows if counts.corpus_shards else 0)
    masks = MASK_BYTES * counts.train_rows
    moments = (
        REPEATED_BYTES * counts.corpus_rows,
        masks + SELECT_BYTES * counts.train_rows,
        masks
        + MARK_BYTES * counts.largest_shard
        + KNOWN_BYTES * documents
        + QUERY_SET_BYTES * counts.queries
        + INT32 * counts.trained_rows,
        masks + SCHEDULE_BYTES * counts.trained_rows,
    )
    yield Need(
        what="prepare, memory",
        amount=sum(PROCESS_BYTES["eager"]) + scans + max(moments),
        limit=room.cpu_memory,
        remedy="train on fewer rows at a time: name fewer shards in data.train, and smaller ones",
    )
    yield Need(
        what="prepare, disk: row files",
        amount=row_file_bytes(counts, config),
        limit=room.cpu_disk,
        remedy="name fewer shards in data.train, lower data.replay_fraction, or shorten train.buckets",
    )
    tokens = (counts.trained_rows + counts.holdout) * (counts.query_tokens + counts.document_tokens)
    yield Need(
        what="prepare, tokenizing alone, at a rate measured elsewhere",
        amount=tokens / TOKENIZED_TOKENS / FARGATE_VCPUS / 60,
        limit=STAGES[Stage.PREPARE].timeout_minutes if room.cpu_memory else None,
        unit="minutes",
        breaks=False,
        remedy="prepare's attempt ends at its limit: name fewer shards in data.train per run",
    )
    yield Need(what="prepare, plan.json", amount=plan_bytes(counts), limit=None)
    yield Need(
        what="prepare, result.json",
        amount=result_bytes(counts),
        limit=RESULT_LIMIT_BYTES,
        remedy="keep the shards under shorter URIs",
    )
    shards = 3 * counts.train_shards + 2 * counts.corpus_shards
    listed = math.ceil((counts.train_shards + counts.corpus_shards) / S3_LIST)
    yield _requests("prepare", 2 * shards + listed + _pieces(row_file_bytes(counts, config), S3_PUT_BYTES))


def _train(counts: Counts, shape: ModelShape, config: RunConfig, world: World, room: Room) -> Iterator[Need]:
    known = next(
        budget.total
        for budget in estimate(shape, config, world, Limits(None, None))
        if (budget.stage, budget.place) == ("train", "host")
    )
    yield Need(
        what="train, memory of a node",
        amount=known + world.ranks_per_node * TRAIN_ROW_BYTES * counts.trained_rows,
        limit=room.host_memory,
        remedy="train on fewer rows at a time: fewer shards in data.train, or a lower data.replay_fraction",
    )
    rows = row_file_bytes(counts, config)
    yield Need(
        what="train, disk of a node: row files and two checkpoints",
        amount=rows + 2 * 3 * FP32 * shape.parameters,
        limit=room.host_disk,
        remedy="name fewer shards in data.train, or lower data.replay_fraction",
    )
    yield _requests("train", world.nodes * _pieces(rows, S3_GET_BYTES))


def _evaluate(counts: Counts, config: RunConfig, room: Room) -> Iterator[Need]:
    candidates, queries = counts.candidates + config.evaluate.candidates, counts.queries
    # For a moment there are both copies of the candidates' embeddings.
    candidate = CANDIDATE_BYTES + LISTED_TOKEN_BYTES * counts.document_tokens + 2 * FP32 * counts.dimension
    query = HOLDOUT_QUERY_BYTES + RANKED_BYTES + LISTED_TOKEN_BYTES * counts.query_tokens + 2 * FP32 * counts.dimension
    fewer = f"data.holdout_fraction={_enough(counts, config):.2g} holds out ten times what gate.min_queries asks for"
    yield Need(
        what="evaluate, memory of a host",
        amount=sum(PROCESS_BYTES["lazy"]) + candidates * candidate + queries * query,
        limit=room.embed_memory,
        remedy=fewer,
    )
    yield Need(
        what="evaluate, ranking both models' candidates, at a rate measured elsewhere",
        amount=2 * queries * candidates / RANKED_SCORES / (room.embed_threads or 1) / 60,
        limit=STAGES[Stage.EVALUATE].timeout_minutes if room.embed_threads else None,
        unit="minutes",
        breaks=False,
        remedy=f"evaluate's attempt ends at its limit, and all queries are ranked against all candidates: {fewer}",
    )


def _enough(counts: Counts, config: RunConfig) -> float:
    return min(config.data.holdout_fraction, 10 * config.gate.min_queries / max(counts.train_rows, 1))


def _embed(counts: Counts, config: RunConfig) -> Iterator[Need]:
    yield Need(
        what="embed, children of the array",
        amount=counts.children,
        limit=ARRAY_LIMIT,
        unit="children",
        remedy=f"embed.children of at most {ARRAY_LIMIT:,}",
    )
    yield Need(what="embed, parts", amount=counts.parts, limit=None, unit="parts")
    yield Need(
        what="embed, how often the corpus is read",
        amount=counts.rows_read / max(counts.corpus_rows, 1),
        limit=MANY_READS,
        unit="times",
        breaks=False,
        remedy="every rank reads from the beginning of the shard that its first part begins in: cut the corpus into more shards, "
        "or lower embed.children",
    )
    # A part is looked for, uploaded, and looked at and hashed after; its record likewise; a shard is opened for each span.
    uploaded = counts.parts * _pieces(part_bytes(counts, config), S3_PUT_BYTES)
    yield _requests("embed", 12 * counts.parts + 3 * (counts.parts + counts.corpus_shards) + uploaded)


def _publish(counts: Counts, config: RunConfig, room: Room) -> Iterator[Need]:
    part = part_bytes(counts, config)
    yield Need(
        what="publish, memory",
        amount=sum(PROCESS_BYTES["eager"]) + (HASH_BYTES + REPEATED_BYTES) * counts.corpus_rows,
        limit=room.cpu_memory,
        remedy="embed a smaller corpus, or several under registry names of their own",
    )
    yield Need(
        what=f"publish, disk: {READERS} parts",
        amount=READERS * part,
        limit=room.cpu_disk,
        remedy="lower embed.rows_per_part",
    )
    yield Need(what="publish, embed/manifest.json", amount=manifest_bytes(counts), limit=None)
    yield _requests("publish", counts.parts * (2 + _pieces(part, S3_GET_BYTES)))


def part_bytes(counts: Counts, config: RunConfig) -> float:
    """A part of the embeddings, which are not compressed."""
    width = 4 if config.embed.dtype == "float32" else 2
    return counts.corpus_rows / max(counts.parts, 1) * (width * counts.dimension + ID_BYTES)


def _pieces(size: float, piece: int) -> int:
    return max(1, math.ceil(size / piece))


def _requests(stage: str, count: float) -> Need:
    return Need(what=f"{stage}, requests to S3, about", amount=count, limit=None, unit="requests")


# ---- files whose size follows from their form ------------------------------------------------------------------------


def plan_bytes(counts: Counts) -> int:
    """`plan.json`: shards that are trained on, all shards that are embedded, parts, and the shards that were ever seen."""
    shard = Shard(uri="u" * counts.uri_bytes, sha256="0" * 64, size=10**9, rows=counts.largest_shard, first_run="r" * 24)
    part = PartPlan(spans=(Span(shard=counts.corpus_shards, start=0, stop=counts.largest_shard),), rows=10**5)
    embedded = counts.corpus_shards or counts.train_shards
    of_shard, of_part = _each(shards=(shard,)), _each(parts=(part,))
    seen = len('  "",\n') + 64
    # A part that ends one shard and begins another has a second span.
    return (counts.train_shards + embedded) * of_shard + (counts.parts + embedded // 2) * of_part + counts.train_shards * seen


def _each(**lists: Any) -> int:
    """Bytes of one more element of a list, as it stands in the plan: one level deeper than here."""
    empty = EmbedPlan(source="documents", shards=(), rows=0, ids="", parts=(), children=1)
    [(name, items)] = lists.items()
    once, twice = (empty.model_copy(update={name: items * times}).model_dump_json(indent=1) for times in (1, 2))
    return len(twice) - len(once) + twice.count("\n") - once.count("\n")


def manifest_bytes(counts: Counts) -> int:
    """`embed/manifest.json`, as publish writes it."""
    name = f"embed/part-{0:05d}-of-{0:05d}.parquet"
    part = {"quarantined": 0, "rows": 10**5, "sha256": "0" * 64, "uri": "u" * counts.uri_bytes + name}
    return counts.parts * (len(json.dumps({"parts": [part]}, indent=1)) - len(json.dumps({"parts": []}, indent=1)) + 1)


def result_bytes(counts: Counts) -> int:
    """prepare's result.json, whose list of shards ends at LISTED_SHARDS."""
    artifact = Artifact("u" * counts.uri_bytes, "0" * 64, 10**9)
    listed = min(counts.train_shards + counts.corpus_shards, LISTED_SHARDS)
    result = StageResult(
        stage=Stage.PREPARE.value,
        run="",
        status="done",
        started="",
        finished="",
        fingerprint="0" * 64,
        inputs={f"corpus-{number:05d}": artifact for number in range(listed + 1)},
        outputs={f"candidates.arrow-{number}": artifact for number in range(4)},
    )
    return len(json.dumps(asdict(result), indent=1, sort_keys=True)) + RESULT_REST_BYTES


def rows_read(parts: Sequence[PartPlan], ranks: int) -> int:
    """Rows that are read for these parts by so many ranks: every shard is a stream, so each rank also reads what comes before its
    first row."""
    own = [own_parts(len(parts), ranks, rank) for rank in range(ranks)]
    return sum(part.rows for part in parts) + sum(parts[indices[0]].spans[0].start for indices in own if indices)


def over(found: Sequence[Need]) -> list[Need]:
    """What is too much, what would break first."""
    return sorted((need for need in found if need.over), key=lambda need: (not need.breaks, -need.amount / (need.limit or 1)))
