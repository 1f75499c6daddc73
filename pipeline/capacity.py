"""`trnpipe plan`: what a run would need of every device and every host, and what a workload would take and cost.

Asked before anything is started: reads a parent's configuration, or a run's plan and what it measured; no weights, no rows.
Prepare judges by the same figures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from pipeline.config import RunConfig, build_config
from pipeline.contract import RunPaths, check_run_folder
from pipeline.errors import BadConfig
from pipeline.model.memory import (
    HOST_KINDS,
    Budget,
    Limits,
    ModelShape,
    estimate,
    fetch_shape,
    gib,
    known_limits,
    remedies,
    require_memory,
)
from pipeline.plan import RunPlan, World
from pipeline.runtime import store
from pipeline.scale.answer import Measured, Question, Scale, answer
from pipeline.stages.prepare import plan_world

UNITS = {"device": "a rank's device", "host": "a node's host"}
LIMIT_SETTINGS = {"device": "device.memory_gib", "host": "device.host_memory_gib"}

LEAST_SHARE = 0.005
"""Items that are a smaller share of the whole are left out of the table (not of the JSON)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A configuration, and the memory it needs.

    Attributes:
        budgets: of training and embedding, on a rank's device and a node's host.
        scale: what a workload takes and costs, where one was asked about.
    """

    shape: ModelShape
    config: RunConfig
    world: World
    limits: Limits
    budgets: list[Budget]
    scale: Scale | None = None

    @property
    def global_batch(self) -> int:
        """Pairs per optimizer step."""
        return self.config.train.batch_size * self.config.train.accumulation * self.world.ranks

    @property
    def tokens_per_step(self) -> int:
        """Padding included, in steps of the longest documents."""
        return self.global_batch * (self.config.train.query_length + max(self.config.train.buckets))

    def require(self) -> None:
        """Refuse what cannot fit.

        Raises:
            BadConfig: with the largest items or what the workload is too much for, and changes that help.
        """
        require_memory(self.shape, self.config, self.world, self.limits)
        if self.scale:
            self.scale.require()

    def verdict(self) -> str:
        """Of a plan that was not refused."""
        unknown = sorted({budget.place for budget in self.shown if budget.limit is None})
        if not unknown:
            return "It fits."
        settings = " and ".join(LIMIT_SETTINGS[place] for place in unknown)
        return f"Not judged by the memory of the {' and the '.join(unknown)}, which is not known here; set {settings}."

    @property
    def shown(self) -> list[Budget]:
        """All budgets but those of devices that are the host."""
        return [budget for budget in self.budgets if budget.place == "host" or self.world.kind not in HOST_KINDS]

    def record(self) -> dict[str, Any]:
        """For programs; sizes are bytes."""
        fits = all(budget.fits for budget in self.budgets)
        return {
            "model": asdict(self.shape),
            "world": self.world.model_dump(),
            "global_batch": self.global_batch,
            "tokens_per_step": self.tokens_per_step,
            "budgets": [budget.record() for budget in self.budgets],
            "fits": fits,
            "remedies": [] if fits else remedies(self.shape, self.config, self.world, self.limits),
            **({"scale": self.scale.record()} if self.scale else {}),
        }

    def table(self) -> Table:
        """For people."""
        world = self.world
        table = Table(
            box=box.SIMPLE_HEAD,
            title=(
                f"{self.shape.parameters / 1e6:.1f}M parameters on {world.kind} ({world.precision}), {world.nodes} x "
                f"{world.ranks_per_node} ranks\n{self.global_batch} pairs, at most {self.tokens_per_step} tokens per step"
            ),
            title_justify="left",
        )
        table.add_column("memory")
        table.add_column("size", no_wrap=True, justify="right")
        table.add_column("of", no_wrap=True, justify="right")
        for budget in self.shown:
            table.add_row(
                f"{budget.stage}, {UNITS[budget.place]}, {budget.moment}",
                gib(budget.total),
                f"{budget.total / budget.limit:.1%} of {gib(budget.limit)}" if budget.limit else "unknown",
                style="bold" if budget.fits else "bold red",
            )
            for name, size in sorted(budget.items.items(), key=lambda item: -item[1]):
                if size >= LEAST_SHARE * budget.total:
                    table.add_row(f"  {name}", gib(size), "")
            table.add_section()
        return table


def ask(
    *, parent: str | None, run: str | None, layers: Sequence[Mapping[str, Any]], question: Question | None = None
) -> Capacity:
    """What a run would need.

    Args:
        parent: folder or URI of the model, of which only the configuration is read.
        run: URI of a run folder with a plan, instead; `layers` are laid over its configuration.
        layers: partial configurations, later ones over earlier ones.
        question: a workload, whose times and costs are wanted as well.

    Raises:
        BadConfig: neither or both, or settings that are not valid.
        MissingInput: no such model or run.
    """
    if (parent is None) == (run is None):
        raise BadConfig(
            "it is not clear which model is meant",
            value=f"--parent {parent}, --run {run}",
            rule="either --parent or --run",
            remedy="give --parent FOLDER_OR_URI, or --run s3://BUCKET/runs/RUN_ID",
        )
    measured = None
    if run is not None:
        paths = RunPaths(check_run_folder(run))
        planned = RunPlan.from_json(store.read_bytes(paths.plan))
        measured = Measured.of(paths, planned) if question else None
        # What prepare resolved on its host counts, not what this one would make of `auto`.
        device = {
            "kind": planned.world.kind,
            "precision": planned.world.precision,
            "ranks_per_node": planned.world.ranks_per_node,
        }
        layers = [planned.config.model_dump(mode="json"), {"device": device}, *layers]
        parent = planned.parent.folder
    assert parent is not None
    config = build_config(*layers)
    world = plan_world(config)
    # Whoever asks about a model on processors means the machine they are at; a run in a bucket may be anywhere.
    here = world.kind in HOST_KINDS if run is None else not store.is_s3(run)
    limits = known_limits(config, world.kind, here=here)
    with tempfile.TemporaryDirectory(prefix="trnpipe-") as scratch:
        shape = fetch_shape(parent, config.model, Path(scratch))
    budgets = estimate(shape, config, world, limits)
    scale = answer(question, shape, config, measured) if question else None
    return Capacity(shape=shape, config=config, world=world, limits=limits, budgets=budgets, scale=scale)
