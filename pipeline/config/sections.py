"""The sections of the run configuration, one per stage or subject; training's is in pipeline/config/train. Every key has a
description and its roles."""

from __future__ import annotations

import re
import unicodedata
from enum import Enum
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from pipeline.allowed_uris import objection
from pipeline.contract import ARRAY_LIMIT, RUN_ID_PATTERN

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]


def refuse_if(wrong: object, why: str) -> None:
    """Refuse a value, in its validator, where `wrong` is true.

    Raises:
        ValueError: for this reason.
    """
    if wrong:
        raise ValueError(why)


def _well_formed(uri: str) -> str:
    refuse_if(wrong := objection(uri), str(wrong))
    return uri


def matching(pattern: re.Pattern[str], rule: str = "") -> AfterValidator:
    """Return the validator of a text that the whole pattern must match.

    Args:
        rule: what the message begins with.
    """

    def check(text: str) -> str:
        refuse_if(not pattern.fullmatch(text), f"{rule}must match {pattern.pattern}")
        return text

    return AfterValidator(check)


Uri = Annotated[str, AfterValidator(_well_formed)]
"""s3://BUCKET/KEY or a local path; which of them a deployment may read is checked later (pipeline/allowed_uris)."""

RunId = Annotated[str, matching(RUN_ID_PATTERN)]
TaskName = Annotated[str, matching(re.compile(r"[A-Za-z0-9_-]{1,64}"))]


def normalized(text: str) -> str:
    """Return a text as equal ones are recognised: after NFKC, case folding and collapsing white space."""
    # NFKC leaves ASCII unchanged.
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


PREFETCH_BATCHES = 4
"""Batches that are prepared ahead in host memory where nothing is compiled."""


