"""`trnpipe plan`: the memory that a run requires, and the hosts, hours and dollars of a workload.

Starts nothing: it reads a parent's configuration, or a run's plan and measurements, but no weights and no rows. prepare refuses
plans by the same figures.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from pipeline import store
from pipeline.commands.terminal import left, right, simple_table
from pipeline.config import RunConfig, build_config
from pipeline.contract import HOST_KINDS, RunPaths, check_run_folder
from pipeline.cost import CURRENCY, HARDWARE, INSTANCE_HOUR, REGIONS
from pipeline.dataset.steps import step_bins
from pipeline.errors import BadConfig
from pipeline.estimate.memory import (
    TRAIN_HOST,
    Budget,
    MemoryCapacity,
    decide_sharding,
    estimate_memory,
    gib,
    known_capacity,
    remedies,
    require_memory,
)
from pipeline.estimate.requirements import Requirement, attempt_minutes, over, refuse, requirements
from pipeline.estimate.throughput import EMBED_HOSTS, EMBED_MFU, READ_ROWS, Estimator, Option, Rates, cheapest
from pipeline.estimate.variant import plan_world
from pipeline.estimate.workload import MeasuredRun, Workload, workload
from pipeline.model.shape import fetch_shape
from pipeline.plan import part_count
from pipeline.run_inputs import ModelShape, PlannedWorld

PLACES = {"device": "a rank's device", "host": "a node's host"}
CAPACITY_SETTINGS = {"device": "device.memory_gib", "host": "device.host_memory_gib"}

LEAST_SHARE = 0.005
"""Share of the whole below which the table leaves an item out (the JSON has it)."""

NODE_COUNTS, CHILD_COUNTS = (1, 2, 4, 8, 16), (1, 4, 16, 64)
"""Sizes of the gangs and arrays to compare; a run's deployment names the gangs that it has."""

NARROWEST = min(EMBED_MFU["trn1"])
"""The narrowest model whose rates are published."""

DURATION = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[mhd])")
HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0}


