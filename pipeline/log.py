"""The logger of everything that runs in a container; pipeline/run/logs.py says where its lines go. Standard library only."""

from __future__ import annotations

import logging

log = logging.getLogger("trnpipe")
