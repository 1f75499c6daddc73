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
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.contract import ARRAY_LIMIT, REGISTRY_NAME_PATTERN, RUN_ID_PATTERN, SHARE_PATTERN, Queue
from pipeline.errors import BadConfig, MissingInput
from pipeline.places import objection

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]


def _well_formed(uri: str) -> str:
    if wrong := objection(uri):
        raise ValueError(wrong)
    return uri


Uri = Annotated[str, AfterValidator(_well_formed)]
"""s3://BUCKET/KEY or a local path; whether a deployment may read it is its own matter (pipeline/places)."""
LONGEST_KEY = 100
"""Characters of an unknown key that are compared with the known ones: every key of the schema is shorter."""

DEEPEST_KEY = 10
"""Parts of a setting's key: more than any has."""

_VALUES = reprlib.Repr()
"""Values as messages name them: YAML can say in a line what fills the memory when it is written out."""
_VALUES.maxlevel, _VALUES.maxdict, _VALUES.maxlist = 3, 10, 20
_VALUES.maxstring = _VALUES.maxlong = _VALUES.maxother = 200


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent coercion of numbers to strings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """What is read. Folders are listed recursively; `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and `.parquet` count as shards."""

    train: tuple[Uri, ...] = Field((), description="URIs of training shards or folders of them: rows {id, query, document}.")
    corpus: tuple[Uri, ...] = Field(
        (), description="URIs of corpus shards or folders: rows {id, text}. Empty: the documents of all training rows."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our column name -> the file's, e.g. {query: title, document: body}."
    )
    holdout_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.02, description="Share of rows kept from training, chosen by hash of the normalized document text."
    )
    replay_fraction: Annotated[float, Field(ge=0.0, le=100.0)] = Field(
        0.1, description="Rows of earlier shards to train on again, as a share of the number of new rows."
    )
    max_bad_fraction: Fraction = Field(
        0.001, description="Rows that may be refused (and quarantined) before the run ends with 65."
    )
    require_new: bool = Field(True, description="End with 66 when no shard is new since the parent; false: replay only.")


class HeadConfig(Section):
    """Residual MLP head after pooling: x + W2 relu(W1 x + b1) + b2, W2 and b2 zero at first."""

    hidden: PositiveInt = 1024


class ModelConfig(Section):
    """The encoder and where it starts."""

    parent: Uri | None = Field(
        None,
        description="URI of the checkpoint to continue from (Hugging Face or sentence-transformers folder, .safetensors, "
        ".pt/.bin/.pth state_dict, training checkpoint). None: what the registry points at.",
    )
    base: Uri | None = Field(None, description="Folder with config.json and tokenizer for a parent that is a bare weight file.")
    weights_key: str | None = Field(None, description="Key under which a training checkpoint holds the weights; None: found.")
    pooling: Literal["mean", "cls"] = "mean"
    normalize: bool = True
    head: HeadConfig | None = None


class LoaderConfig(Section):
    """How batches reach a device that compiles (kinds `xla` and `neuron`): torch-xla's MpDeviceLoader."""

    batches_per_execution: PositiveInt = Field(
        1, description="Steps joined into one graph: fewer launches, a larger graph. More than 1 needs device.sync_points = 1."
    )
    host_prefetch: PositiveInt = Field(16, description="Batches prepared ahead in host memory.")
    device_prefetch: PositiveInt = Field(8, description="Batches put on the device ahead.")
    transfer_threads: PositiveInt = Field(1, description="Host threads that put batches on the device.")


