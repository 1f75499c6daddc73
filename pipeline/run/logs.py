"""The log of a container's processes: one line per record on stderr, with its writer; Batch keeps them per node."""

from __future__ import annotations

import logging
import os
import sys

from pipeline.errors import BadConfig, plain

LEVEL_VARIABLE = "TRNPIPE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

TELL_TOO_MUCH = ("boto3", "botocore", "s3transfer", "urllib3", "smart_open")
"""Libraries whose debug lines hold session tokens, signatures and request bodies: never below INFO."""


class PlainFormatter(logging.Formatter):
    """Makes records safe for a terminal: they quote data and tools."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def configure_logging(where: str) -> None:
    """Log to stderr from TRNPIPE_LOG_LEVEL (default INFO) on.

    Args:
        where: the writer, e.g. `week-1 node 0 rank 3`. All jobs of a deployment write to one log group, in which the run's id
            identifies its lines.

    Raises:
        BadConfig: an unknown level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in LEVELS:
        raise BadConfig("unknown log level", value=f"{LEVEL_VARIABLE}={level}", rule=f"one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(f"%(asctime)s %(levelname)-7s [{where}] %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in TELL_TOO_MUCH:
        logging.getLogger(name).setLevel("INFO" if level == "DEBUG" else level)
    # It logs each build of the library that is not installed as if loading had failed.
    logging.getLogger("faiss.loader").setLevel("WARNING")
