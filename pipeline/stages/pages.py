"""The pages' template engine, and how they show numbers and times."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import reduce
from pathlib import Path
from typing import Any

import jinja2

from pipeline.stages.charts import LARGEST

READS_AT_ONCE = 16
"""Small records: an array may have thousands of children, a registry name hundreds of runs."""


def render_page(template: str, **values: Any) -> bytes:
    """Return a page. The template engine escapes every value; one that is absent shows as nothing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests.update(measured=is_number)
    environment.filters.update(number=number, signed=signed, span=span, moment=moment_of)
    return environment.get_template(template).render(values).encode(errors="replace")  # JSON may hold halves of surrogate pairs


def time_of(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def inside(record: Any, *keys: Any) -> Any:
    """Return the value under these keys, one object inside the other; None where there is none."""
    return reduce(
        lambda found, key: found.get(key) if isinstance(found, Mapping) and isinstance(key, str) else None, keys, record
    )


def figures_of(record: Any, *keys: str) -> dict[str, float]:
    """Return the numbers under these keys of an object, without whatever else it has."""
    return {key: value for key in keys if is_number(value := inside(record, key))}


def number(value: Any, digits: int = 0) -> str:
    """1234.5 as `1,234` or, with digits, `1,234.50`; a dash for what is not a number."""
    return f"{value:,.{digits}f}".replace("-", "−") if is_number(value) else "–"


def is_number(value: Any) -> bool:
    """Whether it is one that can be computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def signed(value: Any, digits: int) -> str:
    text = number(value, digits)
    return text if text[0] in "–−" else f"+{text}"


def span(value: Any) -> str:
    """A timedelta as `2 h 05 min`, `3 min 20 s` or `4.2 s`."""
    if not isinstance(value, timedelta):
        return "–"
    seconds = value.total_seconds()
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def moment_of(value: Any) -> str:
    """An ISO time or datetime as `2025-01-31 14:05 UTC`."""
    moment = time_of(value) if isinstance(value, str) else value
    return moment.strftime("%Y-%m-%d %H:%M UTC") if isinstance(moment, datetime) else "–"
