"""Compiled sets: all graphs of training, and all of evaluate and embed, each under a fingerprint of everything they depend on.

    graphs/train/FINGERPRINT.json    what compile's trial met: key -> description; the number of ranks is part of it
    graphs/infer/FINGERPRINT.json    the same for encoding; beside it, in a folder of that name, traced forms (neuron)

Weights are inputs of graphs, so next week's model has the same fingerprints, and a run whose sets are there compiles nothing. The
file is written when everything is in place: a set without it does not exist.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from pipeline.config import CompileConfig, RunConfig
from pipeline.contract import EAGER_KINDS, graphs_uri, now
from pipeline.errors import BadData, MissingInput
from pipeline.model.encoder import Encoder, prepare_for_inference
from pipeline.model.inference import for_encoding
from pipeline.plan import GraphsPlan, World
from pipeline.runtime import store
from pipeline.runtime.context import StageContext
from pipeline.runtime.device import Device, EncodeFunction
from pipeline.runtime.hlo import GraphDescription

KnownGraphs = Mapping[str, GraphDescription | None]
"""Recorded graphs by key."""

STRUCTURE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "layer_norm_eps",
    "max_position_embeddings",
    "pad_token_id",
    "relative_attention_num_buckets",
    "type_vocab_size",
    "vocab_size",
)
"""What of a backbone's configuration is in its graphs. The rest (names, versions, its origin) changes from week to week."""

IN_TRAINING = (
    "accumulation",
    "activation_checkpointing",
    "batch_size",
    "beta1",
    "beta2",
    "buckets",
    "clip_norm",
    "dropout",
    "epsilon",
    "log_every",
    "query_length",
    "temperature",
    "weight_decay",
)
"""Settings of `train` that are shapes or constants of its graphs. The learning rate is data."""

PACKAGES = ("torch", "torch-xla", "transformers")
NEURON_PACKAGES = ("torch-neuronx", "libneuronxla", "neuronx-cc")
SOURCES = ("model", "training", "runtime")
"""Packages of ours whose code decides what is in a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSet:
    """A complete compiled set.

    Attributes:
        fingerprint: its name.
        run: the run whose compile stage made it.
        graphs: key -> description, None where the program is not kept.
    """

    fingerprint: str
    run: str
    graphs: KnownGraphs

    def to_record(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "run": self.run,
            "time": now(),
            "graphs": {key: graph.to_record() if graph else None for key, graph in self.graphs.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GraphSet:
        return cls(
            fingerprint=record["fingerprint"],
            run=record["run"],
            graphs={key: GraphDescription(**graph) if graph else None for key, graph in record["graphs"].items()},
        )


def plan_graphs(config: RunConfig, world: World, backbone: PreTrainedConfig, bucket_root: str) -> GraphsPlan | None:
    """Names of the sets that a run needs, None for kinds that compile nothing.

    Args:
        backbone: the parent's.
        bucket_root: of the run.
    """
    if world.kind in EAGER_KINDS:
        return None
    neuron = world.kind == "neuron"
    flags = compiler_flags(config.compile, world.precision, config.compile.target) if neuron else []
    infer_flags = compiler_flags(config.compile, world.precision, config.compile.infer_target) if neuron else []
    common = {
        "kind": world.kind,
        "precision": world.precision,
        "model": {key: value for key in STRUCTURE if (value := getattr(backbone, key, None)) is not None},
        "form": config.model.model_dump(mode="json", include={"pooling", "normalize", "head"}),
        "encode": [list(config.embed.buckets), config.embed.tokens_per_batch],
        "versions": versions(neuron=neuron),
        "sources": sources_digest(),
    }
    train = {
        "flags": flags,
        "ranks": [world.nodes, world.ranks_per_node],
        "sync_points": config.device.sync_points,
        "joined": config.device.loader.batches_per_execution,
        "train": config.train.model_dump(
            mode="json",
            include=set(IN_TRAINING),
        ),
    }
    name = _fingerprint({**common, **train})
    return GraphsPlan(
        train=name,
        infer=_fingerprint({**common, "flags": infer_flags}),
        compiler_flags=" ".join([*flags, *(["--retry_failed_compilation"] if config.compile.retry_failed else [])])
        if neuron
        else "",
        infer_compiler_flags=" ".join(infer_flags),
        # One prefix per set: what is in it belongs to this set, and locks in it to runs that make or use it.
        cache=f"{config.compile.cache or f'{graphs_uri(bucket_root)}/neuron-cache'}/{name}" if neuron else "",
    )


def _fingerprint(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def compiler_flags(config: CompileConfig, precision: str, target: str) -> list[str]:
    """neuronx-cc's flags (SDK 2.29.1, neuronx-cc CLI reference); nothing else builds them.

    What is cast is always said: pages of the documentation disagree about the default.
    """
    cast = config.auto_cast or ("all" if precision == "compiler" else "none")
    flags = [f"--target={target}", f"--model-type={config.model_type}", f"--optlevel={config.optlevel}", f"--auto-cast={cast}"]
    return [*flags, f"--auto-cast-type={config.auto_cast_type}"] if cast != "none" else flags


def versions(*, neuron: bool) -> dict[str, str]:
    """Versions that a graph depends on; of the Neuron packages the pinned ones: prepare runs where they are not installed."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {**found, **neuron_pins()} if neuron else found


