"""The answer of `trnpipe plan --train-rows ...`: how many nodes, how long, how many dollars, what would break first, and what was
taken for granted on the way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.config import Deployment, RunConfig, RunInput
from pipeline.contract import STAGES, RunPaths, Stage, StageResult
from pipeline.errors import BadConfig, BadData
from pipeline.model.memory import ModelShape, known_limits
from pipeline.plan import RunPlan, World
from pipeline.prices import CURRENCY, INSTANCE_HOUR, REGIONS
from pipeline.runtime import store
from pipeline.scale.limits import Counts, Need, Room, needs, over, refuse
from pipeline.scale.measured import PADDING, READ_ROWS, SOURCE, TOKENIZED_TOKENS
from pipeline.scale.published import CORE_FLOPS, FP32_SHARE, HOSTS, INFERENCE, SIXTEEN_NODES, TRAIN_HOST, Host
from pipeline.scale.work import (
    CHILD_COUNTS,
    NODE_COUNTS,
    Estimator,
    Offer,
    Operations,
    Rates,
    Workload,
    bucket_of,
    cheapest,
    packed,
    part_count,
    passes,
    published_efficiency,
    reduce_seconds,
    times_read,
)

QUERY_TOKENS, DOCUMENT_TOKENS = 12.0, 96.0
"""Taken for the mean lengths where nobody says them."""

SHARD_ROWS = 1_000_000
"""Taken for the rows of an input file, likewise."""

URI_BYTES = 120
"""Taken for the length of a shard's URI."""

DURATION = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[mhd])")
HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0}


def parse_hours(text: str) -> float:
    """Hours of `90m`, `12h` or `2d`.

    Raises:
        BadConfig: it is none of these, or no time at all.
    """
    found = DURATION.fullmatch(text.strip())
    hours = float(found["number"]) * HOURS[found["unit"]] if found else 0.0
    if not 0 < hours < math.inf:
        raise BadConfig("the deadline cannot be read", value=text, rule="a number of minutes, hours or days: 90m, 12h, 2d")
    return hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked; None: taken from the run, or assumed.

    Attributes:
        train_rows, corpus_rows: pairs to train on, documents to embed.
        query_tokens, document_tokens: means.
        shard_rows: rows of an input file.
        deadline_hours: for training and embedding together.
    """

    train_rows: int | None = None
    corpus_rows: int | None = None
    query_tokens: float | None = None
    document_tokens: float | None = None
    shard_rows: int | None = None
    deadline_hours: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run left behind that speeds and lengths can be read from.

    Attributes:
        plan: its plan.
        deployment: what the state machine added; None: its input is gone.
        train, embed: metrics of the results; empty where there is none.
        wait: mean share of training's time without data, None where no metrics are left.
    """

    plan: RunPlan
    deployment: Deployment | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    embed: Mapping[str, Any] = field(default_factory=dict)
    wait: float | None = None

    @classmethod
    def of(cls, paths: RunPaths, plan: RunPlan) -> Measured:
        """Read what is there.

        Raises:
            BadData: a result or the input cannot be read.
        """
        deployment = None
        if store.exists(paths.input):
            try:
                deployment = RunInput.model_validate_json(store.read_bytes(paths.input)).deployment
            except ValidationError as error:
                raise BadData("the run's input cannot be read", value=paths.input, remedy="restore it") from error
        return cls(
            plan=plan,
            deployment=deployment,
            train=_metrics(paths, Stage.TRAIN),
            embed=_metrics(paths, Stage.EMBED),
            wait=_mean_wait(paths),
        )

    @property
    def on_neuron(self) -> bool:
        return self.plan.world.kind == "neuron"


def _metrics(paths: RunPaths, stage: Stage) -> dict[str, Any]:
    uri = paths.result(stage)
    return StageResult.from_json(store.read_bytes(uri)).metrics if store.exists(uri) else {}


