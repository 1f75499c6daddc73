"""How long a workload takes on how many hosts, and what it costs: operations counted from the model's shape, over what was
published or measured of the hosts.

Counted exactly: products of the projections, the inner layers, attention and the head, and the scores of the contrastive loss; a
lookup of an embedding is none. Training is three times the forward pass, four times with activation checkpointing. What a host
makes of its documented peak is a share, calibrated by published figures (pipeline/scale/published) or by a measured run; beside
it stands the ring all-reduce of the gradients at documented bandwidths, which nothing hides. Embedding also reads and tokenizes,
in the background: what of that takes longer than computing is waited for (pipeline/scale/measured).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.config import RunConfig
from pipeline.contract import STAGES, Stage
from pipeline.model.memory import FP32, ModelShape
from pipeline.plan import own_parts
from pipeline.scale.measured import READ_ROWS, TOKENIZED_TOKENS
from pipeline.scale.published import (
    BERT_LARGE,
    CORE_FLOPS,
    HOSTS,
    INFERENCE,
    INFERENCE_LENGTH,
    NEURONLINK_BYTES,
    ONE_NODE,
    SIXTEEN_NODES,
    TRAIN_HOST,
    TRAINING_LENGTH,
    Host,
    PublishedModel,
)

MULTIPLY_ADD = 2
"""Floating-point operations of one."""

BACKWARD = 2
"""Times the forward pass: the gradients of inputs and of weights."""

LAYER_PRODUCTS = 4
"""Matrices of hidden x hidden in a layer: query, key, value, output."""

NODE_COUNTS = (1, 2, 4, 8, 16)
CHILD_COUNTS = (1, 4, 16, 64)

Lengths = Mapping[int, float]
"""Static length in tokens -> rows of it that are computed for the mean text; where texts are packed, less than one."""


# ---- operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Floating-point operations of an encoder's forward pass.

    Attributes:
        multiplied: elements of the matrices that every token is multiplied with.
        layers, hidden: of the backbone.
        head: width of the residual head behind pooling, 0 without.
    """

    multiplied: int
    layers: int
    hidden: int
    head: int = 0

    @classmethod
    def of_shape(cls, shape: ModelShape) -> Operations:
        return cls(multiplied=shape.multiplied, layers=shape.layers, hidden=shape.hidden, head=shape.head)

    @classmethod
    def of_published(cls, model: PublishedModel, *, pretraining: bool) -> Operations:
        """Of a published BERT.

        Args:
            pretraining: with the masked-language head, at all positions as transformers' BertForPreTraining computes it.
        """
        layer = LAYER_PRODUCTS * model.hidden**2 + 2 * model.hidden * model.intermediate
        head = model.hidden**2 + model.hidden * model.vocabulary if pretraining else 0
        return cls(multiplied=model.layers * layer + head, layers=model.layers, hidden=model.hidden)

    def text(self, length: int) -> float:
        """Of one text of `length` tokens, padding included: every token meets every matrix, and in attention every other token
        twice, as a score and as a value."""
        attention = 2 * length * self.hidden * self.layers
        return MULTIPLY_ADD * (length * (self.multiplied + attention) + 2 * self.hidden * self.head)

    def texts(self, lengths: Lengths) -> float:
        """Of the mean text."""
        return sum(rows * self.text(length) for length, rows in lengths.items())

    def pair(self, query_length: int, documents: Lengths, global_batch: int) -> float:
        """Of the mean training pair: both texts, and the query's scores with the documents of the global batch."""
        return self.text(query_length) + self.texts(documents) + MULTIPLY_ADD * global_batch * self.hidden


def passes(*, checkpointing: bool) -> int:
    """Forward passes that a training step is worth."""
    return 1 + BACKWARD + checkpointing


def bucket_of(tokens: float, buckets: Sequence[int]) -> int:
    """The static length of the rows in which a text is computed; longer ones are cut."""
    return next((bucket for bucket in buckets if tokens <= bucket), buckets[-1])


def packed(tokens: float, buckets: Sequence[int], padding: float) -> dict[int, float]:
    """Rows that the mean text takes where texts are packed: of the shortest length that holds it.

    Args:
        padding: share of the rows.
    """
    length = bucket_of(tokens, buckets)
    return {length: min(tokens, length) / (1 - padding) / length}


# ---- what a host makes of its peak -----------------------------------------------------------------------------------


def ring(size: float, members: int, bandwidth: float) -> float:
    """Seconds of an all-reduce in a ring: every member sends and gets 2 (n - 1) / n of the bytes."""
    return 2 * (members - 1) / members * size / bandwidth if members > 1 else 0.0


