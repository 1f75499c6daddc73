"""Gangs of ranks as processes of their own, forked from one that has the framework loaded: to load it takes longer than most of
what they are to do."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from pipeline.ports import free_port

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pipeline.stages.train"])


class Rank:
    """A process, and what it says: its standard output, and its errors apart."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self.process, self._folder = process, folder

    @property
    def said(self) -> str:
        return (self._folder / "out").read_text()

    def wait(self, seconds: float = 600) -> int:
        """Return the exit code; what it says is shown where there is none in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            pytest.fail(f"a rank still runs after {seconds} s:\n{self.complaint}")
        return self.process.exitcode

    @property
    def complaint(self) -> str:
        return self.said[-2000:] + (self._folder / "err").read_text()[-4000:]


@contextmanager
def gang(program: str, size: int, *arguments: object) -> Iterator[list[Rank]]:
    """Start a program of Python on so many ranks, with the arguments RANK, PORT and those given, in the environment and working
    directory of this process; what still runs at the end is killed."""
    ranks, port = list[Rank](), free_port()
    with tempfile.TemporaryDirectory() as name:
        for rank in range(size):
            folder = Path(name) / str(rank)
            folder.mkdir()
            words = [str(argument) for argument in (rank, port, *arguments)]
            process = SERVER.Process(target=_run, args=(program, words, dict(os.environ), Path.cwd(), folder))
            process.start()
            ranks.append(Rank(process, folder))
        try:
            yield ranks
        finally:
            for one in ranks:
                one.process.kill()
                one.process.join()


def run_gang(program: str, size: int, *arguments: object) -> list[str]:
    """Run a program on so many ranks to their end, which must be a success; return the standard output of each."""
    with gang(program, size, *arguments) as ranks:
        codes = [rank.wait() for rank in ranks]
        assert codes == [0] * size, "\n".join(rank.complaint for rank in ranks)
        return [rank.said for rank in ranks]


def on_xla(program: str, *arguments: object) -> dict[str, Any]:
    """Run a program in a process of its own, as torch-xla takes over the one that loads it; return the JSON object of its last
    line."""
    with pytest.MonkeyPatch.context() as patch:
        # Unoptimized code compiles in half the time, and the graphs are the same.
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
        [said] = run_gang(program, 1, *arguments)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _run(program: str, arguments: list[str], environment: Mapping[str, str], directory: Path, folder: Path) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for name, number in (("out", 1), ("err", 2)):
        with (folder / name).open("w") as stream:
            os.dup2(stream.fileno(), number)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<rank>", "exec"), {"__name__": "__main__"})
