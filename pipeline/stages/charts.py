"""Geometry of the pages' charts: from numbers to the coordinates, ticks and labels that the template draws as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]

Chart = dict[str, Any]
"""The values of the template's macro `line`: a chart in a WIDTH x HEIGHT view box, plotted between the margins."""

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 42
MOST_POINTS = 500
"""More are thinned out by averaging neighbours: a screen shows no more, and the page stays small."""


LARGEST = 1e200
"""Larger numbers overflow in differences and sums; no measured value is that large."""


def line_chart(
    series: Mapping[str, Points], *, x_label: str = "", y_label: str, names: Sequence[str] = (), within: Sequence[float] = ()
) -> Chart | None:
    """Lay out lines over a common pair of axes.

    Args:
        series: name -> (x, y) in ascending x; points that are not finite, or absurdly large, are left out.
        names: of x = 0, 1, 2 and so on, in place of the numbers; the x axis shows all of them.
        within: more values that the y axis shows.

    Returns:
        None when there is nothing to draw. `place` gives the coordinates of a point (x, y).
    """
    finite = {name: [(x, y) for x, y in points if abs(x) < LARGEST and abs(y) < LARGEST] for name, points in series.items()}
    longest = max((len(points) for points in finite.values()), default=0)
    if longest == 0:
        return None
    averaged = math.ceil(longest / MOST_POINTS)
    drawn = {name: _thin(points, averaged) for name, points in finite.items() if points}
    xs = [*(x for points in drawn.values() for x, _ in points), *((0, len(names) - 1) if names else ())]
    ys = [*within, *(y for points in drawn.values() for _, y in points)]
    x_ticks, x_low, x_high = _axis(min(xs), max(xs), 3 if names else 5, whole=True)
    y_ticks, y_low, y_high = _axis(min(ys), max(ys), 4)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    placed = {name: [place(x, y) for x, y in points] for name, points in drawn.items()}
    return {
        "x_label": x_label,
        "y_label": y_label,
        "place": place,
        "x_ticks": [
            {"at": place(value, y_low)[0], "label": names[round(value)] if names else label}
            for value, label in x_ticks
            if not names or 0 <= value < len(names)
        ],
        "y_ticks": [{"at": place(x_low, value)[1], "label": label} for value, label in y_ticks],
        "lines": [
            {"name": name, "points": " ".join(f"{x},{y}" for x, y in points), "end": points[-1]}
            for name, points in placed.items()
        ],
        "averaged": averaged,
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }


def bar(start: float, stop: float, low: float, high: float) -> dict[str, float]:
    """Place [start, stop] within [low, high], in percent of the timeline's width; the bar always stays visible."""
    extent = max(high - low, 1e-9)
    left, width = 100 * (start - low) / extent, 100 * (stop - start) / extent
    return {"left": round(min(left, 99.6), 3), "width": round(max(width, 0.4), 3)}


def _thin(points: Points, group: int) -> Points:
    groups = [points[start : start + group] for start in range(0, len(points), group)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in groups]


def _axis(low: float, high: float, count: int, *, whole: bool = False) -> tuple[list[tuple[float, str]], float, float]:
    """Ticks at round values around [low, high], about `count` of them, and the axis' bounds."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):  # flat, as far as labels can tell
        margin = abs(low) * 0.1 or 1.0
        low, high = (low - 1, high + 1) if whole else (low - margin, high + margin)
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)
    if whole:
        step = max(step, 1.0)
        # The x axis ends where the data ends: a curve should fill its chart.
        first, last, bounds = math.ceil(low / step), math.floor(high / step), (low, high)
    else:
        first, last = math.floor(low / step), math.ceil(high / step)
        bounds = (first * step, last * step)
    digits = max(0, -math.floor(math.log10(step)))
    return [(number * step, f"{number * step:,.{digits}f}") for number in range(first, last + 1)], *bounds
