"""Vectors of a hold-out's texts: a run keeps its model's, and takes the published model's from the run that made it.

A hold-out has most texts of the week before. Their vectors would be computed in other batches now, which in fp32 changes them by
about 1e-7: far less than what the gate compares. So they are taken where all else is the same: the token ids, the weights, the
kind of device and its precision, the lengths, the compiled forms, and the installed packages.

`evaluate/vectors.npy`: records of `key`, 16 bytes, the BLAKE2b hash of a text's token ids as int32; and `vector`, (D,) float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline import store
from pipeline.backends.device import Device
from pipeline.contract import RunPaths, Stage, StageResult
from pipeline.errors import BadData, MissingInput, one_line
from pipeline.evaluation.retrieval import Block, Integers
from pipeline.host.host import versions
from pipeline.log import log
from pipeline.model.inference import TokenList
from pipeline.plan import Published, RunPlan
from pipeline.run.context import StageContext

KEY_BYTES = 16

Vectors = npt.NDArray[np.float32]


def published_vectors(
    context: StageContext, published: Published, device: Device, texts: Sequence[TokenList]
) -> tuple[Integers, Vectors]:
    """Return where each text's vector stands among the published model's kept ones, (N,), -1 for none; and those, (n, D) and
    mapped into memory.

    Args:
        device: on which the model would encode them.
    """
    try:
        paths = RunPaths(f"{context.paths.bucket_root}/runs/{published.run}")
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        result = StageResult.from_json(store.read_bytes(paths.result(Stage.EVALUATE)))
        graphs = context.plan.graphs
        facts = {
            "weights": (result.inputs["model"].sha256, published.sha256),
            "device": ((plan.world.kind, plan.world.precision), (device.kind, device.precision)),
            "lengths": (plan.config.embed.buckets, context.plan.config.embed.buckets),
            "compiled forms": (plan.graphs and plan.graphs.infer, graphs and graphs.infer),
            "packages": (result.versions, versions()),
        }
        reason = ", ".join(f"different {name}" for name, (found, expected) in facts.items() if found != expected)
        if not reason:
            return kept_vectors(store.local_file(paths.vectors, context.scratch / "kept"), texts)
    except (MissingInput, BadData) as error:
        reason = one_line(error)
    except (KeyError, IndexError, ValueError, EOFError) as error:
        reason = repr(error)
    log.info("no vectors of the published model are reused: %s", reason)
    return np.full(len(texts), -1), np.empty((0, 0), np.float32)


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
