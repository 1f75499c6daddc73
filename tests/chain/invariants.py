"""What must hold after every chaos run, checked from the outside: on the bucket's files, the lock table and the process table."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.contract import Stage, registry_uri
from tests.chain.site import Site, processes, wait_until

END_SECONDS = 15
"""For processes that were just told to end."""


@dataclass(frozen=True)
class Published:
    """What a run has published, as digests that another run of the same data must reach.

    Attributes:
        weights: sha256 of the model's weight file.
        parts: sha256 of every part of the embeddings.
    """

    weights: str
    parts: tuple[str, ...]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_published(site: Site, run: str) -> Published:
    paths = site.paths(run)
    manifest = load(site.file(paths.embed_manifest))
    return Published(digest(site.file(paths.model) / "model.safetensors"), tuple(part["sha256"] for part in manifest["parts"]))


def broken_after_success(site: Site, run: str, registry: str, reference: Published | None) -> list[str]:
    """Invariants of a run that has succeeded; each that does not hold in a few words."""
    paths = site.paths(run)
    broken = []
    pointer = load(site.file(registry_uri(f"s3://{site.stack.bucket}", registry)))
    if (pointer.get("run"), pointer.get("model"), pointer.get("embeddings")) != (run, paths.model, paths.embed_manifest):
        broken.append(f"the registry points elsewhere: {pointer}")
    manifest = load(site.file(paths.embed_manifest))
    weights = digest(site.file(paths.model) / "model.safetensors")
    results = {stage: load(site.file(paths.result(stage))) for stage in (Stage.TRAIN, Stage.EVALUATE, Stage.EMBED)}
    told = {
        "registry": pointer.get("model_sha256"),
        "manifest": manifest.get("model", {}).get("sha256"),
        "train": results[Stage.TRAIN].get("outputs", {}).get("model", {}).get("sha256"),
        "evaluate": results[Stage.EVALUATE].get("inputs", {}).get("model", {}).get("sha256"),
        "embed": results[Stage.EMBED].get("inputs", {}).get("model", {}).get("sha256"),
    }
    broken += [f"{name} names weights {found}, they are {weights}" for name, found in told.items() if found != weights]
    broken += _broken_parts(site, manifest, weights)
    broken += broken_quarantine(site, run)
    if reference is not None and weights != reference.weights:
        broken.append("the weights are not those of the faultless run")
    if reference is not None and not broken and read_published(site, run) != reference:
        broken.append("the embeddings are not those of the faultless run")
    return broken


def _broken_parts(site: Site, manifest: dict[str, Any], weights: str) -> list[str]:
    broken, ids = [], Counter[str]()
    for part in manifest.get("parts", ()):
        path = site.file(part["uri"])
        record = load(path.with_suffix(".json"))
        if not path.is_file():
            broken.append(f"{path.name} is not there")
            continue
        if {digest(path), record.get("sha256")} != {part["sha256"]} or record.get("model") != weights:
            broken.append(f"{path.name} is not what manifest and record say")
        ids.update(pq.read_table(path)["id"].to_pylist())
    expected = set(site.data.ids)
    if repeated := sorted(identifier for identifier, count in ids.items() if count > 1):
        broken.append(f"ids embedded more than once: {repeated[:5]}")
    if missing := sorted(expected - ids.keys()):
        broken.append(f"ids not embedded: {missing[:5]}")
    if strange := sorted(ids.keys() - expected):
        broken.append(f"ids of nothing: {strange[:5]}")
    return broken


def broken_quarantine(site: Site, run: str) -> list[str]:
    path = site.file(site.paths(run).quarantine)
    lines = path.read_text().splitlines() if path.is_file() else []
    found = sorted(int(json.loads(line)["at"].rpartition(":")[2]) for line in lines)
    return [] if found == list(site.data.bad) else [f"quarantine holds lines {found}, bad are {list(site.data.bad)}"]


def broken_registry(site: Site, registry: str, expected: bytes | None) -> list[str]:
    """A run that has failed leaves the pointer as it was."""
    path = site.file(registry_uri(f"s3://{site.stack.bucket}", registry))
    found = path.read_bytes() if path.is_file() else None
    return [] if found == expected else [f"the registry has changed: {found!r}"]


def broken_lock(site: Site, registry: str) -> list[str]:
    item = site.lock_item(registry)
    return [] if item is None else [f"the lock is held: {item}"]


def broken_remains(site: Site, run: str, temporary: Path) -> list[str]:
    """Processes and temporary files that outlive the run."""
    broken = []
    if not wait_until(lambda: not processes(run), END_SECONDS):
        broken.append(f"processes left: {processes(run)}")
    if not wait_until(lambda: not [*temporary.iterdir()], END_SECONDS):
        broken.append(f"temporary files left: {sorted(path.name for path in temporary.iterdir())[:5]}")
    return broken


def load(path: Path) -> dict[str, Any]:
    """A JSON file; empty where there is none, so that every invariant it serves shows as broken."""
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return loaded
