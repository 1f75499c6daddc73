"""The models that a run starts from: the parent, and the published model where that is another one.

Reads the registry's pointer, plans of earlier runs and the models' folders; decides which shards count as seen.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedConfig

from pipeline import store
from pipeline.config import RunConfig
from pipeline.contract import RunPaths, Stage, registry_uri
from pipeline.dataset.arrow import PUBLISHED, Lengths
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.model.encoder import family_of
from pipeline.model.folder import WEIGHTS, inspect_folder, own_form
from pipeline.model.inventory import transformer_folder
from pipeline.model.parent import ResolvedParent
from pipeline.model.shape import fetch_without_weights
from pipeline.plan import GraphsPlan, Parent, PlannedWorld, Published
from pipeline.run.context import StageContext
from pipeline.run.registry import Pointer

log = logging.getLogger("trnpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model that a run continues from, before its weights are read.

    Attributes:
        uri: the model's URI.
        run: the run that made it, None if none of this bucket did.
        first_runs: sha256 of every shard that the model was trained on -> the first run that trained on it (empty: unknown).
    """

    uri: str
    run: str | None
    first_runs: dict[str, str] = field(default_factory=dict)


def find_origin(config: RunConfig, paths: RunPaths, pointer: Pointer | None) -> Origin:
    """Choose the parent: the one that the execution names, else the published model, else the initial one.

    Raises:
        BadConfig: there is none of them.
        MissingInput: the plan of the published model's run is gone.
        BadData: that plan cannot be read.
    """
    if config.model.parent is None and pointer is not None:
        log.info("parent: %s, published by run %s", pointer.model, pointer.run)
        return Origin(uri=pointer.model, run=pointer.run, first_runs=seen_shards(paths, pointer.run))
    uri = config.model.parent or config.model.initial
    if uri is None:
        where = "" if config.registry is None else f"; {registry_uri(paths.bucket_root, config.registry)} is not there"
        raise BadConfig(
            "there is no model to start from",
            value=f"registry = {config.registry}, model.initial = null, model.parent = null{where}",
            rule="a run continues from model.parent, else from what the registry names, else from model.initial",
            remedy="set model.initial to a model folder or checkpoint",
        )
    run_id = None
    if uri.startswith(f"{paths.bucket_root}/runs/"):
        uri = uri.rstrip("/")  # as the registry names a run's model
        run_id = uri.removeprefix(f"{paths.bucket_root}/runs/").split("/")[0]
    seen = seen_shards(paths, run_id) if run_id and store.exists(sibling(paths, run_id).plan) else {}
    log.info("parent: %s, model.%s", uri, "initial" if config.model.parent is None else "parent")
    return Origin(uri=uri, run=run_id, first_runs=seen)


