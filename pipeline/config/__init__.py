"""The configuration of a run: one frozen `RunConfig` with a section per stage, which refuses unknown keys.

Precedence, lowest first: the defaults < the deployment's config < the execution's input < `--set a.b=value`. `prepare` merges
and validates once and writes the result into `plan.json`; every later stage trusts it.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from pipeline.config.sections import (
    CompileConfig,
    DataConfig,
    DataLimits,
    DeviceConfig,
    EmbedConfig,
    EvaluateConfig,
    GateConfig,
    GoldenSet,
    HeadConfig,
    HeadLayer,
    HealthCheckConfig,
    KeyRole,
    LoaderConfig,
    LockConfig,
    ModelConfig,
    PositiveInt,
    PublishConfig,
    ReportConfig,
    RunId,
    Section,
    Uri,
    matching,
    refuse_if,
)
from pipeline.config.train import MineConfig, TrainConfig
from pipeline.contract import EAGER_KINDS, REGISTRY_NAME_PATTERN, SHARE_PATTERN, Queue, Stage
from pipeline.errors import BadConfig, MissingInput

__all__ = [
    "MODEL_URIS",
    "CompileConfig",
    "DataConfig",
    "DataLimits",
    "Deployment",
    "EmbedConfig",
    "GateConfig",
    "GoldenSet",
    "HeadConfig",
    "HeadLayer",
    "HealthCheckConfig",
    "KeyRole",
    "LoaderConfig",
    "MineConfig",
    "ModelConfig",
    "Prices",
    "RunConfig",
    "RunInput",
    "TrainConfig",
    "build_config",
    "flattened",
    "is_below",
    "keys_of",
    "load_config_file",
    "merge",
    "nested",
    "parse_settings",
    "read_yaml",
    "section_of",
]

LONGEST_KEY = 100
"""Characters of an unknown key that are compared with the known ones: every key of the schema is shorter."""

DEEPEST_KEY = 10
"""Most parts of a setting's key, more than any has."""

_VALUES = reprlib.Repr()
"""Shortens values in messages: a line of YAML can stand for a value that fills the memory."""
_VALUES.maxlevel, _VALUES.maxdict, _VALUES.maxlist = 3, 10, 20
_VALUES.maxstring = _VALUES.maxlong = _VALUES.maxother = 200


Share = Annotated[str, matching(SHARE_PATTERN, "AWS Batch share identifiers are alphanumeric: ")]
RegistryName = Annotated[str, matching(REGISTRY_NAME_PATTERN)]


