"""`trnpipe registry`: what is and was published under a name, holds, and the reference that bounds the sum of all drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline import store
from pipeline.commands.terminal import left, right, simple_table
from pipeline.contract import RunPaths, check_run_id, now
from pipeline.errors import MissingInput
from pipeline.evaluation.reference import read_reference, write_reference
from pipeline.run.registry import Pointer, change_pointer, publications, read_pointer


def root_of(bucket: str | None, state: Path) -> str:
    """Return the bucket of a deployment, or of a local run's state folder."""
    return bucket.rstrip("/") if bucket else str(state / "bucket")


def history(root: str, name: str) -> list[dict[str, Any]]:
    """Return what was published under a name, the newest first.

    Raises:
        MissingInput: nothing was.
    """
    pointer = _pointer(root, name)
    reference = read_reference(root, name)
    return [
        {
            "run": record["run"],
            "embeddings_run": record["embeddings_run"],
            "kind": record.get("kind"),
            "published": record["published"],
            "current": record["published"] == pointer.content.get("published"),
            "reference": record["run"] == record["embeddings_run"] == reference,
            "metric": gate.get("metric"),
            "value": gate.get("new"),
            "against_reference": (gate.get("reference") or {}).get("difference"),
            "drift": record.get("drift"),
            "documents": record.get("documents"),
        }
        for record in publications(root, name)
        for gate in [record.get("gate") or {} if record.get("kind") == "model" else {}]
    ]


def _pointer(root: str, name: str) -> Pointer:
    if (pointer := read_pointer(root, name)) is None:
        raise MissingInput("nothing is published under this name", value=f"{name} in {root}", remedy="look under another --name")
    return pointer


def table(rows: list[dict[str, Any]]) -> Table:
    """Return them as a table."""
    metric = next((row["metric"] for row in rows if row["metric"]), "metric")
    columns = (left("model"), left("what"), left("embedded by"), left("published"), left(""), right(metric))
    shown = simple_table(*columns, right("against reference"), right("cosine"), right("documents"))
    for row in rows:
        marks = [name for name in ("current", "reference") if row[name]]
        numbers = {".4f": row["value"], "+.4f": row["against_reference"], ".3f": (row["drift"] or {}).get("cosine")}
        cells = ("–" if number is None else f"{number:{form}}" for form, number in numbers.items())
        documents = "–" if row["documents"] is None else f"{row['documents']:,}"
        by = "itself" if row["embeddings_run"] == row["run"] else row["embeddings_run"]
        shown.add_row(
            row["run"], row["kind"] or "–", by, row["published"][:16].replace("T", " "), ", ".join(marks), *cells, documents
        )
    return shown


def hold(root: str, name: str, *, held: bool) -> str:
    """Stop new models from being published under a name, or let them again; return in words what is so now.

    A hold begins a new epoch: runs that began before it cannot publish their models after it either. Refreshes go on.

    Raises:
        MissingInput: nothing is published under the name.
    """
    _pointer(root, name)

    def change(pointer: Pointer | None) -> dict[str, Any] | None:
        if pointer is None or bool(pointer.held) == held:
            return None
        return {**pointer.content, "held": now() if held else "", "epoch": pointer.epoch + held}

    content = change_pointer(root, name, change) or {}
    return f"models of {name} are held since {content['held']}" if held else f"models of {name} are released"


def pin(run: str | None, root: str, name: str) -> None:
    """Make a run the reference; None: none is.

    Raises:
        MissingInput: it has no hold-out, or was not evaluated.
    """
    if run is not None:
        paths = RunPaths(store.join(root, "runs", check_run_id(run)))
        for uri in (paths.plan, store.join(paths.rows, "holdout.arrow"), paths.query_values):
            if not store.exists(uri):
                raise MissingInput(
                    "the run cannot be the reference",
                    value=uri,
                    rule="a reference has a hold-out, and what each of its queries got with the run's model",
                    remedy="pin a run that was evaluated and is still there",
                )
    write_reference(root, name, run)
