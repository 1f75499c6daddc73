"""ECS's task metadata (version 4): what a container is told of itself, by its own host."""

from __future__ import annotations

import os
from typing import Any

import urllib3

VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
"""Set by ECS in every container (agent 1.39 and later)."""
SECONDS = 2.0
TROUBLE = (OSError, urllib3.exceptions.HTTPError, ValueError, KeyError)
"""No answer, or another than the documented one."""


def read_metadata(path: str) -> dict[str, Any] | None:
    """Return a document of this container's metadata, e.g. with the path `/task` its task's; None outside ECS.

    Raises:
        urllib3.exceptions.HTTPError, ValueError: no answer, or another than the documented one.
    """
    if not (uri := os.environ.get(VARIABLE)):
        return None
    # Past every proxy: the address is the host's own.
    answer = urllib3.PoolManager().request("GET", uri + path, timeout=SECONDS, retries=False)
    loaded = answer.json()
    if answer.status != 200 or not isinstance(loaded, dict):
        raise ValueError(f"{uri}{path} answered {answer.status} and not the documented JSON object")
    return loaded
