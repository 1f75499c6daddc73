"""Compile every graph of the run ahead of time, on the gang that will train.

On kinds that run every operation when it is written (`cpu`, `cuda`) there is nothing to compile; the result says so.
"""

from __future__ import annotations

import logging

from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadConfig
from pipeline.runtime.context import StageContext, StageOutput

log = logging.getLogger("trnpipe")


def run(context: StageContext) -> StageOutput | None:
    """Rank 0 speaks for the stage.

    Raises:
        BadConfig: the plan's kind compiles, which this version cannot do.
    """
    kind = context.plan.world.kind
    if kind not in EAGER_KINDS:
        raise BadConfig(
            "this version cannot compile for this kind of device",
            value=kind,
            rule=f"one of {', '.join(EAGER_KINDS)}, which need no compilation",
            remedy="set device.kind",
        )
    if not context.world.is_leader:
        return None
    reason = f"the kind `{kind}` runs operations one by one and has no graphs"
    log.info("nothing is compiled: %s", reason)
    return StageOutput(metrics={"compiles": False, "graphs": 0, "reason": reason})
