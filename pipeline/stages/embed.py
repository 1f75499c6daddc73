"""embed: one child of the array that embeds the whole corpus with the new model, part after part.

A child takes consecutive parts of the plan, and so does each of its ranks. A rank reads the next part's tokens from the ingested
shards while its device computes one. Of each part it writes `embed/part-....parquet`, then the part's record. Complete parts are
left alone, so a child that is interrupted loses at most the part it was in. What earlier parts of the same form have is taken
from them: a part without a change stays where it is, and its record names it. A document that cannot be embedded is left out and
listed next to its part, up to a share of the corpus. The child that finds all parts complete speaks for the stage.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import store
from pipeline.backends.device import Device, EncodeFunction, open_device
from pipeline.contract import Artifact, Metric, Stage, now
from pipeline.dataset.corpus import DOCUMENT_TOKENS, CorpusReader
from pipeline.dataset.earlier_parts import EarlierParts, EarlierVectors, Parts, content_digest, embedding_form, token_hashes
from pipeline.dataset.ids import IdDigest, id_hashes
from pipeline.dataset.parts import PartRecord, PartWriter, QuarantinedDocument, quarantine_to_json
from pipeline.dataset.tokens import cut
from pipeline.errors import BadData, MissingInput, Transient
from pipeline.evaluation.vectors import shortened
from pipeline.graphs.compiled import encode_function, known_graphs
from pipeline.graphs.graph_watch import GraphWatch
from pipeline.host.host import versions
from pipeline.log import log
from pipeline.model.card import CARD
from pipeline.model.classifier import Classifier, load_classifiers
from pipeline.model.folder import WEIGHTS, load_encoder
from pipeline.model.inference import encode
from pipeline.model.inventory import read_dimensions
from pipeline.plan import own_parts
from pipeline.run.ahead import ahead
from pipeline.run.context import StageContext, StageOutput

WINDOW_ROWS = 16_384
"""Rows that are sorted by length together, and make one row group. More would pad less and hold more: with 384 dimensions in fp32
a window takes 25 MB of embeddings."""

MOST_WRITES = 4
"""Writes of one part: another child that writes it too has one copy to write, and seldom interferes more than once."""

EXAMPLES = 20


def run(context: StageContext) -> StageOutput | None:
    """Embed this child's parts.

    Returns:
        The stage's output if the parts of all children are complete, else None.

    Raises:
        BadData: a part's documents are not the planned ones, or too many documents cannot be embedded.
    """
    plan, world = context.plan.embed, context.world
    child = world.node.array_index
    # Ranks of one child share its parts and need not know of each other.
    own = own_parts(len(plan.parts), plan.children * world.size, child * world.size + world.rank)
    model = embedding_model(context)
    todo = [index for index in own if complete_part(context, index, model, deep=True) is None]
    log.info("embed: child %d of %d: %d of its %d parts are to do", child, plan.children, len(todo), len(own))
    if todo:
        worker = open_worker(context, model, todo)
        # Reading costs no device time.
        for index, documents in ahead(documents_of(context, todo), 1):
            embed_part(worker, index, documents)
            worker.watch.check(0)
        if context.plan.graphs and world.local_rank == 0:
            worker.watch.report(context)
        worker.device.close()
    return stage_output(context, model)


def embedding_model(context: StageContext) -> Artifact:
    """Return the weights of the model that embeds: the run's own, or the one that its plan names."""
    planned = context.plan.embed.model
    weights = store.join(planned.folder if planned else context.paths.model, WEIGHTS)
    return Artifact(weights, store.sha256(weights))


def complete_part(context: StageContext, index: int, model: Artifact, *, deep: bool) -> PartRecord | None:
    """Return the record of a complete part, None for an incomplete one.

    Args:
        model: the weights that must have made it.
        deep: compare the file's content as well, not only its size.
    """
    plan, paths = context.plan, context.paths
    count = len(plan.embed.parts)
    try:
        record = PartRecord.from_json(store.read_bytes(paths.part_manifest(index, count)))
    except MissingInput:
        return None
    except BadData as error:
        log.warning("part %d: %s; doing it again", index, error.what)
        return None
    if record.fingerprint != plan.fingerprint_of(Stage.EMBED):
        return None
    info = store.stat(record.uri or paths.part(index, count))
    expected = (model.sha256, plan.embed.parts[index].rows, info.size if info else None)
    found = (record.model, record.rows + record.quarantined, record.size)
    if found != expected or (deep and not _is_its_records(context, index, record)):
        log.warning("part %d does not match its record; doing it again", index)
        return None
    return record


