"""`prepare/inputs.json`, what a run begins with, and `plan.json`, all decisions about it. Each is written once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config import RunConfig
from pipeline.contract import EAGER_KINDS, EMBEDDING, Stage
from pipeline.errors import BadData


class PlanSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class InputShard(PlanSection):
    """One version of an input file in one use, and the names of what ingest makes of it (pipeline/dataset/ingested).

    Attributes:
        uri: its URI.
        version: the ETag on S3, elsewhere a stamp of the last write; another version is another shard.
        size: in bytes.
        modified: seconds since 1970 of the last write. Of rows that contradict each other, those of the newest shard count.
        kind: `pairs` (training rows) or `documents` (what is embedded: corpus rows, or the documents of training rows).
        of_pairs: the file holds training rows; so without a corpus of its own the same file comes as both kinds.
        generation: of documents; a later one replaces the documents of earlier ones. 0 in `data.corpus_mode: files`.
        rows, tokens: names of the ingested rows and of their tokens.
        deletions: digest of what `data.delete` names (pipeline/dataset/deletions): none of it may be in the ingested rows.
    """

    uri: str
    version: str
    size: int
    modified: float = 0.0
    kind: str
    of_pairs: bool = True
    generation: int = 0
    rows: str
    tokens: str
    deletions: str = ""


class TokenizerPlan(PlanSection):
    """The tokenizer of the ingested tokens.

    Attributes:
        digest: of the tokenizer.
        vocabulary: every token id is below this; decides the integer type.
        cap: tokens of a stored text at most, special ones included: as many as the model has positions for.
        prefix, suffix: special tokens before and behind a text, which a cut keeps.
        side: the end at which texts are cut, `right` or `left`.
    """

    digest: str
    vocabulary: int
    cap: int
    prefix: int
    suffix: int
    side: str = "right"


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


class Parent(PlanSection):
    """The model that the run continues from.

    Attributes:
        uri: as configured, or the registry's model.
        folder: a model folder that every stage can load (the URI itself, or a conversion under `prepare/parent`).
        sha256: of its weight file.
        run: the run of this bucket that made it, if any.
    """

    uri: str
    folder: str
    sha256: str
    run: str | None = None


class Published(PlanSection):
    """The model that the registry named when the run was planned: the gate's baseline, and the one that publish replaces.

    Attributes:
        run: the run that made it.
        folder: its model folder.
        sha256: of its weight file.
        epoch: of the registry's pointer (pipeline/run/registry); publish replaces this run's model in this epoch, and no other.
        own_tokens: whether its tokens differ from the parent's; `plan/rows/published` then has the hold-out in them.
        positions: tokens of its longest text, where its tokens are its own.
        same_graphs: whether the run's graphs fit it. Where they do not, evaluate encodes with it on the host's processor.
    """

    run: str
    folder: str
    sha256: str
    epoch: int = 0
    own_tokens: bool = False
    positions: int = 0
    same_graphs: bool = True


class PlannedWorld(PlanSection):
    """The ranks of a run: nodes x ranks per node, their device type and precision."""

    kind: str
    precision: str
    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class MemoryPlan(PlanSection):
    """Estimated peak memory in bytes (pipeline/estimate/memory).

    Attributes:
        device: of a rank's device.
        host: of a node's host.
    """

    device: int
    host: int


class GraphsPlan(PlanSection):
    """The compiled sets that the run needs, and the compiler's flags.

    Attributes:
        train: fingerprint of the set that training uses; the number of ranks is in its graphs.
        infer: fingerprint of the set that evaluate and embed use; the same for any number of ranks.
        compiler_flags: NEURON_CC_FLAGS of training, empty on other device types.
        infer_compiler_flags: neuronx-cc's flags of evaluate's and embed's graphs.
        cache: URI of the compiler's persistent cache, empty on other device types.
        environment: variables of the process that change training's graphs, none on other device types.
    """

    train: str
    infer: str
    compiler_flags: str = ""
    infer_compiler_flags: str = ""
    cache: str = ""
    environment: dict[str, str] = {}


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
        bucket_rows: document bucket -> rows, after moving remainders (see pipeline/dataset/sampler).
        steps_per_epoch, steps, warmup_steps: optimizer steps.
        resumed: the run whose training this run resumes; None: training begins with the parent.
    """

    new: tuple[Shard, ...] = ()
    replay: tuple[Shard, ...] = ()
    rows: int = 0
    new_rows: int = 0
    replay_rows: int = 0
    bad_rows: int = 0
    not_positive: int = 0
    bucket_rows: dict[str, int] = {}
    steps_per_epoch: int = 0
    steps: int = 0
    warmup_steps: int = 0
    resumed: ResumedRun | None = None


