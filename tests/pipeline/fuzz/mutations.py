"""How the fuzz tests make input: valid documents with something wrong in them, and what is wrong in any document."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

DEEP = 100_000
"""Levels of nesting that no parser without a limit of its own survives."""

numbers = st.one_of(
    st.integers(),
    st.floats(allow_subnormal=False),  # libraries that others load here may flush them to zero
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, float("nan"), float("inf"), -0.0]),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\0", "\x1b[2J", "../../etc/passwd", "</script><script>", "\ud800", "é" * 300, "1e999", "null", "٣"]),
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
"""What JSON can hold, and some that only Python's reader of it takes."""


@st.composite
def documents(draw: st.DrawFn, valid: Any) -> Any:
    """A valid document, some of whose values are dropped, replaced, or joined by others."""
    document = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(document)))
        document = _changed(draw, document, place)
    return document


@st.composite
def files(draw: st.DrawFn, valid: Any) -> bytes:
    """The bytes of a file that should hold a document: a wrong document, a damaged file, or something else."""
    whole = json.dumps(valid).encode()
    kind = draw(st.sampled_from(["mutated", "mutated", "mutated", "cut", "spliced", "random", "nested", "twice"]))
    if kind == "mutated":
        return json.dumps(draw(documents(valid))).encode()
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole)))]
    if kind == "spliced":
        at = draw(st.integers(0, len(whole)))
        return whole[:at] + draw(st.binary(min_size=1, max_size=8)) + whole[at:]
    if kind == "nested":
        opening = draw(st.sampled_from([b"[", b'{"a":']))
        return opening * DEEP
    if kind == "twice":
        return whole[:-1] + b"," + whole[1:] if whole.startswith(b"{") else whole * 2
    return draw(st.binary(max_size=64)) if draw(st.booleans()) else json.dumps(draw(values)).encode()


def _places(document: Any) -> list[tuple[Any, ...]]:
    """The path of every value in a document, its own first."""
    found: list[tuple[Any, ...]] = [()]
    items = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        found += [(key, *inner) for inner in _places(value)]
    return found


def _changed(draw: st.DrawFn, document: Any, place: tuple[Any, ...]) -> Any:
    if not place:
        return {**document, draw(texts): draw(values)} if isinstance(document, dict) and draw(st.booleans()) else draw(values)
    *path, last = place
    owner = document
    for key in path:
        owner = owner[key]
    if draw(st.booleans()):
        del owner[last]
    else:
        owner[last] = draw(values)
    return document
