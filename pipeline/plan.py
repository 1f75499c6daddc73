"""`plan.json`: all of prepare's decisions about a run. Written once; the later stages read it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config import RunConfig
from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadData


class PlanSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(PlanSection):
    """One input file, as prepare found it.

    Attributes:
        uri, sha256, size: location, content, size in bytes.
        rows: good rows.
        bad_rows: refused rows, which every reader skips by the same rules.
        holdout_rows: good rows on the hold-out side.
        first_run: the run that trained on it first.
    """

    uri: str
    sha256: str
    size: int
    rows: int
    bad_rows: int = 0
    holdout_rows: int = 0
    first_run: str = ""


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
        registry_etag: version of the registry's pointer; publish replaces exactly that one.
        own_tokens: whether its tokens differ from the parent's; `prepare/rows/published` then has the hold-out in them.
        same_graphs: whether the run's graphs fit it. Where they do not, evaluate encodes with it on the host's processor.
    """

    run: str
    folder: str
    sha256: str
    registry_etag: str
    own_tokens: bool = False
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
    """The training rows, and the numbers that give every rank the same number of batches.

    Attributes:
        new: shards trained on for the first time.
        replay: earlier shards of which some rows are trained on again.
        rows: training rows in `prepare/rows/train.arrow`, new and replayed.
        new_rows, replay_rows: their split.
        bad_rows: refused rows of all training shards.
        not_positive: good rows of all training shards with a label of 0 or less, which are no pairs to train on.
        bucket_rows: document bucket -> rows, after moving remainders (see pipeline/dataset/sampler).
        steps_per_epoch, steps, warmup_steps: optimizer steps.
        resumed: the run whose training this run resumes; None: training begins with the parent.
    """

    new: tuple[Shard, ...]
    replay: tuple[Shard, ...]
    rows: int
    new_rows: int
    replay_rows: int
    bad_rows: int = 0
    not_positive: int = 0
    bucket_rows: dict[str, int]
    steps_per_epoch: int
    steps: int
    warmup_steps: int
    resumed: ResumedRun | None = None


class Span(PlanSection):
    """Good rows [start, stop) of one corpus shard."""

    shard: int
    start: int
    stop: int


class PartPlan(PlanSection):
    """One output part and the corpus rows it holds."""

    spans: tuple[Span, ...]
    rows: int


class EmbedPlan(PlanSection):
    """The corpus and how its rows are cut into parts.

    Attributes:
        source: `corpus` (rows {id, text}) or `documents` (the documents of training rows).
        shards: all corpus shards.
        rows: good rows = ids that must be in the embeddings exactly once.
        bad_rows: refused rows, which have no embedding.
        ids: order-independent digest of those ids (pipeline/dataset/ids).
        parts: output parts, in order.
        children: array size; see `own_parts`.
    """

    source: str
    shards: tuple[Shard, ...]
    rows: int
    bad_rows: int = 0
    ids: str
    parts: tuple[PartPlan, ...]
    children: int


def own_parts(parts: int, ranks: int, rank: int) -> range:
    """Return the parts of one of embed's ranks: consecutive ones, as many as the other ranks have or one more.

    Args:
        ranks: of all children together.
        rank: counted through the children.
    """
    return range(rank * parts // ranks, (rank + 1) * parts // ranks)


def part_count(rows: int, rows_per_part: int, least: int) -> int:
    """Return the number of parts of a corpus.

    Args:
        rows_per_part: at most this many in a part.
        least: at least this many parts, as long as each has a row.
    """
    return max(-(-rows // rows_per_part), min(least, rows))


class HoldoutPlan(PlanSection):
    """The hold-out set, over all shards of all weeks: `queries` distinct ones against `candidates` documents.

    A query is a text and a locale, and counts if one of its documents is relevant (label above 0).
    """

    rows: int
    queries: int
    candidates: int


class RowFile(PlanSection):
    """One of the Arrow files in `prepare/rows`."""

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


NOT_FINGERPRINTED: dict[str, Any] = {
    **dict.fromkeys(("created", "expected_cost", "fingerprint"), True),
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
    row_files: dict[str, RowFile] = {}
    """`train.arrow`, `holdout.arrow` and `candidates.arrow`, and those in `published/`."""
    seen: tuple[str, ...]
    """sha256 of every training shard this model and its ancestors have been trained on, this run's included."""
    fingerprint: str = ""

    def sealed(self) -> RunPlan:
        """Return the plan with its fingerprint."""
        record = self.model_dump(mode="json", exclude=NOT_FINGERPRINTED)
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        return self.model_copy(update={"fingerprint": hashlib.sha256(canonical).hexdigest()})

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RunPlan:
        """
        Raises:
            BadData: not a plan, or one of another version of trnpipe.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, item['loc'])) or 'plan'}: {item['msg']}" for item in error.errors(include_input=False)]
            raise BadData(
                "the run's plan cannot be read",
                value=found,
                rule="a plan is read by the version of trnpipe that wrote it, and never changed",
                remedy="restore plan.json as prepare wrote it, or start a new run",
            ) from error

    def _computes(self) -> str:
        """Return device type and precision for people, and what it costs that a host has no instructions for bf16."""
        chosen = f"{self.world.kind} in {self.world.precision}"
        lacks_bf16 = self.world.kind in EAGER_KINDS and self.world.precision == "fp32" and self.config.device.precision == "auto"
        return f"{chosen}: no bf16 instructions, so about half as fast" if lacks_bf16 else chosen

    def summary(self) -> dict[str, Any]:
        """Return the numbers for the state machine and for people (prepare's metrics)."""
        return {
            "nodes": self.world.nodes,
            "device": self.world.kind,
            "precision": self.world.precision,
            "computes": self._computes(),
            "ranks": self.world.ranks,
            "steps": self.train.steps,
            "new_shards": len(self.train.new),
            "new_rows": self.train.new_rows,
            "replay_rows": self.train.replay_rows,
            "bad_rows": self.train.bad_rows + (self.embed.bad_rows if self.embed.source == "corpus" else 0),
            "not_positive_rows": self.train.not_positive,
            "holdout_queries": self.holdout.queries,
            "holdout_candidates": self.holdout.candidates,
            "corpus_rows": self.embed.rows,
            "embed_parts": len(self.embed.parts),
            "embed_children": self.embed.children,
            "device_gib": round(self.memory.device / (1 << 30), 2) if self.memory else None,
            "host_gib": round(self.memory.host / (1 << 30), 2) if self.memory else None,
            "expected_cost": self.expected_cost.model_dump(mode="json"),
        }