class PartPlan(PlanSection):
    """One output part: the documents whose id hashes are in the part's interval (pipeline/dataset/ingested.part_range).

    Attributes:
        rows: documents in it.
        ids: order-independent digest of their ids (pipeline/dataset/ids).
    """

    rows: int
    ids: str = ""


class EmbedModel(PlanSection):
    """A model that embeds: the run that made it, its folder, and the sha256 of its weights."""

    run: str
    folder: str
    sha256: str


class Corpus(PlanSection):
    """`prepare/corpus.json`: what is to be embedded. A run that trained lists the corpus again: days may have passed.

    Attributes:
        model: embeds it.
        listed: when, ISO 8601 in UTC.
        round: how often the run has listed it to embed it.
        shards, deletions: as in `RunInputs`.
        earlier: manifests of embeddings, perhaps of the same form; their unchanged documents are not embedded again.
    """

    model: EmbedModel
    listed: str
    round: int
    shards: tuple[InputShard, ...]
    deletions: str
    earlier: tuple[str, ...]

    @classmethod
    def from_json(cls, data: bytes) -> Corpus:
        """
        Raises:
            BadData: not a listing, or one of another version of trnpipe.
        """
        return _read(cls, data, "the run's corpus cannot be read", "prepare/corpus.json")


class EmbedPlan(PlanSection):
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
            update={"fingerprint": _digest([fingerprint, self.model_dump(mode="json", exclude={"fingerprint"})])}
        )

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> EmbedPlan:
        """
        Raises:
            BadData: not a plan, or one of another version of trnpipe.
        """
        return _read(cls, data, "the run's plan of the embeddings cannot be read", "embed/plan.json")


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

    A query is a text and a locale, and counts if one of its documents is relevant (label above 0). `decides` says in words what
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of an encoder (pipeline/model/shape).

    Attributes:
        parameters: elements of all weights.
        largest: elements of the largest weight, the word embeddings.
        multiplied: elements of the matrices that every token is multiplied with; autocast keeps a copy of them.
        layers, hidden, heads, intermediate: of the backbone.
        head: width of the residual head, 0 without.
        dropout: of hidden states, as the model is configured.
        fused: the library computes attention with torch's fused function where the device has it.
        stored_bytes: per element of the weight file.
    """

    parameters: int
    largest: int
    multiplied: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    head: int
    dropout: float
    fused: bool
    stored_bytes: int

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over a text of `length` tokens, padding included.

        Two for each element of a matrix and token; in attention every token meets every other twice, as a score and as a value
        (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", appendix). Lookups are none.
        """
        attention = 2 * length * self.hidden * self.layers
        return 2.0 * (length * (self.multiplied + attention) + 2 * self.hidden * self.head)


