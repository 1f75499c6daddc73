"""The table of a search, kept with the run: every variant, its figures, and the comparison with the base."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table as Grid
from rich.text import Text

from pipeline import store
from pipeline.contract import RunPaths
from pipeline.errors import BadData
from pipeline.host.host import available_cores, processor, versions
from pipeline.plan import RunPlan
from pipeline.run_inputs import PlannedWorld

MIB = 1 << 20

Settings = dict[str, Any]
"""Key -> value, e.g. {"train.batch_size": 128}: the settings in which a variant differs from the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant and its outcome.

    Attributes:
        name: id of its run.
        settings: those in which it differs from the base.
        status: done; failed (a stage did); slow (a stage took too long); refused (the configuration contradicts itself).
        batches: settings that decide its batches: rows with the same ones have comparable losses.
        samples_per_second: pairs that all ranks train on per second, see `tune_trials.rate`.
        step_seconds: median over steps after the warm-up.
        compile_seconds, graphs: of the compile stage (graphs that an earlier variant compiled are there already), None on kinds
            that compile nothing.
        host_memory_bytes: peak of a stage's processes.
        device_memory_bytes: peak of all devices of the node, None if unknown.
        loss: mean of the last quarter of the steps.
        exit_code, what: of the stage that failed; of a refusal.
        timeout_seconds: that a slow stage had.
    """

    name: str
    settings: Settings
    status: str
    batches: dict[str, Any] = field(default_factory=dict)
    samples_per_second: float | None = None
    step_seconds: float | None = None
    compile_seconds: float | None = None
    graphs: int | None = None
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    loss: float | None = None
    exit_code: int = 0
    what: str = ""
    timeout_seconds: float = 0.0

    def may_change(self, timeout_seconds: float) -> bool:
        """Return whether a new attempt may end differently: after a failure that Batch would retry, or with more time."""
        if self.status == "slow":
            return timeout_seconds > self.timeout_seconds
        return self.status == "failed" and (self.exit_code < 0 or str(self.exit_code).startswith("7"))


@dataclass(slots=True, kw_only=True)
class Table:
    """All variants so far, kept in the run's folder.

    Attributes:
        uri: of the file.
        basis: facts that all rows share, see `describe_basis`.
    """

    uri: str
    basis: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, base: RunPaths, basis: dict[str, Any]) -> Table:
        """Return the table of this basis, with the rows that an earlier search left.

        Raises:
            BadData: the file cannot be read.
        """
        digest = hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:8]
        uri = store.join(base.root, "tune", f"steps-{basis['steps']:04d}-{digest}.json")
        try:
            rows = store.read_json(uri)["rows"] if store.exists(uri) else []
            return cls(uri=uri, basis=basis, rows=[Row(**row) for row in rows])
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(
                "the table of an earlier search cannot be read",
                value=f"{uri}: {error!r}",
                rule="as this version of trnpipe writes it",
                remedy="remove it to measure again",
            ) from error

    def number(self, settings: Settings) -> int:
        """Return the place of the settings' row, the next free one if there is none."""
        return next((number for number, row in enumerate(self.rows) if row.settings == settings), len(self.rows))

    def find(self, settings: Settings, timeout_seconds: float) -> Row | None:
        """Return the settings' row, unless a new attempt, with that much time, may change it."""
        return next((row for row in self.rows if row.settings == settings and not row.may_change(timeout_seconds)), None)

    def put(self, row: Row) -> None:
        """Add a row, or replace the one of the same settings, and write the file."""
        number = self.number(row.settings)
        self.rows[number : number + 1] = [row]
        store.write_json(self.uri, self.record())

    def record(self) -> dict[str, Any]:
        return {"basis": self.basis, "rows": [asdict(row) for row in self.rows]}

    def worse_by(self, row: Row) -> float | None:
        """Return by which share the loss is above the first one on the same batches (below: negative), None if it is that one."""
        first = next(other for other in self.rows if other.status == "done" and other.batches == row.batches)
        if first is row or row.loss is None or first.loss is None:
            return None
        return (row.loss - first.loss) / max(abs(first.loss), 1e-12)

    def verdict(self, row: Row, tolerance: float) -> str:
        """Return the comparison of the losses in words."""
        if row.status != "done":
            return f"{row.status}, {row.exit_code}: {row.what}"
        if (worse := self.worse_by(row)) is None:
            return "base" if row is self.rows[0] else "loss not judged: other batches than the base's"
        return f"loss {worse:+.1%}" + (" WORSE" if worse > tolerance else "")

    def counts(self, row: Row, tolerance: float) -> bool:
        """Return whether a row may win."""
        return row.status == "done" and (self.worse_by(row) or 0.0) <= tolerance

    @property
    def host(self) -> str:
        machine = self.basis["machine"]
        return f"{machine['kind']}, {machine['cores']} cores of {machine['processor']}"


