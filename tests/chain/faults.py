"""The faults of chaos runs: what happens, to whom and when, drawn from the run's seed; and what must come of it.

A fault acts in a thread of its own beside the execution, through the runner, the front of the endpoint, or signals: what the
stages run knows nothing of it. Moments are shares of the time that a stage took in the faultless run, so that every part of a
stage is met: the start of its processes, its work and its end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from infra.local.batch_jobs import Job, Node
from pipeline.contract import EXECUTION_TAG, Stage, registry_uri
from pipeline.dataset.ingested import DOCUMENTS, ingested_rows_uri
from tests.chain import front
from tests.chain.site import Execution, Site, family, generations, running, send, wait_until

STAGES = (
    Stage.PREPARE,
    Stage.INGEST,
    Stage.PLAN,
    Stage.HEALTH_CHECK,
    Stage.TRAIN,
    Stage.EVALUATE,
    Stage.EMBED,
    Stage.PUBLISH,
    Stage.REPORT,
)
GANGS = (Stage.HEALTH_CHECK, Stage.TRAIN)
WEIGHTS = {Stage.TRAIN: 4, Stage.INGEST: 3, Stage.EMBED: 3, Stage.PLAN: 2, Stage.HEALTH_CHECK: 2}
WATCH_SECONDS = 0.02
CLEAN_UP_SECONDS = 60.0
"""For everything that an aborted execution has started."""
TAKE_OVER_SECONDS = 15.0
"""For the lock of an aborted execution: a few calls of services, none of which waits."""


@dataclass
class Scene:
    """The execution that a fault acts on, and what it did.

    Attributes:
        durations: seconds of every stage in the faultless run.
        over: set when the execution has ended.
        hits: what was done, in words, one entry per deed.
        struck: monotonic seconds of the first deed.
        broken: what must hold and did not, of what only the fault can see.
    """

    site: Site
    execution: Execution
    folder: Path
    durations: Mapping[str, float]
    over: threading.Event = field(default_factory=threading.Event)
    hits: list[str] = field(default_factory=list)
    struck: float | None = None
    broken: list[str] = field(default_factory=list)

    @property
    def run(self) -> str:
        return self.execution.run

    def strike(self, what: str) -> None:
        self.struck = self.struck or time.monotonic()
        self.hits.append(what)

    def wait(self, condition: Callable[[], object]) -> bool:
        """Until it holds; False when the execution ended before."""
        while not self.over.is_set():
            if condition():
                return True
            time.sleep(WATCH_SECONDS)
        return bool(condition())

    def job(self, stage: Stage, nodes: int = 1) -> Job | None:
        """The stage's newest job, with so many nodes running at least (of one child in an array)."""
        for job in reversed(self.site.jobs(self.run)):
            if job.name.startswith(f"{stage}-"):
                return next((one for one in job.children or [job] if len(one.nodes) >= nodes), None)
        return None

    def moment(self, stages: Iterable[Stage], share: float, nodes: int = 1) -> Job | None:
        """Wait for a moment in the first of the stages that is still running then; its job, None when there is none left."""
        for stage in stages:
            if not self.wait(lambda stage=stage: self.job(stage, nodes) or self.past(stage)):  # type: ignore[misc]
                return None
            if self.job(stage, nodes) is None:
                continue
            self.over.wait(share * self.durations.get(stage.value, 1.0))
            if found := self.job(stage, nodes):
                return found
            # Stages take less time today than without the fault: be sooner in the next one.
            share /= 2
        return None

    def past(self, stage: Stage) -> bool:
        """Whether the stage is over, or has been skipped."""
        jobs = [job for job in self.site.jobs(self.run) if job.name.startswith(f"{stage}-")]
        later = STAGES[STAGES.index(stage) + 1 :]
        return any(job.status == "SUCCEEDED" for job in jobs) or any(
            job.name.startswith(f"{other}-") for job in self.site.jobs(self.run) for other in later
        )


def supervisor(node: Node) -> list[int]:
    return [pid for generation in generations(node.process.pid)[1:2] for pid in generation]


def ranks(node: Node) -> list[int]:
    return [pid for generation in generations(node.process.pid)[2:3] for pid in generation]


