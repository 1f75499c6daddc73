"""Arrays that the ranks of one host pass each other as files in their scratch folder.

Ranks that only encode do not know of each other, and not every kind of device has collectives; files serve all of them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.files import replacing
from pipeline.run.context import StageContext

POLL_SECONDS = 0.05


def exchange(context: StageContext, name: str, own: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return the arrays that all ranks give under this name, in the order of the ranks and mapped into memory.

    Waits for the other ranks: none is missing for long, as a rank that fails ends its node.
    """
    world = context.world
    if world.size == 1:
        return [own]
    paths = [context.scratch / "exchange" / f"{name}-{rank}.npy" for rank in range(world.size)]
    with replacing(paths[world.rank]) as stream:
        np.save(stream, own)
    while not all(path.exists() for path in paths):
        context.heartbeat.beat(note=f"waiting for other ranks: {name}")
        time.sleep(POLL_SECONDS)
    # Copy on write, and no rank writes: torch warns about arrays that are read-only.
    return [np.lib.format.open_memmap(path, mode="c") for path in paths]
