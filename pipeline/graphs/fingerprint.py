"""The fingerprints that name compiled sets: digests of every setting, version and line of code that a graph depends on.

Equal fingerprints mean equal graphs, and nothing is compiled again; the watch over graphs (pipeline/graphs/graph_watch) reports a
graph that a fingerprint did not foresee.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib import metadata
from operator import getitem
from typing import TYPE_CHECKING, Any

from pipeline import store
from pipeline.config import CompileConfig, KeyRole, RunConfig, keys_of
from pipeline.contract import EAGER_KINDS, graphs_uri
from pipeline.graphs.sources import ENCODING, TRAINING, sources_digest
from pipeline.run_inputs import GraphsPlan, PlannedWorld
from pipeline.sdk.graph_variables import REDUCE_BUCKET, graph_environment

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STRUCTURE = (
    "model_type",
    "attention_bias",
    "attention_dropout",
    "embedding_dropout",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_activation",
    "hidden_dropout_prob",
    "layer_norm_eps",
    "layer_types",
    "local_attention",
    "mlp_bias",
    "mlp_dropout",
    "norm_bias",
    "norm_eps",
    "max_position_embeddings",
    "pad_token_id",
    "relative_attention_num_buckets",
    "rope_parameters",
    "type_vocab_size",
    "vocab_size",
)
"""The keys of a backbone's configuration that shape its graphs. The rest (names, versions, its origin) changes every week."""

PACKAGES = ("torch", "torch-xla", "transformers")


def plan_graphs(config: RunConfig, world: PlannedWorld, backbone: PreTrainedConfig, bucket_root: str) -> GraphsPlan | None:
    """Return the names of the sets that a run needs, None for kinds that compile nothing.

    Args:
        backbone: the parent's configuration.
        bucket_root: the run's bucket.
    """
    if world.kind in EAGER_KINDS:
        return None
    neuron = world.kind == "neuron"
    flags = training_flags(config.compile, world.precision) if neuron else []
    cast = config.compile.inference_cast(world.precision)
    infer_flags = _flags(config.compile, config.compile.infer_target, cast, config.compile.infer_auto_cast_type) if neuron else []
    environment = graph_environment(world.nodes) if neuron else {}
    common = {
        "kind": world.kind,
        "precision": world.precision,
        "model": {key: value for key in STRUCTURE if (value := getattr(backbone, key, None)) is not None},
        "encoding": graph_settings(config, "model", "embed"),
        "versions": versions(neuron=neuron),
    }
    compiler = {"flags": flags, "environment": environment, "ranks": [world.nodes, world.ranks_per_node]}
    # All sets whose graphs are compiled in the same way share the compiler's cache, which keys its results by graph and flags: a
    # set with a new fingerprint finds there every graph that has not changed.
    cache_name = _fingerprint({**compiler, "versions": neuron_pins()})
    train = {
        **compiler,
        "sources": sources_digest(TRAINING),
        "training": graph_settings(config, "device", "train"),
        "classes": config.train.classes,
        # The settings may leave them to the program.
        "bins": [config.train.bins, *config.train.bin_shape, config.cuts_batches(world.kind)],
    }
    infer = {
        "flags": infer_flags,
        "environment": {**environment, REDUCE_BUCKET: ""},
        "sources": sources_digest(ENCODING),
    }
    return GraphsPlan(
        train=_fingerprint({**common, **train}),
        infer=_fingerprint({**common, **infer}),
        compiler_flags=" ".join([*flags, *(["--retry_failed_compilation"] if config.compile.retry_failed else [])])
        if neuron
        else "",
        infer_compiler_flags=" ".join(infer_flags),
        cache=f"{config.compile.cache or f'{graphs_uri(bucket_root)}/neuron-cache'}/{cache_name}" if neuron else "",
        environment=environment,
    )


def graph_settings(config: RunConfig, *sections: str) -> dict[str, Any]:
    """Return the settings of some sections that are shapes or constants of graphs, by key. The learning rate is data."""
    values = config.model_dump(mode="json")
    keys = (key for key in keys_of(KeyRole.GRAPH, RunConfig) if key.startswith(tuple(f"{name}." for name in sections)))
    return {key: reduce(getitem, key.split("."), values) for key in keys}


def _fingerprint(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def training_flags(config: CompileConfig, precision: str) -> list[str]:
    """Return neuronx-cc's flags for training's graphs, including the optimizer's: a cast applies to its arithmetic as well."""
    return _flags(config, config.target, config.training_cast(precision), config.auto_cast_type)


def exact_flags(config: CompileConfig) -> list[str]:
    """Return neuronx-cc's flags for a graph in fp32 on hosts that embed."""
    return _flags(config, config.infer_target, "none", "")


def _flags(config: CompileConfig, target: str, cast: str, cast_type: str) -> list[str]:
    """Return flags of SDK 2.29.1 (neuronx-cc CLI reference); no other code builds them.

    They always name the cast: pages of the documentation disagree about the default.
    """
    flags = [f"--target={target}", f"--model-type={config.model_type}", f"--optlevel={config.optlevel}", f"--auto-cast={cast}"]
    return [*flags, f"--auto-cast-type={cast_type}"] if cast != "none" else flags


def versions(*, neuron: bool) -> dict[str, str]:
    """Return the versions that a graph depends on; the pinned ones of Neuron packages, which prepare's host does not have."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {**found, **neuron_pins()} if neuron else found


def neuron_pins() -> dict[str, str]:
    """Return package -> version, as the extra `neuron` of this package pins them."""
    pattern = re.compile(r"([\w-]+)==([\w.+]+)\s*;.*extra == ['\"]neuron['\"]")
    return {match[1]: match[2] for match in map(pattern.match, metadata.requires("trnpipe") or []) if match}


def set_uri(bucket_root: str, kind: str, fingerprint: str) -> str:
    """Return the URI of a set's file; `kind` is `train` or `infer`."""
    return f"{graphs_uri(bucket_root)}/{kind}/{fingerprint}.json"


def missing_sets(bucket_root: str, plan: GraphsPlan | None, kinds: Sequence[str] = ("train", "infer")) -> list[str]:
    """Return the URIs of the sets that the run needs and that are missing."""
    if plan is None:
        return []
    return [uri for kind in kinds if not store.exists(uri := set_uri(bucket_root, kind, getattr(plan, kind)))]
