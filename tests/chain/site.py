"""Where chaos runs take place: one local endpoint for many executions one after another, at one of two depths.

`orchestration` runs the pipeline without its mathematics (tests/chain/light), `real` the real stages with a tiny model. All that
a run leaves outside its state folder carries its name: the folder for temporary files, and MARKER in the environment of its
processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import state_task_service_callback as callback_module

from infra.local.batch_jobs import Job
from infra.local.batch_nodes import THIS_INSTALLATION, BatchSettings
from infra.local.run import DEPLOYMENT_CONFIG
from infra.local.server import LocalEndpoint, local_endpoint
from infra.local.template import LocalStack, local_context, read_stack, synthesize
from pipeline.contract import RunPaths
from tests.chain.front import OF_JOBS, Front
from tests.chain.nursery import Nursery
from tests.infra.faulty_batch import FaultyBatchRunner

REPOSITORY = Path(__file__).parents[2]
MARKER = "TRNPIPE_CHAOS_RUN"
ENGINE_POLL_SECONDS = 0.1
LOOK_SECONDS = 0.25
GRACE = timedelta(seconds=8)
"""Between SIGTERM and SIGKILL of a node: longer than the supervisor's own, as in Batch."""

DEADLINES = {
    "STARTUP": 30,
    "PROGRESS": 10,
    "PUBLISH": 1,
    "PEER_GRACE": 1,
    "UPLOAD": 5,
    "STOP": 5,
    "STALE": 8,
    "PEER_START": 20,
    "SETTLE": 5,
    "OUTLIVE": 30,
}
"""The supervisor's waits in seconds, all shorter than usual by about the same factor, yet safe on a busy machine."""

