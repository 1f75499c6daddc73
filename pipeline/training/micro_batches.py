"""Micro-batches: the pieces of a batch that pass through the encoder one at a time.

Pieces are made on the host. On a device that compiles, a slice at another position is another graph, while pieces that arrive
separately all run the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pipeline.backends.device import Batch

TOWERS = ("query", "document")

CLASSES_OF = "classes:"
"""Begins the name of the classes in a batch whose queries are classified; the task follows."""


def micro_batches(batch: Batch) -> list[Batch]:
    """Return the texts of each micro-batch, in order: tensors whose names end in `/` and its number."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in batch.items():
        field, _, number = name.partition("/")
        if number:
            found.setdefault(int(number), {})[field] = tensor
    return [found[number] for number in range(len(found))]
