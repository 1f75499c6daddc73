"""TCP ports for processes that share a machine."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

FREE_PORTS = range(10_000, 29_500)
"""Below the ports that Linux hands to outgoing connections (32768-60999), as it takes a rank seconds to bind its port; and below
pipeline.run.world.LEADER_PORT."""


def free_port() -> int:
    """Return a port of this machine that nothing listens on and that no outgoing connection takes until it is bound."""
    # The system's source of randomness: equal seeds must not mean equal ports.
    ports = random.SystemRandom()
    while True:
        port = ports.choice(FREE_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