class DeviceConfig(Section):
    """The kind of device and its numbers per node."""

    kind: Literal["auto", "cpu", "cuda", "xla", "neuron"] = "auto"
    precision: Literal["auto", "compiler", "bf16", "fp32"] = Field(
        "auto",
        description="What matrix products are computed in; weights stay fp32. bf16: torch autocast. compiler: neuronx-cc casts "
        "as compile.auto_cast says (neuron only). auto: compiler on neuron, else bf16 where the device computes in it, or fp32.",
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
    sync_points: Literal[1, 2] = Field(
        2, description="Where a step's graph is cut: after forward+backward and after the optimizer (2), or only after it (1)."
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

    matmul_size: PositiveInt = 256
    relative_tolerance_fp32: float = Field(1e-4, gt=0)
    relative_tolerance_bf16: float = Field(2e-2, gt=0)
    memory_mib: PositiveInt = Field(256, description="Device memory that is written and read back.")
    min_memory_gbps: float = Field(0.0, ge=0, description="Floor of the memory bandwidth probe, GB/s.")
    collective_bytes: tuple[PositiveInt, ...] = Field((4096, 1 << 20, 16 << 20), description="Message sizes of each collective.")
    min_collective_gbps: float = Field(0.0, ge=0, description="Floor of the largest message's bus bandwidth, GB/s.")
    collective_timeout_seconds: PositiveInt = 300
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
    target: Literal["trn1", "trn1n", "trn2", "inf2"] = "trn1"
    infer_target: Literal["trn1", "trn1n", "trn2", "inf2"] = Field(
        "trn1", description="Target of the hosts that evaluate and embed."
    )
    model_type: Literal["transformer", "generic", "unet-inference"] = "transformer"
    optlevel: Literal[1, 2, 3] = Field(1, description="1 compiles fastest; 2 and 3 gain some throughput.")
    auto_cast: Literal["none", "matmult", "all"] | None = Field(
        None, description="What the compiler casts. None: all where device.precision is `compiler`, else none."
    )
    auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] = Field("bf16", description="To which type the compiler casts.")
    retry_failed: bool = Field(
        True, description="Compile again what failed in an earlier run, instead of failing from the cache."
    )
    parallel: PositiveInt = Field(8, description="Compilers that run at the same time.")
    cache: Uri | None = Field(
        None,
        description="s3:// URI under which the compiler's persistent caches are; None: graphs/neuron-cache in the run's bucket.",
    )

    @field_validator("cache")
    @classmethod
    def _on_s3(cls, cache: str | None) -> str | None:
        if cache is not None and (not cache.startswith("s3://") or any(character.isspace() for character in cache)):
            raise ValueError("must be an s3:// URI without spaces: every host of every run reads it")
        return cache


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

    steps: PositiveInt | None = Field(None, description="Optimizer steps; None: `epochs` over the run's rows.")
    epochs: PositiveInt = 1
    batch_size: PositiveInt = Field(64, description="Pairs per rank whose documents compete; times `accumulation` per step.")
    accumulation: PositiveInt = Field(
        1, description="Batches whose gradients are added up before an optimizer step: a larger batch in the same memory."
    )
    activation_checkpointing: bool = Field(
        False, description="Compute each layer's activations again in the backward pass instead of keeping them."
    )
    query_length: Annotated[int, Field(ge=4)] = Field(32, description="Static length of queries in tokens.")
    buckets: tuple[Annotated[int, Field(ge=4)], ...] = Field(
        (64, 128, 256), description="Static lengths of documents, ascending."
    )
    learning_rate: float = Field(2e-5, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: Fraction = 0.1
    final_lr_fraction: Fraction = 0.0
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    clip_norm: float | None = Field(1.0, gt=0)
    temperature: float = Field(0.05, gt=0)
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="Of hidden states while training; None: the model's own. Attention probabilities are never dropped."
    )
    resume: str | None = Field(
        None,
        description="Id of a run whose training to go on with, on other nodes or ranks. None: begin with the parent.",
    )
    log_every: PositiveInt = 10
    validate_every: PositiveInt = 100
    validation_queries: PositiveInt = Field(512, description="Hold-out queries of the evaluation inside training.")
    checkpoint_every: PositiveInt = 200
    keep_checkpoints: PositiveInt = Field(3, description="Newest checkpoints that are left; older ones are removed, but for:")
    keep_every: PositiveInt | None = Field(None, description="Checkpoints of steps that are multiples of this; None: no others.")
    keep_best: bool = Field(True, description="The checkpoint with the best validation of gate.metric.")

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets must ascend without repeats, found {list(buckets)}")
        return buckets

    @field_validator("resume")
    @classmethod
    def _run_id(cls, resume: str | None) -> str | None:
        return require_run_id(resume)


class EvaluateConfig(Section):
    """Retrieval metrics on the hold-out."""

    candidates: PositiveInt = Field(
        10_000, description="Documents beside the hold-out's own that a query is ranked against, at most."
    )
    bootstrap_samples: PositiveInt = 1000


class GateConfig(Section):
    """When a model may be published: new >= parent - max_drop on `metric`."""

    metric: Literal["ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100"] = "ndcg@10"
    max_drop: Annotated[float, Field(ge=0.0, le=1.0)] = Field(0.001, description="Absolute, 0.001 = 0.1 %.")
    min_queries: PositiveInt = Field(2000, description="A hold-out smaller than this cannot show 0.1 %.")
    allow_small: bool = Field(False, description="Judge even on a hold-out smaller than min_queries.")


class EmbedConfig(Section):
    """Offline embedding of the whole corpus."""

    children: Annotated[int, Field(ge=1, le=ARRAY_LIMIT)] = Field(
        4, description="Array size: independent jobs that share the parts."
    )
    ranks_per_child: PositiveInt | None = Field(
        None, description="Ranks of a child's host, which may be another than training's. None: device.ranks_per_node."
    )
    rows_per_part: PositiveInt = 100_000
    max_bad_fraction: Fraction = Field(
        0.001, description="Documents that may be left out (and quarantined) before the run ends with 65."
    )
    dtype: Literal["float32", "float16"] = "float32"
    buckets: tuple[Annotated[int, Field(ge=4)], ...] = Field(
        (64, 128, 256),
        description="Lengths of rows in tokens, ascending; texts are cut at the longest. On devices that compile each is a "
        "graph, on neuron with weights of its own, and texts share rows; other devices make rows as long as their texts.",
    )
    tokens_per_batch: PositiveInt = Field(16_384, description="Tokens of a batch; a bucket's batch size is this / its length.")

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

    title: str | None = None


class LockConfig(Section):
    """One run per registry name at a time."""

    wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        0, description="How long to wait for a running owner; 0: refuse."
    )


