"""What all variants of a search start from: a planned run, this machine, and a local folder with the run's rows and parent."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import RunConfig, build_config
from pipeline.contract import RunPaths
from pipeline.data.arrow import read_table, token_lengths
from pipeline.errors import BadConfig, MissingInput
from pipeline.plan import RunPlan, World
from pipeline.runtime import store
from pipeline.runtime.cpu import available_cores
from pipeline.runtime.device import (
    default_ranks_per_node,
    require_available,
    require_world,
    resolve_kind,
    resolve_precision,
)
from pipeline.runtime.runs import mirrored

PACKAGES = ("trnpipe", "torch", "torch-xla", "torch-neuronx", "neuronx-cc", "transformers")


def base_config(config: RunConfig) -> RunConfig:
    """The run's configuration as one node of it: how many nodes there are is the deployment's matter."""
    return build_config(config.model_dump(mode="json"), {"nodes": 1, "registry": None})


def plan_world(config: RunConfig) -> World:
    """Who computes a variant.

    Raises:
        BadConfig: a kind of device, a precision or a number of ranks that it does not have.
    """
    kind = resolve_kind(config.device.kind)
    require_available(kind)
    ranks = config.device.ranks_per_node or default_ranks_per_node(kind)
    require_world(kind, ranks)
    return World(kind=kind, precision=resolve_precision(kind, config.device.precision), nodes=1, ranks_per_node=ranks)


def describe_basis(plan: RunPlan, world: World, *, steps: int, window: int) -> dict[str, Any]:
    """What rows of one table have in common: figures of another plan or machine are no measure for each other.

    Args:
        steps: of each variant.
        window: steps between two lines of metrics.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    machine = {
        "kind": world.kind,
        "ranks": world.ranks,
        "processor": processor(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions,
    }
    return {"run": plan.run, "fingerprint": plan.fingerprint, "steps": steps, "window": window, "machine": machine}


def processor() -> str:
    """The host processor's name, as Linux knows it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The local folder in which variants run, with what all of them need.

    Attributes:
        folder: gets `runs/`.
        rows, parent: local folders.
        lengths: (rows,) document lengths in tokens.
        lock: descriptor of a lock that this process, and every supervisor that it starts, holds until it ends.
    """

    folder: Path
    rows: Path
    parent: Path
    lengths: NDArray[np.int32]
    lock: int

    @classmethod
    @contextmanager
    def open(cls, state: Path, base: RunPaths, plan: RunPlan, root: str | None) -> Iterator[Workshop]:
        """Fetch what is not here yet.

        Raises:
            BadConfig: another search of this run is at work.
            MissingInput: rows or parent are gone.
        """
        folder = (state / "tune" / f"{base.run_id}-{plan.fingerprint[:8]}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadConfig(
                    "another search of this run is at work here, or a stage that it started",
                    value=folder,
                    rule="two at a time would measure each other",
                    remedy="wait until it has ended",
                ) from error
            rows = _fetched(base.rows, folder / "rows")
            for name, file in plan.row_files.items():
                if not (rows / name).is_file() or (rows / name).stat().st_size != file.size:
                    raise MissingInput(
                        "row files of the run are gone or have changed",
                        value=rows / name,
                        rule="they stay as prepare wrote them",
                        remedy="start a new run",
                    )
            parent = _fetched(mirrored(plan.parent.folder, root), folder / "parent")
            lengths = token_lengths(read_table(rows / "train.arrow")["document_tokens"])
            yield cls(folder=folder, rows=rows, parent=parent, lengths=lengths, lock=lock.fileno())


def _fetched(uri: str, folder: Path) -> Path:
    """The local folder with what stands under `uri`; downloaded whole or not at all, and only once."""
    if not store.is_s3(uri):
        return store.local_folder(uri, folder).absolute()
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        store.download_folder(uri, partial).rename(folder)
    return folder
