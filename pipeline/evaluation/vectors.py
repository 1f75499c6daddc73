"""`evaluate/vectors.npy`: the new model's vectors of all texts of the hold-out.

Records of `key`, 16 bytes, the BLAKE2b hash of a text's token ids as int32; and `vector`, (D,) float32. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.statistics import Integers

if TYPE_CHECKING:
    from pipeline.evaluation.retrieval import Block
    from pipeline.model.inference import TokenList

KEY_BYTES = 16

SMALLEST_NORM = 1e-12
"""By which shorter vectors are divided, as torch's `normalize` does."""

Vectors = npt.NDArray[np.float32]


def shortened(vectors: Vectors, size: int, *, normalize: bool) -> Vectors:
    """Return the first numbers of embeddings, (N, size), whose length is 1 again where the model normalizes.

    Args:
        vectors: (N, D) with D >= size; those of this size are returned as they are.
    """
    if vectors.shape[1] == size:
        return vectors
    first = vectors[:, :size]
    return first / np.linalg.norm(first, axis=1, keepdims=True).clip(min=SMALLEST_NORM) if normalize else first


def kept_vectors(path: Path, texts: Sequence[TokenList]) -> tuple[Integers, Vectors]:
    """Return where each text's vector stands among those in a local file, (N,), -1 for none; and those, see
    `published_vectors`."""
    kept = np.lib.format.open_memmap(path, mode="r")
    place = dict(zip(kept["key"].tolist(), range(len(kept)), strict=True))
    return np.array([place.get(key, -1) for key in _keys(texts)], np.int64), kept["vector"]


def write_vectors(path: Path, texts: Sequence[TokenList], blocks: Iterable[Block], dimension: int) -> None:
    """Write the vectors of all texts to a local file.

    Args:
        blocks: which texts, and their vectors.
        dimension: of a vector.
    """
    kept = np.lib.format.open_memmap(
        path, mode="w+", dtype=[("key", f"V{KEY_BYTES}"), ("vector", np.float32, (dimension,))], shape=(len(texts),)
    )
    kept["key"] = np.array(_keys(texts), f"V{KEY_BYTES}")
    for rows, vectors in blocks:
        kept["vector"][rows] = vectors.numpy()
    kept.flush()


def _keys(texts: Sequence[TokenList]) -> list[bytes]:
    return [blake2b(np.asarray(text, np.int32).tobytes(), digest_size=KEY_BYTES).digest() for text in texts]