class KeyRole(Enum):
    """The uses of a configuration key in a run. The roles of a section are those of all its keys.

    Every key has one of the first two, and any of the others.
    """

    LEARNED = "learned"
    """Decides what is learned or how it is measured: parity compares only runs that agree in it."""
    BOOKKEEPING = "bookkeeping"
    """Decides neither, or is compared by its content: parity compares runs that differ in it, too."""
    GRAPH = "graph"
    """A shape or a constant of graphs: part of the fingerprint of compiled sets."""
    RESUMABLE = "resumable"
    """May differ between a run and the one whose training it resumes: its effect is compared, or changes no result."""
    EXECUTION = "execution"
    """Controls how an execution runs, not what it computes: may differ when an execution resumes a run."""
    TUNABLE = "tunable"
    """Controls how the run trains on its rows, not which rows or what it learns from them: tune may vary it."""
    URI = "uri"
    """One URI or several, which the deployment must allow."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent coercion of numbers to strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataLimits(Section):
    """Largest changes from the parent's run to this one. Null: a large change is reported; a number: one beyond it ends the run
    with 65 before the gang starts."""

    rows: float | None = Field(None, ge=1, description="Factor between the rows of the new shards.")
    locale_share: Fraction | None = Field(None, description="Difference of a locale's share of the new rows.")
    task_share: Fraction | None = Field(None, description="Difference of a task's share of the new rows.")
    mean_label: float | None = Field(None, ge=0, description="Difference of the mean label.")
    median_length: float | None = Field(None, ge=1, description="Factor between the median tokens of queries, and of documents.")
    duplicates: Fraction | None = Field(None, description="Difference of the share of repeated rows.")
    documents_gone: Fraction | None = Field(None, description="Share of last week's documents that are no longer there.")


class TaskData(Section):
    """Files of one task. All of their rows belong to it, so they need no column `task`."""

    train: Annotated[tuple[Uri, ...], Field(min_length=1)] = Field(description="URIs of training shards or folders of them.")
    holdout: tuple[Uri, ...] = Field((), description="More of its files, all of whose rows are held out, as in `data.holdout`.")
    columns: dict[str, str] = Field(default_factory=dict, description="More of `data.columns`, or others in their place.")


class DataConfig(Section):
    """Input files. Folders are listed recursively; `.jsonl`, `.csv`, `.tsv` (also `.gz` or `.zst`) and `.parquet` are shards."""

    train: Annotated[tuple[Uri, ...], KeyRole.BOOKKEEPING, KeyRole.URI] = Field(
        (), description="URIs of training shards or folders of them: rows {id, query, document}."
    )
    corpus: Annotated[tuple[Uri, ...], KeyRole.BOOKKEEPING, KeyRole.URI] = Field(
        (), description="URIs of corpus shards or folders: rows {id, text}. Empty: the documents of all training rows."
    )
    corpus_mode: Annotated[Literal["files", "snapshots", "deltas"], KeyRole.BOOKKEEPING] = Field(
        "files",
        description="files: all corpus shards together. snapshots: the newest folder below each URI that holds a file _SUCCESS; "
        "what it lacks is gone. deltas: files or folders below each URI in the order of their names; later ones replace "
        "documents of earlier ones.",
    )
    delete: Annotated[tuple[Uri, ...], KeyRole.BOOKKEEPING, KeyRole.URI] = Field(
        (),
        description="Lists of what must not be trained on, evaluated with or embedded from now on: text files or folders, "
        "one id or hash:DIGITS a line.",
    )
    delete_days: Annotated[PositiveInt, KeyRole.BOOKKEEPING] = Field(
        30,
        description="Days after which nothing that `delete` names may be left in old versions of ingested files. A run with "
        "deletions ends with 64 where the bucket keeps old versions longer.",
    )
    columns: Annotated[dict[str, str], KeyRole.LEARNED] = Field(
        default_factory=dict,
        description="Our column name -> the file's, a template, or what all rows have, `=` alone for nothing: {query: title, "
        'document: "{name}. {brand}", locale: "=de"}.',
    )
    tasks: Annotated[dict[TaskName, TaskData], KeyRole.BOOKKEEPING] = Field(
        default_factory=dict,
        description="More training files by their task, perhaps with columns of their own: {TASK: SECTION}. A file may have "
        "rows of several tasks; it then is none of `train`.",
    )
    holdout: Annotated[tuple[Uri, ...], KeyRole.BOOKKEEPING] = Field(
        (),
        description="URIs of shards, or folders of them, whose rows are all held out; rows of training shards with their texts "
        "are not trained on.",
    )
    holdout_fraction: Annotated[float, Field(gt=0.0, lt=1.0), KeyRole.LEARNED] = Field(
        0.02, description="Share of rows kept from training, chosen by hash of the normalized document text."
    )
    holdout_by: Annotated[Literal["document", "query", "group"], KeyRole.LEARNED] = Field(
        "document",
        description="What is held out together: rows of a document, of a query, or of a value of column `group`.",
    )
    holdout_queries: Annotated[PositiveInt, KeyRole.LEARNED] = Field(
        50_000, description="Held-out queries that evaluate uses, at most: those with the smallest hashes."
    )
    replay_fraction: Annotated[float, Field(ge=0.0, le=100.0), KeyRole.LEARNED] = Field(
        0.1, description="Seen rows to train on again, as a share of the number of new rows."
    )
    max_repeats: Annotated[PositiveInt, KeyRole.LEARNED] = Field(
        1, description="How often the run trains on equal rows in an epoch, at most."
    )
    max_bad_fraction: Annotated[Fraction, KeyRole.BOOKKEEPING] = Field(
        0.001, description="Share of rows that ingest may refuse (and quarantine) before the run ends with 65."
    )
    require_new: Annotated[bool, KeyRole.BOOKKEEPING] = Field(
        True, description="End with 66 when no row is new since the parent; false: replay only."
    )
    new_identity: Annotated[bool, KeyRole.BOOKKEEPING] = Field(
        False, description="Accept columns or templates other than the parent's: every row then counts as new."
    )
    limits: Annotated[DataLimits, KeyRole.BOOKKEEPING] = DataLimits()
    ingest_children: Annotated[int, Field(ge=1, le=ARRAY_LIMIT), KeyRole.BOOKKEEPING] = Field(
        4,
        description="Array size of ingest: independent jobs that divide the shards which are not ingested yet among themselves.",
    )

    @property
    def training(self) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
        """Setting -> its URIs of training or held-out shards, and the columns of their files."""
        tasks = {
            f"data.tasks.{name}.{use}": (uris, {**self.columns, **task.columns, "task": f"={name}"})
            for name, task in sorted(self.tasks.items())
            for use, uris in (("train", task.train), ("holdout", task.holdout))
        }
        every = {"data.train": (self.train, self.columns), "data.holdout": (self.holdout, self.columns), **tasks}
        return {setting: one for setting, one in every.items() if one[0] or setting == "data.train"}

    def held_out_by(self, setting: str) -> str:
        """Return `holdout_by`, for shards that are held out as a whole behind `all `."""
        return f"all {self.holdout_by}" if setting.endswith(".holdout") else self.holdout_by

    @property
    def training_uris(self) -> tuple[str, ...]:
        """URIs of all training shards, and of those that are held out."""
        return tuple(uri for uris, _ in self.training.values() for uri in uris)


class HeadLayer(Section):
    """activation(W x + b). In a new layer W is random, within 1 / sqrt(inputs) of 0 and the same in every run, and b is 0."""

    out: PositiveInt = Field(description="Size of its output.")
    activation: Literal["relu", "gelu", "tanh", "identity"] = Field(
        "identity", description="Applied to every number of its output; gelu is x Φ(x), computed with erf."
    )


class HeadConfig(Section):
    """MLP after pooling. With `hidden`: residual, x + W2 relu(W1 x + b1) + b2, with W2 and b2 zero at first. With `layers`, or
    their list in place of this section: one layer after another."""

    hidden: PositiveInt | None = Field(None, description="Width of the residual head's hidden layer.")
    layers: tuple[HeadLayer, ...] = Field((), description="Layers in order; the last one's `out` is the embeddings' size.")

    @model_validator(mode="after")
    def _one_form(self) -> HeadConfig:
        refuse_if((self.hidden is None) != bool(self.layers), "a head has either `hidden` or a list of layers")
        return self

    @model_serializer
    def as_written(self) -> Any:
        """Return the head as a configuration file has it."""
        return [layer.model_dump() for layer in self.layers] or {"hidden": self.hidden}


class ModelConfig(Section):
    """The encoder and where it starts."""

    initial: Annotated[Uri | None, KeyRole.BOOKKEEPING, KeyRole.URI] = Field(
        None,
        description="URI of the model of the very first run, while the registry names none: a Hugging Face or "
        "sentence-transformers folder, .safetensors, .pt/.bin/.pth state_dict, training checkpoint.",
    )
    parent: Annotated[Uri | None, KeyRole.BOOKKEEPING, KeyRole.URI] = Field(
        None,
        description="URI of the model that one execution continues from, in the forms of `initial`. None: the model that the "
        "registry names, else `initial`. A deployment's own configuration must not set it.",
    )
    base: Annotated[Uri | None, KeyRole.BOOKKEEPING, KeyRole.URI] = Field(
        None, description="Folder with config.json and tokenizer for a parent that is a bare weight file."
    )
    weights_key: Annotated[str | None, KeyRole.BOOKKEEPING] = Field(
        None, description="Key of the weights in a training checkpoint; None: find it."
    )
    prompts: Annotated[dict[str, str] | None, KeyRole.LEARNED] = Field(
        None,
        description="Texts before every query and every document, and those before the queries of a task in place of the first: "
        "{query: TEXT, document: TEXT, TASK: TEXT}. They go into the model's folder. None: those of the parent's folder.",
    )
    pooling: Annotated[Literal["mean", "cls"], KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        "mean", description="How token vectors become one vector: their mean, or the first token's vector."
    )
    normalize: Annotated[bool, KeyRole.LEARNED, KeyRole.GRAPH] = Field(True, description="Whether embeddings have length 1.")
    head: Annotated[
        HeadConfig | None,
        BeforeValidator(
            lambda value: {"layers": value} if isinstance(value, list | tuple) else value,
            json_schema_input_type=HeadConfig | tuple[HeadLayer, ...] | None,
        ),
        KeyRole.LEARNED,
        KeyRole.GRAPH,
    ] = Field(None, description="MLP after pooling: a section, or a list of layers; None: no head.")
    head_key: Annotated[
        Annotated[str, matching(re.compile(r"[^{}]*\{\}[^{}]*"), "exactly one {}, for the layer's number: ")] | None,
        KeyRole.BOOKKEEPING,
    ] = Field(
        None,
        description="Name of the head's layers in a parent's weights, {} in place of their numbers, such as `mlp.{}`: rising "
        "numbers, gaps allowed, each with `.weight` and `.bias`. None: as trnpipe names them.",
    )


class LoaderConfig(Section):
    """Batches on their way to a device that compiles (`xla` and `neuron`): torch-xla's MpDeviceLoader."""

    batches_per_execution: Annotated[PositiveInt, KeyRole.GRAPH] = Field(
        1, description="Steps joined into one graph: fewer launches, a larger graph. More than 1 needs device.sync_points = 1."
    )
    host_prefetch: PositiveInt = Field(16, description="Batches prepared ahead in host memory.")
    device_prefetch: PositiveInt = Field(8, description="Batches put on the device ahead.")
    transfer_threads: PositiveInt = Field(1, description="Host threads that put batches on the device.")


