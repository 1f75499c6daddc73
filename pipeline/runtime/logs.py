"""How the processes in a container log: one line per record on stderr, with who wrote it; Batch keeps them per node."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging(where: str) -> None:
    """Log to stderr from TRNPIPE_LOG_LEVEL (default INFO) on.

    Args:
        where: who writes, e.g. `node 0 rank 3`.
    """
    logging.basicConfig(
        level=os.environ.get("TRNPIPE_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s %(levelname)-7s [{where}] %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
