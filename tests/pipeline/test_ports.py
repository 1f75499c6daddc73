"""Ports for ranks that share a machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline import ports
from pipeline.run import world

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_that_something_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    monkeypatch.setattr(ports, "FREE_PORTS", (first, second := ports.free_port()))
    with socket.create_server((world.LOOPBACK, first)):
        assert {ports.free_port() for _ in range(20)} == {second}


@pytest.mark.skipif(not OUTGOING.exists(), reason="Linux says here which ports outgoing connections get")
def test_outgoing_connections_do_not_take_it() -> None:
    assert max(ports.FREE_PORTS) < int(OUTGOING.read_text().split()[0])
    assert world.ROOT_COMM_PORT not in ports.FREE_PORTS
    assert world.LEADER_PORT not in ports.FREE_PORTS
