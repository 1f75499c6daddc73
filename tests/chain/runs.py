"""What the tests of whole executions share: a state folder with the runs made in it, and ways to start and to kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

SETTINGS = {
    "device.precision": "fp32",
    "model.head.hidden": 16,
    "train.epochs": 3,
    "train.batch_size": 16,
    "train.query_length": 8,
    "train.length": "32",
    "train.learning_rate": "2e-3",
    "train.log_every": 2,
    "train.checkpoint_every": 5,
    "train.validate_every": 10,
    "health_check.memory_mib": 1,
    "health_check.collective_bytes": "[4096]",
    "health_check.storage_mib": 1,
    "data.holdout_fraction": 0.2,
    "data.replay_fraction": 0.5,
    "evaluate.bootstrap_samples": 100,
    "gate.undecided": "accept",
    "embed.children": 2,
    "embed.rows_per_part": 100,
    "embed.length": "32",
    "embed.tokens_per_batch": 512,
}


@dataclass
class LocalState:
    """One state folder and the runs made in it.

    Attributes:
        calls: where the runs' calls of AWS services are written (tests/chain/recorded.py); None: nowhere.
    """

    folder: Path
    parent: Path
    device: str = "cpu"
    calls: Path | None = None

    def command(self, *inputs: Path, arguments: tuple[str, ...] = (), **settings: Any) -> list[str]:
        merged = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
        program = ["pipeline.cli"] if self.calls is None else ["tests.chain.recorded", str(self.calls)]
        command = [sys.executable, "-m", *program, "local", "--state", str(self.folder), "--device", self.device]
        command += arguments
        for path in inputs:
            command += ["--input", str(path)]
        for key, value in merged.items():
            command += ["--set", f"{key}={value}"]
        return command

    def run(self, *inputs: Path, arguments: tuple[str, ...] = (), **settings: Any) -> subprocess.CompletedProcess[str]:
        command = self.command(*inputs, arguments=arguments, **settings)
        return subprocess.run(command, capture_output=True, text=True, timeout=1200)

    @property
    def bucket(self) -> Path:
        (registry,) = self.folder.rglob("registry")
        return registry.parent

    @property
    def runs(self) -> list[Path]:
        return sorted((path.parent for path in self.folder.rglob("input.json")), key=lambda path: path.stat().st_mtime)

    def published(self) -> dict[str, Any]:
        return json.loads((self.bucket / "registry" / "current.json").read_text())


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def embeddings(run: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for part in sorted((run / "embed").glob("part-*.parquet")):
        table = pq.read_table(part)
        vectors = np.stack(table["embedding"].to_numpy(zero_copy_only=False))
        identifiers = table["id"].to_pylist()
        assert not found.keys() & set(identifiers)
        found |= dict(zip(identifiers, vectors, strict=True))
    return found


@contextmanager
def started(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def kill_descendant(root: int, wanted: Callable[[str], bool]) -> int | None:
    for pid in _descendants(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if wanted(command.replace("pipeline.", "")):
                os.kill(pid, signal.SIGKILL)
                return pid
        except (FileNotFoundError, ProcessLookupError):  # it ended: before its line was opened, read, or the kill came
            continue
    return None


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [root]
    while todo:
        todo += children.get(todo.pop(), [])
        found = sorted({*found, *todo})
    return found