def seen_shards(paths: RunPaths, run_id: str) -> dict[str, str]:
    """Return the shards that a run's model was trained on: sha256 -> the first run that trained on it, empty if unknown.

    An earlier version of trnpipe may have written the plan, so this expects as little of it as possible.
    """
    uri = sibling(paths, run_id).plan
    try:
        record = json.loads(store.read_bytes(uri))
        seen = dict.fromkeys(record["seen"], "")
        shards = [*record["train"]["new"], *record["train"]["replay"], *record["embed"]["shards"]]
        seen.update((shard["sha256"], shard["first_run"]) for shard in shards if shard["sha256"] in seen)
        return seen
    except MissingInput as error:
        raise MissingInput(
            "the plan of the parent's run is gone, so the new shards are unknown",
            value=uri,
            remedy="restore it, or set model.parent to the model itself: every shard then counts as new",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadData("the plan of the parent's run cannot be read", value=f"{uri}: {error!r}", remedy="restore it") from error


def sibling(paths: RunPaths, run_id: str) -> RunPaths:
    """Return the paths of another run of the same bucket."""
    return RunPaths(f"{paths.bucket_root}/runs/{run_id}")


def check_parent(folder: Path, config: RunConfig) -> tuple[PreTrainedConfig, TextTokenizer]:
    """Return the parent's backbone and tokenizer, and check that the configured lengths fit the model.

    Raises:
        BadConfig: a length above the model's positions, or a tokenizer that is not the model's.
    """
    backbone, _ = inspect_folder(folder, config.model)
    positions = _positions(backbone)
    lengths = {
        "train.query_length": config.train.query_length,
        "train.buckets": max(config.train.buckets),
        "embed.buckets": max(config.embed.buckets),
    }
    problems = [f"{key}: {length}" for key, length in lengths.items() if length > positions]
    if problems:
        raise BadConfig(
            "a length is more than the model has positions for",
            value=problems,
            rule=f"at most {positions} tokens ({backbone.model_type})",
            remedy=f"choose lengths up to {positions}",
        )
    tokenizer = TextTokenizer(transformer_folder(folder))
    if tokenizer.vocabulary > backbone.vocab_size:
        raise BadConfig(
            "the tokenizer does not belong to the model",
            value=f"{tokenizer.vocabulary} token ids, {backbone.vocab_size} rows in the embedding table",
            rule="every token id has a row",
            remedy="put the model's own tokenizer into its folder",
        )
    return backbone, tokenizer


def _positions(backbone: PreTrainedConfig) -> int:
    """Return the tokens of the longest text."""
    # RoBERTa and its like count positions from the padding token's id on: 514 of them are 512 tokens.
    padding = 1 + (backbone.pad_token_id or 0) if family_of(backbone).counts_from_padding else 0
    return int(backbone.max_position_embeddings) - padding


def plan_published(
    context: StageContext,
    config: RunConfig,
    world: PlannedWorld,
    pointer: Pointer,
    tokenizer: TextTokenizer,
    lengths: Lengths,
    graphs: GraphsPlan | None,
) -> tuple[Published, tuple[TextTokenizer, Lengths] | None]:
    """Plan the evaluation of a published model that is not the parent and may have another form.

    Args:
        tokenizer, lengths, graphs: the parent's.

    Returns:
        The plan for evaluate; and the model's tokenizer and lengths, None where they are the parent's.

    Raises:
        MissingInput: the published model is gone.
        BadConfig, BadData: it cannot be loaded.
    """
    try:
        folder = fetch_without_weights(pointer.model, context.scratch / PUBLISHED)
        sha256 = store.sha256(store.join(pointer.model, WEIGHTS))
    except MissingInput as error:
        raise MissingInput(
            "the published model is gone",
            value=error.value,
            rule="the gate compares a new model with the one that it would replace",
            remedy="restore it from the bucket's versions, or set registry to another name, under which nothing is published yet",
        ) from error
    form = config.model_copy(update={"model": own_form(folder, config.model)})
    backbone, _ = inspect_folder(folder, form.model)
    own = TextTokenizer(transformer_folder(folder))
    longest = _positions(backbone)
    own_lengths = replace(lengths, query=min(lengths.query, longest), candidate=min(lengths.candidate, longest))
    same_tokens = (own.digest, own_lengths) == (tokenizer.digest, lengths)
    fits = plan_graphs(form, world, backbone, context.paths.bucket_root)
    published = Published(
        run=pointer.run,
        folder=pointer.model,
        sha256=sha256,
        registry_etag=pointer.etag,
        own_tokens=not same_tokens,
        same_graphs=(fits and fits.infer) == (graphs and graphs.infer),
    )
    return published, None if same_tokens else (own, own_lengths)


def place_parent(paths: RunPaths, origin: Origin, resolved: ResolvedParent) -> Parent:
    """Return the parent as every stage can load it: unchanged, or converted into the run folder."""
    folder = origin.uri
    if resolved.converted:
        folder = store.join(paths.stage(Stage.PREPARE), "parent")
        store.upload_folder(resolved.folder, folder)
    return Parent(uri=origin.uri, folder=folder, sha256=resolved.sha256, run=origin.run)