def _mean_wait(paths: RunPaths) -> float | None:
    if not store.exists(paths.metrics):
        return None
    lines = [json.loads(line) for line in store.read_bytes(paths.metrics).splitlines()]
    shares = [line["data_wait_share"] for line in lines if "data_wait_share" in line]
    return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The answer.

    Attributes:
        trains, embeds: every choice.
        best: training and embedding that cost least within the deadline.
        needs: everything that grows with the data, for the best choice, else for the configured one.
        assumptions: what was taken for granted, a sentence each.
        unit_costs: host -> USD for a million documents, and for a billion of their tokens; of training for pairs.
    """

    work: Workload
    deadline_hours: float | None
    trains: list[Offer]
    embeds: list[Offer]
    best: tuple[Offer, Offer] | None
    needs: list[Need]
    assumptions: list[str]
    unit_costs: dict[str, dict[str, float]]

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "workload": asdict(self.work),
            "deadline_hours": self.deadline_hours,
            "currency": CURRENCY,
            "train": [self._offer(offer) for offer in self.trains],
            "embed": [self._offer(offer) for offer in self.embeds],
            "unit_costs": self.unit_costs,
            "needs": [need.record() for need in self.needs],
            "findings": [need.what for need in over(self.needs)],
            "assumptions": self.assumptions,
        }

    def _offer(self, offer: Offer) -> dict[str, Any]:
        cheapest = self.best is not None and offer in self.best
        return {**asdict(offer), "stage": offer.stage.value, "within_limit": offer.within_limit, "cheapest": cheapest}

    def require(self) -> None:
        """Refuse what prepare would refuse at this size.

        Raises:
            BadConfig: with everything that is too much and what helps.
        """
        refuse(self.needs)

    def shown(self) -> RenderableType:
        """For people."""
        title = f"{self.work.train_rows:,} pairs to train on, {self.work.corpus_rows:,} documents to embed"
        return Group(
            Text(title, style="italic"),
            self._offers(),
            self._units(),
            *self._verdict(),
            self._needs(),
            *self._findings(),
            *self._assumed(),
        )

    def _offers(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("stage")
        table.add_column("hosts", no_wrap=True)
        for name in ("hours", CURRENCY):
            table.add_column(name, no_wrap=True, justify="right")
        table.add_column("")
        for offers in (self.trains, self.embeds):
            for offer in offers:
                chosen = self.best is not None and offer in self.best
                remark = "cheapest" if chosen else "" if offer.within_limit else f"over {_limit(offer.stage)}"
                table.add_row(
                    offer.stage.value,
                    f"{offer.count:,} x {offer.host}",
                    _hours(offer.hours),
                    "?" if offer.usd is None else f"{offer.usd:,.2f}",
                    remark,
                    style="bold" if chosen else "" if offer.within_limit else "dim",
                )
            table.add_section()
        return table

    def _units(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(f"{CURRENCY} for")
        for name in ("a million", "a billion tokens"):
            table.add_column(name, no_wrap=True, justify="right")
        for name, costs in self.unit_costs.items():
            table.add_row(name, f"{costs['million_rows']:,.3f}", f"{costs['billion_tokens']:,.3f}")
        return table

    def _verdict(self) -> list[Text]:
        within = "" if self.deadline_hours is None else f" within {self.deadline_hours:g} h"
        if self.best is None:
            return [Text(f"None of these keeps the deadline{within} and the stages' own limits.", style="bold red")]
        train, embed = self.best
        usd = (train.usd or 0.0) + (embed.usd or 0.0)
        hosts = f"{train.count} x {train.host}, then {embed.count} x {embed.host}"
        words = f"Cheapest{within}: {hosts}: {_hours(train.hours + embed.hours)} h, {usd:,.2f} {CURRENCY}."
        return [Text(words, style="bold")]

    def _needs(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("grows with the data")
        for name in ("needs", "of"):
            table.add_column(name, no_wrap=True, justify="right")
        for need in self.needs:
            style = "" if not need.over else "bold red" if need.breaks else "yellow"
            table.add_row(need.what, need.shown(need.amount), need.shown(need.limit), style=style)
        return table

    def _findings(self) -> list[Text]:
        found = over(self.needs)
        if not found:
            return [Text("Nothing that is known of breaks at this size.")]
        return [
            Text(
                f"{'Breaks' if need.breaks else 'Slow'}: {need.what}: {need.shown(need.amount)} of {need.shown(need.limit)}."
                f" Remedy: {need.remedy}."
            )
            for need in found
        ]

    def _assumed(self) -> list[Text]:
        return [Text("Assumed:"), *(Text(f"- {line}") for line in self.assumptions)]


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.3f}"


def _limit(stage: Stage) -> str:
    return f"the {STAGES[stage].timeout_minutes // 60} h of an attempt"


def answer(question: Question, shape: ModelShape, config: RunConfig, measured: Measured | None) -> Scale:
    """Times, costs and limits of a workload on Trainium and Inferentia2, whatever this machine is.

    Raises:
        BadConfig: no rows are named, and there is no run to take them from.
    """
    said: list[str] = []
    work = _workload(question, config, measured, said)
    rates = _rates(shape, measured, said)
    estimator = Estimator(
        operations=Operations.of_shape(shape),
        parameters=shape.parameters,
        config=config,
        rates=rates,
        prices=_prices(measured, said),
    )
    deployed = measured.deployment.allowed_nodes if measured and measured.deployment else None
    nodes = sorted(set(deployed or (*NODE_COUNTS, config.nodes)))
    children = sorted({*CHILD_COUNTS, config.embed.children})
    trains = [estimator.train(work, count) for count in nodes]
    offers = [estimator.embed(work, host, count) for host in HOSTS for count in children]
    # More children than parts are as many as there are parts.
    embeds = list({(offer.host, offer.count): offer for offer in offers}.values())
    best = cheapest(trains, embeds, question.deadline_hours)
    chosen_nodes = best[0].count if best else config.nodes
    _say_general(config, rates, nodes, said)
    world = World(kind="neuron", precision="compiler", nodes=chosen_nodes, ranks_per_node=HOSTS[TRAIN_HOST].cores)
    host, count = (best[1].host, best[1].count) if best else (TRAIN_HOST, config.embed.children)
    room = Room.deployed(known_limits(config, "neuron", here=False), host)
    return Scale(
        work=work,
        deadline_hours=question.deadline_hours,
        trains=trains,
        embeds=embeds,
        best=best,
        needs=needs(_counts(work, config, shape, HOSTS[host], count), shape, config, world, room),
        assumptions=said,
        unit_costs=_unit_costs(estimator, work),
    )


def _workload(question: Question, config: RunConfig, measured: Measured | None, said: list[str]) -> Workload:
    plan = measured.plan if measured else None
    train_rows = question.train_rows or (plan.train.rows if plan else 0) or question.corpus_rows or 0
    corpus_rows = question.corpus_rows or (plan.embed.rows if plan and question.train_rows is None else 0) or train_rows
    if not train_rows or not corpus_rows:
        raise BadConfig(
            "it is not known how much there is to do",
            value=f"--train-rows {question.train_rows}, --corpus-rows {question.corpus_rows}",
            rule="a workload has rows",
            remedy="say --train-rows, --corpus-rows or both",
        )
    if question.train_rows is None and not plan:
        said.append(f"as many pairs are trained on as documents are embedded: {train_rows:,}; say --train-rows")
    if question.corpus_rows is None and corpus_rows == train_rows:
        said.append(f"the corpus is the documents of the training rows, all different: {corpus_rows:,}; or say --corpus-rows")
    embed = measured.embed if measured else {}
    seen = embed["tokens"] / embed["documents"] if embed.get("tokens") and embed.get("documents") else None
    query, document = question.query_tokens or QUERY_TOKENS, question.document_tokens or seen or DOCUMENT_TOKENS
    if question.query_tokens is None:
        said.append(f"a query has {query:g} tokens on average (it is computed at train.query_length anyway)")
    if question.document_tokens is None:
        source = ", as in the run" if seen else "; say --document-tokens"
        said.append(f"a document has {document:.4g} tokens on average{source}")
    longest = max(config.embed.buckets)
    if document > longest:
        said.append(f"embed cuts every document at {longest} tokens: the mean is taken for as many")
    shard_rows = question.shard_rows or (_shard_rows(plan) if plan else 0) or SHARD_ROWS
    if question.shard_rows is None:
        said.append(f"an input file has {shard_rows:,} rows" + (", as in the run" if shard_rows != SHARD_ROWS else ""))
    train_bucket = bucket_of(document, config.train.buckets)
    train_lengths: dict[int, float] = {train_bucket: 1.0}
    # A run's spread over the lengths holds for documents like its own, not for others that somebody names.
    if plan and question.document_tokens is None and plan.train.bucket_rows and config.train.buckets == plan.config.train.buckets:
        total = sum(plan.train.bucket_rows.values())
        train_lengths = {int(bucket): rows / total for bucket, rows in plan.train.bucket_rows.items()}
    else:
        said.append(f"train computes every document at {train_bucket} tokens, the length of train.buckets that holds the mean")
    if seen and question.document_tokens is None and plan and config.embed.buckets == plan.config.embed.buckets:
        embed_lengths = packed(seen, config.embed.buckets, embed.get("padding", 0.0))
    else:
        embed_lengths = packed(document, config.embed.buckets, PADDING)
        said.append(f"embed packs documents into rows of {next(iter(embed_lengths))} tokens, of which {PADDING:.0%} are padding")
    return Workload(
        train_rows=train_rows,
        corpus_rows=corpus_rows,
        query_tokens=query,
        document_tokens=min(document, longest),
        shard_rows=shard_rows,
        train_lengths=train_lengths,
        embed_lengths=embed_lengths,
    )


def _shard_rows(plan: RunPlan) -> int:
    shards = plan.embed.shards or plan.train.new
    return max((shard.rows for shard in shards), default=0)


# ---- rates -----------------------------------------------------------------------------------------------------------


def _rates(shape: ModelShape, measured: Measured | None, said: list[str]) -> Rates:
    """Published ones, or a run's own where it ran on Neuron."""
    rates = Rates.published(shape.hidden)
    if measured is None or not measured.on_neuron:
        if measured is not None:
            said.append(f"the run was on {measured.plan.world.kind}: its speed says nothing of neuron's, so it is not used")
    else:
        rates = _measured_rates(rates, shape, measured)
    said.append(f"training: {rates.train:.1%} of {TRAIN_HOST}'s peak ({rates.train_source})")
    for family in INFERENCE:
        said.append(f"embedding on {family}: {rates.embed[family]:.1%} of the peak ({rates.embed_source[family]})")
    said.append("the chips of a host do not slow each other when embedding; published are hosts of one chip, products in bf16")
    if min(INFERENCE["trn1"]) > shape.hidden and "measured" not in rates.train_source:
        said.append(
            f"nothing is published of a model as narrow as {shape.hidden}: the share of {min(INFERENCE['trn1'])} is taken, and "
            "is likely too high"
        )
    return rates


