"""embed: one child of the array that embeds the whole corpus with the new model, part after part.

Child i takes the plan's parts i, i + children, ...; reads their rows from the corpus shards and writes `embed/part-....parquet`,
then the part's record. Complete parts are left alone, so a child that is interrupted loses at most the part it was in. The child
that finds the parts of all children complete speaks for the stage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.contract import EAGER_KINDS, Artifact, now
from pipeline.data.ids import IdDigest
from pipeline.data.parts import PartRecord, PartWriter
from pipeline.data.rows import read_documents
from pipeline.data.tokens import TextTokenizer
from pipeline.errors import BadData
from pipeline.model.compiled import encode_function, known_graphs
from pipeline.model.folder import WEIGHTS, load_encoder
from pipeline.model.inference import encode, plan_batches
from pipeline.model.watch import GraphWatch
from pipeline.plan import PartPlan
from pipeline.runtime import store
from pipeline.runtime.context import StageContext, StageOutput
from pipeline.runtime.device import Device, EncodeFunction, open_device

log = logging.getLogger("trnpipe")

WINDOW_ROWS = 16_384
"""Rows that are sorted by length together, and make one row group. More would pad less and hold more: with 384 dimensions in fp32
a window takes 25 MB of embeddings and about as much of tokens."""

Item = TypeVar("Item")


def run(context: StageContext) -> StageOutput | None:
    """Embed this child's parts.

    Returns:
        The stage's output if the parts of all children are complete, else None.

    Raises:
        BadData: a shard is not the one that was planned with, or an embedding is not finite.
    """
    plan, world = context.plan.embed, context.world
    child = world.node.array_index
    # Ranks of one child share its parts and need not know of each other.
    own = range(child, len(plan.parts), plan.children)[world.rank :: world.size]
    weights = store.join(context.paths.model, WEIGHTS)
    model = Artifact(weights, store.sha256(weights))
    todo = [index for index in own if complete_part(context, index, model, deep=True) is None]
    log.info("embed: child %d of %d: %d of its %d parts are to do", child, plan.children, len(todo), len(own))
    if todo:
        worker = open_worker(context, model, todo)
        for index in todo:
            embed_part(worker, index)
            worker.watch.check(0)
        if context.plan.graphs and world.local_rank == 0:
            worker.watch.report(context)
        worker.device.close()
    return stage_output(context, model)


def complete_part(context: StageContext, index: int, model: Artifact, *, deep: bool) -> PartRecord | None:
    """The record of a part that is complete, None where there is work to do.

    Args:
        model: the weights that must have made it.
        deep: compare the file's content as well, not only its size.
    """
    plan, paths = context.plan, context.paths
    count = len(plan.embed.parts)
    info, record_uri = store.stat(paths.part(index, count)), paths.part_manifest(index, count)
    if info is None or not store.exists(record_uri):
        return None
    try:
        record = PartRecord.from_json(store.read_bytes(record_uri))
    except BadData as error:
        log.warning("part %d: %s; doing it again", index, error.what)
        return None
    expected = (plan.fingerprint, model.sha256, plan.embed.parts[index].rows, info.size)
    found = (record.fingerprint, record.model, record.rows, record.size)
    if found != expected or (deep and store.sha256(info.uri) != record.sha256):
        log.warning("part %d is not what its record says; doing it again", index)
        return None
    return record


@dataclass(kw_only=True)
class Worker:
    """This process's model on its device, and how far it is.

    Attributes:
        done, total: documents embedded, and to embed, by this process.
        begun: monotonic seconds at the first document.
    """

    context: StageContext
    device: Device
    encode_with: EncodeFunction
    dimension: int
    watch: GraphWatch
    tokenizer: TextTokenizer
    model: Artifact
    total: int
    done: int = 0
    begun: float = 0.0

    def beat(self, done: int) -> None:
        """Say how far the process is: `done` documents beyond those of complete windows."""
        done += self.done
        rate = done / max(time.monotonic() - self.begun, 1e-9)
        self.context.heartbeat.beat(done, self.total, unit="documents", rate=rate, note="embedding")


def open_worker(context: StageContext, model: Artifact, todo: Sequence[int]) -> Worker:
    """Load the model onto this process's device."""
    plan, config = context.plan, context.plan.config
    context.heartbeat.beat(note="loading the model")
    folder = store.local_folder(context.paths.model, context.scratch / "model")
    alone = replace(context.world, rank=0, size=1)
    threads = config.device.threads_per_rank
    device = open_device(plan.world.kind, plan.world.precision, alone, threads=threads, inference=True)
    encoder = load_encoder(folder, config.model)
    return Worker(
        context=context,
        device=device,
        encode_with=encode_function(context, device, encoder),
        dimension=encoder.dimension,
        watch=GraphWatch(device=device, known=known_graphs(context), stop=config.compile.new_graphs == "stop"),
        tokenizer=TextTokenizer(folder),
        model=model,
        total=sum(plan.embed.parts[index].rows for index in todo),
        begun=time.monotonic(),
    )