class DeviceConfig(Section):
    """The device type and the ranks of a node."""

    kind: Literal["auto", "cpu", "cuda", "xla", "neuron"] = Field(
        "auto", description="Device type. auto: neuron where there is one, else cuda, else cpu."
    )
    precision: Literal["auto", "compiler", "bf16", "fp32"] = Field(
        "auto",
        description="Precision of training's matrix products; weights and optimizer stay fp32. bf16: torch autocast. "
        "compiler: neuronx-cc casts as compile.auto_cast says, also in the optimizer (neuron only). auto: bf16 where the device "
        "is faster in it, else fp32.",
    )
    ranks_per_node: PositiveInt | None = Field(None, description="None: 32 on neuron, all GPUs on cuda, else 1.")
    threads_per_rank: PositiveInt | None = Field(None, description="Host threads of a rank; None: cores / ranks on the host.")
    memory_gib: float | None = Field(
        None, gt=0, description="Memory of a rank's device. None: 16 on neuron; on cuda the GPU's, if prepare has one."
    )
    host_memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory for a node's ranks together. None: on neuron a job's share of a trn1.32xlarge, else unknown.",
    )
    sync_points: Annotated[Literal[1, 2], KeyRole.GRAPH] = Field(
        2,
        description="Cuts of a step's graph: after forward+backward and after the optimizer (2), or only after it (1). "
        "Micro-batches are always cut.",
    )
    loader: LoaderConfig = LoaderConfig()

    @model_validator(mode="after")
    def _joined_steps_have_one_sync(self) -> DeviceConfig:
        refuse_if(
            self.loader.batches_per_execution > 1 and self.sync_points != 1,
            f"loader.batches_per_execution = {self.loader.batches_per_execution} joins steps into one graph, which "
            "sync_points = 2 cuts: set sync_points = 1, or batches_per_execution = 1",
        )
        return self


