"""The evaluation inside training: some of the hold-out's queries against these queries' documents, on all ranks together.

It shows a curve during a run, query by query for `trnpipe parity`; the evaluate stage's number, on the whole hold-out, decides.
On devices that compile graphs the configuration fixes every shape, so that next week's hold-out meets the graphs of this week's:
batches as in encoding, and ranks share embeddings in blocks of GATHER_ROWS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.backends.device import Device
from pipeline.config import EmbedConfig
from pipeline.dataset.row_files import read_table
from pipeline.errors import BadData
from pipeline.evaluation.query_values import QueryKey, QueryValues
from pipeline.evaluation.retrieval import retrieve
from pipeline.model.encoder import Encoder
from pipeline.model.inference import encode, for_encoding

TokenLists = Sequence[Sequence[int]]

GATHER_ROWS = 64
"""Embeddings of a rank in one gather: 64 ranks x 64 rows of 768 fp32 values are 12 MiB, and the usual 512 queries of
one node are one block. A larger hold-out takes more blocks, never another shape."""


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """Queries, candidates, and per query the index of each relevant candidate with its gain.

    Attributes:
        keys: identity of each query, the same in all runs.
    """

    keys: tuple[QueryKey, ...]
    queries: TokenLists
    candidates: TokenLists
    relevant: list[dict[int, float]]


def read_validation_set(folder: Path, queries: int) -> ValidationSet:
    """Return the first `queries` distinct hold-out queries in the order of their hashes, which is random but the same every week.

    Args:
        folder: with `holdout.arrow` and `candidates.arrow`.

    Raises:
        BadData: no query with a relevant document, or a held-out document that is not among the candidates.
    """
    holdout, candidates = read_table(folder / "holdout.arrow"), read_table(folder / "candidates.arrow")
    rows_of: dict[tuple[int, str], list[int]] = {}
    columns = (holdout[name].to_pylist() for name in ("query_hash", "locale", "label"))
    for row, (query, locale, label) in enumerate(zip(*columns, strict=True)):
        if label > 0:
            rows_of.setdefault((query, locale or ""), []).append(row)
    taken = sorted(rows_of.items())[:queries]
    chosen = [rows for _, rows in taken]
    if not chosen:
        raise BadData(
            "the hold-out has no query with a relevant document", value=str(folder), remedy="raise data.holdout_fraction"
        )
    document_hash, labels = holdout["document_hash"].to_pylist(), holdout["label"].to_pylist()
    wanted = {document_hash[row] for rows in chosen for row in rows}
    positions = {value: row for row, value in enumerate(candidates["document_hash"].to_pylist()) if value in wanted}
    if missing := wanted - positions.keys():
        raise BadData(
            "held-out documents are not among the candidates",
            value=f"{len(missing)} documents",
            rule="candidates hold all hold-out documents",
        )
    index = {value: number for number, value in enumerate(positions)}
    relevant: list[dict[int, float]] = []
    for rows in chosen:
        gains: dict[int, float] = {}
        for row in rows:
            document = index[document_hash[row]]
            gains[document] = max(labels[row], gains.get(document, 0.0))
        relevant.append(gains)
    return ValidationSet(
        keys=tuple((query, locale or None) for (query, locale), _ in taken),
        queries=pc.take(holdout["query_tokens"], [rows[0] for rows in chosen]).to_pylist(),
        candidates=pc.take(candidates["document_tokens"], list(positions.values())).to_pylist(),
        relevant=relevant,
    )


def validate(
    encoder: Encoder, device: Device, data: ValidationSet, config: EmbedConfig, on_progress: Callable[[int, float], None]
) -> QueryValues | None:
    """Return each retrieval metric of each query on the leader, None on the other ranks. All ranks call it.

    Args:
        config: buckets and batch size, the same as for embedding.
        on_progress: as for `encode`, with this rank's texts.
    """
    queries = _encode_shared(encoder, device, data.queries, config, on_progress)
    candidates = _encode_shared(encoder, device, data.candidates, config, on_progress)
    if not device.world.is_leader:
        return None
    return QueryValues(data.keys, retrieve(queries, candidates, data.relevant))


def _encode_shared(
    encoder: Encoder, device: Device, token_lists: TokenLists, config: EmbedConfig, on_progress: Callable[[int, float], None]
) -> Tensor:
    """Return the embeddings of all token lists, on every rank's host; each rank computes every world-size-th."""
    rank, size = device.world.rank, device.world.size
    mine = token_lists[rank::size]
    encode_with = for_encoding(encoder, compiles=device.compiles)
    embeddings = encode(encode_with, device, mine, config.buckets, config.tokens_per_batch, on_progress=on_progress).embeddings
    if size == 1:
        return embeddings
    share = -(-len(token_lists) // size)
    padded = torch.zeros((-(-share // GATHER_ROWS) * GATHER_ROWS, encoder.dimension))
    padded[: len(mine)] = embeddings.reshape(len(mine), encoder.dimension)
    blocks = []
    for block in torch.split(padded, GATHER_ROWS):
        # The whole block to the host first: on a lazy device, slicing or turning it there would be a graph of its own.
        shared = device.to_host({"rows": device.gather(block.to(device.torch_device))})["rows"]
        blocks.append(shared.view(size, GATHER_ROWS, -1).transpose(0, 1).reshape(size * GATHER_ROWS, -1))
    return torch.cat(blocks)[: len(token_lists)]