def _is_its_records(context: StageContext, index: int, record: PartRecord) -> bool:
    """Whether the content of a part, and of its list, matches the record."""
    part, listed = record.uri or context.paths.part(index, len(context.plan.embed.parts)), quarantine_uri(context, index)
    fits = not record.quarantined or (store.exists(listed) and store.sha256(listed) == record.quarantine_sha256)
    return fits and store.sha256(part) == record.sha256


@dataclass(kw_only=True)
class Worker:
    """This process's model on its device, and its progress.

    Attributes:
        dimension: of the published embeddings.
        done, total: documents embedded, and to embed, by this process.
        work: tokens of the embedded ones.
        classifiers: task -> the model's classifier.
        begun: monotonic seconds at the first document.
    """

    context: StageContext
    device: Device
    encode_with: EncodeFunction
    dimension: int
    classifiers: dict[str, Classifier]
    watch: GraphWatch
    model: Artifact
    form: str
    earlier: EarlierParts
    total: int
    done: int = 0
    work: int = 0
    begun: float = 0.0

    def beat(self, rows: int, tokens: int, done: int, share: float) -> None:
        """Report progress inside a window. Documents that are not yet embedded count as long as the mean of the others.

        Args:
            rows, tokens: of the window.
            done, share: as `encode` reports them.
        """
        work = self.work + share * tokens
        total_work = (self.work + tokens) / (self.done + rows) * self.total
        done += self.done
        self.context.heartbeat.beat(
            done,
            self.total,
            work=work,
            total_work=total_work,
            unit="documents",
            rate=done / max(time.monotonic() - self.begun, 1e-9),
            note="embedding",
        )


def open_worker(context: StageContext, model: Artifact, todo: Sequence[int]) -> Worker:
    """Load the model onto this process's device."""
    plan, config = context.plan, context.plan.config
    context.heartbeat.beat(note="loading the model")
    folder = store.local_folder(model.uri.rpartition("/")[0], context.scratch / "model")
    device = open_device(
        plan.world.kind, plan.world.precision, context.world, threads=config.device.threads_per_rank, inference=True
    )
    encoder = load_encoder(folder, config.model)
    form = embedding_form(
        {
            "weights": model.sha256,
            "folder": facts_of(folder),
            "model": config.model.model_dump(mode="json", include={"pooling", "normalize", "head"}),
            "tokens": [plan.embed.tokenizer.digest, config.embed.length],
            "dtype": config.embed.dtype,
            "device": [device.kind, device.precision, plan.graphs.infer_compiler_flags if plan.graphs else ""],
            "versions": versions(),
        }
    )
    return Worker(
        context=context,
        device=device,
        encode_with=encode_function(context, device, encoder),
        dimension=read_dimensions(folder) or encoder.dimension,
        classifiers=load_classifiers(folder, encoder),
        watch=GraphWatch(
            device=device,
            known=known_graphs(context),
            stop=config.compile.new_graphs == "stop",
            cloudwatch=context.cloudwatch,
        ),
        model=model,
        form=form,
        earlier=EarlierParts(context.paths, len(plan.embed.parts), plan.embed.earlier, form),
        total=sum(plan.embed.parts[index].rows for index in todo),
        begun=time.monotonic(),
    )


def facts_of(folder: Path) -> dict[str, str]:
    """Return the hashes of a model folder's files besides its weights and its card: of its head, lengths, prompts, modules, and
    so of the size of its embeddings."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: store.sha256_file(path) for name, path in files.items() if name not in (WEIGHTS, CARD)}


def documents_of(context: StageContext, indices: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Yield parts and their documents: rows of CorpusReader with tokens that fit a row.

    Raises:
        BadData: they are not the planned ones.
    """
    plan, length = context.plan.embed, context.plan.config.embed.length
    reader = CorpusReader(context.paths.bucket_root, plan.shards)
    for index in indices:
        documents = reader.read_part(index, len(plan.parts), partial(cut, length=length, plan=plan.tokenizer))
        found, planned = str(IdDigest.of(documents["key"].to_numpy())), plan.parts[index].ids
        if found != planned:
            raise BadData(
                "the ingested shards have changed since the run was planned",
                value=f"part {index}: ids {found}, expected {planned}",
                rule="ingested shards never change",
                remedy="start a new run, which ingests again what is damaged",
            )
        yield index, documents


