"""For all commands: printing of whole lines, tables, times and counts; and their end by a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from rich import box
from rich.console import Console
from rich.table import Column, Table

from pipeline.errors import plain

PIPED_WIDTH = 300


@contextmanager
def terminable() -> Iterator[None]:
    """Exit with 130 after Ctrl-C and with 143 after SIGTERM, both as an exception, so that what runs ends too."""

    def terminate(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


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


def simple_table(*columns: Column, title: str | None = None) -> Table:
    """Return an empty table with a line under its headings."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")


def print_table(table: Table) -> None:
    """Print a table; one that goes into a file or a pipe is not cut to a terminal's width."""
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)


def clock(span: timedelta) -> str:
    """Return a time as `0:07`, `12:30`, `1:02:03`."""
    seconds = max(0, round(span.total_seconds()))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def counted(number: int, noun: str) -> str:
    """Return `1 graph`, `2 graphs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
