"""Stand-ins for the modules that load torch or transformers, as far as the stages use them that are real in light runs.

A model is the SHA-256 of its weight file, and an embedding a hash of that and of the document's tokens: every part shows which
model made it of which text.
"""

from __future__ import annotations

import hashlib
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import store
from pipeline.run_inputs import ModelShape, TokenizerPlan

WEIGHTS = "model.safetensors"
VOCABULARY = 1000
NO_PROMPTS = {"query": "", "document": ""}
DIMENSION = 16
DOCUMENTS_PER_BEAT = 4
PACE_SECONDS = 0.02
"""Of a training step and of a few documents: long enough to be met by a fault at any of them, and no work for the processor."""


class TextTokenizer:
    """Words by their checksums."""

    prompts = NO_PROMPTS

    def __init__(self, folder: Path, *_: Any, **__: Any) -> None:
        self.vocabulary = VOCABULARY
        self.digest = "words"

    @classmethod
    def planned(cls, folder: Path, *_: Any, **__: Any) -> TextTokenizer:
        return cls(folder)

    def plan(self, cap: int) -> TokenizerPlan:
        return TokenizerPlan(digest=self.digest, vocabulary=VOCABULARY, cap=cap, prefix=0, suffix=0)

    def encode(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        return [[zlib.crc32(word.encode()) % VOCABULARY for word in text.split()][:max_length] for text in texts]

    def encode_each(self, texts: Sequence[str], max_length: int, prompt: str = "") -> list[list[int] | str]:
        return [*self.encode(texts, max_length)]

    def with_prompts(self, queries: pa.ChunkedArray, tasks: pa.ChunkedArray) -> pa.ChunkedArray:
        return queries


def cut(tokens: pa.ListArray, length: int, plan: Any) -> pa.ListArray:
    """Stored words, cut to a length."""
    return pc.list_slice(tokens, 0, length)


@dataclass(frozen=True)
class Encoder:
    """A model that was loaded."""

    sha256: str
    dimension: int = DIMENSION


class Device:
    """Computes nothing."""

    kind = "cpu"
    precision = "fp32"

    def close(self) -> None:
        """Nothing is open."""


class GraphWatch:
    """Nothing is compiled, so nothing is watched."""

    def __init__(self, **_: Any) -> None:
        pass

    def check(self, step: int) -> None:
        """Nothing to see."""


@dataclass(frozen=True)
class ResolvedParent:
    folder: Path
    sha256: str
    converted: bool = False


def load_encoder(folder: Path, config: Any) -> Encoder:
    return Encoder(store.sha256_file(folder / WEIGHTS))


def resolve_parent(uri: str, config: Any, scratch: Path) -> ResolvedParent:
    folder = store.local_folder(uri, scratch / "parent")
    return ResolvedParent(folder, store.sha256_file(folder / WEIGHTS))


def encode(
    encoder: Encoder,
    device: Device,
    token_lists: Sequence[Sequence[int]],
    length: int,
    tokens_per_batch: int,
    *,
    on_progress: Callable[[int, float], None],
) -> SimpleNamespace:
    """Token lists' embeddings, (rows, DIMENSION) float32, behind `numpy()` as a tensor's are."""
    rows = []
    for done, tokens in enumerate(token_lists, start=1):
        digest = hashlib.shake_256(f"{encoder.sha256} {[*map(int, tokens)]}".encode()).digest(DIMENSION)
        rows.append(np.frombuffer(digest, np.uint8).astype(np.float32))
        if done % DOCUMENTS_PER_BEAT == 0:
            time.sleep(PACE_SECONDS)
            on_progress(done, done / len(token_lists))
    tokens = sum(map(len, token_lists))
    return SimpleNamespace(embeddings=SimpleNamespace(numpy=lambda: np.stack(rows)), tokens=tokens, slots=tokens)


SHAPE = ModelShape(
    parameters=1,
    largest=1,
    words=1,
    multiplied=1,
    layers=1,
    hidden=DIMENSION,
    heads=1,
    intermediate=1,
    head=0,
    dimension=DIMENSION,
    dropout=0.0,
    fused=True,
    gated=False,
    stored_bytes=4,
)
BACKBONE = SimpleNamespace(pad_token_id=0, max_position_embeddings=512, model_type="light", vocab_size=VOCABULARY)
MODULES: dict[str, dict[str, Any]] = {
    "transformers": {"PreTrainedConfig": object},
    "pipeline.dataset.tokens": {
        "SIDES": tuple(NO_PROMPTS),
        "TextTokenizer": TextTokenizer,
        "TEXTS_AT_ONCE": 1024,
        "Tokens": list,
        "cut": cut,
    },
    "pipeline.graphs.compiled": {
        "encode_function": lambda context, device, encoder: encoder,
        "known_graphs": lambda context: None,
    },
    "pipeline.graphs.fingerprint": {
        "set_uri": lambda root, kind, name: f"{root}/graphs/{kind}/{name}.json",
        "plan_graphs": lambda config, world, backbone, bucket: None,
        "missing_sets": lambda bucket, plan, kinds=(): [],
    },
    "pipeline.model.folder": {
        "WEIGHTS": WEIGHTS,
        "load_encoder": load_encoder,
        "inspect_folder": lambda folder, config: (BACKBONE, None),
        "own_form": lambda folder, config: config,
        "text_positions": lambda backbone: backbone.max_position_embeddings,
    },
    "pipeline.model.inference": {"encode": encode},
    "pipeline.model.classifier": {"FOLDER": "classifiers", "Classifier": object, "load_classifiers": lambda folder, encoder: {}},
    "pipeline.model.shape": {"read_shape": lambda folder, config: SHAPE},
    # What is small fits.
    "pipeline.estimate.memory": {
        "decide_sharding": lambda config, shape, world, capacity: config,
        "known_capacity": lambda config, kind, here: SimpleNamespace(device=None, host=None),
        "require_memory": lambda shape, config, world, capacity: [],
        "totals": lambda budgets: {"device": 0, "host": 0},
    },
    "pipeline.estimate.requirements": {
        "attempt_minutes": lambda timeouts: {},
        "over": lambda found: [],
        "refuse": lambda found: None,
        "requirements": lambda *_, **__: [],
    },
    "pipeline.model.parent": {"ResolvedParent": ResolvedParent, "resolve_parent": resolve_parent},
    "pipeline.graphs.graph_watch": {"GraphWatch": GraphWatch},
    "pipeline.backends.device": {
        "Device": Device,
        "EncodeFunction": Encoder,
        "open_device": lambda *_, **__: Device(),
        "default_ranks_per_node": lambda kind: 1,
        "require_available": lambda kind: None,
        "require_world": lambda kind, ranks: None,
        "resolve_kind": lambda kind: "cpu",
        "resolve_precision": lambda kind, precision: "fp32",
    },
}


def install() -> None:
    """Put the stand-ins where an import looks first."""
    for name, content in MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
