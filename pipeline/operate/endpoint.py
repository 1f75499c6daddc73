"""`endpoint.json` in a local run's state folder: what the operator commands need to talk to that run while it goes on.

The endpoint answers only who knows the key that was made for it (infra/local/server.py). The file hands it to the user's own
commands: only its owner can read it, and it is gone when the endpoint is. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.contract import read_record
from pipeline.errors import BadData

NAME = "endpoint.json"

NO_USER_FILES = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
"""Keep every AWS SDK from reading the user's configuration and credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord:
    """A local endpoint that is up.

    Attributes:
        state_machine: ARN of its only state machine.
        environment: variables under which any AWS SDK talks to it and to nothing else, its key among them.
        process: id of the process that serves it.
    """

    state_machine: str
    environment: dict[str, str]
    process: int


def make_private(state: Path) -> None:
    """The state folder, which only its owner may read: it holds people's data. An existing one keeps its mode."""
    state.parent.mkdir(parents=True, exist_ok=True)
    state.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def announced(state: Path, record: EndpointRecord) -> Iterator[None]:
    """Within it the file is there, for its owner alone."""
    path, temporary = state / NAME, state / f"{NAME}.tmp"
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(asdict(record), stream)
    temporary.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read_endpoint(state: Path) -> EndpointRecord | None:
    """The endpoint of the local run in a state folder, None when none has announced itself.

    A killed run leaves its file behind: whether an endpoint answers is another question.

    Raises:
        BadData: the file is none that an endpoint has written.
    """
    try:
        data = (state / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return read_record(EndpointRecord, data)
    except BadData as error:
        error.value = f"{state / NAME}: {error.value}"
        error.remedy = "delete it; a running `trnpipe local` writes it when it starts"
        raise


@contextmanager
def only_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with the variables and without any AWS setting of its user; restored afterwards."""
    before = dict(os.environ)
    for key in before:
        if key.startswith("AWS_"):
            del os.environ[key]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