class HealthCheckConfig(Section):
    """Thresholds under which a host counts as unhealthy. A floor of 0 measures without judging."""

    matmul_size: PositiveInt = Field(256, description="Rows and columns of the matrices of the known-answer operations.")
    relative_tolerance_fp32: float = Field(1e-4, gt=0, description="Largest relative error of a known-answer operation in fp32.")
    relative_tolerance_bf16: float = Field(2e-2, gt=0, description="Largest relative error of a known-answer operation in bf16.")
    memory_mib: PositiveInt = Field(256, description="Device memory that the check writes and reads back.")
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
        ("2.27",), description="Neuron driver releases (MAJOR.MINOR) that were tested with the container's runtime."
    )
    nccom_bytes: PositiveInt = Field(32 << 20, description="Message size of nccom-test's collectives inside a host.")
    min_nccom_gibps: float = Field(0.0, ge=0, description="Floor of nccom-test's bus bandwidth inside a host, GiB/s.")
    tool_timeout_seconds: PositiveInt = Field(60, description="Time limit of neuron-ls and similar tools.")
    nccom_timeout_seconds: PositiveInt = Field(300, description="Time limit of a collective of nccom-test, compilation included.")


class CompileConfig(Section):
    """Ahead-of-time compilation, and neuronx-cc's flags (trnpipe builds NEURON_CC_FLAGS from these alone)."""

    enabled: bool = Field(True, description="false: never compile ahead; a run without a complete compiled set ends with 64.")
    trial_steps: Annotated[int, Field(ge=2, le=50)] = Field(
        4, description="Training steps of the trial, which meets every graph once."
    )
    new_graphs: Literal["report", "stop"] = Field(
        "report", description="A graph that training meets and compile did not: log and count it, or end the run with 69."
    )
    target: Literal["trn1", "trn1n"] = Field(
        "trn1", description="Target of the hosts that train. trn2 is not supported: its cores, ranks and memory differ."
    )
    infer_target: Literal["trn1", "trn1n", "inf2"] = Field("trn1", description="Target of the hosts that evaluate and embed.")
    model_type: Literal["transformer", "generic", "unet-inference"] = Field(
        "transformer", description="neuronx-cc's --model-type."
    )
    optlevel: Literal[1, 2, 3] = Field(1, description="1 compiles fastest; 2 and 3 gain some throughput.")
    auto_cast: Literal["none", "matmult", "all"] | None = Field(
        None,
        description="Operations that the compiler casts in training. None: all if device.precision is `compiler`, else none.",
    )
    auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] = Field(
        "bf16", description="Type to which the compiler casts in training: bf16 or tf32."
    )
    infer_auto_cast: Literal["none", "matmult", "all"] | None = Field(
        None,
        description="Operations that the compiler casts for evaluate and embed. None: matmult, but none if device.precision is "
        "fp32.",
    )
    infer_auto_cast_type: Literal["bf16", "fp16", "tf32", "fp8_e4m3"] = Field(
        "bf16", description="Type to which the compiler casts for evaluate and embed."
    )
    retry_failed: bool = Field(
        True, description="Compile graphs again that failed in an earlier run, instead of failing from the cache."
    )
    where: Literal["gang", "cpu"] = Field(
        "gang",
        description="Where neuron's graphs are compiled: `gang`, on the hosts that train, which wait meanwhile; `cpu`, in a job "
        "of 16 vCPUs on Fargate, before the gang's health check. No effect on other device types.",
    )
    parallel: PositiveInt = Field(8, description="Parallel compilers.")
    cache: Annotated[Uri | None, KeyRole.URI] = Field(
        None,
        description="s3:// URI of the folder of the compiler's persistent caches; None: graphs/neuron-cache in the run's bucket.",
    )

    def training_cast(self, precision: str) -> str:
        """Return the operations that the compiler casts in training, `none` unless the resolved precision is `compiler`."""
        return (self.auto_cast or "all") if precision == "compiler" else "none"

    def inference_cast(self, precision: str) -> str:
        """Return the operations that the compiler casts for evaluate and embed, given training's resolved precision."""
        return self.infer_auto_cast or ("none" if precision == "fp32" else "matmult")

    @field_validator("auto_cast_type")
    @classmethod
    def _trainable(cls, cast: str) -> str:
        refuse_if(
            cast in ("fp16", "fp8_e4m3"),
            f"{cast} has too small a range for gradients and optimizer state, which are cast too: set bf16 or tf32, or "
            f"compile.infer_auto_cast_type = {cast} for evaluate and embed alone",
        )
        return cast

    @field_validator("cache")
    @classmethod
    def _on_s3(cls, cache: str | None) -> str | None:
        refuse_if(
            cache is not None and (not cache.startswith("s3://") or any(character.isspace() for character in cache)),
            "must be an s3:// URI without spaces: every host of every run reads it",
        )
        return cache


