"""The evaluation inside training, on all ranks together: some of the hold-out's queries against these queries' documents, or some
of its classified texts.

It shows a curve during a run, query by query for `trnpipe parity`; the evaluate stage's number, on the whole hold-out, decides.
On devices that compile graphs the configuration fixes every shape, so that next week's hold-out meets the graphs of this week's:
batches as in encoding, and ranks share embeddings and rankings in blocks of GATHER_ROWS.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from pipeline.backends.device import Device
from pipeline.config import EmbedConfig
from pipeline.evaluation.classification import ACCURACY
from pipeline.evaluation.holdout import Holdout
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.retrieval import rank
from pipeline.evaluation.retrieval_metrics import DEPTH, measure_rankings
from pipeline.model.encoder import Encoder
from pipeline.model.inference import encode, for_encoding

GATHER_ROWS = 64
"""Rows of a rank in one gather: 64 ranks x 64 rows of 768 fp32 values are 12 MiB, and the usual 512 queries of
one node are one block. A larger hold-out takes more blocks, never another shape."""


def validate(
    encoder: Encoder, device: Device, data: Holdout, config: EmbedConfig, on_progress: Callable[[int, float], None]
) -> QueryValues | None:
    """Return each metric of each query, or text, on the leader, None on the other ranks. All ranks call it.

    A rank encodes every world-size-th candidate and query, and ranks all candidates for its queries, or classifies its texts.

    Args:
        config: row length and batch size, the same as for embedding.
        on_progress: as for `encode`, with this rank's texts.
    """
    own = slice(device.world.rank, None, device.world.size)
    encode_with = for_encoding(encoder, compiles=device.compiles)
    queries, candidates = (
        encode(encode_with, device, texts[own], config.length, config.tokens_per_batch, on_progress=on_progress).embeddings
        for texts in (data.queries, data.candidates)
    )
    if data.classes is not None:
        hits = _shared(device, _hits(encoder, device, queries, data, own), len(data.queries), 1)
        return QueryValues(data.keys, {ACCURACY: hits[:, 0].double().numpy()}) if device.world.is_leader else None
    count = len(data.candidates)
    shared = _shared(device, candidates, count, encoder.dimension)
    ranked = torch.from_numpy(rank(queries, [(np.arange(count), shared)], DEPTH))
    # As fp32, which every device can share and which has room for 16 million candidates.
    ranked = _shared(device, ranked.float(), len(data.queries), DEPTH)[:, : min(count, DEPTH)]
    if not device.world.is_leader:
        return None
    return QueryValues(data.keys, measure_rankings(ranked.numpy().astype(np.int64), data.relevant))


def _hits(encoder: Encoder, device: Device, texts: Tensor, data: Holdout, own: slice) -> Tensor:
    """Return 1 for each of the own texts whose class is right, else 0, (n, 1); classified on the host, so without a graph.

    Args:
        texts: their embeddings, (n, D).
    """
    weights, classes = device.to_host(encoder.classifiers.state_dict()), torch.from_numpy(data.classes)[own]
    tasks, found = np.array(data.tasks)[own], torch.zeros((len(texts), 1))
    for task, classifier in encoder.classifiers.items():
        layer = {name: weights[f"{task}.{name}"] for name in ("weight", "bias")}
        rows = torch.from_numpy(tasks == task)
        found[rows, 0] = (functional_call(classifier, layer, (texts[rows],)).argmax(dim=1) == classes[rows]).float()
    return found


def _shared(device: Device, own: Tensor, total: int, width: int) -> Tensor:
    """Return the rows of all ranks on every rank's host, (total, width); each rank has every world-size-th, and may have less
    columns."""
    size = device.world.size
    if size == 1:
        return own
    share = -(-total // size)
    padded = torch.zeros((-(-share // GATHER_ROWS) * GATHER_ROWS, width))
    padded[: own.shape[0], : own.shape[1]] = own
    blocks = []
    for block in torch.split(padded, GATHER_ROWS):
        # The whole block to the host first: on a lazy device, slicing or turning it there would be a graph of its own.
        shared = device.to_host({"rows": device.gather(block.to(device.torch_device))})["rows"]
        blocks.append(shared.view(size, GATHER_ROWS, -1).transpose(0, 1).reshape(size * GATHER_ROWS, -1))
    return torch.cat(blocks)[:total]
