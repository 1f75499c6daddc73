"""publish: prove that the embeddings are whole, join their parts in one manifest, and move the registry's pointer.

Reads `evaluate/result.json` (the verdict) and every part of `embed/`; writes `embed/manifest.json` and then, in one conditional
write, `registry/NAME.json`, which names the model and the embeddings together. Needs no framework and no accelerator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import store
from pipeline.contract import Artifact, RunPaths, Stage, StageResult, now, registry_uri
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.deletions import Deletions
from pipeline.dataset.ids import IdDigest, id_hashes
from pipeline.dataset.ingested import part_range
from pipeline.dataset.listing import list_documents_again
from pipeline.dataset.parts import PartRecord, part_schema, quarantine_from_json, read_batches
from pipeline.dataset.reading import return_memory
from pipeline.errors import BadData, Defect, GateRefused, MissingInput, Superseded
from pipeline.evaluation.proof import QualityProof
from pipeline.evaluation.reference import write_reference
from pipeline.log import log
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.registry import Pointer, change_pointer, keep_publication, read_pointer
from pipeline.run_inputs import EmbedModel

READERS = 4
"""Parts that are fetched and read at once, so that waiting for storage overlaps."""
EXAMPLES = 20
MOST_ROUNDS = 3
"""How often a run embeds what has changed since, before it publishes all the same."""

WEIGHTS = "model.safetensors"
ROWS = pa.schema([part_schema(0, "float32").field(name) for name in ("id", "document_hash")])
AGAIN = "delete the part's record (.json) and embed/result.json, then start the run again under its id"


def run(context: StageContext) -> StageOutput:
    """Check everything, write the manifest, then replace the pointer.

    Raises:
        GateRefused: evaluate has not accepted this model under this plan.
        MissingInput, BadData: a part that is absent, damaged or of another model; ids that are missing or there twice.
        Superseded: another run has published under this name since this one was planned.
    """
    plan, paths = context.plan, context.paths
    embedding = plan.embed.model or EmbedModel(run=plan.run, folder=paths.model, sha256="")
    weights = store.join(embedding.folder, WEIGHTS)
    model = Artifact(weights, store.sha256(weights))
    verdict = check_verdict(context, model) if plan.train.rows else None
    refused = verdict if embedding.run != plan.run else None
    if reason := must_embed_again(context):
        log.info("publish: %s; the run embeds what has changed since", reason)
        return StageOutput(
            metrics={
                "published": False,
                "again": True,
                "refused": refused,
                "model": embedding.run,
                "documents": 0,
                "reason": reason,
            }
        )
    proof = open_proof(context, embedding)
    parts = check_parts(context, model, proof)
    proven = None
    if proof:
        proven = {"documents": proof.documents, "difference": proof.check(plan.config.gate.metric)}
        log.info("publish: hold-out measured as it is published: %s", proven)

    # Invariant: a reader that follows the pointer finds the manifest, so it is written first.
    store.write_json(paths.embed_manifest, manifest_of(context, model, parts))
    quarantined = sum(part.quarantined for part in parts)
    rows = plan.embed.rows - quarantined
    log.info("publish: %d embeddings in %d parts are complete, %d documents have none", rows, len(parts), quarantined)
    published = None
    if plan.config.registry is None:
        log.info("publish: registry is null, nothing points at this run")
    else:
        published = move_pointer(context, embedding, model, plan.config.registry, rows)
        with suppress(store.Conflict):  # there is one already
            write_reference(paths.bucket_root, plan.config.registry, embedding.run, if_absent=True)
    return StageOutput(
        inputs={"model": model},
        outputs={"embeddings": Artifact(paths.embed_manifest, store.sha256(paths.embed_manifest))},
        metrics={
            "published": published is not None,
            "registry": published,
            "replaced": plan.published.run if plan.published and embedding.run == plan.run else None,
            "model": embedding.run,
            "again": False,
            "refused": refused,
            "documents": rows,
            "proof": proven,
            "quarantined": quarantined,
            "parts": len(parts),
        },
    )


def must_embed_again(context: StageContext) -> str | None:
    """Return why what is embedded is out of date: another run has published newer documents, or there are newer ones. None: it is
    not, or there have been so many rounds that the next refresh shall see to it."""
    plan, paths = context.plan, context.paths
    if not plan.embed.listed or plan.config.registry is None:
        return None
    pointer = read_pointer(paths.bucket_root, plan.config.registry)
    if pointer and pointer.corpus > plan.embed.listed and pointer.embeddings_run != plan.run:
        return f"run {pointer.embeddings_run} has published documents that were listed at {pointer.corpus}"
    if plan.embed.round >= MOST_ROUNDS:
        return None
    there = {(shard.uri, shard.version) for shard in plan.embed.shards}
    listed = list_documents_again(plan.config, plan.embed.tokenizer, plan.embed.deletions)
    changed = 0 if listed is None else len(there ^ {(shard.uri, shard.version) for shard in listed})
    return f"{changed} files of documents have come, changed or gone" if changed else None


def open_proof(context: StageContext, embedding: EmbedModel) -> QualityProof | None:
    """Return the proof, with the hold-out of the run that made the model; None where that is not known any more, or texts were
    classified."""
    if context.plan.config.classifies_only:
        return None
    paths = RunPaths(f"{context.paths.bucket_root}/runs/{embedding.run}")
    try:
        return QualityProof(paths, context.scratch / "proof")
    except (MissingInput, BadData) as error:
        if embedding.run == context.plan.run:
            raise
        log.warning("publish: the metric of run %s's model is not measured again: %s", embedding.run, error.what)
        return None


def check_verdict(context: StageContext, model: Artifact) -> str | None:
    """Refuse to publish anything but the weights that evaluate accepted under this plan; return why the new model was refused, if
    it was and the published one is embedded with.

    Raises:
        GateRefused: refused, or not judged.
        MissingInput: evaluate has left no result.
    """
    result = StageResult.from_json(store.read_bytes(context.paths.result(Stage.EVALUATE)))
    gate, planned = result.metrics.get("gate", {}), context.plan.embed.model
    if planned and planned.run != context.plan.run:
        return str(gate.get("reason"))
    if gate.get("verdict") != "accepted":
        raise GateRefused(
            "the new model was not accepted", value=gate.get("reason"), rule="only a model that the gate accepted is published"
        )
    judged = result.inputs["model"].sha256 if "model" in result.inputs else None
    if result.fingerprint != context.plan.fingerprint or judged != model.sha256:
        raise GateRefused(
            "the verdict is about another model",
            value=[
                f"judged: plan {result.fingerprint}, weights {judged}",
                f"here: plan {context.plan.fingerprint}, weights {model.sha256}",
            ],
            rule="only a model that the gate accepted is published",
            remedy="delete evaluate/result.json and start the run again under its id",
        )
    return None


def check_parts(context: StageContext, model: Artifact, proof: QualityProof | None = None) -> list[PartRecord]:
    """Return the parts' records, each with the part's URI; read every part's ids before, and compare everything known about it
    with what is there; show the proof what the parts have.

    Parts have intervals of id hashes of their own, so the ids of all of them need not be compared.

    Raises:
        MissingInput, BadData.
    """
    return_memory()
    count = len(context.plan.embed.parts)
    rows = 0
    parts = []
    digest = context.plan.embed.deletions or (context.plan.deletions.digest if context.plan.deletions else "")
    deletions = Deletions.from_json(store.read_bytes(context.paths.deletions(digest))) if digest else None
    with ThreadPoolExecutor(READERS, "parts") as readers:
        for part in readers.map(lambda index: check_part(context, model, index, deletions, proof), range(count)):
            parts.append(part)
            rows += part.rows
            context.heartbeat.beat(rows, context.plan.embed.rows, unit="ids", note="checking the parts")
    both = [digest for part in parts for digest in (part.ids, part.quarantined_ids)]
    total = IdDigest.joined(map(IdDigest.parse, both))
    if str(total) != context.plan.embed.ids:
        raise Defect("the parts do not add up to the corpus", value=f"ids {total}, expected {context.plan.embed.ids}")
    forms = {(part.dimension, part.dtype, part.form) for part in parts}
    if len(forms) > 1:
        raise BadData(
            "parts of different form",
            value=sorted(forms),
            rule="one dimension, dtype, model, kind of device and set of packages",
            remedy=AGAIN,
        )
    return parts


def check_part(
    context: StageContext, model: Artifact, index: int, deletions: Deletions | None, proof: QualityProof | None
) -> PartRecord:
    """Check one part against its record, the plan, and what must not be published; return the record with the part's URI.

    Raises:
        MissingInput: the part or its record is absent.
        BadData: they do not match each other, the plan or the model.
    """
    paths, plan = context.paths, context.plan
    count = len(plan.embed.parts)
    record = PartRecord.from_json(store.read_bytes(paths.part_manifest(index, count)))
    uri = record.uri or paths.part(index, count)
    with local_part(context, uri) as path:
        facts = {
            "sha256": (store.sha256_file(path), record.sha256),
            "model": (record.model, model.sha256),
            "fingerprint": (record.fingerprint, plan.fingerprint_of(context.stage)),
            "rows and quarantined documents": (record.rows + record.quarantined, plan.embed.parts[index].rows),
        }
        wrong = [f"{name} {found}, expected {expected}" for name, (found, expected) in facts.items() if found != expected]
        rows = pa.Table.from_batches(read_batches(path, ["id", "document_hash"]), ROWS) if not wrong else ROWS.empty_table()
        if proof and not wrong:
            proof.take(read_batches(path, ["id", "embedding", "document_hash"]))
    ids = rows["id"].to_pylist()
    if not wrong and (found := str(IdDigest.of(id_hashes(ids)))) != record.ids:
        wrong = [f"ids {found}, expected {record.ids}"]
    if wrong:
        raise BadData("a part does not match its record", value=[f"{uri}: {fact}" for fact in wrong], remedy=AGAIN)
    check_ids(context, index, ids + check_quarantine(context, index, record))
    if deletions is not None and (named := rows.filter(pa.array(deletions.named(rows)))).num_rows:
        raise BadData(
            "a part has an embedding of what data.delete names",
            value=[f"{uri}: {identifier}" for identifier in named["id"].to_pylist()[:EXAMPLES]],
            rule="nothing that data.delete named when the run began is published",
            remedy="start a new run",
        )
    return replace(record, uri=uri)


def check_quarantine(context: StageContext, index: int, record: PartRecord) -> list[str]:
    """Return the ids in a part's list of documents without an embedding.

    Raises:
        MissingInput: the list is absent.
        BadData: it does not match the record.
    """
    if not record.quarantined:
        return []
    uri = context.paths.part_quarantine(index, len(context.plan.embed.parts))
    data = store.read_bytes(uri)
    found = hashlib.sha256(data).hexdigest()
    ids = [document.id for document in quarantine_from_json(data)] if found == record.quarantine_sha256 else []
    digest = str(IdDigest.of(id_hashes(ids)))
    if digest != record.quarantined_ids:
        raise BadData(
            "the list of quarantined documents does not match its record",
            value=[
                f"{uri}: sha256 {found}, expected {record.quarantine_sha256}",
                f"ids {digest}, expected {record.quarantined_ids}",
            ],
            remedy=AGAIN,
        )
    return ids


@contextmanager
def local_part(context: StageContext, uri: str) -> Iterator[Path]:
    """Yield the part as a local file, removed afterwards: the disk holds at most READERS of them."""
    path = store.local_file(uri, context.scratch / "parts")
    try:
        yield path
    finally:
        if store.is_s3(uri):
            path.unlink()


def check_ids(context: StageContext, index: int, ids: Sequence[str]) -> None:
    """Prove that every id of a part is there exactly once, with an embedding or among those that are known to have none.

    Their digest equals the plan's, so both hold the same ids equally often; no id is there twice, and none is another part's.

    Raises:
        BadData: naming ids that are missing, repeated, or of no document of the part.
    """
    plan, hashes = context.plan.embed, id_hashes(ids)
    first, last = (np.uint64(limit) for limit in part_range(index, len(plan.parts)))
    distinct, counts = np.unique(hashes, return_counts=True)
    inside = ((first <= distinct) & (distinct <= last)).all()
    if inside and len(distinct) == len(hashes) and str(IdDigest.of(hashes)) == plan.parts[index].ids:
        return
    planned = CorpusReader(context.paths.bucket_root, plan.shards).read_part(index, len(plan.parts))
    keys = planned["key"].to_numpy()
    named = {
        "missing": planned["id"].filter(pa.array(~np.isin(keys, distinct))).to_pylist(),
        "repeated": list(dict.fromkeys(compress(ids, np.isin(hashes, distinct[counts > 1])))),
        "of no document of this part": list(compress(ids, ~np.isin(hashes, keys))),
    }
    raise BadData(
        "the embeddings do not hold every document exactly once",
        value=[
            f"part {index}: {len(hashes)} ids, {planned.num_rows} documents",
            *(f"{what}: {identifier}" for what, found in named.items() for identifier in found[:EXAMPLES]),
        ],
        rule="each id of the corpus is in the embeddings, or in a part's quarantine, exactly once",
        remedy=AGAIN,
    )


def manifest_of(context: StageContext, model: Artifact, parts: Sequence[PartRecord]) -> dict[str, Any]:
    """Return `embed/manifest.json`: the whole set of embeddings, and the model that made them.

    Args:
        parts: as `check_parts` returns them.
    """
    embedded = IdDigest.joined(IdDigest.parse(part.ids) for part in parts)
    return {
        "run": context.plan.run,
        "model": {"uri": model.uri.rpartition("/")[0], "sha256": model.sha256},
        "form": parts[0].form,
        "dimension": parts[0].dimension,
        "dtype": parts[0].dtype,
        "rows": embedded.count,
        "ids": str(embedded),
        "quarantined": {
            "documents": context.plan.embed.rows - embedded.count,
            "lists": [context.paths.part_quarantine(index, len(parts)) for index, part in enumerate(parts) if part.quarantined],
        },
        "parts": [
            {
                "uri": part.uri,
                "sha256": part.sha256,
                "rows": part.rows,
                "quarantined": part.quarantined,
            }
            for part in parts
        ],
    }


def move_pointer(context: StageContext, embedding: EmbedModel, model: Artifact, registry: str, documents: int) -> str:
    """Point the registry at the embeddings, and at the model if it is the run's own, or one to roll back to.

    Args:
        embedding: the model that embedded.
        registry: the name under which the run publishes.
        documents: with an embedding.

    Returns:
        The pointer's URI.

    Raises:
        Superseded: the model that this run would replace, or embedded with, is not the published one any more.
    """
    plan, paths = context.plan, context.paths
    fingerprint, uri = plan.fingerprint_of(context.stage), registry_uri(paths.bucket_root, registry)
    new_model = embedding.run == plan.run or plan.config.rollback is not None

    def change(pointer: Pointer | None) -> dict[str, Any] | None:
        # This run may have changed it, in an attempt whose response was lost.
        if pointer and (pointer.embeddings_run, pointer.content.get("fingerprint")) == (plan.run, fingerprint):
            return None
        check_pointer(context, pointer, embedding, uri)
        content = {
            **(pointer.content if pointer else {"epoch": 0}),
            "embeddings": paths.embed_manifest,
            "embeddings_run": plan.run,
            "corpus": plan.embed.listed,
            "published": now(),
            "fingerprint": fingerprint,
        }
        if new_model:
            content |= {
                "run": embedding.run,
                "model": model.uri.rpartition("/")[0],
                "model_sha256": model.sha256,
                "previous": pointer.run if pointer else None,
            }
        if plan.config.rollback is not None:
            content |= {"epoch": content["epoch"] + 1, "held": now()}
        return content

    content = change_pointer(paths.bucket_root, registry, change)
    kind = ("rollback" if plan.config.rollback else "model") if new_model else "refresh"
    keep_publication(paths.bucket_root, registry, {**(content or {}), "kind": kind, "documents": documents, **figures(context)})
    log.info("publish: %s now points at %s, embedded by %s", uri, embedding.run, plan.run)
    return uri


def check_pointer(context: StageContext, pointer: Pointer | None, embedding: EmbedModel, uri: str) -> None:
    """Refuse to replace another model than the one that this run began with.

    Raises:
        Superseded: it is another one, or models are held.
    """
    plan = context.plan
    began = (plan.published.run, plan.published.epoch) if plan.published else None
    if embedding.run != plan.run and plan.config.rollback is None:
        # Refreshes go on in every epoch: what counts is that the model is still the published one.
        same = (pointer and pointer.run) == embedding.run
    else:
        same = (pointer and (pointer.run, pointer.epoch)) == began
    if same and not (pointer and pointer.held and embedding.run == plan.run):
        return
    if pointer and pointer.held and embedding.run == plan.run:
        what, remedy = f"models are held since {pointer.held}", f"trnpipe registry release --name {plan.config.registry}"
    elif pointer is None:
        what, remedy = "the registry's pointer has been removed", "start a new run"
    else:
        what, remedy = f"run {pointer.run} published first", "start a new run: it continues from the published model"
    raise Superseded(
        what,
        value=f"{uri}: {json.dumps(pointer.content if pointer else None)}; this run began with {began}",
        rule="a run replaces only the model that it was planned with, in the same epoch",
        remedy=remedy,
    )


def figures(context: StageContext) -> dict[str, Any]:
    """Return what people want to know of a publication: what evaluate measured, if this run trained the model."""
    if not context.plan.train.rows:
        return {}
    metrics = StageResult.from_json(store.read_bytes(context.paths.result(Stage.EVALUATE))).metrics
    return {
        "gate": {name: metrics["gate"].get(name) for name in ("verdict", "metric", "new", "difference", "reference")},
        "drift": metrics.get("drift"),
    }