class Fault(ABC):
    """One fault of one run.

    Args:
        draw: gives everything that is random about it.

    Attributes:
        kind: its name in the table.
        retryable: whether the run must succeed all the same.
        code, words: else, the exit code that it must end with, and words of its reason.
    """

    kind: ClassVar[str]
    retryable: ClassVar[bool] = True
    code: ClassVar[int] = 0
    words: ClassVar[str] = ""
    stages: ClassVar[tuple[Stage, ...]] = STAGES
    latest: ClassVar[float] = 0.95

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        first = draw.choices(self.stages, [WEIGHTS.get(stage, 1) for stage in self.stages])[0]
        self.share = draw.uniform(0, self.latest)
        # Where the stage has ended a little sooner than it did without a fault, the next one is met.
        self.order = self.stages[self.stages.index(first) :]

    @property
    def plan(self) -> str:
        return f"{self.order[0]} at {self.share:.2f}"

    @contextmanager
    def around(self, site: Site, folder: Path) -> Iterator[None]:
        """What has to stand before the execution starts, and to go when it has ended."""
        yield

    @abstractmethod
    def act(self, scene: Scene) -> None:
        """Do it. In a thread beside the execution; returns when done or when the execution is over."""

    def shard(self, site: Site) -> str:
        """A training shard of the run's own: of the site's nothing is left to ingest."""
        self._uri = f"s3://{site.stack.bucket}/data/own/{self.draw.randrange(1 << 30)}.jsonl"
        site.put(self._uri, site.data.text.encode())
        return self._uri


# ---- processes, nodes, hosts -----------------------------------------------------------------------------------------


class NodeFault(Fault):
    """Something happens to one node of a running job; where the node has ended meanwhile, to one of the next job."""

    nodes: ClassVar[int] = 1
    """Nodes that must be running."""

    def act(self, scene: Scene) -> None:
        stages = self.order
        while job := scene.moment(stages, self.share, self.nodes):
            with suppress(IndexError):  # the job has ended since
                node = self.choose(job)
                if done := self.happen(scene, job, node):
                    scene.strike(f"{done} of {job.name}, node {node.index}")
                    return
            stages = stages[1 + [stage.value for stage in stages].index(job.name.partition("-")[0]) :]

    def choose(self, job: Job) -> Node:
        return self.draw.choice(list(job.nodes))

    @abstractmethod
    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        """Do it; what was done, in words, empty if there was nothing to do it to."""


class KillRank(NodeFault):
    """A rank is killed; a supervisor that has none yet is."""

    kind = "kill-rank"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        found = ranks(node) or supervisor(node)
        send(found[:1], signal.SIGKILL)
        return "SIGKILL to a rank" if found else ""


class KillSupervisor(NodeFault):
    """A node's supervisor is killed; its ranks must go with it."""

    kind = "kill-supervisor"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        found = supervisor(node)
        send(found, signal.SIGKILL)
        return "SIGKILL to the supervisor" if found else ""


class KillNode(NodeFault):
    """Everything on one node is killed at once, as an out-of-memory kill does."""

    kind = "kill-node"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        scene.site.runner.kill_node(job.id, node.index)
        return "SIGKILL to everything"


class SilentChild(KillNode):
    """A node of a gang that is not the main one is gone without a word: Batch says nothing, its peers have to notice."""

    kind = "silent-child"
    stages = GANGS
    nodes = 2

    def choose(self, job: Job) -> Node:
        return [node for node in job.nodes if node.index == 1][0]  # noqa: RUF015 - the error of none is meant


class LoseHost(NodeFault):
    """A host goes away for good, with everything on it."""

    kind = "lose-host"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        scene.site.runner.lose_host(node.host)
        return f"loss of host {node.host}"


class HangRank(NodeFault):
    """A rank stands still and never goes on."""

    kind = "hang-rank"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        if not scene.wait(lambda: ranks(node) or node.process.poll() is not None):
            return ""
        found = ranks(node)
        send(found[:1], signal.SIGSTOP)
        return "SIGSTOP to a rank" if found else ""


class HangNode(SilentChild):
    """Everything on a gang's second node stands still and never goes on."""

    kind = "hang-node"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        send(family(node.process.pid), signal.SIGSTOP)
        return "SIGSTOP to everything"


class SlowNode(NodeFault):
    """A node gets a fifth of its time for a while; nothing may fail."""

    kind = "slow-node"

    def happen(self, scene: Scene, job: Job, node: Node) -> str:
        seconds = self.draw.uniform(2, 5)
        until = time.monotonic() + seconds
        while time.monotonic() < until and node.process.poll() is None:
            pids = family(node.process.pid)
            send(pids, signal.SIGSTOP)
            time.sleep(0.2)
            send(pids, signal.SIGCONT)
            time.sleep(0.05)
        return "SIGSTOP and SIGCONT in turns to everything"


