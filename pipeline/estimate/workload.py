"""The workload: from the options of `trnpipe plan`, from a run, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import store
from pipeline.config import Deployment, RunConfig
from pipeline.contract import RunPaths, Stage, StageResult
from pipeline.errors import BadConfig
from pipeline.plan import RunPlan
from pipeline.run.request import read_request

QUERY_TOKENS, DOCUMENT_TOKENS = 12.0, 96.0
"""Assumed means."""

PADDING = 0.02
"""Share of packed rows that is padding: 1.3 % for mixed texts, 2.3 % for short ones (tests/benchmarks/padding.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rows and tokens of a run.

    Attributes:
        train_rows: pairs trained on in an epoch.
        known_rows: good rows of all training shards, new and earlier.
        corpus_rows: documents embedded.
        queries, candidates: of the hold-out.
        query_tokens, document_tokens: means, special tokens included, without padding.
        embed_rows: packed rows that are computed for the mean document, less than one; 0 where no time is estimated.
    """

    train_rows: int
    known_rows: int
    corpus_rows: int
    queries: int
    candidates: int
    query_tokens: float
    document_tokens: float
    embed_rows: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The files of a run that tell speeds and lengths.

    Attributes:
        deployment: added by the state machine; None: the run's input is gone.
        train, embed: metrics of the results; empty where there is none.
    """

    plan: RunPlan
    deployment: Deployment | None
    train: Mapping[str, Any]
    embed: Mapping[str, Any]

    @classmethod
    def read(cls, paths: RunPaths) -> MeasuredRun:
        """
        Raises:
            MissingInput: no plan.
            BadData, BadConfig: the plan or a result cannot be read; the input.
        """
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        deployment = read_request(paths).deployment if store.exists(paths.input) else None
        uris = [paths.result(stage) for stage in (Stage.TRAIN, Stage.EMBED)]
        train, embed = (StageResult.from_json(store.read_bytes(uri)).metrics if store.exists(uri) else {} for uri in uris)
        return cls(plan=plan, deployment=deployment, train=train, embed=embed)

    @property
    def embed_rows(self) -> float:
        """Rows of embed for the mean document; 0 where the run has embedded nothing."""
        return rows_of(self.document_tokens, self.plan.config.embed.length, self.embed.get("padding", 0.0))

    @property
    def document_tokens(self) -> float:
        """The mean of the corpus; 0: unknown."""
        return float(self.embed.get("tokens", 0)) / (self.embed.get("documents") or 1)


def rows_of(tokens: float, length: int, padding: float) -> float:
    """Return the packed rows of so many tokens that the mean text takes; longer texts are cut.

    Args:
        padding: share of the rows.
    """
    return min(tokens, length) / (1 - padding) / length


def workload(
    config: RunConfig,
    run: MeasuredRun | None,
    *,
    train_rows: int | None,
    corpus_rows: int | None,
    query_tokens: float | None,
    document_tokens: float | None,
) -> tuple[Workload, list[str]]:
    """Return the workload, and a sentence on each assumption.

    Args:
        run: source of what the other arguments do not say.
        train_rows, corpus_rows, query_tokens, document_tokens: as in `Workload`.

    Raises:
        BadConfig: no rows are named, and there is no run to take them from.
    """
    plan = run.plan if run else None
    pairs = train_rows or (plan.train.rows if plan else 0) or corpus_rows or 0
    documents = corpus_rows or (plan.embed.rows if plan and train_rows is None else 0) or pairs
    if not pairs:
        raise BadConfig(
            "the options name no rows",
            value=f"--train-rows {train_rows}, --corpus-rows {corpus_rows}",
            rule="a workload has rows",
            remedy="name --train-rows, --corpus-rows or both",
        )
    # A run's lengths hold for documents like its own, not for others that an option names.
    same = run if document_tokens is None else None
    mean = document_tokens or (run.document_tokens if run else 0.0) or DOCUMENT_TOKENS
    source = ", as in the run" if run and run.document_tokens else "; or name --document-tokens"
    length = config.embed.length
    embed_rows = same.embed_rows if same and length == same.plan.config.embed.length else 0.0
    held = min(round(pairs * config.data.holdout_fraction), config.data.holdout_queries)
    assumptions = (
        (
            train_rows is None and not plan,
            f"as many pairs are trained on as documents are embedded: {pairs:,}; or name --train-rows",
        ),
        (
            corpus_rows is None and documents == pairs,
            f"the corpus is the documents of the training rows, all different: {documents:,}; or name --corpus-rows",
        ),
        (
            query_tokens is None,
            f"a query has {QUERY_TOKENS:g} tokens on average",
        ),
        (document_tokens is None, f"a document has {mean:.4g} tokens on average{source}"),
        (mean > length, f"embed cuts every document at {length} tokens: the mean is taken for as many"),
        (not embed_rows, f"embed packs documents into rows of {length} tokens, {PADDING:.0%} of them padding"),
        (True, f"{held:,} pairs are held out to evaluate with, each with a query and a document of its own"),
    )
    return (
        Workload(
            train_rows=pairs,
            known_rows=pairs,
            corpus_rows=documents,
            queries=held,
            candidates=held,
            query_tokens=query_tokens or QUERY_TOKENS,
            document_tokens=min(mean, length),
            embed_rows=embed_rows or rows_of(mean, length, PADDING),
        ),
        [sentence for holds, sentence in assumptions if holds],
    )