class RunConfig(Section):
    """The whole configuration of one run."""

    run: str | None = Field(None, description="An earlier run's id, to take it up where it stopped. None: a new run.")
    share: str = Field("manual", description="Fair-share identifier under which all jobs are submitted.")
    registry: str | None = Field("current", description="Name under which the run publishes; null: nowhere.")
    time_budget: timedelta = Field(
        timedelta(hours=12), description="After this the run counts as overdue (an alarm, not a stop)."
    )
    nodes: PositiveInt = 1
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: DeviceConfig = DeviceConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    health_check: HealthCheckConfig = HealthCheckConfig()
    compile: CompileConfig = CompileConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: GateConfig = GateConfig()
    embed: EmbedConfig = EmbedConfig()
    publish: PublishConfig = PublishConfig()
    report: ReportConfig = ReportConfig()
    lock: LockConfig = LockConfig()

    def uris(self) -> Iterator[tuple[str, str]]:
        """Every URI that the configuration names, after the key that names it."""
        yield from (("data.train", uri) for uri in self.data.train)
        yield from (("data.corpus", uri) for uri in self.data.corpus)
        single = {"model.parent": self.model.parent, "model.base": self.model.base, "compile.cache": self.compile.cache}
        yield from ((key, uri) for key, uri in single.items() if uri is not None)

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
        if precision in ("bf16", "fp32") and cast not in (None, "none"):
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
        for name in ("log_every", "validate_every", "checkpoint_every"):
            if getattr(self.train, name) % joined:
                raise ValueError(
                    f"train.{name} = {getattr(self.train, name)} is no multiple of device.loader.batches_per_execution"
                    f" = {joined}: reading in between would cut a graph"
                )
        return self


class Prices(Section):
    """USD for an hour of one node, by queue: of what the deployment pays for. None: not known, or nobody pays by the hour."""

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
    """

    config: dict[str, Any] = Field(default_factory=dict)
    allowed_nodes: tuple[int, ...] = (1,)
    read: tuple[Uri, ...] = ()
    local_paths: bool = False
    prices: Prices = Prices()
    hosts: dict[Queue, str] = Field(default_factory=dict)
    embed_hosts: PositiveInt | None = None


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