class GoldenSet(Section):
    """Queries, judgements and a corpus that stay the same, in the form of BEIR (docs/data.md)."""

    name: Annotated[str, matching(re.compile(r"[a-z0-9][a-z0-9-]{0,39}"))] = Field(
        description="Its slice is `golden:NAME`. Lower-case letters, digits and hyphens."
    )
    queries: Uri = Field(description="JSONL with `_id` and `text`.")
    qrels: Uri = Field(description="TSV with a heading: query, document, score; above 0 is relevant.")
    corpus: Uri = Field(description="JSONL with `_id`, `text` and perhaps `title`.")

    @property
    def uris(self) -> tuple[str, str, str]:
        return self.queries, self.qrels, self.corpus


class EvaluateConfig(Section):
    """Retrieval metrics on the hold-out."""

    candidates: Annotated[PositiveInt, KeyRole.LEARNED] = Field(
        100_000,
        description="The most documents, besides the hold-out's own, that every model ranks for a query and whose drift is "
        "measured: of the corpus, chosen by hash.",
    )
    sets: Annotated[tuple[GoldenSet, ...], KeyRole.BOOKKEEPING] = Field(
        (), description="Golden sets, on which every new model and its baseline are compared, too."
    )

    @field_validator("sets")
    @classmethod
    def _named_once(cls, value: tuple[GoldenSet, ...]) -> tuple[GoldenSet, ...]:
        refuse_if(len({one.name for one in value}) < len(value), "two golden sets have one name")
        return value

    bootstrap_samples: Annotated[PositiveInt, KeyRole.BOOKKEEPING] = Field(
        1000, description="Bootstrap samples behind each confidence interval."
    )


