"""The contract of the stages, the infrastructure and the operator commands: stages, run folder, result files.

It names all that crosses a process boundary, in the words of docs/glossary.md. `cdk synth` imports it, so it loads no framework.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from enum import Enum
from typing import Any, ClassVar, TypeVar

import msgspec

from pipeline.errors import BadConfig, BadData, FailureKind

RESULT_LIMIT_BYTES = 32 * 1024
"""Step Functions reads a result file into its state, and a state is limited to 256 KiB: keep each file far below."""

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
"""Run ids are execution names (Step Functions: 80 characters) and path segments, hence no dots, slashes or spaces."""

REGISTRY_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SHARE_PATTERN = re.compile(r"[A-Za-z0-9]{1,255}")
"""AWS Batch share identifiers are alphanumeric only."""

RETENTION_TAG, RESUME = "trnpipe:retention", "resume"
"""Object tag, and its value, of objects that only serve to resume a run; a lifecycle rule expires them
(infra/constructs/storage.py)."""

CHECKPOINT_KEY = re.compile(r"runs/[^/]+/train/checkpoints/.+")

ARRAY_LIMIT = 10_000
"""Children of an AWS Batch array job, at most (Batch user guide, `Array jobs`)."""

FARGATE_VCPUS = 4
FARGATE_MEMORY_MIB = 30 * 1024
FARGATE_DISK_GIB = 200
"""Size of every job on Fargate: ingest, plan and publish hold groups of rows and files in it."""

ROOT_DEVICE, ROOT_VOLUME_GIB = "/dev/xvda", 500
"""Disk of an accelerator's host: the Neuron image, the row files, a new checkpoint, and an array child's parts at once."""

LONGEST_KEY = 1024
"""Bytes of an S3 key, and less than any file system allows for a path."""


def check_run_id(run: object) -> str:
    """Return a run id unchanged.

    Raises:
        BadConfig: it is invalid.
    """
    if not isinstance(run, str) or not RUN_ID_PATTERN.fullmatch(run):
        raise BadConfig(
            "invalid run id",
            value=repr(run),
            rule=f"a run id matches {RUN_ID_PATTERN.pattern}",
            remedy="use the name of the run's execution or folder",
        )
    return run


def check_registry(name: str) -> str:
    """Return a registry name unchanged.

    Raises:
        BadConfig: it is invalid.
    """
    if not REGISTRY_NAME_PATTERN.fullmatch(name):
        raise BadConfig(
            "invalid registry name", value=repr(name), rule=f"a registry name matches {REGISTRY_NAME_PATTERN.pattern}"
        )
    return name


def check_run_folder(uri: str) -> str:
    """Return a run folder's URI, from the command line or a job's parameters, without trailing slashes.

    Raises:
        BadConfig: its last part is not a run id, or an s3:// URI has a part that is empty, `.` or `..`.
    """
    folder = uri.rstrip("/")
    parts = folder.split("/")
    stays = not folder.startswith("s3://") or not {"", ".", ".."} & set(parts[2:])
    if not stays or not RUN_ID_PATTERN.fullmatch(parts[-1]) or not folder.isprintable() or len(folder.encode()) > LONGEST_KEY:
        raise BadConfig(
            "invalid run folder",
            value=repr(uri),
            rule=f"s3://BUCKET/runs/RUN_ID or a local folder; RUN_ID matches {RUN_ID_PATTERN.pattern}",
            remedy="use the name of the run's execution or folder",
        )
    return folder


class Stage(str, Enum):
    """The stages of a run in their order."""

    PREPARE = "prepare"
    INGEST = "ingest"
    MINE = "mine"
    PLAN = "plan"
    COLLECT = "collect"
    PRECOMPILE = "precompile"
    HEALTH_CHECK = "health_check"
    COMPILE = "compile"
    TRAIN = "train"
    EVALUATE = "evaluate"
    EMBED = "embed"
    PUBLISH = "publish"
    REPORT = "report"

    __str__ = str.__str__


class Shape(str, Enum):
    """Form of a stage's Batch job: one container, a gang of nodes, or an array of independent children."""

    SINGLE = "single"
    GANG = "gang"
    ARRAY = "array"


