"""What an outsider sees of a registry and how good its models are: read from the published files, computed with code of its own.

Nothing of the pipeline is used here: files are read with json, pyarrow and transformers, vectors are computed with torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from tests.chain.year_inputs import Row

TOLERANCE = 1e-5
"""Largest difference of a published value from the outsider's, in fp32."""
TEXTS_AT_ONCE = 512
RANKED_AGAINST = 4000
"""Candidates of a hidden query: about as many as the gate's, so that a fall is as large for both."""
TUNED_PAIRS, TUNED_STEPS = 4000, 9

Vectors = NDArray[np.float32]
Values = NDArray[np.float64]


class Outsider:
    """A published model, as anyone can open it.

    Args:
        folder: the model folder.
        query_length, document_length: tokens at most.
    """

    def __init__(self, folder: Path, query_length: int, document_length: int) -> None:
        self._model = AutoModel.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._query_length, self._document_length = query_length, document_length

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._query_length)

    def documents(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._document_length)

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str], length: int) -> Vectors:
        """Return the mean token vectors with length 1: (texts, dimension)."""
        found = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), TEXTS_AT_ONCE):
            places = order[start : start + TEXTS_AT_ONCE]
            chosen = [texts[place] for place in places]
            tokens = self._tokenizer(chosen, truncation=True, max_length=length, padding=True, return_tensors="pt")
            mask = tokens["attention_mask"][..., None]
            states = self._model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
            means = (states * mask).sum(1) / mask.sum(1)
            found[places] = torch.nn.functional.normalize(means, dim=1).numpy()
        return found


@dataclass
class Truth:
    """How good a model is, measured on pairs that no execution ever has."""

    pairs: Sequence[Row]
    query_length: int
    document_length: int

    def __post_init__(self) -> None:
        self._known: dict[str, Values] = {}

    def of(self, folder: Path) -> Values:
        """Return nDCG@10 of each hidden query: (pairs,)."""
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        if weights not in self._known:
            self._known[weights] = self._measure(folder, self.pairs)
        return self._known[weights]

    def _measure(self, folder: Path, pairs: Sequence[Row]) -> Values:
        outsider = Outsider(folder, self.query_length, self.document_length)
        queries = outsider.queries([row.query for row in pairs])
        documents = outsider.documents([row.document for row in pairs])
        found = []
        blocks = math.ceil(len(pairs) / RANKED_AGAINST)
        for own in np.array_split(np.arange(len(pairs)), blocks):
            scores = queries[own] @ documents[own].T
            # One relevant document each: its rank is the number of better ones.
            ranks = (scores > scores.diagonal()[:, None]).sum(1)
            found.append(np.where(ranks < 10, 1 / np.log2(ranks + 2.0), 0.0))
        return np.concatenate(found)

    def make_worse(self, published: Path, folder: Path, fall: float, seed: int) -> None:
        """Write a published model whose weights are mixed with random ones, so that nDCG@10 falls by so much."""
        folder.mkdir(parents=True)
        for path in published.rglob("*"):
            if path.is_file():
                target = folder / path.relative_to(published)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        weights = load_file(published / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        noise = {name: torch.randn(one.shape, generator=generator) * one.std() for name, one in sorted(weights.items())}
        pairs = self.pairs[:TUNED_PAIRS]
        before = self._measure(published, pairs).mean()
        low, high = 0.0, 1.0
        for _ in range(TUNED_STEPS):
            share = (low + high) / 2
            mixed = {name: torch.lerp(one, noise[name], share) for name, one in weights.items()}
            save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
            low, high = (share, high) if before - self._measure(folder, pairs).mean() < fall else (low, share)


def error(differences: Values) -> float:
    """Return the standard error of the mean of independent values."""
    return float(differences.std() / math.sqrt(len(differences)))


@dataclass(frozen=True)
class View:
    """A registry at one moment, and what it names.

    Attributes:
        locate: URI -> the object's file.
        pointer: its content, empty where nothing is published.
        reference: the run that is the reference; None: there is none.
    """

    root: str
    locate: Callable[[str], Path]
    pointer: Mapping[str, Any]
    reference: str | None

    @classmethod
    def now(cls, root: str, name: str, locate: Callable[[str], Path]) -> View:
        pointer, reference = (read_json(locate(f"{root}/registry/{file}.json")) for file in (name, f"{name}.reference"))
        return cls(root, locate, pointer, reference.get("run"))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.locate(self.pointer["embeddings"]))

    @property
    def model(self) -> Path:
        return self.locate(self.pointer["model"])

    def model_of(self, run: str) -> Path:
        return self.locate(f"{self.root}/runs/{run}/model")

    @cached_property
    def vectors(self) -> dict[str, Vectors]:
        """Id -> embedding."""
        found: dict[str, Vectors] = {}
        for part in self.manifest["parts"]:
            table = pq.read_table(self.locate(part["uri"]), columns=["id", "embedding"])
            found |= dict(zip(table["id"].to_pylist(), table["embedding"].to_numpy(), strict=True))
        return found

    @property
    def needed(self) -> set[str]:
        """The runs whose folders readers and later runs need."""
        parts = {part["uri"].split("/runs/")[1].split("/")[0] for part in self.manifest["parts"]}
        return {self.pointer["run"], self.pointer["embeddings_run"], *parts, *filter(None, [self.reference])}

    @property
    def runs(self) -> dict[str, int]:
        """Run -> bytes of its folder."""
        folder = self.locate(f"{self.root}/runs")
        return {run.name: size_of(run) for run in folder.iterdir()} if folder.is_dir() else {}

    def broken_set(self, documents: Mapping[str, str], outsider: Outsider, sample: Sequence[str]) -> list[str]:
        """Return what is wrong with the published set.

        Args:
            documents: those that must be in it, and no others: id -> text.
            sample: ids whose vectors are computed again.
        """
        broken = []
        if missing := sorted(documents.keys() - self.vectors.keys()):
            broken.append(f"{len(missing)} documents have no embedding: {missing[:3]}")
        if strange := sorted(self.vectors.keys() - documents.keys()):
            broken.append(f"{len(strange)} embeddings are of no document or a deleted one: {strange[:3]}")
        if self.manifest["rows"] != len(self.vectors):
            broken.append(f"the manifest has {self.manifest['rows']} rows, the parts {len(self.vectors)} ids")
        for part in self.manifest["parts"]:
            if hashlib.sha256(self.locate(part["uri"]).read_bytes()).hexdigest() != part["sha256"]:
                broken.append(f"{part['uri']} has not the hash of the manifest")
        weights = hashlib.sha256((self.model / "model.safetensors").read_bytes()).hexdigest()
        if {weights} != {self.pointer["model_sha256"], self.manifest["model"]["sha256"]}:
            broken.append("pointer, manifest and model folder do not agree about the weights")
        chosen = [name for name in sample if name in self.vectors]
        published = np.stack([self.vectors[name] for name in chosen])
        worst = np.abs(outsider.documents([documents[name] for name in chosen]) - published).max(axis=1)
        if (worst > TOLERANCE).any():
            name = chosen[int(worst.argmax())]
            broken.append(f"{(worst > TOLERANCE).sum()} of {len(chosen)} vectors differ, {name} by {worst.max():.1e}")
        return broken


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file, empty where there is none."""
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return loaded


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
