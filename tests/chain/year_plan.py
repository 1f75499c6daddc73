"""What happens in a year, week by week, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

PRUNE_EVERY = 4
FIRST_UNUSUAL = 3
"""In the second week everything is as usual."""
DELETION_SHARE = 0.2


class Delivery(str, Enum):
    """How the week's training shards come."""

    USUAL = ""
    LATE = "late shard"
    TWICE = "shard twice"
    REWRITTEN = "rewritten shard"
    MIXED_UP = "bad labels"
    REPAIRED = "labels repaired"
    ONE_LOCALE_LESS = "locale vanished"


class Operation(str, Enum):
    """What people, or the machines, do to the week's execution."""

    NOTHING = ""
    PLANT = "planted"
    LOSE_HOST = "host lost"
    HOLD = "hold"
    HOLD_WHILE_TRAINING = "hold while training"
    CHANGE_CORPUS = "corpus changes while training"
    ROLL_BACK = "rollback"
    PIN = "new reference"


@dataclass(frozen=True, kw_only=True)
class Week:
    """One weekly execution and the refreshes after it.

    Attributes:
        number: from 1.
        fall: of nDCG@10 of a planted model, in units of `gate.max_drop`.
        delete: documents are deleted after the weekly execution.
    """

    number: int
    delivery: Delivery = Delivery.USUAL
    operation: Operation = Operation.NOTHING
    fall: float = 0.0
    delete: bool = False

    @property
    def prunes(self) -> bool:
        return self.number % PRUNE_EVERY == 0

    @property
    def event(self) -> str:
        """All of it in words."""
        operation = f"planted: {self.fall:g} x max_drop worse" if self.fall else self.operation.value
        return ", ".join(filter(None, [self.delivery.value, operation, "deletion" if self.delete else ""]))


DELIVERIES = (
    *[(Delivery.LATE,)] * 4,
    *[(Delivery.TWICE,)] * 3,
    *[(Delivery.REWRITTEN,)] * 4,
    (*[Delivery.MIXED_UP] * 3, Delivery.REPAIRED),
    *[(Delivery.ONE_LOCALE_LESS,) * 4] * 2,
)
"""Blocks of unusual weeks."""

OPERATIONS = (
    # Each of the small ones may pass; together they must not use up more than `gate.total_drop`.
    *[((Operation.PLANT, fall),) for fall in (1.5, 2.0, 2.0, 3.0, 4.0, 0.5, 0.5, 0.5)],
    *[((Operation.LOSE_HOST, 0.0),)] * 4,
    ((Operation.HOLD, 0.0),) * 2,
    *[((Operation.HOLD_WHILE_TRAINING, 0.0),)] * 2,
    *[((Operation.CHANGE_CORPUS, 0.0),)] * 3,
    *[((Operation.ROLL_BACK, 0.0),)] * 3,
    ((Operation.PIN, 0.0),),
)

SHORT = (
    Week(number=1),
    Week(number=2, delivery=Delivery.LATE),
    Week(number=3, delivery=Delivery.REWRITTEN, operation=Operation.ROLL_BACK, delete=True),
    Week(number=4, operation=Operation.LOSE_HOST),
    Week(number=5, operation=Operation.PLANT, fall=3.0),
)
"""A year of up to five weeks is always the same one."""


def plan_year(weeks: int, seed: int) -> list[Week]:
    """Return the weeks in order."""
    if weeks <= len(SHORT):
        return list(SHORT[:weeks])
    draw = random.Random(seed)
    usual = [Week(number=number) for number in range(1, FIRST_UNUSUAL)]
    while True:
        deliveries, operations = (_spread(draw, weeks - len(usual), blocks) for blocks in (DELIVERIES, OPERATIONS))
        planned = usual + [
            Week(
                number=number,
                delivery=delivery or Delivery.USUAL,
                operation=operation[0] if operation else Operation.NOTHING,
                fall=operation[1] if operation else 0.0,
                delete=draw.random() < DELETION_SHARE,
            )
            for number, (delivery, operation) in enumerate(zip(deliveries, operations, strict=True), FIRST_UNUSUAL)
        ]
        # A reference whose hold-out has wrong answers would measure every later week with them.
        if not any(week.operation is Operation.PIN and week.delivery is Delivery.MIXED_UP for week in planned):
            return planned


def _spread(draw: random.Random, weeks: int, blocks: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what each week has: all blocks that find room, in a random order, with usual weeks (None) between them."""
    chosen: list[Sequence[Any]] = []
    for block in draw.sample(blocks, len(blocks)):
        if sum(map(len, chosen)) + len(block) <= weeks:
            chosen.append(block)
    chosen += [(None,)] * (weeks - sum(map(len, chosen)))
    draw.shuffle(chosen)
    return [entry for block in chosen for entry in block]
