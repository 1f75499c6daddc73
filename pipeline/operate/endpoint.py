"""`endpoint.json` in a local run's state folder: how the operator commands reach that run while it lasts.

The endpoint answers only requests with the key that was made for it (infra/local/server.py). The file gives the key to the user's
own commands: only its owner can read it, and it disappears with the endpoint. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pipeline.contract import Record
from pipeline.errors import BadData
from pipeline.files import write_atomically

NAME = "endpoint.json"

NO_USER_FILES = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
"""Keep every AWS SDK from reading the user's configuration and credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord(Record):
    """A running local endpoint.

    Attributes:
        state_machine: ARN of its only state machine.
        environment: variables with which every AWS SDK talks to this endpoint alone, its key among them.
    """

    state_machine: str
    environment: dict[str, str]


def make_private(state: Path) -> None:
    """Create the state folder, readable by its owner alone: it holds people's data. An existing one keeps its mode."""
    state.parent.mkdir(parents=True, exist_ok=True)
    state.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def announced(state: Path, record: EndpointRecord) -> Iterator[None]:
    """Keep the file in the state folder for the duration of the block, readable by its owner alone."""
    write_atomically(state / NAME, record.to_json())
    try:
        yield
    finally:
        (state / NAME).unlink(missing_ok=True)


def read_endpoint(state: Path) -> EndpointRecord | None:
    """Return the endpoint of the local run in a state folder, None without one.

    A killed run leaves its file behind: the endpoint may not answer.

    Raises:
        BadData: the file is not an endpoint's.
    """
    try:
        return EndpointRecord.from_json((state / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except BadData as error:
        error.value = f"{state / NAME}: {error.value}"
        error.remedy = "delete it; a running `trnpipe local` writes it when it starts"
        raise


@contextmanager
def only_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables in this process's environment, without its user's AWS settings; restore it afterwards."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        yield