def _measured_rates(rates: Rates, shape: ModelShape, measured: Measured) -> Rates:
    plan, operations = measured.plan, Operations.of_shape(shape)
    train, train_source, nodes = rates.train, rates.train_source, rates.train_nodes
    if measured.train.get("pairs_per_second"):
        settings, world = plan.config.train, plan.world
        total = sum(plan.train.bucket_rows.values())
        lengths = {int(bucket): rows / total for bucket, rows in plan.train.bucket_rows.items()}
        pair = operations.pair(settings.query_length, lengths, settings.batch_size * world.ranks)
        per_step = settings.batch_size * settings.accumulation * world.ranks
        seconds = per_step / measured.train["pairs_per_second"] - reduce_seconds(shape.parameters, HOSTS[TRAIN_HOST], world.nodes)
        if seconds > 0:
            work = per_step * pair * passes(checkpointing=settings.activation_checkpointing)
            train, nodes = work / seconds / (world.ranks * CORE_FLOPS), world.nodes
            train_source = f"measured: run {plan.run}, {measured.train['pairs_per_second']:,.0f} pairs/s on {nodes} nodes"
    embed, embed_source, with_input = dict(rates.embed), dict(rates.embed_source), set(rates.with_input)
    found = measured.embed
    if found.get("documents_per_second") and found.get("tokens"):
        family = plan.config.compile.infer_target
        rows = packed(found["tokens"] / found["documents"], plan.config.embed.buckets, found.get("padding", 0.0))
        ranks = plan.embed.children * (plan.config.embed.ranks_per_child or plan.world.ranks_per_node)
        if family in embed:
            rate = found["documents_per_second"]
            embed[family] = rate * operations.texts(rows) / (ranks * CORE_FLOPS)
            embed_source[family] = f"measured: run {plan.run}, {rate:,.0f} documents/s on {ranks} cores"
            with_input.add(family)
    checkpoints = measured.train.get("checkpoints")
    return Rates(
        train=train,
        train_source=train_source,
        train_nodes=nodes,
        embed=embed,
        embed_source=embed_source,
        with_input=frozenset(with_input),
        stall=measured.train["checkpoint_stall_seconds"] / checkpoints if checkpoints else None,
        wait=measured.wait,
    )


