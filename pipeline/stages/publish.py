"""publish: prove that the embeddings are whole, join their parts in one manifest, and move the registry's pointer.

Reads `evaluate/result.json` (the verdict) and every part of `embed/`; writes `embed/manifest.json` and then, in one conditional
write, `registry/NAME.json`, which names the model and the embeddings together. Needs no framework and no accelerator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import store
from pipeline.contract import Artifact, Stage, StageResult, now, registry_uri
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.deletions import Deletions
from pipeline.dataset.ids import IdDigest, id_hash
from pipeline.dataset.ingested import Hashes, part_range
from pipeline.dataset.parts import PartRecord, part_schema, quarantine_from_json, read_batches
from pipeline.dataset.reading import return_memory
from pipeline.errors import BadData, Defect, GateRefused, MissingInput, Superseded
from pipeline.evaluation.proof import QualityProof
from pipeline.evaluation.reference import write_reference
from pipeline.log import log
from pipeline.run.context import StageContext, StageOutput

READERS = 4
"""Parts that are fetched and read at once, so that waiting for storage overlaps."""
EXAMPLES = 20
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
    weights = store.join(paths.model, WEIGHTS)
    model = Artifact(weights, store.sha256(weights))
    check_verdict(context, model)
    proof = QualityProof(paths, context.scratch / "proof")
    parts = check_parts(context, model, proof)
    difference = proof.check(plan.config.gate.metric)
    log.info("publish: %d documents of the hold-out measured as they are published: %+.6f", proof.documents, difference)

    # Invariant: a reader that follows the pointer finds the manifest, so it is written first.
    store.write_json(paths.embed_manifest, manifest_of(context, model, parts))
    quarantined = sum(part.record.quarantined for part in parts)
    rows = plan.embed.rows - quarantined
    log.info("publish: %d embeddings in %d parts are complete, %d documents have none", rows, len(parts), quarantined)
    published = move_pointer(context, model, plan.config.registry) if plan.config.registry is not None else None
    if plan.config.registry is not None:
        with suppress(store.Conflict):  # there is one already
            write_reference(paths.bucket_root, plan.config.registry, plan.run, if_absent=True)
    if published is None:
        log.info("publish: registry is null, nothing points at this run")
    return StageOutput(
        inputs={"model": model},
        outputs={"embeddings": Artifact(paths.embed_manifest, store.sha256(paths.embed_manifest))},
        metrics={
            "published": published is not None,
            "registry": published,
            "replaced": plan.published.run if plan.published else None,
            "documents": rows,
            "proof": {"documents": proof.documents, "difference": difference},
            "quarantined": quarantined,
            "parts": len(parts),
        },
    )


def check_verdict(context: StageContext, model: Artifact) -> None:
    """Refuse to publish anything but the weights that evaluate accepted under this plan.

    Raises:
        GateRefused: refused, or not judged.
        MissingInput: evaluate has left no result.
    """
    result = StageResult.from_json(store.read_bytes(context.paths.result(Stage.EVALUATE)))
    gate = result.metrics.get("gate", {})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPart:
    """A part whose content matches its record and the plan.

    Attributes:
        uri: URI of the Parquet file.
    """

    index: int
    uri: str
    record: PartRecord


def check_parts(context: StageContext, model: Artifact, proof: QualityProof | None = None) -> list[CheckedPart]:
    """Read every part's ids and compare everything known about it with what is there; show the proof what the parts have.

    Parts have intervals of id hashes of their own, so the ids of all of them need not be compared.

    Raises:
        MissingInput, BadData.
    """
    return_memory()
    count = len(context.plan.embed.parts)
    rows = 0
    parts = []
    found = context.plan.deletions
    deletions = Deletions.from_json(store.read_bytes(context.paths.deletions(found.digest))) if found else None
    with ThreadPoolExecutor(READERS, "parts") as readers:
        for part in readers.map(lambda index: check_part(context, model, index, deletions, proof), range(count)):
            parts.append(part)
            rows += part.record.rows
            context.heartbeat.beat(rows, context.plan.embed.rows, unit="ids", note="checking the parts")
    total = IdDigest()
    for part in parts:
        total.merge(IdDigest.parse(part.record.ids))
        total.merge(IdDigest.parse(part.record.quarantined_ids))
    if str(total) != context.plan.embed.ids:
        raise Defect("the parts do not add up to the corpus", value=f"ids {total}, expected {context.plan.embed.ids}")
    forms = {(part.record.dimension, part.record.dtype) for part in parts}
    if len(forms) > 1:
        raise BadData("parts of different form", value=sorted(forms), rule="one dimension and dtype", remedy=AGAIN)
    return parts


def check_part(
    context: StageContext, model: Artifact, index: int, deletions: Deletions | None, proof: QualityProof | None
) -> CheckedPart:
    """Check one part against its record, the plan, and what must not be published.

    Raises:
        MissingInput: the part or its record is absent.
        BadData: they do not match each other, the plan or the model.
    """
    paths, plan = context.paths, context.plan
    count = len(plan.embed.parts)
    uri = paths.part(index, count)
    record = PartRecord.from_json(store.read_bytes(paths.part_manifest(index, count)))
    with local_part(context, uri) as path:
        facts = {
            "sha256": (store.sha256_file(path), record.sha256),
            "model": (record.model, model.sha256),
            "fingerprint": (record.fingerprint, plan.fingerprint),
            "rows and quarantined documents": (record.rows + record.quarantined, plan.embed.parts[index].rows),
        }
        wrong = [f"{name} {found}, expected {expected}" for name, (found, expected) in facts.items() if found != expected]
        rows = pa.Table.from_batches(read_batches(path, ["id", "document_hash"]), ROWS) if not wrong else ROWS.empty_table()
        if proof and not wrong:
            proof.take(read_batches(path, ["id", "embedding", "document_hash"]))
    ids = rows["id"].to_pylist()
    if not wrong and (found := str(IdDigest.of(hashes_of(ids)))) != record.ids:
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
    return CheckedPart(index=index, uri=uri, record=record)


def hashes_of(ids: Iterable[str]) -> Hashes:
    """Return the hash of each id."""
    return np.fromiter(map(id_hash, ids), np.uint64)


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
    digest = str(IdDigest.of(hashes_of(ids)))
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
    plan, hashes = context.plan.embed, hashes_of(ids)
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


def manifest_of(context: StageContext, model: Artifact, parts: Sequence[CheckedPart]) -> dict[str, Any]:
    """Return `embed/manifest.json`: the whole set of embeddings, and the model that made them."""
    embedded = IdDigest()
    for part in parts:
        embedded.merge(IdDigest.parse(part.record.ids))
    return {
        "run": context.plan.run,
        "model": {"uri": context.paths.model, "sha256": model.sha256},
        "dimension": parts[0].record.dimension,
        "dtype": parts[0].record.dtype,
        "rows": embedded.count,
        "ids": str(embedded),
        "quarantined": {
            "documents": context.plan.embed.rows - embedded.count,
            "lists": [context.paths.part_quarantine(part.index, len(parts)) for part in parts if part.record.quarantined],
        },
        "parts": [
            {
                "uri": part.uri,
                "sha256": part.record.sha256,
                "rows": part.record.rows,
                "quarantined": part.record.quarantined,
            }
            for part in parts
        ],
    }


def move_pointer(context: StageContext, model: Artifact, registry: str) -> str:
    """Point the registry at this run, if the pointer is still the one that the run was planned with.

    Args:
        registry: the name under which the run publishes.

    Returns:
        The pointer's URI.

    Raises:
        Superseded: it names another run.
    """
    plan, paths = context.plan, context.paths
    uri = registry_uri(paths.bucket_root, registry)
    pointer = {
        "model": paths.model,
        "model_sha256": model.sha256,
        "embeddings": paths.embed_manifest,
        "run": plan.run,
        "published": now(),
        "fingerprint": plan.fingerprint,
        "previous": plan.published.run if plan.published else None,
    }
    # Replace exactly the model that the gate compared with.
    condition: dict[str, Any] = {"if_match": plan.published.registry_etag} if plan.published else {"if_absent": True}
    try:
        store.write_json(uri, pointer, **condition)
    except store.Conflict as conflict:
        try:
            owner = store.read_json(uri)
        except MissingInput:
            owner = {}
        # This run may have changed it, in an attempt whose response was lost.
        if (owner.get("run"), owner.get("fingerprint")) != (plan.run, plan.fingerprint):
            raise Superseded(
                f"run {owner['run']} published first" if owner.get("run") else "the registry's pointer has been removed",
                value=f"{uri}: {json.dumps(owner)}",
                rule="a run replaces only the model that it was planned with",
                remedy="start a new run: it continues from the published model",
            ) from conflict
    log.info("publish: %s now points at %s", uri, plan.run)
    return uri