class RunConfig(Section):
    """The whole configuration of one run."""

    run: Annotated[RunId | None, KeyRole.BOOKKEEPING, KeyRole.EXECUTION] = Field(
        None, description="Id of an earlier run to resume. None: a new run."
    )
    mode: Annotated[Literal["train", "refresh"], KeyRole.BOOKKEEPING] = Field(
        "train",
        description="`train`: the weekly run. `refresh`: embed what has changed in the corpus with the published model, and "
        "publish that.",
    )
    rollback: Annotated[RunId | None, KeyRole.BOOKKEEPING] = Field(
        None, description="With `mode: refresh`: an earlier run, whose model is published again. Models are held then."
    )
    share: Annotated[Share, KeyRole.BOOKKEEPING, KeyRole.EXECUTION] = Field(
        "manual", description="Fair-share identifier under which all jobs are submitted."
    )
    registry: Annotated[RegistryName | None, KeyRole.BOOKKEEPING] = Field(
        "current", description="Name under which the run publishes; null: nowhere."
    )
    time_budget: Annotated[timedelta, KeyRole.BOOKKEEPING, KeyRole.EXECUTION] = Field(
        timedelta(hours=12), gt=timedelta(0), description="Time after which the run is overdue (an alarm, not a stop)."
    )
    nodes: Annotated[PositiveInt, KeyRole.BOOKKEEPING] = Field(
        1, description="Nodes of the gang that checks, compiles and trains."
    )
    seed: Annotated[int, Field(ge=0, lt=2**31), KeyRole.LEARNED] = Field(
        0, description="Seed of the batch order, dropout, the choice of replayed rows, and the bootstrap."
    )
    device: Annotated[DeviceConfig, KeyRole.BOOKKEEPING, KeyRole.TUNABLE] = DeviceConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    health_check: Annotated[HealthCheckConfig, KeyRole.BOOKKEEPING] = HealthCheckConfig()
    compile: Annotated[CompileConfig, KeyRole.BOOKKEEPING, KeyRole.TUNABLE] = CompileConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: Annotated[GateConfig, KeyRole.BOOKKEEPING] = GateConfig()
    embed: EmbedConfig = EmbedConfig()
    publish: Annotated[PublishConfig, KeyRole.BOOKKEEPING] = PublishConfig()
    report: Annotated[ReportConfig, KeyRole.BOOKKEEPING] = ReportConfig()
    lock: Annotated[LockConfig, KeyRole.BOOKKEEPING, KeyRole.EXECUTION] = LockConfig()

    def uris(self) -> Iterator[tuple[str, str]]:
        """Yield every key that names a URI, and the URI."""
        for key in keys_of(KeyRole.URI, RunConfig):
            value = attrgetter(key)(self)
            yield from ((key, uri) for uri in ([value] if isinstance(value, str) else value or ()))
        for golden in self.evaluate.sets:
            yield from ((f"evaluate.sets: {golden.name}", uri) for uri in golden.uris)
        for setting, (uris, _) in list(self.data.training.items())[1:]:
            yield from ((setting, uri) for uri in uris)

    def cuts_batches(self, kind: str) -> bool:
        """Return whether micro-batches are computed one at a time there, and so every step has two forward passes."""
        joined = self.device.loader.batches_per_execution > 1
        return self.train.bins > 1 and (self.train.micro_batches is not None or not (kind in EAGER_KINDS or joined))

    @property
    def classifies_only(self) -> bool:
        """Whether every row has a task with classes, so that nothing is searched: the classified texts are the hold-out."""
        return self.gate.metric in ("accuracy", "macro-f1")

    def adds_up(self, kind: str) -> bool:
        """Return whether several backward passes of a step add up their gradients there."""
        return self.train.accumulation > 1 or self.cuts_batches(kind)

    @model_validator(mode="after")
    def _refreshes_something(self) -> RunConfig:
        refuse_if(self.mode == "refresh" and self.registry is None, "mode = refresh publishes: set registry")
        refuse_if(
            self.mode == "refresh" and self.model.parent is not None, "mode = refresh uses the published model: no model.parent"
        )
        refuse_if(
            self.rollback is not None and self.mode != "refresh",
            "rollback is a refresh with an earlier model: set mode = refresh",
        )
        return self

    @model_validator(mode="after")
    def _query_fits(self) -> RunConfig:
        own = {f"tasks.{name}.query_length": task.query_length or 0 for name, task in self.train.tasks.items()}
        for key, length in ({"query_length": self.train.query_length} | own).items():
            for other, longest in (("train.length", self.train.length), ("embed.length", self.embed.length)):
                refuse_if(length > longest, f"train.{key} {length} is longer than {other}, {longest}")
        return self

    @model_validator(mode="after")
    def _classifies_texts(self) -> RunConfig:
        refuse_if(
            self.train.classes and self.embed.dimensions is not None,
            "embed writes the classes of whole embeddings, and embed.dimensions cuts them: leave out one of embed.dimensions and "
            "the classes of train.tasks",
        )
        refuse_if(
            self.train.classes and self.data.holdout_by == "document",
            "data.holdout_by = document would hold out whole classes of train.tasks: set it to query or group",
        )
        refuse_if(
            self.classifies_only and not self.train.classes,
            f"gate.metric = {self.gate.metric} is that of classified texts: name their classes in train.tasks",
        )
        wrong = [
            f"the slice {rule.slice} has no {rule.metric}"
            for rule in self.gate.guardrails
            if rule.slice != "task:*"
            and (rule.metric in ("accuracy", "macro-f1"))
            != (
                rule.slice.removeprefix("task:") in self.train.classes
                or (self.classifies_only and rule.slice.startswith(("locale:", "fresh")))
            )
            and not (self.classifies_only and rule in GateConfig().guardrails)
        ]
        refuse_if(
            wrong,
            f"gate.guardrails: {', '.join(wrong)}: accuracy is the metric of tasks with classes, and of "
            "locales and the newest week where texts with classes are all that is judged (gate.metric)",
        )
        refuse_if(
            self.classifies_only and self.report.texts,
            f"report.texts shows what queries find, and with gate.metric = {self.gate.metric} there are none: leave it out",
        )
        return self

    @model_validator(mode="after")
    def _casts_once(self) -> RunConfig:
        cast, precision = self.compile.auto_cast, self.device.precision
        refuse_if(
            precision != "compiler" and cast not in (None, "none"),
            f"compile.auto_cast = {cast} lets the compiler cast, device.precision = {precision} does not: set "
            "device.precision = compiler, or compile.auto_cast = none",
        )
        refuse_if(
            precision == "compiler" and cast == "none",
            "device.precision = compiler leaves the cast to the compiler, compile.auto_cast = none forbids it: set "
            "device.precision = fp32 or bf16, or leave compile.auto_cast out",
        )
        refuse_if(
            precision == "compiler" and self.device.kind not in ("auto", "neuron"),
            f"device.precision = compiler is neuron's; on {self.device.kind} use bf16 or fp32",
        )
        return self

    @model_validator(mode="after")
    def _joined_steps_end_together(self) -> RunConfig:
        joined = self.device.loader.batches_per_execution
        if joined == 1:
            return self
        refuse_if(
            self.train.classes,
            f"device.loader.batches_per_execution = {joined} joins steps into one graph: it needs steps of one form, and "
            "train.tasks with classes make others",
        )
        refuse_if(
            self.train.accumulation > 1,
            f"device.loader.batches_per_execution = {joined} joins steps into one graph: it needs train.accumulation = 1",
        )
        refuse_if(
            self.train.micro_batches not in (None, 1),
            f"device.loader.batches_per_execution = {joined} joins steps into one graph, which train.micro_batches ="
            f" {self.train.micro_batches} cuts: leave one of them out",
        )
        for name in ("log_every", "validate_every", "checkpoint_every"):
            refuse_if(
                getattr(self.train, name) % joined,
                f"train.{name} = {getattr(self.train, name)} is no multiple of device.loader.batches_per_execution"
                f" = {joined}: reading in between would cut a graph",
            )
        return self