def _prices(measured: Measured | None, said: list[str]) -> dict[str, float]:
    """By instance type; the run's own deployment knows better what its hosts cost."""
    prices = dict(INSTANCE_HOUR)
    said.append(f"prices on demand in {', '.join(REGIONS)} (pipeline/prices.py)")
    if measured and measured.deployment:
        for queue, usd in measured.deployment.prices.by_queue().items():
            host = measured.deployment.hosts.get(queue)
            if host in HOSTS:
                prices[str(host)] = usd
                said.append(f"{host}: {usd:g} {CURRENCY} an hour, as the run's deployment says")
    return prices


def _say_general(config: RunConfig, rates: Rates, nodes: Sequence[int], said: list[str]) -> None:
    said.append(
        f"nodes: beside the all-reduce at the documented bandwidths, each node does {published_efficiency():.1%} of its work at "
        f"{SIXTEEN_NODES.nodes} nodes (published: 57,408 sequences/s), and as much less with every doubling"
    )
    if max(nodes) > SIXTEEN_NODES.nodes:
        said.append(f"more than {SIXTEEN_NODES.nodes} nodes: nothing is published, the same loss is taken for every doubling")
    if rates.stall is None:
        said.append("training does not stand still for checkpoints: what they cost is not known without a run on neuron")
    else:
        said.append(f"a checkpoint stops training for {rates.stall:.2f} s, as in the run")
    if rates.wait is None:
        said.append("training never waits for data: its rows are tokenized by prepare")
    else:
        said.append(f"training waits for data {rates.wait:.1%} of the time, as in the run; its speed has that in it")
    if rates.with_input < set(INFERENCE):
        said.append(
            f"embedding reads {READ_ROWS:,} rows a second and rank, and tokenizes {TOKENIZED_TOKENS:,} tokens a second and vCPU "
            f"({SOURCE})"
        )
    said.append(
        "hours are those of train and embed alone, from the first row to the last: not counted are hosts starting, the other "
        "stages, validations, and attempts that are tried again"
    )
    said.append(f"{config.data.holdout_fraction:.2%} of the pairs are held out, each with a query and a document of its own")
    if config.device.precision == "fp32":
        said.append(f"all figures are for bf16: fp32 is slower (published training: {FP32_SHARE:.0%} of the speed)")


