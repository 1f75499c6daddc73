"""`plan.json`, all decisions about a run, and `embed/plan.json`, those about what it embeds."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from pipeline.config import RunConfig
from pipeline.contract import EMBEDDING, Stage
from pipeline.run_inputs import (
    EmbedModel,
    GraphsPlan,
    InputShard,
    MemoryPlan,
    Parent,
    PlanFile,
    PlannedWorld,
    PlanSection,
    Published,
    TokenizerPlan,
    digest_of,
)


class Shard(PlanSection):
    """One shard of the training data, as it was planned.

    Attributes:
        uri, sha256, size: location, content, size in bytes.
        rows: good rows.
        bad_rows: refused rows.
        holdout_rows: rows of the hold-out set.
        new_rows, replay_rows: rows that the run trains on for the first time, and again.
    """

    uri: str
    sha256: str
    size: int
    rows: int
    bad_rows: int = 0
    holdout_rows: int = 0
    new_rows: int = 0
    replay_rows: int = 0


class ResumedRun(PlanSection):
    """The run from whose checkpoints training resumes while it has none of its own, and the fingerprint of that run's plan."""

    run: str
    fingerprint: str


class TrainPlan(PlanSection):
    """The training rows, and the numbers that give every rank the same number of batches. A refresh has none.

    Attributes:
        new: shards that the parent's runs did not have.
        replay: earlier shards with rows that the run trains on.
        rows: training rows in `plan/rows/train.arrow`, new and replayed.
        new_rows, replay_rows: their split: rows that the parent and its ancestors were not trained on, and others.
        bad_rows: refused rows of all training shards.
        not_positive: good rows of all training shards with a label of 0 or less, which are no pairs to train on.
        steps, warmup_steps: optimizer steps.
        strata: task, or TASK/LOCALE -> its steps; empty if `train.batch_by` is any.
        resumed: the run whose training this run resumes; None: training begins with the parent.
    """

    new: tuple[Shard, ...] = ()
    replay: tuple[Shard, ...] = ()
    rows: int = 0
    new_rows: int = 0
    replay_rows: int = 0
    bad_rows: int = 0
    not_positive: int = 0
    steps: int = 0
    warmup_steps: int = 0
    strata: dict[str, int] = Field({})
    resumed: ResumedRun | None = None


class PartPlan(PlanSection):
    """One output part: the documents whose id hashes are in the part's interval (pipeline/dataset/ingested.part_range).

    Attributes:
        rows: documents in it.
        ids: order-independent digest of their ids (pipeline/dataset/ids).
    """

    rows: int
    ids: str = ""


class EmbedPlan(PlanFile):
    """The corpus and how its documents are divided into parts.

    The plan's own says what was there when the run began. The one that embed and publish follow is `embed/plan.json`.

    Attributes:
        source: `corpus` (rows {id, text}) or `documents` (the documents of training rows).
        shards: ingested shards of documents, in the order in which they were listed.
        tokenizer: of their tokens.
        rows: documents = ids that must be in the embeddings exactly once.
        bad_rows: refused rows, which have no embedding, besides those of training shards.
        removed: ids whose newest row says that the document is deleted.
        ids: order-independent digest of those ids (pipeline/dataset/ids).
        parts: output parts, in order; their number is a power of two.
        children: array size; see `own_parts`.
        model, listed, round, deletions, earlier: as in `Corpus`; no model: the run's own.
        fingerprint: in place of the plan's, for embed and publish.
    """

    named: ClassVar = ("the run's plan of the embeddings", "embed/plan.json")

    source: str
    shards: tuple[InputShard, ...]
    tokenizer: TokenizerPlan
    rows: int
    bad_rows: int = 0
    removed: int = 0
    ids: str
    parts: tuple[PartPlan, ...]
    children: int
    model: EmbedModel | None = None
    listed: str = ""
    round: int = 0
    deletions: str = ""
    earlier: tuple[str, ...] = ()
    fingerprint: str = ""

    def sealed(self, fingerprint: str) -> EmbedPlan:
        """Return the plan with its fingerprint, which covers that of the run's plan."""
        return self.model_copy(
            update={"fingerprint": digest_of([fingerprint, self.model_dump(mode="json", exclude={"fingerprint"})])}
        )


