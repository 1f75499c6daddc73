"""mine: one child of the array that finds hard negatives of new training rows: documents that the published model ranks high for
a row's query, and that no row calls relevant to it.

Reads `prepare/inputs.json`, `prepare/missing.json`, the ingested shards and the published embeddings; writes `mined`
(pipeline/dataset/ingested), where plan finds them in this run and in those to come. The device encodes queries and their own
documents, and compares every query with every published embedding, exactly; FAISS does so where the device is the host's
processor. What is complete is left alone. The child that finds the shards of all children complete speaks for the stage.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline import store
from pipeline.backends.device import Device, EncodeFunction, open_device
from pipeline.config.train import MineConfig
from pipeline.contract import HOST_KINDS
from pipeline.dataset.corpus import DOCUMENT_TOKENS, CorpusReader
from pipeline.dataset.ids import id_hashes
from pipeline.dataset.ingested import (
    DOCUMENTS,
    FACTS,
    PAIRS,
    SCHEMA_VERSION,
    SLICES,
    Hashes,
    IngestedShard,
    TokenProfile,
    mined_schema,
    not_mined,
    pair_hashes,
    write_batches,
    write_profile,
)
from pipeline.dataset.parts import embeddings_of, read_batches
from pipeline.dataset.row_files import Lengths
from pipeline.dataset.selection import holdout_slices
from pipeline.dataset.tokens import cut
from pipeline.evaluation.device_search import DeviceSearch
from pipeline.evaluation.vectors import Vectors, shortened
from pipeline.graphs.compiled import encode_function
from pipeline.graphs.fingerprint import exact_flags
from pipeline.host.host import available_cores
from pipeline.log import log
from pipeline.model.folder import load_encoder, own_form
from pipeline.model.inference import encode
from pipeline.run.context import StageContext, StageOutput
from pipeline.run_inputs import MissingShards, RunInputs

ROWS_AT_ONCE = 1 << 16
"""Shards are mined together until they have about as many rows: each search reads all published embeddings."""

RELEVANT = 32
"""Documents that are relevant to one query, at most, which its list has room for besides the wanted ranks."""


def run(context: StageContext) -> StageOutput | None:
    """Mine for this process's share of the shards.

    Returns:
        The stage's output if the shards of all children are complete, else None.
    """
    inputs, begun = RunInputs.from_json(store.read_bytes(context.paths.inputs)), time.monotonic()
    listed, world = MissingShards.model_validate_json(store.read_bytes(context.paths.missing)), context.world
    first, step = world.node.array_index * world.size + world.rank, listed.mine_children * world.size
    todo = not_mined(context.paths.bucket_root, listed.to_mine[first::step])
    log.info("mine: child %d of %d: %d shards are to do", world.node.array_index, listed.mine_children, len(todo))
    if todo:
        miner = open_miner(context, inputs)
        shards = [IngestedShard(context.paths.bucket_root, shard) for shard in todo]
        begins = np.cumsum([0, *(shard.profile.rows for shard in shards)]) // ROWS_AT_ONCE
        for _, together in groupby(zip(begins.tolist(), shards, strict=False), key=itemgetter(0)):
            mine_shards(miner, [shard for _, shard in together])
        miner.device.close()
    return (
        None
        if not_mined(context.paths.bucket_root, listed.to_mine)
        else StageOutput(metrics={"shards": len(listed.to_mine), "seconds": time.monotonic() - begun})
    )


@dataclass(kw_only=True)
class Miner:
    """This process's model on its device, what it searches, and its progress in rows.

    Attributes:
        parts: URIs of the published parts.
        dimension: of the published embeddings.
        depth: documents of each query that are looked at: the wanted ranks, and room for relevant ones.
        search: on the device; None where FAISS searches.
    """

    context: StageContext
    inputs: RunInputs
    device: Device
    encode_with: EncodeFunction
    parts: list[str]
    dimension: int
    mine: MineConfig
    depth: int
    search: DeviceSearch | None
    done: int = 0

    @cached_property
    def relevant(self) -> Hashes:
        """The pairs of all listed rows whose document is relevant to the query, see `pair_hashes`; sorted."""
        found = [np.empty(0, np.uint64)]
        for shard in self.inputs.shards_of(PAIRS):
            ingested = IngestedShard(self.context.paths.bucket_root, shard)
            for number, file in enumerate(ingested.profile.files):
                for facts in ingested.facts(number, 0, file.rows):
                    rows = facts.filter(pc.field("label") > 0)
                    found.append(pair_hashes(rows["query_hash"].to_numpy(), rows["document_hash"].to_numpy()))
                self.beat("reading what is relevant")
        return np.unique(np.concatenate(found))

    def beat(self, note: str, *_: float) -> None:
        self.context.heartbeat.beat(self.done, unit="rows", note=note)

    def encode(self, tokens: pa.ListArray, length: int | NDArray[np.int64]) -> Vectors:
        """Return the embeddings of texts cut to a length, or to one each, as long as the published ones: (n, D) fp32."""
        texts, embed = cut(tokens, length, self.inputs.tokenizer), self.inputs.config.embed
        found = encode(
            self.encode_with,
            self.device,
            [np.asarray(text, np.int32) for text in texts.to_numpy(zero_copy_only=False)],
            embed.length,
            embed.tokens_per_batch,
            on_progress=partial(self.beat, "encoding"),
        ).embeddings
        return shortened(found.numpy(), self.dimension, normalize=self.inputs.config.model.normalize)


def open_miner(context: StageContext, inputs: RunInputs) -> Miner:
    """Load the published model onto this process's device."""
    config, world, published, mine = inputs.config, inputs.world, inputs.published, inputs.config.train.mine
    assert published, "prepare asks for this stage only where there is something to mine with"
    assert mine, "and only where it is wanted"
    context.heartbeat.beat(note="loading the model")
    device = open_device(world.kind, world.precision, context.world, threads=config.device.threads_per_rank, inference=True)
    # Not as many as torch has, which are few where a device computes: the device waits during the search.
    faiss.omp_set_num_threads(config.device.threads_per_rank or max(1, available_cores() // context.world.local_size))
    folder = store.local_folder(published.folder, context.scratch / "model")
    manifest, depth = store.read_json(published.embeddings), mine.last + RELEVANT
    search = None
    if device.kind not in HOST_KINDS:
        context.heartbeat.beat(note="compiling the search")
        search = DeviceSearch(
            device,
            manifest["dimension"],
            depth,
            exact_flags(config.compile),
            context.scratch / f"search-{context.world.local_rank}.pt",
        )
    return Miner(
        context=context,
        inputs=inputs,
        device=device,
        encode_with=encode_function(context, device, load_encoder(folder, own_form(folder, config.model)), inputs),
        parts=[part["uri"] for part in manifest["parts"]],
        dimension=manifest["dimension"],
        mine=mine,
        depth=depth,
        search=search,
    )


def mine_shards(miner: Miner, shards: Sequence[IngestedShard]) -> None:
    """Mine for the rows of some shards in one search, and write what is found for each shard as one."""
    begun, files = time.monotonic(), [(shard, number) for shard in shards for number in range(len(shard.profile.files))]
    begins = np.cumsum([0, *(shard.profile.files[number].rows for shard, number in files)])
    rows = pa.concat_tables(wanted_rows(miner, *file, begin) for file, begin in zip(files, begins.tolist(), strict=False))
    found, keys, hashes = np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint64)
    if len(rows):
        queries, documents = (rows[name].combine_chunks() for name in ("query_tokens", "document_tokens"))
        config = miner.inputs.config
        asked = miner.encode(queries, Lengths.of(config).of_column("query_tokens", rows))
        own = (asked * miner.encode(documents, config.embed.length)).sum(axis=1)
        found, keys, hashes = search(miner, asked, own, rows["query_hash"].to_numpy())
    there, texts = tokens_of(miner, keys, hashes, rows["query_tokens"].type)
    ends = np.cumsum(np.bincount(rows["row"].to_numpy()[found[there]], minlength=begins[-1]))
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    lists = [pa.ListArray.from_arrays(offsets, values) for values in (texts, pa.array(hashes[there]))]
    pieces = iter([[each[begin:end] for each in lists] for begin, end in pairwise(begins.tolist())])
    for shard in shards:
        write_mined(miner, shard, pieces)
    miner.done += int(begins[-1])
    log.info("%d shards: %d rows, %d negatives, %.1f s", len(shards), begins[-1], ends[-1:].sum(), time.monotonic() - begun)


def write_mined(miner: Miner, shard: IngestedShard, files: Iterator[list[pa.ListArray]]) -> None:
    """Write what is found for a shard.

    Args:
        files: yields the columns of `mined_schema` for each of its files.
    """
    vocabulary = shard.token_profile.vocabulary
    with tempfile.TemporaryDirectory(dir=miner.context.scratch) as name:
        folder, offsets = Path(name) / "mined", list[tuple[int, ...]]()
        folder.mkdir()
        for number in range(len(shard.profile.files)):
            table = pa.table(next(files), schema=mined_schema(vocabulary))
            offsets.append(write_batches(folder / f"mined-{number:05d}.arrow", table))
        write_profile(
            folder,
            shard.mined_uri,
            TokenProfile(
                schema_version=SCHEMA_VERSION,
                rows_name=shard.files_name,
                vocabulary=vocabulary,
                files=tuple(offsets),
                without_tokens=0,
                sizes={},
            ),
        )


def wanted_rows(miner: Miner, shard: IngestedShard, number: int, begin: int) -> pa.Table:
    """Return some facts and the tokens of the rows of a file that are relevant and have no class, and their numbers as `row`.

    Args:
        begin: number of the first row of the file.
    """
    count = shard.profile.files[number].rows
    table, tokens = (pa.concat_tables(read(number, 0, count)) for read in (shard.facts, shard.tokens))
    table = table.select(["query_hash", "label", "task"])
    for name in ("query_tokens", "document_tokens"):
        table = table.append_column(name, tokens[name])
    table = table.append_column("row", pa.array(np.arange(begin, begin + count)))
    classified = pc.field("task").isin(pa.array(miner.inputs.config.train.classes, pa.string()))
    return table.filter(
        (pc.field("label") > 0) & ~classified & pc.field("query_tokens").is_valid() & pc.field("document_tokens").is_valid()
    )


def search(miner: Miner, queries: Vectors, own: NDArray[np.float32], asked: Hashes) -> tuple[NDArray[np.int64], Hashes, Hashes]:
    """Find the negatives of rows among the published documents.

    As `mine_hard_negatives` of sentence-transformers does with a relative margin: of the documents that are not relevant, those
    of the wanted ranks whose score is at most that of the row's own document, less a share of it; the best ones first.

    Args:
        queries: embeddings, (n, D).
        own: score of each row's own document, (n,).
        asked: hash of each query, (n,).

    Returns:
        Of each negative its row, ascending; the hash of its id; and that of its text.
    """
    mine, data = miner.mine, miner.inputs.config.data
    keys, hashes = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    best = faiss.ResultHeap(len(queries), miner.depth, keep_max=True)
    add = partial(miner.search.add, best, miner.search.blocks(queries)) if miner.search else partial(keep_best, best, queries)
    for uri in miner.parts:
        path = store.local_file(uri, miner.context.scratch / f"parts-{miner.context.world.local_rank}")
        for batch in read_batches(path, ["id", "embedding", "document_hash"]):
            add(embeddings_of(batch).astype(np.float32), sum(map(len, keys)))
            keys.append(id_hashes(batch["id"].to_pylist()))
            hashes.append(batch["document_hash"].to_numpy())
            miner.beat("searching the published embeddings")
        if store.is_s3(uri):
            path.unlink()
    best.finalize()
    # Where there are fewer documents, the rest of a list has no place.
    scores, places, there = best.D, best.I.clip(min=0), best.I >= 0
    found = np.concatenate(hashes)[places]
    relevant = np.isin(pair_hashes(asked[:, None], found), miner.relevant)
    # Of the same text under several ids, the first one.
    once = np.zeros(found.size, np.bool_)
    once[np.unique(pair_hashes(np.arange(len(found), dtype=np.uint64)[:, None], found), return_index=True)[1]] = True
    there &= once.reshape(found.shape) & ~relevant
    ranks, limit = np.cumsum(there, axis=1), (1 - mine.margin) * own[:, None]
    held = holdout_slices(data.holdout_fraction) if data.holdout_by == "document" else 0
    good = there & (ranks >= mine.first) & (ranks <= mine.last) & (scores <= limit)
    good &= found // np.uint64((1 << 64) // SLICES) >= held
    rows, columns = np.nonzero(good & (np.cumsum(good, axis=1) <= mine.count))
    return rows, np.concatenate(keys)[places[rows, columns]], found[rows, columns]


def keep_best(best: faiss.ResultHeap, queries: Vectors, vectors: Vectors, first: int) -> None:
    """Take more documents into each query's list of the best ones.

    Args:
        queries, vectors: embeddings, (n, D) fp32 and (m, D).
        first: number of the first of these documents.
    """
    scores, places = faiss.knn(queries, vectors, min(best.k, len(vectors)), faiss.METRIC_INNER_PRODUCT)
    best.add_result(scores, places + first)


def tokens_of(miner: Miner, keys: Hashes, hashes: Hashes, kind: pa.DataType) -> tuple[NDArray[np.bool_], pa.ListArray]:
    """Return which documents are still there with the same text, and the tokens of these.

    Args:
        keys, hashes: of their ids and texts.
        kind: type of a text's tokens.
    """
    reader = CorpusReader(miner.context.paths.bucket_root, miner.inputs.shards_of(DOCUMENTS))
    schema = pa.schema([FACTS[DOCUMENTS].field("key"), FACTS[DOCUMENTS].field("document_hash"), pa.field(DOCUMENT_TOKENS, kind)])
    tables, wanted = [schema.empty_table()], np.unique(keys)
    for part in range(len(miner.parts) if len(wanted) else 0):
        documents = reader.read_part(part, len(miner.parts), lambda tokens: tokens).select(schema.names)
        chosen = np.isin(documents["key"].to_numpy(), wanted) & np.asarray(documents[DOCUMENT_TOKENS].is_valid())
        tables.append(documents.filter(pa.array(chosen)).cast(schema))
        miner.beat("reading the negatives")
    documents = pa.concat_tables(tables)
    place = np.searchsorted(documents["key"].to_numpy(), keys)
    there = place < len(documents)
    own = documents.take(pa.array(place[there]))
    there[there] = (own["key"].to_numpy() == keys[there]) & (own["document_hash"].to_numpy() == hashes[there])
    return there, documents[DOCUMENT_TOKENS].take(pa.array(place[there])).combine_chunks()
