"""Requirements of a workload on a deployment's hosts besides device memory, and the hosts' capacity. prepare refuses by the same.

Bytes per row and per text are allowances above what the stages allocate (tests/pipeline/estimate/test_requirements.py); rates
were measured on one core of an AMD EPYC, and only warn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import RunConfig
from pipeline.contract import FARGATE_DISK_GIB, ROOT_VOLUME_GIB, STAGES, Stage
from pipeline.cost import HARDWARE
from pipeline.errors import BadConfig
from pipeline.estimate.memory import FP32, GIB, LIBRARY_BYTES, MIB, PROCESS_BYTES
from pipeline.estimate.workload import Workload
from pipeline.evaluation.gate import needed_queries
from pipeline.run_inputs import ModelShape

CANDIDATE_BYTES, QUERY_BYTES, RANKING_BYTES = 256, 1024, 5120
"""In each rank of evaluate: a candidate; a query. In one of the ranks: a query's best candidates while they are measured."""

HASH_BYTES = 16
"""On plan's disk: of each row of the history its own version and a seen one, of each document its two hashes."""

ROW_FILE_BYTES, ID_BYTES = 64, 24
"""A row in plan's files without its tokens; an id in the embeddings."""

PARTS_AT_ONCE = 4
"""Parts on publish's disk, one for each of its readers."""

RANKED_SCORES = 7_000_000
"""Scores per second and thread that evaluate computes and ranks: a quarter of what a core with AVX-512 reaches alone with 64
queries and 200,000 candidates of 384 dimensions (torch 2.9)."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement that grows with the data.

    Attributes:
        what: e.g. `prepare, memory`.
        amount, limit: in `unit`; a limit of None is unknown, and not judged.
        remedy: changes that help.
        unit: `bytes`, or the name of the counted thing.
        breaks: above the limit the run fails, and prepare refuses it; else it is only slow or expensive.
    """

    what: str
    amount: float
    limit: float | None
    remedy: str
    unit: str = "bytes"
    breaks: bool = True

    @property
    def over(self) -> bool:
        return self.limit is not None and self.amount > self.limit

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "over": self.over}

    def shown(self, amount: float | None) -> str:
        """Return an amount with its unit."""
        if amount is None:
            return "-"
        if self.unit != "bytes":
            return f"{amount:,.1f} {self.unit}"
        return f"{amount / GIB:.2f} GiB" if amount >= GIB else f"{amount / MIB:.2f} MiB"


def attempt_minutes(timeouts: Mapping[Stage, int]) -> dict[Stage, int]:
    """Return the minutes after which Batch ends an attempt of each stage: a deployment's `timeouts` over the defaults."""
    return {stage: timeouts.get(stage, spec.timeout_minutes) for stage, spec in STAGES.items()}


def requirements(
    work: Workload,
    shape: ModelShape,
    config: RunConfig,
    *,
    parts: int,
    ranks: int,
    embed_host: str | None,
    minutes: Mapping[Stage, int],
    models: int = 2,
) -> Iterator[Requirement]:
    """Yield every requirement that grows with the data.

    Args:
        parts: of embed.
        ranks: of a host that evaluates.
        embed_host: instance type of the hosts that evaluate and embed; None or another type: unknown.
        minutes: of an attempt, see `attempt_minutes`.
        models: number that evaluate measures: the new one, the published one, and the parent if it is a third.
    """
    tokens, candidates = work.query_tokens + work.document_tokens, work.candidates + config.evaluate.candidates
    shards = "name fewer shards in data.train"
    files = (work.train_rows + work.queries) * (ROW_FILE_BYTES + 4 * tokens) + candidates * (16 + 4 * work.document_tokens)
    remedy = f"{shards}, lower data.replay_fraction, or shorten train.length"
    yield Requirement(
        "plan, disk: row files and hashes",
        files + HASH_BYTES * (work.known_rows + work.corpus_rows),
        FARGATE_DISK_GIB * GIB,
        remedy,
    )
    what = "train, disk of a node: row files and two checkpoints"
    yield Requirement(what, files + 2 * 3 * FP32 * shape.parameters, ROOT_VOLUME_GIB * GIB, remedy)

    host = HARDWARE.get(embed_host or "")
    enough = min(config.data.holdout_fraction, 10 * needed_queries(config.gate) / max(work.known_rows, 1))
    remedy = f"data.holdout_fraction={enough:.2g} holds out ten times the queries that the gate needs"
    sizes = {*config.train.dimensions, config.embed.dimensions or shape.dimension} - {shape.dimension}
    # For a moment there are two copies of the embeddings, and of those of another size.
    amount: float = (work.queries + candidates) * 2 * FP32 * (shape.dimension + max(sizes, default=0))
    amount += work.queries * RANKING_BYTES
    amount += LIBRARY_BYTES + ranks * (PROCESS_BYTES + candidates * CANDIDATE_BYTES + work.queries * QUERY_BYTES)
    yield Requirement("evaluate, memory of a host", amount, host.job_memory_mib * MIB if host else None, remedy)
    what = "evaluate, ranking every model's candidates, at a rate measured elsewhere"
    amount = (models + len(sizes)) * work.queries * candidates / RANKED_SCORES / (host.job_vcpus if host else 1) / 60
    remedy = f"evaluate's attempt ends at its limit, and all queries are ranked against all candidates: {remedy}"
    yield Requirement(what, amount, minutes[Stage.EVALUATE] if host else None, remedy, "minutes", breaks=False)

    embedding = (4 if config.embed.dtype == "float32" else 2) * (config.embed.dimensions or shape.dimension)
    amount = work.corpus_rows / parts * (embedding + ID_BYTES)
    what = f"publish, disk: {PARTS_AT_ONCE} parts"
    yield Requirement(what, PARTS_AT_ONCE * amount, FARGATE_DISK_GIB * GIB, "lower embed.rows_per_part")


def over(found: Sequence[Requirement]) -> list[Requirement]:
    """Return the requirements above their limit, beginning with those that break a run."""
    return sorted((one for one in found if one.over), key=lambda one: (not one.breaks, -one.amount / (one.limit or 1)))


def refuse(found: Sequence[Requirement]) -> None:
    """Refuse more data than a stage can hold.

    Raises:
        BadConfig: names everything that is too much and changes that help.
    """
    if refused := [one for one in over(found) if one.breaks]:
        raise BadConfig(
            "the run has more data than a stage can hold",
            value=[f"{one.what}: {one.shown(one.amount)}" for one in refused],
            rule="; ".join(f"{one.what}: at most {one.shown(one.limit)}" for one in refused),
            remedy="; ".join(dict.fromkeys(one.remedy for one in refused)),
        )