@dataclass(kw_only=True)
class MadePart:
    """A part that is computed and stands in a local file.

    Attributes:
        digest: of the ids in it.
        bad: documents that are not.
        content: of all its documents, see `content_digest`.
        copied: documents whose embeddings were taken from earlier parts.
        tokens, padded_tokens: that were computed for it (once for equal documents), without padding and with it.
        started: ISO 8601 in UTC.
        begun: monotonic seconds, of the same moment.
    """

    index: int
    path: Path
    started: str
    begun: float
    content: IdDigest
    digest: IdDigest = field(default_factory=IdDigest)
    bad: list[QuarantinedDocument] = field(default_factory=list)
    copied: int = 0
    tokens: int = 0
    padded_tokens: int = 0


def embed_part(worker: Worker, index: int, documents: pa.Table) -> None:
    """Embed one part and upload it, its record last.

    Raises:
        BadData: too many documents that cannot be embedded.
    """
    lengths = pc.fill_null(pc.list_value_length(documents[DOCUMENT_TOKENS]), 0).to_numpy()
    tokens = pc.list_flatten(documents[DOCUMENT_TOKENS]).to_numpy().astype(np.int32)
    documents = documents.append_column("token_hash", pa.array(token_hashes(tokens, lengths)))
    earlier = worker.earlier.covering(index)
    if keep_unchanged(worker, index, documents, earlier):
        return
    made = make_part(worker, index, documents, earlier)
    record = keep_part(worker, made)
    made.path.unlink()
    count = len(worker.context.plan.embed.parts)
    log.info("part %d of %d: %d documents, %.0f per second", index + 1, count, record.rows, record.documents_per_second)
    if made.bad:
        log.warning("part %d of %d: %d documents have no embedding", index + 1, count, len(made.bad))


def keep_unchanged(worker: Worker, index: int, documents: pa.Table, earlier: Parts) -> bool:
    """Keep an earlier part where none of its documents has changed: write a record that names it. False: there is none such."""
    if len(earlier) != 1 or earlier[0][1].quarantined:
        return False
    [(uri, found)] = earlier
    content = str(content_digest(documents, documents["token_hash"].to_numpy()))
    if (found.content, found.rows) != (content, documents.num_rows):
        return False
    context, count = worker.context, len(worker.context.plan.embed.parts)
    record = replace(
        found,
        model=worker.model.sha256,
        fingerprint=context.plan.fingerprint_of(Stage.EMBED),
        uri="" if uri == context.paths.part(index, count) else uri,
        tokens=0,
        padded_tokens=0,
        copied=0,
        copied_bytes=0,
        started=now(),
        finished=now(),
        seconds=0.0,
        documents_per_second=0.0,
    )
    store.write_bytes(context.paths.part_manifest(index, count), record.to_json())
    worker.done += record.rows
    log.info("part %d of %d: nothing has changed in %s", index + 1, count, uri)
    return True


def make_part(worker: Worker, index: int, documents: pa.Table, earlier: Parts) -> MadePart:
    """Compute a part. A document that the tokenizer or the model cannot handle is left out; the others do not depend on it.

    Raises:
        BadData: more such documents than the whole corpus may have.
    """
    context, config = worker.context, worker.context.plan.config.embed
    made = MadePart(
        index=index,
        path=context.scratch / f"part-{index:05d}.parquet",
        started=now(),
        begun=time.monotonic(),
        content=content_digest(documents, documents["token_hash"].to_numpy()),
    )
    files = [store.local_file(uri, context.scratch / "earlier") for uri, _ in earlier]
    vectors = EarlierVectors(files, worker.dimension, config.dtype)
    with PartWriter(made.path, worker.dimension, config.dtype, [*worker.classifiers]) as writer:
        for start in range(0, documents.num_rows, WINDOW_ROWS):
            embed_window(worker, documents.slice(start, WINDOW_ROWS), start, vectors, made, writer)
            if too_many(context, len(made.bad)):
                store.write_bytes(quarantine_uri(context, index), quarantine_to_json(made.bad))
                raise too_many_bad(context, len(made.bad), [f"{one.id}: {one.reason}" for one in made.bad])
    return made