def reduce_seconds(parameters: int, host: Host, nodes: int) -> float:
    """Of one step's fp32 gradients, over a node's cores and then over the nodes."""
    size = FP32 * parameters
    return ring(size, host.cores, NEURONLINK_BYTES) + (ring(size, nodes, host.network) if nodes > 1 else 0.0)


def published_train_share() -> float:
    """Of its peak, what one trn1.32xlarge makes of BERT-Large's training, all-reduce aside."""
    host = HOSTS[TRAIN_HOST]
    work = ONE_NODE.per_step * _published_step()
    seconds = ONE_NODE.per_step / ONE_NODE.per_second - reduce_seconds(BERT_LARGE.parameters, host, 1)
    return work / seconds / host.flops


def published_efficiency() -> float:
    """Of each node's speed, what is left at 16 nodes beside the all-reduce that is modelled."""
    host, nodes = HOSTS[TRAIN_HOST], SIXTEEN_NODES.nodes
    alone = SIXTEEN_NODES.per_step * _published_step() / (nodes * host.flops * published_train_share())
    seconds = SIXTEEN_NODES.per_step / SIXTEEN_NODES.per_second - reduce_seconds(BERT_LARGE.parameters, host, nodes)
    return alone / seconds


def _published_step() -> float:
    return passes(checkpointing=False) * Operations.of_published(BERT_LARGE, pretraining=True).text(TRAINING_LENGTH)


