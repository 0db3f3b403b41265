"""Charts have round axes, can be read without colour, and survive figures of any size."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from zerojax.reporting.charts import (
    MOST_POINTS,
    Chart,
    Line,
    build_charts,
    choose_steps,
    choose_ticks,
    draw_chart,
    label_ticks,
)
from zerojax.reporting.history import Point, Series


def make_line(values, name="training", has_dots=False):
    return Line(name, [Point(step, value) for step, value in enumerate(values, 1)], has_dots)


def draw(*lines):
    figure = ET.fromstring(draw_chart(Chart("Loss", lines)))
    svg = figure.find("svg")
    assert svg is not None
    return figure, svg


def find_class(node, name):
    return [each for each in node.iter() if name in each.get("class", "").split()]


def test_a_long_line_is_drawn_by_means_within_a_band():
    values = [float(step % 2) for step in range(1, 10 * MOST_POINTS + 1)]
    _, svg = draw(make_line(values))
    (curve,) = find_class(svg, "line")
    points = [tuple(map(float, pair.split(","))) for pair in curve.get("points").split()]
    assert MOST_POINTS - 1 <= len(points) <= MOST_POINTS
    assert max(y for _, y in points) - min(y for _, y in points) < 20  # the means are near one half
    assert len(find_class(svg, "band")) == 1


def test_a_value_that_is_not_finite_is_a_cross_and_is_counted():
    figure, svg = draw(make_line([3.0, math.nan, 2.0, math.inf, 1.0]))
    assert len(find_class(svg, "cross")) == 2
    (key,) = find_class(figure, "key")
    assert "2 not finite, first at step 2" in "".join(key.itertext())
    assert "2 values are not finite" in svg.attrib["aria-label"]


def test_a_chart_says_its_curves_in_words():
    _, svg = draw(make_line([3.0, 1.0, 2.0]), make_line([4.0, 2.5], "validation", True))
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == (
        "Loss over steps. training: 3 at step 1, least 1 at step 2, last 2 at step 3. "
        "validation: 4 at step 1, least 2.5 at step 2, last 2.5 at step 2."
    )


def test_lines_differ_without_colour():
    figure, svg = draw(make_line([3.0, 1.0]), make_line([4.0, 2.5], "validation", True))
    assert [line.get("class") for line in find_class(svg, "line")] == ["line s0", "line s1"]
    assert {dot.get("class") for dot in find_class(svg, "dot")} == {"dot s1"}
    samples = find_class(figure, "key")[0]
    assert [line.get("class") for line in find_class(samples, "line")] == ["line s0", "line s1"]


def test_both_axes_have_numbers():
    _, svg = draw(make_line([3.0, 1.0, 2.0]))
    words = [node.text for node in svg.iter("text")]
    assert words == ["1.0", "1.5", "2.0", "2.5", "3.0", "1", "2", "3", "step"]


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [1.0, 1.0],
        [1e300, 2.0],
        [1e99, -1e99],
        [5e-324, 0.0],
        [1e16, 1e16 + 2],
        [1e6, 1000100.0],
        [math.nan, 1.0],
        [math.inf, 1.0],
    ],
)
def test_any_values_can_be_drawn(values):
    _, svg = draw(make_line(values))
    for node in svg.iter():
        for text in node.attrib.values():
            assert not re.search(r"\b(nan|inf)\b", text.partition("Loss over")[0]), text


@pytest.mark.parametrize("high", [0.1, 1.0, 3.3, 12.0, 1e-9, 1e9])
def test_ticks_are_round_and_have_different_labels(high):
    ticks = choose_ticks(0.0, high)
    assert ticks[0] <= 0.0
    assert ticks[-1] >= high * (1 - 1e-9)
    assert 2 <= len(ticks) <= 7
    assert len({*label_ticks(ticks).values()}) == len(ticks)


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (3e7, ["0 M", "10 M", "20 M", "30 M"]),
        (0.003, ["0.000", "0.001", "0.002", "0.003"]),
        (20_000, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (3e-5, ["0", "1e-05", "2e-05", "3e-05"]),
        (3e20, ["0", "1e+20", "2e+20", "3e+20"]),
    ],
)
def test_labels_of_ticks_are_short(high, labels):
    assert list(label_ticks(choose_ticks(0.0, high)).values()) == labels


@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [
        (7, 7, [7]),
        (1, 3, [1, 2, 3]),
        (1, 500, [100, 200, 300, 400, 500]),
        (301, 303, [301, 302, 303]),
    ],
)
def test_steps_of_the_axis_are_whole_and_round(first, last, steps):
    assert choose_steps(first, last) == steps


def test_charts_without_figures_are_left_out_and_the_models_own_are_drawn():
    series = {
        "train/loss": Series([(1, 3.0), (2, 2.0)]),
        "train/accuracy": Series([(1, 0.1), (2, 0.2)]),
        "train/skipped_steps": Series([(1, 0.0), (2, 0.0)]),
        "train/grad_norm": Series([(1, math.nan), (2, math.nan)]),
        "validation/loss": Series([(2, 2.5)]),
    }
    charts = build_charts(series)
    assert [chart.heading for chart in charts] == ["Loss", "accuracy"]
    assert [line.name for line in charts[0].lines] == ["training", "validation"]


def test_names_of_figures_are_escaped():
    assert "<b>" not in draw_chart(Chart("<b>&", [make_line([1.0, 2.0], "<b>&")]))
