"""List the input files, in every use that a run makes of them, and name what ingest makes of each."""

from __future__ import annotations

from functools import partial
from typing import Any

from pipeline import store
from pipeline.config import RunConfig
from pipeline.dataset.generations import list_corpus
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, rows_name, tokens_name
from pipeline.dataset.shards import find_shards
from pipeline.errors import BadConfig, MissingInput
from pipeline.log import log
from pipeline.run_inputs import InputShard, TokenizerPlan


def list_pairs(config: RunConfig, tokenizer: TokenizerPlan, deletions: str) -> tuple[InputShard, ...]:
    """Return the training shards, sorted by URI.

    Args:
        deletions: digest of what `data.delete` names.

    Raises:
        BadConfig: data.train is empty.
        MissingInput: a URI names nothing.
    """
    return tuple(_named(config, tokenizer, PAIRS, shard, deletions=deletions) for shard in _training(config))


def list_documents(config: RunConfig, tokenizer: TokenizerPlan, deletions: str) -> tuple[InputShard, ...]:
    """Return the shards whose documents are embedded, sorted by URI: the corpus, or the training shards without one.

    Args:
        deletions: as in `list_pairs`.

    Raises:
        BadConfig, MissingInput: as in `list_pairs`.
    """
    data = config.data
    corpus = list_corpus(data.corpus, data.corpus_mode) if data.corpus else [(shard, 0) for shard in _training(config)]
    named = partial(_named, config, tokenizer, DOCUMENTS, of_pairs=not data.corpus, deletions=deletions)
    log.info("%d shards of documents", len(corpus))
    return tuple(named(shard, generation=generation) for shard, generation in corpus)


def list_documents_again(config: RunConfig, tokenizer: TokenizerPlan, deletions: str) -> tuple[InputShard, ...] | None:
    """Return the documents' shards as they are by now; None if what was listed first is gone altogether: a run that has trained
    embeds it all the same."""
    try:
        return list_documents(config, tokenizer, deletions)
    except MissingInput as error:
        log.warning("the documents cannot be listed again; those that the run began with are embedded: %s", error)
        return None


def _training(config: RunConfig) -> list[store.ObjectInfo]:
    if not config.data.train:
        raise BadConfig(
            "there is nothing to train on",
            value="data.train = []",
            rule="data.train names at least one shard or folder of shards",
            remedy="set data.train",
        )
    return find_shards(config.data.train, "data.train")


def _named(config: RunConfig, tokenizer: TokenizerPlan, kind: str, info: store.ObjectInfo, **more: Any) -> InputShard:
    file = {"uri": info.uri, "version": info.version, "size": info.size}
    rows = rows_name(file, kind, config.data.columns, config.data.holdout_by)
    return InputShard(**file, modified=info.modified, kind=kind, rows=rows, tokens=tokens_name(rows, tokenizer), **more)
