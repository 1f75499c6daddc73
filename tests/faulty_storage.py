"""Storage that fails by rule: a loopback proxy in front of a real S3 endpoint, for tests and for whole runs under faults.

    rules = [
        Rule(Answer(503, "SlowDown"), times=3),                          # the first three requests
        Rule(Cut(1000), method="GET", path="/data/", times=2),           # twice a reset after 1000 bytes of the body
        Rule(Answer(403, "AccessDenied"), path="/runs/", after=20, times=None),   # denied for good from the 21st request on
        Rule(Lose(seconds=60), method="PUT", share=0.05, times=None),            # one upload in twenty hangs
    ]
    with FaultyStorage(endpoint_url, rules, seed=7) as storage:
        os.environ["AWS_ENDPOINT_URL"] = storage.url                     # for this process and those it starts
        ...
        assert [request.fault for request in storage.requests]

Every request is looked at by the rules in their order; the first one that takes it decides. Which of its requests a rule takes
depends only on their number and the seed, not on time. Faults of the body (Cut, End, Stall) pass the request on first; a body
that is not longer than their number of bytes arrives whole. A reset may overtake bytes that were sent before it. Everything ends
with the context, or after `lifetime` seconds.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

HOST = "127.0.0.1"
RELAYED_BYTES = 64 << 10
ABRUPT = struct.pack("ii", 1, 0)
"""SO_LINGER on with no time: closing sends a reset."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An S3 error in place of an answer; the request goes no further."""

    status: int
    code: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is reset after so many bytes of the answer's body."""

    bytes: int


@dataclass(frozen=True, slots=True)
class End:
    """The connection is closed in good order after so many bytes of the answer's body, which is then too short."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing more comes after so many bytes of the answer's body, for so long; then the connection is reset."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lose:
    """The request is carried out, its answer never arrives: the connection is reset after so many seconds of silence."""

    seconds: float = 0.0


Fault = Answer | Cut | End | Stall | Lose


@dataclass(frozen=True, slots=True)
class Rule:
    """When to fail, and how.

    Attributes:
        fault: what happens.
        method: regular expression that the whole HTTP method matches.
        path: regular expression found in `/BUCKET/KEY?QUERY`.
        after: requests that match and are let through first.
        times: how many requests it then takes; None: all.
        share: of those, the share that it takes, drawn by the seed.
    """

    fault: Fault
    method: str = ".*"
    path: str = ""
    after: int = 0
    times: int | None = 1
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request that arrived, and what was done to it (None: nothing)."""

    method: str
    path: str
    span: str
    fault: Fault | None


class FaultyStorage:
    """A context manager: the proxy listens at `url` inside it.

    Args:
        upstream: http:// URL of the endpoint it stands in front of.
        rules: first match decides.
        seed: for shares.
        lifetime: seconds after which it stops even if the context is never left.
    """

    def __init__(self, upstream: str, rules: Sequence[Rule], *, seed: int = 0, lifetime: float = 900) -> None:
        self._upstream = urlsplit(upstream)
        self._rules = list(rules)
        self._matched = [0] * len(rules)
        self._taken = [0] * len(rules)
        self._draws = [random.Random(f"{seed}-{index}") for index in range(len(rules))]
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self.closing = threading.Event()
        self._server = _Server((HOST, 0), _Handler)
        self._server.storage = self
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="faulty-storage", daemon=True)
        self._end = threading.Timer(lifetime, self._stop)
        self._end.daemon = True

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_port}"

    @property
    def requests(self) -> list[Request]:
        """All requests until now, in the order in which they arrived."""
        with self._lock:
            return list(self._requests)

    def add(self, rule: Rule) -> None:
        """One more rule, behind the others, from now on."""
        with self._lock:
            self._draws.append(random.Random(len(self._rules)))
            self._matched.append(0)
            self._taken.append(0)
            self._rules.append(rule)

    def __enter__(self) -> FaultyStorage:
        self._serving.start()
        self._end.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.cancel()
        self._stop()
        self._serving.join()
        self._server.server_close()

    def _stop(self) -> None:
        self.closing.set()
        self._server.shutdown()

    def judge(self, method: str, path: str, span: str) -> Fault | None:
        """Note a request, and say what is to happen to it."""
        with self._lock:
            fault = next((rule.fault for index, rule in enumerate(self._rules) if self._takes(index, rule, method, path)), None)
            self._requests.append(Request(method, path, span, fault))
            return fault

    def _takes(self, index: int, rule: Rule, method: str, path: str) -> bool:
        if not re.fullmatch(rule.method, method) or not re.search(rule.path, path):
            return False
        self._matched[index] += 1
        if self._matched[index] <= rule.after or (rule.times is not None and self._taken[index] >= rule.times):
            return False
        if rule.share < 1.0 and self._draws[index].random() >= rule.share:
            return False
        self._taken[index] += 1
        return True

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The endpoint's answer: status, headers, body."""
        assert self._upstream.hostname is not None
        connection = http.client.HTTPConnection(self._upstream.hostname, self._upstream.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    storage: FaultyStorage

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is nothing to speak of here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_any(self) -> None:
        storage = self.server.storage
        body = self._body()
        fault = storage.judge(self.command, self.path, self.headers.get("Range", ""))
        if isinstance(fault, Answer):
            text = f"<Error><Code>{fault.code}</Code><Message>by rule</Message></Error>".encode()
            self._reply(fault.status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))], text)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        status, answered, data = storage.forward(self.command, self.path, headers, body)
        if isinstance(fault, Lose):
            storage.closing.wait(fault.seconds)
            self._reset()
            return
        kept = [(name, value) for name, value in answered if name.lower() not in _HOP_BY_HOP]
        if not any(name.lower() == "content-length" for name, _ in kept):
            kept.append(("Content-Length", str(len(data))))
        if fault is None:
            self._reply(status, kept, data)
            return
        self._reply(status, kept, data[: fault.bytes])
        if isinstance(fault, Stall):
            storage.closing.wait(fault.seconds)
        if isinstance(fault, End):
            self.close_connection = True
        else:
            self._reset()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - the base class's names

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        # send_response would add headers of its own.
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(body), RELAYED_BYTES):
                self.wfile.write(body[start : start + RELAYED_BYTES])
        self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
        # All that holds the socket lets go of it here: the server would shut it down in good order before it closes it.
        self.rfile.close()
        self.wfile.close()
        self.connection.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Nothing: `requests` has them all."""


_HOP_BY_HOP = {"connection", "transfer-encoding", "expect", "keep-alive"}
