"""Supervisors as real processes on this host, in Batch's environment: fixtures of all tests below this folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract import RunPaths, Stage
from pipeline.ports import free_port
from pipeline.run_inputs import PlannedWorld

PROGRAM = """
import sys
from pipeline.contract import Stage
from pipeline.host.supervisor import run
sys.exit(run(Stage(sys.argv[1]), sys.argv[2]))
"""
SCRIPTED_STAGE = """
import logging, os, signal, sys, time

def run(context):
    rank = context.world.rank
    context.heartbeat.beat(note="working")
    exec(os.environ["TRNPIPE_TEST_RANK"])
"""
"""A stage that runs what the test says, without loading a framework; `rank` and `context` are there."""

QUICK = {"health_check": {"matmul_size": 64, "memory_mib": 8, "collective_bytes": [4096], "storage_mib": 1}}
FAST = {"TRNPIPE_PUBLISH_SECONDS": "0.2", "TRNPIPE_SETTLE_SECONDS": "2", "TRNPIPE_PEER_GRACE_SECONDS": "2"}


class Node:
    """One supervisor process and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self, seconds: float = 300) -> int:
        """The exit code; the log is shown if there is none in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.log}")

    def rank_process(self, seconds: float = 120) -> int:
        """Process id of the node's first rank, once it is started."""
        self.wait_until(lambda: "is process" in self.log, seconds)
        found = re.search(r"rank \d+ is process (\d+)", self.log)
        assert found
        return int(found.group(1))

    def wait_until(self, condition: Callable[[], object], seconds: float = 300) -> None:
        """Wait for something that this node brings about; its log is shown if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"did not happen within {seconds} s:\n{self.log}")
            time.sleep(0.05)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """A function that starts the supervisor of one node of a job as Batch would."""
    port = free_port()
    started: list[Node] = []

    def supervise(stage: Stage, run: str, *, node: int = 0, nodes: int = 1, job: str = "job-1", **extra: str) -> Node:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_BATCH", "TRNPIPE"))}
        environment |= {"OMP_NUM_THREADS": "1", "TRNPIPE_LEADER_PORT": str(port), "AWS_BATCH_JOB_ID": job, **FAST}
        if nodes > 1:
            environment |= {
                "AWS_BATCH_JOB_ID": f"{job}#{node}",
                "AWS_BATCH_JOB_NUM_NODES": str(nodes),
                "AWS_BATCH_JOB_NODE_INDEX": str(node),
                "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            }
        if node > 0:
            environment["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
        log = tmp_path / f"log-{len(started)}.txt"
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, stage.value, run], env=environment | extra, stdout=stream, stderr=stream
            )
        started.append(Node(process, log))
        return started[-1]

    yield supervise
    for node in started:
        if node.process.poll() is None:
            node.process.send_signal(signal.SIGKILL)
            node.process.wait()


@pytest.fixture
def planned_ranks(plan_run: Callable[..., Any]) -> Callable[..., RunPaths]:
    """A function that plans a run on some ranks and returns the run folder's paths."""

    def planned_ranks(nodes: int = 1, ranks_per_node: int = 2, kind: str = "cpu") -> RunPaths:
        run = plan_run(settings=QUICK)
        run.replan(world=PlannedWorld(kind=kind, precision="fp32", nodes=nodes, ranks_per_node=ranks_per_node))
        return run.paths  # type: ignore[no-any-return]

    return planned_ranks


@pytest.fixture
def scripted_stage(tmp_path: Path) -> dict[str, str]:
    """Variables with which a rank of `health_check`, `evaluate` or `embed` runs the code in TRNPIPE_TEST_RANK instead."""
    folder = tmp_path / "scripted"
    folder.mkdir()
    # Loaded when an interpreter starts, so that it comes before the real stage.
    (folder / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('pipeline.stages.health_check', 'pipeline.stages.evaluate', 'pipeline.stages.embed'):\n"
        f"            return importlib.util.spec_from_file_location(name, {str(folder / 'stage.py')!r})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (folder / "stage.py").write_text(SCRIPTED_STAGE)
    return {"PYTHONPATH": str(folder)}
