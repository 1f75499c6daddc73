"""The settings that a search varies: a device type's default space, or the ones named with --vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.commands.tune_table import Settings
from pipeline.config import KeyRole, RunConfig, build_config, flattened, is_below, keys_of, nested, read_yaml
from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadConfig
from pipeline.host.host import available_cores
from pipeline.run_inputs import PlannedWorld

TUNABLE = keys_of(KeyRole.TUNABLE, RunConfig)
"""Sections and keys that say how the run trains on its rows. Others say which rows, or what it learns from them."""

LAZY_WINDOW = 4
"""Steps between two readings on devices that compile, which work ahead of the host: a reading after each step would stop them."""

Factor = list[Settings]
"""The values to try for one key, each with what else it needs."""


def default_space(config: RunConfig, world: PlannedWorld) -> list[Factor]:
    """Return the factors worth trying on this device type, most effective first. The search skips values that the base has."""
    batch = config.train.batch_size
    factors = [
        _factor("train.batch_size", [2 * batch, 4 * batch, *([batch // 2] if batch > 1 else [])]),
        _factor("device.precision", [precision for precision in ("bf16", "fp32") if precision != world.precision]),
    ]
    if world.kind == "cpu":
        share = max(1, available_cores() // world.ranks_per_node)
        factors.append(_factor("device.threads_per_rank", sorted({1, *(1 << bit for bit in range(share.bit_length())), share})))
    if world.kind not in EAGER_KINDS:
        loader, bins = config.device.loader, config.train.bins
        factors += [
            _factor("train.micro_batches", [count for count in (bins // 2, 2 * bins) if count and batch % count == 0]),
            _factor("device.sync_points", [1, 2]),
            _factor("device.loader.batches_per_execution", [2, 4]),
            _factor("device.loader.transfer_threads", [2 * loader.transfer_threads, 4 * loader.transfer_threads]),
            _factor("device.loader.host_prefetch", [2 * loader.host_prefetch]),
            _factor("device.loader.device_prefetch", [2 * loader.device_prefetch]),
        ]
    if world.kind == "neuron":
        factors += [_factor("compile.auto_cast", ["matmult", "all"]), _factor("compile.optlevel", [1, 2, 3])]
    return factors


def parse_vary(items: Sequence[str], config: RunConfig) -> list[Factor]:
    """Return `KEY=V1,V2,...` items as factors; values are YAML.

    Raises:
        BadConfig: an unknown key (with the nearest name), one that tune does not vary, or one without values.
    """
    factors: dict[str, Factor] = {}
    known = config.model_dump(mode="json")
    for item in items:
        key, separator, text = (part.strip() for part in item.partition("="))
        try:
            values = read_yaml(f"[{text}]")
        except ValueError as error:
            raise BadConfig("the values cannot be read", value=item, rule="KEY=V1,V2,...; values are YAML") from error
        if not separator or not values:
            raise BadConfig("cannot read what to vary", value=item, rule="KEY=V1,V2,..., e.g. train.batch_size=64,128")
        if key in factors:
            raise BadConfig("a key is varied twice", value=key, rule="one --vary per key, with all of its values")
        if key not in flattened(known):
            build_config(known, nested({key: values[0]}))  # refuses an unknown key with the nearest name
        if not is_below(key, TUNABLE) or key not in flattened(known):
            raise BadConfig(
                "tune does not vary this setting",
                value=key,
                rule=f"one setting of {', '.join(TUNABLE)}: how the run trains on its rows, not which rows or what it learns",
            )
        factors[key] = _factor(key, values)
    return list(factors.values())


def _factor(key: str, values: Sequence[Any]) -> Factor:
    """Return the settings for each value, with those that it depends on."""
    joins, casts = key == "device.loader.batches_per_execution", key in ("compile.auto_cast", "compile.auto_cast_type")
    return [
        {
            key: value,
            **({"device.sync_points": 1} if joins and value != 1 else {}),
            **({"device.precision": "compiler"} if casts and value not in (None, "none") else {}),
        }
        for value in values
    ]


def common_window(config: RunConfig, factors: Sequence[Factor], world: PlannedWorld) -> int:
    """Return the steps between two lines of metrics, the same for all variants: losses are compared over the same steps.

    A multiple of every number of joined steps, whose graph a reading must not cut.
    """
    key = "device.loader.batches_per_execution"
    changes = [change for factor in factors for change in factor]
    joined = {change[key] for change in changes if isinstance(change.get(key), int) and change[key] > 0}
    window = math.lcm(config.device.loader.batches_per_execution, *joined)
    kinds = {world.kind, *(change.get("device.kind", world.kind) for change in changes)}
    return window if kinds <= set(EAGER_KINDS) else math.lcm(window, LAZY_WINDOW)
