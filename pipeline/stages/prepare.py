"""prepare: decide all that needs no row, and list the input files. Reads input.json and the parent; writes prepare/inputs.json.

Cheap refusals first: configuration, URIs, parent (prepare_parent), memory. The list of files is the run's input: what arrives
later is the next run's. The file is written only if there is none: a run that resumes keeps what it has. Which files are to be
ingested is looked up every time, and written to prepare/missing.json.

Once the gate has decided, prepare comes again and lists the corpus anew, as it is embedded then: prepare/corpus.json. A refresh
begins with that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pipeline import store
from pipeline.config import KeyRole, RunConfig, RunInput, build_config, keys_of
from pipeline.contract import Artifact, RunPaths, Stage, StageResult, now
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, not_ingested, not_mined
from pipeline.dataset.listing import list_documents_again
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.graphs.fingerprint import set_uri
from pipeline.log import log
from pipeline.plan import EmbedPlan, RunPlan
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.registry import read_pointer
from pipeline.run.request import read_request
from pipeline.run_inputs import Corpus, EmbedModel, InputShard, MissingShards, RunInputs
from pipeline.stages.prepare_checks import check_compiled, check_nodes, keep_deletions, places_of

NOT_PLANNED = frozenset(keys_of(KeyRole.EXECUTION, RunConfig))
"""Settings of how an execution is carried out, not of what it computes: they may differ when a run resumes."""


def run(context: StageContext) -> StageOutput:
    """Decide the run's inputs, or keep those that are there."""
    request = read_request(context.paths)
    inputs = kept_inputs(context.paths, request)
    if inputs is None:
        from pipeline.stages.prepare_inputs import new_inputs  # here: after the gate, prepare comes again without a framework

        inputs = new_inputs(context, request)
    corpus = corpus_to_embed(context.paths, inputs, request.deployment.noncurrent_days)
    missing = missing_shards(context.paths, inputs, corpus)
    store.write_bytes(context.paths.missing, missing.to_json())
    metrics = {**inputs.summary(), "ingest_children": missing.children, "mine_children": missing.mine_children}
    for name, value in metrics.items():
        log.info("prepare: %s = %s", name, value)
    models = {"parent": inputs.parent, "published": inputs.published}
    data = store.read_bytes(context.paths.inputs)
    return StageOutput(
        inputs={name: Artifact(model.folder, model.sha256) for name, model in models.items() if model},
        outputs={"inputs": Artifact(context.paths.inputs, hashlib.sha256(data).hexdigest(), len(data))},
        metrics=metrics,
    )


def kept_inputs(paths: RunPaths, request: RunInput) -> RunInputs | None:
    """Return what an earlier execution decided, if there is anything and it can still be followed.

    Raises:
        BadConfig: the execution asks for something else.
    """
    if not store.exists(paths.inputs):
        return None
    inputs = RunInputs.from_json(store.read_bytes(paths.inputs))
    planned = inputs.config.model_dump(mode="json")
    asked = build_config(planned, request.execution).model_dump(mode="json")
    # A refresh takes these sections from the run of the model.
    free = NOT_PLANNED | ({"model", "train", "embed"} if inputs.config.mode == "refresh" else set())
    given = {key: value for key, value in request.execution.items() if key not in free}
    if contradictions := list(_contradictions(planned, asked, given)):
        raise BadConfig(
            "the execution's input contradicts the plan of the run that it resumes",
            value=contradictions,
            rule="a plan is immutable",
            remedy="leave these keys out to continue the run, or start a new one",
        )
    check_nodes(inputs.world.nodes, request.deployment.allowed_nodes)
    models = {"parent": inputs.parent, "published model": inputs.published}
    folders = [(f"the plan's {name}", model.folder) for name, model in models.items() if model]
    places_of(paths, request).check([*inputs.config.uris(), *folders])
    check_compiled(paths, inputs.graphs, inputs.config)
    log.info("keeping the inputs of %s", inputs.created)
    return inputs


