"""The configuration of a run: one frozen `RunConfig`, a section per stage, unknown keys refused with the nearest valid name.

Precedence, lowest first: defaults here < the deployment's config < the execution's input < `--set a.b=value`. `prepare`
merges and validates once and writes the result into `plan.json`; every later stage trusts it.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.allowed_uris import objection
from pipeline.contract import ARRAY_LIMIT, EAGER_KINDS, REGISTRY_NAME_PATTERN, RUN_ID_PATTERN, SHARE_PATTERN, Queue, Stage
from pipeline.errors import BadConfig, MissingInput

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]


def _well_formed(uri: str) -> str:
    if wrong := objection(uri):
        raise ValueError(wrong)
    return uri


Uri = Annotated[str, AfterValidator(_well_formed)]
"""s3://BUCKET/KEY or a local path; whether a deployment may read it is its own matter (pipeline/places)."""

MICRO_BATCH_TOKENS = 4096
"""Tokens of a micro-batch, padding included, at most, where graphs are compiled and nothing else is set. A graph grows with its
tokens, and neuronx-cc refuses one of more than 5,000,000 instructions (aws-neuron-sdk issue 819); AWS's scripts train BERT-Large
on a NeuronCore with 2,048 at a time (aws-neuron-samples, run_dp_bert_large_hf_pretrain_bf16_s128.sh)."""

LONGEST_KEY = 100
"""Characters of an unknown key that are compared with the known ones: every key of the schema is shorter."""

DEEPEST_KEY = 10
"""Parts of a setting's key: more than any has."""

_VALUES = reprlib.Repr()
"""Values as messages name them: YAML can say in a line what fills the memory when it is written out."""
_VALUES.maxlevel, _VALUES.maxdict, _VALUES.maxlist = 3, 10, 20
_VALUES.maxstring = _VALUES.maxlong = _VALUES.maxother = 200