def keys_of(role: KeyRole, section: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys below a section that have a role, in the order of the schema; a section that has it stands for its keys."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        if role in field.metadata:
            keys.append(name)
        elif inner := section_of(field.annotation):
            keys += (f"{name}.{key}" for key in keys_of(role, inner))
    return tuple(keys)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's annotation, `Section` or `Section | None`; None where it has none."""
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def is_below(key: str, keys: Iterable[str]) -> bool:
    """Return whether a key is one of these, or stands in a section that is one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def flattened(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration's values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as a partial configuration, later ones over earlier ones."""
    merged: dict[str, Any] = {}
    for key, value in settings.items():
        section: Any = value
        for name in reversed(key.split(".")):
            section = {name: section}
        merged = merge(merged, section)
    return merged


class Prices(Section):
    """USD for an hour of one node, by queue, as the deployment pays it. None: unknown, or not paid by the hour."""

    train: float | None = Field(None, ge=0)
    embed: float | None = Field(None, ge=0)
    cpu: float | None = Field(None, ge=0)
    currency: Literal["USD"] = "USD"

    def by_queue(self) -> dict[Queue, float]:
        """Return the known prices."""
        return {queue: price for queue in Queue if (price := getattr(self, queue.value)) is not None}


class Deployment(Section):
    """The deployment's own config and limits, which the state machine adds to an execution's input.

    Attributes:
        config: partial RunConfig below the execution's input.
        allowed_nodes: node counts that have job definitions.
        read: s3:// folders and files that runs may read, in addition to the bucket of the run folder.
        local_paths: whether runs may name local paths: all stages share one machine.
        prices: of its hosts.
        hosts: queue -> instance type of its nodes, e.g. trn1.32xlarge.
        embed_hosts: the most hosts that the array has at once; None: as many as it has children.
        timeouts: stage -> minutes after which Batch ends an attempt; other stages have their defaults.
        noncurrent_days: how long the bucket keeps versions that were overwritten or deleted; None: it keeps none.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    allowed_nodes: tuple[int, ...] = (1,)
    read: tuple[Uri, ...] = ()
    local_paths: bool = False
    prices: Prices = Prices()
    hosts: dict[Queue, str] = Field(default_factory=dict)
    embed_hosts: PositiveInt | None = None
    timeouts: dict[Stage, PositiveInt] = Field(default_factory=dict)
    noncurrent_days: PositiveInt | None = None


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
    try:
        return RunConfig.model_validate(reduce(merge, ({}, *layers)))
    except ValidationError as error:
        found = error.errors()
        if unknown := [_nearest(item["loc"]) for item in found if item["type"] in ("extra_forbidden", "invalid_key")]:
            raise BadConfig(
                "unknown configuration key",
                value=unknown,
                rule="only the keys of the schema are allowed: `trnpipe config schema`",
                remedy="correct the spelling or remove the key",
            ) from error
        raise BadConfig(
            "the configuration is not valid",
            value=[_problem(item) for item in found],
            rule="see `trnpipe config schema`",
            remedy="correct the values named above",
        ) from error


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `over` merged into `under`, section by section; lists and scalars are replaced whole."""
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
        BadConfig: an item without `=`, or with a key that is empty or too deep.
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
        if isinstance(value, str) and value == text.strip():  # not in quotes
            # YAML 1.1 reads `1e-5` as a string because it lacks a dot, and it is a common way to write a number.
            with suppress(ValueError):
                value = float(value)
        merged = merge(merged, nested({key.strip(): value}))
    return merged


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text: data only, no tag makes an object.

    Raises:
        ValueError: not YAML, a value that does not fit its tag, or a repeated key in a section.
    """
    try:
        return _EachKeyOnce(text).get_single_data()
    # PyYAML's constructors raise any of these for values of the wrong form.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses repeated keys in a section; plain YAML keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if doubled := [key for key, times in keys.items() if times > 1]:
            raise yaml.MarkedYAMLError(problem=f"the key {doubled[0]!r} is repeated", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _nearest(path: Sequence[str | int]) -> str:
    """Name an unknown key, with the most similar one of its section, else of the whole configuration."""
    here = ".".join(map(str, path))
    like, known = here[:LONGEST_KEY], list(_all_keys(RunConfig))
    siblings = [key for key in known if key.rpartition(".")[0] == here.rpartition(".")[0]]
    near = difflib.get_close_matches(like, siblings, n=1) or difflib.get_close_matches(like, known, n=1)
    return here + (f" (did you mean {near[0]}?)" if near else "")


def _all_keys(section: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        if inner := section_of(field.annotation):
            yield from _all_keys(inner, f"{path}{name}.")


def _problem(item: ErrorDetails) -> str:
    where = ".".join(map(str, item["loc"]))
    return f"{where} = {_VALUES.repr(item['input'])}: {item['msg']}" if where else f"configuration: {item['msg']}"


MODEL_URIS = keys_of(KeyRole.URI, ModelConfig)
"""Settings of `model` that are URIs."""
