"""Micro-batches: the pieces of a batch that pass through the encoder one at a time.

Pieces are cut on the host. On a device that compiles, a slice at another position is another graph, while pieces that arrive
separately all run the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipeline.backends.device import Batch

TOWERS = ("query", "document")


def cut(batch: Batch, size: int) -> Batch:
    """Cut the texts of a batch into micro-batches of `size` pairs, each under the tensor's name, `/` and its number.

    Args:
        batch: as `TrainingBatches.iterate` yields it, (B, ...) on the host.
        size: divides B; a batch that is not larger stays whole.
    """
    if len(batch["weights"]) <= size:
        return batch
    pieces: dict[str, Tensor] = {}
    texts = [name for tower in TOWERS for name in (f"{tower}_tokens", f"{tower}_mask")]
    for name in texts:
        pieces |= {f"{name}/{number}": piece for number, piece in enumerate(torch.split(batch[name], size))}
    for tower in TOWERS:
        if f"{tower}_places" in batch:
            masks = torch.split(batch[f"{tower}_mask"], size)
            pieces |= {f"{tower}_places/{number}": mask.flatten().nonzero().flatten() for number, mask in enumerate(masks)}
    whole = {name: tensor for name, tensor in batch.items() if not name.startswith(TOWERS)}
    return {**whole, **pieces}


def micro_batches(batch: Batch) -> list[Batch]:
    """The texts of each micro-batch, in order; the batch itself where it was not cut."""
    if "query_tokens" in batch:
        return [batch]
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in batch.items():
        field, _, number = name.partition("/")
        if number:
            found.setdefault(int(number), {})[field] = tensor
    return [found[number] for number in range(len(found))]
