"""Collectives of a gang over TCP, leader in the middle. Waiting has no limit of its own: a peer that stands still is the
supervisors' business, one that is gone is noticed at once, as with gloo.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import TrnpipeError
from pipeline.run.failure import lost_peer
from pipeline.run.world import World

JOIN_SECONDS = 60
RETRY_SECONDS = 0.05


class Exchange:
    """The connections of one rank: of the leader to all, of the others to the leader."""

    def __init__(self, world: World, connections: dict[int, socket.socket]) -> None:
        self._world = world
        self._connections = connections

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank.

        Raises:
            Transient: a rank is gone.
        """
        with _peers_noticed():
            if not self._world.is_leader:
                _send(self._connections[0], value)
                return list(_receive(self._connections[0]))
            values = [value] + [_receive(self._connections[rank]) for rank in range(1, self._world.size)]
            for connection in self._connections.values():
                _send(connection, values)
            return values

    def all_reduce(self, values: list[int]) -> list[int]:
        """The sum over all ranks, element by element."""
        return [sum(column) for column in zip(*self.all_gather(values), strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The leader's value."""
        return self.all_gather(value)[0]


@contextmanager
def joined(world: World, beat: Callable[[], None]) -> Iterator[Exchange]:
    """All ranks of the world, met.

    Args:
        beat: called while the others are waited for.

    Raises:
        Transient: one did not come.
    """
    connections: dict[int, socket.socket] = {}
    try:
        with _peers_noticed():
            connections = _accept(world, beat) if world.is_leader else {0: _connect(world, beat)}
        yield Exchange(world, connections)
    finally:
        for connection in connections.values():
            connection.close()


def _accept(world: World, beat: Callable[[], None]) -> dict[int, socket.socket]:
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    with socket.create_server((world.leader, world.port)) as server:
        server.settimeout(RETRY_SECONDS)
        while len(connections) < world.size - 1:
            beat()
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                continue
            connection.settimeout(None)
            connections[_receive(connection)] = connection
    return connections


def _connect(world: World, beat: Callable[[], None]) -> socket.socket:
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        beat()
        try:
            connection = socket.create_connection((world.leader, world.port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
    _send(connection, world.rank)
    return connection


def _send(connection: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    connection.sendall(struct.pack(">I", len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("connection closed by peer")
        data += piece
    return data


@contextmanager
def _peers_noticed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _lost(error) from error


def _lost(error: OSError) -> TrnpipeError:
    return lost_peer(f"{type(error).__name__}: {error}")
