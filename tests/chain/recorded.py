"""`python -m tests.chain.recorded CALLS ...` is `trnpipe ...`, and writes to CALLS what jobs asked of AWS services, a JSON
line each (tests/infra/calls.py): so that runs with the real stages are looked at without being run for it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from infra.local import batch, batch_nodes, server
from infra.local.server import local_endpoint
from pipeline.cli import main
from tests.chain.front import Front
from tests.infra.calls import Call, Recorder


def read_calls(path: Path) -> set[Call]:
    return {Call(**json.loads(line)) for line in path.read_text().splitlines()}


def start(command: Sequence[str], *, env: dict[str, str], **others: Any) -> subprocess.Popen[bytes]:
    """A node's process, whose requests say of which stage they are."""
    return subprocess.Popen(command, env={**env, "AWS_SDK_UA_APP_ID": f"job-{env['TRNPIPE_STAGE']}"}, **others)


@contextmanager
def recording_endpoint(
    calls: Path, stack: Any, state: Path, runner: Callable[[dict[str, str]], batch.BatchRunner]
) -> Iterator[server.LocalEndpoint]:
    """An endpoint that appends to a file what was asked of it, when it goes down."""
    front, recorder = Front(), Recorder(cluster="local")
    front.disturb(recorder)
    try:
        with local_endpoint(stack, state, runner, front) as endpoint:
            yield endpoint
    finally:
        with calls.open("a") as stream:
            stream.writelines(json.dumps(dataclasses.asdict(call)) + "\n" for call in sorted(recorder.calls))


if __name__ == "__main__":
    # Where `trnpipe local` looks for them when it starts.
    server.local_endpoint = partial(recording_endpoint, Path(sys.argv.pop(1)))
    batch_nodes.BatchSettings = partial(batch_nodes.BatchSettings, start=start)  # type: ignore[misc,assignment]
    main()