HOOK_SICK = {
    "orchestration": """
from tests.chain.light.exchange import Exchange as Sums
""",
    "real": """
from pipeline.backends.eager import EagerDevice as Sums
""",
}
HOOK_SPOIL = """
healthy = Sums.all_reduce
def spoilt(self, value):
    result = healthy(self, value)
    result[3] += 1
    return result
Sums.all_reduce = spoilt
"""
"""What a broken link does: one element of every sum is wrong."""

HOOK_CLOCK = """
import datetime, os, time
path, shift = os.environ["CHAOS_CLOCK"], float(os.environ["CHAOS_SHIFT"])
real_time, real_time_ns, real_datetime = time.time, time.time_ns, datetime.datetime
offset = lambda: shift if os.path.exists(path) else 0.0
class shifted(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.now(tz) + datetime.timedelta(seconds=offset())
    @classmethod
    def utcnow(cls):
        return real_datetime.utcnow() + datetime.timedelta(seconds=offset())
time.time = lambda: real_time() + offset()
time.time_ns = lambda: real_time_ns() + int(offset() * 1e9)
datetime.datetime = shifted
"""


def write_hook(folder: Path, text: str) -> str:
    """PYTHONPATH under which every Python process of a host runs the text first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])


@contextmanager
def hosts_with(site: Site, environment: Mapping[str, str], wanted: Callable[[list[str]], list[str]]) -> Iterator[list[str]]:
    """Some of the hosts that the next jobs will run on have another environment."""
    free = list(site.runner.hosts.take(2))
    site.runner.hosts.give_back(free)
    chosen = wanted(free)
    site.runner.hosts.environment |= {host: dict(environment) for host in chosen}
    try:
        yield chosen
    finally:
        for host in chosen:
            site.runner.hosts.environment.pop(host, None)


class SickHost(Fault):
    """A host whose sums are wrong, until it takes itself out."""

    kind = "sick-host"

    @contextmanager
    def around(self, site: Site, folder: Path) -> Iterator[None]:
        path = write_hook(folder / "hook", HOOK_SICK[site.depth.name] + HOOK_SPOIL)
        with hosts_with(site, {"PYTHONPATH": path}, lambda free: [self.draw.choice(free)]) as self._sick:
            yield

    def act(self, scene: Scene) -> None:
        scene.strike(f"host {self._sick[0]} is sick")
        scene.over.wait()
        if self._sick[0] not in scene.site.runner.hosts.drained:
            scene.broken.append("the sick host was not taken out")


class ClockJump(Fault):
    """Hosts whose clock jumps by up to a day, either way, while they work."""

    kind = "clock-jump"

    @contextmanager
    def around(self, site: Site, folder: Path) -> Iterator[None]:
        self._clock = folder / "clock-has-jumped"
        shift = self.draw.choice([-1, 1]) * self.draw.choice([30, 900, 3600, 86_400])
        environment = {
            "PYTHONPATH": write_hook(folder / "hook", HOOK_CLOCK),
            "CHAOS_CLOCK": str(self._clock),
            "CHAOS_SHIFT": str(shift),
        }
        chosen = self.draw.choice([slice(0, 1), slice(1, 2), slice(0, 2)])
        with hosts_with(site, environment, lambda free: free[chosen]) as hosts:
            self._what = f"the clock of {', '.join(hosts)} jumps by {shift} s"
            yield

    def act(self, scene: Scene) -> None:
        if job := scene.moment(self.order, self.share):
            self._clock.touch()
            scene.strike(f"{self._what} during {job.name}")


class FullDisk(Fault):
    """The disk for temporary files is full from some moment on, until the attempt that met it has ended."""

    kind = "full-disk"
    SIZE = 48 << 20

    @contextmanager
    def around(self, site: Site, folder: Path) -> Iterator[None]:
        self._disk = folder / "disk"
        self._disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE}", "tmpfs", str(self._disk)]
        subprocess.run(mount, check=True, capture_output=True)
        try:
            with hosts_with(site, {"TMPDIR": str(self._disk)}, lambda free: free):
                yield
        finally:
            subprocess.run(["umount", "-l", str(self._disk)], check=True)

    def act(self, scene: Scene) -> None:
        job = scene.moment(self.order, self.share)
        if job is None:
            return
        attempts = len(job.attempts)
        filler = self._disk / "filler"
        with filler.open("wb", buffering=0) as stream, suppress(OSError):
            while stream.write(bytes(1 << 16)):
                pass
        scene.strike(f"disk full during {job.name}")
        until = time.monotonic() + 15
        while time.monotonic() < until and len(job.attempts) == attempts and not job.done.is_set():
            time.sleep(WATCH_SECONDS)
        filler.unlink()

    @staticmethod
    def possible() -> bool:
        """Whether file systems can be mounted here."""
        return os.geteuid() == 0


# ---- storage and services --------------------------------------------------------------------------------------------


class StorageTrouble(Fault):
    """For a while a share of all requests to the storage goes wrong, in one of the ways they do."""

    kind = "storage"

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.mode = draw.choice(front.STORAGE_MODES)
        self.part = draw.choice([0.2, 0.5, 1.0]) if self.mode != "stall" else 0.3
        self.seconds = draw.uniform(0.5, 4)

    @property
    def plan(self) -> str:
        return f"{super().plan}: {self.mode}, {self.part:.0%} for {self.seconds:.1f} s"

    def act(self, scene: Scene) -> None:
        job = scene.moment(self.order, self.share)
        if job is None:
            return
        counted = front.Counted()
        scene.strike(f"{self.mode} during {job.name}")
        scene.site.front.disturb(front.storage_trouble(self.mode, self.part, self.draw, counted))
        scene.over.wait(self.seconds)
        scene.site.front.disturb(None)
        scene.hits.append(f"{counted.times} requests")


class Denied(Fault):
    """From some moment on jobs may no longer do what a stage needs; nothing can help but a person."""

    kind = "access-denied"
    retryable = False
    code = 66
    words = "access"
    stages = (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.TRAIN, Stage.EVALUATE, Stage.EMBED, Stage.PUBLISH)
    latest = 0.5
    NEEDED: ClassVar[dict[Stage, tuple[str, str]]] = {
        Stage.PREPARE: ("PUT", "/prepare/"),
        Stage.INGEST: ("PUT", "/ingested/"),
        Stage.PLAN: ("PUT", "/plan/"),
        Stage.TRAIN: ("PUT", "/train/checkpoints/"),
        Stage.EVALUATE: ("GET", "/plan/rows/"),
        Stage.EMBED: ("PUT", "/embed/part-"),
        Stage.PUBLISH: ("GET", "/embed/part-"),
    }

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.order = self.order[:1]

    def act(self, scene: Scene) -> None:
        method, part = self.NEEDED[self.order[0]]
        if not scene.wait(lambda: scene.job(self.order[0])):
            return
        counted = front.Counted()

        def wanted(request: front.Request) -> bool:
            # The words of the failure itself can still be written, as under a policy that names what it denies.
            words = request.path.endswith(("/failure.json", "/result.json")) or "/exits/" in request.path
            return request.method == method and part in request.path and not words and "progress-" not in request.path

        scene.site.front.disturb(front.denied(wanted, counted))
        scene.over.wait()
        if counted.first is not None:
            scene.strike(f"{method} of {part} denied during {self.order[0]}, {counted.times} requests")
            scene.struck = counted.first


class BatchTrouble(Fault):
    """Batch answers calls of the state machine with errors of its own."""

    kind = "batch-errors"

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.operation = draw.choice(["submitjob", "submitjob", "describejobs"])
        self.times = draw.randint(1, 3)

    def act(self, scene: Scene) -> None:
        def wanted(request: front.Request) -> bool:
            return request.service == "batch" and request.path.endswith(self.operation) and not request.of_job

        if self.operation == "describejobs":
            if scene.moment(self.order, self.share) is None:
                return
        elif self.order[0] != Stage.PREPARE:
            before = STAGES[STAGES.index(self.order[0]) - 1]
            scene.wait(lambda: scene.job(before) or scene.past(before))
        counted = front.Counted()
        trouble = front.service_trouble(wanted, "500 Internal Server Error", "ServerException", self.times, counted)
        scene.site.front.disturb(trouble)
        scene.wait(lambda: counted.times >= self.times)
        if counted.times:
            scene.strike(f"{counted.times} ServerException on {self.operation} before {self.order[0]}")


class LockTrouble(Fault):
    """DynamoDB throttles or fails the calls for the lock."""

    kind = "lock-errors"
    stages = (Stage.PREPARE, Stage.REPORT)
    ERRORS = (
        ("400 Bad Request", "ProvisionedThroughputExceededException"),
        ("400 Bad Request", "ThrottlingException"),
        ("500 Internal Server Error", "InternalServerError"),
    )

    def act(self, scene: Scene) -> None:
        status, code = self.draw.choice(self.ERRORS)
        times = self.draw.randint(1, 3)
        if self.order[0] == Stage.REPORT and not scene.wait(lambda: scene.job(Stage.REPORT)):
            return
        counted = front.Counted()
        wanted = lambda request: request.service == "dynamodb"  # noqa: E731
        scene.site.front.disturb(front.service_trouble(wanted, status, code, times, counted))
        scene.wait(lambda: counted.times >= times)
        if counted.times:
            scene.strike(f"{counted.times} {code}")


# ---- what is stored --------------------------------------------------------------------------------------------------


class TornCheckpoint(Fault):
    """Training is killed, and its newest checkpoint is not what its manifest says."""

    kind = "torn-checkpoint"
    stages = (Stage.TRAIN,)
    everything = False

    def act(self, scene: Scene) -> None:
        site, paths = scene.site, scene.site.paths(scene.run)
        folder = site.file(paths.checkpoints)
        whole = lambda: sorted(folder.glob("step-*/manifest.json"))  # noqa: E731
        # One that is whole must be left, where training is to go on from it.
        needed = 1 if self.everything else 2
        if not scene.wait(lambda: (scene.job(Stage.TRAIN, 2) and len(whole()) >= needed) or scene.past(Stage.TRAIN)):
            return
        scene.over.wait(self.share * scene.durations["train"] / 4)
        job = scene.job(Stage.TRAIN, 2)
        if job is None:
            return
        # Nothing is written any more while the checkpoints are torn.
        pids = [pid for node in job.nodes for pid in family(node.process.pid)]
        send(pids, signal.SIGSTOP)
        time.sleep(0.2)
        torn = [self._tear(site, manifest) for manifest in (whole() if self.everything else whole()[-1:])]
        site.runner.kill_node(job.id, 0)
        scene.strike(f"SIGKILL to train, torn: {'; '.join(torn)}")

    def _tear(self, site: Site, manifest: Path) -> str:
        root = site.endpoint.mirror_folder
        way = self.draw.choice(["cut", "changed", "gone"] if self.everything else ["cut", "changed", "gone", "manifest gone"])
        name = self.draw.choice(sorted(json.loads(manifest.read_text())["files"]))
        path = manifest if way == "manifest gone" else manifest.parent / name
        uri = f"s3://{site.stack.bucket}/{path.relative_to(root).as_posix()}"
        data = path.read_bytes() if path.is_file() else b""
        if way == "cut" and data:
            site.put(uri, data[: self.draw.randrange(len(data))])
        elif way == "changed" and data:
            place = self.draw.randrange(len(data))
            site.put(uri, data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        else:
            site.remove(uri)
        return f"{path.parent.name}/{path.name} {way}"


class AllTorn(TornCheckpoint):
    """The same with every checkpoint: nothing to resume from, and only an operator may decide to begin again."""

    kind = "all-checkpoints-torn"
    retryable = False
    code = 66
    words = "none of the run's checkpoints can be used"
    everything = True


class ShardGone(Fault):
    """The shard of the documents is removed once it is ingested: nothing reads it again, and they are embedded all the same."""

    kind = "shard-gone"
    stages = STAGES[STAGES.index(Stage.PLAN) : -1]

    def act(self, scene: Scene) -> None:
        if scene.moment(self.order, self.share):
            self.spoil(scene.site)
            scene.strike(f"{self._uri}: {self.kind}")

    def spoil(self, site: Site) -> None:
        site.remove(self._uri)


class ShardChanged(ShardGone):
    """The same shard is written again, in another order: the run ingests that, and embeds the same documents."""

    kind = "shard-changed"

    def spoil(self, site: Site) -> None:
        site.put(self._uri, "".join(reversed(site.data.text.splitlines(keepends=True))).encode())


class IngestedGone(Fault):
    """A file of an ingested shard is removed before it is embedded: prepare comes again first, and has it ingested anew."""

    kind = "ingested-gone"
    stages = (Stage.EVALUATE,)

    def act(self, scene: Scene) -> None:
        if scene.moment(self.order, self.share):
            site = scene.site
            shards = json.loads(site.file(site.paths(scene.run).inputs).read_text())["shards"]
            [name] = [shard["rows"] for shard in shards if shard["kind"] == DOCUMENTS]
            site.remove(f"{ingested_rows_uri(f's3://{site.stack.bucket}', name)}/facts-00000.arrow")
            if scene.wait(lambda: scene.job(Stage.EMBED)):
                scene.strike(f"facts of {name} are gone")


class Superseded(Fault):
    """Another run publishes under the name while the run works."""

    kind = "superseded"
    retryable = False
    code = 68
    words = "published first"
    stages = (Stage.TRAIN, Stage.EVALUATE, Stage.EMBED)

    def act(self, scene: Scene) -> None:
        if scene.moment(self.order, self.share):
            site = scene.site
            uri = registry_uri(f"s3://{site.stack.bucket}", scene.execution.registry)
            site.put(uri, b'{"run": "other", "model": "m", "embeddings": "e"}')
            if scene.wait(lambda: scene.job(Stage.PUBLISH)):
                scene.strike("the pointer was moved")


# ---- deliveries and executions ---------------------------------------------------------------------------------------


class Duplicate(Fault):
    """A job is delivered twice, and both run at the same time."""

    kind = "duplicate-job"
    stages = (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.EVALUATE, Stage.EMBED, Stage.PUBLISH, Stage.REPORT)

    def act(self, scene: Scene) -> None:
        job = scene.moment(self.order, self.share)
        if job is None:
            return
        request = {
            "jobName": job.name,
            "jobQueue": job.queue.name,
            "jobDefinition": job.definition.name,
            "parameters": dict(job.parameters),
            **({"shareIdentifier": job.share, "schedulingPriorityOverride": job.priority} if job.share else {}),
            **({"arrayProperties": {"size": 2}} if job.array_index is not None else {}),
        }
        scene.site.runner.submit(request)
        scene.strike(f"{job.name} runs twice")


class DuplicateGang(Duplicate):
    """A gang is delivered twice: two of them write to one folder."""

    kind = "duplicate-gang"
    stages = GANGS


class Aborted(Fault):
    """The execution is stopped, and nothing else; the next one takes the lock over at once and goes on, or begins anew.

    Step Functions knows nothing of a gang's job: the deployment's own clean-up has to end it.
    """

    kind = "aborted"

    def act(self, scene: Scene) -> None:
        site, first = scene.site, scene.execution
        job = scene.moment(self.order, self.share)
        if job is None:
            return
        mine = [one for one in site.jobs(first.run) if one.tags[EXECUTION_TAG] == first.arn]
        pids = [pid for node in list(job.nodes) for pid in family(node.process.pid)]
        site.stop(first)
        stopped = time.monotonic()
        scene.strike(f"aborted during {job.name}")
        again = self.draw.random() < 0.6
        name = f"{first.run}-again"
        known = len(site.jobs(first.run if again else name))
        second = site.start(name, first.registry, run=first.run if again else None, shard=self._uri)
        scene.hits.append("resumed" if again else "another run follows")
        # Whoever watches goes on with the new one.
        scene.execution = second
        if not wait_until(lambda: len(site.jobs(second.run)) > known, TAKE_OVER_SECONDS):
            scene.broken.append(f"the lock was not taken over within {TAKE_OVER_SECONDS:g} s")
        left = lambda: [job.name for job in mine if not job.done.is_set()] + running(pids)  # noqa: E731
        if not wait_until(lambda: not left(), CLEAN_UP_SECONDS - (time.monotonic() - stopped)):
            scene.broken.append(f"{CLEAN_UP_SECONDS:g} s after the execution was stopped there are {left()}")


KINDS: tuple[type[Fault], ...] = (
    KillRank,
    KillSupervisor,
    KillNode,
    LoseHost,
    SilentChild,
    HangRank,
    HangNode,
    SlowNode,
    StorageTrouble,
    TornCheckpoint,
    SickHost,
    FullDisk,
    Duplicate,
    DuplicateGang,
    Aborted,
    BatchTrouble,
    LockTrouble,
    ClockJump,
    Denied,
    AllTorn,
    ShardGone,
    ShardChanged,
    IngestedGone,
    Superseded,
)
BY_NAME = {kind.kind: kind for kind in KINDS}