def embed_window(
    worker: Worker, documents: pa.Table, start: int, earlier: EarlierVectors, made: MadePart, writer: PartWriter
) -> None:
    """Embed a window's documents; those without tokens, or whose embeddings are not finite, are left out.

    Args:
        start: place of the first among the part's documents.
        earlier: vectors that are not computed again.
    """
    config = worker.context.plan.config.embed
    lengths = pc.fill_null(pc.list_value_length(documents[DOCUMENT_TOKENS]), 0).to_numpy()
    ids, hashes = documents["id"].to_pylist(), documents["token_hash"].to_numpy()

    def leave_out(rows: npt.NDArray[np.int64], reason: str) -> None:
        made.bad += (QuarantinedDocument(start + row, ids[row], reason) for row in rows.tolist())

    leave_out(np.flatnonzero(lengths == 0), "the tokenizer cannot take its text")
    rows = np.flatnonzero(lengths)
    embeddings = np.empty((len(ids), worker.dimension), config.dtype)
    copied, embeddings_there = earlier.take(documents["key"].to_numpy(), hashes)
    embeddings[copied] = embeddings_there
    made.copied += len(embeddings_there)
    todo = rows[~copied[rows]]
    if len(todo):
        tokens = pc.list_flatten(documents[DOCUMENT_TOKENS].take(pa.array(todo))).to_numpy().astype(np.int32)
        lists = np.split(tokens, np.cumsum(lengths[todo])[:-1])
        found = encode(
            worker.encode_with,
            worker.device,
            lists,
            config.length,
            config.tokens_per_batch,
            on_progress=partial(worker.beat, len(ids), len(tokens)),
        )
        worker.work += len(tokens)
        with np.errstate(over="ignore", invalid="ignore"):
            vectors = shortened(found.embeddings.numpy(), worker.dimension, normalize=worker.context.plan.config.model.normalize)
            embeddings[todo] = vectors.astype(config.dtype, copy=False)
        made.tokens += found.tokens
        made.padded_tokens += found.slots
    finite = np.isfinite(embeddings[rows]).all(axis=1)
    leave_out(rows[~finite], f"its embedding is not finite in {config.dtype}")
    chosen = rows[finite]
    kept = documents.take(pa.array(chosen))
    if kept.num_rows:
        ids_there, locales, texts = kept["id"].to_pylist(), kept["locale"].to_pylist(), kept["document_hash"].to_numpy()
        # From the stored values, so that readers of the part can reproduce it.
        classified = {task: classifier.classify(embeddings[chosen]) for task, classifier in worker.classifiers.items()}
        writer.write(ids_there, embeddings[chosen], locales, texts, hashes[chosen], classified)
    made.digest = IdDigest.joined([made.digest, IdDigest.of(kept["key"].to_numpy())])
    worker.done += len(ids)


def keep_part(worker: Worker, made: MadePart) -> PartRecord:
    """Upload a part, its list and then its record, until what stands there fits together.

    A child may run twice at the same time, when a host that was given up for lost is not, and two hosts need not round alike: the
    file of one must not stay with the record of the other. Each looks after its last write, so who writes last sees what stays.

    Raises:
        Transient: another process kept on writing the part as well.
    """
    context, index = worker.context, made.index
    count = len(context.plan.embed.parts)
    for _ in range(MOST_WRITES):
        if found := complete_part(context, index, worker.model, deep=True):
            return found
        artifact = store.upload(made.path, context.paths.part(index, count))
        listed = quarantine_to_json(made.bad)
        if made.bad:
            store.write_bytes(quarantine_uri(context, index), listed)
        store.write_bytes(context.paths.part_manifest(index, count), record_of(worker, made, artifact, listed).to_json())
    if found := complete_part(context, index, worker.model, deep=True):
        return found
    raise Transient(
        "another process keeps writing the same part",
        value=context.paths.part(index, count),
        rule="a part and its record are of one origin",
        remedy="see whether the same child runs more than once; a new attempt keeps complete parts",
    )


