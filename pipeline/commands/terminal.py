"""Printing for all commands: whole lines, tables, times and counts."""

from __future__ import annotations

from datetime import timedelta

from rich import box
from rich.console import Console
from rich.table import Column, Table

from pipeline.errors import plain


def say(console: Console, text: str, style: str = "") -> None:
    """Print a text without markup, uncut at any width of the terminal."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Print a line about the command itself, made safe by `plain`."""
    say(console, plain(text), style="dim")


def left(heading: str) -> Column:
    return Column(heading, no_wrap=True)


def right(heading: str) -> Column:
    return Column(heading, justify="right", no_wrap=True)


def simple_table(*columns: Column) -> Table:
    """Return an empty table with a line under its headings."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def clock(span: timedelta) -> str:
    """Return a time as `0:07`, `12:30`, `1:02:03`."""
    seconds = max(0, round(span.total_seconds()))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def counted(number: int, noun: str) -> str:
    """Return `1 graph`, `2 graphs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