def embed_part(worker: Worker, index: int) -> PartRecord:
    """Embed one part and upload it, its record last.

    Raises:
        BadData: an embedding that is not finite, or a shard that has changed.
    """
    context, config = worker.context, worker.context.plan.config.embed
    part, count = context.plan.embed.parts[index], len(context.plan.embed.parts)
    started, clock = now(), time.monotonic()
    path = context.scratch / f"part-{index:05d}.parquet"
    digest = IdDigest()
    tokens = padded_tokens = 0
    with PartWriter(path, worker.dimension, config.dtype) as writer:
        for ids, token_lists in ahead(windows(worker, part)):
            embeddings = encode(
                worker.encode_with, worker.device, token_lists, config.buckets, config.tokens_per_batch, on_progress=worker.beat
            )
            writer.write(ids, checked(ids, embeddings.numpy().astype(config.dtype, copy=False)))
            for identifier in ids:
                digest.add(identifier)
            lengths = np.array([len(item) for item in token_lists])
            static = worker.device.kind not in EAGER_KINDS
            batches = plan_batches(lengths, config.buckets, config.tokens_per_batch, static=static)
            tokens += int(lengths.sum())
            padded_tokens += sum(batch.slots * batch.length for batch in batches)
            worker.done += len(ids)
    artifact = store.upload(path, context.paths.part(index, count))
    path.unlink()
    seconds = time.monotonic() - clock
    record = PartRecord(
        sha256=artifact.sha256,
        size=artifact.size,
        rows=part.rows,
        ids=str(digest),
        dimension=worker.dimension,
        dtype=config.dtype,
        model=worker.model.sha256,
        fingerprint=context.plan.fingerprint,
        tokens=tokens,
        padded_tokens=padded_tokens,
        started=started,
        finished=now(),
        seconds=seconds,
        documents_per_second=part.rows / seconds,
    )
    store.write_bytes(context.paths.part_manifest(index, count), record.to_json())
    log.info("part %d of %d: %d documents, %.0f per second", index + 1, count, part.rows, record.documents_per_second)
    return record


def windows(worker: Worker, part: PartPlan) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Ids and token ids of a part's rows in their order, WINDOW_ROWS at a time."""
    plan = worker.context.plan
    rows = (
        row
        for span in part.spans
        for row in read_documents(
            plan.embed.shards[span.shard], plan.embed.source, plan.config.data.columns, span.start, span.stop
        )
    )
    while window := list(islice(rows, WINDOW_ROWS)):
        ids, texts = zip(*window, strict=True)
        yield list(ids), worker.tokenizer.encode(texts, max(plan.config.embed.buckets))


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the next one made in the background while this one is used: reading and tokenizing cost no device time."""
    with ThreadPoolExecutor(1, "ahead") as background:
        coming = background.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = background.submit(next, items, None)
            yield item


def checked(ids: Sequence[str], embeddings: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """The embeddings, shape (rows, dimension), if all are finite.

    Raises:
        BadData: naming the documents whose embeddings are not.
    """
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise BadData(
            "embeddings that are not finite",
            value=[ids[row] for row in np.flatnonzero(~finite)[:20]],
            rule=f"every value is a number that {embeddings.dtype} can hold",
            remedy="look at the model; embed.dtype=float32 holds larger numbers than float16",
        )
    return embeddings


def stage_output(context: StageContext, model: Artifact) -> StageOutput | None:
    """What the whole array did, or None while parts are missing."""
    plan = context.plan.embed
    indices = range(len(plan.parts))
    present = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(context.paths.stage(context.stage))}
    names = {context.paths.part_manifest(index, len(plan.parts)).rsplit("/", 1)[-1] for index in indices}
    found = [complete_part(context, index, model, deep=False) for index in indices] if names <= present else [None]
    records = [record for record in found if record is not None]
    if len(records) < len(plan.parts):
        log.info("embed: other children are still at work; this one is done")
        return None
    times = [datetime.fromisoformat(moment) for record in records for moment in (record.started, record.finished)]
    seconds = (max(times) - min(times)).total_seconds()
    documents = sum(record.rows for record in records)
    tokens = sum(record.tokens for record in records)
    return StageOutput(
        inputs={"model": model},
        metrics={
            "documents": documents,
            "documents_per_second": documents / max(seconds, 1e-9),
            "seconds": seconds,
            "parts": len(records),
            "children": plan.children,
            "dimension": records[0].dimension,
            "dtype": records[0].dtype,
            "tokens": tokens,
            "padding": 1 - tokens / max(sum(record.padded_tokens for record in records), 1),
        },
    )