class Queue(str, Enum):
    """The fair-share queues: `train` (gangs), `embed` (single accelerator hosts), `cpu` (Fargate)."""

    TRAIN = "train"
    EMBED = "embed"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """The infrastructure's facts about a stage; job definitions are derived from them.

    Attributes:
        queue: the job queue.
        shape: how Batch runs it.
        timeout_minutes: Batch attempt timeout; a state's timeout also covers the wait for hosts.
        attempts: Batch attempts, the first included.
        resumes: saves its work in parts, from which the next attempt continues. Its supervisor ends it shortly before the
            timeout, because Batch does not retry an attempt that it ended itself.
        always_runs: runs although its result exists: hosts change, compiled sets may be gone, the input of an execution that
            resumes a run may contradict its plan, the report shows the newest state.
        size: vCPUs and memory of its job on Fargate, in multiples of the other stages'. Costs count it as so many nodes.
    """

    queue: Queue
    shape: Shape
    timeout_minutes: int
    attempts: int = 4
    resumes: bool = False
    always_runs: bool = False
    size: int = 1


STAGES: dict[Stage, StageSpec] = {
    Stage.PREPARE: StageSpec(queue=Queue.CPU, shape=Shape.SINGLE, timeout_minutes=120, always_runs=True),
    Stage.INGEST: StageSpec(
        queue=Queue.CPU, shape=Shape.ARRAY, timeout_minutes=6 * 60, attempts=6, resumes=True, always_runs=True
    ),
    Stage.MINE: StageSpec(queue=Queue.EMBED, shape=Shape.ARRAY, timeout_minutes=12 * 60, resumes=True, always_runs=True),
    Stage.PLAN: StageSpec(queue=Queue.CPU, shape=Shape.SINGLE, timeout_minutes=120, always_runs=True),
    Stage.COLLECT: StageSpec(queue=Queue.TRAIN, shape=Shape.GANG, timeout_minutes=60, always_runs=True),
    # Fargate's largest job, because several compilers run at once.
    Stage.PRECOMPILE: StageSpec(queue=Queue.CPU, shape=Shape.SINGLE, timeout_minutes=240, always_runs=True, size=4),
    Stage.HEALTH_CHECK: StageSpec(queue=Queue.TRAIN, shape=Shape.GANG, timeout_minutes=30, always_runs=True),
    Stage.COMPILE: StageSpec(queue=Queue.TRAIN, shape=Shape.GANG, timeout_minutes=240, always_runs=True),
    Stage.TRAIN: StageSpec(queue=Queue.TRAIN, shape=Shape.GANG, timeout_minutes=24 * 60, attempts=8, resumes=True),
    Stage.EVALUATE: StageSpec(queue=Queue.EMBED, shape=Shape.SINGLE, timeout_minutes=120),
    Stage.EMBED: StageSpec(queue=Queue.EMBED, shape=Shape.ARRAY, timeout_minutes=12 * 60, attempts=6, resumes=True),
    Stage.PUBLISH: StageSpec(queue=Queue.CPU, shape=Shape.SINGLE, timeout_minutes=120),
    Stage.REPORT: StageSpec(queue=Queue.CPU, shape=Shape.SINGLE, timeout_minutes=30, attempts=2, always_runs=True),
}

STAGES_WITHOUT_PLAN = (Stage.PREPARE, Stage.INGEST, Stage.MINE, Stage.PLAN, Stage.REPORT)
"""The first ones come before the plan, which plan writes; a report is written even for a run without a plan."""

COMPILED_APART = (Stage.COLLECT, Stage.PRECOMPILE)
UNUSUAL = (Stage.MINE, *COMPILED_APART)
"""Stages of runs with compile.where = cpu; and all that few runs have: mine, only with train.mine, and those."""

TRIAL_STAGES = (Stage.COLLECT, Stage.COMPILE)
"""Gangs whose nodes run one process each on `neuron`: it starts torchrun itself, below neuron_parallel_compile."""

EMBEDDING = (Stage.EMBED, Stage.PUBLISH)
"""These follow `embed/plan.json` where there is one."""


