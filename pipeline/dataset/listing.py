"""List the input files, in every use that a run makes of them, and name what ingest makes of each."""

from __future__ import annotations

from functools import partial
from typing import Any

from pipeline import store
from pipeline.config import RunConfig
from pipeline.dataset.generations import list_corpus
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, mined_name, rows_name, tokens_name
from pipeline.dataset.shards import find_shards
from pipeline.errors import BadConfig, MissingInput
from pipeline.log import log
from pipeline.run_inputs import InputShard, TokenizerPlan


def list_pairs(config: RunConfig, tokenizer: TokenizerPlan, deletions: str) -> tuple[InputShard, ...]:
    """Return the training shards, sorted by URI.

    Args:
        deletions: digest of what `data.delete` names.

    Raises:
        BadConfig: there is none.
        MissingInput: a URI names nothing.
    """
    return tuple(_named(config, tokenizer, PAIRS, *found, deletions=deletions) for found in _training(config))


def list_documents(config: RunConfig, tokenizer: TokenizerPlan, deletions: str) -> tuple[InputShard, ...]:
    """Return the shards whose documents are embedded, sorted by URI: the corpus, or the training shards without one.

    Args:
        deletions: as in `list_pairs`.

    Raises:
        BadConfig, MissingInput: as in `list_pairs`.
    """
    data = config.data
    named = partial(_named, config, tokenizer, DOCUMENTS, of_pairs=not data.corpus, deletions=deletions)
    if data.corpus:
        found = [named(shard, "data.train", generation=each) for shard, each in list_corpus(data.corpus, data.corpus_mode)]
    else:
        found = [named(shard, setting) for shard, setting in _training(config)]
    log.info("%d shards of documents", len(found))
    return tuple(found)


def list_documents_again(config: RunConfig, tokenizer: TokenizerPlan, deletions: str) -> tuple[InputShard, ...] | None:
    """Return the documents' shards as they are by now; None if what was listed first is gone altogether: a run that has trained
    embeds it all the same."""
    try:
        return list_documents(config, tokenizer, deletions)
    except MissingInput as error:
        log.warning("the documents cannot be listed again; those that the run began with are embedded: %s", error)
        return None


def _training(config: RunConfig) -> list[tuple[store.ObjectInfo, str]]:
    """Return the training shards, sorted by URI, and the setting that names each: those of tasks are not in data.train, too."""
    (own, (uris, _)), *tasks = config.data.training.items()
    found = [(shard, setting) for setting, (named, _) in tasks for shard in find_shards(named, setting)]
    taken = {shard.uri for shard, _ in found}
    found += [(shard, own) for shard in find_shards(uris, own) if shard.uri not in taken]
    if not found:
        raise BadConfig(
            "there is nothing to train on",
            value="data.train = []",
            rule="data.train, or the train of a task in data.tasks, names at least one shard or folder of shards",
            remedy="set data.train",
        )
    return sorted(found, key=lambda one: (one[0].uri, one[1]))


def _named(
    config: RunConfig, tokenizer: TokenizerPlan, kind: str, info: store.ObjectInfo, setting: str, **more: Any
) -> InputShard:
    file = {"uri": info.uri, "version": info.version, "size": info.size}
    rows = rows_name(file, kind, config.data.training[setting][1], config.data.held_out_by(setting))
    tokens, mine = tokens_name(rows, tokenizer), config.train.mine
    mined = mined_name(tokens, mine) if mine and kind == PAIRS else ""
    return InputShard(**file, modified=info.modified, kind=kind, setting=setting, rows=rows, tokens=tokens, mined=mined, **more)