def record_of(worker: Worker, made: MadePart, artifact: Artifact, listed: bytes) -> PartRecord:
    """Return the record of a part."""
    seconds = time.monotonic() - made.begun
    return PartRecord(
        sha256=artifact.sha256,
        size=artifact.size,
        rows=made.digest.count,
        ids=str(made.digest),
        dimension=worker.dimension,
        dtype=worker.context.plan.config.embed.dtype,
        model=worker.model.sha256,
        fingerprint=worker.context.plan.fingerprint_of(Stage.EMBED),
        tokens=made.tokens,
        padded_tokens=made.padded_tokens,
        started=made.started,
        finished=now(),
        seconds=seconds,
        documents_per_second=made.digest.count / seconds,
        quarantined=len(made.bad),
        quarantined_ids=str(IdDigest.of(id_hashes(document.id for document in made.bad))),
        quarantine_sha256=hashlib.sha256(listed).hexdigest() if made.bad else "",
        form=worker.form,
        content=str(made.content),
        copied=made.copied,
        copied_bytes=made.copied * worker.dimension * np.dtype(worker.context.plan.config.embed.dtype).itemsize,
    )


def quarantine_uri(context: StageContext, index: int) -> str:
    return context.paths.part_quarantine(index, len(context.plan.embed.parts))


def too_many(context: StageContext, bad: int) -> bool:
    """Whether so many documents without an embedding are more than the whole corpus may have."""
    return bad > context.plan.config.embed.max_bad_fraction * context.plan.embed.rows


def too_many_bad(context: StageContext, bad: int, examples: list[str]) -> BadData:
    """Return the error for too many documents without an embedding."""
    return BadData(
        f"too many documents cannot be embedded: {bad} of {context.plan.embed.rows}",
        value=examples[:EXAMPLES],
        rule=f"embed.max_bad_fraction = {context.plan.config.embed.max_bad_fraction:g}",
        remedy="look at the model, and at the documents, which are listed in embed/*.quarantine.jsonl; embed.dtype=float32 holds "
        "larger numbers than float16; or raise embed.max_bad_fraction",
    )


def stage_output(context: StageContext, model: Artifact) -> StageOutput | None:
    """Return the output of the whole array, or None while parts are missing.

    Raises:
        BadData: the parts together have too many documents without an embedding.
    """
    plan = context.plan.embed
    indices = range(len(plan.parts))
    present = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(context.paths.stage(context.stage))}
    names = {context.paths.part_manifest(index, len(plan.parts)).rsplit("/", 1)[-1] for index in indices}
    found = [complete_part(context, index, model, deep=False) for index in indices] if names <= present else [None]
    records = [record for record in found if record is not None]
    if len(records) < len(plan.parts):
        log.info("embed: this child is done; others still run")
        return None
    bad = sum(record.quarantined for record in records)
    if too_many(context, bad):
        raise too_many_bad(context, bad, [quarantine_uri(context, index) for index in indices if records[index].quarantined])
    times = [datetime.fromisoformat(moment) for record in records for moment in (record.started, record.finished)]
    seconds = (max(times) - min(times)).total_seconds()
    documents = sum(record.rows for record in records)
    rate = documents / max(seconds, 1e-9)
    context.cloudwatch.write({Metric.DOCUMENTS_PER_SECOND: rate, Metric.QUARANTINED_DOCUMENTS: bad})
    tokens = sum(record.tokens for record in records)
    return StageOutput(
        inputs={"model": model},
        metrics={
            "documents": documents,
            "quarantined": bad,
            "documents_per_second": rate,
            "seconds": seconds,
            "parts": len(records),
            "children": plan.children,
            "dimension": records[0].dimension,
            "dtype": records[0].dtype,
            "tokens": tokens,
            "padding": 1 - tokens / max(sum(record.padded_tokens for record in records), 1),
            "copied": sum(record.copied for record in records),
            "copied_bytes": sum(record.copied_bytes for record in records),
            "unchanged_parts": sum(bool(record.uri) for record in records),
        },
    )