class Metric(str, Enum):
    """Metrics that the containers send to CloudWatch, described in `METRICS`."""

    LOSS = "Loss"
    PAIRS_PER_SECOND = "PairsPerSecond"
    STEP_SECONDS = "StepSeconds"
    DATA_WAIT_SHARE = "DataWaitShare"
    CHECKPOINT_STALL_SECONDS = "CheckpointStallSeconds"
    CORE_UTILIZATION = "CoreUtilization"
    ECC_CORRECTED = "EccCorrected"
    ECC_UNCORRECTED = "EccUncorrected"
    NEW_GRAPHS = "NewGraphs"
    QUEUE_WAIT_SECONDS = "QueueWaitSeconds"
    RETRIES = "Retries"
    UNHEALTHY_HOSTS = "UnhealthyHosts"
    QUARANTINED_ROWS = "QuarantinedRows"
    QUARANTINED_DOCUMENTS = "QuarantinedDocuments"
    DOCUMENTS_PER_SECOND = "DocumentsPerSecond"
    QUALITY = "Quality"
    BASELINE_QUALITY = "BaselineQuality"
    GATE_DROP = "GateDrop"
    COSINE = "Cosine"
    NEIGHBOUR_OVERLAP = "NeighbourOverlap"

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Attributes:
        unit: a unit of CloudWatch's PutMetricData.
        statistic: of the values within a period: `Average`, `Maximum`, or `Sum` where each counts something new.
        stages: those that send it.
    """

    unit: str
    statistic: str
    stages: tuple[Stage, ...]

    @property
    def dimensions(self) -> tuple[tuple[str, ...], ...]:
        """The sets of dimensions under which CloudWatch keeps it. Each set is a separate metric with a monthly price: so only
        metrics of several stages have the stage as a dimension, and none has the run."""
        every = (DEPLOYMENT_DIMENSION,)
        return (every,) if len(self.stages) == 1 else (every, (DEPLOYMENT_DIMENSION, STAGE_DIMENSION))


METRICS_NAMESPACE = "trnpipe"
DEPLOYMENT_DIMENSION = "Deployment"
STAGE_DIMENSION = "Stage"
DEPLOYMENT_VARIABLE = "TRNPIPE_DEPLOYMENT"
"""Environment variable of every job: the deployment's name, a dimension of its metrics."""

ATTEMPT_VARIABLE = "TRNPIPE_ATTEMPT_SECONDS"
"""Environment variable of every job: after how many seconds Batch ends an attempt."""

METRICS: dict[Metric, MetricSpec] = {
    Metric.LOSS: MetricSpec("None", "Average", (Stage.TRAIN,)),
    Metric.PAIRS_PER_SECOND: MetricSpec("Count/Second", "Average", (Stage.TRAIN,)),
    Metric.STEP_SECONDS: MetricSpec("Seconds", "Average", (Stage.TRAIN,)),
    # Of the time spent training, 0 to 1.
    Metric.DATA_WAIT_SHARE: MetricSpec("None", "Average", (Stage.TRAIN,)),
    # Between two lines of training's own metrics.
    Metric.CHECKPOINT_STALL_SECONDS: MetricSpec("Seconds", "Maximum", (Stage.TRAIN,)),
    # Mean over a host's NeuronCores.
    Metric.CORE_UTILIZATION: MetricSpec("Percent", "Average", (Stage.TRAIN,)),
    Metric.ECC_CORRECTED: MetricSpec("Count", "Sum", (Stage.TRAIN,)),
    Metric.ECC_UNCORRECTED: MetricSpec("Count", "Sum", (Stage.TRAIN,)),
    # Met and not compiled ahead.
    Metric.NEW_GRAPHS: MetricSpec("Count", "Sum", (Stage.TRAIN, Stage.EVALUATE, Stage.EMBED)),
    # From a job's submission, or its last attempt's end, until its main container runs. Only a gang may ask Batch.
    Metric.QUEUE_WAIT_SECONDS: MetricSpec(
        "Seconds", "Maximum", tuple(stage for stage, spec in STAGES.items() if spec.shape is Shape.GANG)
    ),
    # Attempts beyond a job's first.
    Metric.RETRIES: MetricSpec("Count", "Sum", tuple(STAGES)),
    # That took themselves out of their cluster.
    Metric.UNHEALTHY_HOSTS: MetricSpec(
        "Count", "Sum", tuple(stage for stage, spec in STAGES.items() if spec.queue is not Queue.CPU)
    ),
    Metric.QUARANTINED_ROWS: MetricSpec("Count", "Sum", (Stage.PLAN,)),
    Metric.QUARANTINED_DOCUMENTS: MetricSpec("Count", "Sum", (Stage.EMBED,)),
    # Of the whole array, when it is done.
    Metric.DOCUMENTS_PER_SECOND: MetricSpec("Count/Second", "Average", (Stage.EMBED,)),
    # nDCG@10 on the hold-out: of the new model, of the gate's baseline.
    Metric.QUALITY: MetricSpec("None", "Average", (Stage.EVALUATE,)),
    Metric.BASELINE_QUALITY: MetricSpec("None", "Average", (Stage.EVALUATE,)),
    # How far gate.metric fell below the baseline's; negative where it rose.
    Metric.GATE_DROP: MetricSpec("None", "Maximum", (Stage.EVALUATE,)),
    # Of the published vectors with the new ones: mean cosine, share of the nearest ten documents that stays.
    Metric.COSINE: MetricSpec("None", "Average", (Stage.EVALUATE,)),
    Metric.NEIGHBOUR_OVERLAP: MetricSpec("None", "Average", (Stage.EVALUATE,)),
}