MetricName = Literal["ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100"]
ClassMetricName = Literal["accuracy"]
DriftName = Literal["cosine", "overlap@10"]
Drop = Annotated[float, Field(gt=0.0, le=1.0)]


class Guardrail(Section):
    """A slice that must not become surely worse."""

    slice: Annotated[str, matching(re.compile(r"fresh|drift|mixed|(locale|task|golden):.+"))] = Field(
        description="`locale:NAME`, `task:NAME`, `golden:NAME`, with `*` for all of them; `fresh`: queries of the newest week; "
        "`mixed`: new queries against the published documents; `drift`: how close documents stay to their vectors."
    )
    metric: MetricName | ClassMetricName | Literal["macro-f1"] | DriftName = Field(
        "ndcg@10",
        description="Metric of the slice; `accuracy` or `macro-f1` of a task with classes, `accuracy` of a locale or the "
        "newest week where gate.metric is one of these; of `drift` the mean `cosine`, or `overlap@10`: of neighbours that stay.",
    )
    max_drop: Drop = Field(
        0.02, description="Absolute; a larger drop refuses the model if it is surely larger. Of `drift` the distance from 1."
    )

    @model_validator(mode="after")
    def _metric_of_slice(self) -> Guardrail:
        known = get_args(DriftName if self.slice == "drift" else MetricName)
        if self.slice == "fresh" or self.slice.startswith(("task:", "locale:")):
            known += get_args(ClassMetricName) + (("macro-f1",) if self.slice.startswith("task:") else ())
        refuse_if(self.metric not in known, f"metric = {self.metric}: the slice {self.slice} has {', '.join(known)}")
        return self


