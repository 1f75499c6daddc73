"""Read `input.json`, what the state machine was started with."""

from __future__ import annotations

from pydantic import ValidationError

from pipeline import store
from pipeline.config import RunInput
from pipeline.contract import RunPaths
from pipeline.errors import BadConfig


def read_request(paths: RunPaths) -> RunInput:
    """Return the input that the state machine was started with.

    Raises:
        MissingInput: no input.json.
        BadConfig: it does not have the form that the state machine writes.
    """
    try:
        return RunInput.model_validate_json(store.read_bytes(paths.input))
    except ValidationError as error:
        raise BadConfig(
            "the run's input cannot be read",
            value=[f"{paths.input}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()],
            rule="{deployment: {config, allowed_nodes, read, local_paths, prices, ...}, execution, execution_arn}, as the state "
            "machine writes it",
            remedy="restore it, or start a new run",
        ) from error
