"""What people see of a search: the table while it grows, and what is said of its best row."""

from __future__ import annotations

import json
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from pipeline.tune.table import Row, Settings, Table


class Display:
    """The table while it grows: redrawn on a terminal, one line per variant elsewhere; use as a context manager."""

    def __init__(self, console: Console, table: Table, tolerance: float) -> None:
        self._console = console
        self._table = table
        self._tolerance = tolerance
        self._shown = len(table.rows)
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._shown:
            self._console.print(f"{self._shown} variants are in the table already: {self._table.uri}", soft_wrap=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        else:
            self._print_new()

    def update(self, doing: str) -> None:
        """Called several times a second while a variant runs."""
        if self._live:
            shown = grid(self._table, self._tolerance, None)
            shown.caption = doing
            self._live.update(shown, refresh=True)
        else:
            self._print_new()

    def _print_new(self) -> None:
        for row in self._table.rows[self._shown :]:
            words = [f"{row.name}:", describe_settings(row.settings)]
            if row.samples_per_second is not None:
                words.append(f"{row.samples_per_second:.1f} samples/s,")
            words.append(self._table.verdict(row, self._tolerance))
            self._console.print(" ".join(words), markup=False, highlight=False, soft_wrap=True)
        self._shown = len(self._table.rows)


MIB = 1 << 20
COLUMNS: dict[str, Callable[[Row, Row], str]] = {
    "samples/s": lambda row, _: _number(row.samples_per_second, ".1f"),
    "x base": lambda row, base: _number(
        row.samples_per_second and row.samples_per_second / (base.samples_per_second or 1), ".2f"
    ),
    "step ms": lambda row, _: _number(row.step_seconds and 1000 * row.step_seconds, ".1f"),
    "compile s": lambda row, _: _number(row.compile_seconds, ".0f"),
    "graphs": lambda row, _: _number(row.graphs, "d"),
    "host MiB": lambda row, _: _number(row.host_memory_bytes and row.host_memory_bytes / MIB, ".0f"),
    "device MiB": lambda row, _: _number(row.device_memory_bytes and row.device_memory_bytes / MIB, ".0f"),
    "loss": lambda row, _: _number(row.loss, ".4f"),
}
"""Heading -> what stands in a row, given the base's; a column that is empty in every row is left out."""


def grid(table: Table, tolerance: float, best: Row | None) -> Grid:
    """The table as people read it, `best` emphasized."""
    basis, machine = table.basis, table.basis["machine"]
    where = f"{machine['kind']}, {machine['cores']} cores of {machine['processor']}"
    title = f"{basis['run']}: {basis['steps']} steps each, {where}"
    shown = Grid(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE)
    shown.add_column("settings, and what the loss says", overflow="fold")
    cells = {name: [cell(row, table.rows[0]) for row in table.rows] for name, cell in COLUMNS.items()}
    used = {name: column for name, column in cells.items() if any(column)}
    for name in used:
        shown.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(table.rows):
        style = "bold green" if row is best else "" if table.counts(row, tolerance) else "dim"
        verdict = table.verdict(row, tolerance)
        name = f"{describe_settings(row.settings)}\n  {'best; ' if row is best else ''}{verdict}"
        shown.add_row(Text(name), *(column[number] for column in used.values()), style=style)
    return shown


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def describe_settings(settings: Settings) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()) or "as the run is"


def describe_best(table: Table, best: Row, objective: str, tolerance: float) -> str:
    """Comment lines that stand above the best settings."""
    base = table.rows[0]
    machine = table.basis["machine"]
    where = f"{machine['kind']}, {machine['cores']} cores of {machine['processor']}"
    gained = f"{best.samples_per_second:.1f} samples/s, the base {base.samples_per_second:.1f}"
    lines = [
        f"Best of {len(table.rows)} variants by {objective}, {table.basis['steps']} steps each on {where}.",
        f"{gained}; {table.verdict(best, tolerance)}.",
    ]
    if best.batches != base.batches:
        lines.append("Other batches than the base's: whether they teach as much shows in a whole run only.")
    refused = [row for row in table.rows if row.status == "done" and not table.counts(row, tolerance)]
    lines += [
        f"Not chosen, loss worse: {describe_settings(row.settings)} ({row.samples_per_second:.1f} samples/s)" for row in refused
    ]
    return "".join(f"# {line}\n" for line in lines)