class Role(Enum):
    """What a key of the configuration is to a run. The roles of a section are those of all its keys.

    Every key has one of the first two, and any of the others.
    """

    LEARNED = "learned"
    """Decides what is learned or how it is measured: parity compares only runs that agree in it."""
    BOOKKEEPING = "bookkeeping"
    """Decides neither, or is compared by its content: parity compares runs that differ in it, too."""
    GRAPH = "graph"
    """A shape or a constant of graphs: part of the names of compiled sets."""
    RESUMABLE = "resumable"
    """May differ between a run and the one whose training it resumes: its effect is compared, or changes no result."""
    EXECUTION = "execution"
    """How an execution is carried out, not what it computes: may differ when an execution resumes a run."""
    TUNABLE = "tunable"
    """How the run's rows are trained on, not which rows or what is learned from them: tune may vary it."""
    URI = "uri"
    """One URI or several, which the deployment must allow."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent coercion of numbers to strings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """What is read. Folders are listed recursively; `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and `.parquet` count as shards."""

    train: Annotated[tuple[Uri, ...], Role.BOOKKEEPING, Role.URI] = Field(
        (), description="URIs of training shards or folders of them: rows {id, query, document}."
    )
    corpus: Annotated[tuple[Uri, ...], Role.BOOKKEEPING, Role.URI] = Field(
        (), description="URIs of corpus shards or folders: rows {id, text}. Empty: the documents of all training rows."
    )
    columns: Annotated[dict[str, str], Role.LEARNED] = Field(
        default_factory=dict, description="Our column name -> the file's, e.g. {query: title, document: body}."
    )
    holdout_fraction: Annotated[float, Field(gt=0.0, lt=1.0), Role.LEARNED] = Field(
        0.02, description="Share of rows kept from training, chosen by hash of the normalized document text."
    )
    replay_fraction: Annotated[float, Field(ge=0.0, le=100.0), Role.LEARNED] = Field(
        0.1, description="Rows of earlier shards to train on again, as a share of the number of new rows."
    )
    max_bad_fraction: Annotated[Fraction, Role.BOOKKEEPING] = Field(
        0.001, description="Rows that may be refused (and quarantined) before the run ends with 65."
    )
    require_new: Annotated[bool, Role.BOOKKEEPING] = Field(
        True, description="End with 66 when no shard is new since the parent; false: replay only."
    )


class HeadConfig(Section):
    """Residual MLP head after pooling: x + W2 relu(W1 x + b1) + b2, W2 and b2 zero at first."""

    hidden: PositiveInt = Field(1024, description="Width of the hidden layer.")


class ModelConfig(Section):
    """The encoder and where it starts."""

    initial: Annotated[Uri | None, Role.BOOKKEEPING, Role.URI] = Field(
        None,
        description="URI of the model of the very first run, while the registry names none: a Hugging Face or "
        "sentence-transformers folder, .safetensors, .pt/.bin/.pth state_dict, training checkpoint.",
    )
    parent: Annotated[Uri | None, Role.BOOKKEEPING, Role.URI] = Field(
        None,
        description="URI of the model that one execution continues from on purpose, in the forms of `initial`. None: what the "
        "registry names, else `initial`. A deployment's own configuration must not set it.",
    )
    base: Annotated[Uri | None, Role.BOOKKEEPING, Role.URI] = Field(
        None, description="Folder with config.json and tokenizer for a parent that is a bare weight file."
    )
    weights_key: Annotated[str | None, Role.BOOKKEEPING] = Field(
        None, description="Key under which a training checkpoint holds the weights; None: found."
    )
    pooling: Annotated[Literal["mean", "cls"], Role.LEARNED, Role.GRAPH] = Field(
        "mean", description="How token vectors become one vector: their mean, or the first token's vector."
    )
    normalize: Annotated[bool, Role.LEARNED, Role.GRAPH] = Field(True, description="Whether embeddings have length 1.")
    head: Annotated[HeadConfig | None, Role.LEARNED, Role.GRAPH] = Field(
        None, description="Residual head after pooling; None: no head."
    )


class LoaderConfig(Section):
    """How batches reach a device that compiles (kinds `xla` and `neuron`): torch-xla's MpDeviceLoader."""

    batches_per_execution: Annotated[PositiveInt, Role.GRAPH] = Field(
        1, description="Steps joined into one graph: fewer launches, a larger graph. More than 1 needs device.sync_points = 1."
    )
    host_prefetch: PositiveInt = Field(16, description="Batches prepared ahead in host memory.")
    device_prefetch: PositiveInt = Field(8, description="Batches put on the device ahead.")
    transfer_threads: PositiveInt = Field(1, description="Host threads that put batches on the device.")


class DeviceConfig(Section):
    """The kind of device and its numbers per node."""

    kind: Literal["auto", "cpu", "cuda", "xla", "neuron"] = Field(
        "auto", description="Device type. auto: neuron where there is one, else cuda, else cpu."
    )
    precision: Literal["auto", "compiler", "bf16", "fp32"] = Field(
        "auto",
        description="What training's matrix products are computed in; weights and optimizer stay fp32. bf16: torch autocast. "
        "compiler: neuronx-cc casts as compile.auto_cast says, also in the optimizer (neuron only). auto: bf16 where the device "
        "computes in it, else fp32.",
    )
    ranks_per_node: PositiveInt | None = Field(None, description="None: 32 on neuron, all GPUs on cuda, else 1.")
    threads_per_rank: PositiveInt | None = Field(None, description="Host threads of a rank; None: cores / ranks on the host.")
    memory_gib: float | None = Field(
        None, gt=0, description="Memory of a rank's device. None: 16 on neuron, what the GPU says on cuda where prepare sees one."
    )
    host_memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory for a node's ranks together. None: on neuron a job's share of a trn1.32xlarge, else unknown.",
    )
    sync_points: Annotated[Literal[1, 2], Role.GRAPH] = Field(
        2,
        description="Where a step's graph is cut: after forward+backward and after the optimizer (2), or only after it (1). "
        "Micro-batches are always cut.",
    )
    loader: LoaderConfig = LoaderConfig()

    @model_validator(mode="after")
    def _joined_steps_have_one_sync(self) -> DeviceConfig:
        if self.loader.batches_per_execution > 1 and self.sync_points != 1:
            raise ValueError(
                f"loader.batches_per_execution = {self.loader.batches_per_execution} joins steps into one graph, which "
                "sync_points = 2 cuts: set sync_points = 1, or batches_per_execution = 1"
            )
        return self


class HealthCheckConfig(Section):
    """Thresholds under which a host counts as unhealthy. A floor of 0 measures without judging."""

    matmul_size: PositiveInt = Field(256, description="Rows and columns of the matrices of the known-answer operations.")
    relative_tolerance_fp32: float = Field(1e-4, gt=0, description="Largest relative error of a known-answer operation in fp32.")
    relative_tolerance_bf16: float = Field(2e-2, gt=0, description="Largest relative error of a known-answer operation in bf16.")
    memory_mib: PositiveInt = Field(256, description="Device memory that is written and read back.")
    min_memory_gbps: float = Field(0.0, ge=0, description="Floor of the memory bandwidth probe, GB/s.")
    collective_bytes: tuple[PositiveInt, ...] = Field((4096, 1 << 20, 16 << 20), description="Message sizes of each collective.")
    min_collective_gbps: float = Field(0.0, ge=0, description="Floor of the largest message's bus bandwidth, GB/s.")
    collective_timeout_seconds: PositiveInt = Field(300, description="Time limit of the collectives between ranks.")
    storage_mib: PositiveInt = Field(4, description="Size of the object written to and read from the run folder.")
    neuron_devices: PositiveInt = Field(16, description="Neuron devices of a host, on neuron; 16 on a trn1.32xlarge.")
    cores_per_device: PositiveInt = Field(2, description="NeuronCores of a device.")
    device_memory_gib: PositiveInt = Field(32, description="Memory of a device, GiB.")
    efa_devices: Annotated[int, Field(ge=0)] = Field(8, description="EFA devices of a host in a gang of several, on neuron.")
    driver_versions: tuple[Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")], ...] = Field(
        ("2.27",), description="Neuron driver releases (MAJOR.MINOR) that were tried with the container's runtime."
    )
    nccom_bytes: PositiveInt = Field(32 << 20, description="Message size of nccom-test's collectives inside a host.")
    min_nccom_gibps: float = Field(0.0, ge=0, description="Floor of nccom-test's bus bandwidth inside a host, GiB/s.")
    tool_timeout_seconds: PositiveInt = Field(60, description="For neuron-ls and the like to answer.")
    nccom_timeout_seconds: PositiveInt = Field(300, description="For one collective of nccom-test, its compilation included.")


class CompileConfig(Section):
    """Ahead-of-time compilation, and neuronx-cc's flags, which exist in no other form (NEURON_CC_FLAGS is built from these)."""

    enabled: bool = Field(True, description="false: never compile ahead; a run without a complete compiled set ends with 64.")
    trial_steps: Annotated[int, Field(ge=2, le=50)] = Field(
        4, description="Training steps per bucket of the trial that meets every graph once."
    )
    new_graphs: Literal["report", "stop"] = Field(
        "report", description="A graph that training meets and compile did not: log and count it, or end the run with 69."
    )
    target: Literal["trn1", "trn1n"] = Field(
        "trn1", description="Target of the hosts that train. trn2 has other cores, ranks and memory than are planned for here."
    )
    infer_target: Literal["trn1", "trn1n", "inf2"] = Field("trn1", description="Target of the hosts that evaluate and embed.")
    model_type: Literal["transformer", "generic", "unet-inference"] = Field(
        "transformer", description="neuronx-cc's --model-type."
    )
    optlevel: Literal[1, 2, 3] = Field(1, description="1 compiles fastest; 2 and 3 gain some throughput.")
    auto_cast: Literal["none", "matmult", "all"] | None = Field(
        None, description="What the compiler casts in training. None: all where device.precision is `compiler`, else none."
    )
    auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] = Field(
        "bf16", description="To which type the compiler casts in training: bf16 or tf32."
    )
    infer_auto_cast: Literal["none", "matmult", "all"] | None = Field(
        None,
        description="What the compiler casts for evaluate and embed. None: matmult, but none if device.precision is fp32.",
    )
    infer_auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] = Field(
        "bf16", description="To which type the compiler casts for evaluate and embed."
    )
    retry_failed: bool = Field(
        True, description="Compile again what failed in an earlier run, instead of failing from the cache."
    )
    parallel: PositiveInt = Field(8, description="Compilers that run at the same time.")
    cache: Annotated[Uri | None, Role.URI] = Field(
        None,
        description="s3:// URI under which the compiler's persistent caches are; None: graphs/neuron-cache in the run's bucket.",
    )

    def training_cast(self, precision: str) -> str:
        """What the compiler casts in training, `none` unless the resolved precision leaves it to the compiler."""
        return (self.auto_cast or "all") if precision == "compiler" else "none"

    def inference_cast(self, precision: str) -> str:
        """What the compiler casts for evaluate and embed, given training's resolved precision."""
        return self.infer_auto_cast or ("none" if precision == "fp32" else "matmult")

    @field_validator("auto_cast_type")
    @classmethod
    def _trainable(cls, cast: str) -> str:
        if cast in ("fp16", "fp8_e4m3"):
            raise ValueError(
                f"{cast} has too small a range for gradients and optimizer state, which are cast too: set bf16 or tf32, or "
                f"compile.infer_auto_cast_type = {cast} for evaluate and embed alone"
            )
        return cast

    @field_validator("cache")
    @classmethod
    def _on_s3(cls, cache: str | None) -> str | None:
        if cache is not None and (not cache.startswith("s3://") or any(character.isspace() for character in cache)):
            raise ValueError("must be an s3:// URI without spaces: every host of every run reads it")
        return cache


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a positive number up to `limit`, and in any case up to MICRO_BATCH_TOKENS; at least 1."""
    candidates = range(min(number, limit, MICRO_BATCH_TOKENS), 0, -1)
    return next((size for size in candidates if number % size == 0), 1)


def require_run_id(run: str | None) -> str | None:
    """A setting that names a run, or none.

    Raises:
        ValueError: it cannot be the id of a run.
    """
    if run is not None and not RUN_ID_PATTERN.fullmatch(run):
        raise ValueError(f"must match {RUN_ID_PATTERN.pattern}")
    return run


class TrainConfig(Section):
    """Contrastive training of the bi-encoder."""

    steps: Annotated[PositiveInt | None, Role.BOOKKEEPING, Role.RESUMABLE] = Field(
        None, description="Optimizer steps; None: `epochs` over the run's rows."
    )
    epochs: Annotated[PositiveInt, Role.BOOKKEEPING, Role.RESUMABLE] = Field(
        1, description="Passes over the run's training rows, unless `steps` is set."
    )
    batch_size: Annotated[PositiveInt, Role.BOOKKEEPING, Role.GRAPH, Role.RESUMABLE, Role.TUNABLE] = Field(
        64, description="Pairs per rank whose documents compete; times `accumulation` per step."
    )
    accumulation: Annotated[PositiveInt, Role.LEARNED, Role.GRAPH, Role.RESUMABLE, Role.TUNABLE] = Field(
        1, description="Batches whose gradients are added up before an optimizer step: a larger batch in the same memory."
    )
    micro_batch: Annotated[PositiveInt | None, Role.LEARNED, Role.RESUMABLE, Role.TUNABLE] = Field(
        None,
        description="Pairs that pass through the encoder at a time: a memory setting, which changes neither loss nor negatives. "
        "Divides batch_size; where it is smaller, the forward pass runs twice. None: the largest divisor with at most "
        f"{MICRO_BATCH_TOKENS} tokens where graphs are compiled (xla, neuron), elsewhere the whole batch.",
    )
    activation_checkpointing: Annotated[bool, Role.BOOKKEEPING, Role.GRAPH, Role.RESUMABLE, Role.TUNABLE] = Field(
        False, description="Compute each layer's activations again in the backward pass instead of keeping them."
    )
    query_length: Annotated[int, Field(ge=4), Role.LEARNED, Role.GRAPH] = Field(
        32, description="Static length of queries in tokens."
    )
    buckets: Annotated[tuple[Annotated[int, Field(ge=4)], ...], Role.LEARNED, Role.GRAPH, Role.TUNABLE] = Field(
        (64, 128, 256), description="Static lengths of documents, ascending."
    )
    learning_rate: Annotated[float, Role.LEARNED] = Field(2e-5, gt=0, description="Peak learning rate of AdamW.")
    schedule: Annotated[Literal["cosine", "linear", "constant"], Role.LEARNED] = Field(
        "cosine", description="Learning rate after the warmup."
    )
    warmup_fraction: Annotated[Fraction, Role.LEARNED] = Field(
        0.1, description="Share of the steps in which the learning rate rises linearly to its peak."
    )
    final_lr_fraction: Annotated[Fraction, Role.LEARNED] = Field(
        0.0, description="Learning rate of the last step, as a share of the peak."
    )
    weight_decay: Annotated[float, Role.LEARNED, Role.GRAPH] = Field(0.01, ge=0, description="AdamW's decoupled weight decay.")
    beta1: Annotated[float, Role.LEARNED, Role.GRAPH] = Field(
        0.9, ge=0, lt=1, description="AdamW's decay rate of the first moment."
    )
    beta2: Annotated[float, Role.LEARNED, Role.GRAPH] = Field(
        0.999, ge=0, lt=1, description="AdamW's decay rate of the second moment."
    )
    epsilon: Annotated[float, Role.LEARNED, Role.GRAPH] = Field(1e-8, gt=0, description="AdamW's epsilon.")
    clip_norm: Annotated[float | None, Role.LEARNED, Role.GRAPH] = Field(
        1.0, gt=0, description="Largest norm of the gradient of a step; None: no clipping."
    )
    temperature: Annotated[float, Role.LEARNED, Role.GRAPH] = Field(
        0.05, gt=0, description="Divisor of the similarities in the contrastive loss."
    )
    dropout: Annotated[Annotated[float, Field(ge=0.0, lt=1.0)] | None, Role.LEARNED, Role.GRAPH] = Field(
        None, description="Of hidden states while training; None: the model's own. Attention probabilities are never dropped."
    )
    resume: Annotated[str | None, Role.LEARNED, Role.RESUMABLE] = Field(
        None,
        description="Id of a run whose training to go on with, on other nodes or ranks. None: begin with the parent.",
    )
    log_every: Annotated[PositiveInt, Role.BOOKKEEPING, Role.GRAPH, Role.RESUMABLE] = Field(
        10, description="Steps between two lines of training metrics."
    )
    validate_every: Annotated[PositiveInt, Role.LEARNED, Role.RESUMABLE] = Field(
        100, description="Steps between two evaluations on hold-out queries."
    )
    validation_queries: Annotated[PositiveInt, Role.LEARNED, Role.RESUMABLE] = Field(
        512, description="Hold-out queries of the evaluation inside training."
    )
    checkpoint_every: Annotated[PositiveInt, Role.BOOKKEEPING, Role.RESUMABLE] = Field(
        200, description="Steps between two checkpoints."
    )
    keep_checkpoints: Annotated[PositiveInt, Role.BOOKKEEPING, Role.RESUMABLE] = Field(
        3, description="Newest checkpoints that are left; older ones are removed, but for:"
    )
    keep_every: Annotated[PositiveInt | None, Role.BOOKKEEPING, Role.RESUMABLE] = Field(
        None, description="Checkpoints of steps that are multiples of this; None: no others."
    )
    keep_best: Annotated[bool, Role.BOOKKEEPING, Role.RESUMABLE] = Field(
        True, description="The checkpoint with the best validation of gate.metric."
    )

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets must ascend without repeats, found {list(buckets)}")
        return buckets

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(
                f"micro_batch = {self.micro_batch} does not divide batch_size = {self.batch_size}, but all micro-batches "
                f"have the same size: set micro_batch = {largest_divisor(self.batch_size, self.micro_batch)}, or leave it out"
            )
        return self

    @field_validator("resume")
    @classmethod
    def _run_id(cls, resume: str | None) -> str | None:
        return require_run_id(resume)


class EvaluateConfig(Section):
    """Retrieval metrics on the hold-out."""

    candidates: Annotated[PositiveInt, Role.LEARNED] = Field(
        10_000, description="Documents beside the hold-out's own that a query is ranked against, at most."
    )
    bootstrap_samples: Annotated[PositiveInt, Role.BOOKKEEPING] = Field(
        1000, description="Bootstrap samples behind each confidence interval."
    )


class GateConfig(Section):
    """When a model may be published: new >= baseline - max_drop on `metric`. Baseline: the published model, else the parent."""

    metric: Literal["ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100"] = Field(
        "ndcg@10", description="Metric that decides."
    )
    max_drop: Annotated[float, Field(ge=0.0, le=1.0)] = Field(0.001, description="Absolute, 0.001 = 0.1 %.")
    min_queries: PositiveInt = Field(2000, description="A hold-out smaller than this cannot show 0.1 %.")
    allow_small: bool = Field(False, description="Judge even on a hold-out smaller than min_queries.")


class EmbedConfig(Section):
    """Offline embedding of the whole corpus."""

    children: Annotated[int, Field(ge=1, le=ARRAY_LIMIT), Role.BOOKKEEPING] = Field(
        4, description="Array size: independent jobs that share the parts."
    )
    ranks_per_child: Annotated[PositiveInt | None, Role.LEARNED] = Field(
        None, description="Ranks of a child's host, which may be another than training's. None: device.ranks_per_node."
    )
    rows_per_part: Annotated[PositiveInt, Role.BOOKKEEPING] = Field(100_000, description="Documents of an output file.")
    max_bad_fraction: Annotated[Fraction, Role.LEARNED] = Field(
        0.001, description="Documents that may be left out (and quarantined) before the run ends with 65."
    )
    dtype: Annotated[Literal["float32", "float16"], Role.BOOKKEEPING] = Field(
        "float32", description="Type of the stored embeddings."
    )
    buckets: Annotated[tuple[Annotated[int, Field(ge=4)], ...], Role.LEARNED, Role.GRAPH] = Field(
        (64, 128, 256),
        description="Lengths of rows in tokens, ascending; texts are cut at the longest. On devices that compile each is a "
        "graph, on neuron with weights of its own, and texts share rows; other devices make rows as long as their texts.",
    )
    tokens_per_batch: Annotated[PositiveInt, Role.BOOKKEEPING, Role.GRAPH] = Field(
        16_384, description="Tokens of a batch; a bucket's batch size is this / its length."
    )

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets must ascend without repeats, found {list(buckets)}")
        return buckets


class PublishConfig(Section):
    """Publishing. `registry: null` at the top level publishes nowhere."""


class ReportConfig(Section):
    """The HTML page of the run."""

    title: str | None = Field(None, description="Title of the page; None: `Run RUN_ID`.")


class LockConfig(Section):
    """One run per registry name at a time."""

    wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        0, description="How long to wait for a running owner; 0: refuse."
    )


class RunConfig(Section):
    """The whole configuration of one run."""

    run: Annotated[str | None, Role.BOOKKEEPING, Role.EXECUTION] = Field(
        None, description="An earlier run's id, to take it up where it stopped. None: a new run."
    )
    share: Annotated[str, Role.BOOKKEEPING, Role.EXECUTION] = Field(
        "manual", description="Fair-share identifier under which all jobs are submitted."
    )
    registry: Annotated[str | None, Role.BOOKKEEPING] = Field(
        "current", description="Name under which the run publishes; null: nowhere."
    )
    time_budget: Annotated[timedelta, Role.BOOKKEEPING, Role.EXECUTION] = Field(
        timedelta(hours=12), description="After this the run counts as overdue (an alarm, not a stop)."
    )
    nodes: Annotated[PositiveInt, Role.BOOKKEEPING] = Field(1, description="Nodes of the gang that checks, compiles and trains.")
    seed: Annotated[int, Field(ge=0, lt=2**31), Role.LEARNED] = Field(
        0, description="Seed of the batch order, dropout, the choice of replayed rows, and the bootstrap."
    )
    device: Annotated[DeviceConfig, Role.BOOKKEEPING, Role.TUNABLE] = DeviceConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    health_check: Annotated[HealthCheckConfig, Role.BOOKKEEPING] = HealthCheckConfig()
    compile: Annotated[CompileConfig, Role.BOOKKEEPING, Role.TUNABLE] = CompileConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: Annotated[GateConfig, Role.BOOKKEEPING] = GateConfig()
    embed: EmbedConfig = EmbedConfig()
    publish: Annotated[PublishConfig, Role.BOOKKEEPING] = PublishConfig()
    report: Annotated[ReportConfig, Role.BOOKKEEPING] = ReportConfig()
    lock: Annotated[LockConfig, Role.BOOKKEEPING, Role.EXECUTION] = LockConfig()

    def uris(self) -> Iterator[tuple[str, str]]:
        """Every URI that the configuration names, after the key that names it."""
        for key in keys_of(Role.URI, RunConfig):
            value = attrgetter(key)(self)
            yield from ((key, uri) for uri in ([value] if isinstance(value, str) else value or ()))

    def micro_batch_on(self, kind: str) -> int:
        """Pairs of a micro-batch on this kind of device: a divisor of `train.batch_size`, see `train.micro_batch`."""
        train = self.train
        if train.micro_batch is not None:
            return train.micro_batch
        if kind in EAGER_KINDS or self.device.loader.batches_per_execution > 1:
            return train.batch_size
        return largest_divisor(train.batch_size, self.most_compiled_pairs)

    @property
    def most_compiled_pairs(self) -> int:
        """Pairs that an automatic micro-batch has at most where graphs are compiled."""
        return max(1, MICRO_BATCH_TOKENS // (self.train.query_length + max(self.train.buckets)))

    def cuts_batches(self, kind: str) -> bool:
        """Whether batches have several micro-batches there, and so every step two forward passes."""
        return self.micro_batch_on(kind) < self.train.batch_size

    def adds_up(self, kind: str) -> bool:
        """Whether several backward passes of a step add up their gradients there."""
        return self.train.accumulation > 1 or self.cuts_batches(kind)

    @field_validator("run")
    @classmethod
    def _run_id(cls, run: str | None) -> str | None:
        return require_run_id(run)

    @field_validator("share")
    @classmethod
    def _share(cls, share: str) -> str:
        if not SHARE_PATTERN.fullmatch(share):
            raise ValueError(f"AWS Batch share identifiers are alphanumeric: must match {SHARE_PATTERN.pattern}")
        return share

    @field_validator("registry")
    @classmethod
    def _registry(cls, registry: str | None) -> str | None:
        if registry is not None and not REGISTRY_NAME_PATTERN.fullmatch(registry):
            raise ValueError(f"must match {REGISTRY_NAME_PATTERN.pattern}")
        return registry

    @field_validator("time_budget")
    @classmethod
    def _positive_budget(cls, budget: timedelta) -> timedelta:
        if budget <= timedelta(0):
            raise ValueError("must be positive")
        return budget

    @model_validator(mode="after")
    def _query_fits(self) -> RunConfig:
        for section, buckets in (("train", self.train.buckets), ("embed", self.embed.buckets)):
            if self.train.query_length > max(buckets):
                raise ValueError(
                    f"train.query_length {self.train.query_length} is longer than the longest of {section}.buckets,"
                    f" {max(buckets)}"
                )
        return self

    @model_validator(mode="after")
    def _casts_once(self) -> RunConfig:
        cast, precision = self.compile.auto_cast, self.device.precision
        if precision != "compiler" and cast not in (None, "none"):
            raise ValueError(
                f"compile.auto_cast = {cast} lets the compiler cast, device.precision = {precision} does not: set "
                "device.precision = compiler, or compile.auto_cast = none"
            )
        if precision == "compiler" and cast == "none":
            raise ValueError(
                "device.precision = compiler leaves the cast to the compiler, compile.auto_cast = none forbids it: set "
                "device.precision = fp32 or bf16, or leave compile.auto_cast out"
            )
        if precision == "compiler" and self.device.kind not in ("auto", "neuron"):
            raise ValueError(f"device.precision = compiler is neuron's; on {self.device.kind} use bf16 or fp32")
        return self

    @model_validator(mode="after")
    def _joined_steps_end_together(self) -> RunConfig:
        joined = self.device.loader.batches_per_execution
        if joined == 1:
            return self
        if len(self.train.buckets) > 1 or self.train.accumulation > 1:
            raise ValueError(
                f"device.loader.batches_per_execution = {joined} joins steps into one graph, one for every sequence of shapes:"
                " it needs a single length in train.buckets and train.accumulation = 1"
            )
        if self.train.micro_batch not in (None, self.train.batch_size):
            raise ValueError(
                f"device.loader.batches_per_execution = {joined} joins steps into one graph, which train.micro_batch ="
                f" {self.train.micro_batch} cuts: leave one of them out"
            )
        for name in ("log_every", "validate_every", "checkpoint_every"):
            if getattr(self.train, name) % joined:
                raise ValueError(
                    f"train.{name} = {getattr(self.train, name)} is no multiple of device.loader.batches_per_execution"
                    f" = {joined}: reading in between would cut a graph"
                )
        return self


def keys_of(role: Role, section: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys below a section that have a role, in the order of the schema; a section that has it stands for its keys."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        if role in field.metadata:
            keys.append(name)
        elif inner := _section_of(field.annotation):
            keys += (f"{name}.{key}" for key in keys_of(role, inner))
    return tuple(keys)


class Prices(Section):
    """USD for an hour of one node, by queue: of what the deployment pays for. None: not known, or not paid by the hour."""

    train: float | None = Field(None, ge=0, allow_inf_nan=False)
    embed: float | None = Field(None, ge=0, allow_inf_nan=False)
    cpu: float | None = Field(None, ge=0, allow_inf_nan=False)
    currency: Literal["USD"] = "USD"

    def by_queue(self) -> dict[Queue, float]:
        """The known ones."""
        found = {queue: getattr(self, queue.value) for queue in Queue}
        return {queue: price for queue, price in found.items() if price is not None}


class Deployment(Section):
    """What the state machine adds to an execution's input: the deployment's own config and limits.

    Attributes:
        config: partial RunConfig that stands under the execution's input.
        allowed_nodes: node counts that have job definitions.
        read: s3:// folders and files that runs may read beside the bucket of the run folder.
        local_paths: whether runs may name local paths: all stages share one machine.
        prices: what its hosts cost.
        hosts: queue -> what its nodes are, e.g. trn1.32xlarge.
        embed_hosts: how many hosts the array has at once, at most; None: as many as it has children.
        timeouts: stage -> minutes after which Batch ends an attempt; one that is not named has its default.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    allowed_nodes: tuple[int, ...] = (1,)
    read: tuple[Uri, ...] = ()
    local_paths: bool = False
    prices: Prices = Prices()
    hosts: dict[Queue, str] = Field(default_factory=dict)
    embed_hosts: PositiveInt | None = None
    timeouts: dict[Stage, PositiveInt] = Field(default_factory=dict)


class RunInput(Section):
    """`input.json`, written by the state machine into the run folder before prepare starts."""

    deployment: Deployment = Deployment()
    execution: dict[str, Any] = Field(default_factory=dict)
    execution_arn: str = ""


def build_config(*layers: Mapping[str, Any]) -> RunConfig:
    """Merge partial configurations, later ones over earlier ones, and validate the result.

    Raises:
        BadConfig: unknown key (with the nearest valid name), wrong type, or a value out of range.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    problems = list(_unknown_keys(merged, RunConfig, ()))
    if problems:
        raise BadConfig(
            "unknown configuration key",
            value=problems,
            rule="only the keys of the schema are allowed: `trnpipe config schema`",
            remedy="correct the spelling or remove the key",
        )
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise _bad_config(error) from error


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, section by section; lists and scalars are replaced whole."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def load_config_file(path: Path) -> dict[str, Any]:
    """Read a partial configuration from YAML or JSON.

    Raises:
        MissingInput: no such file.
        BadConfig: not YAML or JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingInput("the configuration file does not exist", value=path, remedy="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig("the configuration file cannot be read", value=f"{path}: {error}") from error
    try:
        loaded = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise BadConfig("the configuration file is not valid YAML or JSON", value=f"{path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise BadConfig("the configuration file does not hold an object", value=path, rule="the top level maps keys to values")
    return loaded


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Turn `--set train.steps=500` items into a partial configuration. Values are YAML (`null`, `true`, `[1, 2]`).

    Raises:
        BadConfig: an item without `=`, with an empty key, or with one that is deeper than any.
    """
    merged: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        names = key.strip().split(".")
        if not separator or not all(names) or len(names) > DEEPEST_KEY:
            raise BadConfig("cannot read the setting", value=setting, rule="a setting is KEY=VALUE, e.g. train.steps=500")
        try:
            value = read_yaml(text)
        except ValueError as error:
            raise BadConfig("the setting's value is not valid YAML", value=setting) from error
        if isinstance(value, str):
            value = _number(value)
        for name in reversed(names):
            value = {name: value}
        merged = merge(merged, value)
    return merged


def read_yaml(text: str) -> Any:
    """The value that YAML text stands for: data only, no tag makes an object.

    Raises:
        ValueError: no YAML, or a value that its tag does not fit.
    """
    try:
        return yaml.safe_load(text)
    # Values of the wrong form come out of PyYAML's constructors as whatever happened there.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _number(text: str) -> Any:
    # YAML 1.1 reads `1e-5` as a string because it lacks a dot; people write it all the time.
    try:
        return float(text)
    except ValueError:
        return text


def _unknown_keys(values: Mapping[str, Any], section: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in values.items():
        field = section.model_fields.get(key)
        here = ".".join((*path, str(key)))
        if field is None:
            known = [".".join((*path, name)) for name in section.model_fields]
            like = here[:LONGEST_KEY]
            near = difflib.get_close_matches(like, known, n=1, cutoff=0.6) or difflib.get_close_matches(
                like, _all_keys(RunConfig), n=1
            )
            yield here + (f" (did you mean {near[0]}?)" if near else "")
        elif isinstance(value, Mapping):
            inner = _section_of(field.annotation)
            if inner is not None:
                yield from _unknown_keys(value, inner, (*path, key))


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys(section: type[BaseModel], path: tuple[str, ...] = ()) -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(".".join((*path, name)))
        inner = _section_of(field.annotation)
        if inner is not None:
            keys += _all_keys(inner, (*path, name))
    return keys


def _bad_config(error: ValidationError) -> BadConfig:
    found = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "configuration"
        found.append(f"{where} = {_VALUES.repr(item['input'])}: {item['msg']}" if item["loc"] else f"{where}: {item['msg']}")
    return BadConfig(
        "the configuration is not valid",
        value=found,
        rule="see `trnpipe config schema`",
        remedy="correct the values named above",
    )


MODEL_URIS = keys_of(Role.URI, ModelConfig)
"""Settings of `model` that are URIs."""