class GateConfig(Section):
    """When a model may be published, against the published model, else the parent."""

    metric: MetricName | ClassMetricName | Literal["macro-f1"] = Field(
        "ndcg@10",
        description="Metric that decides. `accuracy` or `macro-f1`: of held-out texts; every row then has a task with classes. "
        "macro-f1, the mean F1 of all tasks' classes, is no mean over texts: `total_drop` and curves are about accuracy then.",
    )
    max_drop: Drop = Field(0.005, description="The drop that the new model must not have, absolute: 0.005 = 0.5 %.")
    undecided: Literal["refuse", "accept"] = Field(
        "refuse",
        description="What to do where the hold-out leaves open whether the drop is larger than `max_drop`. refuse: a model with "
        "such a drop is published in at most 5 % of weeks; accept: one without it is refused in at most 5 %.",
    )
    total_drop: Drop = Field(
        0.01,
        description="The drop that the new model must not have against the reference, a published run whose hold-out and values "
        "stay: it bounds the sum of all weeks' drops.",
    )
    guardrails: tuple[Guardrail, ...] = Field(
        (
            *(Guardrail(slice=name) for name in ("locale:*", "task:*", "golden:*", "fresh")),
            Guardrail(slice="task:*", metric="accuracy"),
        ),
        description="Slices that must not become surely worse; those of under 100 documents are not judged.",
    )

    @property
    def metric_of_each(self) -> MetricName | ClassMetricName:
        """The metric that each query or text has a value of: accuracy where macro F1 decides."""
        return "accuracy" if self.metric == "macro-f1" else self.metric


class EmbedConfig(Section):
    """Offline embedding of the whole corpus."""

    children: Annotated[int, Field(ge=1, le=ARRAY_LIMIT), KeyRole.BOOKKEEPING] = Field(
        4, description="Array size: independent jobs that divide the parts among themselves."
    )
    ranks_per_child: Annotated[PositiveInt | None, KeyRole.LEARNED] = Field(
        None,
        description="Ranks of a host that embeds or evaluates, which may differ from training's. None: device.ranks_per_node.",
    )
    rows_per_part: Annotated[PositiveInt, KeyRole.BOOKKEEPING] = Field(100_000, description="Documents of an output file.")
    max_bad_fraction: Annotated[Fraction, KeyRole.LEARNED] = Field(
        0.001, description="Share of documents that embed may leave out (and quarantine) before the run ends with 65."
    )
    dtype: Annotated[Literal["float32", "float16"], KeyRole.BOOKKEEPING] = Field(
        "float32", description="Type of the stored embeddings."
    )
    dimensions: Annotated[PositiveInt | None, KeyRole.LEARNED] = Field(
        None,
        description="Size of the published embeddings: the first so many numbers, with length 1 again if model.normalize. None: "
        "all. A model keeps its size, so a change takes effect with the next model.",
    )
    length: Annotated[int, Field(ge=4), KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        256, description="Tokens at which texts are cut, and on devices that compile those of a row, which texts share."
    )
    tokens_per_batch: Annotated[PositiveInt, KeyRole.BOOKKEEPING, KeyRole.GRAPH] = Field(
        16_384, description="Tokens of a batch, which has this / `length` rows."
    )


class PublishConfig(Section):
    """Publishing. `registry: null` at the top level publishes nowhere."""


class ReportConfig(Section):
    """The HTML page of the run."""

    title: str | None = Field(None, description="Title of the page; None: `Run RUN_ID`.")
    texts: bool = Field(
        False,
        description="Show the ten queries that rose most and the ten that fell most, with their best documents. "
        "evaluate then writes these texts to evaluate/changes.json: leave it out where pages may not show them.",
    )


class LockConfig(Section):
    """One run per registry name at a time."""

    wait_minutes: Annotated[int, Field(ge=0, le=7 * 24 * 60)] = Field(
        0, description="How long to wait for a running owner; 0: refuse."
    )
