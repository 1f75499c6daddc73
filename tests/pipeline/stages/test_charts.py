"""Charts: every point lies inside the plot, in proportion, and ticks are round numbers around the data."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.charts import MOST_POINTS, bar, line_chart

NUMBERS = st.floats(-1e9, 1e9, allow_subnormal=False)


def chart(points: list[tuple[float, float]]) -> Any:
    return line_chart({"loss": points}, x_label="step", y_label="loss")


def placed(found: Any) -> list[tuple[float, float]]:
    [line] = found["lines"]
    return [tuple(map(float, pair.split(","))) for pair in line["points"].split()]


@given(st.lists(NUMBERS, min_size=1, max_size=30))
def test_points_and_ticks_are_inside(values: list[float]) -> None:
    found = chart(list(enumerate(values)))
    for x, y in placed(found):
        assert found["left"] <= x <= found["right"]
        assert found["top"] - 0.1 <= y <= found["bottom"] + 0.1
    ticks = [tick["at"] for tick in found["y_ticks"]]
    assert 2 <= len(ticks) <= 7
    assert len({tick["label"] for tick in found["y_ticks"]}) == len(ticks)


def test_larger_is_higher_and_later_is_further_right() -> None:
    (x1, y1), (x2, y2), (x3, y3) = placed(chart([(0, 1.0), (50, 2.0), (100, 4.0)]))
    assert x1 < x2 < x3
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y1 > y2 > y3
    assert y2 - y3 == pytest.approx(2 * (y1 - y2), abs=0.3)


def test_round_ticks() -> None:
    found = line_chart({"a": [(0, 0.471), (3000, 0.4829)]}, x_label="step", y_label="ndcg@10")
    assert found is not None
    assert [tick["label"] for tick in found["y_ticks"]] == ["0.470", "0.475", "0.480", "0.485"]
    assert [tick["label"] for tick in found["x_ticks"]] == ["0", "1,000", "2,000", "3,000"]


def test_an_axis_of_steps_ends_where_the_data_ends() -> None:
    """A resumed run's curve begins in the middle."""
    found = line_chart({"a": [(1500, 1.0), (4200, 2.0)]}, x_label="step", y_label="loss")
    assert found is not None
    assert [tick["label"] for tick in found["x_ticks"]] == ["2,000", "3,000", "4,000"]


def test_nothing_to_draw() -> None:
    assert chart([]) is None
    assert chart([(1, math.nan), (2, math.inf)]) is None


def test_single_point_and_flat_line() -> None:
    assert len(placed(chart([(10, 0.5)]))) == 1
    assert len(placed(chart([(10, 0.0), (20, 0.0)]))) == 2


def test_many_points_are_averaged() -> None:
    found = chart([(step, float(step % 2)) for step in range(10 * MOST_POINTS)])
    assert found["averaged"] == 10
    points = placed(found)
    assert len(points) == MOST_POINTS
    assert len({y for _, y in points}) == 1


def test_bars_stay_visible_and_inside() -> None:
    whole, tail = bar(0, 100, 0, 100), bar(100, 100, 0, 100)
    assert (whole["left"], whole["width"]) == (0, 100)
    assert tail["width"] > 0
    assert tail["left"] + tail["width"] <= 100
    assert bar(5, 5, 5, 5)["width"] > 0
