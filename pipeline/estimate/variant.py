"""Variants of a planned run on this host: plans of short runs with other settings, over the same rows and parent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pipeline.backends.device import default_ranks_per_node, require_available, require_world, resolve_kind, resolve_precision
from pipeline.config import RunConfig
from pipeline.contract import now
from pipeline.dataset.steps import StepCounts
from pipeline.estimate.memory import decide_sharding, known_capacity, require_memory, totals
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.model.folder import inspect_folder
from pipeline.model.shape import read_shape
from pipeline.plan import RunPlan
from pipeline.run_inputs import MemoryPlan, PlannedWorld


def plan_world(config: RunConfig) -> PlannedWorld:
    """Decide which ranks compute a run.

    Raises:
        BadConfig: an unavailable device type, or a precision or number of ranks that it does not have.
    """
    kind = resolve_kind(config.device.kind)
    require_available(kind)
    ranks_per_node = config.device.ranks_per_node or default_ranks_per_node(kind)
    require_world(kind, config.nodes * ranks_per_node)
    return PlannedWorld(
        kind=kind,
        precision=resolve_precision(kind, config.device.precision),
        nodes=config.nodes,
        ranks_per_node=ranks_per_node,
    )


def plan_variant(plan: RunPlan, config: RunConfig, *, run: str, parent: Path, rows: int, bucket_root: str) -> RunPlan:
    """Return a run's plan with another configuration, not sealed yet.

    Args:
        config: of the variant; it names its steps.
        run: id of the variant.
        parent: local folder of the run's parent.
        rows: training rows of the variant.
        bucket_root: of the variant; its compiled sets are named below it.

    Raises:
        BadConfig: the configuration does not fit this host, or needs more memory than there is.
    """
    world = plan_world(config)
    backbone, _ = inspect_folder(parent, config.model)
    shape = read_shape(parent, config.model)
    capacity = known_capacity(config, world.kind, here=True)
    config = decide_sharding(config, shape, world, capacity)
    memory = totals(require_memory(shape, config, world, capacity))
    return plan.model_copy(
        update={
            "run": run,
            "created": now(),
            "config": config,
            "world": world,
            "reference": None,
            "parent": plan.parent.model_copy(update={"folder": str(parent)}),
            "published": None,
            "train": plan.train.model_copy(update={"rows": rows, **asdict(StepCounts.of(config, config.train.steps or 0))}),
            "memory": MemoryPlan(**memory),
            "graphs": plan_graphs(config, world, backbone, bucket_root),
        }
    )