# ---- counts ----------------------------------------------------------------------------------------------------------


def _counts(work: Workload, config: RunConfig, shape: ModelShape, host: Host, children: int) -> Counts:
    parts = part_count(work.corpus_rows, config.embed.rows_per_part, children * host.cores)
    held = round(work.train_rows * config.data.holdout_fraction)
    own_corpus = bool(config.data.corpus) or work.corpus_rows != work.train_rows
    return Counts(
        train_rows=work.train_rows,
        trained_rows=work.train_rows,
        holdout=held,
        queries=held,
        candidates=held,
        train_shards=math.ceil(work.train_rows / work.shard_rows),
        corpus_shards=math.ceil(work.corpus_rows / work.shard_rows) if own_corpus else 0,
        largest_shard=min(work.shard_rows, work.train_rows),
        corpus_rows=work.corpus_rows,
        parts=parts,
        children=min(children, parts),
        rows_read=round(
            work.corpus_rows * times_read(work.corpus_rows, work.shard_rows, parts, min(children, parts) * host.cores)
        ),
        uri_bytes=URI_BYTES,
        query_tokens=work.query_tokens,
        document_tokens=work.document_tokens,
        dimension=shape.hidden,
    )


def _unit_costs(estimator: Estimator, work: Workload) -> dict[str, dict[str, float]]:
    """USD by the million rows and the billion tokens, padding not counted; of embedding as if no rank waited for another."""
    costs: dict[str, dict[str, float]] = {}
    train = estimator.train(work, 1)
    rows = work.train_rows if estimator.config.train.steps is None else 0
    if train.usd is not None and rows:
        per_row = train.usd / rows / estimator.config.train.epochs
        costs[f"pairs trained on, {TRAIN_HOST}"] = _by(per_row, work.query_tokens + work.document_tokens)
    for name, host in HOSTS.items():
        price = estimator.prices.get(name)
        if price is not None:
            parts = part_count(work.corpus_rows, estimator.config.embed.rows_per_part, host.cores)
            per_row = sum(estimator.document_seconds(work, host, parts, host.cores)) / host.cores / 3600 * price
            costs[f"documents embedded, {name}"] = _by(per_row, work.document_tokens)
    return costs


def _by(per_row: float, tokens: float) -> dict[str, float]:
    return {"million_rows": per_row * 1e6, "billion_tokens": per_row / tokens * 1e9}