BAD_ROWS = ('{"id": "no-document", "query": "a"}', "not json", '["a", "list"]', '{"id": "", "query": "a", "document": "b"}')
WORDS = [first + second for first in ("ba", "ke", "li", "mo", "nu") for second in ("ra", "se", "ti", "vo", "zu")]


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How deep executions go.

    Attributes:
        program: what stands for `trnpipe`.
        settings: of the run's configuration.
        rows: good rows of the data.
        limit_seconds: an execution that takes longer has failed.
        deadlines: as DEADLINES.
    """

    name: str
    program: tuple[str, ...]
    settings: Mapping[str, Any]
    rows: int
    limit_seconds: float
    deadlines: Mapping[str, float]


COMMON = {"nodes": 2, "device": {"kind": "cpu", "precision": "fp32"}, "gate": {"undecided": "accept"}}
ORCHESTRATION = Depth(
    name="orchestration",
    program=(sys.executable, "-m", "tests.chain.light.program"),
    settings={
        **COMMON,
        "train": {"batch_size": 4, "query_length": 8, "length": 32, "epochs": 3, "checkpoint_every": 4},
        "embed": {"children": 2, "rows_per_part": 10, "length": 32},
    },
    rows=80,
    limit_seconds=180,
    deadlines=DEADLINES,
)
REAL = Depth(
    name="real",
    program=THIS_INSTALLATION,
    settings={
        **COMMON,
        "model": {"head": {"hidden": 16}},
        "train": {
            "batch_size": 8,
            "query_length": 8,
            "length": 32,
            "epochs": 3,
            "learning_rate": 2e-3,
            "log_every": 2,
            "checkpoint_every": 5,
            "validate_every": 10,
        },
        "evaluate": {"bootstrap_samples": 100},
        "embed": {"children": 2, "rows_per_part": 60, "length": 32, "tokens_per_batch": 512},
        "health_check": {"matmul_size": 48, "memory_mib": 4, "collective_bytes": [4096], "storage_mib": 1},
    },
    rows=240,
    limit_seconds=600,
    deadlines={**DEADLINES, "STARTUP": 120, "PROGRESS": 40, "STALE": 12, "PEER_START": 90, "OUTLIVE": 60},
)
DEPTHS = {depth.name: depth for depth in (ORCHESTRATION, REAL)}


@dataclass(frozen=True)
class Data:
    """What the runs train on and embed: one shard, with bad rows among the good ones.

    Attributes:
        ids: of the good rows.
        bad: lines of the bad rows, from 1.
    """

    text: str
    ids: tuple[str, ...]
    bad: tuple[int, ...]

    @classmethod
    def make(cls, rows: int) -> Data:
        lines, ids, bad = [], [], []
        for index in range(rows):
            if index % (rows // len(BAD_ROWS)) == 5:
                lines.append(BAD_ROWS[len(bad)])
                bad.append(len(lines))
            words = [WORDS[(index * 7 + place * place) % len(WORDS)] for place in range(3 + index % 9)]
            ids.append(f"row-{index:05d}")
            row = {"id": ids[-1], "query": " ".join(words[-2:]), "document": " ".join([*words, f"{WORDS[index % 25]}{index}"])}
            lines.append(json.dumps(row))
        return cls("".join(f"{line}\n" for line in lines), tuple(ids), tuple(bad))


@dataclass
class Execution:
    """One execution that was started here.

    Attributes:
        run: id of the run that it carries out.
        arn: its own.
        ended: DescribeExecution's last answer, once it is over.
    """

    run: str
    arn: str
    registry: str
    started: float = field(default_factory=time.monotonic)
    ended: dict[str, Any] | None = None


class Site:
    """An endpoint that is up, and the data in its bucket; use `open_site`."""

    def __init__(self, depth: Depth, folder: Path, stack: LocalStack, endpoint: LocalEndpoint, front: Front) -> None:
        self.depth = depth
        self.folder = folder
        self.stack = stack
        self.endpoint = endpoint
        self.front = front
        self.data = Data.make(depth.rows)
        self.s3 = endpoint.client("s3")
        self.machine = endpoint.client("stepfunctions")
        self.table = endpoint.client("dynamodb")

    @property
    def runner(self) -> FaultyBatchRunner:
        return self.endpoint.batch

    @property
    def shard(self) -> str:
        return f"s3://{self.stack.bucket}/data/shard.jsonl"

    @property
    def parent(self) -> str:
        return f"s3://{self.stack.bucket}/models/parent"

    def paths(self, run: str) -> RunPaths:
        return RunPaths(f"s3://{self.stack.bucket}/runs/{run}")

    def file(self, uri: str) -> Path:
        """Where an object stands as a file."""
        return self.endpoint.mirror_folder / uri.removeprefix(f"s3://{self.stack.bucket}/")

    def put(self, uri: str, data: bytes) -> None:
        self.s3.put_object(Bucket=self.stack.bucket, Key=uri.removeprefix(f"s3://{self.stack.bucket}/"), Body=data)

    def remove(self, uri: str) -> None:
        self.s3.delete_object(Bucket=self.stack.bucket, Key=uri.removeprefix(f"s3://{self.stack.bucket}/"))

    def start(self, name: str, registry: str, *, run: str | None = None, shard: str | None = None) -> Execution:
        """Start an execution.

        Args:
            run: id of an earlier run to take up.
            shard: another one than the site's.
        """
        settings = dict(self.depth.settings)
        settings["model"] = {**settings.get("model", {}), "parent": self.parent}
        settings["data"] = {"train": [shard or self.shard], "holdout_fraction": 0.2, "max_bad_fraction": 0.2}
        return self.begin(name, {**settings, "registry": registry, **({"run": run} if run else {})}, registry)

    def begin(self, name: str, execution_input: Mapping[str, Any], registry: str) -> Execution:
        """Start an execution with exactly this input."""
        answer = self.machine.start_execution(
            stateMachineArn=self.stack.state_machine_arn, name=name, input=json.dumps(execution_input)
        )
        return Execution(str(execution_input.get("run", name)), answer["executionArn"], registry)

    def look(self, execution: Execution) -> bool:
        """Whether it is over."""
        if execution.ended is None:
            described = self.machine.describe_execution(executionArn=execution.arn)
            if described["status"] != "RUNNING":
                execution.ended = described
        return execution.ended is not None

    def stop(self, execution: Execution) -> None:
        self.machine.stop_execution(executionArn=execution.arn, cause="chaos")

    def finish(self, execution: Execution, seconds: float) -> bool:
        """Wait for its end; whether it came in time."""
        deadline = time.monotonic() + seconds
        while not self.look(execution):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def jobs(self, run: str) -> list[Job]:
        """The run's jobs in the order of submission."""
        return [job for job in self.runner.jobs() if job.name.partition("-")[2] == run]

    def lock_item(self, registry: str) -> dict[str, Any] | None:
        key = {"name": {"S": f"{registry}/train"}}
        item: dict[str, Any] | None = self.table.get_item(TableName=self.stack.table["TableName"], Key=key).get("Item")
        return item

    def forget(self, run: str, registry: str) -> None:
        """Remove a run from the bucket."""
        for prefix in (f"runs/{run}/", f"seen/{run}/"):
            pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.stack.bucket, Prefix=prefix)
            for item in [item for page in pages for item in page.get("Contents", ())]:
                self.s3.delete_object(Bucket=self.stack.bucket, Key=item["Key"])
        self.s3.delete_object(Bucket=self.stack.bucket, Key=f"registry/{registry}.json")


