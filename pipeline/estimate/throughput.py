"""Hours and dollars of training and embedding on Trainium and Inferentia2: floating-point operations over peak times MFU.

MFU (useful operations over peak operations) is the published one of BERT, or that of a measured run. Backward passes count as two
forward passes; activation checkpointing and micro-batches each compute the forward pass once more, at the same rate. Gradients
are reduced between nodes in a ring at EFA's documented bandwidth, which nothing hides. Embedding also reads and tokenizes in the
background, at rates that were measured on one core of an AMD EPYC.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from pipeline.config import RunConfig
from pipeline.contract import Stage
from pipeline.cost import HARDWARE
from pipeline.estimate.memory import FP32, TRAIN_HOST
from pipeline.estimate.workload import PADDING, MeasuredRun, Workload
from pipeline.plan import part_count
from pipeline.run_inputs import ModelShape

EMBED_HOSTS = (TRAIN_HOST, "inf2.xlarge", "inf2.8xlarge", "inf2.24xlarge", "inf2.48xlarge")

CORE_FLOPS = 95e12
"""Peak of a NeuronCore-v2 in bf16, the same on Trn1 and Inf2 (Neuron docs, about-neuron/arch/neuron-hardware/trn1-arch.rst and
inf2-arch.rst: 190 TFLOPS for a chip of two cores)."""

EFA_BYTES = 800e9 / 8
"""Bytes per second between trn1.32xlarge nodes (trn1-arch.rst: 800 Gbps)."""

TRAIN_MFU = 0.33
"""BERT-Large, phase 1 (128 tokens, heads included) on one trn1.32xlarge in bf16: 3,827 sequences/s (Neuron docs, about-neuron/
benchmarks/trn1/training_data_encoder.csv, SDK 2.28). Sixteen nodes reach 94 % of that each (57,408 sequences/s)."""

EMBED_MFU: Mapping[str, Mapping[int, float]] = {"trn1": {768: 0.40, 1024: 0.46}, "inf2": {768: 0.31, 1024: 0.39}}
"""Family -> hidden width -> MFU of one chip with 128 tokens in bf16, of bert-base (3,421.6 and 2,674.2 inferences/s) and
bert-large (1,104.4 and 950.0). Neuron docs, about-neuron/benchmarks/trn1 and inf2/throughput_data_encoder.csv, SDK 2.27, 2.21."""

READ_ROWS = 200_000
"""Rows per second of pipeline/dataset/rows.DocumentReader: JSON Lines of 355 bytes from a local disk."""


def embed_mfu(family: str, hidden: int) -> float:
    """Return the published MFU of the next narrower width, else of the narrowest."""
    published = EMBED_MFU[family]
    return published[max((width for width in published if width <= hidden), default=min(published))]


def all_reduce_seconds(parameters: int, nodes: int) -> float:
    """Return the seconds in which a ring of nodes reduces fp32 gradients: each sends and receives 2 (n - 1) / n of the bytes."""
    return 2 * (nodes - 1) / nodes * FP32 * parameters / EFA_BYTES


def batch_flops(shape: ModelShape, config: RunConfig, ranks: int) -> float:
    """Return the operations of a rank's batch: all packed rows, and its queries' scores with the documents of all ranks."""
    train = config.train
    scores = 2.0 * train.batch_size**2 * (train.bin_shape.documents + train.symmetric) * ranks
    scores *= shape.dimension + sum(train.dimensions)
    forward = train.bins * train.bin_shape.rows * shape.flops(train.length) + scores
    return forward * (3 + train.activation_checkpointing + config.cuts_batches("neuron"))


def batch_pairs(config: RunConfig, work: Workload) -> float:
    """Return the pairs that a rank's batch has room for, on average."""
    train = config.train
    tokens = min(work.query_tokens, train.longest_query) + train.bin_shape.documents * min(work.document_tokens, train.length)
    return min(train.batch_size, train.bins * train.bin_shape.tokens * (1 - PADDING) / tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The share of their peak that hosts reach.

    Attributes:
        train, embed: utilization in training, and in embedding by family; MFU where no pass is computed again.
        train_source, embed_source: their origin.
        with_input: families whose rate includes reading and tokenizing.
        stall: seconds that training waits for a checkpoint; None: unknown, and not counted.
    """

    train: float
    train_source: str
    embed: Mapping[str, float]
    embed_source: Mapping[str, str]
    with_input: frozenset[str] = frozenset()
    stall: float | None = None

    @classmethod
    def published(cls, hidden: int) -> Rates:
        return cls(
            # Training is published at one width; in a narrower model it is lower by as much as inference.
            train=TRAIN_MFU * embed_mfu("trn1", hidden) / EMBED_MFU["trn1"][1024],
            train_source="published: BERT-Large, 128 tokens, 3,827 sequences/s on one trn1.32xlarge; less for a narrower model",
            embed={family: embed_mfu(family, hidden) for family in EMBED_MFU},
            embed_source=dict.fromkeys(EMBED_MFU, "published: bert-base and bert-large, 128 tokens, on one chip"),
        )

    @classmethod
    def measured(cls, shape: ModelShape, run: MeasuredRun) -> Rates:
        """Return the rates of a run on Neuron, as far as its results have them; else the published ones."""
        rates, plan, config, ranks = cls.published(shape.hidden), run.plan, run.plan.config, run.plan.world.ranks
        if speed := run.train.get("pairs_per_second"):
            seconds = run.train["pairs"] / run.train["steps"] / speed - all_reduce_seconds(shape.parameters, plan.world.nodes)
            work = config.train.accumulation * ranks * batch_flops(shape, config, ranks)
            source = f"measured: run {plan.run}, {speed:,.0f} pairs/s on {plan.world.nodes} nodes"
            if seconds > 0:
                rates = replace(rates, train=work / seconds / (ranks * CORE_FLOPS), train_source=source)
        family = config.compile.infer_target
        if (speed := run.embed.get("documents_per_second")) and run.embed_rows and family in rates.embed:
            cores = plan.embed.children * (config.embed.ranks_per_child or plan.world.ranks_per_node)
            source = f"measured: run {plan.run}, {speed:,.0f} documents/s on {cores} cores"
            rates = replace(
                rates,
                embed={**rates.embed, family: speed * run.embed_rows * shape.flops(config.embed.length) / (cores * CORE_FLOPS)},
                embed_source={**rates.embed_source, family: source},
                with_input=frozenset({family}),
            )
        checkpoints = run.train.get("checkpoints")
        return replace(rates, stall=run.train["checkpoint_stall_seconds"] / checkpoints if checkpoints else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A stage on a number of hosts.

    Attributes:
        stage: train or embed.
        host: instance type.
        count: nodes of the gang, or children of the array.
        hours: from the stage's first row to its last.
        limit_hours: limit of a Batch attempt.
        usd: for all hosts; None: the price is unknown.
        items: parts of the hours.
    """

    stage: Stage
    host: str
    count: int
    hours: float
    limit_hours: float
    usd: float | None
    items: Mapping[str, float]

    @property
    def within_limit(self) -> bool:
        """Whether one attempt of the stage is long enough."""
        return self.hours <= self.limit_hours

    @property
    def node_hours(self) -> float:
        return self.hours * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Hours and costs of one model's workloads.

    Attributes:
        prices: USD for an hour of an instance type, where known.
        minutes: stage -> limit of a Batch attempt.
    """

    shape: ModelShape
    config: RunConfig
    rates: Rates
    prices: Mapping[str, float]
    minutes: Mapping[Stage, int]

    def train(self, work: Workload, nodes: int) -> Option:
        """Return training on this many trn1.32xlarge."""
        settings, ranks = self.config.train, HARDWARE[TRAIN_HOST].ranks * nodes
        batches = settings.accumulation * ranks
        steps = settings.steps or math.ceil(settings.epochs * work.train_rows / (batches * batch_pairs(self.config, work)))
        flops = steps * batches * batch_flops(self.shape, self.config, ranks)
        return self._option(
            Stage.TRAIN,
            TRAIN_HOST,
            nodes,
            seconds={
                "computing": flops / (ranks * CORE_FLOPS * self.rates.train),
                "all-reduce of gradients": steps * all_reduce_seconds(self.shape.parameters, nodes),
                "checkpoints": math.ceil(steps / settings.checkpoint_every) * (self.rates.stall or 0.0),
            },
        )

    def embed(self, work: Workload, host: str, children: int) -> Option:
        """Return embedding on this many hosts. Ranks get whole parts, so the rank with the most of them decides."""
        cores = HARDWARE[host].ranks
        parts = part_count(work.corpus_rows, self.config.embed.rows_per_part, children * cores)
        children = min(children, parts)
        rows = math.ceil(parts / (children * cores)) * work.corpus_rows / parts
        family = host.partition(".")[0]
        computing = work.embed_rows * self.shape.flops(self.config.embed.length) / (CORE_FLOPS * self.rates.embed[family])
        waiting = 0.0 if family in self.rates.with_input else max(0.0, 1 / READ_ROWS - computing)
        seconds = {"computing": rows * computing, "waiting for tokens": rows * waiting}
        return self._option(Stage.EMBED, host, children, seconds)

    def _option(self, stage: Stage, host: str, count: int, seconds: Mapping[str, float]) -> Option:
        items = {name: value / 3600 for name, value in seconds.items()}
        hours, price = sum(items.values()), self.prices.get(host)
        return Option(
            stage=stage,
            host=host,
            count=count,
            hours=hours,
            limit_hours=self.minutes[stage] / 60,
            usd=None if price is None else hours * count * price,
            items=items,
        )


def cheapest(trains: Iterable[Option], embeds: Iterable[Option], deadline_hours: float | None) -> tuple[Option, Option] | None:
    """Return the training and embedding that cost least and meet the deadline and their attempts' limits; of equal ones the
    fastest. None: none does, or no price is known.

    Args:
        deadline_hours: for both, one after the other; None: no deadline.
    """
    choices = [
        (round(train.usd + embed.usd, 2), train.hours + embed.hours, number, train, embed)
        for number, (train, embed) in enumerate(product(trains, embeds))
        if train.usd is not None and embed.usd is not None and train.within_limit and embed.within_limit
    ]
    kept = [choice for choice in choices if deadline_hours is None or choice[1] <= deadline_hours]
    return min(kept)[3:] if kept else None