def parse_hours(text: str) -> float:
    """Return the hours of `90m`, `12h` or `2d`.

    Raises:
        BadConfig: another form, or no time at all.
    """
    found = DURATION.fullmatch(text.strip())
    hours = float(found["number"]) * HOURS[found["unit"]] if found else 0.0
    if not 0 < hours < math.inf:
        raise BadConfig("invalid deadline", value=text, rule="a number of minutes, hours or days: 90m, 12h, 2d")
    return hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Hours, costs and limits of a workload.

    Attributes:
        trains, embeds: all options.
        best: training and embedding that cost least within the deadline.
        requirements: of the best options, else of the configured ones.
        assumptions: a sentence each.
        unit_costs: kind of row -> USD for a million rows, and for a billion of their tokens.
    """

    work: Workload
    deadline_hours: float | None
    trains: list[Option]
    embeds: list[Option]
    best: tuple[Option, Option] | None
    requirements: list[Requirement]
    assumptions: list[str]
    unit_costs: dict[str, dict[str, float]]

    def record(self) -> dict[str, Any]:
        """Return the values for programs."""
        return {
            "workload": asdict(self.work),
            "deadline_hours": self.deadline_hours,
            "currency": CURRENCY,
            "train": [self._option(option) for option in self.trains],
            "embed": [self._option(option) for option in self.embeds],
            "unit_costs": self.unit_costs,
            "needs": [one.record() for one in self.requirements],
            "findings": [one.what for one in over(self.requirements)],
            "assumptions": self.assumptions,
        }

    def _option(self, option: Option) -> dict[str, Any]:
        return {
            **asdict(option),
            "stage": option.stage.value,
            "node_hours": option.node_hours,
            "within_limit": option.within_limit,
            "cheapest": option in (self.best or ()),
        }

    def shown(self) -> RenderableType:
        """Return the tables and sentences for people."""
        options = simple_table(Column("stage"), left("hosts"), right("hours"), right(CURRENCY), Column(""))
        for stage in (self.trains, self.embeds):
            for option in stage:
                chosen = option in (self.best or ())
                late = "" if option.within_limit else f"over the {option.limit_hours:g} h of an attempt"
                options.add_row(
                    option.stage.value,
                    f"{option.count:,} x {option.host}",
                    _hours(option.hours),
                    "?" if option.usd is None else f"{option.usd:,.2f}",
                    "cheapest" if chosen else late,
                    style="bold" if chosen else "" if option.within_limit else "dim",
                )
            options.add_section()
        units = simple_table(Column(f"{CURRENCY} for"), right("a million"), right("a billion tokens"))
        for name, costs in self.unit_costs.items():
            units.add_row(name, f"{costs['million_rows']:,.3f}", f"{costs['billion_tokens']:,.3f}")
        needs = simple_table(Column("grows with the data"), right("requires"), right("of"))
        for one in self.requirements:
            style = "" if not one.over else "bold red" if one.breaks else "yellow"
            needs.add_row(one.what, one.shown(one.amount), one.shown(one.limit), style=style)
        problems = [
            f"{'Breaks' if one.breaks else 'Slow'}: {one.what}: {one.shown(one.amount)} of {one.shown(one.limit)}."
            f" Remedy: {one.remedy}."
            for one in over(self.requirements)
        ]
        return Group(
            Text(f"{self.work.train_rows:,} pairs to train on, {self.work.corpus_rows:,} documents to embed", style="italic"),
            options,
            units,
            self._verdict(),
            needs,
            *map(Text, problems or ["Nothing that is known of breaks at this size."]),
            Text("Assumed:"),
            *(Text(f"- {assumption}") for assumption in self.assumptions),
        )

    def _verdict(self) -> Text:
        within = "" if self.deadline_hours is None else f" within {self.deadline_hours:g} h"
        if self.best is None:
            return Text(f"No option finishes{within} and within the limits of an attempt.", style="bold red")
        train, embed = self.best
        hosts = f"{train.count} x {train.host}, then {embed.count} x {embed.host}"
        cost = f"{_hours(train.hours + embed.hours)} h, {(train.usd or 0.0) + (embed.usd or 0.0):,.2f} {CURRENCY}"
        return Text(f"Cheapest{within}: {hosts}: {cost}.", style="bold")


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A configuration and the memory that it requires.

    Attributes:
        budgets: of training and embedding, on a rank's device and a node's host.
        estimate: hours and costs, where a workload was named.
    """

    shape: ModelShape
    config: RunConfig
    world: PlannedWorld
    capacity: MemoryCapacity
    budgets: list[Budget]
    estimate: Estimate | None = None

    @property
    def global_batch(self) -> int:
        """Pairs per optimizer step, at most."""
        return self.config.train.batch_size * self.config.train.accumulation * self.world.ranks

    @property
    def tokens_per_step(self) -> int:
        """Padded tokens."""
        return step_bins(self.config, self.world.ranks) * self.config.train.bin_shape.tokens

    def require(self) -> None:
        """Refuse a plan that cannot fit.

        Raises:
            BadConfig: names the largest items, or the data that is too much, and changes that help.
        """
        require_memory(self.shape, self.config, self.world, self.capacity)
        if self.estimate:
            refuse(self.estimate.requirements)

    def verdict(self) -> str:
        """Return a sentence on a plan that was not refused."""
        if unknown := sorted({budget.place for budget in self.shown if budget.limit is None}):
            settings = " and ".join(CAPACITY_SETTINGS[place] for place in unknown)
            return f"Not judged by the memory of the {' and the '.join(unknown)}, which is not known here; set {settings}."
        return "It fits."

    @property
    def shown(self) -> list[Budget]:
        """The budgets, without those of devices whose memory is the host's."""
        return [budget for budget in self.budgets if budget.place == "host" or self.world.kind not in HOST_KINDS]

    def record(self) -> dict[str, Any]:
        """Return the values for programs; sizes in bytes."""
        fits = all(budget.fits for budget in self.budgets)
        return {
            "model": asdict(self.shape),
            "world": self.world.model_dump(),
            "global_batch": self.global_batch,
            "tokens_per_step": self.tokens_per_step,
            "budgets": [budget.record() for budget in self.budgets],
            "fits": fits,
            "remedies": [] if fits else remedies(self.shape, self.config, self.world, self.capacity),
            **({"scale": self.estimate.record()} if self.estimate else {}),
        }

    def table(self) -> Table:
        """Return the table for people."""
        world = self.world
        title = (
            f"{self.shape.parameters / 1e6:.1f}M parameters on {world.kind} ({world.precision}), {world.nodes} x "
            f"{world.ranks_per_node} ranks\nat most {self.global_batch} pairs, {self.tokens_per_step} tokens per step"
        )
        table = simple_table(Column("memory"), right("size"), right("of"), title=title)
        for budget in self.shown:
            table.add_row(
                f"{budget.stage}, {PLACES[budget.place]}, {budget.moment}",
                gib(budget.total),
                f"{budget.total / budget.limit:.1%} of {gib(budget.limit)}" if budget.limit else "unknown",
                style="bold" if budget.fits else "bold red",
            )
            for name, size in sorted(budget.items.items(), key=lambda item: -item[1]):
                if size >= LEAST_SHARE * budget.total:
                    table.add_row(f"  {name}", gib(size), "")
            table.add_section()
        return table