def _contradictions(
    planned: Mapping[str, Any], asked: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield every key that the execution's input gives another value than the plan.

    Args:
        planned, asked: the plan's configuration without and with the input.
        given: the input's keys.
    """
    for key, value in given.items():
        before, after = planned.get(key), asked.get(key)
        if isinstance(value, Mapping) and value and isinstance(after, Mapping):
            yield from _contradictions(before or {}, after, value, f"{prefix}{key}.")
        elif after not in (before, "auto"):
            yield f"{prefix}{key}: the plan has {json.dumps(before)}, the input {json.dumps(after)}"


def corpus_to_embed(paths: RunPaths, inputs: RunInputs, noncurrent_days: int | None) -> Corpus | None:
    """List what is to be embedded, once a model is known that embeds it; None before that.

    A run that trains takes days until then, and others may have published newer documents. What has been published stays.

    Args:
        noncurrent_days: as in `keep_deletions`.
    """
    model = model_to_embed(paths, inputs)
    if model is None:
        return None
    last = Corpus.from_json(store.read_bytes(paths.corpus)) if store.exists(paths.corpus) else None
    if last and is_published(paths):
        return last
    pointer = read_pointer(paths.bucket_root, inputs.config.registry) if inputs.config.registry is not None else None
    own = RunPaths(f"{paths.bucket_root}/runs/{model.run}").embed_manifest
    deletions = keep_deletions(paths, inputs.config, noncurrent_days).digest
    corpus = Corpus(
        model=model,
        listed=now(),
        round=last.round + 1 if last else 1,
        shards=list_documents_again(inputs.config, inputs.tokenizer, deletions) or inputs.shards_of(DOCUMENTS),
        deletions=deletions,
        # The newest of one form first: it has what refreshes have embedded since the model's own run.
        earlier=tuple(dict.fromkeys([*([pointer.embeddings] if pointer else []), own])),
    )
    store.write_bytes(paths.corpus, corpus.to_json())
    log.info("prepare: to be embedded with the model of run %s", model.run)
    return corpus


def model_to_embed(paths: RunPaths, inputs: RunInputs) -> EmbedModel | None:
    """Return the model that embeds: the run's own, once the gate has accepted it; in a refresh, and in a run whose model was
    refused, the published one. None: the run has still to train, or what it has embeds nothing."""
    if inputs.config.mode == "refresh":
        assert inputs.parent.run is not None, "a refresh begins with the model of a run"
        return EmbedModel(run=inputs.parent.run, folder=inputs.parent.folder, sha256=inputs.parent.sha256)
    if not (store.exists(paths.plan) and store.exists(paths.result(Stage.EVALUATE))):
        return None
    result = StageResult.from_json(store.read_bytes(paths.result(Stage.EVALUATE)))
    if result.fingerprint != RunPlan.from_json(store.read_bytes(paths.plan)).fingerprint:
        return None
    if result.metrics["gate"]["verdict"] == "accepted":
        return EmbedModel(run=inputs.run, folder=paths.model, sha256=result.inputs["model"].sha256)
    if inputs.published and result.metrics["refresh"]:
        return EmbedModel(run=inputs.published.run, folder=inputs.published.folder, sha256=inputs.published.sha256)
    return None


def is_published(paths: RunPaths) -> bool:
    """Whether publish is done with what the run embedded last."""
    if not (store.exists(paths.embed_plan) and store.exists(paths.result(Stage.PUBLISH))):
        return False
    result = StageResult.from_json(store.read_bytes(paths.result(Stage.PUBLISH)))
    plan = EmbedPlan.from_json(store.read_bytes(paths.embed_plan))
    return result.fingerprint == plan.fingerprint and not result.metrics["again"]


def missing_shards(paths: RunPaths, inputs: RunInputs, corpus: Corpus | None) -> MissingShards:
    """Return what is not ingested yet, and for which shards no negatives are mined."""
    missing = not_ingested(paths.bucket_root, corpus.shards if corpus else inputs.shards)
    files = {(shard.uri, shard.version, shard.setting) for shard in missing}
    to_mine = [] if corpus else shards_to_mine(paths, inputs)
    return MissingShards(
        shards=tuple(missing),
        children=min(inputs.config.data.ingest_children, len(files)),
        to_mine=tuple(to_mine),
        mine_children=min(inputs.config.embed.children, len(to_mine)),
    )


def shards_to_mine(paths: RunPaths, inputs: RunInputs) -> list[InputShard]:
    """Return the new shards for which negatives are to be mined, where the published model and its embeddings can be used."""
    published, graphs = inputs.published, inputs.graphs
    if not inputs.config.train.mine:
        return []
    compiled = graphs is None or store.exists(set_uri(paths.bucket_root, "infer", graphs.infer))
    if not (published and published.same_graphs and compiled) or published.own_tokens:
        log.warning(
            "no negatives are mined: nothing is published, or the published model has other tokens or graphs than this run"
        )
        return []
    known: tuple[str, ...] = ()
    with suppress(MissingInput, BadData, IndexError):  # its plan is removed, or of another version; a training from the beginning
        known = RunPlan.from_json(store.read_bytes(RunPaths(f"{paths.bucket_root}/runs/{inputs.lineage[-1]}").plan)).pairs
    return not_mined(paths.bucket_root, [shard for shard in inputs.shards_of(PAIRS) if shard.rows not in known])
