"""`trnpipe registry`: what is and was published under a name, and the reference that bounds the sum of all weeks' drops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline import store
from pipeline.commands.terminal import left, right, simple_table
from pipeline.contract import RunPaths, Stage, StageResult, check_run_id
from pipeline.errors import MissingInput
from pipeline.evaluation.reference import read_reference, write_reference
from pipeline.run.registry import read_pointer


def root_of(bucket: str | None, state: Path) -> str:
    """Return the bucket of a deployment, or of a local run's state folder."""
    return bucket.rstrip("/") if bucket else str(state / "bucket")


def publications(root: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the runs that were published under a name, the newest first, as far as their folders are there.

    Raises:
        MissingInput: nothing was published.
    """
    pointer = read_pointer(root, name)
    if pointer is None:
        raise MissingInput("nothing is published under this name", value=f"{name} in {root}", remedy="look under another --name")
    reference, run = read_reference(root, name), pointer.run
    while run:
        paths = RunPaths(store.join(root, "runs", run))
        found = {stage: _result(paths, stage) for stage in (Stage.PUBLISH, Stage.EVALUATE)}
        published, evaluated = (result.metrics if result else {} for result in found.values())
        gate = evaluated.get("gate", {})
        yield {
            "run": run,
            "published": getattr(found[Stage.PUBLISH], "finished", None),
            "current": run == pointer.run,
            "reference": run == reference,
            "metric": gate.get("metric"),
            "value": gate.get("new"),
            "against_reference": (gate.get("reference") or {}).get("difference"),
            "documents": published.get("documents"),
        }
        run = published.get("replaced") or ""


def _result(paths: RunPaths, stage: Stage) -> StageResult | None:
    try:
        return StageResult.from_json(store.read_bytes(paths.result(stage)))
    except MissingInput:
        return None


def table(rows: list[dict[str, Any]]) -> Table:
    """Return them as a table."""
    columns = (left("run"), left("published"), left(""), right(rows[0]["metric"] or "metric"), right("against reference"))
    shown = simple_table(*columns, right("documents"))
    for row in rows:
        marks = [name for name in ("current", "reference") if row[name]]
        numbers = (row["value"], row["against_reference"])
        cells = ("–" if number is None else f"{number:{form}}" for number, form in zip(numbers, (".4f", "+.4f"), strict=True))
        documents = "–" if row["documents"] is None else f"{row['documents']:,}"
        shown.add_row(row["run"], (row["published"] or "–")[:16].replace("T", " "), ", ".join(marks), *cells, documents)
    return shown


def pin(run: str | None, root: str, name: str) -> None:
    """Make a run the reference; None: none is.

    Raises:
        MissingInput: it has no hold-out, or was not evaluated.
    """
    if run is not None:
        _check(root, run)
    write_reference(root, name, run)


def _check(root: str, run: str) -> None:
    paths = RunPaths(store.join(root, "runs", check_run_id(run)))
    for uri in (paths.plan, store.join(paths.rows, "holdout.arrow"), paths.query_values):
        if not store.exists(uri):
            raise MissingInput(
                "the run cannot be the reference",
                value=uri,
                rule="a reference has a hold-out, and what each of its queries got with the run's model",
                remedy="pin a run that was evaluated and is still there",
            )
