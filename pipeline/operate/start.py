"""`trnpipe start`: start an execution of the state machine, after the same checks of its input as prepare's.

The state machine's definition holds the deployment's own configuration and limits, so mistakes are reported before the start.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pipeline.allowed_uris import AllowedUris
from pipeline.config import build_config, load_config_file, merge, nested, parse_settings
from pipeline.contract import check_run_id
from pipeline.errors import BadConfig, MissingInput
from pipeline.operate import executions
from pipeline.operate.deployment import Site
from pipeline.operate.executions import Execution
from pipeline.operate.run_files import IN_FOLDER


def execution_input(
    config_file: Path | None,
    settings: Sequence[str],
    *,
    run: str | None,
    share: str | None,
    wait_lock: int | None,
    name: str | None,
    refresh: bool = False,
) -> dict[str, Any]:
    """Return the execution's input, a partial run configuration: settings over flags over the file.

    Args:
        config_file: partial configuration, YAML or JSON.
        settings: `KEY=VALUE` items.
        run: id of an earlier run to resume.
        share: fair-share identifier.
        wait_lock: minutes to wait for a run that holds the registry name.
        name: of the execution, and so of a new run; None: share and time.
        refresh: train nothing.

    Raises:
        BadConfig: no deployment could run it.
        MissingInput: no such file.
    """
    flags = {
        "run": None if run is None else check_run_id(run),
        "share": share,
        "lock.wait_minutes": wait_lock,
        "mode": "refresh" if refresh else None,
    }
    named = nested({key: value for key, value in flags.items() if value is not None})
    given = merge(merge(load_config_file(config_file) if config_file else {}, named), parse_settings(settings))
    # Checked alone first: mistakes are reported without a request to AWS.
    build_config(given)
    if name is not None:
        check_run_id(name)
    return given


def start(site: Site, given: Mapping[str, Any], name: str | None = None) -> Execution:
    """Check the input against the deployment and start an execution with it.

    Args:
        given: from `execution_input`.

    Raises:
        BadConfig: the deployment could not run it; or an execution has this name already.
        MissingInput: there is no such run to resume.
    """
    deployment = site.machine.deployment
    config = build_config(deployment.config, given)
    # A resumed run keeps its plan, node count and URIs included, whatever is configured today.
    if config.run is None:
        if config.nodes not in deployment.allowed_nodes:
            raise BadConfig(
                "the deployment has no job definitions for this number of nodes",
                value=f"nodes = {config.nodes}",
                rule=f"nodes is one of {', '.join(map(str, sorted(deployment.allowed_nodes)))}",
                remedy="choose one of them, or add it to allowed_nodes and deploy",
            )
        # What the roles of jobs may read (infra/stacks).
        own, *others = (f"s3://{site.machine.bucket}/{folder}" for folder in ("data", "runs", "graphs"))
        AllowedUris(own=own, read=(*others, *deployment.read), local_paths=deployment.local_paths).check(config.uris())
    elif site.files(config.run).read(IN_FOLDER.input) is None:
        raise MissingInput(
            "there is no such run to resume",
            value=f"{config.run} ({site.option})",
            rule="a run that was started before has a run folder",
            remedy="`trnpipe runs` lists the newest ones; a new run is named with --name",
        )
    made_up = f"{config.share[:40]}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return executions.start(site, name or made_up, given)
