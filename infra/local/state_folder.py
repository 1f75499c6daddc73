"""The state folder of local runs: the checks of it that come before anything is written, its layout stamp and its lock."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import BadConfig
from pipeline.operate.endpoint import make_private

LAYOUT = "2"
"""Of the files in a state folder. Another number: what they are called or hold has changed."""
STAMP = "layout.txt"
CONTENTS = ("bucket", "lock.json")
"""A folder with any of these and no stamp is of a version before the stamp."""

INPUT_COPIES = 2
"""Of an input file: the one in the bucket, and its tokens, four bytes each."""
MODEL_COPIES = 4
"""Of a model: the new one, and one checkpoint of it with the optimizer's two moments."""


def require_utf8(path: Path) -> None:
    """Refuse a path that cannot be written down.

    Raises:
        BadConfig: the path is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BadConfig(
            "the path is not UTF-8",
            value=path,
            rule="a run writes paths into its configuration and into names of objects, which are UTF-8",
            remedy="rename the file or folder, or name a symbolic link to it",
        ) from error


def check_state_folder(state: Path) -> None:
    """Refuse a folder that cannot hold a local run's state. Changes nothing.

    Raises:
        BadConfig: it is not UTF-8, not a folder, not readable, or of another layout.
    """
    require_utf8(state)
    with _usable(state):
        if not state.exists():
            return
        entries = {path.name for path in state.iterdir()}
        found = (state / STAMP).read_text().strip() if STAMP in entries else None
    if found != LAYOUT and (found is not None or entries.intersection(CONTENTS)):
        raise BadConfig(
            "another version of trnpipe wrote the state folder",
            value=f"{state}: layout {found or 'without a number'}",
            rule=f"this version reads layout {LAYOUT}",
            remedy="name another folder, `trnpipe local --state OTHER`, or delete this one (`make clean` deletes .trnpipe)",
        )


def check_space(state: Path, inputs: Sequence[Path], model: Path | None) -> None:
    """Refuse a run for which the disk has too little space, by the least that any run of these files writes.

    Args:
        inputs: files that are put into the bucket.
        model: local folder or weight file that the run continues from; None: a model of the state folder.

    Raises:
        BadConfig: too little space.
    """
    with _usable(state):
        files = state.glob("bucket/runs/*/model/*") if model is None else [model] if model.is_file() else model.rglob("*")
        weights = max((path.stat().st_size for path in files), default=0)
        needed = INPUT_COPIES * sum(path.stat().st_size for path in inputs) + MODEL_COPIES * weights
        disk = shutil.disk_usage(next(path for path in (state, *state.parents) if path.exists()))
    # What is no disk has a size of 0.
    if disk.total and disk.free < needed:
        raise BadConfig(
            "there is not enough space for the run",
            value=f"{state}: {disk.free / 1e9:.1f} GB free, at least {needed / 1e9:.1f} GB needed",
            rule="the inputs and their tokens, the new model, and a checkpoint of three times its size",
            remedy="free space, or name a folder on a larger disk with --state",
        )


@contextmanager
def owned(state: Path) -> Iterator[None]:
    """Make the state folder where there is none, and hold its lock, which ends with the process, even a killed one.

    Raises:
        BadConfig: the folder cannot be made or written to, or another run holds the lock.
    """
    with _usable(state):
        make_private(state)
        holder = open(state / "owner.pid", "a+")  # noqa: SIM115 - closed below
    with holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder.seek(0)
            option = f"--state {shlex.quote(str(state))}"
            raise BadConfig(
                "another local run has this state folder open",
                value=f"{state}: process {holder.read().strip()}{_running(state)}",
                rule="one local run per state folder at a time",
                remedy=f"follow it with `trnpipe watch {option}`, wait for its end, or name another folder with --state",
            ) from error
        with _usable(state):
            holder.truncate(0)
            holder.write(str(os.getpid()))
            holder.flush()
            (state / STAMP).write_text(f"{LAYOUT}\n")
        yield


def _running(state: Path) -> str:
    """Return the runs that the process with the lock has started."""
    since = (state / "owner.pid").stat().st_mtime
    inputs = sorted(state.glob("bucket/runs/*/input.json"))
    return "".join(f", run {path.parent.name}" for path in inputs if path.stat().st_mtime >= since)


@contextmanager
def _usable(state: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadConfig(
            "the state folder cannot be used",
            value=f"{state}: {error.strerror}",
            rule="a state folder is a folder, or can be made as one, and you may write to it",
            remedy="name another folder with --state",
        ) from error