def describe_basis(plan: RunPlan, world: PlannedWorld, *, steps: int, window: int) -> dict[str, Any]:
    """Return the facts that the rows of one table share: figures of another plan or machine are not comparable.

    Args:
        steps: of each variant.
        window: steps between two lines of metrics.
    """
    return {
        "run": plan.run,
        "fingerprint": plan.fingerprint,
        "steps": steps,
        "window": window,
        "machine": {
            "kind": world.kind,
            "ranks": world.ranks,
            "processor": processor(),
            "cores": available_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "versions": versions(),
        },
    }


COLUMNS: dict[str, tuple[str, Callable[[Row, Row], float | None]]] = {
    "samples/s": (".1f", lambda row, _: row.samples_per_second),
    "x base": (".2f", lambda row, base: row.samples_per_second and row.samples_per_second / (base.samples_per_second or 1)),
    "step ms": (".1f", lambda row, _: row.step_seconds and 1000 * row.step_seconds),
    "compile s": (".0f", lambda row, _: row.compile_seconds),
    "graphs": ("d", lambda row, _: row.graphs),
    "host MiB": (".0f", lambda row, _: row.host_memory_bytes and row.host_memory_bytes / MIB),
    "device MiB": (".0f", lambda row, _: row.device_memory_bytes and row.device_memory_bytes / MIB),
    "loss": (".4f", lambda row, _: row.loss),
}
"""Heading -> format and value of a row, given the base's; a column that is empty in every row is left out."""


def grid(table: Table, tolerance: float, best: Row) -> Grid:
    """Return the table for the terminal, `best` emphasized."""
    title = f"{table.basis['run']}: {table.basis['steps']} steps each, {table.host}"
    shown = Grid(title=title, title_justify="left", box=box.SIMPLE)
    shown.add_column("settings, and what the loss says", overflow="fold")
    columns = []
    for heading, (form, value_of) in COLUMNS.items():
        values = [value_of(row, table.rows[0]) for row in table.rows]
        if any(value is not None for value in values):
            shown.add_column(heading, justify="right", no_wrap=True)
            columns.append(["" if value is None else format(value, form) for value in values])
    for row, *cells in zip(table.rows, *columns, strict=True):
        style = "bold green" if row is best else "" if table.counts(row, tolerance) else "dim"
        words = f"{describe_settings(row.settings)}\n  {'best; ' if row is best else ''}{table.verdict(row, tolerance)}"
        shown.add_row(Text(words), *cells, style=style)
    return shown


def describe_settings(settings: Settings) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()) or "the run's own settings"


def describe_best(table: Table, best: Row, objective: str, tolerance: float) -> str:
    """Return the comment lines above the best settings."""
    base = table.rows[0]
    gained = f"{best.samples_per_second:.1f} samples/s, the base {base.samples_per_second:.1f}"
    lines = [
        f"Best of {len(table.rows)} variants by {objective}, {table.basis['steps']} steps each on {table.host}.",
        f"{gained}; {table.verdict(best, tolerance)}.",
    ]
    if best.batches != base.batches:
        lines.append("Other batches than the base's: only a whole run shows whether the model learns as much from them.")
    lines += (
        f"Not chosen, loss worse: {describe_settings(row.settings)} ({row.samples_per_second:.1f} samples/s)"
        for row in table.rows
        if row.status == "done" and not table.counts(row, tolerance)
    )
    return "".join(f"# {line}\n" for line in lines)