EAGER_KINDS = ("cpu", "cuda")
"""Device types that run every operation at once, in any shape. All others compile graphs, one per shape."""
HOST_KINDS = ("cpu", "xla")
"""Device types that compute on the host's processor, in its memory."""

JOBS_AT_ONCE = 100
"""Jobs, or job definitions, that Batch describes in one request at most (API reference)."""

JOB_ENDED = ("SUCCEEDED", "FAILED")
"""States of a Batch job that has ended."""

GATE_REFUSED = "GateRefused"
"""Error with which the state machine ends a run whose model the gate has refused."""

RUN_PARAMETER = "run"
"""Batch job parameter with the run folder's URI: `Ref::run` in every command."""

RUN_TAG = "trnpipe:run"
EXECUTION_TAG = "trnpipe:execution"
"""Tags of every Batch job: its run's id, and the ARN of the execution that submitted it, under which `trnpipe stop` finds it."""


def attempt_seconds(stage: Stage, environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds after which Batch ends an attempt of a stage."""
    return float(environment.get(ATTEMPT_VARIABLE) or 60 * STAGES[stage].timeout_minutes)


def stage_command(stage: Stage) -> list[str]:
    """Return the container command of a stage, for its Batch job definition."""
    return ["trnpipe", "stage", stage.value, "--run", f"Ref::{RUN_PARAMETER}"]


@dataclass(frozen=True, slots=True)
class _Inside:
    """A URI with a fixed name inside the run folder, an attribute of RunPaths."""

    name: str

    def __get__(self, paths: RunPaths, _owner: type[RunPaths]) -> str:
        return f"{paths.root}/{self.name}"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """URIs inside one run folder.

    Args:
        root: the run folder, `s3://BUCKET/runs/RUN_ID` or a local folder, without a trailing slash.
    """

    root: str

    input = _Inside("input.json")
    """The state machine's input, `{deployment, execution, execution_arn}`, written by its first states."""
    inputs = _Inside("prepare/inputs.json")
    """Everything that prepare decided, and the shards that it found: `pipeline.run_inputs.RunInputs`, written once."""
    missing = _Inside("prepare/missing.json")
    """Which of these ingest and mine are to do: `pipeline.run_inputs.MissingShards`, written by every prepare of the run."""
    corpus = _Inside("prepare/corpus.json")
    """The corpus as it is to be embedded, and the model: `pipeline.run_inputs.Corpus`, by the prepare after the gate."""
    plan = _Inside("plan.json")
    rows = _Inside("plan/rows")
    """The run's own tokenized rows and the order of its batches, as the plan stage fixed them."""
    quarantine = _Inside("plan/quarantine.jsonl")
    """One JSON line per refused input row: `{at: "file:line", reason, row}`."""
    corpus_quarantine = _Inside("plan/quarantine-corpus.jsonl")
    """The same of documents that were listed later."""
    checkpoints = _Inside("train/checkpoints")
    metrics = _Inside("train/metrics.jsonl")
    tensorboard = _Inside("train/tensorboard")
    validations = _Inside("train/validation")
    model = _Inside("model")
    """The finished model as a Hugging Face / sentence-transformers folder."""
    scorecard = _Inside("evaluate/scorecard.json")
    query_values = _Inside("evaluate/queries.parquet")
    """Every metric of every hold-out query with the new model: Parquet, see pipeline/evaluation/query_values."""
    query_changes = _Inside("evaluate/changes.json")
    """The queries that rose and fell most, with their texts: only with `report.texts` (pipeline/evaluation/changes)."""
    vectors = _Inside("evaluate/vectors.npy")
    """The new model's vectors of all hold-out texts, see pipeline/evaluation/reuse."""
    collected = _Inside("collect/modules.json")
    """Names of the graphs that collect left in the compiler's cache."""
    traces = _Inside("precompile/traces")
    """The traced encoder of precompile, which compile takes over."""
    embed_plan = _Inside("embed/plan.json")
    """What is embedded, and with which model: `pipeline.plan.EmbedPlan`, in place of the one in the plan."""
    embed_manifest = _Inside("embed/manifest.json")
    report = _Inside("report/index.html")

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.root.rstrip("/"))

    @property
    def run_id(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    @property
    def bucket_root(self) -> str:
        """The folder that holds `runs/` and `registry/`."""
        return self.root.rsplit("/", 2)[0]

    def deletions(self, digest: str) -> str:
        """What `data.delete` named when the run began (pipeline/dataset/deletions)."""
        return f"{self.root}/prepare/deletions-{digest}.json"

    def stage(self, stage: Stage) -> str:
        return f"{self.root}/{stage.value}"

    def result(self, stage: Stage) -> str:
        return f"{self.root}/{stage.value}/result.json"

    def failure(self, stage: Stage) -> str:
        """Record of the newest attempt's failure; an attempt that succeeds removes it."""
        return f"{self.root}/{stage.value}/failure.json"

    def progress(self, stage: Stage, node: int) -> str:
        """`{done, total, unit, rate, note}` of a running stage, rewritten every few seconds by the node's supervisor."""
        return f"{self.root}/{stage.value}/progress-{node:05d}.json"

    def graphs(self, stage: Stage, number: int = 0) -> str:
        """The graphs that a stage met: `{compiled, keys, new, fallbacks}`; `number` is the node's, or the array child's."""
        return f"{self.root}/{stage.value}/graphs-{number:05d}.json"

    def node_exit(self, stage: Stage, attempt: int, node: int) -> str:
        """End of one node of a gang in one attempt: `{exit_code, time, failure}`."""
        return f"{self.root}/{stage.value}/exits/attempt-{attempt}/node-{node:05d}.json"

    def node_attempt(self, stage: Stage, job: str, attempt: int, node: int) -> str:
        """Times and host of one node's attempt; pipeline/cost.py adds these up."""
        return f"{self.attempts(stage)}/{job or 'no-job'}/attempt-{attempt}-node-{node:05d}.json"

    def attempts(self, stage: Stage) -> str:
        return f"{self.root}/{stage.value}/attempts"

    def node_health(self, node: int) -> str:
        return f"{self.root}/health_check/node-{node:05d}.json"

    def compiled_node(self, node: int) -> str:
        """Report of one node's compiler."""
        return f"{self.root}/compile/node-{node:05d}.json"

    def checkpoint(self, step: int) -> str:
        return f"{self.checkpoints}/step-{step:08d}"

    def host_monitor(self, node: int) -> str:
        """Load and memory of one node's host while training, a JSON line per minute (pipeline/sdk/monitor.py)."""
        return f"{self.root}/train/monitor/node-{node:05d}.jsonl"

    def validation(self, step: int) -> str:
        """Every metric of every query after `step` steps: Parquet, see pipeline/evaluation/query_values."""
        return f"{self.validations}/step-{step:08d}.parquet"

    def part(self, index: int, count: int) -> str:
        """One part of the embeddings: Parquet with `id`, `embedding` (fixed-size list) and `locale`."""
        return f"{self.root}/embed/part-{index:05d}-of-{count:05d}.parquet"

    def part_manifest(self, index: int, count: int) -> str:
        """The record of a finished part, written after it: `{sha256, rows, ids, quarantined, dimension, dtype, seconds}`."""
        return f"{self.root}/embed/part-{index:05d}-of-{count:05d}.json"

    def part_quarantine(self, index: int, count: int) -> str:
        """The documents of a part that have no embedding, where there are any: a JSON line each, `{row, id, reason}`."""
        return f"{self.root}/embed/part-{index:05d}-of-{count:05d}.quarantine.jsonl"


def retention_tags(key: str) -> dict[str, str]:
    """Return the tags for a new object of the bucket, by which S3 expires what only serves to resume: checkpoints."""
    return {RETENTION_TAG: RESUME} if CHECKPOINT_KEY.fullmatch(key) else {}


def registry_uri(bucket_root: str, name: str) -> str:
    """Return the URI of the pointer to the last publication under `name` (pipeline/run/registry.Pointer)."""
    return f"{bucket_root.rstrip('/')}/registry/{name}.json"


def history_uri(bucket_root: str, name: str) -> str:
    """Return the URI of the page with all runs of a registry name (pipeline/stages/history); their records are next to it."""
    return f"{bucket_root.rstrip('/')}/registry/{name}/index.html"


def reference_uri(bucket_root: str, name: str) -> str:
    """Return the URI of the name of the reference under a registry name (pipeline/evaluation/reference)."""
    return f"{bucket_root.rstrip('/')}/registry/{name}.reference.json"


def seen_uri(bucket_root: str, run: str) -> str:
    """Return the folder of the rows that a run was the first of its lineage to train on (pipeline/dataset/seen)."""
    return f"{bucket_root.rstrip('/')}/seen/{run}"


def graphs_uri(bucket_root: str) -> str:
    """Return the folder of compiled sets (pipeline/graphs/compiled), which all runs of a bucket share."""
    return f"{bucket_root.rstrip('/')}/graphs"


def now() -> str:
    """Return the present time as ISO 8601 in UTC, with microseconds."""
    return datetime.now(timezone.utc).isoformat()


R = TypeVar("R", bound="Record")


class Record:
    """Base of the dataclasses that are written as JSON objects, moments as ISO 8601.

    Attributes:
        if_unreadable: the remedy for a record that cannot be read.
    """

    __slots__ = ()
    if_unreadable: ClassVar[str] = "restore an earlier version of it, or delete it and run its stage again"

    @classmethod
    def from_json(cls: type[R], data: bytes) -> R:
        """Return the record from the JSON object that it was written as, every value of the type that its field has.

        Not by pydantic, nor by msgspec's own decoder, which refuse texts with half of a surrogate pair: JSON can hold them, and
        failures quote data.

        Raises:
            BadData: no JSON, no object, a field too many or too few, or a value of another type.
        """
        try:
            values = json.loads(data)
            if isinstance(values, dict) and (unknown := sorted(values.keys() - {item.name for item in fields(cls)})):  # type: ignore[arg-type]
                raise ValueError(f"unknown fields: {', '.join(unknown[:10])}")
            return msgspec.convert(values, cls)
        except (ValueError, RecursionError) as error:
            raise BadData(
                "a record cannot be read",
                value=error,
                rule=f"a JSON object with the fields of {cls.__name__}",
                remedy=cls.if_unreadable,
            ) from error

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True, default=datetime.isoformat).encode()  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Artifact(Record):
    """One input or output: its URI, and its content when the stage read or wrote it (sha256 in hex; size in bytes)."""

    uri: str
    sha256: str
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult(Record):
    """`STAGE/result.json`: written once, last, when the stage has succeeded.

    Attributes:
        stage: the stage's name.
        run: the run id.
        status: `done`.
        started, finished: ISO 8601 in UTC.
        fingerprint: the plan's; a result with another fingerprint does not count.
        inputs, outputs: name -> Artifact.
        metrics: small JSON values for Choice states, the report and people.
        versions: package -> version.
    """

    stage: str
    run: str
    status: str
    started: str
    finished: str
    fingerprint: str
    inputs: dict[str, Artifact] = field(default_factory=dict)
    outputs: dict[str, Artifact] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Serialized form.

        Raises:
            ValueError: larger than RESULT_LIMIT_BYTES; long lists belong in separate files.
        """
        data = super(StageResult, self).to_json()
        if len(data) > RESULT_LIMIT_BYTES:
            raise ValueError(f"{self.stage}/result.json has {len(data)} bytes; the limit is {RESULT_LIMIT_BYTES}")
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailure(Record):
    """`STAGE/failure.json`: why an attempt failed, for the report, the notification and the person at the terminal.

    Attributes:
        kind: decides which of several failures is the cause; records of earlier versions have none.
        what, value, rule, remedy: the four parts of the message, for people only.
    """

    stage: str
    run: str
    exit_code: int
    what: str
    kind: FailureKind = FailureKind.OWN
    value: list[str] = field(default_factory=list)
    rule: str = ""
    remedy: str = ""
    node: int = 0
    rank: int = 0
    attempt: int = 1
    host: str = ""
    time: str = ""
