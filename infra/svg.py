"""SVG written as text: boxes, wrapped text whose width is known, arrows around corners. Light or dark like the screen.

Text is set in Helvetica or what has its metrics (Arial, Liberation Sans), so that what fits here fits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"

# Advance widths of Helvetica in thousandths of the size (Adobe Font Metrics of the core fonts), code points 32 to 126.
_REGULAR = (
    *(278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278),
    *(556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556),
    *(1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778),
    *(667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556),
    *(333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556),
    *(556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584),
)
_BOLD = (
    *(278, 333, 474, 556, 556, 889, 722, 238, 333, 333, 389, 584, 278, 333, 278, 278),
    *(556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 333, 333, 584, 584, 584, 611),
    *(975, 722, 722, 722, 722, 667, 611, 778, 722, 278, 556, 722, 611, 833, 722, 778),
    *(667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 333, 278, 333, 584, 556),
    *(333, 556, 611, 556, 611, 556, 333, 611, 611, 278, 278, 556, 278, 889, 611, 611),
    *(611, 611, 389, 556, 333, 611, 556, 778, 556, 556, 500, 389, 280, 389, 584),
)
_WIDEST = 1000
"""Of anything else, such as an arrow."""

Tone = Literal["ink", "muted", "plain", "start", "train", "embed", "cpu", "store", "notify"]

PALETTE: dict[str, tuple[str, str]] = {
    "page": ("#ffffff", "#0d1117"),
    "frame": ("#f6f8fa", "#151b23"),
    "card": ("#ffffff", "#212830"),
    "edge": ("#d1d9e0", "#3d444d"),
    "ink": ("#1f2328", "#f0f6fc"),
    "muted": ("#59636e", "#9da7b3"),
    "plain": ("#818b98", "#818b98"),
    "start": ("#0969da", "#4493f8"),
    "train": ("#8250df", "#b185ff"),
    "embed": ("#0b7285", "#3bc9db"),
    "cpu": ("#9a6700", "#d9a520"),
    "store": ("#1a7f37", "#3fb950"),
    "notify": ("#bf3989", "#e275ad"),
}
"""Name -> colour on light and on dark ground. Text has at least 4.5:1 on every ground it stands on."""


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width in pixels at this size."""
    widths = _BOLD if bold else _REGULAR
    return sum(widths[ord(sign) - 32] if 32 <= ord(sign) < 127 else _WIDEST for sign in text) * size / 1000


def wrap(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Lines of at most this width; a word that is wider than a line is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
            continue
        while text_width(word, size, bold=bold) > width:
            fitting = next(end for end in range(len(word), 0, -1) if text_width(word[:end], size, bold=bold) <= width)
            lines.append(word[:fitting])
            word = word[fitting:]
        lines.append(word)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A place on the picture, in pixels from its top left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def center(self) -> float:
        return self.x + self.width / 2

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(slots=True)
class Picture:
    """What has been drawn so far."""

    width: float
    title: str
    description: str
    _parts: list[str] = field(default_factory=list)

    def box(self, place: Box, look: Literal["frame", "card", "chip"], *, radius: float = 8, tone: Tone | None = None) -> None:
        shape = f'x="{_n(place.x)}" y="{_n(place.y)}" width="{_n(place.width)}" height="{_n(place.height)}" rx="{_n(radius)}"'
        self._parts.append(f'<rect class="{look}{f" fill-{tone}" if tone else ""}" {shape}/>')

    def bar(self, place: Box, tone: Tone) -> None:
        """A stripe of colour down the left side of a card."""
        stripe = f'x="{_n(place.x)}" y="{_n(place.y + 10)}" width="3" height="{_n(place.height - 20)}" rx="1.5"'
        self._parts.append(f'<rect class="fill-{tone}" {stripe}/>')

    def text(
        self,
        x: float,
        baseline: float,
        text: str,
        *,
        size: float,
        tone: Tone = "ink",
        bold: bool = False,
        anchor: Literal["start", "end"] = "start",
    ) -> None:
        extra = ' font-weight="bold"' * bold + ' text-anchor="end"' * (anchor == "end")
        place = f'x="{_n(x)}" y="{_n(baseline)}" font-size="{_n(size)}"'
        self._parts.append(f'<text class="fill-{tone}" {place}{extra}>{escape(text)}</text>')

    def arrow(self, points: Sequence[tuple[float, float]], edge: str, *, both: bool = False) -> None:
        """A line around rounded corners that ends with a head.

        Args:
            points: its corners, from where it starts.
            edge: what it stands for, said where the pointer rests on it.
            both: a head at its start, too.
        """
        heads = ' marker-start="url(#head)"' * both
        line = f'<path class="arrow" d="{_rounded(points)}" marker-end="url(#head)"{heads}>'
        self._parts.append(f"{line}<title>{escape(edge)}</title></path>")

    def group(self, name: str) -> None:
        """What is drawn until `end_group` belongs together."""
        self._parts.append(f"<g data-name={quoteattr(name)}>")

    def end_group(self) -> None:
        self._parts.append("</g>")

    def render(self, height: float) -> str:
        """The file's text."""
        size = f'viewBox="0 0 {_n(self.width)} {_n(height)}" width="{_n(self.width)}" height="{_n(height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description" '
            f"font-family={quoteattr(FONT)}>"
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="fill-plain" d="M0.5 0.8 7.5 4 0.5 7.2z"/></marker></defs>'
        )
        return "\n".join(
            [
                head,
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>\n{_style()}\n</style>",
                marker,
                f'<rect class="page" width="{_n(self.width)}" height="{_n(height)}" rx="10"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _style() -> str:
    def rules(ground: int) -> Iterable[str]:
        colour = {name: both[ground] for name, both in PALETTE.items()}
        yield f".page {{ fill: {colour['page']} }}"
        for look in ("frame", "card"):
            yield f".{look} {{ fill: {colour[look]}; stroke: {colour['edge']} }}"
        yield f".arrow {{ stroke: {colour['plain']} }}"
        yield from (f".fill-{name} {{ fill: {colour[name]} }}" for name in PALETTE)

    fixed = [".chip { fill-opacity: 0.15 }", ".arrow { fill: none; stroke-width: 1.4 }"]
    dark = ["@media (prefers-color-scheme: dark) {", *(f"  {rule}" for rule in rules(1)), "}"]
    return "\n".join([*rules(0), *fixed, *dark])


def _rounded(points: Sequence[tuple[float, float]], radius: float = 7) -> str:
    first, *_ = points
    drawn = [f"M{_n(first[0])} {_n(first[1])}"]
    for (before, corner), (_, after) in pairwise(pairwise(points)):
        reach = min(radius, _distance(before, corner) / 2, _distance(corner, after) / 2)
        into, out = _towards(corner, before, reach), _towards(corner, after, reach)
        drawn.append(f"L{_n(into[0])} {_n(into[1])}Q{_n(corner[0])} {_n(corner[1])} {_n(out[0])} {_n(out[1])}")
    drawn.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(drawn)


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(start: tuple[float, float], end: tuple[float, float], reach: float) -> tuple[float, float]:
    share = reach / _distance(start, end)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
