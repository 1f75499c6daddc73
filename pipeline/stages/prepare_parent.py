"""The models that a run starts from: the parent, and the published model where that is another one.

Reads the registry's pointer, records of earlier runs and the models' folders; decides which runs' rows count as seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from pipeline import store
from pipeline.config import RunConfig
from pipeline.contract import RunPaths, Stage, registry_uri
from pipeline.dataset.row_files import PUBLISHED, Lengths
from pipeline.dataset.seen import read_record
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.log import log
from pipeline.model.classifier import FOLDER as CLASSIFIERS
from pipeline.model.folder import WEIGHTS, inspect_folder, own_form, text_positions
from pipeline.model.inventory import fetch_without_weights, load_tokenizer, read_max_length, read_object
from pipeline.model.parent import ResolvedParent
from pipeline.plan import RunPlan
from pipeline.run.context import StageContext
from pipeline.run.registry import Pointer
from pipeline.run_inputs import GraphsPlan, Parent, PlannedWorld, Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model that a run continues from, before its weights are read.

    Attributes:
        uri: the model's URI.
        run: the run that made it, None if none of this bucket did.
    """

    uri: str
    run: str | None


def find_origin(config: RunConfig, paths: RunPaths, pointer: Pointer | None) -> Origin:
    """Choose the parent: the one that the execution names, else the published model, else the initial one.

    Raises:
        BadConfig: there is none of them.
    """
    if config.mode == "refresh":
        return _published_origin(config, paths, pointer)
    if config.model.parent is None and pointer is not None:
        log.info("parent: %s, published by run %s", pointer.model, pointer.run)
        return Origin(uri=pointer.model, run=pointer.run)
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
    log.info("parent: %s, model.%s", uri, "initial" if config.model.parent is None else "parent")
    return Origin(uri=uri, run=run_id)


def _published_origin(config: RunConfig, paths: RunPaths, pointer: Pointer | None) -> Origin:
    """Return the model that a refresh embeds with.

    Raises:
        MissingInput: nothing is published, or the run to roll back to has no model.
    """
    if pointer is None:
        raise MissingInput(
            "there is nothing to refresh",
            value=f"registry = {config.registry}",
            rule="a refresh embeds with the model that is published under the registry name",
            remedy="publish a model first: start a run without mode=refresh",
        )
    if config.rollback is None:
        return Origin(uri=pointer.model, run=pointer.run)
    model = RunPaths(f"{paths.bucket_root}/runs/{config.rollback}").model
    if not store.exists(store.join(model, WEIGHTS)):
        raise MissingInput(
            "the run to roll back to has no model",
            value=model,
            rule="rollback names a run of this bucket whose folder is still there",
            remedy="choose another one: trnpipe registry show lists them",
        )
    return Origin(uri=model, run=config.rollback)


def as_it_embedded(config: RunConfig, bucket_root: str, run: str | None) -> RunConfig:
    """Return the configuration with all that decides the embeddings as in the run that made the model, as far as its plan can be
    read: the model was judged with that, and what is configured since is for the next one."""
    try:
        earlier = RunPlan.from_json(store.read_bytes(RunPaths(f"{bucket_root}/runs/{run}").plan)).config
    except (MissingInput, BadData) as error:
        log.warning("run %s is not known any more; embedding as it is configured now: %s", run, error.what)
        return config
    embed = config.embed.model_copy(update={name: getattr(earlier.embed, name) for name in ("length", "dtype", "dimensions")})
    model = earlier.model.model_copy(update={"parent": None, "initial": config.model.initial})
    return config.model_copy(update={"embed": embed, "train": earlier.train, "model": model})


def find_lineage(bucket_root: str, run: str | None, identity: Mapping[str, str], config: RunConfig) -> tuple[str, ...]:
    """Return the runs whose rows the model of a run was trained on: its ancestors, the oldest first, and itself.

    Args:
        run: None: no run of this bucket made the model, so none is known.
        identity: of this run's rows.

    Raises:
        MissingInput: the run left no record.
        BadConfig: its rows were identified by something else.
    """
    if run is None:
        return ()
    if config.data.new_identity:
        log.warning("data.new_identity: every row counts as new, and what run %s was trained on may be in the hold-out", run)
        return ()
    record = read_record(bucket_root, run)
    if differ := [name for name, value in identity.items() if record.identity.get(name, value) != value]:
        raise BadConfig(
            f"rows cannot be compared with those that run {run} was trained on",
            value=[f"{name}: columns {config.data.training[name][1]}" for name in differ],
            rule="a row is known by its columns and templates, which differ from that run's",
            remedy="set the columns as they were there; or set data.new_identity=true: every row then counts as new",
        )
    return record.lineage


