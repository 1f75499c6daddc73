"""The published model's vectors of candidates, from the parts that its own run embedded.

They are what consumers of the embeddings get. embed computes them in other batches than evaluate would, which in fp32 changes
them by about 1e-7: far less than what the gate compares. So they are taken where all else is the same: the weights, full size in
float32, the kind of device and its precision, the lengths, the compiled forms, and the installed packages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline import store
from pipeline.backends.device import Device
from pipeline.contract import RunPaths, Stage, StageResult
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import part_range
from pipeline.dataset.parts import read_batches
from pipeline.errors import BadData, MissingInput, one_line
from pipeline.host.host import versions
from pipeline.log import log
from pipeline.plan import Published, RunPlan, own_parts
from pipeline.run.context import StageContext

MOST_ROWS_READ = 20
"""Rows of parts per candidate: reading more of them takes longer than encoding it."""

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Indices of candidates, (n,), and their embeddings, (n, D)."""


def published_vectors(context: StageContext, published: Published, device: Device, dimension: int, documents: pa.Table) -> Found:
    """Return the vectors that this rank finds; every rank reads other parts.

    Args:
        device: on which the model would encode them.
        dimension: of the model's embeddings.
        documents: `id` and `document_hash` of each candidate.
    """
    nothing = np.empty(0, np.int64), np.empty((0, dimension), np.float32)
    try:
        paths = RunPaths(f"{context.paths.bucket_root}/runs/{published.run}")
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        result = StageResult.from_json(store.read_bytes(paths.result(Stage.EMBED)))
        manifest = store.read_json(paths.embed_manifest)
        graphs = context.plan.graphs
        facts = {
            "weights": (manifest["model"]["sha256"], published.sha256),
            "form": ((manifest["dtype"], manifest["dimension"]), ("float32", dimension)),
            "device": ((plan.world.kind, plan.world.precision), (device.kind, device.precision)),
            "lengths": (plan.config.embed.buckets, context.plan.config.embed.buckets),
            "compiled forms": (plan.graphs and plan.graphs.infer, graphs and graphs.infer),
            "packages": (result.versions, versions()),
        }
        different = [name for name, (found, expected) in facts.items() if found != expected]
        parts = manifest["parts"]
        identifiers = documents["id"].to_pylist()
        keys = np.fromiter(map(id_hash, identifiers), np.uint64, len(identifiers))
        ranges = [part_range(index, len(parts)) for index in range(len(parts))]
        wanted = [np.flatnonzero((keys >= np.uint64(first)) & (keys <= np.uint64(last))) for first, last in ranges]
        rows = sum(part["rows"] for part, candidates in zip(parts, wanted, strict=True) if len(candidates))
        if rows > MOST_ROWS_READ * len(identifiers):
            different.append(f"too many rows, {rows}")
        if different:
            log.info("no vectors of the published model are reused: %s", ", ".join(different))
            return nothing
        found = [nothing]
        for index in own_parts(len(parts), context.world.size, context.world.rank):
            context.heartbeat.beat(note="reading the published model's vectors")
            if len(wanted[index]):
                found += _of_part(context, parts[index]["uri"], documents.take(pa.array(wanted[index])), wanted[index])
        places, vectors = zip(*found, strict=True)
        return np.concatenate(places), np.concatenate(vectors)
    except (MissingInput, BadData) as error:
        log.info("no vectors of the published model are reused: %s", one_line(error))
        return nothing


def _of_part(context: StageContext, uri: str, documents: pa.Table, places: npt.NDArray[np.int64]) -> list[Found]:
    """Return the vectors of the documents that a part has with the same id and text; none of a part without `document_hash`.

    Args:
        places: of the documents among all candidates.
    """
    found: list[Found] = []
    known = dict(zip(zip(documents["id"].to_pylist(), documents["document_hash"].to_pylist(), strict=True), places, strict=True))
    hashes = documents["document_hash"].to_numpy()
    for batch in read_batches(store.local_file(uri, context.scratch / "parts"), ["id", "embedding", "document_hash"]):
        if "document_hash" not in batch.schema.names:
            return []
        batch = batch.filter(pa.array(np.isin(batch["document_hash"].to_numpy(zero_copy_only=False), hashes)))
        pairs = zip(batch["id"].to_pylist(), batch["document_hash"].to_pylist(), strict=True)
        of_row = np.array([known.get(pair, -1) for pair in pairs], np.int64)
        vectors = batch["embedding"].flatten().to_numpy().reshape(len(batch), -1)
        found.append((of_row[of_row >= 0], vectors[of_row >= 0]))
    return found