def neuron_pins() -> dict[str, str]:
    """Package -> version, as the extra `neuron` of this package pins them."""
    pins = {}
    for requirement in metadata.requires("trnpipe") or []:
        if match := re.match(r"([\w-]+)==([\w.+]+)\s*;.*extra == ['\"]neuron['\"]", requirement):
            pins[match[1]] = match[2]
    return pins


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """SHA-256 of the code that decides what is in a graph."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(path for name in SOURCES for path in (root / name).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()


def set_uri(bucket_root: str, kind: str, fingerprint: str) -> str:
    """A set's file; `kind` is `train` or `infer`."""
    return f"{graphs_uri(bucket_root)}/{kind}/{fingerprint}.json"


def traces_uri(bucket_root: str, fingerprint: str) -> str:
    """Folder of an infer set's traced forms (neuron)."""
    return f"{graphs_uri(bucket_root)}/infer/{fingerprint}"


def encode_function(context: StageContext, device: Device, encoder: Encoder) -> EncodeFunction:
    """A model as evaluate and embed call it: compiled forms where the kind has them, otherwise the encoder on the device."""
    prepare_for_inference(encoder, fused_attention=device.kind in EAGER_KINDS)
    traces = None
    if device.kind == "neuron" and context.plan.graphs:
        context.heartbeat.beat(note="fetching traced encoders")
        uri = traces_uri(context.paths.bucket_root, context.plan.graphs.infer)
        traces = store.local_folder(uri, context.scratch / "traces")
    return device.for_inference(for_encoding(encoder, device.kind).eval(), traces)


def missing_sets(bucket_root: str, plan: GraphsPlan | None) -> list[str]:
    """URIs of the sets that the run needs and that are not there."""
    if plan is None:
        return []
    uris = [set_uri(bucket_root, "train", plan.train), set_uri(bucket_root, "infer", plan.infer)]
    return [uri for uri in uris if not store.exists(uri)]


def read_set(uri: str) -> GraphSet:
    """
    Raises:
        MissingInput: there is none.
        BadData: it cannot be read.
    """
    try:
        return GraphSet.from_record(json.loads(store.read_bytes(uri)))
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(
            "a compiled set cannot be read", value=f"{uri}: {error!r}", remedy="delete it: the next run compiles it again"
        ) from error


def write_set(uri: str, graphs: GraphSet) -> None:
    store.write_json(uri, graphs.to_record())


def known_graphs(context: StageContext) -> KnownGraphs | None:
    """The graphs that were recorded for this run's training, with those for encoding; None for kinds that compile nothing.

    Raises:
        MissingInput: a set is gone.
        BadData: it cannot be read.
    """
    plan = context.plan.graphs
    if plan is None:
        return None
    root = context.paths.bucket_root
    try:
        sets = [read_set(set_uri(root, "train", plan.train)), read_set(set_uri(root, "infer", plan.infer))]
    except MissingInput as error:
        raise MissingInput(
            "a compiled set of this run is gone",
            value=error.value,
            rule="compile makes the sets that the plan names, and nothing removes them while a run needs them",
            remedy="start the execution again with this run's id: compile makes what is missing",
        ) from error
    return {key: graph for found in sets for key, graph in found.graphs.items()}
