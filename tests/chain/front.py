"""What stands before the local endpoint in a chaos run: for as long as a disturbance is set, services answer as sick ones do."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from infra.local.server import SIGNED, WsgiApplication

Disturbance = Callable[["Request"], "Iterable[bytes] | None"]
"""Answers a request in the service's place, or gives None to let it through."""

OF_JOBS = {"AWS_SDK_UA_APP_ID": "job"}
"""Of job processes: what every AWS SDK then says of itself (`app/job`), by which they are told from the state machine."""


@dataclass(frozen=True)
class Request:
    """One request on its way to the endpoint."""

    environ: dict[str, Any]
    start_response: Any
    application: WsgiApplication

    @property
    def service(self) -> str:
        signed = SIGNED.search(self.environ.get("HTTP_AUTHORIZATION", ""))
        return signed["service"] if signed else ""

    @property
    def of_job(self) -> bool:
        return "app/job" in self.environ.get("HTTP_USER_AGENT", "")

    @property
    def method(self) -> str:
        return str(self.environ["REQUEST_METHOD"])

    @property
    def path(self) -> str:
        return str(self.environ["PATH_INFO"])

    @property
    def target(self) -> str:
        return str(self.environ.get("HTTP_X_AMZ_TARGET", ""))

    def forward(self) -> Iterable[bytes]:
        return self.application(self.environ, self.start_response)

    def answer(self, status: str, body: str, *headers: tuple[str, str]) -> list[bytes]:
        """Answer in the service's place; what the client sends is read first, so that it hears the answer."""
        self.environ["wsgi.input"].read(int(self.environ.get("CONTENT_LENGTH") or 0))
        data = b"" if self.method == "HEAD" else body.encode()
        self.start_response(status, [("Content-Length", str(len(data))), *headers])
        return [data]

    def refuse(self, status: str, code: str) -> list[bytes]:
        """An error of S3."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>chaos</Message></Error>"
        return self.answer(status, body, ("Content-Type", "application/xml"))

    def fail(self, status: str, code: str) -> list[bytes]:
        """An error of a service that speaks JSON."""
        body = json.dumps({"__type": code, "message": "chaos"})
        return self.answer(
            status, body, ("Content-Type", "application/json"), ("x-amzn-ErrorType", code), ("x-amzn-RequestId", "chaos")
        )

    def reset(self) -> None:
        """Break the connection, whatever the client still has to say on it.

        Raises:
            ConnectionResetError: always; the server gives the request up.
        """
        self.environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError("chaos")

    def cut(self) -> Iterator[bytes]:
        """The real answer, broken off in the middle of its body."""
        body = b"".join(self.forward())
        yield body[: len(body) // 2]
        self.reset()


class Front:
    """The layer itself; `disturb` sets and clears what it does."""

    def __init__(self) -> None:
        self._disturbance: Disturbance | None = None

    def __call__(self, application: WsgiApplication) -> WsgiApplication:
        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            request = Request(environ, start_response, application)
            disturbance = self._disturbance
            found = disturbance(request) if disturbance else None
            return request.forward() if found is None else found

        return answer

    def disturb(self, disturbance: Disturbance | None) -> None:
        self._disturbance = disturbance


@dataclass
class Counted:
    """How often a disturbance has answered, and when first (monotonic seconds)."""

    times: int = 0
    first: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def one(self, limit: int | None = None) -> bool:
        """Whether there may be one more; counts it."""
        with self._lock:
            if limit is not None and self.times >= limit:
                return False
            self.times += 1
            self.first = self.first or time.monotonic()
            return True


def storage_trouble(mode: str, share: float, draw: random.Random, counted: Counted) -> Disturbance:
    """A share of the job processes' requests to S3 goes wrong in one way."""

    def disturb(request: Request) -> Iterable[bytes] | None:
        if request.service != "s3" or not request.of_job or draw.random() > share:
            return None
        counted.one()
        if mode == "slow-down":
            return request.refuse("503 Slow Down", "SlowDown")
        if mode == "internal-error":
            return request.refuse("500 Internal Server Error", "InternalError")
        if mode == "reset":
            request.reset()
        if mode == "cut":
            return request.cut()
        if mode == "answer-lost":
            b"".join(request.forward())
            request.reset()
        time.sleep(draw.uniform(1, 3))
        return None

    return disturb


STORAGE_MODES = ("slow-down", "internal-error", "reset", "cut", "answer-lost", "stall")


def denied(wanted: Callable[[Request], bool], counted: Counted) -> Disturbance:
    """Job processes may no longer do something on S3."""

    def disturb(request: Request) -> Iterable[bytes] | None:
        if request.service == "s3" and request.of_job and wanted(request):
            counted.one()
            return request.refuse("403 Forbidden", "AccessDenied")
        return None

    return disturb


def service_trouble(wanted: Callable[[Request], bool], status: str, code: str, limit: int, counted: Counted) -> Disturbance:
    """The next so many requests that are meant get the same error."""

    def disturb(request: Request) -> Iterable[bytes] | None:
        return request.fail(status, code) if wanted(request) and counted.one(limit) else None

    return disturb