def check_parent(folder: Path, config: RunConfig, dimension: int) -> tuple[PreTrainedConfig, TextTokenizer]:
    """Return the parent's backbone and tokenizer, and check that the configured lengths and sizes fit the model.

    Args:
        dimension: of the model's embeddings.

    Raises:
        BadConfig: a length above the model's positions, or in a refresh not the folder's; a size that cuts no embedding; or a
            tokenizer that is not the model's.
    """
    backbone, _ = inspect_folder(folder, config.model)
    positions = text_positions(backbone)
    lengths = {
        "train.query_length": config.train.query_length,
        "train.length": config.train.length,
        "embed.length": config.embed.length,
    }
    problems = [f"{key}: {length}" for key, length in lengths.items() if length > positions]
    if problems:
        raise BadConfig(
            "a length is more than the model has positions for",
            value=problems,
            rule=f"at most {positions} tokens ({backbone.model_type})",
            remedy=f"choose lengths up to {positions}",
        )
    cut = {"train.dimensions": config.train.dimensions, "embed.dimensions": filter(None, [config.embed.dimensions])}
    if problems := [f"{key}: {size}" for key, sizes in cut.items() for size in sizes if size >= dimension]:
        raise BadConfig(
            "a size of embeddings is not below the model's own",
            value=problems,
            rule=f"shorter embeddings are the first numbers of the model's {dimension} ({backbone.model_type})",
            remedy=f"choose sizes below {dimension}, or leave them out: all numbers are trained and published then",
        )
    read = {home.parent.name: read_object(home).get("in_features") for home in (folder / CLASSIFIERS).glob("*/config.json")}
    if problems := [
        f"task {task}: {size}" for task, size in read.items() if task in config.train.classes and size not in (None, dimension)
    ]:
        raise BadConfig(
            "the parent's classifiers read embeddings of another size",
            value=[f"embeddings of {dimension} numbers", *problems],
            rule="a task's classifier continues with its weights, which belong to the embeddings that it was trained on",
            remedy="give the last layer of model.head as many outputs; or set model.parent to a model without classifiers",
        )
    if config.mode == "refresh" and (length := read_max_length(folder)) not in (None, config.embed.length):
        raise BadConfig(
            "the published model cuts texts at another length",
            value=f"max_seq_length = {length}, embed.length = {config.embed.length}",
            rule="a refresh embeds as the model's folder says, so that queries and documents are embedded alike",
            remedy="set embed.length as it was in the run that made the model, or publish a new model",
        )
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocabulary > backbone.vocab_size:
        raise BadConfig(
            "the tokenizer does not belong to the model",
            value=f"{tokenizer.vocabulary} token ids, {backbone.vocab_size} rows in the embedding table",
            rule="every token id has a row",
            remedy="put the model's own tokenizer into its folder",
        )
    return backbone, tokenizer


def plan_published(
    context: StageContext,
    config: RunConfig,
    world: PlannedWorld,
    pointer: Pointer,
    tokenizer: TextTokenizer,
    lengths: Lengths,
    graphs: GraphsPlan | None,
) -> Published:
    """Plan the evaluation of a published model that is not the parent and may have another form.

    Args:
        tokenizer, lengths, graphs: the parent's.

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
    same_tokens = (load_tokenizer(folder).digest, lengths.within(text_positions(backbone))) == (tokenizer.digest, lengths)
    fits = plan_graphs(form, world, backbone, context.paths.bucket_root)
    return Published(
        run=pointer.run,
        folder=pointer.model,
        sha256=sha256,
        embeddings=pointer.embeddings,
        epoch=pointer.epoch,
        own_tokens=not same_tokens,
        positions=0 if same_tokens else text_positions(backbone),
        same_graphs=(fits and fits.infer) == (graphs and graphs.infer),
    )


def place_parent(paths: RunPaths, origin: Origin, resolved: ResolvedParent) -> Parent:
    """Return the parent as every stage can load it: unchanged, or converted into the run folder."""
    folder = origin.uri
    if resolved.converted:
        folder = store.join(paths.stage(Stage.PREPARE), "parent")
        store.upload_folder(resolved.folder, folder)
    return Parent(uri=origin.uri, folder=folder, sha256=resolved.sha256, run=origin.run)