# ---- from options and runs -------------------------------------------------------------------------------------------


def report(
    *,
    parent: str | None,
    run: str | None,
    layers: Sequence[Mapping[str, Any]],
    train_rows: int | None = None,
    corpus_rows: int | None = None,
    query_tokens: float | None = None,
    document_tokens: float | None = None,
    deadline_hours: float | None = None,
) -> PlanReport:
    """Return what a run requires.

    Args:
        parent: folder or URI of the model, of which only the configuration is read.
        run: URI of a run folder with a plan, instead; `layers` go over its configuration.
        layers: partial configurations, later ones over earlier ones.
        train_rows, corpus_rows, query_tokens, document_tokens: a workload, see `Workload`.
        deadline_hours: for training and embedding together. With it or a workload, hours and costs are estimated as well.

    Raises:
        BadConfig: neither or both of `parent` and `run`, invalid settings, or a workload without rows.
        MissingInput: no such model or run.
        BadData: a file of the run cannot be read.
    """
    if (parent is None) == (run is None):
        raise BadConfig(
            "the options do not say which model to plan for",
            value=f"--parent {parent}, --run {run}",
            rule="either --parent or --run",
            remedy="give --parent FOLDER_OR_URI, or --run s3://BUCKET/runs/RUN_ID",
        )
    measured = None
    if run is not None:
        measured = MeasuredRun.read(RunPaths(check_run_folder(run)))
        planned = measured.plan
        # prepare's host decided what `auto` means, not this one.
        device = {name: getattr(planned.world, name) for name in ("kind", "precision", "ranks_per_node")}
        layers = [planned.config.model_dump(mode="json"), {"device": device}, *layers]
        parent = planned.parent.folder
    assert parent is not None
    config = build_config(*layers)
    world = plan_world(config)
    # Without a run, processors are this machine's; a run in a bucket may be on any machine.
    here = world.kind in HOST_KINDS if run is None else not store.is_s3(run)
    capacity = known_capacity(config, world.kind, here=here)
    with tempfile.TemporaryDirectory(prefix="trnpipe-") as scratch:
        shape = fetch_shape(parent, config.model, Path(scratch))
    config = decide_sharding(config, shape, world, capacity)
    found = None
    if any((train_rows, corpus_rows, query_tokens, document_tokens, deadline_hours)):
        work, assumptions = workload(
            config,
            measured,
            train_rows=train_rows,
            corpus_rows=corpus_rows,
            query_tokens=query_tokens,
            document_tokens=document_tokens,
        )
        found = estimate(shape, config, measured, work, assumptions, deadline_hours)
    return PlanReport(
        shape=shape,
        config=config,
        world=world,
        capacity=capacity,
        budgets=estimate_memory(shape, config, world, capacity),
        estimate=found,
    )


