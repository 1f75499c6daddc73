"""The commands of `trnpipe registry`. Like `pipeline.cli`, of which they are a part, they import their modules when they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STATE = Path(".trnpipe")

registry_app = typer.Typer(no_args_is_help=True, help="What is published, and the reference that bounds the sum of all drops.")

BucketOption = Annotated[str | None, typer.Option("--bucket", help="s3://BUCKET of a deployment, instead of a local run.")]
NameOption = Annotated[str, typer.Option("--name", help="Name in the registry, the setting `registry` of the runs.")]
StateOption = Annotated[Path, typer.Option("--state", help="Folder of the local run: its bucket as plain files, logs, registry.")]


@registry_app.command("show")
def registry_show(
    bucket: BucketOption = None,
    state: StateOption = DEFAULT_STATE,
    name: NameOption = "current",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List what is and was published: quality, change against the reference, documents."""
    from pipeline.commands import registry
    from pipeline.commands.terminal import print_table

    found = registry.history(registry.root_of(bucket, state), name)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        print_table(registry.table(found))


@registry_app.command("pin")
def registry_pin(
    run: Annotated[str, typer.Argument(help="Id of an evaluated run.")],
    bucket: BucketOption = None,
    state: StateOption = DEFAULT_STATE,
    name: NameOption = "current",
) -> None:
    """Make a run the reference: later models must not fall behind its values by more than gate.total_drop."""
    from pipeline.commands import registry

    registry.pin(run, registry.root_of(bucket, state), name)
    typer.echo(f"run {run} is the reference of {name}")


@registry_app.command("unpin")
def registry_unpin(bucket: BucketOption = None, state: StateOption = DEFAULT_STATE, name: NameOption = "current") -> None:
    """Keep no reference: until a run is pinned, the sum of all weeks' drops has no limit."""
    from pipeline.commands import registry

    registry.pin(None, registry.root_of(bucket, state), name)
    typer.echo(f"{name} has no reference")


@registry_app.command("hold")
def registry_hold(bucket: BucketOption = None, state: StateOption = DEFAULT_STATE, name: NameOption = "current") -> None:
    """Stop new models: no run publishes one until they are released. Refreshes go on."""
    from pipeline.commands import registry

    typer.echo(registry.hold(registry.root_of(bucket, state), name, held=True))


@registry_app.command("release")
def registry_release(bucket: BucketOption = None, state: StateOption = DEFAULT_STATE, name: NameOption = "current") -> None:
    """Let new models be published again, after a hold or a rollback. Runs that began before stay superseded."""
    from pipeline.commands import registry

    typer.echo(registry.hold(registry.root_of(bucket, state), name, held=False))


@registry_app.command("prune")
def registry_prune(
    keep_days: Annotated[
        int, typer.Option("--keep-days", min=0, help="Days for which what was replaced stays, and runs that published nothing.")
    ] = 30,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only listed.")] = False,
    bucket: BucketOption = None,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Remove the folders of runs that nothing needs any more: neither what is published, nor the reference, nor a reader of what
    was replaced a short time ago. And what was ingested of files that were rewritten or removed since."""
    from pipeline.commands import prune, registry
    from pipeline.commands.terminal import print_table

    found = prune.find(registry.root_of(bucket, state), keep_days)
    if found:
        print_table(prune.table(found))
    typer.echo(prune.remove(found) if yes else f"{len(found)} folders would be removed; --yes removes them")