@contextmanager
def open_site(depth: Depth, folder: Path, templates: Path, context: Mapping[str, Any] | None = None) -> Iterator[Site]:
    """A site in an empty folder.

    Args:
        templates: where the synthesized app is kept.
        context: CDK context of the deployment; None: that of local runs.
    """
    stack = read_stack(synthesize(templates, context or local_context((1, 2), DEPLOYMENT_CONFIG)))
    front = Front()

    def runner(environment: dict[str, str]) -> FaultyBatchRunner:
        settings = BatchSettings(
            logs=folder / "logs",
            environment=environment | OF_JOBS,
            program=depth.program,
            grace=GRACE,
            start=nursery.start,
        )
        return FaultyBatchRunner(stack.job_definitions, stack.queues, settings)

    with ExitStack() as undo:
        variables = {f"TRNPIPE_{name}_SECONDS": str(seconds) for name, seconds in depth.deadlines.items()}
        variables |= {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": ""}
        undo.enter_context(mock.patch.dict(os.environ, variables))
        undo.enter_context(_quick_engine())
        nursery = Nursery(light=depth is ORCHESTRATION)
        undo.callback(nursery.close)
        endpoint = undo.enter_context(local_endpoint(stack, folder / "state", runner, front))
        boto3.DEFAULT_SESSION = None
        site = Site(depth, folder, stack, endpoint, front)
        site.put(site.shard, site.data.text.encode())
        for path, content in parent_files(depth, folder):
            site.put(f"{site.parent}/{path}", content)
        yield site


def parent_files(depth: Depth, folder: Path) -> list[tuple[str, bytes]]:
    if depth is ORCHESTRATION:
        return [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", bytes(range(256)) * 64)]
    from tests.tiny import make_model

    make_model(folder / "parent")
    return [
        (path.relative_to(folder / "parent").as_posix(), path.read_bytes())
        for path in sorted((folder / "parent").rglob("*"))
        if path.is_file()
    ]


@contextmanager
def _quick_engine() -> Iterator[None]:
    """The engine looks at jobs more often: less of a run's time is its own."""
    name = "_DELAY_SECONDS_SYNC_CONDITION_CHECK"
    seconds = getattr(callback_module, name)
    setattr(callback_module, name, ENGINE_POLL_SECONDS)
    try:
        yield
    finally:
        setattr(callback_module, name, seconds)


@contextmanager
def marked(site: Site, run: str) -> Iterator[Path]:
    """Within it every process and every temporary file carries the run's name; the folder of the latter."""
    folder = site.folder / "tmp" / run
    folder.mkdir(parents=True)
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    os.environ[MARKER] = run
    try:
        yield folder
    finally:
        tempfile.tempdir = before
        del os.environ[MARKER]


def processes(run: str) -> list[int]:
    """Every process that carries the run's name in its environment or works in one of its folders; zombies are none."""
    wanted, found = f"{MARKER}={run}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes() + b"\0" or f"/tmp/{run}/" in str((path / "cwd").readlink()):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def family(root: int) -> list[int]:
    """A process and all its descendants, generation by generation."""
    return [pid for generation in generations(root) for pid in generation]


def generations(root: int) -> list[list[int]]:
    """A process, its children, their children and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [[root]]
    while found[-1]:
        found.append([child for pid in found[-1] for child in children.get(pid, [])])
    return found[:-1]


def running(pids: list[int]) -> list[int]:
    """Those that have not ended; zombies have."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