def own_parts(parts: int, ranks: int, rank: int) -> range:
    """Return the parts of one of embed's ranks: consecutive ones, as many as the other ranks have or one more.

    Args:
        ranks: of all children together.
        rank: counted through the children.
    """
    return range(rank * parts // ranks, (rank + 1) * parts // ranks)


def part_count(rows: int, rows_per_part: int, least: int) -> int:
    """Return the number of parts of a corpus: a power of two, so that a growing corpus keeps its parts for long.

    Args:
        rows_per_part: about this many in a part, at most.
        least: at least this many parts, as long as each can have a row.
    """
    wanted = max(-(-rows // rows_per_part), min(least, rows))
    return 1 << max(wanted - 1, 0).bit_length()


class DeletionPlan(PlanSection):
    """What `data.delete` named, and what of it was ever ingested.

    Attributes:
        digest: see `InputShard.deletions`.
        entries: ids and hashes.
        rows: rows of the listed files that they named, this week or in an earlier one.
    """

    digest: str
    entries: int
    rows: int


class HoldoutPlan(PlanSection):
    """The hold-out set, over all shards of all weeks: `queries` distinct ones against `candidates` documents.

    A query is a text and a locale, and counts if one of its documents is relevant (label above 0). With gate.metric = accuracy
    `queries` are the classified texts, and there are no candidates. `decides` says in words what
    differences the gate can tell with so many queries.
    """

    rows: int = 0
    queries: int = 0
    candidates: int = 0
    decides: str = ""


class RowFile(PlanSection):
    """One of the files in `plan/rows`."""

    sha256: str
    size: int
    rows: int


class ExpectedCost(PlanSection):
    """Estimated cost in USD; None if a price is unknown.

    Attributes:
        run: the last run that was published under this registry name and whose node-hours are known.
        node_hours: that run's, over all stages.
        as_before: cost of these node-hours at this deployment's prices.
        at_most: cost of the run if it keeps its time budget, whatever Batch retries (pipeline/cost.most).
    """

    run: str | None = None
    node_hours: float | None = None
    as_before: float | None = None
    at_most: float | None = None


class DataProfile(PlanSection):
    """What is compared between weeks (pipeline/dataset/profile).

    Attributes:
        rows: good rows of the new training shards, of which the following are shares and medians.
        locales, tasks: share of each; rows without one under an empty name.
        mean_label: mean of the labels.
        median_query, median_document: tokens.
        duplicates: share of rows that repeat an earlier row of their file.
        documents: to embed.
        documents_gone: documents of the parent's run that are no longer there; None: unknown.
    """

    rows: int
    locales: dict[str, float]
    tasks: dict[str, float]
    mean_label: float
    median_query: float
    median_document: float
    duplicates: float
    documents: int
    documents_gone: int | None = None


NOT_FINGERPRINTED: dict[str, Any] = {
    **dict.fromkeys(("created", "expected_cost", "fingerprint", "profile"), True),
    "config": {"model": {"initial": True}},
}
"""Fields that the run does not depend on. The initial model counts as the parent that it became, or not at all."""


class RunPlan(PlanFile):
    """The whole plan. `fingerprint` covers everything that the run depends on; every stage's result has it."""

    named: ClassVar = ("the run's plan", "plan.json")

    run: str
    created: str
    config: RunConfig
    parent: Parent
    published: Published | None = None
    """None: the registry named no model yet, or the run publishes nowhere."""
    world: PlannedWorld
    train: TrainPlan
    holdout: HoldoutPlan
    embed: EmbedPlan
    graphs: GraphsPlan | None = None
    """None for kinds of device that compile nothing."""
    memory: MemoryPlan | None = None
    """None in plans of versions that did not estimate it."""
    expected_cost: ExpectedCost = ExpectedCost()
    profile: DataProfile | None = None
    """None in plans of versions that made none."""
    deletions: DeletionPlan | None = None
    """None: `data.delete` names nothing."""
    reference: str | None = None
    """The run that is the reference (pipeline/evaluation/reference). None: there is none, or it cannot be compared with."""
    row_files: dict[str, RowFile] = Field({})
    """`train.arrow`, `holdout.arrow`, `candidates.arrow`, `known.arrow`, those in `published/` and `reference/`, `order.bin`."""
    lineage: tuple[str, ...] = ()
    """The runs whose rows count as seen: the parent's run and its ancestors, the oldest first (pipeline/dataset/seen)."""
    pairs: tuple[str, ...] = ()
    """Names of the ingested rows of all training shards that were listed."""
    identity: dict[str, str] = Field({})
    """Setting that names training shards -> hash of what identifies their rows: columns, templates and normalization; seen rows
    of another one cannot be recognised."""
    fingerprint: str = ""

    def sealed(self) -> RunPlan:
        """Return the plan with its fingerprint."""
        return self.model_copy(update={"fingerprint": digest_of(self.model_dump(mode="json", exclude=NOT_FINGERPRINTED))})

    def fingerprint_of(self, stage: Stage) -> str:
        """Return what a stage's result names: embed and publish may be done again with the corpus as it is by then."""
        return (stage in EMBEDDING and self.embed.fingerprint) or self.fingerprint

    def summary(self) -> dict[str, Any]:
        """Return the numbers for the state machine and for people (plan's metrics)."""
        return {
            "nodes": self.world.nodes,
            "ranks": self.world.ranks,
            "steps": self.train.steps,
            "new_shards": len(self.train.new),
            "new_rows": self.train.new_rows,
            "replay_rows": self.train.replay_rows,
            "bad_rows": self.train.bad_rows + self.embed.bad_rows,
            "not_positive_rows": self.train.not_positive,
            "holdout_queries": self.holdout.queries,
            "holdout_candidates": self.holdout.candidates,
            "gate": self.holdout.decides,
            "deleted_rows": self.deletions.rows if self.deletions else 0,
            "corpus_rows": self.embed.rows,
            "embed_parts": len(self.embed.parts),
            "embed_children": self.embed.children,
            "expected_cost": self.expected_cost.model_dump(mode="json"),
        }
