"""ECS's task metadata (version 4): what a container is told of itself, by its own host."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
"""Set by ECS in every container (agent 1.39 and later)."""
SECONDS = 2.0
TROUBLE = (OSError, http.client.HTTPException, ValueError, KeyError)
"""No answer, or another than the documented one."""


def read_metadata(path: str = "", environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the metadata of this container, or with the path `/task` of its task; None outside ECS.

    Raises:
        OSError, http.client.HTTPException, ValueError: no answer, or another than the documented one.
    """
    parts = urlsplit(environment.get(VARIABLE, ""))
    if not parts.netloc:
        return None
    # Past every proxy: the address is the host's own.
    connection = http.client.HTTPConnection(parts.netloc, timeout=SECONDS)
    try:
        connection.request("GET", parts.path + path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"{parts.geturl()}{path} answered {response.status}")
    loaded = json.loads(body)
    if not isinstance(loaded, dict):
        raise ValueError(f"{parts.geturl()}{path} answered no JSON object")
    return loaded