class RunInputs(PlanSection):
    """`prepare/inputs.json`: what prepare decided, before any row was read. Written once; ingest and plan read it.

    Attributes:
        shards: the input files, sorted by kind and URI. What arrives later is the next run's.
        shape: of the model.
        tokenizer: of the parent, and so of the ingested tokens.
        lineage, identity: as in `RunPlan`.
        published_lineage: the runs whose rows the published model was trained on, where it is not the parent.
        deletions: as in `InputShard`.
        reference: the run that is the reference (pipeline/evaluation/reference), if there is one.
    """

    run: str
    created: str
    config: RunConfig
    parent: Parent
    published: Published | None = None
    world: PlannedWorld
    graphs: GraphsPlan | None = None
    memory: MemoryPlan | None = None
    shape: ModelShape
    tokenizer: TokenizerPlan
    shards: tuple[InputShard, ...]
    lineage: tuple[str, ...] = ()
    published_lineage: tuple[str, ...] = ()
    identity: str
    deletions: str = ""
    reference: str | None = None

    def shards_of(self, kind: str) -> tuple[InputShard, ...]:
        """Return the shards of one kind."""
        return tuple(shard for shard in self.shards if shard.kind == kind)

    def summary(self) -> dict[str, Any]:
        """Return the numbers for people (prepare's metrics)."""
        chosen = f"{self.world.kind} in {self.world.precision}"
        lacks_bf16 = self.world.kind in EAGER_KINDS and self.world.precision == "fp32" and self.config.device.precision == "auto"
        return {
            "nodes": self.world.nodes,
            "device": self.world.kind,
            "precision": self.world.precision,
            "computes": f"{chosen}: no bf16 instructions, so about half as fast" if lacks_bf16 else chosen,
            "ranks": self.world.ranks,
            "shards": len(self.shards),
            "device_gib": round(self.memory.device / (1 << 30), 2) if self.memory else None,
            "host_gib": round(self.memory.host / (1 << 30), 2) if self.memory else None,
        }

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RunInputs:
        """
        Raises:
            BadData: not a run's inputs, or those of another version of trnpipe.
        """
        return _read(cls, data, "the run's inputs cannot be read", "prepare/inputs.json")


class MissingShards(PlanSection):
    """`prepare/missing.json`: what ingest has to make. Every prepare of a run writes it anew; ingest looks at nothing else.

    Attributes:
        shards: those that are not ingested.
        children: jobs that share the files.
    """

    shards: tuple[InputShard, ...]
    children: int


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


class RunPlan(PlanSection):
    """The whole plan. `fingerprint` covers everything that the run depends on; every stage's result has it."""

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
    row_files: dict[str, RowFile] = {}
    """`train.arrow`, `holdout.arrow`, `candidates.arrow`, `known.arrow`, those in `published/` and `reference/`, and
    `order-EPOCH.npy`."""
    lineage: tuple[str, ...] = ()
    """The runs whose rows count as seen: the parent's run and its ancestors, the oldest first (pipeline/dataset/seen)."""
    pairs: tuple[str, ...] = ()
    """Names of the ingested rows of all training shards that were listed."""
    identity: str = ""
    """Hash of what identifies a row: columns, templates and normalization; seen rows of another one cannot be recognised."""
    fingerprint: str = ""

    def sealed(self) -> RunPlan:
        """Return the plan with its fingerprint."""
        record = self.model_dump(mode="json", exclude=NOT_FINGERPRINTED)
        return self.model_copy(update={"fingerprint": _digest(record)})

    def fingerprint_of(self, stage: Stage) -> str:
        """Return what a stage's result names: embed and publish may be done again with the corpus as it is by then."""
        return (stage in EMBEDDING and self.embed.fingerprint) or self.fingerprint

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RunPlan:
        """
        Raises:
            BadData: not a plan, or one of another version of trnpipe.
        """
        return _read(cls, data, "the run's plan cannot be read", "plan.json")

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


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


PlanT = TypeVar("PlanT", bound=PlanSection)


def _read(kind: type[PlanT], data: bytes, what: str, name: str) -> PlanT:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, item['loc'])) or name}: {item['msg']}" for item in error.errors(include_input=False)]
        raise BadData(
            what,
            value=found,
            rule="it is read by the version of trnpipe that wrote it, and never changed",
            remedy=f"restore {name} as it was written, or start a new run",
        ) from error