def estimate(
    shape: ModelShape,
    config: RunConfig,
    run: MeasuredRun | None,
    work: Workload,
    assumptions: Sequence[str],
    deadline_hours: float | None,
) -> Estimate:
    """Estimate hours, costs and limits of a workload on Trainium and Inferentia2.

    Args:
        run: a run whose rates, prices and attempt limits are used.
        assumptions: those behind `work`.
        deadline_hours: for training and embedding together.
    """
    deployment = run.deployment if run else None
    rates = Rates.measured(shape, run) if run and run.plan.world.kind == "neuron" else Rates.published(shape.hidden)
    prices = dict(INSTANCE_HOUR)
    if deployment:
        paid = deployment.prices.by_queue()
        prices |= {host: paid[queue] for queue, host in deployment.hosts.items() if queue in paid and host in HARDWARE}
    minutes = attempt_minutes(deployment.timeouts if deployment else {})
    estimator = Estimator(shape=shape, config=config, rates=rates, prices=prices, minutes=minutes)
    nodes = sorted(set(deployment.allowed_nodes if deployment else (*NODE_COUNTS, config.nodes)))
    trains = [estimator.train(work, count) for count in nodes]
    options = [
        estimator.embed(work, host, count) for host in EMBED_HOSTS for count in sorted({*CHILD_COUNTS, config.embed.children})
    ]
    # Only as many children as there are parts have work.
    embeds = list({(option.host, option.count): option for option in options}.values())
    best = cheapest(trains, embeds, deadline_hours)
    host, children = (best[1].host, best[1].count) if best else (TRAIN_HOST, config.embed.children)
    found = [
        *requirements(
            work,
            shape,
            config,
            parts=part_count(work.corpus_rows, config.embed.rows_per_part, children * HARDWARE[host].ranks),
            ranks=config.embed.ranks_per_child or HARDWARE[host].ranks,
            embed_host=host,
            minutes=minutes,
        )
    ]
    if best:
        hours, budget = best[0].hours + best[1].hours, config.time_budget.total_seconds() / 3600
        remedy = "raise time_budget, after which the run counts as overdue, or set a --deadline below it"
        found.append(Requirement("train and embed, of the run's time budget", hours, budget, remedy, "hours", breaks=False))
    return Estimate(
        work=work,
        deadline_hours=deadline_hours,
        trains=trains,
        embeds=embeds,
        best=best,
        requirements=found,
        assumptions=[*assumptions, *_assumptions(config, run, rates, shape.hidden)],
        unit_costs=_unit_costs(estimator, work),
    )


def _assumptions(config: RunConfig, run: MeasuredRun | None, rates: Rates, hidden: int) -> Iterator[str]:
    """Yield sentences on rates, prices and limits."""
    if run and run.plan.world.kind != "neuron":
        yield f"the run was on {run.plan.world.kind}: its speed says nothing about neuron's, so it is not used"
    yield f"training: {rates.train:.1%} of {TRAIN_HOST}'s peak ({rates.train_source})"
    for family, share in rates.embed.items():
        yield f"embedding on {family}: {share:.1%} of the peak ({rates.embed_source[family]})"
    if hidden < NARROWEST and "measured" not in rates.train_source:
        yield f"no MFU is published for a model as narrow as {hidden}: that of {NARROWEST} is used, and is likely too high"
    yield "nodes lose only the all-reduce of gradients at EFA's documented bandwidth; published are 94 % at 16 nodes"
    yield (
        "checkpoints take no time, as their stall is unknown"
        if rates.stall is None
        else f"a checkpoint stops training for {rates.stall:.2f} s, as in the run"
    )
    if rates.with_input < set(rates.embed):
        yield f"embedding reads {READ_ROWS:,} rows a second and rank (measured on one core of an AMD EPYC)"
    yield (
        "hours are those of train and embed alone, from the first row to the last: not counted are hosts starting, the other "
        "stages, validations, and retries"
    )
    yield (
        "an attempt ends at the limit that the run's deployment has (`timeouts`)"
        if run and run.deployment and run.deployment.timeouts
        else "an attempt ends at the default limit of its stage: the deployment's `timeouts` are known with --run alone"
    )
    yield f"prices on demand in {', '.join(REGIONS)} (pipeline/cost.py), or those of the run's deployment"
    if config.device.precision == "fp32":
        yield "all figures are for bf16: fp32 is slower (published training: 56 % of the speed)"


def _unit_costs(estimator: Estimator, work: Workload) -> dict[str, dict[str, float]]:
    """Return the USD for a million rows and for a billion tokens, padding not counted, on one host."""
    costs = {}
    if estimator.config.train.steps is None:
        rows, tokens = work.train_rows * estimator.config.train.epochs, work.query_tokens + work.document_tokens
        costs[f"pairs trained on, {TRAIN_HOST}"] = (estimator.train(work, 1), rows, tokens)
    costs |= {
        f"documents embedded, {name}": (estimator.embed(work, name, 1), work.corpus_rows, work.document_tokens)
        for name in EMBED_HOSTS
    }
    return {
        name: {"million_rows": option.usd / rows * 1e6, "billion_tokens": option.usd / rows / tokens * 1e9}
        for name, (option, rows, tokens) in costs.items()
        if option.usd is not None
    }
