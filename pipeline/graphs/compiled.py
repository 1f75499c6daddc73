"""Compiled sets: all graphs of training, and all of evaluate and embed, each under a fingerprint of everything they depend on.

    graphs/train/FINGERPRINT.json    what compile's trial met: key -> description; the number of ranks is part of it
    graphs/infer/FINGERPRINT.json    the same for encoding; beside it, in a folder of that name, the traced form (neuron)
    graphs/neuron-cache/NAME/        the compiler's cache, for all sets of one SDK, flags and number of ranks (neuron)
    graphs/health/                   a copy of the cache of health_check's graphs, by version of the compiler (neuron)

Weights are inputs of graphs, so next week's model has the same fingerprints, and a run whose sets are there compiles nothing. The
file is written when everything is in place: a set without it does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

from pipeline import store
from pipeline.backends.device import Device, EncodeFunction
from pipeline.backends.hlo import GraphDescription
from pipeline.config import CompileConfig
from pipeline.contract import graphs_uri, now
from pipeline.errors import BadData, Defect, MissingInput
from pipeline.graphs.fingerprint import set_uri
from pipeline.model.encoder import Encoder
from pipeline.model.inference import batch_rows, inference_form, probe_rows
from pipeline.run.context import StageContext
from pipeline.run_inputs import RunInputs

KnownGraphs = Mapping[str, GraphDescription | None]
"""Recorded graphs by key."""

LEAST_COSINE = 0.995
"""Smallest cosine of a text's embedding from a traced form and from the encoder on the host. bf16 gives more than 0.999; another
model, or one with a layer of another, gives less."""

PROBED_ROWS = 4
"""Rows per traced form that the host embeds, too."""


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


def traces_uri(bucket_root: str, fingerprint: str) -> str:
    """Return the folder of an infer set's traced form (neuron)."""
    return f"{graphs_uri(bucket_root)}/infer/{fingerprint}"


def encode_function(context: StageContext, device: Device, encoder: Encoder, inputs: RunInputs | None = None) -> EncodeFunction:
    """Return a model as evaluate, embed and mine call it: the compiled form where there is one, else the encoder on the device.

    Every process compares its own traced form with the host's encoder, because each has put the weights on its own core.

    Args:
        inputs: of the run, where there is no plan yet.

    Raises:
        Defect: the traced form gives other embeddings than the encoder.
    """
    planned = inputs or context.plan
    bf16 = inference_in_bf16(planned.config.compile, device.kind, device.precision)
    form = inference_form(encoder, compiles=device.compiles, bf16=bf16)
    if device.kind != "neuron" or not planned.graphs:
        return device.for_inference(form, None)
    context.heartbeat.beat(note="fetching the traced encoder")
    uri = traces_uri(context.paths.bucket_root, planned.graphs.infer)
    traced = device.for_inference(form, store.local_folder(uri, context.scratch / "traces"))
    context.heartbeat.beat(note="comparing the traced encoder with the encoder on the host")
    config = planned.config.embed
    rows = batch_rows(config.length, config.tokens_per_batch)
    require_faithful(traced, form, (rows, config.length), int(encoder.config.vocab_size))
    return traced


def inference_in_bf16(config: CompileConfig, kind: str, precision: str) -> bool:
    """Whether evaluate and embed keep weights in bf16; for tf32 and fp8, neuronx-cc casts fp32 weights."""
    in_bf16 = config.inference_cast(precision) != "none" and config.infer_auto_cast_type == "bf16"
    return in_bf16 if kind == "neuron" else precision == "bf16"


def require_faithful(traced: EncodeFunction, encoder: nn.Module, shape: tuple[int, int], vocabulary: int) -> float:
    """Compare the traced form of a packed encoder with the encoder itself, on the host in fp32, on a few rows.

    A weight that was not replaced shows as NaN (see `trace_encoder`), a cast that is too coarse as a low cosine.

    Args:
        shape: (rows, tokens) of the form.
        vocabulary: number of token ids.

    Returns:
        The least cosine of a text's embeddings.

    Raises:
        Defect: a text's cosine is below LEAST_COSINE.
    """
    slots, length = shape
    rows, texts = probe_rows(min(slots, PROBED_ROWS), length, vocabulary)
    padded = [F.pad(values, (0, 0, 0, slots - len(values))) for values in rows]
    with torch.no_grad():
        found, expected = traced(*padded)[texts].float(), encoder(*rows)[texts]
    least = float(F.cosine_similarity(found, expected).min())
    if not least >= LEAST_COSINE:  # also where it is NaN
        raise Defect(
            "the traced encoder gives other embeddings than the encoder on the host",
            value=f"{slots} x {length} tokens: least cosine {least:.5f}",
            rule=f"every cosine is at least {LEAST_COSINE}; NaN: weights were not replaced in the traced form",
            remedy="NaN: use the torch-neuronx that pyproject.toml pins; a number: choose a more exact cast in "
            "compile.infer_auto_cast and infer_auto_cast_type, or another host if only this one fails",
        )
    return least


def read_set(uri: str) -> GraphSet:
    """Return a compiled set.

    Raises:
        MissingInput: there is none.
        BadData: it cannot be read.
    """
    try:
        record = json.loads(store.read_bytes(uri))
        return GraphSet(
            fingerprint=record["fingerprint"],
            run=record["run"],
            graphs={key: GraphDescription(**graph) if graph else None for key, graph in record["graphs"].items()},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(
            "a compiled set cannot be read", value=f"{uri}: {error!r}", remedy="delete it: the next run compiles it again"
        ) from error


def write_set(uri: str, graphs: GraphSet) -> None:
    """Write a compiled set: it exists from now on."""
    store.write_json(uri, {**asdict(graphs), "time": now()})


def known_graphs(context: StageContext) -> KnownGraphs | None:
    """Return the graphs recorded for this run's training and for encoding; None for kinds that compile nothing.

    Raises:
        MissingInput: a set is gone.
        BadData: it cannot be read.
    """
    if (plan := context.plan.graphs) is None:
        return None
    root = context.paths.bucket_root
    try:
        sets = [read_set(set_uri(root, "train", plan.train)), read_set(set_uri(root, "infer", plan.infer))]
    except MissingInput as error:
        raise MissingInput(
            "a compiled set of this run is gone",
            value=error.value,
            rule="compile makes the sets that the plan names, and they stay while a run needs them",
            remedy="start the execution again with this run's id: compile makes what is missing",
        ) from error
    return {key: graph for found in sets for key, graph in found.graphs.items()}
