"""Figures show what they were given, whatever that is, in SVG that any reader takes."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coderepairrl.report.plots import Baseline, Panel, Series, ema, figure, forest
from coderepairrl.report.plots.scale import thin, ticks

numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> ElementTree.Element:
    assert "nan" not in svg and "inf" not in svg
    return ElementTree.fromstring(svg)


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@given(numbers, numbers)
def test_ticks_are_round_and_cover(a: float, b: float) -> None:
    low, high = sorted((a, b))
    marks = ticks(low, high)
    unseen = max(1e-300, 1e-6 * max(abs(low), abs(high)))  # below 1e-300 a difference may be no float: drawn as zero
    assert marks[0] <= low + unseen and marks[-1] >= high - unseen
    assert marks == sorted(set(marks)) and 2 <= len(marks) <= 12


@given(st.lists(st.none() | numbers, min_size=1, max_size=50), st.floats(0.001, 1.0))
def test_smoothing_stays_among_the_values_and_keeps_gaps(values: list[float | None], alpha: float) -> None:
    smooth = ema(values, alpha)
    known = [value for value in values if value is not None]
    assert [value is None for value in smooth] == [value is None for value in values]
    for value in smooth:
        if value is not None:
            slack = 1e-9 * max(map(abs, known))
            assert min(known) - slack <= value <= max(known) + slack


def test_the_first_half_percent_is_left_out() -> None:
    smooth = ema([100.0] * 5 + [0.0] * 995, 0.01)
    assert smooth[:5] == [None] * 5 and smooth[5:] == [0.0] * 995
    with pytest.raises(ValueError):
        ema([1.0], 0.0)


@example([5e-324], "line", None)
@given(st.lists(numbers, max_size=40), st.sampled_from(["line", "stack"]), st.none() | st.floats(0.01, 1))
def test_any_values_make_a_figure(values: list[float], kind: str, alpha: float | None) -> None:
    ys = [None if at % 7 == 3 else abs(value) if kind == "stack" else value for at, value in enumerate(values)]
    series = Series("a", range(len(ys)), ys, alpha=alpha)
    panel = Panel("title", [series, Series("none", [0.0], [math.nan])], kind=kind)  # type: ignore[arg-type]
    for standalone in (False, True):
        root = drawn(figure([panel, panel, panel], columns=2, standalone=standalone))
        assert "title" in texts(root)
        assert ("not measured" in texts(root)) == (not series.points)


def test_hostile_names_are_text() -> None:
    evil = "</svg><script>alert(1)</script>\x00\x1b\u202e&\"'"
    svg = figure([Panel(evil, [Series(evil, [1], [1.0])], note=evil, baselines=[Baseline(evil, 0.5)])], standalone=True)
    assert "<script" not in svg and "\u202e" not in svg
    assert sum("<script>" in text for text in texts(drawn(svg))) == 4


def test_intervals_baselines_and_both_schemes_are_drawn() -> None:
    held = Series("held out", [0, 10], [0.2, 0.7], 1, low=[0.1, 0.6], high=[0.3, 0.8])
    panel = Panel("reward", [Series("training", range(11), [0.1 * x for x in range(11)], alpha=0.3), held])
    svg = figure([panel], standalone=True)
    root = drawn(svg)
    assert "prefers-color-scheme: dark" in svg and root.get("width")
    assert len(list(root.iter(f"{SVG}circle"))) == 3  # two points, and the legend's
    assert len([e for e in root.iter(f"{SVG}path") if e.get("class") == "whisker"]) == 2
    assert not [e for e in root.iter(f"{SVG}path") if e.get("class") == "base"]
    points = Series("held out", [0, 10], [0.2, 0.7], 1, low=[None, 0.6], high=[None, 0.8])
    one = drawn(figure([Panel("reward", [points])]))
    assert len([e for e in one.iter(f"{SVG}path") if e.get("class") == "whisker"]) == 1, "too few: a point without"
    assert len([e for e in one.iter(f"{SVG}circle") if e.get("class") == "dot"]) == 3, "two points, and the legend's"
    lined = drawn(figure([Panel("reward", panel.series, baselines=[Baseline("junk edit", 0.7, 0)])], standalone=True))
    assert "junk edit" in texts(lined)
    assert len([e for e in lined.iter(f"{SVG}path") if e.get("class") == "base"]) == 1


def test_stacked_bars_end_where_the_sum_is() -> None:
    parts = [Series(str(at), [1, 2], [1.0 + at, 2.0], at) for at in range(3)]
    root = drawn(figure([Panel("seconds", parts, kind="stack")]))
    bars = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "stacked"]
    heights = [float(e.get("height") or 0) for e in bars]
    assert len(bars) == 6 and sum(heights[:3]) == pytest.approx(sum(heights[3:]), abs=0.2)
    assert heights[2] == pytest.approx(3 * heights[0], abs=0.3)


def test_pointing_at_a_step_shows_its_values() -> None:
    svg = figure([Panel("reward", [Series("a", [1, 2], [0.25, 0.5])])])
    assert {"step 1", "a 0.25", "step 2", "a 0.5"} <= set(texts(drawn(svg)))
    assert not re.search("<script|onmouse", svg)


def test_long_runs_stay_small_and_keep_their_extremes() -> None:
    values = [math.sin(x / 50) + (30.0 if x == 7_777 else 0.0) for x in range(20_000)]
    assert (7_777.0, values[7_777]) in thin([(float(x), y) for x, y in enumerate(values)])
    assert len(figure([Panel("x", [Series("a", range(20_000), values, alpha=0.01)])])) < 60_000


def test_forest_is_coloured_by_the_whole_interval() -> None:
    assert 'class="forest better"' in forest(0.2, 0.1, 0.3, 0.5)
    assert 'class="forest worse"' in forest(0.2, 0.1, 0.3, 0.5, better="less")
    assert 'class="forest neither"' in forest(0.2, -0.1, 0.3, 0.5)
    alone = forest(0.2, None, None, 0.5)
    assert 'class="forest neither"' in alone and "whisker" not in alone and "too few" in alone
    with pytest.raises(ValueError):
        forest(0.0, 0.0, 0.0, 0.0)