def published_inference_share(family: str, hidden: int) -> float:
    """Of its peak, what a chip makes of inference: between the two published widths in proportion, beyond them as at the next."""
    points = {
        width: rate * Operations.of_published(model, pretraining=False).text(INFERENCE_LENGTH)
        for width, (model, rate) in INFERENCE[family].items()
    }
    (narrow, low), (wide, high) = sorted(points.items())
    between = min(max((hidden - narrow) / (wide - narrow), 0.0), 1.0)
    return (low + between * (high - low)) / (HOSTS["inf2.xlarge"].flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What hosts make of their peak.

    Attributes:
        train: share of trn1.32xlarge's peak in training.
        train_source: where that is from.
        train_nodes: nodes it was seen on, from which it is scaled.
        embed: family -> share in embedding.
        embed_source: family -> where that is from.
        with_input: families whose share was measured with reading and tokenizing in it.
        stall: seconds that training stands still for a checkpoint; None: not known, and not counted.
        wait: share of training's time in which data was waited for; None: not known. It is within `train`.
    """

    train: float
    train_source: str
    train_nodes: int
    embed: Mapping[str, float]
    embed_source: Mapping[str, str]
    with_input: frozenset[str] = frozenset()
    stall: float | None = None
    wait: float | None = None

    @classmethod
    def published(cls, hidden: int) -> Rates:
        """Training's share follows the width as inference's does: only one width was published."""
        narrower = published_inference_share("trn1", hidden) / published_inference_share("trn1", BERT_LARGE.hidden)
        return cls(
            train=published_train_share() * narrower,
            train_source="published: BERT-Large phase 1, 128 tokens, 3,827 sequences/s on one trn1.32xlarge (Neuron SDK 2.28, "
            "training_data_encoder.csv), less where the model is narrower, as published for inference",
            train_nodes=1,
            embed={family: published_inference_share(family, hidden) for family in INFERENCE},
            embed_source={
                family: f"published: bert-base and bert-large, 128 tokens, on one {family} chip (Neuron SDK, "
                f"{family}/throughput_data_encoder.csv)"
                for family in INFERENCE
            },
        )

    def efficiency(self, nodes: int) -> float:
        """Of the speed on `train_nodes`, what is left on `nodes`: as much with every doubling as published up to 16 nodes."""
        return float(published_efficiency() ** (math.log2(nodes / self.train_nodes) / math.log2(SIXTEEN_NODES.nodes)))


# ---- a workload ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be done.

    Attributes:
        train_rows: pairs trained on in an epoch.
        corpus_rows: documents embedded.
        query_tokens, document_tokens: means, special tokens included, without padding.
        shard_rows: rows of an input file.
        train_lengths, embed_lengths: of the rows that documents are computed in.
    """

    train_rows: int
    corpus_rows: int
    query_tokens: float
    document_tokens: float
    shard_rows: int
    train_lengths: Lengths
    embed_lengths: Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A stage on some hosts.

    Attributes:
        stage: train or embed.
        host: instance type.
        count: nodes of the gang, or children of the array.
        hours: of the stage alone, from its first row to its last.
        usd: for all hosts; None: no price is known.
        items: what the hours are made of.
    """

    stage: Stage
    host: str
    count: int
    hours: float
    usd: float | None
    items: Mapping[str, float] = field(default_factory=dict)

    @property
    def within_limit(self) -> bool:
        """Whether one attempt of the stage may take as long."""
        return self.hours * 60 <= STAGES[self.stage].timeout_minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Times and costs of a model's workloads.

    Attributes:
        operations, parameters: of the model.
        prices: USD for an hour of an instance type, where known.
    """

    operations: Operations
    parameters: int
    config: RunConfig
    rates: Rates
    prices: Mapping[str, float]

    def train(self, work: Workload, nodes: int) -> Offer:
        """Training on so many trn1.32xlarge."""
        host, settings = HOSTS[TRAIN_HOST], self.config.train
        per_step = settings.batch_size * settings.accumulation * host.cores * nodes
        steps = settings.steps or settings.epochs * math.ceil(work.train_rows / per_step)
        flops = passes(checkpointing=settings.activation_checkpointing) * self.operations.pair(
            settings.query_length, work.train_lengths, settings.batch_size * host.cores * nodes
        )
        speed = nodes * host.flops * self.rates.train * self.rates.efficiency(nodes)
        checkpoints = math.ceil(steps / settings.checkpoint_every)
        seconds = {
            "computing": steps * per_step * flops / speed,
            "all-reduce of gradients": steps * reduce_seconds(self.parameters, host, nodes),
            "standing still for checkpoints": checkpoints * (self.rates.stall or 0.0),
        }
        return self._offer(Stage.TRAIN, TRAIN_HOST, nodes, seconds)

    def embed(self, work: Workload, host_type: str, children: int) -> Offer:
        """Embedding on so many hosts. Parts are dealt out whole, so the rank with most of them decides."""
        host, settings = HOSTS[host_type], self.config.embed
        parts = part_count(work.corpus_rows, settings.rows_per_part, children * host.cores)
        children = min(children, parts)
        most = math.ceil(parts / (children * host.cores))
        rows = most * work.corpus_rows / parts
        computing, waiting = self.document_seconds(work, host, parts, children * host.cores)
        return self._offer(
            Stage.EMBED, host_type, children, {"computing": rows * computing, "waiting for rows and tokens": rows * waiting}
        )

    def document_seconds(self, work: Workload, host: Host, parts: int, ranks: int) -> tuple[float, float]:
        """What the mean document takes a rank: to compute, and to wait for until it is read and tokenized."""
        computing = self.operations.texts(work.embed_lengths) / (CORE_FLOPS * self.rates.embed[host.family])
        read = times_read(work.corpus_rows, work.shard_rows, parts, ranks) / READ_ROWS
        tokenized = work.document_tokens / (TOKENIZED_TOKENS * host.job_vcpus / host.cores)
        return computing, 0.0 if host.family in self.rates.with_input else max(0.0, read + tokenized - computing)

    def _offer(self, stage: Stage, host: str, count: int, seconds: Mapping[str, float]) -> Offer:
        hours = {name: value / 3600 for name, value in seconds.items()}
        total = sum(hours.values())
        price = self.prices.get(host)
        return Offer(
            stage=stage, host=host, count=count, hours=total, usd=None if price is None else total * count * price, items=hours
        )


def part_count(rows: int, rows_per_part: int, least: int) -> int:
    """Parts of a corpus, as prepare cuts it.

    Args:
        rows_per_part: at most this many in a part.
        least: at least this many parts, as long as each has a row.
    """
    return max(-(-rows // rows_per_part), min(least, rows))


def times_read(rows: int, shard_rows: int, parts: int, ranks: int) -> float:
    """How often the ranks together read a corpus of equal shards: each takes consecutive parts, and reads the shard that they
    begin in from its beginning."""
    firsts = (own_parts(parts, ranks, rank) for rank in range(ranks))
    return 1 + sum(own[0] * rows // parts % shard_rows for own in firsts if own) / rows


def cheapest(trains: Iterable[Offer], embeds: Iterable[Offer], deadline_hours: float | None) -> tuple[Offer, Offer] | None:
    """Training and embedding, one after the other, that cost least among those that keep the deadline and the stages' own limits;
    of equal ones the fastest. None: none keeps it, or no price is known.

    Args:
        deadline_hours: for both together; None: no deadline.
    """
    choices = [
        (train, embed)
        for train in trains
        for embed in embeds
        if (deadline_hours is None or train.hours + embed.hours <= deadline_hours)
        and train.within_limit
        and embed.within_limit
        and train.usd is not None
        and embed.usd is not None
    ]
    return min(choices, key=_usd_then_hours, default=None)


def _usd_then_hours(pair: tuple[Offer, Offer]) -> tuple[float, float]:
    return round(sum(offer.usd or 0.0 for offer in pair), 2), sum(offer.hours for offer in pair)
