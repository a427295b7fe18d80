"""Figures show what they were given, whatever that is, in SVG that any reader takes."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from coderepairrl.report.plots import Baseline, Panel, Series, figure

numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> ElementTree.Element:
    assert "nan" not in svg and "inf" not in svg
    return ElementTree.fromstring(svg)


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


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
